//! Level Zero: the loader, the drivers behind it, and their GPUs. [`device`] registers memory with one of them.
//!
//! Drivers are those that `zeInitDrivers` starts and those that `zeInit` starts: neither call knows all. A device's
//! ordinal is its place among the GPUs of all drivers; other kinds of device have none.
#![allow(unsafe_code)] // calls the loader

mod device;
mod sys;

use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::load::{absent, unavailable};
use super::{Device, DeviceId, Found, Method, Vendor};
use crate::error::{Error, Result};
use crate::os;
use device::{Way, XpuDevice};
use sys::{Code, Functions, Handle};

const TITLE: &str = "Level Zero";

pub(super) static VENDOR: Vendor = Vendor {
    kind: "xpu",
    title: TITLE,
    library: "libze_loader.so.1",
    find: |library| Ok(Loader::load(library)?.gpus()?.into_iter().map(|gpu| gpu.found).collect()),
    open,
    open_import: Some(open_import),
    current: |_| Ok(None), // Level Zero has no current device
};

/// Opens a device by the best method that runtimes take for pinned memory.
fn open(library: &str, ordinal: u32) -> Result<Arc<dyn Device>> {
    let (loader, gpu, _) = Loader::load(library)?.pick(ordinal)?;
    let way = match &gpu.found.method {
        Ok(Method::ExternalMemory) => Way::ExternalMemory,
        Ok(Method::HostPointer) => Way::HostPointer,
        Ok(_) => return Err(gpu.refuses(IMPORT_ONLY)),
        Err(why) => return Err(gpu.refuses(why)),
    };
    let device = XpuDevice::open(loader.functions, &gpu, way, vec![gpu.found.id])?;
    device.test()?;
    Ok(Arc::new(device))
}

/// Opens a device for `zexDriverImportExternalPointer`: copies are fast on all devices of its driver, but kernels must
/// not touch the memory, and runtimes do not know it. So somebody has to ask for it.
pub(super) fn open_import(library: &str, ordinal: u32) -> Result<Arc<dyn Device>> {
    let (loader, gpu, siblings) = Loader::load(library)?.pick(ordinal)?;
    let import = loader.functions.import(gpu.driver).ok_or_else(|| gpu.refuses(NO_IMPORT))?;
    Ok(Arc::new(XpuDevice::open(loader.functions, &gpu, Way::Import(import), siblings)?))
}

const IMPORT_ONLY: &str = "its driver has neither the extension ZE_extension_external_memmap_sysmem nor the \
                           host-pointer flag; update it (to 25.44 or later), or use register=\"try\", which imports";
const NO_IMPORT: &str = "its driver has no zexDriverImportExternalPointer";
const NO_METHOD: &str = "its driver can neither map nor import host memory; update it (to 25.44 or later)";

/// The first release of Intel's driver with the host-pointer flag is 22.30; the API tells the build only, 1.3.23789.
const FIRST_BUILD_WITH_HOST_POINTER: u32 = 23_789;

/// The loader, and the drivers that it started.
struct Loader {
    functions: Functions,
    drivers: Vec<Handle>,
}

/// A GPU as a driver lists it.
struct Gpu {
    driver: Handle,
    device: Handle,
    largest: u64,
    found: Found,
}

impl Gpu {
    fn refuses(&self, why: &str) -> Error {
        Error::unsupported(format!("registering memory with {}", self.found.id), why)
    }
}

impl Loader {
    /// Loads the library and starts the drivers, which may be done as often as one likes.
    fn load(library: &str) -> Result<Self> {
        let functions = Functions::load(library)?;
        refuse_forked_child()?;
        let (mut drivers, new_answer) = new_drivers(&functions);
        let old_answer = add_old_drivers(&functions, &mut drivers);
        if drivers.is_empty() {
            // "Uninitialized" is what a missing driver, a missing device and a lack of rights give alike.
            let refuse = if matches!(old_answer, sys::SUCCESS | sys::UNINITIALIZED) { absent } else { unavailable };
            return Err(refuse(TITLE, &init_refusal(library, new_answer, old_answer)));
        }
        let process = os::fork_generation();
        let _ = FIRST_PROCESS.compare_exchange(NOBODY, process, Ordering::Relaxed, Ordering::Relaxed);
        Ok(Self { functions, drivers })
    }

    /// The GPUs of all drivers. A driver that cannot list its devices hides those of no other.
    fn gpus(&self) -> Result<Vec<Gpu>> {
        let mut gpus: Vec<Gpu> = Vec::new();
        let mut refusal = None;
        for &driver in &self.drivers {
            match self.gpus_of(driver, gpus.len()) {
                Ok(more) => gpus.extend(more),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        match refusal {
            Some(error) if gpus.is_empty() => Err(error),
            _ => Ok(gpus),
        }
    }

    fn gpus_of(&self, driver: Handle, first_ordinal: usize) -> Result<Vec<Gpu>> {
        // SAFETY: the driver's handle is from the loader, and the driver fills as many places as it is told.
        let devices = list(null_mut(), |count, places| unsafe { (self.functions.devices)(driver, count, places) });
        let devices = devices.map_err(|code| failure("zeDeviceGet", 0, None, code))?;
        let method = self.method(driver)?;
        let mut gpus = Vec::new();
        for device in devices {
            let mut properties = sys::DeviceProperties::new();
            // SAFETY: the device's handle is the driver's, and the driver fills the struct that we own.
            let code = unsafe { (self.functions.device_properties)(device, &raw mut properties) };
            check("zeDeviceGetProperties", 0, None, code)?;
            if properties.kind == sys::GPU {
                let ordinal = (first_ordinal + gpus.len()) as u32;
                let id = DeviceId { kind: VENDOR.kind, ordinal, uuid: properties.uuid };
                let found = Found { id, name: properties.name(), method: method.clone() };
                gpus.push(Gpu { driver, device, largest: properties.largest_allocation, found });
            }
        }
        Ok(gpus)
    }

    /// How memory can be registered with a driver's devices. The host-pointer flag cannot be asked for: it is tried
    /// when a device is opened.
    fn method(&self, driver: Handle) -> Result<std::result::Result<Method, String>> {
        let none = sys::ExtensionProperties::new();
        // SAFETY: the driver's handle is from the loader, and the driver fills as many places as it is told.
        let extensions =
            list(none, |count, places| unsafe { (self.functions.driver_extensions)(driver, count, places) })
                .map_err(|code| failure("zeDriverGetExtensionProperties", 0, None, code))?;
        let mut properties = sys::DriverProperties::new();
        // SAFETY: the driver's handle is from the loader, and the driver fills the struct that we own.
        let code = unsafe { (self.functions.driver_properties)(driver, &raw mut properties) };
        check("zeDriverGetProperties", 0, None, code)?;
        Ok(if extensions.iter().any(|extension| extension.is(sys::EXTERNAL_MEMORY)) {
            Ok(Method::ExternalMemory)
        } else if may_have_host_pointer(properties.version) {
            Ok(Method::HostPointer)
        } else {
            self.functions.import(driver).map(|_| Method::Import).ok_or_else(|| NO_METHOD.to_owned())
        })
    }

    /// A device by its ordinal, and all devices of its driver.
    fn pick(self, ordinal: u32) -> Result<(Self, Gpu, Vec<DeviceId>)> {
        let mut gpus = self.gpus()?;
        if ordinal as usize >= gpus.len() {
            let count = gpus.len();
            let reason = format!("there is no xpu:{ordinal}; the drivers have {count} GPUs (ZE_AFFINITY_MASK?)");
            return Err(if count == 0 { absent(TITLE, &reason) } else { unavailable(TITLE, &reason) });
        }
        let driver = gpus[ordinal as usize].driver;
        let siblings = gpus.iter().filter(|gpu| gpu.driver == driver).map(|gpu| gpu.found.id).collect();
        Ok((self, gpus.swap_remove(ordinal as usize), siblings))
    }
}

/// The process that started a driver, by its fork generation; before that, nobody.
static FIRST_PROCESS: AtomicU64 = AtomicU64::new(NOBODY);
const NOBODY: u64 = u64::MAX;

/// A driver that was started before a fork answers with nothing in the child, or never.
fn refuse_forked_child() -> Result<()> {
    let first = FIRST_PROCESS.load(Ordering::Relaxed);
    if first == NOBODY || first == os::fork_generation() {
        return Ok(());
    }
    Err(unavailable(TITLE, "it cannot be used in a process forked after it was initialized; use spawn"))
}

/// Drivers as the newer way to start them has them, and its answer; `None` where the loader is older than it.
fn new_drivers(functions: &Functions) -> (Vec<Handle>, Option<Code>) {
    let Some(init_drivers) = functions.init_drivers else { return (Vec::new(), None) };
    let wanted = sys::Description::of_drivers(sys::DRIVERS_OF_GPUS);
    // SAFETY: the description lives through the call, and the loader fills as many places as it is told.
    match list(null_mut(), |count, places| unsafe { init_drivers(count, places, &raw const wanted) }) {
        Ok(drivers) => (drivers, Some(sys::SUCCESS)),
        Err(code) => (Vec::new(), Some(code)),
    }
}

/// Adds the drivers that only the older way to start them has, and gives its answer. Where it fails that is final: the
/// loader may list drivers all the same, and crashes in them.
fn add_old_drivers(functions: &Functions, drivers: &mut Vec<Handle>) -> Code {
    // SAFETY: 0 asks for all drivers.
    let code = unsafe { (functions.init)(0) };
    if code != sys::SUCCESS {
        return code;
    }
    // SAFETY: the loader fills as many places as it is told.
    match list(null_mut(), |count, places| unsafe { (functions.drivers)(count, places) }) {
        Ok(listed) => {
            let new: Vec<Handle> = listed.into_iter().filter(|driver| !drivers.contains(driver)).collect();
            drivers.extend(new);
            sys::SUCCESS
        }
        Err(code) => code,
    }
}

/// Reads a list as Level Zero gives it: first the count, then so many places are filled.
fn list<T: Copy>(empty: T, read: impl Fn(*mut u32, *mut T) -> Code) -> std::result::Result<Vec<T>, Code> {
    let mut count = 0;
    let mut code = read(&raw mut count, null_mut());
    let mut places = vec![empty; count as usize];
    if code == sys::SUCCESS && count > 0 {
        code = read(&raw mut count, places.as_mut_ptr());
        places.truncate(count as usize);
    }
    if code == sys::SUCCESS { Ok(places) } else { Err(code) }
}

/// Whether a driver may have the host-pointer flag. Intel's drivers are of version 1.x.build, a byte, a byte and two;
/// what others do with the flag shows when it is tried.
fn may_have_host_pointer(version: u32) -> bool {
    version >> 24 != 1 || version & 0xffff >= FIRST_BUILD_WITH_HOST_POINTER
}

/// Why no driver starts, in words.
fn init_refusal(library: &str, new_answer: Option<Code>, old_answer: Code) -> String {
    let new_answer = new_answer.map_or_else(|| "is not there".to_owned(), answer);
    format!(
        "{library} is there, but no driver starts: zeInitDrivers {new_answer}; zeInit {}; is a GPU's driver installed \
         (libze_intel_gpu.so.1), and may this user open /dev/dri/renderD*?",
        answer(old_answer)
    )
}

fn answer(code: Code) -> String {
    let none = if code == sys::SUCCESS { ", and found none" } else { "" };
    format!("answered {}{none}", sys::code_name(code))
}

fn check(call: &'static str, bytes: usize, device: Option<DeviceId>, code: Code) -> Result<()> {
    if code == sys::SUCCESS { Ok(()) } else { Err(failure(call, bytes, device, code)) }
}

fn failure(call: &'static str, bytes: usize, device: Option<DeviceId>, code: Code) -> Error {
    let (code_name, advice) = (sys::code_name(code), advice(code, bytes));
    let device = device.map(|id| id.to_string().into());
    Error::Driver { driver: TITLE, call, code: i64::from(code), code_name: code_name.into(), device, bytes, advice }
}

/// What helps against a refusal; of so many bytes, if it is about a range.
fn advice(code: Code, bytes: usize) -> &'static str {
    match code {
        sys::OUT_OF_HOST_MEMORY if bytes > 0 => {
            "the driver says so of memory that is not on a page boundary, of memory that the kernel cannot map for the \
             device (read-only, a file's, not there), and when it is short of memory; pin plain memory, or less of it"
        }
        sys::OUT_OF_DEVICE_MEMORY => {
            "the device is short of memory, or the range is registered with another device of this process"
        }
        sys::DEVICE_LOST => "the device hung or was removed; see the kernel's log, and start the process again",
        sys::UNINITIALIZED => "the driver is shutting down",
        sys::HANDLE_OBJECT_IN_USE => "somebody else imported a part of this range; release it there first",
        sys::INVALID_ARGUMENT => "the driver cannot map this kind of memory, or does not know it; pin plain memory",
        sys::UNSUPPORTED_SIZE => "the size is above the device's maxMemAllocSize; register smaller pieces",
        sys::INVALID_ENUMERATION | sys::UNSUPPORTED_ENUMERATION => {
            "the driver or the validation layer does not know this way to register; update it, or turn the layer off"
        }
        _ => "see the code's text in the Level Zero specification",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_as_long_as_the_second_answer_says() {
        let grow_and_shrink = |count: *mut u32, places: *mut u8| {
            // SAFETY: `list` passes its own count, and as many places as the first answer said.
            unsafe {
                *count = if places.is_null() { 3 } else { 2 };
                (0..if places.is_null() { 0 } else { 2 }).for_each(|place| *places.add(place) = 7);
            }
            sys::SUCCESS
        };
        assert_eq!(list(0, grow_and_shrink), Ok(vec![7, 7]));
        assert_eq!(list(0_u8, |_, _| sys::UNINITIALIZED), Err(sys::UNINITIALIZED));
        assert_eq!(list(0_u8, |_, _| sys::SUCCESS), Ok(vec![]));
    }

    #[test]
    fn old_builds_of_intel_have_no_host_pointer_flag() {
        assert!(may_have_host_pointer(0x0103_6013)); // 22.43, build 24595
        assert!(!may_have_host_pointer(0x0103_5000));
        assert!(may_have_host_pointer(1)); // not Intel's way to count
    }

    #[test]
    fn one_code_has_three_meanings_and_all_are_told() {
        let text = failure("zeMemAllocHost", 4096, None, sys::OUT_OF_HOST_MEMORY).to_string();
        for part in ["zeMemAllocHost", "0x70000002", "page boundary", "cannot map", "short of memory"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }

    #[test]
    fn a_failed_start_is_told_with_both_answers() {
        let text = init_refusal("lib.so", None, sys::UNINITIALIZED);
        assert!(text.contains("zeInitDrivers is not there; zeInit answered ZE_RESULT_ERROR_UNINITIALIZED"), "{text}");
        let text = init_refusal("lib.so", Some(sys::SUCCESS), 0x7800_0003);
        assert!(text.contains("zeInitDrivers answered ZE_RESULT_SUCCESS, 0x00000000, and found none"), "{text}");
    }
}
