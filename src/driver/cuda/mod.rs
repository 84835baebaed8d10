//! CUDA: `cuMemHostRegister` through the driver API, in the primary context of one device.
//!
//! Registrations are portable: one serves every CUDA device. The primary context is retained while the device is open
//! here or a registration or an event of ours lives, and is current on the calling thread only during a call. Calls that
//! CUDA forbids while somebody captures a graph are made so that they break no capture.
#![allow(unsafe_code)] // calls the driver

mod event;
mod sys;

use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

use super::load::{absent, unavailable};
use super::{Device, DeviceId, Ending, Event, Found, Method, Request, Sizes, Stream, Vendor};
use crate::error::{Error, Result};
use crate::{limits, os};
use event::IdleEvents;
use sys::{Code, Context, Events, Functions};

const TITLE: &str = "CUDA";
const GIB: usize = 1 << 30;

/// NVIDIA's driver keeps 16 bytes a page in one kernel allocation, which fails from here on (driver 580 and later).
const LARGEST: usize = 512 * GIB - GIB;
const USUAL: usize = 64 * GIB;
/// Linux 6.11 to 6.13 pin at most this much in one call.
const LARGEST_ON_LINUX_6_11: usize = 2 * GIB;

pub(super) static VENDOR: Vendor = Vendor {
    kind: "cuda",
    title: TITLE,
    library: "libcuda.so.1",
    find: |library| Driver::load(library)?.find(),
    open: |library, ordinal| Ok(Arc::new(CudaDevice::open(Driver::load(library)?, ordinal)?)),
    open_import: None,
    current: |library| Ok(Driver::load(library)?.current()),
};

struct Driver {
    functions: Functions,
}

impl Driver {
    /// Loads the library and initializes the driver, which may be done as often as one likes.
    fn load(library: &str) -> Result<Self> {
        let functions = Functions::load(library)?;
        // SAFETY: the first call that the driver asks for.
        match unsafe { (functions.memory.init)(0) } {
            sys::SUCCESS => Ok(Self { functions }),
            code @ sys::NO_DEVICE => Err(absent(TITLE, &init_refusal(library, code))),
            code => Err(unavailable(TITLE, &init_refusal(library, code))),
        }
    }

    fn find(&self) -> Result<Vec<Found>> {
        let mut count = 0;
        // SAFETY: the driver fills the number that we own.
        self.check("cuDeviceGetCount", 0, None, unsafe { (self.functions.memory.device_count)(&raw mut count) })?;
        (0..count).map(|ordinal| self.describe(ordinal)).collect()
    }

    fn describe(&self, ordinal: c_int) -> Result<Found> {
        let (device, id) = self.identify(ordinal)?;
        let mut name = [0; 256];
        // SAFETY: the driver writes at most the length that it is told, and ends with a zero.
        let code = unsafe { (self.functions.memory.device_name)(name.as_mut_ptr(), name.len() as c_int - 1, device) };
        self.check("cuDeviceGetName", 0, Some(id), code)?;
        // SAFETY: the last byte is still zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        Ok(Found { id, name, method: self.method(device).map(|()| Method::HostRegister) })
    }

    fn identify(&self, ordinal: c_int) -> Result<(c_int, DeviceId)> {
        let mut device = 0;
        // SAFETY: the driver fills the number that we own.
        self.check("cuDeviceGet", 0, None, unsafe { (self.functions.memory.device)(&raw mut device, ordinal) })?;
        let mut uuid = [0; 16];
        // SAFETY: the driver fills the sixteen bytes that we own.
        self.check("cuDeviceGetUuid", 0, None, unsafe { (self.functions.memory.device_uuid)(&raw mut uuid, device) })?;
        Ok((device, DeviceId { kind: VENDOR.kind, ordinal: ordinal as u32, uuid }))
    }

    /// Why ranges cannot be registered with a device.
    fn method(&self, device: c_int) -> std::result::Result<(), String> {
        if self.attribute(device, sys::HOST_REGISTER_SUPPORTED) != 0 {
            return Ok(());
        }
        Err(if self.attribute(device, sys::PAGEABLE_ACCESS_BY_HOST_PAGE_TABLES) != 0 {
            "the device reads host memory through the host's own page tables, and needs no registration; use devices=None"
        } else {
            "the device does not support registering host memory (attribute HOST_REGISTER_SUPPORTED is 0)"
        }
        .to_owned())
    }

    /// An attribute; 0 where the driver does not know it.
    fn attribute(&self, device: c_int, attribute: c_int) -> c_int {
        let mut value = 0;
        // SAFETY: the driver fills the number that we own.
        let code = unsafe { (self.functions.memory.device_attribute)(&raw mut value, attribute, device) };
        if code == sys::SUCCESS { value } else { 0 }
    }

    /// The device of the context that is current on this thread.
    fn current(&self) -> Option<u32> {
        let (mut context, mut device) = (null_mut(), 0);
        // SAFETY: the driver fills the pointer that we own.
        let known = unsafe { (self.functions.memory.current_context)(&raw mut context) } == sys::SUCCESS;
        if !known || context.is_null() {
            return None;
        }
        // SAFETY: the driver fills the number that we own.
        let known = unsafe { (self.functions.memory.current_device)(&raw mut device) } == sys::SUCCESS;
        known.then_some(device as u32)
    }

    fn relax_capture(&self) -> Option<Relaxed<'_>> {
        let events = self.functions.events.as_ref().ok()?;
        let mut mode = sys::CAPTURE_MODE_RELAXED;
        // SAFETY: the driver swaps the number that we own.
        let swapped = unsafe { (events.exchange_capture_mode)(&raw mut mode) } == sys::SUCCESS;
        swapped.then_some(Relaxed { events, callers: mode })
    }

    fn check(&self, call: &'static str, bytes: usize, device: Option<DeviceId>, code: Code) -> Result<()> {
        if code == sys::SUCCESS {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the driver points to a text of its own, or to nothing.
        unsafe { (self.functions.memory.error_name)(code, &raw mut name) };
        let code_name = if name.is_null() {
            "an unknown code".to_owned()
        } else {
            // SAFETY: the driver's texts live as long as the driver.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        };
        let (device, advice) = (device.map(|id| id.to_string().into()), advice(code));
        Err(Error::Driver {
            driver: TITLE,
            call,
            code: i64::from(code),
            code_name: code_name.into(),
            device,
            bytes,
            advice,
        })
    }
}

/// An open device: the driver, and the device's primary context.
struct CudaDevice {
    driver: Driver,
    id: DeviceId,
    device: c_int,
    context: sys::Context,
    read_only: bool,
    sizes: Sizes,
    idle_events: IdleEvents,
    fork_generation: u64,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for CudaDevice {}

impl CudaDevice {
    fn open(driver: Driver, ordinal: u32) -> Result<Self> {
        let count = driver.find()?.len();
        if ordinal as usize >= count {
            let reason = format!("there is no cuda:{ordinal}; the driver has {count} devices (CUDA_VISIBLE_DEVICES?)");
            return Err(unavailable(TITLE, &reason));
        }
        let (device, id) = driver.identify(ordinal as c_int)?;
        driver.method(device).map_err(|why| Error::unsupported(format!("registering memory with {id}"), why))?;
        let read_only = driver.attribute(device, sys::READ_ONLY_REGISTER_SUPPORTED) != 0;
        let fork_generation = os::fork_generation();
        let mut context = null_mut();
        // SAFETY: the driver fills the pointer that we own.
        let code = unsafe { (driver.functions.memory.retain_context)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", 0, Some(id), code)?;
        let (sizes, idle_events) = (sizes_on(limits::kernel_release()), IdleEvents::default());
        Ok(Self { driver, id, device, context, read_only, sizes, idle_events, fork_generation })
    }

    /// Runs a call with our context current, and puts the caller's back.
    fn in_context(&self, call: &'static str, bytes: usize, run: impl FnOnce() -> Code) -> Result<()> {
        self.check_process("registering memory")?;
        let _relaxed = self.driver.relax_capture();
        let _entered = self.enter(self.context, bytes)?;
        self.driver.check(call, bytes, Some(self.id), run())
    }

    fn check_process(&self, what: &str) -> Result<()> {
        if self.is_ours() {
            return Ok(());
        }
        let why = "the device was opened by the parent process, and CUDA does not outlive a fork; use spawn";
        Err(Error::unsupported(format!("{what} with {} in a forked child", self.id), why))
    }

    /// Whether this is the process that opened the device.
    fn is_ours(&self) -> bool {
        self.fork_generation == os::fork_generation()
    }

    /// Makes a context current while the result lives.
    fn enter(&self, context: Context, bytes: usize) -> Result<Entered<'_>> {
        // SAFETY: the context is one of the driver's; what it is worth, the driver says.
        let pushed = unsafe { (self.driver.functions.memory.push_context)(context) };
        self.driver.check("cuCtxPushCurrent", bytes, Some(self.id), pushed)?;
        Ok(Entered(&self.driver))
    }
}

/// A context that was made current; the caller's is back when this is dropped.
struct Entered<'a>(&'a Driver);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = null_mut();
        // SAFETY: pops what was pushed.
        unsafe { (self.0.functions.memory.pop_context)(&raw mut popped) };
    }
}

/// The calling thread's calls neither break a capture nor are they forbidden by one, while this lives.
struct Relaxed<'a> {
    events: &'a Events,
    callers: c_int,
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // SAFETY: the driver swaps the number that we own.
        unsafe { (self.events.exchange_capture_mode)(&raw mut self.callers) };
    }
}

impl Device for CudaDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn method(&self) -> Method {
        Method::HostRegister
    }

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn alignment(&self) -> usize {
        1 // the driver keeps byte ranges, and locks the pages that they touch
    }

    fn refusal_of_read_only(&self) -> Option<i64> {
        Some(i64::from(sys::INVALID_VALUE))
    }

    fn is_too_large(&self, refusal: &Error) -> bool {
        matches!(refusal, Error::Driver { code, .. } if *code == i64::from(sys::OUT_OF_MEMORY))
    }

    fn serves(&self, kind: &str, _ordinal: u32) -> bool {
        kind == self.id.kind // registrations are portable
    }

    fn register(&self, request: &Request) -> Result<()> {
        let read_only = if request.read_only { sys::REGISTER_READ_ONLY } else { 0 };
        if request.read_only && !self.read_only {
            let why = "the device lacks READ_ONLY_HOST_REGISTER_SUPPORTED; map the memory writable, or copy it";
            return Err(Error::unsupported(format!("registering read-only memory with {}", self.id), why));
        }
        self.in_context("cuMemHostRegister", request.len, || {
            let flags = sys::REGISTER_PORTABLE | read_only;
            // SAFETY: the range is mapped, and stays so until it is unregistered: `pinned` sees to that.
            unsafe { (self.driver.functions.memory.register)(request.address as *mut _, request.len, flags) }
        })
    }

    fn unregister(&self, request: &Request) -> Result<Ending> {
        let _relaxed = self.driver.relax_capture();
        // Any context will do for this call, or none. So it also works while the process is being torn down.
        // SAFETY: the base address of a registration of ours.
        match unsafe { (self.driver.functions.memory.unregister)(request.address as *mut _) } {
            // A driver that is gone, or that does not know the range, maps it no more.
            sys::SUCCESS | sys::DEINITIALIZED | sys::NOT_REGISTERED => Ok(Ending::Done),
            code => self.driver.check("cuMemHostUnregister", request.len, Some(self.id), code).map(|()| Ending::Done),
        }
    }

    fn has_forgotten(&self, _: &Request) -> bool {
        true
    }

    fn record(self: Arc<Self>, stream: Stream) -> Result<Arc<dyn Event>> {
        event::record(self, stream)
    }

    fn current_ordinal(&self) -> Option<u32> {
        self.driver.current()
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if !self.is_ours() {
            return; // the context is the parent's
        }
        self.destroy_idle_events();
        // SAFETY: retained once in `open`. An answer that the driver is gone is fine.
        unsafe { (self.driver.functions.memory.release_context)(self.device) };
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevice").field("id", &self.id).finish_non_exhaustive()
    }
}

fn sizes_on(kernel: (u32, u32)) -> Sizes {
    let largest = if ((6, 11)..=(6, 13)).contains(&kernel) { LARGEST_ON_LINUX_6_11 } else { LARGEST };
    Sizes { largest, usual: USUAL.min(largest) }
}

/// Why the driver does not start, in words.
fn init_refusal(library: &str, code: Code) -> String {
    let reason = match code {
        sys::NO_DEVICE => "it finds no device (is CUDA_VISIBLE_DEVICES empty, or the container without --gpus?)",
        sys::STUB_LIBRARY => "this is the toolkit's stub library; take its folder off LD_LIBRARY_PATH",
        sys::DRIVER_MISMATCH => "library and kernel module are of different versions; reload the module, or reboot",
        sys::COMPAT_NOT_SUPPORTED => "the forward-compatibility package does not support this GPU; remove it",
        sys::NOT_INITIALIZED => "CUDA cannot be used in a process forked after it was initialized; use spawn",
        _ => "the driver does not start; see what nvidia-smi says",
    };
    format!("{library}: cuInit answered {code}: {reason}")
}

/// What helps against a refusal.
fn advice(code: Code) -> &'static str {
    match code {
        sys::OUT_OF_MEMORY => {
            "the driver cannot pin more: WSL and Windows allow a fraction of the RAM, other systems what is free; pin \
             less, or use register=\"try\""
        }
        sys::NOT_SUPPORTED => {
            "with confidential computing no host memory can be registered; use register=\"off\" or devices=None"
        }
        sys::ALREADY_REGISTERED => "somebody else registered a part of this range; unregister it there first",
        sys::INVALID_VALUE => {
            "the range is not plain memory (device memory, I/O memory, or memory from cudaMallocHost)"
        }
        sys::DEINITIALIZED => "the driver is shutting down",
        sys::INVALID_HANDLE => "there is no such stream (any more); pass a live torch.cuda.Stream, or its handle",
        _ => "see the code's text in NVIDIA's documentation of the driver API",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_kernels_pin_at_most_two_gibibytes_a_call() {
        assert_eq!(sizes_on((6, 10)), Sizes { largest: LARGEST, usual: USUAL });
        for minor in 11..=13 {
            assert_eq!(sizes_on((6, minor)), Sizes { largest: 2 * GIB, usual: 2 * GIB });
        }
        assert_eq!(sizes_on((6, 14)).largest, LARGEST);
    }
}
