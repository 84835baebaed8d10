//! The one registry of the process, behind a lock that is never held over a system call.

use std::ops::Range;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError, RwLock};

use super::{Adoption, Registry};
use crate::error::Result;
use crate::os;

/// A registry that many threads use.
#[derive(Debug)]
pub struct SharedRegistry {
    ranges: RwLock<Registry>,
    gate: Mutex<()>,
    changed: Condvar,
}

impl SharedRegistry {
    fn new() -> Self {
        Self { ranges: RwLock::new(Registry::new(os::page_size())), gate: Mutex::default(), changed: Condvar::new() }
    }

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

/// The registry of this process.
///
/// A forked child gets an empty one of its own: it owns nothing of its parent's, and the parent's lock may have been
/// held by a thread that the child does not have. So there is one for each generation of forks, in a chain.
pub fn global() -> &'static SharedRegistry {
    static FIRST: OnceLock<Generation> = OnceLock::new();
    let mut generation = FIRST.get_or_init(Generation::new);
    for _ in 0..os::fork_generation() {
        generation = generation.child.get_or_init(|| Box::new(Generation::new()));
    }
    &generation.registry
}

struct Generation {
    registry: SharedRegistry,
    child: OnceLock<Box<Generation>>,
}

impl Generation {
    fn new() -> Self {
        Self { registry: SharedRegistry::new(), child: OnceLock::new() }
    }
}

/// Whether all `len` bytes from `address` on lie in one pinned range. Asks no driver and makes no system call.
pub fn is_pinned(address: usize, len: usize) -> bool {
    global().read(|registry| registry.covers(address, len))
}
