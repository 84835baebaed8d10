//! A block as the pool knows it, and a caller's claim on one.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::cache::Lease;

/// What a block is, live or cached: it exists from the cut to the return to the arena or the system.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) address: usize,
    pub(super) len: usize,
    /// The block is all of its region.
    pub(super) own_region: bool,
    state: AtomicU8,
}

/// Nobody owns the block.
const IDLE: u8 = 0;
/// A caller owns it.
const LIVE: u8 = 1;
/// A caller owns it, and its pages are being unlocked at this moment.
const UNPINNING: u8 = 2;
/// Its pages are unlocked, whether a caller owns it or not.
const UNPINNED: u8 = 3;
/// It came back while its pages were being unlocked.
const RETURNED: u8 = 4;

/// What is to be done with a block that came back.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Return {
    /// It can be reused as it is.
    Whole,
    /// Its pages must be locked before it can be reused.
    Unpinned,
    /// Whoever unlocks its pages at this moment will see to it.
    Later,
}

impl Record {
    pub(super) fn new(address: usize, len: usize, own_region: bool) -> Self {
        Self { address, len, own_region, state: AtomicU8::new(IDLE) }
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.address..self.address + self.len
    }

    /// A caller takes the block.
    pub(super) fn take(&self) {
        self.state.store(LIVE, Ordering::Relaxed); // the lock that the block is taken under orders it
    }

    /// Its last owner gives the block back.
    pub(super) fn give_back(&self) -> Return {
        loop {
            if self.change(LIVE, IDLE) {
                return Return::Whole;
            }
            if self.change(UNPINNING, RETURNED) {
                return Return::Later;
            }
            if self.is_unpinned() {
                return Return::Unpinned;
            }
            // Between two of these looks an unlocking began or ended.
        }
    }

    /// Claims the right to unlock the pages of a block that is live and pinned.
    pub(super) fn begin_unpin(&self) -> bool {
        self.change(LIVE, UNPINNING)
    }

    /// Ends what `begin_unpin` began. What is returned is to be done, if the block came back meanwhile.
    pub(super) fn end_unpin(&self, unpinned: bool) -> Option<Return> {
        if self.change(UNPINNING, if unpinned { UNPINNED } else { LIVE }) {
            return None;
        }
        self.state.store(if unpinned { UNPINNED } else { IDLE }, Ordering::Release);
        Some(if unpinned { Return::Unpinned } else { Return::Whole })
    }

    /// The pages of a returned block are locked again.
    pub(super) fn repinned(&self) {
        self.state.store(IDLE, Ordering::Release);
    }

    pub(super) fn is_unpinned(&self) -> bool {
        self.state.load(Ordering::Acquire) == UNPINNED
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// A block's claim on its pool.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(super) record: Arc<Record>,
    pub(super) lease: Arc<Lease>,
}

impl Slot {
    pub(crate) fn address(&self) -> usize {
        self.record.address
    }

    pub(crate) fn len(&self) -> usize {
        self.record.len
    }

    /// Back to the pool, from any thread. In a forked child nothing happens: the memory is the parent's.
    pub(crate) fn give_back(self, requested: usize) {
        let Self { record, lease } = self;
        if lease.pool.check_process().is_ok() {
            lease.pool.take_back(record, requested);
        }
    }
}
