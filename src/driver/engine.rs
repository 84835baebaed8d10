//! The registration engine: makes one range known to all devices that are asked for, or to none.
//!
//! A range is registered once for each device that no earlier one serves, in one piece or in several. A piece that a
//! driver calls too large is halved, down to a floor. Whatever fails, what was made is unmade in reverse.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Device, DeviceId, Ending, Registration, Request};
use crate::error::{Error, Result};
use crate::region::Progress;

/// Smaller pieces are not tried when a driver refuses one.
pub(crate) const SMALLEST_PIECE: usize = 16 << 20;

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
    lingering: Mutex<Vec<Registration>>,
}

impl Registrations {
    /// Registers a range with all devices.
    ///
    /// # Errors
    /// The first refusal. Nothing stays registered, unless a driver refuses to take back what it gave: then
    /// [`Refused::stuck`] holds it, and the pages must stay.
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
                Err(error) => return Err(error),
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
        self.live().is_empty() && lock(&self.lingering).is_empty()
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
                Ok(Ending::Lingering) => lock(&self.lingering).push(registration),
                Err(error) => {
                    self.live().push(registration);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Whether no driver knows any part of the range any more. Asks the drivers about what lingers.
    pub fn are_forgotten(&self) -> bool {
        let lingering = std::mem::take(&mut *lock(&self.lingering));
        let remembered: Vec<_> = lingering.into_iter().filter(|registration| !registration.is_forgotten()).collect();
        lock(&self.lingering).extend(remembered);
        self.are_none()
    }

    fn take_last(&self) -> Option<Registration> {
        self.live().pop()
    }

    fn live(&self) -> MutexGuard<'_, Vec<Registration>> {
        lock(&self.live)
    }
}

/// Unregisters when the caller's progress callback panics.
struct EndOnPanic<'a>(&'a Registrations);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.end();
        }
    }
}

/// Why a range was not registered.
#[derive(Debug)]
pub struct Refused {
    /// The first refusal.
    pub error: Error,
    /// What a driver would not take back.
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
    std::thread::yield_now();
    if progress(done, total).is_break() { Err(Error::Interrupted) } else { Ok(()) }
}

fn too_large(device: DeviceId, len: usize, largest: usize) -> Error {
    let why = format!(
        "{len} bytes are more than the {largest} that can be registered with {device} at once, and a block never \
         spans two registrations; use several smaller tensors"
    );
    Error::unsupported("a block of this size", why)
}
