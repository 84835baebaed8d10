//! The way back: blocks to the cache, idle regions to the system, and what must wait before it can go.

use std::cell::Cell;
use std::sync::Arc;

use super::in_flight::Known;
use super::inner::Inner;
use super::pending::{Candidate, Queue};
use super::record::{Record, Return, Unpinning};
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::pinned::{Pinned, Released};
use crate::region::Progress;

/// What became of pending blocks.
#[derive(Default)]
struct Sorted {
    /// Some are in the cache now.
    restocked: bool,
    /// To be disposed of.
    useless: Vec<Arc<Record>>,
}

impl Inner {
    /// Takes a block back from its last owner. Asks no event: drivers and Python are not to be called from a deleter.
    pub(super) fn take_back(self: &Arc<Self>, record: Arc<Record>, requested: usize) {
        match record.give_back() {
            Return::Whole => {
                if self.ledger.is_some() {
                    self.poison(&record);
                }
                if let Err(record) = self.cache.put(record, requested) {
                    let _ = self.dispose(&[record]); // what the system refuses is counted as leaked
                }
                self.announce();
            }
            Return::Pending => {
                self.cache.count_returned(&record, requested);
                self.put_aside(record);
            }
            Return::Later => self.cache.count_returned(&record, requested),
        }
    }

    /// Keeps a block that cannot be reused yet.
    fn put_aside(self: &Arc<Self>, record: Arc<Record>) {
        let must_wait = record.is_in_flight();
        if record.is_spent() && !must_wait {
            let _ = self.dispose(&[record]); // what the system refuses is counted as leaked
            return self.announce();
        }
        if !must_wait && !record.is_unpinned() {
            self.poison(&record); // what used it has ended this very moment
            return self.restock(record);
        }
        self.store().pending.add(record);
        if self.cache.check_open().is_err() {
            if must_wait {
                self.finish_later();
            } else {
                let _ = self.trim_without_asking(); // what the system refuses is counted as leaked
            }
        }
        self.announce();
    }

    /// Gives everything idle back to the system, and answers how many bytes that were.
    pub(super) fn trim(&self) -> Result<usize> {
        let closed = self.cache.check_open().is_err();
        // Not while this counts as releasing: an event may want memory while it is asked.
        let useless = self.sort_pending(usize::MAX, |record| record.own_region || closed).useless;
        let mut releasing = self.releasing();
        let mut idle = self.cache.drain(|_| true);
        let found = self.check_idle(&mut idle);
        idle.extend(useless);
        let freed = self.dispose(&idle);
        releasing.moved = !idle.is_empty() || freed.as_ref().is_ok_and(|&bytes| bytes > 0);
        found.and(freed)
    }

    /// Gives the blocks of a closed pool back that no device work may use.
    fn trim_without_asking(&self) -> Result<usize> {
        let mut store = self.store();
        let free: Vec<_> =
            store.pending.others(usize::MAX).into_iter().filter(|one| !one.record.is_in_flight()).collect();
        let taken: Vec<_> = free.into_iter().filter(|one| store.pending.take(one)).map(|one| one.record).collect();
        drop(store);
        self.dispose(&taken)
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
        let mut idle = self.cache.drain(take);
        let found = self.check_idle(&mut idle);
        releasing.moved = self.dispose(&idle)? > 0 || !idle.is_empty();
        found?;
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

    /// Puts pending blocks that can be used again into the cache, having asked at most so many of those that are in no
    /// line. False: there were none.
    pub(super) fn restock_pending(&self, most: usize) -> bool {
        let Sorted { restocked, useless } = self.sort_pending(most, |_| false);
        if !useless.is_empty() {
            let _ = self.dispose(&useless); // what the system refuses is counted as leaked
        }
        restocked
    }

    /// A hold on a block has ended. If the block came back meanwhile, and nothing else uses it, it is at hand again: no
    /// event is asked.
    pub(super) fn end_hold(&self, record: &Arc<Record>, event: &Arc<dyn Event>) {
        record.end_flight(event);
        if record.is_in_flight() || record.is_unpinned() || record.is_spent() {
            return;
        }
        let mut store = self.store();
        let waiting = store.pending.find(record);
        let is_back = waiting.is_some_and(|waiting| store.pending.take(&waiting));
        drop(store);
        if is_back {
            self.poison(record);
            self.restock(Arc::clone(record));
        }
    }

    /// Puts a whole block that was counted as returned into the cache.
    fn restock(&self, record: Arc<Record>) {
        match self.cache.restock(record) {
            Ok(()) => self.announce(),
            Err(record) => drop(self.dispose(&[record])), // what the system refuses is counted as leaked
        }
    }

    /// Puts those pending blocks into the cache that no device work uses any more, their pages locked again. Those whose
    /// pages the kernel does not lock stay where they are; what is not worth a lock, or cannot be used again, comes out.
    fn sort_pending(&self, most: usize, is_not_worth_it: impl Fn(&Record) -> bool) -> Sorted {
        let mut sorted = Sorted::default();
        let mut refused = Vec::new();
        self.settle(most, |record| {
            if record.is_spent() || record.is_unpinned() && is_not_worth_it(&record) {
                sorted.useless.push(record);
            } else if record.is_unpinned() && self.repin(&record).is_err() {
                refused.push(record);
            } else {
                sorted.restocked = true;
                self.poison(&record);
                self.restock(record); // at once: others may want it while the next event is asked
            }
        });
        let mut store = self.store();
        for record in refused {
            store.pending.add(record);
        }
        sorted
    }

    /// Asks the events of pending blocks, and takes out those whose device work is done. Past a block that must wait, only
    /// those of its own queue are left out: their events come later still.
    fn settle(&self, most: usize, mut settled: impl FnMut(Arc<Record>)) {
        for queue in self.pending_queues() {
            while self.first_pending(queue).is_some_and(|first| self.has_moved(&first, &mut settled)) {}
        }
        for other in self.other_pending(most) {
            self.has_moved(&other, &mut settled);
        }
    }

    fn pending_queues(&self) -> Vec<Queue> {
        self.store().pending.queues()
    }

    fn first_pending(&self, queue: Queue) -> Option<Candidate> {
        self.store().pending.first(queue)
    }

    fn other_pending(&self, most: usize) -> Vec<Candidate> {
        self.store().pending.others(most)
    }

    /// Asks for whom a block waits. False: it has to stay where it is.
    fn has_moved(&self, waiting: &Candidate, settled: &mut impl FnMut(Arc<Record>)) -> bool {
        let known = waiting.record.look();
        if known == Known::Busy && waiting.is_in_its_place() {
            return false;
        }
        let mut store = self.store();
        if store.pending.take(waiting) {
            let record = Arc::clone(&waiting.record);
            match known {
                Known::Busy => store.pending.add(record), // for another event now
                Known::Done => {
                    drop(store);
                    settled(record);
                }
                Known::Never(reason) => store.quarantine(record, reason),
            }
        }
        true
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
    pub(super) fn unpin(self: &Arc<Self>, address: usize, progress: &mut Progress<'_>) -> Option<Result<bool>> {
        let (record, region) = self.store().find_block(address)?;
        if record.is_in_flight() {
            record.look();
        }
        match record.begin_unpin() {
            Unpinning::Begun => {}
            Unpinning::Needless => return Some(Ok(false)),
            Unpinning::InFlight => {
                let why = "device work that was recorded on it is not done; synchronize its stream first";
                return Some(Err(Error::invalid("memory", why)));
            }
        }
        let unpinned = region.unpin(&record.range(), progress);
        if region.has_lost_registrations() {
            record.spend();
        }
        let returned = record.end_unpin(matches!(unpinned, Ok(true)));
        drop(region); // before the block is put aside: what is spent goes at once, and nobody else may hold it then
        match returned {
            Some(Return::Pending) => self.put_aside(record),
            Some(_) => self.restock(record),
            None => {}
        }
        if self.cache.check_open().is_err() {
            let _ = self.dispose(&[]); // the region may have become idle meanwhile
        }
        Some(unpinned)
    }
}
