//! The registration engine: makes one range known to all devices that are asked for, or to none.
//!
//! A range is registered once for each device that no earlier one serves, in one piece or in several. A piece that a
//! driver calls too large is halved, down to a floor. Whatever fails, what was made is unmade in reverse.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Device, DeviceId, Ending, Registration, Request};
use crate::error::{Error, Result};
use crate::os;
use crate::region::Progress;

/// Smaller pieces are not tried when a driver refuses one.
pub(crate) const SMALLEST_PIECE: usize = 16 << 20;

/// How long a driver is given to forget a range. Those that are known to keep one do so for about ten seconds.
pub const FORGETTING_LIMIT: Duration = Duration::from_secs(20);
/// How often it is asked meanwhile.
const ASKING_PAUSE: Duration = Duration::from_millis(5);

/// Whether a range may be registered in several pieces. Pool memory may not: a copy must not cross from one
/// registration into the next, and no block does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// In one piece, or not at all.
    Whole,
    /// In pieces that begin and end on pages.
    Pieces,
}

/// What the drivers know of one range.
#[derive(Debug, Default)]
pub struct Registrations {
    /// Where the range ends.
    end: usize,
    live: Mutex<Vec<Registration>>,
    /// Ended, and not forgotten yet.
    lingering: Mutex<Vec<Arc<Registration>>>,
}

impl Registrations {
    /// Registers a range with all devices.
    ///
    /// # Errors
    /// The first refusal. Nothing stays registered, unless a driver refuses to take back what it gave, or has not
    /// forgotten it: then [`Refused::stuck`] holds it, and the pages must stay.
    pub fn make(
        devices: &[Arc<dyn Device>],
        request: &Request,
        cut: Cut,
        progress: &mut Progress<'_>,
    ) -> std::result::Result<Self, Refused> {
        let made = Self { end: request.address + request.len, ..Self::default() };
        for device in devices {
            if made.serve(device.as_ref()) {
                continue;
            }
            let added = {
                let _guard = EndOnPanic(&made);
                made.add(device, request, cut, progress)
            };
            if let Err(error) = added {
                let undone = made.end();
                let stuck = if undone.is_ok_and(|()| made.are_forgotten()) { None } else { Some(Box::new(made)) };
                return Err(Refused { error, stuck });
            }
        }
        Ok(made)
    }

    /// Registers the range with one device, piece by piece.
    fn add(&self, device: &Arc<dyn Device>, request: &Request, cut: Cut, progress: &mut Progress<'_>) -> Result<()> {
        let request = aligned(request, device.alignment());
        let sizes = device.sizes();
        if cut == Cut::Whole && request.len > sizes.largest {
            return Err(too_large(device.id(), request.len, sizes.largest));
        }
        let mut size = if cut == Cut::Whole { request.len } else { sizes.usual };
        let (mut start, end) = (request.address, request.address + request.len);
        while start < end {
            let piece = Request { address: start, len: piece_len(start, end, size), ..request };
            match Registration::new(Arc::clone(device), piece) {
                Ok(registration) => {
                    self.live().push(registration);
                    start += piece.len;
                    pause_between_pieces(start - request.address, request.len, progress)?;
                }
                Err(error) if cut == Cut::Pieces && piece.len > SMALLEST_PIECE && device.is_too_large(&error) => {
                    size = piece.len / 2;
                }
                Err(error) => {
                    if matches!(error, Error::Lingering { .. }) {
                        self.lingering().push(Arc::new(Registration { device: Arc::clone(device), request: piece }));
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Whether the range is known for that device, directly or through one that serves it.
    pub fn serves(&self, kind: &str, ordinal: u32) -> bool {
        // Pieces come from the first to the last and go from the last to the first: with the last one, all are there.
        let is_whole = |registration: &Registration| registration.end_address() >= self.end;
        self.live().iter().any(|registration| is_whole(registration) && registration.device().serves(kind, ordinal))
    }

    /// The same for an open device.
    pub fn serve(&self, device: &dyn Device) -> bool {
        self.serves(device.id().kind, device.id().ordinal)
    }

    /// Whether no driver was told of the range.
    pub fn are_none(&self) -> bool {
        self.live().is_empty() && self.lingering().is_empty()
    }

    /// Bytes that are registered with each device, one entry a piece.
    pub fn bytes(&self) -> Vec<(DeviceId, usize)> {
        self.live().iter().map(|registration| (registration.device().id(), registration.len())).collect()
    }

    /// Unregisters everything, the last first.
    ///
    /// # Errors
    /// A driver's refusal: that registration, and those before it, are still there. The call may be made again.
    pub fn end(&self) -> Result<()> {
        while let Some(registration) = self.take_last() {
            match registration.end() {
                Ok(Ending::Done) => {}
                Ok(Ending::Lingering) => self.lingering().push(Arc::new(registration)),
                Err(error) => {
                    self.live().push(registration);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Whether no driver knows any part of the range any more. Asks the drivers about what lingers. Several threads may
    /// ask at a time: what lingers stays in the list until a driver has said that it is forgotten.
    pub fn are_forgotten(&self) -> bool {
        let asked = self.lingering().clone();
        let forgotten: Vec<_> = asked.into_iter().filter(|registration| registration.is_forgotten()).collect();
        self.lingering().retain(|known| !forgotten.iter().any(|gone| Arc::ptr_eq(known, gone)));
        self.are_none()
    }

    /// Waits until the drivers have forgotten a range whose registrations have ended: before that they may hand its
    /// memory to others, and its owner must not use it. `false`: they have not within `limit`. `progress` is asked
    /// between the looks, with no bytes.
    ///
    /// # Errors
    /// `Interrupted` when `progress` says so, `Forked` in a child that it has forked.
    pub fn await_forgotten(&self, limit: Duration, progress: &mut Progress<'_>) -> Result<bool> {
        let (start, process) = (Instant::now(), os::fork_generation());
        while !self.are_forgotten() {
            if start.elapsed() >= limit {
                return Ok(false);
            }
            if progress(0, 0).is_break() {
                return Err(Error::Interrupted);
            }
            if process != os::fork_generation() {
                return Err(Error::Forked);
            }
            thread::sleep(ASKING_PAUSE);
        }
        Ok(true)
    }

    /// As [`await_forgotten`](Self::await_forgotten), for [`FORGETTING_LIMIT`].
    ///
    /// # Errors
    /// And `Lingering` where a driver has not forgotten the range by then.
    pub fn expect_forgotten(&self, progress: &mut Progress<'_>) -> Result<()> {
        if self.await_forgotten(FORGETTING_LIMIT, progress)? {
            return Ok(());
        }
        let first = self.lingering().first().cloned();
        first.map_or(Ok(()), |registration| {
            let waited = FORGETTING_LIMIT.as_secs();
            let why = format!("it was waited for, {waited} s long; close() or unpin it again later, which waits on");
            Err(not_forgotten(registration.device.id(), &registration.request, why))
        })
    }

    fn take_last(&self) -> Option<Registration> {
        self.live().pop()
    }

    fn live(&self) -> MutexGuard<'_, Vec<Registration>> {
        lock(&self.live)
    }

    fn lingering(&self) -> MutexGuard<'_, Vec<Arc<Registration>>> {
        lock(&self.lingering)
    }
}

/// Unregisters when the caller's progress callback panics.
struct EndOnPanic<'a>(&'a Registrations);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = self.0.end();
        }
    }
}

/// Why a range was not registered.
#[derive(Debug)]
pub struct Refused {
    /// The first refusal.
    pub error: Error,
    /// What a driver would not take back, or has not forgotten.
    pub stuck: Option<Box<Registrations>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The range grown to whole units of the driver.
fn aligned(request: &Request, alignment: usize) -> Request {
    let start = request.address / alignment * alignment;
    let end = (request.address + request.len).next_multiple_of(alignment);
    Request { address: start, len: end - start, ..*request }
}

/// Bytes of the next piece: it ends on a page unless it is the last.
fn piece_len(start: usize, end: usize, size: usize) -> usize {
    let cut = start.saturating_add(size) / crate::os::page_size() * crate::os::page_size();
    cut.min(end) - start
}

/// Lets others at the driver's lock between two long calls.
fn pause_between_pieces(done: usize, total: usize, progress: &mut Progress<'_>) -> Result<()> {
    if done == total {
        return Ok(());
    }
    thread::yield_now();
    if progress(done, total).is_break() { Err(Error::Interrupted) } else { Ok(()) }
}

/// The error about a range that a device's driver has not forgotten.
pub(super) fn not_forgotten(device: DeviceId, request: &Request, why: String) -> Error {
    let Request { address, len: bytes, .. } = *request;
    Error::Lingering { device: device.to_string().into(), address, bytes, why }
}

fn too_large(device: DeviceId, len: usize, largest: usize) -> Error {
    let why = format!(
        "{len} bytes are more than the {largest} that can be registered with {device} at once, and a block never \
         spans two registrations; use several smaller tensors"
    );
    Error::unsupported("a block of this size", why)
}
