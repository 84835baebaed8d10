//! An open device: one context for it alone, and ranges that its driver is made to know at their own addresses.
//!
//! A driver's word is not taken for it. Before registering, the range must be unknown to the driver; afterwards it must
//! be known, at its own address; and once it is freed it must be forgotten, or else it lingers: drivers keep freed
//! host memory for a while to give it to others, and some do so with memory that was never theirs.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use super::sys::{self, Code, Description, ExternalMemory, Functions, Handle, Import};
use super::{Gpu, TITLE, check, failure};
use crate::driver::engine::not_forgotten;
use crate::driver::load::unavailable;
use crate::driver::{Device, DeviceId, Ending, Method, Request, Sizes};
use crate::error::{Error, Result};
use crate::os;
use crate::region::count_leaked;

/// Freed memory of more than 256 MiB is kept by no driver, and losing a refused piece of this size costs little.
const USUAL: usize = 1 << 30;

/// How ranges are registered.
pub(super) enum Way {
    ExternalMemory,
    HostPointer,
    Import(Import),
}

pub(super) struct XpuDevice {
    functions: Functions,
    context: Handle,
    id: DeviceId,
    /// The devices that profit from a registration.
    served: Vec<DeviceId>,
    way: Way,
    sizes: Sizes,
    /// The process that the context belongs to.
    keeps_context: AtomicBool,
    fork_generation: u64,
}

// SAFETY: Level Zero's handles may be used from any thread.
unsafe impl Send for XpuDevice {}
// SAFETY: as above; the calls that are made here may be made from several threads at a time.
unsafe impl Sync for XpuDevice {}

impl XpuDevice {
    /// Makes a context for the device.
    pub(super) fn open(functions: Functions, gpu: &Gpu, way: Way, served: Vec<DeviceId>) -> Result<Self> {
        let page = os::page_size();
        let largest = usize::try_from(gpu.largest).unwrap_or(usize::MAX) / page * page;
        if largest == 0 {
            return Err(gpu.refuses("its driver allows no allocation (maxMemAllocSize is less than a page)"));
        }
        let (mut device, mut context) = (gpu.device, null_mut());
        let wanted = Description::of_context();
        // SAFETY: both handles are from the loader; the driver reads one device, and fills the pointer that we own.
        let code =
            unsafe { (functions.create_context)(gpu.driver, &raw const wanted, 1, &raw mut device, &raw mut context) };
        check("zeContextCreateEx", 0, Some(gpu.found.id), code)?;
        let sizes = Sizes { largest, usual: USUAL.min(largest) };
        Ok(Self {
            functions,
            context,
            id: gpu.found.id,
            served,
            way,
            sizes,
            keeps_context: AtomicBool::new(false),
            fork_generation: os::fork_generation(),
        })
    }

    /// Registers a page of ours, where only trying shows whether the driver can.
    pub(super) fn test(&self) -> Result<()> {
        if !matches!(self.way, Way::HostPointer) {
            return Ok(());
        }
        let len = os::page_size();
        let page = os::Mapping { hugetlb: None, charge: true };
        let address = os::map(len, page).map_err(|source| Error::Os { call: "mmap", bytes: len, source })?;
        let request = Request { address, len, read_only: false };
        let registered = self.register(&request);
        let may_unmap = match &registered {
            Ok(()) => match self.unregister(&request) {
                Ok(ending) => ending == Ending::Done,
                Err(error) => {
                    self.keep_context();
                    count_leaked(len);
                    return Err(error);
                }
            },
            Err(refusal) => !matches!(refusal, Error::Lingering { .. }),
        };
        if may_unmap {
            // SAFETY: the page is ours, and the driver does not know it. One that lingers stays mapped for good.
            let _ = unsafe { os::unmap(address, len) };
        }
        registered.map_err(|error| {
            let why = format!(
                "its driver has no ZE_extension_external_memmap_sysmem, and failed the test of the host-pointer flag \
                 ({error}); update it (to 25.44 or later), or use register=\"try\", which imports"
            );
            Error::unsupported(format!("registering memory with {}", self.id), why)
        })
    }

    /// Nobody must call the driver in a forked child, or while the loader is being torn down with the process.
    fn expect_driver(&self) -> Result<()> {
        if self.fork_generation != os::fork_generation() {
            return Err(Error::Forked);
        }
        // SAFETY: takes nothing.
        let in_teardown = self.functions.is_in_teardown.is_some_and(|is_in_teardown| unsafe { is_in_teardown() });
        if in_teardown { Err(unavailable(TITLE, "the process is ending, and the driver with it")) } else { Ok(()) }
    }

    /// Refuses what the driver would take, or would refuse in other words on each platform.
    fn expect_registrable(&self, request: &Request) -> Result<()> {
        let Request { address, len, read_only } = *request;
        let page = os::page_size();
        if address == 0 || len == 0 || !address.is_multiple_of(page) || !len.is_multiple_of(page) {
            return Err(Error::invalid(
                "range",
                format!("{address:#x}+{len} is not made of whole pages of {page} bytes"),
            ));
        }
        if len > self.sizes.largest || address.checked_add(len).is_none() {
            let largest = self.sizes.largest;
            return Err(Error::invalid("range", format!("{len} bytes; {} registers at most {largest}", self.id)));
        }
        if read_only && !matches!(self.way, Way::ExternalMemory) {
            let why = format!("{} takes no read-only memory; map it writable, or copy it", self.method().call());
            return Err(Error::unsupported(format!("registering read-only memory with {}", self.id), why));
        }
        Ok(())
    }

    /// Refuses a range in which somebody has registered or allocated memory: the driver would take it, and lose both
    /// when one is freed.
    fn expect_unknown(&self, request: &Request) -> Result<()> {
        let Request { address, len, .. } = *request;
        for probe in [address, address + len / 2, address + len - 1] {
            if let Some(owner) = self.owner(probe)? {
                let reason = format!(
                    "{address:#x}+{len}: {}'s driver knows {owner} already; unregister it there first (after which \
                     some drivers keep it for ten more seconds)",
                    self.id
                );
                return Err(Error::invalid("range", reason));
            }
        }
        Ok(())
    }

    /// What the driver knows at an address, in words.
    fn owner(&self, address: usize) -> Result<Option<String>> {
        let memory = self.memory_at(address).map_err(|code| self.failure("zeMemGetAllocProperties", 0, code))?;
        let (kind, (base, len)) = match memory {
            sys::MEMORY_UNKNOWN => match self.import_at(address) {
                Ok(None) => return Ok(None),
                Ok(Some(base)) => return Ok(Some(format!("memory that was imported at {base:#x}"))),
                Err(code) => return Err(self.failure("zexDriverGetHostPointerBaseAddress", 0, code)),
            },
            sys::MEMORY_HOST | sys::MEMORY_HOST_IMPORTED => ("host", self.extent_at(address)),
            sys::MEMORY_DEVICE => ("device", self.extent_at(address)),
            sys::MEMORY_SHARED => ("shared", self.extent_at(address)),
            _ => ("some", self.extent_at(address)),
        };
        Ok(Some(format!("{base:#x}+{len} as {kind} memory")))
    }

    fn memory_at(&self, address: usize) -> std::result::Result<u32, Code> {
        let (mut properties, mut device) = (sys::AllocationProperties::new(), null_mut());
        let address = address as *const c_void;
        // SAFETY: the context is open; the driver looks the address up, and fills what we own.
        let code = unsafe { (self.functions.properties)(self.context, address, &raw mut properties, &raw mut device) };
        if code == sys::SUCCESS { Ok(properties.memory) } else { Err(code) }
    }

    /// First byte and length of the allocation that holds an address; of the address alone where the driver is silent.
    fn extent_at(&self, address: usize) -> (usize, usize) {
        let (mut base, mut len) = (null_mut(), 0);
        let asked = address as *const c_void;
        // SAFETY: as for `memory_at`.
        match unsafe { (self.functions.extent)(self.context, asked, &raw mut base, &raw mut len) } {
            sys::SUCCESS => (base as usize, len),
            _ => (address, 1),
        }
    }

    /// The first byte of the import that holds an address. Only asked where ranges are imported.
    fn import_at(&self, address: usize) -> std::result::Result<Option<usize>, Code> {
        let Way::Import(import) = &self.way else { return Ok(None) };
        let mut base = null_mut();
        // SAFETY: the driver's own handle; it looks the address up, and fills the pointer that we own.
        match unsafe { (import.base)(import.driver, address as *mut c_void, &raw mut base) } {
            sys::SUCCESS if base.is_null() => Ok(None),
            sys::SUCCESS => Ok(Some(base as usize)),
            sys::INVALID_ARGUMENT => Ok(None),
            code => Err(code),
        }
    }

    /// Whether the driver knows the address as one that is registered.
    fn has_registered(&self, address: usize) -> bool {
        match &self.way {
            Way::Import(_) => matches!(self.import_at(address), Ok(Some(_))),
            _ => matches!(self.memory_at(address), Ok(sys::MEMORY_HOST | sys::MEMORY_HOST_IMPORTED)),
        }
    }

    /// Lets the driver map the range, or import it.
    fn map(&self, request: &Request) -> Result<()> {
        let Request { address, len, read_only } = *request;
        let memory = ExternalMemory::new(address, len);
        let read_only = if read_only { sys::READ_ONLY } else { 0 };
        let (wanted, mut pointer) = match &self.way {
            Way::ExternalMemory => (Description::of_host_allocation(read_only, Some(&memory)), null_mut()),
            Way::HostPointer => (Description::of_host_allocation(sys::USE_HOST_POINTER, None), address as *mut c_void),
            Way::Import(import) => {
                // SAFETY: the range is mapped, and stays so until it is released: `pinned` sees to that.
                let code = unsafe { (import.add)(import.driver, address as *mut c_void, len) };
                return check("zexDriverImportExternalPointer", len, Some(self.id), code);
            }
        };
        // SAFETY: as above; what is described lives through the call, and the driver fills the pointer that we own.
        let code = unsafe {
            (self.functions.allocate)(self.context, &raw const wanted, len, os::page_size(), &raw mut pointer)
        };
        check("zeMemAllocHost", len, Some(self.id), code)?;
        if pointer as usize == address { Ok(()) } else { Err(self.refuse_elsewhere(pointer, address)) }
    }

    /// Gives back what the driver allocated instead of mapping the range.
    fn refuse_elsewhere(&self, pointer: *mut c_void, address: usize) -> Error {
        // SAFETY: the driver's own allocation, which nobody has seen. Where it does not go, it is the driver's loss.
        unsafe { (self.functions.free)(self.context, pointer) };
        let why = format!(
            "zeMemAllocHost answered with memory at {pointer:p} instead of {address:#x}: the driver does not map \
             memory that is there already; update it"
        );
        Error::unsupported(format!("registering memory with {}", self.id), why)
    }

    /// Takes the range from the driver. To be called once only: a second call may free what is somebody else's by now.
    fn free(&self, request: &Request) -> (&'static str, Code) {
        let pointer = request.address as *mut c_void;
        if let Way::Import(import) = &self.way {
            // SAFETY: the base address of an import of ours, with the driver's own handle.
            return ("zexDriverReleaseImportedPointer", unsafe { (import.release)(import.driver, pointer) });
        }
        // SAFETY: the base address of an allocation that was made in this context, which is still open.
        ("zeMemFree", unsafe { (self.functions.free)(self.context, pointer) })
    }

    fn failure(&self, call: &'static str, bytes: usize, code: Code) -> Error {
        failure(call, bytes, Some(self.id), code)
    }
}

impl Device for XpuDevice {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn method(&self) -> Method {
        match self.way {
            Way::ExternalMemory => Method::ExternalMemory,
            Way::HostPointer => Method::HostPointer,
            Way::Import(_) => Method::Import,
        }
    }

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn alignment(&self) -> usize {
        os::page_size()
    }

    fn is_too_large(&self, refusal: &Error) -> bool {
        let codes = [sys::OUT_OF_HOST_MEMORY, sys::UNSUPPORTED_SIZE].map(i64::from);
        matches!(refusal, Error::Driver { code, .. } if codes.contains(code))
    }

    fn serves(&self, kind: &str, ordinal: u32) -> bool {
        self.served.iter().any(|id| id.kind == kind && id.ordinal == ordinal)
    }

    fn register(&self, request: &Request) -> Result<()> {
        self.expect_driver()?;
        self.expect_registrable(request)?;
        self.expect_unknown(request)?;
        self.map(request)?;
        let (first, last) = (request.address, request.address + request.len - 1);
        // A driver that neither knows the range nor gives it back may have mapped it all the same: then it counts as
        // registered, so that its pages stay.
        if (self.has_registered(first) && self.has_registered(last)) || self.free(request).1 != sys::SUCCESS {
            return Ok(());
        }
        let why = format!("{} succeeded, but then the driver did not know the range; update it", self.method().call());
        // What it has freed it may keep for reuse all the same.
        if self.has_forgotten(request) {
            Err(Error::unsupported(format!("registering memory with {}", self.id), why))
        } else {
            Err(not_forgotten(self.id, request, why))
        }
    }

    fn unregister(&self, request: &Request) -> Result<Ending> {
        if self.expect_driver().is_err() {
            return Ok(Ending::Lingering);
        }
        match self.free(request) {
            (_, sys::SUCCESS) if self.has_forgotten(request) => Ok(Ending::Done),
            // The loader says the latter while the process is being torn down; then the pages stay to the end.
            (_, sys::SUCCESS | sys::UNINITIALIZED) => Ok(Ending::Lingering),
            (call, code) => Err(self.failure(call, request.len, code)),
        }
    }

    fn has_forgotten(&self, request: &Request) -> bool {
        self.expect_driver().is_ok()
            && match &self.way {
                Way::Import(_) => self.import_at(request.address) == Ok(None),
                _ => self.memory_at(request.address) == Ok(sys::MEMORY_UNKNOWN),
            }
    }
}

impl XpuDevice {
    /// From now on the context stays: it has memory that the driver would not take back.
    fn keep_context(&self) {
        self.keeps_context.store(true, Ordering::Relaxed);
    }
}

impl Drop for XpuDevice {
    fn drop(&mut self) {
        if !self.keeps_context.load(Ordering::Relaxed) && self.expect_driver().is_ok() {
            // SAFETY: made in `open`, and whoever registered with it is gone.
            unsafe { (self.functions.destroy_context)(self.context) };
        }
    }
}

impl std::fmt::Debug for XpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("XpuDevice").field("id", &self.id).field("method", &self.method()).finish_non_exhaustive()
    }
}
