//! The dozen functions of Level Zero's loader (`libze_loader.so.1`) that are used, with their structs and numbers.
//! Names, layouts and values are those of `ze_api.h`, except for what only Intel's driver has: the three `zexDriver`
//! functions, and [`USE_HOST_POINTER`].

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{ManuallyDrop, transmute};
use std::ptr::{null, null_mut};

use libloading::Library;

use crate::driver::load;
use crate::error::Error;

pub(super) type Code = u32;
pub(super) type Handle = *mut c_void;

pub(super) const SUCCESS: Code = 0;
pub(super) const DEVICE_LOST: Code = 0x7000_0001;
pub(super) const OUT_OF_HOST_MEMORY: Code = 0x7000_0002;
pub(super) const OUT_OF_DEVICE_MEMORY: Code = 0x7000_0003;
pub(super) const UNINITIALIZED: Code = 0x7800_0001;
pub(super) const INVALID_ARGUMENT: Code = 0x7800_0004;
pub(super) const HANDLE_OBJECT_IN_USE: Code = 0x7800_0006;
pub(super) const UNSUPPORTED_SIZE: Code = 0x7800_0009;
pub(super) const INVALID_ENUMERATION: Code = 0x7800_000c;
pub(super) const UNSUPPORTED_ENUMERATION: Code = 0x7800_000d;

/// A device's type.
pub(super) const GPU: u32 = 1;
/// The drivers that `zeInitDrivers` starts.
pub(super) const DRIVERS_OF_GPUS: u32 = 1;

/// Whose memory an address is, in a driver's books.
pub(super) const MEMORY_UNKNOWN: u32 = 0;
pub(super) const MEMORY_HOST: u32 = 1;
pub(super) const MEMORY_DEVICE: u32 = 2;
pub(super) const MEMORY_SHARED: u32 = 3;
pub(super) const MEMORY_HOST_IMPORTED: u32 = 4;

/// Flags of a host allocation.
pub(super) const READ_ONLY: u32 = 1 << 4;
/// The pointer that comes out of the allocation goes in as the memory that it shall be made of.
pub(super) const USE_HOST_POINTER: u32 = 1 << 30;

/// The extension that makes a host allocation of memory that is there already.
pub(super) const EXTERNAL_MEMORY: &CStr = c"ZE_extension_external_memmap_sysmem";

const DRIVER_PROPERTIES: u32 = 0x1;
const DEVICE_PROPERTIES: u32 = 0x3;
const CONTEXT: u32 = 0xd;
const HOST_ALLOCATION: u32 = 0x16;
const ALLOCATION_PROPERTIES: u32 = 0x17;
const INIT_DRIVERS: u32 = 0x2_0021;
const EXTERNAL_MEMORY_OF_SYSTEM: u32 = 0x2_0037;

/// What structs start with.
#[derive(Clone, Copy)]
#[repr(C)]
struct Header {
    structure: u32,
    next: *const c_void,
}

impl Header {
    const fn new(structure: u32) -> Self {
        Self { structure, next: null() }
    }
}

/// What is wanted of a context, of a host allocation, or of the drivers to start.
#[repr(C)]
pub(super) struct Description {
    header: Header,
    flags: u32,
}

impl Description {
    pub(super) const fn of_context() -> Self {
        Self { header: Header::new(CONTEXT), flags: 0 }
    }

    pub(super) const fn of_drivers(flags: u32) -> Self {
        Self { header: Header::new(INIT_DRIVERS), flags }
    }

    /// The memory outlives the description.
    pub(super) fn of_host_allocation(flags: u32, memory: Option<&ExternalMemory>) -> Self {
        let next = memory.map_or(null(), |memory| (&raw const *memory).cast());
        Self { header: Header { next, ..Header::new(HOST_ALLOCATION) }, flags }
    }
}

/// The memory that a host allocation shall be made of.
#[repr(C)]
pub(super) struct ExternalMemory {
    header: Header,
    address: usize,
    len: u64,
}

impl ExternalMemory {
    pub(super) const fn new(address: usize, len: usize) -> Self {
        Self { header: Header::new(EXTERNAL_MEMORY_OF_SYSTEM), address, len: len as u64 }
    }
}

/// What a driver knows of an address.
#[repr(C)]
pub(super) struct AllocationProperties {
    header: Header,
    pub(super) memory: u32,
    id: u64,
    page_size: u64,
}

impl AllocationProperties {
    pub(super) const fn new() -> Self {
        Self { header: Header::new(ALLOCATION_PROPERTIES), memory: MEMORY_UNKNOWN, id: 0, page_size: 0 }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ExtensionProperties {
    name: [c_char; 256],
    version: u32,
}

impl ExtensionProperties {
    pub(super) const fn new() -> Self {
        Self { name: [0; 256], version: 0 }
    }

    pub(super) fn is(&self, name: &CStr) -> bool {
        text(&self.name) == name.to_string_lossy()
    }
}

#[repr(C)]
pub(super) struct DriverProperties {
    header: Header,
    uuid: [u8; 16],
    pub(super) version: u32,
}

impl DriverProperties {
    pub(super) const fn new() -> Self {
        Self { header: Header::new(DRIVER_PROPERTIES), uuid: [0; 16], version: 0 }
    }
}

#[repr(C)]
pub(super) struct DeviceProperties {
    header: Header,
    /// [`GPU`], or something else.
    pub(super) kind: u32,
    /// Vendor, device, flags, sub-device, clock.
    identity: [u32; 5],
    pub(super) largest_allocation: u64,
    /// Contexts, priorities, threads, lanes, slices.
    shape: [u32; 7],
    timer_resolution: u64,
    timestamp_bits: [u32; 2],
    pub(super) uuid: [u8; 16],
    name: [c_char; 256],
}

impl DeviceProperties {
    pub(super) const fn new() -> Self {
        Self {
            header: Header::new(DEVICE_PROPERTIES),
            kind: 0,
            identity: [0; 5],
            largest_allocation: 0,
            shape: [0; 7],
            timer_resolution: 0,
            timestamp_bits: [0; 2],
            uuid: [0; 16],
            name: [0; 256],
        }
    }

    pub(super) fn name(&self) -> String {
        text(&self.name)
    }
}

/// A text in an array of fixed size, which a zero ends before the array does.
fn text(characters: &[c_char]) -> String {
    let bytes: Vec<u8> = characters.iter().map(|&character| character as u8).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

macro_rules! functions {
    (
        required { $($field:ident: fn($($argument:ty),*) = $symbol:literal;)* }
        optional { $($extra:ident: fn($($input:ty),*) -> $output:ty = $name:literal;)* }
    ) => {
        /// The loader's functions, and the library that holds them. It stays loaded: the loader starts drivers once,
        /// and threads and handles of theirs would not outlive it.
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Code,)*
            $(pub(super) $extra: Option<unsafe extern "C" fn($($input),*) -> $output>,)*
            _library: ManuallyDrop<Library>,
        }

        impl Functions {
            /// Loads the library and looks the functions up.
            pub(super) fn load(path: &str) -> Result<Self, Error> {
                let library = ManuallyDrop::new(load::library(super::TITLE, path)?);
                Ok(Self {
                    // SAFETY: the signatures are those of ze_api.h, and the library is never unloaded.
                    $($field: unsafe { load::symbol(super::TITLE, &library, &[$symbol])? },)*
                    // SAFETY: as above, and of ze_loader.h.
                    $($extra: unsafe { load::optional_symbol(&library, $name) },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    required {
        init: fn(u32) = c"zeInit";
        drivers: fn(*mut u32, *mut Handle) = c"zeDriverGet";
        driver_properties: fn(Handle, *mut DriverProperties) = c"zeDriverGetProperties";
        driver_extensions: fn(Handle, *mut u32, *mut ExtensionProperties) = c"zeDriverGetExtensionProperties";
        driver_function: fn(Handle, *const c_char, *mut *mut c_void) = c"zeDriverGetExtensionFunctionAddress";
        devices: fn(Handle, *mut u32, *mut Handle) = c"zeDeviceGet";
        device_properties: fn(Handle, *mut DeviceProperties) = c"zeDeviceGetProperties";
        create_context: fn(Handle, *const Description, u32, *mut Handle, *mut Handle) = c"zeContextCreateEx";
        destroy_context: fn(Handle) = c"zeContextDestroy";
        allocate: fn(Handle, *const Description, usize, usize, *mut *mut c_void) = c"zeMemAllocHost";
        free: fn(Handle, *mut c_void) = c"zeMemFree";
        properties: fn(Handle, *const c_void, *mut AllocationProperties, *mut Handle) = c"zeMemGetAllocProperties";
        extent: fn(Handle, *const c_void, *mut *mut c_void, *mut usize) = c"zeMemGetAddressRange";
    }
    optional {
        init_drivers: fn(*mut u32, *mut Handle, *const Description) -> Code = c"zeInitDrivers";
        translate: fn(c_int, Handle, *mut Handle) -> Code = c"zelLoaderTranslateHandle";
        is_in_teardown: fn() -> bool = c"zelCheckIsLoaderInTearDown";
    }
}

type ImportRange = unsafe extern "C" fn(Handle, *mut c_void, usize) -> Code;
type ReleaseRange = unsafe extern "C" fn(Handle, *mut c_void) -> Code;
type FindBase = unsafe extern "C" fn(Handle, *mut c_void, *mut *mut c_void) -> Code;

/// Functions of Intel's driver that make host memory known to it, for all its devices, and the driver's own handle.
pub(super) struct Import {
    pub(super) driver: Handle,
    pub(super) add: ImportRange,
    pub(super) release: ReleaseRange,
    pub(super) base: FindBase,
}

impl Functions {
    /// Finds a driver's import functions, if it has them all.
    pub(super) fn import(&self, driver: Handle) -> Option<Import> {
        let find = |name| self.driver_function(driver, name);
        let add = find(c"zexDriverImportExternalPointer")?;
        let release = find(c"zexDriverReleaseImportedPointer")?;
        let base = find(c"zexDriverGetHostPointerBaseAddress")?;
        let driver = self.without_loader(driver)?;
        // SAFETY: the functions of these names have these signatures in the driver's zex_driver.h.
        let (add, release, base) = unsafe {
            (
                transmute::<Handle, ImportRange>(add),
                transmute::<Handle, ReleaseRange>(release),
                transmute::<Handle, FindBase>(base),
            )
        };
        Some(Import { driver, add, release, base })
    }

    fn driver_function(&self, driver: Handle, name: &CStr) -> Option<Handle> {
        let mut function = null_mut();
        // SAFETY: the driver's handle is from the loader, and the driver fills the pointer that we own.
        let code = unsafe { (self.driver_function)(driver, name.as_ptr(), &raw mut function) };
        (code == SUCCESS && !function.is_null()).then_some(function)
    }

    /// The handle by which a driver knows itself. Where there are several drivers, the loader hands out its own
    /// instead, which a driver's function must not be given.
    fn without_loader(&self, driver: Handle) -> Option<Handle> {
        const HANDLE_OF_DRIVER: c_int = 0;
        let mut own = null_mut();
        // SAFETY: the handle is the loader's, and it fills the pointer that we own.
        let code = unsafe { self.translate?(HANDLE_OF_DRIVER, driver, &raw mut own) };
        (code == SUCCESS && !own.is_null()).then_some(own)
    }
}

/// A code's name in `ze_api.h`, and its number.
pub(super) fn code_name(code: Code) -> String {
    let name = match code {
        SUCCESS => "SUCCESS",
        DEVICE_LOST => "ERROR_DEVICE_LOST",
        OUT_OF_HOST_MEMORY => "ERROR_OUT_OF_HOST_MEMORY",
        OUT_OF_DEVICE_MEMORY => "ERROR_OUT_OF_DEVICE_MEMORY",
        0x7000_0006 => "ERROR_DEVICE_REQUIRES_RESET",
        0x7000_0007 => "ERROR_DEVICE_IN_LOW_POWER_STATE",
        0x7001_0000 => "ERROR_INSUFFICIENT_PERMISSIONS",
        0x7001_0001 => "ERROR_NOT_AVAILABLE",
        0x7002_0000 => "ERROR_DEPENDENCY_UNAVAILABLE",
        UNINITIALIZED => "ERROR_UNINITIALIZED",
        0x7800_0002 => "ERROR_UNSUPPORTED_VERSION",
        0x7800_0003 => "ERROR_UNSUPPORTED_FEATURE",
        INVALID_ARGUMENT => "ERROR_INVALID_ARGUMENT",
        0x7800_0005 => "ERROR_INVALID_NULL_HANDLE",
        HANDLE_OBJECT_IN_USE => "ERROR_HANDLE_OBJECT_IN_USE",
        0x7800_0007 => "ERROR_INVALID_NULL_POINTER",
        0x7800_0008 => "ERROR_INVALID_SIZE",
        UNSUPPORTED_SIZE => "ERROR_UNSUPPORTED_SIZE",
        0x7800_000a => "ERROR_UNSUPPORTED_ALIGNMENT",
        INVALID_ENUMERATION => "ERROR_INVALID_ENUMERATION",
        UNSUPPORTED_ENUMERATION => "ERROR_UNSUPPORTED_ENUMERATION",
        0x7800_001a => "ERROR_OVERLAPPING_REGIONS",
        0x7800_0020 => "ERROR_SURVIVABILITY_MODE_DETECTED",
        0x7800_0021 => "ERROR_ADDRESS_NOT_FOUND",
        0x7fff_fffe => "ERROR_UNKNOWN",
        _ => return format!("unknown code {code:#010x}"),
    };
    format!("ZE_RESULT_{name}, {code:#010x}")
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structs_are_laid_out_as_in_the_header() {
        assert_eq!((size_of::<Header>(), offset_of!(Header, next)), (16, 8));
        assert_eq!((size_of::<Description>(), offset_of!(Description, flags)), (24, 16));
        let memory = (offset_of!(ExternalMemory, address), offset_of!(ExternalMemory, len));
        assert_eq!((size_of::<ExternalMemory>(), memory), (32, (16, 24)));
        let properties = (offset_of!(AllocationProperties, memory), offset_of!(AllocationProperties, id));
        assert_eq!((size_of::<AllocationProperties>(), properties), (40, (16, 24)));
        assert_eq!(offset_of!(AllocationProperties, page_size), 32);
        assert_eq!((size_of::<ExtensionProperties>(), offset_of!(ExtensionProperties, version)), (260, 256));
        assert_eq!((size_of::<DriverProperties>(), offset_of!(DriverProperties, uuid)), (40, 16));
        assert_eq!(offset_of!(DriverProperties, version), 32);
    }

    #[test]
    fn a_device_is_laid_out_as_in_the_header() {
        assert_eq!(size_of::<DeviceProperties>(), 368);
        assert_eq!((offset_of!(DeviceProperties, kind), offset_of!(DeviceProperties, identity)), (16, 20));
        assert_eq!(offset_of!(DeviceProperties, largest_allocation), 40);
        assert_eq!((offset_of!(DeviceProperties, shape), offset_of!(DeviceProperties, timer_resolution)), (48, 80));
        assert_eq!(offset_of!(DeviceProperties, timestamp_bits), 88);
        assert_eq!((offset_of!(DeviceProperties, uuid), offset_of!(DeviceProperties, name)), (96, 112));
    }

    #[test]
    fn codes_have_their_names_and_numbers() {
        assert_eq!(code_name(OUT_OF_HOST_MEMORY), "ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY, 0x70000002");
        assert_eq!(code_name(0x7800_0021), "ZE_RESULT_ERROR_ADDRESS_NOT_FOUND, 0x78000021");
        assert_eq!(code_name(0x7fff_0000), "unknown code 0x7fff0000");
    }

    #[test]
    fn texts_end_at_the_first_zero_or_with_the_array() {
        let mut extension = ExtensionProperties::new();
        for (place, byte) in extension.name.iter_mut().zip(EXTERNAL_MEMORY.to_bytes()) {
            *place = *byte as c_char;
        }
        assert!(extension.is(EXTERNAL_MEMORY));
        assert!(!extension.is(c"ZE_extension_external_memmap"));
        assert_eq!(text(&[b'x' as c_char; 3]), "xxx");
    }
}
