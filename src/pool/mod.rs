//! The pool: exact sizes at page granularity, instant reuse, a hard budget.
//!
//! A request goes down this ladder and stops at the first step that serves it:
//!
//! 1. the cache: a block of exactly this length that was freed before (no system call, no search), by this thread or
//!    another;
//! 2. the same, after a look at pending blocks whose device work may be done by now;
//! 3. the arena: the smallest hole in the shared regions;
//! 4. the cache again, for a block that is longer by a small slack;
//! 5. a new region: shared for a small request, of exactly its length for a large one;
//! 6. over the budget: all idle blocks go back to the arena and join there, idle regions go back to the system, and
//!    steps 3 and 5 have another try;
//! 7. waiting, when the caller allows it, for a block to come back, or for device work to end.
//!
//! So blocks that a loop frees and takes again stay cut as they are while the budget lasts, and its second lap is
//! served by step 1 alone.
//!
//! No lock is held over a system call: a new region is charged to the budget first, made, and entered then.

mod cache;
mod debug;
mod give_back;
mod growth;
mod in_flight;
mod inner;
#[cfg(all(test, loom))]
mod model;
mod pending;
mod record;
mod store;
mod sync;
mod unfinished;

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::block::Block;
use crate::driver::{Device, Event, Registering, Stream};
use crate::error::{Error, Result};
use crate::limits::{self, Budget, Source};
use crate::os;
use crate::region::{Pages, Progress, RegionOptions};
use crate::registry::shared::global;

pub use debug::LiveBlock;
use in_flight::Known;
use inner::Inner;
use record::Record;
pub(crate) use record::Slot;
use sync::{Mutex, MutexGuard, lock, per_process};

const MIB: usize = 1 << 20;

/// How a pool is made.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// Most bytes that the pool ever holds. `None`: 90 % of what the machine, the control group and the memlock limit
    /// leave at that moment (all of the latter).
    pub max_bytes: Option<usize>,
    /// How its regions are made.
    pub region: RegionOptions,
    /// The devices that its regions are registered with. Empty: its memory is only locked.
    pub devices: Vec<Arc<dyn Device>>,
    /// Go on with locked memory where a device refuses; `Stats::unregistered` then says why.
    pub register_if_possible: bool,
    /// Fill released blocks with a pattern, and find out who writes to them after that. Slow.
    pub debug: bool,
}

impl PoolOptions {
    pub(crate) fn registering(&self) -> Registering<'_> {
        Registering { devices: &self.devices, required: !self.register_if_possible }
    }
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
    /// Never reused: an event of theirs failed, so that nobody knows whether device work still uses them.
    pub quarantined_bytes: usize,
    /// Why the newest of these are.
    pub quarantine_reason: Option<String>,
    /// Could not be given back to the system; still counted as reserved.
    pub leaked_bytes: usize,
    /// The budget.
    pub max_bytes: usize,
    /// The most that was ever reserved.
    pub peak_reserved_bytes: usize,
    /// Registered with each device, by its name.
    pub registered_bytes: BTreeMap<String, usize>,
    /// Why the newest region that is not registered is not.
    pub unregistered: Option<String>,
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
        if let Some(node) = options.region.numa {
            limits::check_node(node)?;
        }
        if options.max_bytes == Some(0) {
            return Err(Error::invalid("max_bytes", "a pool needs a budget of at least one byte"));
        }
        check_together(&options.devices)?;
        unfinished::finish();
        let inner = Inner::new(options, budget);
        pools().push(Arc::downgrade(&inner));
        Ok(Self { inner })
    }

    /// How it was made.
    pub fn options(&self) -> &PoolOptions {
        &self.inner.options
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
        self.hand_out(self.inner.obtain(padded, len, timeout, progress)?, len)
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
        self.inner.cache.take(padded, len)?.map(|slot| self.hand_out(slot, len)).transpose()
    }

    fn hand_out(&self, slot: Slot, len: usize) -> Result<Block> {
        slot.record.note_requested(len);
        let checked = if self.inner.ledger.is_some() { self.inner.begin_generation(&slot.record) } else { Ok(()) };
        let block = Block::new(slot, len); // goes back, if it was written to, and is kept from use
        checked.map(|()| block)
    }

    /// The live block of this pool that holds a range.
    ///
    /// # Errors
    /// `Forked`; `Invalid` where there is none, which says so when it is one of another pool.
    pub fn find(&self, range: &Range<usize>) -> Result<Found> {
        self.inner.check_process()?;
        match self.inner.find(range).filter(|record| record.is_owned()) {
            Some(record) => Ok(Found { pool: Arc::clone(&self.inner), record }),
            None if find(range).is_ok() => {
                Err(Error::invalid("memory", "a block of another pool; ask that pool, or pinpool itself"))
            }
            None => Err(no_block(range)),
        }
    }

    /// Notes where a block was taken, for reports of debug mode.
    pub fn note_origin(&self, block: &Block, origin: &str) {
        if !block.is_empty() {
            self.inner.note_origin(block.as_ptr() as usize, origin.into());
        }
    }

    /// Every block that has an owner, in debug mode; otherwise nothing is kept of them.
    pub fn live_blocks(&self) -> Vec<LiveBlock> {
        self.inner.live_blocks()
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
        unfinished::finish();
        self.inner.reserve(len, progress)?;
        if self.is_closed() {
            self.inner.trim()?; // closed meanwhile
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Gives every idle region back to the system, and answers how many bytes that were.
    ///
    /// # Errors
    /// `Os` where the system refuses one; the others are given back all the same.
    pub fn trim(&self) -> Result<usize> {
        self.inner.check_process()?;
        unfinished::finish();
        self.inner.trim()
    }

    /// Refuses further requests and gives back what is idle; live blocks go to the system as they are dropped. What device
    /// work may still use goes once that work is done and a pool of the process is made, grown by `reserve`, trimmed,
    /// closed, or short of memory.
    /// A second call does nothing.
    ///
    /// # Errors
    /// As [`trim`](Self::trim).
    pub fn close(&self) -> Result<()> {
        if self.inner.check_process().is_err() {
            return Ok(()); // it is the parent's to close
        }
        self.inner.cache.close();
        self.inner.announce();
        let trimmed = self.inner.trim();
        self.inner.finish_later();
        unfinished::finish();
        trimmed.map(|_| ())
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
        if !self.is_closed() {
            let _ = self.close(); // what the system refused is counted as leaked
        }
    }
}

/// Unlocks the live block that holds this address, in whatever pool. Its memory stays mapped until its last owner is
/// gone. `false`: no live block holds it, or it was unlocked before.
///
/// # Errors
/// As [`unpin_within`], which this is without being interrupted.
pub fn unpin(address: usize) -> Result<bool> {
    unpin_within(address, &mut |_, _| ControlFlow::Continue(()))
}

/// As [`unpin`], and asks `progress` now and then, with no bytes, while a driver that was told to give the block up has
/// not forgotten it.
///
/// # Errors
/// `Invalid` for memory that a registration pins, else as [`Pinned::unpin`](crate::pinned::Pinned::unpin): the block is
/// still pinned.
pub fn unpin_within(address: usize, progress: &mut Progress<'_>) -> Result<bool> {
    if global().read(|registry| registry.find(address).is_some_and(|found| found.adopted)) {
        return Err(Error::invalid("memory", "a Registration pins it; close() the Registration instead"));
    }
    let alive: Vec<Arc<Inner>> = pools().iter().filter_map(Weak::upgrade).collect();
    alive.iter().find_map(|pool| pool.unpin(address, progress)).unwrap_or(Ok(false))
}

/// A block that somebody owns.
#[derive(Debug)]
pub struct Found {
    pool: Arc<Inner>,
    record: Arc<Record>,
}

impl Found {
    /// Keeps the block from reuse until the work is done that was queued on a stream before. Does nothing for memory of a
    /// pool without devices: copies of it are done when the call that made them returns.
    ///
    /// # Errors
    /// `Invalid` where the block was released meanwhile, or there is no such device; else as [`Device::record`]: then the
    /// block is not reused at all, unless a later call succeeds.
    pub fn record_stream(&self, stream: Stream) -> Result<()> {
        let devices = &self.pool.options.devices;
        let Some(first) = devices.first() else { return Ok(()) };
        let record_on = |device: &Arc<dyn Device>| Arc::clone(device).record(stream);
        let is_for_this_driver = |answer: &Result<_>| !matches!(answer, Err(Error::Unsupported { .. }));
        self.record
            .follow(|| devices.iter().map(record_on).find(is_for_this_driver).unwrap_or_else(|| record_on(first)))
    }

    /// Keeps the block from reuse until an event is done.
    ///
    /// # Errors
    /// `Invalid` where the block was released meanwhile.
    pub fn defer(&self, event: Arc<dyn Event>) -> Result<()> {
        self.record.follow(|| Ok(event))
    }

    /// Waits until the device work is done that was recorded of the block. `progress` is asked now and then, with no bytes.
    ///
    /// # Errors
    /// `Invalid` where nobody will ever know; `Interrupted` when `progress` says so.
    pub(crate) fn settle(&self, progress: &mut Progress<'_>) -> Result<()> {
        const STEP: Duration = Duration::from_micros(200);
        while self.record.has_device_work() {
            match self.record.look() {
                Known::Done => break,
                Known::Never(reason) => {
                    let why = format!("nobody knows whether device work still uses it ({reason}); use another block");
                    return Err(Error::invalid("memory", why));
                }
                Known::Busy => std::thread::sleep(STEP),
            }
            if progress(0, 0).is_break() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Keeps the block from reuse for as long as the hold lives, released or not.
    ///
    /// # Errors
    /// `Invalid` where the block was released meanwhile.
    pub(crate) fn hold(self) -> Result<Hold> {
        let ended = Arc::new(Ended::default());
        let event: Arc<dyn Event> = Arc::<Ended>::clone(&ended);
        self.defer(Arc::clone(&event))?;
        Ok(Hold { found: self, ended, event })
    }

    /// First byte of the block, and the end of what its owner asked for.
    pub(crate) fn requested(&self) -> Range<usize> {
        self.record.address..self.record.address + self.record.requested()
    }

    /// The device that the calling thread works on, of those that the block is registered with or that such a registration
    /// serves, by kind and ordinal; else the first of its pool. `None`: the pool has no devices.
    pub fn device(&self) -> Option<(&'static str, u32)> {
        let first = self.pool.options.devices.first()?;
        Some((first.id().kind, first.current_ordinal().unwrap_or(first.id().ordinal)))
    }
}

/// Keeps a block from reuse while it lives, whatever becomes of the block's owners: for work whose end its maker knows.
#[derive(Debug)]
pub(crate) struct Hold {
    found: Found,
    ended: Arc<Ended>,
    event: Arc<dyn Event>,
}

/// The event of a hold.
#[derive(Debug, Default)]
struct Ended(AtomicBool);

impl Event for Ended {
    fn query(&self) -> std::result::Result<bool, String> {
        Ok(self.0.load(Ordering::Acquire))
    }

    fn is_device_work(&self) -> bool {
        false
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.ended.0.store(true, Ordering::Release);
        if self.found.pool.check_process().is_ok() {
            self.found.pool.end_hold(&self.found.record, &self.event);
        }
    }
}

/// The block of whatever pool that holds a range.
///
/// # Errors
/// `Invalid` where there is none, or nobody owns it.
pub fn find(range: &Range<usize>) -> Result<Found> {
    let alive: Vec<Arc<Inner>> = pools().iter().filter_map(Weak::upgrade).collect();
    let found = alive.into_iter().find_map(|pool| pool.find(range).map(|record| Found { pool, record }));
    found.filter(|found| found.record.is_owned()).ok_or_else(|| no_block(range))
}

fn no_block(range: &Range<usize>) -> Error {
    let (start, len) = (range.start, range.end - range.start);
    let why = "is in no live block of a pool; only those are reused, so keep other memory until its copies are done";
    Error::invalid("memory", format!("{start:#x}+{len} {why}"))
}

pub(crate) fn make_statics() {
    drop(pools());
    unfinished::make_statics();
}

/// Every pool of the process that may still be alive.
fn pools() -> MutexGuard<'static, Vec<Weak<Inner>>> {
    per_process! { static POOLS: Mutex<Vec<Weak<Inner>>>; }
    let mut pools = lock(POOLS.get());
    pools.retain(|pool| pool.strong_count() > 0);
    pools
}

/// Refuses devices that one range cannot be registered with together.
fn check_together(devices: &[Arc<dyn Device>]) -> Result<()> {
    let pairs =
        devices.iter().enumerate().flat_map(|(at, first)| devices[at + 1..].iter().map(move |second| (first, second)));
    for (first, second) in pairs {
        let (first_id, second_id) = (first.id(), second.id());
        if first_id.kind == second_id.kind && !first.serves(second_id.kind, second_id.ordinal) {
            let why = "this driver maps a range for one device only; use one pool a device";
            return Err(Error::unsupported(format!("one pool for {first_id} and {second_id}"), why));
        }
    }
    Ok(())
}
