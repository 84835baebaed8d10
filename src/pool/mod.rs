//! The pool: exact sizes at page granularity, instant reuse, a hard budget.
//!
//! A request goes down this ladder and stops at the first step that serves it:
//!
//! 1. the cache: a block of exactly this length that was freed before (no system call, no search);
//! 2. the arena: the smallest hole in the shared regions;
//! 3. the cache again, for a block that is longer by a small slack;
//! 4. a new region: shared for a small request, of exactly its length for a large one;
//! 5. over the budget: all idle blocks go back to the arena and join there, idle regions go back to the system, and
//!    steps 2 and 4 have another try;
//! 6. waiting, when the caller allows it, for a block to come back.
//!
//! So blocks that a loop frees and takes again stay cut as they are while the budget lasts, and its second lap is
//! served by step 1 alone.
//!
//! No lock is held over a system call: a new region is charged to the budget first, made, and entered then.

mod cache;
mod store;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::block::Block;
use crate::error::{Error, Result};
use crate::limits::{self, Budget, Source};
use crate::os;
use crate::pinned::Pinned;
use crate::region::{Pages, Progress, RegionOptions};

use cache::{Lease, ShardedCache};
use store::Store;

const MIB: usize = 1 << 20;
/// Requests from this size on get a region of their own.
const OWN_REGION: usize = MIB;
/// Shared regions: the smallest, the largest, and the share of what there is already that the next one adds.
const SMALLEST_GROWTH: usize = 2 * MIB;
const LARGEST_GROWTH: usize = 64 * MIB;
const GROWTH_SHARE: usize = 32;
/// A cached block serves a request that is shorter by at most this share of it.
const SLACK_SHARE: usize = 64;
/// How often a waiting caller is asked whether it still wants to wait.
const WAIT_STEP: Duration = Duration::from_millis(50);

/// How a pool is made.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// Most bytes that the pool ever holds. `None`: 90 % of what the machine, the control group and the memlock limit
    /// leave at that moment (all of the latter).
    pub max_bytes: Option<usize>,
    /// How its regions are made.
    pub region: RegionOptions,
}

/// What a pool holds now. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    /// What the callers of all live blocks asked for.
    pub requested_bytes: usize,
    /// Handed out, in pages.
    pub allocated_bytes: usize,
    /// Idle in the pool.
    pub cached_bytes: usize,
    /// Waiting for device work, or for their pages to be locked again.
    pub pending_bytes: usize,
    /// All regions.
    pub reserved_bytes: usize,
    /// Of these, locked.
    pub locked_bytes: usize,
    /// Could not be given back to the system; still counted as reserved.
    pub leaked_bytes: usize,
    /// The budget.
    pub max_bytes: usize,
    /// The most that was ever reserved.
    pub peak_reserved_bytes: usize,
    /// Requests that the cache served.
    pub hits: usize,
    /// Requests that it did not.
    pub misses: usize,
    /// Live blocks.
    pub blocks: usize,
    /// Regions.
    pub regions: usize,
    /// What the newest region is made of.
    pub pages: Pages,
}

/// A pool of pinned memory. Dropping it closes it; blocks outlive it.
#[derive(Debug)]
pub struct Pool {
    inner: Arc<Inner>,
}

impl Pool {
    /// An empty pool. Nothing is mapped before the first request.
    ///
    /// # Errors
    /// `Invalid` for a budget of zero bytes.
    pub fn new(options: PoolOptions) -> Result<Self> {
        let caller = |bytes| Budget { bytes, source: Source::Caller };
        let budget = options.max_bytes.map_or_else(limits::default_budget, caller);
        if budget.bytes == 0 {
            return Err(Error::invalid("max_bytes", "a pool needs a budget of at least one byte"));
        }
        let inner = Arc::new(Inner {
            region: options.region,
            budget,
            fork_generation: os::fork_generation(),
            cache: ShardedCache::default(),
            store: Mutex::default(),
            returned: Condvar::new(),
            waiters: AtomicUsize::new(0),
        });
        inner.cache.open(&inner);
        pools().push(Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// Takes a block, without waiting for one to come back.
    ///
    /// # Errors
    /// `OutOfPinnedMemory` or `MemlockLimit` over the budget, `Closed`, `Forked`, or whatever kept a new region from
    /// being made. Nothing is lost.
    ///
    /// # Examples
    /// ```
    /// let pool = pinpool::Pool::new(pinpool::PoolOptions::default())?;
    /// let mut block = pool.take(10_000)?;
    /// block.as_mut_slice().fill(7);
    /// assert_eq!(block.len(), 10_000);
    /// # Ok::<(), pinpool::Error>(())
    /// ```
    pub fn take(&self, len: usize) -> Result<Block> {
        self.take_within(len, Some(Duration::ZERO), &mut |_, _| ControlFlow::Continue(()))
    }

    /// Takes a block, and waits up to `timeout` (`None`: for ever) while the budget is used up. `progress` is told how
    /// far a new region is, and asked now and then while waiting (with zero bytes done).
    ///
    /// # Errors
    /// As [`take`](Self::take), and `Interrupted` when `progress` says so.
    pub fn take_within(&self, len: usize, timeout: Option<Duration>, progress: &mut Progress<'_>) -> Result<Block> {
        if let Some(block) = self.take_cached(len)? {
            return Ok(block);
        }
        let page = os::page_size();
        let padded = len.checked_next_multiple_of(page).filter(|&len| isize::try_from(len).is_ok());
        let padded = padded.ok_or_else(|| Error::invalid("nbytes", format!("{len} bytes are more than memory has")))?;
        Ok(Block::new(self.inner.obtain(padded, len, timeout, progress)?, len))
    }

    /// Takes a block of zero bytes, or one that the thread's own cache holds: in well under a microsecond, or not.
    ///
    /// # Errors
    /// `Closed`, `Forked`.
    pub fn take_cached(&self, len: usize) -> Result<Option<Block>> {
        self.inner.check_process()?;
        if len == 0 {
            return self.inner.cache.check_open().map(|()| Some(Block::empty()));
        }
        let padded = len.wrapping_add(os::page_size() - 1) & !(os::page_size() - 1);
        Ok(self.inner.cache.take(padded, len).map(|slot| Block::new(slot, len)))
    }

    /// Grows the pool by one shared region of at least `len` bytes, so that later requests find it there.
    ///
    /// # Errors
    /// As [`take_within`](Self::take_within); all or nothing.
    pub fn reserve(&self, len: usize, progress: &mut Progress<'_>) -> Result<()> {
        self.inner.check_process()?;
        if len == 0 {
            return Ok(());
        }
        self.inner.cache.check_open()?;
        self.inner.reserve(len, progress)
    }

    /// Gives every idle region back to the system, and answers how many bytes that were.
    ///
    /// # Errors
    /// `Os` where the system refuses one; the others are given back all the same.
    pub fn trim(&self) -> Result<usize> {
        self.inner.check_process()?;
        self.inner.trim()
    }

    /// Refuses further requests and gives back what is idle; live blocks go to the system as they are dropped.
    /// A second call does nothing.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn close(&self) -> Result<()> {
        if self.inner.check_process().is_err() {
            return Ok(()); // it is the parent's to close
        }
        self.inner.cache.close();
        self.inner.wake();
        self.inner.trim().map(|_| ())
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.inner.check_process().is_ok() && self.inner.cache.check_open().is_err()
    }

    /// What the pool holds now.
    ///
    /// # Errors
    /// `Forked`.
    pub fn stats(&self) -> Result<Stats> {
        self.inner.check_process()?;
        Ok(self.inner.stats())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = self.close(); // what the system refused is counted as leaked
    }
}

/// Unlocks the live block that holds this address, in whatever pool. Its memory stays mapped until its last owner is
/// gone. `false`: no live block holds it, or it was unlocked before.
///
/// # Errors
/// `Os` with the kernel's refusal: the block is still pinned.
pub fn unpin(address: usize) -> Result<bool> {
    let alive: Vec<Arc<Inner>> = pools().iter().filter_map(Weak::upgrade).collect();
    for pool in alive.iter().filter(|pool| pool.check_process().is_ok()) {
        if let Some(answer) = pool.unpin(address) {
            return answer;
        }
    }
    Ok(false)
}

/// Every pool of the process that may still be alive.
fn pools() -> MutexGuard<'static, Vec<Weak<Inner>>> {
    static POOLS: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools.retain(|pool| pool.strong_count() > 0);
    pools
}

/// What a block is, live or cached: it exists from the cut to the return to the arena or the system.
#[derive(Debug)]
struct Record {
    address: usize,
    len: usize,
    own_region: bool,
    live: AtomicBool,
    /// Its pages were unlocked at its owner's wish.
    unpinned: AtomicBool,
}

impl Record {
    fn new(address: usize, len: usize, own_region: bool) -> Self {
        Self { address, len, own_region, live: AtomicBool::new(false), unpinned: AtomicBool::new(false) }
    }
}

/// A block's claim on its pool.
#[derive(Debug)]
pub(crate) struct Slot {
    record: Arc<Record>,
    lease: Arc<Lease>,
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

#[derive(Debug)]
struct Inner {
    region: RegionOptions,
    budget: Budget,
    fork_generation: u64,
    cache: ShardedCache,
    store: Mutex<Store>,
    returned: Condvar,
    waiters: AtomicUsize,
}

impl Inner {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `Forked` in a child of the process that made the pool.
    fn check_process(&self) -> Result<()> {
        if self.fork_generation == os::fork_generation() { Ok(()) } else { Err(Error::Forked) }
    }

    /// Steps 2 to 6 of the ladder.
    fn obtain(
        &self,
        len: usize,
        requested: usize,
        timeout: Option<Duration>,
        progress: &mut Progress<'_>,
    ) -> Result<Slot> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let may_wait = timeout != Some(Duration::ZERO);
        let _waiting = may_wait.then(|| Waiting::enter(&self.waiters));
        loop {
            self.cache.check_open()?;
            let returns = self.store().returns;
            match self.obtain_now(len, requested, progress) {
                Err(refusal @ (Error::OutOfPinnedMemory { .. } | Error::MemlockLimit { .. })) => {
                    if !may_wait || !self.wait(returns, deadline, progress)? {
                        return Err(refusal);
                    }
                }
                answer => return answer,
            }
        }
    }

    fn obtain_now(&self, len: usize, requested: usize, progress: &mut Progress<'_>) -> Result<Slot> {
        if let Some(slot) = self.cache.steal(len, requested) {
            return Ok(slot);
        }
        let cut = self.store().cut(len);
        if let Some(record) = cut {
            return self.lease(record, requested);
        }
        let longest = len + len / SLACK_SHARE;
        if longest > len
            && let Some(slot) = self.cache.take_within(len, longest, requested)
        {
            return Ok(slot);
        }
        for record in self.reclaim_unpinned(|_| true) {
            self.cache.restock(record);
        }
        if let Some(slot) = self.cache.steal(len, requested) {
            return Ok(slot);
        }
        let record = match self.grow(len, progress) {
            Err(Error::OutOfPinnedMemory { .. } | Error::MemlockLimit { .. }) => {
                self.trim()?;
                let cut = self.store().cut(len);
                cut.map_or_else(|| self.grow(len, progress), Ok)?
            }
            grown => grown?,
        };
        self.lease(record, requested)
    }

    fn lease(&self, record: Arc<Record>, requested: usize) -> Result<Slot> {
        self.cache.lease(record, requested).map_err(|record| self.dispose(&[record]).err().unwrap_or(Error::Closed))
    }

    /// A block from a new region: its own for a large one, else cut from a shared one.
    fn grow(&self, len: usize, progress: &mut Progress<'_>) -> Result<Arc<Record>> {
        let unit = self.region.pages.granularity();
        if len >= OWN_REGION && len.is_multiple_of(unit) {
            let pinned = self.make_region(len, progress)?;
            return Ok(self.store().add_own(pinned));
        }
        let (shared, left) = {
            let store = self.store();
            (store.shared_bytes(), self.budget.bytes.saturating_sub(store.reserved()))
        };
        // Near the end of the budget a region for small blocks must not take all that is left.
        let growth = (shared / GROWTH_SHARE).clamp(SMALLEST_GROWTH, LARGEST_GROWTH).min(left / 4);
        let pinned = self.make_region(growth.max(len).next_multiple_of(unit), progress)?;
        let mut store = self.store();
        store.add_shared(pinned);
        // Another thread may have cut the new region to pieces by now.
        store.cut(len).ok_or_else(|| self.out_of_memory(&store, len, self.budget))
    }

    fn reserve(&self, len: usize, progress: &mut Progress<'_>) -> Result<()> {
        let len = len.checked_next_multiple_of(self.region.pages.granularity());
        let len = len.ok_or_else(|| Error::invalid("nbytes", "more bytes than memory has"))?;
        let pinned = match self.make_region(len, progress) {
            Err(Error::OutOfPinnedMemory { .. } | Error::MemlockLimit { .. }) => {
                self.trim()?;
                self.make_region(len, progress)?
            }
            made => made?,
        };
        self.store().add_shared(pinned);
        Ok(())
    }

    /// Charges, makes, and on failure refunds a region.
    fn make_region(&self, len: usize, progress: &mut Progress<'_>) -> Result<Pinned> {
        let backed = self.region.lock && self.region.pages.granularity() == os::page_size();
        let headroom = if backed { limits::memory_headroom() } else { self.budget };
        {
            let mut store = self.store();
            if len > headroom.bytes {
                return Err(self.out_of_memory(&store, len, headroom));
            }
            if !store.charge(len, self.budget.bytes) {
                return Err(self.out_of_memory(&store, len, self.budget));
            }
        }
        Pinned::allocate(len, &self.region, progress).inspect_err(|_| self.store().refund(len))
    }

    fn out_of_memory(&self, store: &Store, wanted: usize, budget: Budget) -> Error {
        if budget.source == Source::Memlock {
            let (soft, hard) = os::memlock_limit();
            return Error::MemlockLimit { wanted, locked: limits::locked_bytes(), soft, hard };
        }
        let allocated = self.cache.counters().allocated_bytes.cast_unsigned();
        let pending = store.pending_bytes();
        let cached = store.reserved().saturating_sub(allocated + pending);
        Error::OutOfPinnedMemory {
            wanted,
            limit: budget.bytes,
            allocated,
            cached,
            pending,
            budget: budget.source.text(),
        }
    }

    /// Waits for a block to come back after `returns` of them. `false`: the time is up.
    fn wait(&self, returns: u64, deadline: Option<Instant>, progress: &mut Progress<'_>) -> Result<bool> {
        loop {
            if progress(0, 0).is_break() {
                return Err(Error::Interrupted);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let store = self.store();
            if store.returns != returns {
                return Ok(true);
            }
            if left == Some(Duration::ZERO) {
                return Ok(false);
            }
            let step = left.map_or(WAIT_STEP, |left| left.min(WAIT_STEP));
            drop(self.returned.wait_timeout(store, step).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Tells waiting callers that something came back. They enter `waiters` before they look for memory, and look
    /// again when `returns` has moved, so no return is missed.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.store().returns += 1;
            self.returned.notify_all();
        }
    }

    fn take_back(&self, record: Arc<Record>, requested: usize) {
        record.live.store(false, Ordering::Relaxed);
        if record.unpinned.load(Ordering::Acquire) {
            self.cache.count_returned(&record, requested);
            self.store().unpinned.push(record);
            if self.cache.check_open().is_err() {
                let _ = self.trim(); // what the system refuses is counted as leaked
            }
        } else if let Err(record) = self.cache.put(record, requested) {
            let _ = self.dispose(&[record]); // as above
        }
        self.wake();
    }

    /// Takes blocks out of the books, and gives the regions that they leave idle back to the system.
    fn dispose(&self, records: &[Arc<Record>]) -> Result<usize> {
        let regions = {
            let mut store = self.store();
            let mut regions: Vec<_> = records.iter().filter_map(|record| store.give_back(record)).collect();
            regions.extend(store.take_idle());
            regions
        };
        let (mut freed, mut refusal) = (0, Ok(()));
        for region in regions.into_iter().filter_map(Arc::into_inner) {
            let len = region.region().len();
            match region.release() {
                Ok(()) => {
                    self.store().refund(len);
                    freed += len;
                }
                Err(error) => {
                    self.store().count_leaked(len);
                    refusal = Err(error);
                }
            }
        }
        refusal.map(|()| freed)
    }

    fn trim(&self) -> Result<usize> {
        let mut idle = self.cache.drain(|_| true);
        idle.extend(self.reclaim_unpinned(|record| !record.own_region)); // what is unmapped needs no lock
        let freed = self.dispose(&idle);
        self.wake();
        freed
    }

    /// Takes out the blocks that came back unlocked, locked again where they must be. The others stay where they are.
    fn reclaim_unpinned(&self, must_lock: impl Fn(&Record) -> bool) -> Vec<Arc<Record>> {
        let unpinned = std::mem::take(&mut self.store().unpinned);
        if unpinned.is_empty() {
            return unpinned;
        }
        let (ready, refused): (Vec<_>, Vec<_>) =
            unpinned.into_iter().partition(|record| !must_lock(record) || self.repin(record).is_ok());
        self.store().unpinned.extend(refused);
        ready
    }

    fn repin(&self, record: &Record) -> Result<()> {
        let region = self.store().region_of(record);
        if let Some(region) = region {
            region.repin(&(record.address..record.address + record.len))?;
        }
        record.unpinned.store(false, Ordering::Release);
        Ok(())
    }

    /// `None`: the address lies in no live block of this pool.
    fn unpin(&self, address: usize) -> Option<Result<bool>> {
        let (record, region) = self.store().find_live(address)?;
        if record.unpinned.swap(true, Ordering::AcqRel) {
            return Some(Ok(false));
        }
        let unpinned = region.unpin(&(record.address..record.address + record.len));
        if !matches!(unpinned, Ok(true)) {
            record.unpinned.store(false, Ordering::Release);
        }
        Some(unpinned)
    }

    fn stats(&self) -> Stats {
        let store = self.store();
        let counters = self.cache.counters();
        let allocated = counters.allocated_bytes.cast_unsigned();
        let (reserved, pending) = (store.reserved(), store.pending_bytes());
        Stats {
            requested_bytes: counters.requested_bytes.cast_unsigned(),
            allocated_bytes: allocated,
            cached_bytes: reserved.saturating_sub(allocated + pending + store.leaked()),
            pending_bytes: pending,
            reserved_bytes: reserved,
            locked_bytes: store.locked_bytes().saturating_sub(store.unpinned_bytes()),
            leaked_bytes: store.leaked(),
            max_bytes: self.budget.bytes,
            peak_reserved_bytes: store.peak_reserved(),
            hits: counters.hits,
            misses: counters.misses,
            blocks: counters.blocks.cast_unsigned(),
            regions: store.regions(),
            pages: store.pages().unwrap_or(self.region.pages),
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
