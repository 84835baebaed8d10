//! Device drivers: what they have in common. A driver is one folder with a [`Vendor`], and one line in [`VENDORS`].
//!
//! A driver offers to find devices, to open one, to register a range with it and unregister it again, and, where it
//! can, to tell when queued work is done. All else (order, rollback, accounting, who owns what) is above. A library or a
//! symbol that is missing is a reason in words, and nothing of a driver is loaded before somebody asks.

mod cuda;
pub mod engine;
mod level_zero;
mod load;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{Error, Result};
use crate::fork::PerProcess;

/// Every driver, in the order in which "auto" asks them.
pub static VENDORS: [&Vendor; 2] = [&cuda::VENDOR, &level_zero::VENDOR];

type Open = fn(library: &str, ordinal: u32) -> Result<Arc<dyn Device>>;

/// One driver.
#[derive(Debug)]
pub struct Vendor {
    /// What its devices are called: "cuda", "xpu".
    pub kind: &'static str,
    /// What it is called in messages.
    pub title: &'static str,
    /// The soname of its library.
    pub library: &'static str,
    /// Lists the devices. Loads and initializes the library, and makes no context.
    find: fn(library: &str) -> Result<Vec<Found>>,
    /// Opens a device for registration.
    open: Open,
    /// Opens a device for [`Method::Import`], where the driver has such a thing.
    open_import: Option<Open>,
    /// The ordinal of the device that the calling thread works on, where the driver knows such a thing.
    current: fn(library: &str) -> Result<Option<u32>>,
}

/// A device by its driver's kind and order. The UUID is comparable within one process only.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// "cuda" or "xpu".
    pub kind: &'static str,
    /// Place in the driver's order.
    pub ordinal: u32,
    /// The driver's identity of the device.
    pub uuid: [u8; 16],
}

/// What discovery tells of a device.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which one.
    pub id: DeviceId,
    /// The vendor's name for it.
    pub name: String,
    /// How ranges are registered with it, or why they cannot be.
    pub method: std::result::Result<Method, String>,
}

/// How a range is made known to a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// `cuMemHostRegister`.
    HostRegister,
    /// `zeMemAllocHost` with the external-memory extension.
    ExternalMemory,
    /// `zeMemAllocHost` with the driver's experimental host-pointer flag.
    HostPointer,
    /// `zexDriverImportExternalPointer`: copies are fast on all devices, but runtimes take the memory for unknown.
    Import,
}

/// How large single registrations may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// More than this in one call is refused by the driver or the kernel.
    pub largest: usize,
    /// Memory that may be cut is registered in pieces of this size: long calls stall the driver's other users.
    pub usual: usize,
}

/// A range, as a driver is asked to register it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// First byte.
    pub address: usize,
    /// Bytes.
    pub len: usize,
    /// The memory is mapped read-only.
    pub read_only: bool,
}

/// How an unregistration ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The driver knows the range no more.
    Done,
    /// The driver said yes, but still knows the range: it must neither be unmapped nor used before it forgets.
    Lingering,
}

/// An opened device. It holds whatever registering needs, and so does every registration made with it.
pub trait Device: Send + Sync + fmt::Debug {
    /// Which one.
    fn id(&self) -> DeviceId;
    /// How ranges are registered.
    fn method(&self) -> Method;
    /// How large registrations may be.
    fn sizes(&self) -> Sizes;
    /// What addresses and lengths must be multiples of.
    fn alignment(&self) -> usize;
    /// The code that refuses memory which cannot be written, when the request does not say so. `None`: such memory is
    /// taken for writable, so the request must always say.
    fn refusal_of_read_only(&self) -> Option<i64> {
        None
    }
    /// Whether a refusal may be one of the size, so that a smaller piece is worth a try.
    fn is_too_large(&self, refusal: &Error) -> bool;
    /// Whether a range that is registered here serves that device, too.
    fn serves(&self, kind: &str, ordinal: u32) -> bool;
    /// Registers a range. On an error nothing is registered.
    ///
    /// # Errors
    /// `Driver` with call and code, `Unsupported` where the device cannot; `Lingering` where the driver took the range,
    /// gave it back and knows it still.
    fn register(&self, request: &Request) -> Result<()>;
    /// Unregisters a range that [`register`](Self::register) registered.
    ///
    /// # Errors
    /// `Driver`: the range must be taken for registered still.
    fn unregister(&self, request: &Request) -> Result<Ending>;
    /// Whether the driver has forgotten a range that lingered.
    fn has_forgotten(&self, request: &Request) -> bool;
    /// Records an event behind the work that was queued on a stream, whatever device of the same driver that stream is
    /// of.
    ///
    /// # Errors
    /// `Unsupported` by a driver without streams, `Captured` while a graph is being captured from the stream, `Driver`
    /// where the stream is none.
    fn record(self: Arc<Self>, stream: Stream) -> Result<Arc<dyn Event>> {
        let why = "its driver has no streams of that kind; pass an event to defer(obj, event) instead";
        Err(Error::unsupported(format!("recording stream {:#x} on {}", stream.handle, self.id()), why))
    }
    /// The ordinal of the device that the calling thread works on, where the driver knows such a thing.
    fn current_ordinal(&self) -> Option<u32> {
        None
    }
}

/// A point in the work that a device was given, by a driver or by somebody else.
pub trait Event: Send + Sync + fmt::Debug {
    /// Whether all work before that point is done. An error, in words: nobody will ever know.
    ///
    /// # Errors
    /// Why the event, or its device, cannot be asked any more.
    fn query(&self) -> std::result::Result<bool, String>;

    /// Where in what queue, if it is in one whose events come to pass in order.
    fn place(&self) -> Option<Place> {
        None
    }

    /// Whether it is of a device, as opposed to a transfer of the library's own.
    fn is_device_work(&self) -> bool {
        true
    }
}

/// A place in a queue of work: what has a lower number in the same queue is done earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Context and stream, by identities that no later ones have.
    pub queue: (u64, u64),
    /// Grows from one event to the next.
    pub number: u64,
}

/// A stream, as its driver names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// CUDA's `CUstream`. Its default streams are called 0, 1 and 2 on every device.
    pub handle: usize,
    /// The device that it is of, which matters for those; unset, that of the context which is current.
    pub ordinal: Option<u32>,
}

impl From<usize> for Stream {
    fn from(handle: usize) -> Self {
        Self { handle, ordinal: None }
    }
}

/// A range that a device knows. Dropping it without [`end`](Self::end) leaves it registered, which is safe as long as
/// the pages stay.
#[derive(Debug)]
#[must_use]
pub struct Registration {
    device: Arc<dyn Device>,
    request: Request,
}

/// Which devices a range is to be registered with.
#[derive(Clone, Copy, Debug)]
pub struct Registering<'a> {
    /// All of them, or it is an error.
    pub devices: &'a [Arc<dyn Device>],
    /// Off: a refusal is noted, and the range is used without.
    pub required: bool,
}

impl Registering<'_> {
    /// With no device.
    pub const NONE: Registering<'static> = Registering { devices: &[], required: true };
}

impl Registration {
    /// Registers a range with a device.
    ///
    /// # Errors
    /// As [`Device::register`].
    pub fn new(device: Arc<dyn Device>, request: Request) -> Result<Self> {
        device.register(&request)?;
        Ok(Self { device, request })
    }

    /// The device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Bytes that are registered.
    pub fn len(&self) -> usize {
        self.request.len
    }

    /// Where it ends.
    pub(crate) fn end_address(&self) -> usize {
        self.request.address + self.request.len
    }

    /// A registration is never empty.
    pub fn is_empty(&self) -> bool {
        self.request.len == 0
    }

    /// Unregisters.
    ///
    /// # Errors
    /// As [`Device::unregister`].
    pub fn end(&self) -> Result<Ending> {
        self.device.unregister(&self.request)
    }

    /// Whether the driver has forgotten a range that lingered after its end.
    pub fn is_forgotten(&self) -> bool {
        self.device.has_forgotten(&self.request)
    }
}

impl Vendor {
    /// Lists the devices, with the library of that name or the usual one.
    ///
    /// # Errors
    /// `DriverUnavailable` with the reason.
    pub fn find(&self, library: Option<&str>) -> Result<Vec<Found>> {
        (self.find)(library.unwrap_or(self.library))
    }

    /// The device that the calling thread works on.
    ///
    /// # Errors
    /// `DriverUnavailable` with the reason.
    pub fn current(&self, library: Option<&str>) -> Result<Option<u32>> {
        (self.current)(library.unwrap_or(self.library))
    }

    /// Opens a device; all who open it share it, until the last one lets go.
    ///
    /// # Errors
    /// `DriverUnavailable` where there is no such device, `Driver` where it cannot be opened.
    pub fn open(&self, library: Option<&str>, ordinal: u32) -> Result<Arc<dyn Device>> {
        self.open_shared(library, ordinal, self.open, false)
    }

    /// Opens a device for [`Method::Import`], whose lacks somebody must have accepted.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and `Unsupported` where the driver has no such method.
    pub fn open_import(&self, library: Option<&str>, ordinal: u32) -> Result<Arc<dyn Device>> {
        let why = || Error::unsupported("importing memory", format!("{} registers in one way only", self.title));
        self.open_shared(library, ordinal, self.open_import.ok_or_else(why)?, true)
    }

    /// The ordinal of the one device with this UUID.
    ///
    /// # Errors
    /// `DriverUnavailable` where no device has it, or more than one.
    pub fn ordinal_of(&self, library: Option<&str>, uuid: &[u8; 16]) -> Result<u32> {
        let found = self.find(library)?;
        let ids: Vec<DeviceId> = found.iter().map(|found| found.id).filter(|id| id.uuid == *uuid).collect();
        match ids[..] {
            [id] => Ok(id.ordinal),
            [] => Err(load::absent(self.title, "no device has the UUID that is asked for")),
            _ => Err(load::unavailable(self.title, &format!("{ids:?} have one UUID; open one by its ordinal"))),
        }
    }

    fn open_shared(&self, library: Option<&str>, ordinal: u32, open: Open, import: bool) -> Result<Arc<dyn Device>> {
        let key = OpenKey { kind: self.kind, library: library.unwrap_or(self.library).to_owned(), ordinal, import };
        if let Some(device) = opened(|devices| find_opened(devices, &key)) {
            return Ok(device);
        }
        let device = open(&key.library, ordinal)?;
        // Whoever was quicker wins; the other one's device is closed again.
        Ok(opened(|devices| {
            if let Some(first) = find_opened(devices, &key) {
                return first;
            }
            devices.retain(|(_, device)| device.strong_count() > 0);
            devices.push((key, Arc::downgrade(&device)));
            Arc::clone(&device)
        }))
    }
}

#[derive(Debug, PartialEq, Eq)]
struct OpenKey {
    kind: &'static str,
    library: String,
    ordinal: u32,
    import: bool,
}

type Opened = Vec<(OpenKey, Weak<dyn Device>)>;

pub(crate) fn make_statics() {
    opened(|_| ());
}

fn opened<T>(visit: impl FnOnce(&mut Opened) -> T) -> T {
    static OPENED: PerProcess<Mutex<Opened>> = PerProcess::new();
    visit(&mut OPENED.get().lock().unwrap_or_else(PoisonError::into_inner))
}

fn find_opened(devices: &Opened, key: &OpenKey) -> Option<Arc<dyn Device>> {
    devices.iter().find(|(known, _)| known == key).and_then(|(_, device)| device.upgrade())
}

/// The vendor whose devices are called so.
///
/// # Errors
/// `Invalid` names the kinds that there are.
pub fn vendor(kind: &str) -> Result<&'static Vendor> {
    VENDORS.into_iter().find(|vendor| vendor.kind == kind).ok_or_else(|| {
        let kinds: Vec<&str> = VENDORS.iter().map(|vendor| vendor.kind).collect();
        Error::invalid("devices", format!("{kind:?} is no kind of device; known are {}", kinds.join(", ")))
    })
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.ordinal)
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self} ")?;
        self.uuid.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Method {
    /// The call behind it, for reports.
    pub fn call(self) -> &'static str {
        match self {
            Self::HostRegister => "cuMemHostRegister",
            Self::ExternalMemory => "zeMemAllocHost with external memory",
            Self::HostPointer => "zeMemAllocHost with the experimental host-pointer flag",
            Self::Import => "zexDriverImportExternalPointer",
        }
    }
}
