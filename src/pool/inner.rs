//! What a pool's handle and its blocks share, and the ladder that a request goes down.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::ShardedCache;
use super::debug::Ledger;
use super::record::{Record, Slot};
use super::store::Store;
use super::sync::{AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, WAIT_STEP, lock, wait};
use super::{PoolOptions, Stats};
use crate::error::{Error, Result};
use crate::limits::Budget;
use crate::os;
use crate::region::Progress;

/// A cached block serves a request that is shorter by at most this share of it.
const SLACK_SHARE: usize = 64;
/// A request that can be served otherwise asks the first block of each line, and so many of those that are in no line.
const A_FEW: usize = 64;
/// How often, and after what pause, a request looks again for idle blocks that the books promise.
const MISSED_BLOCKS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);
/// How often a waiting caller asks events: nobody tells when device work ends.
const POLL_STEP: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) options: PoolOptions,
    pub(super) budget: Budget,
    pub(super) cache: ShardedCache,
    pub(super) ledger: Option<Ledger>,
    fork_generation: u64,
    store: Mutex<Store>,
    returned: Condvar,
    waiters: AtomicUsize,
}

impl Inner {
    pub(super) fn new(options: PoolOptions, budget: Budget) -> Arc<Self> {
        let ledger = options.debug.then(Ledger::default);
        let inner = Arc::new(Self {
            options,
            budget,
            cache: ShardedCache::default(),
            ledger,
            fork_generation: os::fork_generation(),
            store: Mutex::default(),
            returned: Condvar::new(),
            waiters: AtomicUsize::new(0),
        });
        inner.cache.open(&inner);
        inner
    }

    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        lock(&self.store)
    }

    /// `Forked` in a child of the process that made the pool.
    pub(super) fn check_process(&self) -> Result<()> {
        if self.fork_generation == os::fork_generation() { Ok(()) } else { Err(Error::Forked) }
    }

    /// The ladder but for its first step.
    pub(super) fn obtain(
        &self,
        len: usize,
        requested: usize,
        timeout: Option<Duration>,
        progress: &mut Progress<'_>,
    ) -> Result<Slot> {
        if timeout == Some(Duration::ZERO) || len > self.budget.bytes {
            return self.obtain_now(len, requested, progress);
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let _waiting = Waiting::enter(&self.waiters);
        loop {
            let returns = self.store().returns;
            match self.obtain_now(len, requested, progress) {
                Err(refusal) if refusal.is_shortage() && !self.is_hopeless(len) => {
                    if !self.wait(returns, deadline, progress)? {
                        return self.obtain_now(len, requested, progress); // with the numbers of the end
                    }
                    super::unfinished::finish(); // the kernel's limit counts closed pools, too
                }
                answer => return answer,
            }
        }
    }

    fn obtain_now(&self, len: usize, requested: usize, progress: &mut Progress<'_>) -> Result<Slot> {
        self.cache.check_open()?;
        if let Some(slot) = self.reuse(len, requested)? {
            return Ok(slot);
        }
        let record = self.grow_or_make_room(len, progress)?;
        self.lease(record, requested)
    }

    /// Steps 5 and 6: each round gives something idle up, or waits for a thread that does, or ends.
    fn grow_or_make_room(&self, len: usize, progress: &mut Progress<'_>) -> Result<Arc<Record>> {
        let mut patience = MISSED_BLOCKS;
        loop {
            match self.grow(len, progress) {
                Err(refusal) if self.is_shortage(&refusal) => {
                    super::unfinished::finish();
                    let made_room = self.make_room(len, progress)?;
                    let cut = self.store().cut(len);
                    match cut {
                        Some(record) => return Ok(record),
                        None if made_room => {}
                        None if self.restock_pending(usize::MAX) => {} // it is idle now, and the next round gives it up
                        None if patience > 0 && self.should_fit(len) => {
                            patience -= 1;
                            self.pause();
                        }
                        None => return Err(refusal),
                    }
                }
                grown => return grown,
            }
        }
    }

    /// Whether giving something idle up may help: a driver may have a budget, too.
    pub(super) fn is_shortage(&self, refusal: &Error) -> bool {
        refusal.is_shortage() || self.options.devices.iter().any(|device| device.is_too_large(refusal))
    }

    /// Gives a thread that is in the middle of something the time to end it.
    fn pause(&self) {
        wait(&self.returned, self.store(), PAUSE);
    }

    /// Whether a request will not fit, whatever comes back.
    fn is_hopeless(&self, len: usize) -> bool {
        self.store().lost_bytes().saturating_add(len) > self.budget.bytes
    }

    /// Whether what is handed out leaves room in the budget. Then idle blocks were missed: other threads are moving them,
    /// or have put them into shards that were searched before.
    fn should_fit(&self, len: usize) -> bool {
        let store = self.store();
        let allocated = self.cache.counters().allocated_bytes.cast_unsigned();
        allocated + store.withheld_bytes() + len <= self.budget.bytes
    }

    /// The block of this pool that holds all bytes of a range, live or not.
    pub(super) fn find(&self, range: &Range<usize>) -> Option<Arc<Record>> {
        let (record, _) = self.store().find_block(range.start)?;
        (range.end <= record.range().end).then_some(record)
    }

    /// A block from what the pool has already.
    fn reuse(&self, len: usize, requested: usize) -> Result<Option<Slot>> {
        if let Some(slot) = self.cache.steal(len, requested) {
            return Ok(Some(slot));
        }
        if self.restock_pending(A_FEW)
            && let Some(slot) = self.cache.steal(len, requested)
        {
            return Ok(Some(slot));
        }
        let cut = self.store().cut(len);
        if let Some(record) = cut {
            return self.lease(record, requested).map(Some);
        }
        let longest = len + len / SLACK_SHARE;
        Ok(if longest > len { self.cache.take_within(len, longest, requested) } else { None })
    }

    fn lease(&self, record: Arc<Record>, requested: usize) -> Result<Slot> {
        self.cache.lease(record, requested).map_err(|record| self.dispose(&[record]).err().unwrap_or(Error::Closed))
    }

    /// Waits for something to come back after `returns` times, but not for long: memory may also come from elsewhere.
    /// `false`: the time is up.
    fn wait(&self, returns: u64, deadline: Option<Instant>, progress: &mut Progress<'_>) -> Result<bool> {
        let left = deadline.map_or(WAIT_STEP, |deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Duration::ZERO {
            return Ok(false);
        }
        if progress(0, 0).is_break() {
            return Err(Error::Interrupted);
        }
        let store = self.store();
        if store.returns == returns {
            let step = if store.is_unfinished() { POLL_STEP } else { WAIT_STEP };
            wait(&self.returned, store, left.min(step));
        }
        Ok(true)
    }

    /// Tells waiting callers that memory came back. They enter `waiters` before they look for memory under the locks
    /// that it comes back under, and look again when `returns` has moved, so no return is missed.
    pub(super) fn announce(&self) {
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.store().returns += 1;
            self.returned.notify_all();
        }
    }

    /// Counts a thread that is giving memory back to the system, from before it takes the memory out of the books.
    pub(super) fn releasing(&self) -> Releasing<'_> {
        self.store().releasing += 1;
        Releasing { pool: self, moved: false }
    }

    /// While other threads are giving memory back, waits until more was given back than `released` times. False: none
    /// of them had anything.
    pub(super) fn await_releases(&self, released: u64, progress: &mut Progress<'_>) -> Result<bool> {
        loop {
            let store = self.store();
            if store.released != released {
                return Ok(true);
            }
            if store.releasing == 0 {
                return Ok(false);
            }
            wait(&self.returned, store, WAIT_STEP);
            if progress(0, 0).is_break() {
                return Err(Error::Interrupted);
            }
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let store = self.store();
        let counters = self.cache.counters();
        let allocated = counters.allocated_bytes.cast_unsigned();
        Stats {
            requested_bytes: counters.requested_bytes.cast_unsigned(),
            allocated_bytes: allocated,
            cached_bytes: store.cached_bytes(allocated),
            pending_bytes: store.pending_bytes(),
            reserved_bytes: store.reserved(),
            locked_bytes: if self.options.region.lock { store.locked_bytes() } else { 0 },
            quarantined_bytes: store.quarantined_bytes(),
            quarantine_reason: store.quarantine_reason().map(ToOwned::to_owned),
            leaked_bytes: store.leaked(),
            max_bytes: self.budget.bytes,
            peak_reserved_bytes: store.peak_reserved(),
            registered_bytes: store.registered_bytes(),
            unregistered: store.unregistered().map(ToOwned::to_owned),
            hits: counters.hits,
            misses: counters.misses,
            blocks: counters.blocks.cast_unsigned(),
            regions: store.regions(),
            pages: store.pages().unwrap_or(self.options.region.pages),
        }
    }
}

/// One caller who waits for memory, counted while this lives.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(waiters: &'a AtomicUsize) -> Self {
        waiters.fetch_add(1, Ordering::SeqCst);
        Self(waiters)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread that gives memory back, counted while this lives.
pub(super) struct Releasing<'a> {
    pool: &'a Inner,
    /// Whether there was anything to give back.
    pub(super) moved: bool,
}

impl Drop for Releasing<'_> {
    fn drop(&mut self) {
        let mut store = self.pool.store();
        store.releasing -= 1;
        if self.moved {
            store.released += 1;
            store.returns += 1;
        }
        drop(store);
        self.pool.returned.notify_all();
    }
}
