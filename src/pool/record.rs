//! A block as the pool knows it, and a caller's claim on one.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::cache::Lease;
use super::in_flight::{Asking, InFlight, Known};
use super::sync::{AtomicU8, AtomicUsize, Mutex, MutexGuard, Ordering, lock};
use crate::driver::{Event, Place};
use crate::error::{Error, Result};

/// What a block is, live or cached: it exists from the cut to the return to the arena or the system.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) address: usize,
    pub(super) len: usize,
    /// The block is all of its region.
    pub(super) own_region: bool,
    state: AtomicU8,
    /// How much of it its owner asked for.
    requested: AtomicUsize,
    /// Boxed: what every take and return touches is to be one line of the processor's cache.
    in_flight: Box<Mutex<InFlight>>,
}

// What a state is made of; none of them: the block is idle, and can be handed out.
/// A caller owns the block.
const OWNED: u8 = 1;
/// Its pages are being unlocked at this moment.
const UNPINNING: u8 = 2;
/// Its pages are unlocked.
const UNPINNED: u8 = 4;
/// It cannot be used again: its registrations have ended. Stays.
const SPENT: u8 = 16;
/// Device work may use it, or it is condemned. Changes under the lock of `in_flight` only; device work begins only while a
/// caller owns the block.
const IN_FLIGHT: u8 = 8;

/// What is to be done with a block that came back.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Return {
    /// It can be reused as it is.
    Whole,
    /// Its pages must be locked, or device work must end, before it can be reused.
    Pending,
    /// Whoever unlocks its pages at this moment will see to it.
    Later,
}

/// What comes of the wish to unlock a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unpinning {
    /// The caller is the one to do it, and to say how it ended.
    Begun,
    /// Nobody owns the block, or its pages are unlocked already.
    Needless,
    /// Device work may use it.
    InFlight,
}

impl Record {
    pub(super) fn new(address: usize, len: usize, own_region: bool) -> Self {
        let (state, requested) = (AtomicU8::new(0), AtomicUsize::new(len));
        Self { address, len, own_region, state, requested, in_flight: Box::default() }
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.address..self.address + self.len
    }

    /// How much of it its owner asked for: what lies behind is nobody's.
    pub(super) fn requested(&self) -> usize {
        self.requested.load(Ordering::Relaxed)
    }

    /// Notes how much of the block the caller who takes it asked for.
    pub(super) fn note_requested(&self, len: usize) {
        self.requested.store(len, Ordering::Relaxed); // read by those to whom that caller shows the block
    }

    /// A caller takes the block.
    pub(super) fn take(&self) {
        self.state.store(OWNED, Ordering::Relaxed); // the lock that the block is taken under orders it
    }

    /// Its last owner gives the block back.
    pub(super) fn give_back(&self) -> Return {
        after_return(self.state.fetch_and(!OWNED, Ordering::AcqRel))
    }

    /// Claims the right to unlock the pages of a block that is live, pinned and not in flight.
    pub(super) fn begin_unpin(&self) -> Unpinning {
        let pinned = |state: u8| (state & !SPENT == OWNED).then_some(state | UNPINNING);
        match self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, pinned) {
            Ok(_) => Unpinning::Begun,
            Err(state) if state & !SPENT == OWNED | IN_FLIGHT => Unpinning::InFlight,
            Err(_) => Unpinning::Needless,
        }
    }

    /// Ends what `begin_unpin` began. What is returned is to be done, if the block came back meanwhile.
    pub(super) fn end_unpin(&self, unpinned: bool) -> Option<Return> {
        let ended = if unpinned { UNPINNING | UNPINNED } else { UNPINNING };
        let before = self.state.fetch_xor(ended, Ordering::AcqRel);
        (before & OWNED == 0).then(|| after_return(before ^ ended))
    }

    /// The block is not to be used again, once its owner lets go. Called between `begin_unpin` and `end_unpin`.
    pub(super) fn spend(&self) {
        self.state.fetch_or(SPENT, Ordering::AcqRel);
    }

    pub(super) fn is_spent(&self) -> bool {
        self.state.load(Ordering::Acquire) & SPENT != 0
    }

    /// The pages of a returned block are locked again.
    pub(super) fn repinned(&self) {
        self.state.fetch_and(!UNPINNED, Ordering::Release);
    }

    pub(super) fn is_unpinned(&self) -> bool {
        self.state.load(Ordering::Acquire) & UNPINNED != 0
    }

    pub(super) fn is_owned(&self) -> bool {
        self.state.load(Ordering::Acquire) & OWNED != 0
    }

    /// Whether device work may use the block, as far as was looked.
    pub(super) fn is_in_flight(&self) -> bool {
        self.state.load(Ordering::Acquire) & IN_FLIGHT != 0
    }

    /// The same but for transfers of the library's own.
    pub(super) fn has_device_work(&self) -> bool {
        self.is_in_flight() && self.in_flight().has_device_work()
    }

    /// Keeps the block from reuse until the event that `record` makes is done. When there is none, the block is not
    /// reused at all, unless a later call succeeds.
    pub(super) fn follow(&self, record: impl FnOnce() -> Result<Arc<dyn Event>>) -> Result<()> {
        self.begin_flight()?;
        match record() {
            Ok(event) => {
                let replaced = self.in_flight().arrived(event, Instant::now());
                drop(replaced);
                if self.in_flight().is_time_to_look() {
                    self.look();
                }
                Ok(())
            }
            Err(refusal) => {
                self.in_flight().refused(&refusal);
                Err(refusal)
            }
        }
    }

    fn begin_flight(&self) -> Result<()> {
        let mut in_flight = self.in_flight();
        let owned = |state: u8| (state & OWNED != 0).then_some(state | IN_FLIGHT);
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, owned).is_err() {
            return Err(Error::invalid("memory", "another thread has released it"));
        }
        in_flight.arrive();
        Ok(())
    }

    /// The memory is not to be handed out again, once its owner lets go.
    pub(super) fn condemn(&self, reason: String) {
        let mut in_flight = self.in_flight();
        in_flight.condemn(reason);
        self.state.fetch_or(IN_FLIGHT, Ordering::AcqRel);
    }

    /// Asks the events of the block. No lock is held meanwhile: drivers and Python have locks of their own. An event that
    /// uses a pool while it is asked finds every block busy, or it would be asked again, and again.
    pub(super) fn look(&self) -> Known {
        let Some(_asking) = Asking::begin() else { return Known::Busy };
        let events = self.in_flight().events();
        let answers = events.into_iter().map(|event| (Arc::clone(&event), event.query())).collect();
        let mut in_flight = self.in_flight();
        let (known, dropped) = in_flight.note(answers);
        if in_flight.is_done() {
            self.state.fetch_and(!IN_FLIGHT, Ordering::AcqRel);
        }
        drop(in_flight);
        drop(dropped); // may run Python
        known
    }

    /// One event of the block is done, as whoever made it knows: nobody is asked.
    pub(super) fn end_flight(&self, event: &Arc<dyn Event>) {
        let mut in_flight = self.in_flight();
        let (_, dropped) = in_flight.note(vec![(Arc::clone(event), Ok(true))]);
        if in_flight.is_done() {
            self.state.fetch_and(!IN_FLIGHT, Ordering::AcqRel);
        }
        drop(in_flight);
        drop(dropped);
    }

    /// Where in what queue the block waits, if it waits in one.
    pub(super) fn place(&self) -> Option<Place> {
        self.in_flight().place()
    }

    /// When the oldest event of the block was recorded.
    pub(super) fn in_flight_since(&self) -> Option<Instant> {
        self.in_flight().since()
    }

    fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        lock(&self.in_flight)
    }
}

fn after_return(state: u8) -> Return {
    match state {
        _ if state & UNPINNING != 0 => Return::Later,
        0 | OWNED => Return::Whole,
        _ => Return::Pending,
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
