/* Three entry points that Intel's SYCL runtime wants at load time and Debian's Level Zero loader (1.8.12) lacks. They
 * answer ZE_RESULT_ERROR_UNSUPPORTED_FEATURE, whatever they are given. */
#define UNSUPPORTED 0x78000003u

unsigned zeDeviceGetRootDevice(void) { return UNSUPPORTED; }
unsigned zeCommandListHostSynchronize(void) { return UNSUPPORTED; }
unsigned zeImageViewCreateExt(void) { return UNSUPPORTED; }
