//! The way back: blocks to the cache, idle regions to the system, and what must wait before it can go.

use std::cell::Cell;
use std::sync::Arc;

use super::inner::Inner;
use super::record::{Record, Return};
use crate::error::Result;
use crate::pinned::{Pinned, Released};
use crate::region::Progress;

impl Inner {
    /// Takes a block back from its last owner.
    pub(super) fn take_back(&self, record: Arc<Record>, requested: usize) {
        match record.give_back() {
            Return::Whole => {
                if let Err(record) = self.cache.put(record, requested) {
                    let _ = self.dispose(&[record]); // what the system refuses is counted as leaked
                }
                self.announce();
            }
            Return::Unpinned => {
                self.cache.count_returned(&record, requested);
                self.put_aside(record);
            }
            Return::Later => self.cache.count_returned(&record, requested),
        }
    }

    /// Keeps a block whose pages must be locked before it can be reused.
    fn put_aside(&self, record: Arc<Record>) {
        self.store().unpinned.push(record);
        if self.cache.check_open().is_err() {
            let _ = self.trim(); // what the system refuses is counted as leaked
        }
        self.announce();
    }

    /// Gives everything idle back to the system, and answers how many bytes that were.
    pub(super) fn trim(&self) -> Result<usize> {
        let mut releasing = self.releasing();
        let mut idle = self.cache.drain(|_| true);
        let closed = self.cache.check_open().is_err();
        idle.extend(self.reclaim_unpinned(|record| !record.own_region && !closed)); // what is unmapped needs no lock
        let freed = self.dispose(&idle);
        releasing.moved = !idle.is_empty() || freed.as_ref().is_ok_and(|&bytes| bytes > 0);
        freed
    }

    /// Joins the idle small blocks in the arena, and gives idle regions of `len` bytes, or what there is, back to the
    /// system. False: nothing was idle, and no other thread was giving anything back.
    pub(super) fn make_room(&self, len: usize, progress: &mut Progress<'_>) -> Result<bool> {
        let released = self.store().released;
        let wanted = Cell::new(len);
        let take = |record: &Record| {
            let taken = !record.own_region || wanted.get() > 0;
            if taken && record.own_region {
                wanted.set(wanted.get().saturating_sub(record.len));
            }
            taken
        };
        let mut releasing = self.releasing();
        let idle = self.cache.drain(take);
        releasing.moved = self.dispose(&idle)? > 0 || !idle.is_empty();
        let moved = releasing.moved;
        drop(releasing);
        if moved { Ok(true) } else { self.await_releases(released, progress) }
    }

    /// Takes blocks out of the books, and gives the regions that they leave idle back to the system, and those that
    /// lingered before.
    pub(super) fn dispose(&self, records: &[Arc<Record>]) -> Result<usize> {
        let regions = {
            let mut store = self.store();
            let mut regions: Vec<_> = records.iter().filter_map(|record| store.give_back(record)).collect();
            regions.extend(store.take_idle());
            regions
        };
        let lingering = std::mem::take(&mut self.store().lingering);
        let (mut freed, mut refusal) = (0, None); // a refusal does not keep the others from being released
        for region in regions.into_iter().chain(lingering) {
            match Arc::try_unwrap(region).map(|region| self.release(region)) {
                Ok(Ok(bytes)) => freed += bytes,
                Ok(Err(error)) => refusal = Some(error),
                // Somebody has just asked to unpin a block that is gone now.
                Err(in_use) => self.store().lingering.push(in_use),
            }
        }
        refusal.map_or(Ok(freed), Err)
    }

    /// Gives one region back, and answers how many bytes that were: none where a driver still holds on to it.
    pub(super) fn release(&self, pinned: Pinned) -> Result<usize> {
        let len = pinned.region().len();
        match pinned.release() {
            Ok(Released::Gone) => {
                self.store().refund(len);
                Ok(len)
            }
            Ok(Released::Lingering(pinned)) => {
                self.store().lingering.push(Arc::new(pinned));
                Ok(0)
            }
            Err(error) => {
                self.store().count_leaked(len);
                Err(error)
            }
        }
    }

    /// Puts blocks that came back unlocked into the cache, locked again. False: there were none.
    pub(super) fn restock_unpinned(&self) -> bool {
        let ready = self.reclaim_unpinned(|_| true);
        let any = !ready.is_empty();
        for record in ready {
            self.restock(record);
        }
        any
    }

    /// Puts a whole block that was counted as returned into the cache.
    fn restock(&self, record: Arc<Record>) {
        match self.cache.restock(record) {
            Ok(()) => self.announce(),
            Err(record) => drop(self.dispose(&[record])), // what the system refuses is counted as leaked
        }
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
            region.repin(&record.range())?;
        }
        record.repinned();
        Ok(())
    }

    /// Unlocks a live block. `None`: the address lies in no block of this pool.
    pub(super) fn unpin(&self, address: usize) -> Option<Result<bool>> {
        let (record, region) = self.store().find_block(address)?;
        if !record.begin_unpin() {
            return Some(Ok(false));
        }
        let unpinned = region.unpin(&record.range());
        match record.end_unpin(matches!(unpinned, Ok(true))) {
            Some(Return::Unpinned) => self.put_aside(record),
            Some(_) => self.restock(record),
            None => {}
        }
        drop(region);
        if self.cache.check_open().is_err() {
            let _ = self.dispose(&[]); // the region may have become idle meanwhile
        }
        Some(unpinned)
    }
}
