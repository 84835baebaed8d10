//! The one registry of the process, behind a lock that is never held over a system call.

use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError, RwLock};

use super::{Adoption, Registry as Ranges};
use crate::driver::engine::Registrations;
use crate::error::Result;
use crate::fork::PerProcess;
use crate::os;

/// The pinned ranges, each with what the drivers know of it.
type Registry = Ranges<Registrations>;

/// A registry that many threads use.
#[derive(Debug)]
pub struct SharedRegistry {
    ranges: RwLock<Registry>,
    gate: Mutex<()>,
    changed: Condvar,
}

impl Default for SharedRegistry {
    fn default() -> Self {
        Self { ranges: RwLock::new(Registry::new(os::page_size())), gate: Mutex::default(), changed: Condvar::new() }
    }
}

impl SharedRegistry {
    /// Looks something up.
    pub fn read<T>(&self, look: impl FnOnce(&Registry) -> T) -> T {
        look(&self.ranges.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes something, and wakes whoever waits for a busy range.
    pub fn change<T>(&self, change: impl FnOnce(&mut Registry) -> T) -> T {
        let result = change(&mut self.ranges.write().unwrap_or_else(PoisonError::into_inner));
        drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
        result
    }

    /// Adopts a range, after whatever is on its way in or out of its pages; never answers `Busy`.
    ///
    /// # Errors
    /// As [`Registry::adopt`].
    pub fn adopt(&self, range: &Range<usize>) -> Result<Adoption> {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let adoption = self.ranges.write().unwrap_or_else(PoisonError::into_inner).adopt(range.clone())?;
            if adoption != Adoption::Busy {
                return Ok(adoption);
            }
            gate = self.changed.wait(gate).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The registry of this process. A forked child starts with an empty one.
pub fn global() -> &'static SharedRegistry {
    static CURRENT: PerProcess<SharedRegistry> = PerProcess::new();
    CURRENT.get()
}

/// Whether all `len` bytes from `address` on are registered with a device, or with one that serves it. Asks no driver.
pub fn is_registered(address: usize, len: usize, kind: &str, ordinal: u32) -> bool {
    global().read(|registry| {
        let note = registry.find(address).and_then(|found| found.note);
        registry.covers(address, len) && note.is_some_and(|registrations| registrations.serves(kind, ordinal))
    })
}

/// Whether all `len` bytes from `address` on lie in one pinned range. Asks no driver and makes no system call.
pub fn is_pinned(address: usize, len: usize) -> bool {
    global().read(|registry| registry.covers(address, len))
}
