//! Recently freed blocks, keyed by their exact length, in shards so that threads do not meet.
//!
//! A thread takes from and returns to the shard that it was dealt, and looks into the others only when its own has
//! nothing. The counters and the leases live in the shards too: a pair of take and return touches one lock, and no
//! line that all threads write.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::inner::Inner;
use super::record::{Record, Slot};
use super::sync::{Mutex, MutexGuard, deal, lock, thread_local};
use crate::error::{Error, Result};

/// A model does not get better by more, only slower.
const SHARDS: usize = if cfg!(loom) { 2 } else { 16 };
/// Lists for so many lengths are kept when they run empty.
const KEPT_LISTS: usize = 256;

/// A shard's share in its pool. Blocks hold the lease of the shard that they were taken through, which keeps the pool
/// alive without a reference count that all threads write. The shard itself holds it until the pool is closed.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) pool: Arc<Inner>,
}

/// What a pool's callers hold. A shard's own numbers may be negative: a block can be taken through one and returned
/// through another.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) requested_bytes: isize,
    pub(super) allocated_bytes: isize,
    pub(super) blocks: isize,
    pub(super) hits: usize,
    pub(super) misses: usize,
}

#[derive(Debug, Default)]
#[repr(align(128))] // two lines: some processors fetch them in pairs
struct Shard(Mutex<Cache>);

#[derive(Debug, Default)]
struct Cache {
    /// Lists stay when they run empty, so that a steady loop neither allocates nor rebalances; but not too many.
    by_len: BTreeMap<usize, Vec<Arc<Record>>>,
    counters: Counters,
    /// `None` before the pool opens and after it is closed.
    lease: Option<Arc<Lease>>,
}

/// The cache in front of a pool.
#[derive(Debug, Default)]
pub(super) struct ShardedCache {
    shards: [Shard; SHARDS],
}

impl ShardedCache {
    /// Deals out the leases.
    pub(super) fn open(&self, pool: &Arc<Inner>) {
        for shard in &self.shards {
            shard.lock().lease = Some(Arc::new(Lease { pool: Arc::clone(pool) }));
        }
    }

    /// From now on nothing is taken, and `put` hands every block back.
    pub(super) fn close(&self) {
        for shard in &self.shards {
            let lease = shard.lock().lease.take();
            drop(lease); // with no lock held: it may be the pool's last
        }
    }

    /// Takes a block of exactly this length from the thread's own shard; `Closed` once the pool is.
    pub(super) fn take(&self, len: usize, requested: usize) -> Result<Option<Slot>> {
        let mut cache = own(&self.shards).lock();
        if cache.lease.is_none() {
            return Err(Error::Closed);
        }
        Ok(cache.take(len, requested))
    }

    /// Takes a block of exactly this length from any shard.
    pub(super) fn steal(&self, len: usize, requested: usize) -> Option<Slot> {
        self.shards.iter().find_map(|shard| shard.lock().take(len, requested))
    }

    /// Takes the smallest block of `len` to `longest` bytes that any shard has.
    pub(super) fn take_within(&self, len: usize, longest: usize, requested: usize) -> Option<Slot> {
        let smallest = |shard: &Shard| {
            let cache = shard.lock();
            let fits = cache.by_len.range(len..=longest).find(|(_, records)| !records.is_empty());
            fits.map(|(&len, _)| len)
        };
        let best = self.shards.iter().filter_map(smallest).min()?;
        self.steal(best, requested)
    }

    /// Counts and leases a block that did not come from the cache. A closed pool has no lease: the block comes back.
    pub(super) fn lease(&self, record: Arc<Record>, requested: usize) -> std::result::Result<Slot, Arc<Record>> {
        let mut cache = own(&self.shards).lock();
        let Some(lease) = cache.lease.clone() else { return Err(record) };
        record.take();
        cache.counters.misses += 1;
        cache.counters.take(&record, requested);
        Ok(Slot { record, lease })
    }

    /// Puts a block into the thread's own shard; hands it back when the pool is closed.
    pub(super) fn put(&self, record: Arc<Record>, requested: usize) -> std::result::Result<(), Arc<Record>> {
        let mut cache = own(&self.shards).lock();
        cache.counters.give_back(&record, requested);
        if cache.lease.is_none() {
            return Err(record);
        }
        cache.by_len.entry(record.len).or_default().push(record);
        Ok(())
    }

    /// Puts a block in that was counted as returned before; hands it back when the pool is closed.
    pub(super) fn restock(&self, record: Arc<Record>) -> std::result::Result<(), Arc<Record>> {
        let mut cache = own(&self.shards).lock();
        if cache.lease.is_none() {
            return Err(record);
        }
        cache.by_len.entry(record.len).or_default().push(record);
        Ok(())
    }

    /// Counts a block that comes back without entering the cache.
    pub(super) fn count_returned(&self, record: &Record, requested: usize) {
        own(&self.shards).lock().counters.give_back(record, requested);
    }

    /// Takes out every block that the predicate names.
    pub(super) fn drain(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Arc<Record>> {
        let mut drained = Vec::new();
        for shard in &self.shards {
            shard.lock().by_len.retain(|_, records| {
                drained.extend(records.extract_if(.., |record| wanted(record)));
                !records.is_empty()
            });
        }
        drained
    }

    /// The sum over all shards, at one moment.
    pub(super) fn counters(&self) -> Counters {
        let caches: Vec<_> = self.shards.iter().map(Shard::lock).collect();
        caches.iter().fold(Counters::default(), |sum, cache| sum + cache.counters)
    }

    /// `Closed` once the pool is.
    pub(super) fn check_open(&self) -> Result<()> {
        if own(&self.shards).lock().lease.is_some() { Ok(()) } else { Err(Error::Closed) }
    }
}

impl Shard {
    fn lock(&self) -> MutexGuard<'_, Cache> {
        lock(&self.0)
    }
}

impl Cache {
    fn take(&mut self, len: usize, requested: usize) -> Option<Slot> {
        let lease = self.lease.as_ref()?;
        let records = self.by_len.get_mut(&len)?;
        let record = records.pop()?;
        if records.is_empty() && self.by_len.len() > KEPT_LISTS {
            self.by_len.remove(&len);
        }
        record.take();
        self.counters.take(&record, requested);
        self.counters.hits += 1;
        Some(Slot { record, lease: Arc::clone(lease) })
    }
}

impl Counters {
    fn take(&mut self, record: &Record, requested: usize) {
        self.requested_bytes += requested.cast_signed();
        self.allocated_bytes += record.len.cast_signed();
        self.blocks += 1;
    }

    fn give_back(&mut self, record: &Record, requested: usize) {
        self.requested_bytes -= requested.cast_signed();
        self.allocated_bytes -= record.len.cast_signed();
        self.blocks -= 1;
    }
}

impl std::ops::Add for Counters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            requested_bytes: self.requested_bytes + other.requested_bytes,
            allocated_bytes: self.allocated_bytes + other.allocated_bytes,
            blocks: self.blocks + other.blocks,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
        }
    }
}

/// The shard of this thread, dealt in turn.
fn own(shards: &[Shard; SHARDS]) -> &Shard {
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(deal() % SHARDS);
        }
        &shards[own.get()]
    })
}
