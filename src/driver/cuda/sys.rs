//! The functions of NVIDIA's driver API (`libcuda.so.1`) that are used, and nothing of the runtime API, whose
//! failures leave an error behind that a later call of somebody else reports. Names, types and values are cuda.h's.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

use libloading::Library;

use crate::driver::load;
use crate::error::Result;

pub(super) type Context = *mut c_void;
pub(super) type Event = *mut c_void;
pub(super) type Stream = usize;
pub(super) type Code = c_uint;

pub(super) const SUCCESS: Code = 0;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const NOT_INITIALIZED: Code = 3;
pub(super) const DEINITIALIZED: Code = 4;
pub(super) const STUB_LIBRARY: Code = 34;
pub(super) const NO_DEVICE: Code = 100;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const INVALID_HANDLE: Code = 400;
pub(super) const NOT_READY: Code = 600;
pub(super) const ALREADY_REGISTERED: Code = 712;
pub(super) const NOT_REGISTERED: Code = 713;
pub(super) const NOT_SUPPORTED: Code = 801;
pub(super) const DRIVER_MISMATCH: Code = 803;
pub(super) const COMPAT_NOT_SUPPORTED: Code = 804;
pub(super) const CAPTURE_IMPLICIT: Code = 906;

/// The registration counts in every context of the process.
pub(super) const REGISTER_PORTABLE: c_uint = 0x1;
pub(super) const REGISTER_READ_ONLY: c_uint = 0x8;

/// The event keeps no time, which makes it cheap.
pub(super) const EVENT_DISABLE_TIMING: c_uint = 0x2;
/// This thread's calls break no capture, and none forbids them.
pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;
/// `CUstreamCaptureStatus` of a stream that is not being captured.
pub(super) const CAPTURE_NONE: c_int = 0;
/// The highest name of a default stream: that of each thread, one name for many.
pub(super) const STREAM_PER_THREAD: usize = 2;

/// Device attributes.
pub(super) const HOST_REGISTER_SUPPORTED: c_int = 99;
pub(super) const PAGEABLE_ACCESS_BY_HOST_PAGE_TABLES: c_int = 100;
pub(super) const READ_ONLY_REGISTER_SUPPORTED: c_int = 113;

macro_rules! functions {
    ($(#[$about:meta])* $name:ident {
        $($(#[$meta:meta])* $field:ident: fn($($argument:ty),*) = $symbol:literal $(or $older:literal)?;)*
    }) => {
        $(#[$about])*
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $($(#[$meta])* pub(super) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl $name {
            /// Looks the functions up; where a symbol is missing, its older name is tried.
            fn find(library: &Library) -> Result<Self> {
                Ok(Self {
                    // SAFETY: the signatures are those of cuda.h, and the library stays for good.
                    $($field: unsafe { load::symbol("CUDA", library, &[$symbol $(, $older)?])? },)*
                })
            }
        }
    };
}

functions! {
    /// What registering memory takes.
    Memory {
        init: fn(c_uint) = c"cuInit";
        device_count: fn(*mut c_int) = c"cuDeviceGetCount";
        device: fn(*mut c_int, c_int) = c"cuDeviceGet";
        device_name: fn(*mut c_char, c_int, c_int) = c"cuDeviceGetName";
        device_uuid: fn(*mut [u8; 16], c_int) = c"cuDeviceGetUuid_v2" or c"cuDeviceGetUuid";
        device_attribute: fn(*mut c_int, c_int, c_int) = c"cuDeviceGetAttribute";
        retain_context: fn(*mut Context, c_int) = c"cuDevicePrimaryCtxRetain";
        context_state: fn(c_int, *mut c_uint, *mut c_int) = c"cuDevicePrimaryCtxGetState";
        release_context: fn(c_int) = c"cuDevicePrimaryCtxRelease_v2" or c"cuDevicePrimaryCtxRelease";
        push_context: fn(Context) = c"cuCtxPushCurrent_v2" or c"cuCtxPushCurrent";
        pop_context: fn(*mut Context) = c"cuCtxPopCurrent_v2" or c"cuCtxPopCurrent";
        current_context: fn(*mut Context) = c"cuCtxGetCurrent";
        current_device: fn(*mut c_int) = c"cuCtxGetDevice";
        register: fn(*mut c_void, usize, c_uint) = c"cuMemHostRegister_v2" or c"cuMemHostRegister";
        unregister: fn(*mut c_void) = c"cuMemHostUnregister";
        error_name: fn(Code, *mut *const c_char) = c"cuGetErrorName";
    }
}

functions! {
    /// What following the work of streams takes besides. All since CUDA 10.1.
    Events {
        create: fn(*mut Event, c_uint) = c"cuEventCreate";
        record: fn(Event, Stream) = c"cuEventRecord";
        query: fn(Event) = c"cuEventQuery";
        destroy: fn(Event) = c"cuEventDestroy_v2" or c"cuEventDestroy";
        stream_context: fn(Stream, *mut Context) = c"cuStreamGetCtx";
        is_capturing: fn(Stream, *mut c_int) = c"cuStreamIsCapturing";
        exchange_capture_mode: fn(*mut c_int) = c"cuThreadExchangeStreamCaptureMode";
    }
}

/// A driver's functions. Its library stays loaded for good: it has threads and exit handlers of its own.
pub(super) struct Functions {
    pub(super) memory: Memory,
    /// Or why there are none.
    pub(super) events: std::result::Result<Events, String>,
    /// Since CUDA 12.0: an identity that no later stream or context has. The driver uses handles again.
    pub(super) stream_id: Option<unsafe extern "C" fn(Stream, *mut u64) -> Code>,
    pub(super) context_id: Option<unsafe extern "C" fn(Context, *mut u64) -> Code>,
}

impl Functions {
    pub(super) fn load(path: &str) -> Result<Self> {
        let library = ManuallyDrop::new(load::library("CUDA", path)?);
        let events = Events::find(&library).map_err(|error| error.to_string());
        // SAFETY: the signature is that of cuda.h, and the library stays for good.
        let stream_id = unsafe { load::optional_symbol(&library, c"cuStreamGetId") };
        // SAFETY: as above.
        let context_id = unsafe { load::optional_symbol(&library, c"cuCtxGetId") };
        Ok(Self { memory: Memory::find(&library)?, events, stream_id, context_id })
    }
}
