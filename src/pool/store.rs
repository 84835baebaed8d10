//! What a pool owns behind its cache: the regions, the free space in the shared ones, and the budget's count. Makes
//! no system call; the pool keeps it behind one lock.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::pending::Pending;
use super::record::Record;
use crate::arena::Arena;
use crate::pinned::Pinned;
use crate::region::Pages;

#[derive(Debug, Default)]
pub(super) struct Store {
    arena: Arena,
    regions: BTreeMap<usize, Arc<Pinned>>,
    /// Every block that is cut, live or cached, by its address.
    blocks: BTreeMap<usize, Arc<Record>>,
    /// Blocks that came back and cannot be reused yet.
    pub(super) pending: Pending,
    /// Blocks that came back and are never reused: whether device work still uses them cannot be known.
    quarantined: Vec<Arc<Record>>,
    quarantine_reason: Option<String>,
    /// Regions that could not be given back yet: a driver still knows them, or somebody is about to look at them.
    pub(super) lingering: Vec<Arc<Pinned>>,
    reserved: usize,
    peak_reserved: usize,
    leaked: usize,
    pages: Option<Pages>,
    unregistered: Option<String>,
    /// Counts what waiting callers wait for.
    pub(super) returns: u64,
    /// Threads that are giving memory back at this moment.
    pub(super) releasing: usize,
    /// How often one of them had something to give back.
    pub(super) released: u64,
}

impl Store {
    /// Charges a region to be made, unless that would pass the limit.
    pub(super) fn charge(&mut self, len: usize, limit: usize) -> bool {
        let total = self.reserved.saturating_add(len);
        if total > limit {
            return false;
        }
        self.reserved = total;
        self.peak_reserved = self.peak_reserved.max(total);
        true
    }

    /// Takes back the charge of a region that was not made, or is no more.
    pub(super) fn refund(&mut self, len: usize) {
        self.reserved -= len;
    }

    /// A region that the system did not take back stays charged.
    pub(super) fn count_leaked(&mut self, len: usize) {
        self.leaked += len;
    }

    /// Enters a region whose space is to be cut.
    pub(super) fn add_shared(&mut self, pinned: Pinned) {
        let (address, len) = (pinned.region().address(), pinned.region().len());
        self.add(pinned);
        self.arena.add_span(address, len);
    }

    /// Enters a region that is one block.
    pub(super) fn add_own(&mut self, pinned: Pinned) -> Arc<Record> {
        let (address, len) = (pinned.region().address(), pinned.region().len());
        self.add(pinned);
        self.record(address, len, true)
    }

    fn add(&mut self, pinned: Pinned) {
        self.pages = Some(pinned.region().pages());
        if let Some(refusal) = pinned.refusal() {
            self.unregistered = Some(refusal.to_string());
        }
        self.regions.insert(pinned.region().address(), Arc::new(pinned));
    }

    /// Cuts a block from the smallest hole that holds it.
    pub(super) fn cut(&mut self, len: usize) -> Option<Arc<Record>> {
        let address = self.arena.take(len)?;
        Some(self.record(address, len, false))
    }

    fn record(&mut self, address: usize, len: usize, own_region: bool) -> Arc<Record> {
        let record = Arc::new(Record::new(address, len, own_region));
        self.blocks.insert(address, Arc::clone(&record));
        record
    }

    /// Takes a block back: its space returns to the arena, or its own region comes out to be released.
    pub(super) fn give_back(&mut self, record: &Record) -> Option<Arc<Pinned>> {
        self.blocks.remove(&record.address);
        if record.own_region {
            return self.regions.remove(&record.address);
        }
        self.arena.give(record.address, record.len);
        None
    }

    /// Never lets a block be reused, nor its region be given back.
    pub(super) fn quarantine(&mut self, record: Arc<Record>, reason: String) {
        self.quarantined.push(record);
        self.quarantine_reason = Some(reason);
    }

    pub(super) fn quarantined_bytes(&self) -> usize {
        self.quarantined.iter().map(|record| record.len).sum()
    }

    /// Why the newest block that is in quarantine is.
    pub(super) fn quarantine_reason(&self) -> Option<&str> {
        self.quarantine_reason.as_deref()
    }

    /// Whether something is to be given back later.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.pending.is_empty() || !self.lingering.is_empty()
    }

    /// Takes out the shared regions that no block is cut from.
    pub(super) fn take_idle(&mut self) -> Vec<Arc<Pinned>> {
        let idle = self.arena.remove_idle_spans();
        idle.into_iter().filter_map(|address| self.regions.remove(&address)).collect()
    }

    /// The block that holds this address, live or not, and its region.
    pub(super) fn find_block(&self, address: usize) -> Option<(Arc<Record>, Arc<Pinned>)> {
        let (_, record) = self.blocks.range(..=address).next_back()?;
        let region = self.region_of(record)?;
        record.range().contains(&address).then(|| (Arc::clone(record), region))
    }

    /// Every block that is cut.
    pub(super) fn records(&self) -> impl Iterator<Item = &Arc<Record>> {
        self.blocks.values()
    }

    /// The region that a block was cut from.
    pub(super) fn region_of(&self, record: &Record) -> Option<Arc<Pinned>> {
        self.regions.range(..=record.address).next_back().map(|(_, region)| Arc::clone(region))
    }

    fn take_region_of(&mut self, record: &Record) -> Option<Arc<Pinned>> {
        let (&address, _) = self.regions.range(..=record.address).next_back()?;
        let holds = self.regions[&address].region().address() + self.regions[&address].region().len() > record.address;
        if holds { self.regions.remove(&address) } else { None }
    }

    pub(super) fn reserved(&self) -> usize {
        self.reserved
    }

    pub(super) fn peak_reserved(&self) -> usize {
        self.peak_reserved
    }

    pub(super) fn leaked(&self) -> usize {
        self.leaked
    }

    pub(super) fn regions(&self) -> usize {
        self.regions.len()
    }

    pub(super) fn pages(&self) -> Option<Pages> {
        self.pages
    }

    /// Bytes of the shared regions.
    pub(super) fn shared_bytes(&self) -> usize {
        self.arena.span_bytes()
    }

    /// Bytes of locked regions, leaked ones included, less the blocks whose pages were unlocked.
    pub(super) fn locked_bytes(&self) -> usize {
        let regions: usize = self.regions.values().map(|pinned| pinned.region().len()).sum();
        let unpinned: usize = self.blocks.values().filter(|record| record.is_unpinned()).map(|record| record.len).sum();
        regions + self.leaked - unpinned
    }

    /// Bytes that are idle and cannot be reused yet.
    pub(super) fn pending_bytes(&self) -> usize {
        let lingering: usize = self.lingering.iter().map(|pinned| pinned.region().len()).sum();
        self.pending.bytes() + lingering
    }

    /// Bytes that are never to be used again.
    pub(super) fn lost_bytes(&self) -> usize {
        self.quarantined_bytes() + self.leaked
    }

    /// Bytes that are neither handed out nor can be reused now.
    pub(super) fn withheld_bytes(&self) -> usize {
        self.pending_bytes() + self.lost_bytes()
    }

    /// Bytes that are idle and can be reused, when so many are handed out.
    pub(super) fn cached_bytes(&self, allocated: usize) -> usize {
        self.reserved.saturating_sub(allocated + self.withheld_bytes())
    }

    /// Bytes that are registered with each device.
    pub(super) fn registered_bytes(&self) -> BTreeMap<String, usize> {
        let mut bytes = BTreeMap::new();
        for (device, len) in self.regions.values().flat_map(|pinned| pinned.registered()) {
            *bytes.entry(device.to_string()).or_default() += len;
        }
        bytes
    }

    /// Why the newest region that is not registered is not.
    pub(super) fn unregistered(&self) -> Option<&str> {
        self.unregistered.as_deref()
    }
}

/// Device work may still use what is pending or in quarantine when the pool is gone: that memory stays, for good.
impl Drop for Store {
    fn drop(&mut self) {
        let kept: Vec<_> = self.pending.records().chain(&self.quarantined).map(Arc::clone).collect();
        for record in kept.iter().filter(|record| record.is_in_flight()) {
            if let Some(region) = self.take_region_of(record) {
                Pinned::keep_for_good(region);
            }
        }
    }
}
