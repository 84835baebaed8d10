//! The map of pinned ranges: which addresses are pinned, since which generation. Pure; [`shared`] holds the one
//! instance of the process.
//!
//! An entry is *arriving* while its pages are being locked, *pinned*, or *leaving* while they are being unlocked.
//! Only a pinned entry counts as pinned. Ranges never overlap, but two adopted neighbours may share a page, and page
//! locks do not nest in the kernel: so the pages at the two ends of adopted ranges are counted here, and an entry
//! that leaves is told which pages are nobody else's.
//!
//! Each entry carries a note of its owner's, which the registry only keeps.

pub mod shared;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Names one entry for good: an address alone may be used again by a later range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    start: usize,
    generation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Arriving,
    Pinned,
    Leaving,
}

#[derive(Debug)]
struct Entry<T> {
    end: usize,
    generation: u64,
    state: State,
    /// How many times the very same range was adopted.
    users: usize,
    /// Whether the caller owns the memory.
    adopted: bool,
    /// Pages that this entry alone is unlocking: set while it leaves.
    unlocking: Range<usize>,
    note: Option<Arc<T>>,
}

/// A pinned entry, as it is found.
#[derive(Debug)]
pub struct Found<'a, T> {
    /// First byte and end.
    pub range: Range<usize>,
    /// Whether the caller owns the memory.
    pub adopted: bool,
    /// What its owner noted.
    pub note: Option<&'a Arc<T>>,
}

/// What [`Registry::adopt`] answers.
#[derive(Debug, PartialEq, Eq)]
pub enum Adoption {
    /// A new entry is arriving: lock the pages, then publish or retire it.
    Arriving(Key),
    /// The very same range is pinned already, and has one user more now.
    Shared(Key),
    /// The range, or a page at its ends, is on its way in or out: ask again after the next change.
    Busy,
}

/// Pinned ranges. Addresses are bytes, ends are exclusive.
#[derive(Debug)]
pub struct Registry<T> {
    page: usize,
    entries: BTreeMap<usize, Entry<T>>,
    /// How many adopted entries hold the page, for the pages at the ends of adopted ranges. Zero: being unlocked.
    edge_pages: BTreeMap<usize, usize>,
    next_generation: u64,
}

impl<T> Registry<T> {
    /// An empty registry for pages of this size.
    pub fn new(page: usize) -> Self {
        Self { page, entries: BTreeMap::new(), edge_pages: BTreeMap::new(), next_generation: 1 }
    }

    /// Inserts whole pages that we own, already locked.
    ///
    /// # Errors
    /// `Overlap` where a range that was adopted was unmapped by its owner, and the kernel has given us its addresses.
    pub fn insert(&mut self, range: Range<usize>, note: Arc<T>) -> Result<Key> {
        self.check_overlap(&range)?;
        Ok(self.add(range, State::Pinned, false, Some(note)))
    }

    /// Forgets adopted entries in a range whose owners have unmapped it, where their notes let them go.
    pub fn bury(&mut self, range: &Range<usize>, may_go: impl Fn(&T) -> bool) {
        let overlaps = |start: usize, entry: &Entry<T>| start < range.end && range.start < entry.end;
        let dead: Vec<Key> = self
            .entries
            .range(..range.end)
            .rev()
            .take_while(|(start, entry)| overlaps(**start, entry))
            .filter(|(_, entry)| entry.adopted && entry.state == State::Pinned)
            .filter(|(_, entry)| entry.note.as_ref().is_none_or(|note| may_go(note)))
            .map(|(&start, entry)| Key { start, generation: entry.generation })
            .collect();
        for key in dead {
            if let Some(entry) = self.get_mut(key) {
                entry.users = 1;
            }
            self.retire(key); // its pages are not the owner's to unlock any more
            self.remove(key);
        }
    }

    /// Starts to adopt a range of the caller's memory.
    ///
    /// # Errors
    /// `Overlap` where another entry shares some of its bytes.
    pub fn adopt(&mut self, range: Range<usize>) -> Result<Adoption> {
        if let Some(entry) = self.entries.get_mut(&range.start)
            && entry.end == range.end
            && entry.adopted
        {
            if entry.state != State::Pinned {
                return Ok(Adoption::Busy);
            }
            entry.users += 1;
            return Ok(Adoption::Shared(Key { start: range.start, generation: entry.generation }));
        }
        self.check_overlap(&range)?;
        let edges = self.edges(&range);
        let is_being_unlocked = |page| self.edge_pages.get(page) == Some(&0);
        if edges.iter().any(|page| is_being_unlocked(page) || self.is_arriving_on(*page)) {
            return Ok(Adoption::Busy);
        }
        for page in edges {
            *self.edge_pages.entry(page).or_insert(0) += 1;
        }
        Ok(Adoption::Arriving(self.add(range, State::Arriving, true, None)))
    }

    /// The pages of an arriving entry are locked now: it is pinned.
    pub fn publish(&mut self, key: Key, note: Arc<T>) {
        if let Some(entry) = self.get_mut(key) {
            entry.state = State::Pinned;
            entry.note = Some(note);
        }
    }

    /// One user of an adopted entry goes. The last one gets the pages to unlock, and must then [`remove`](Self::remove)
    /// the entry, or [`publish`](Self::publish) it again with [`keep`](Self::keep) when they could not be unlocked.
    /// `None`: others still use it, or the key is stale.
    pub fn retire(&mut self, key: Key) -> Option<Range<usize>> {
        let entry = self.get_mut(key).filter(|entry| entry.state != State::Leaving)?;
        entry.users -= 1;
        if entry.users > 0 {
            return None;
        }
        entry.state = State::Leaving;
        let range = key.start..entry.end;
        let pages = self.release_edges(&range);
        self.get_mut(key)?.unlocking = pages.clone();
        Some(pages)
    }

    /// Undoes a [`retire`](Self::retire): the pages could not be given up.
    pub fn keep(&mut self, key: Key) {
        let Some(entry) = self.get_mut(key) else { return };
        entry.users = 1;
        entry.state = State::Pinned;
        entry.unlocking = 0..0;
        let range = key.start..entry.end;
        for page in self.edges(&range) {
            *self.edge_pages.entry(page).or_insert(0) += 1;
        }
    }

    /// Takes part of an owned entry out of it: that memory stays ours, and is not pinned any more.
    /// Answers whether one owned entry held all of it.
    pub fn carve(&mut self, range: Range<usize>) -> bool {
        let Some((&start, entry)) = self.entries.range_mut(..=range.start).next_back() else { return false };
        let (end, generation, note) = (entry.end, entry.generation, entry.note.clone());
        if entry.adopted || end < range.end {
            return false;
        }
        entry.end = range.start;
        if start == range.start {
            self.entries.remove(&start);
        }
        if range.end < end {
            self.insert_piece(range.end..end, generation, note);
        }
        true
    }

    /// Puts back what [`carve`](Self::carve) took out of the entry of this key. False: another entry is in its place.
    pub fn restore(&mut self, range: Range<usize>, key: Key, note: Arc<T>) -> bool {
        if self.check_overlap(&range).is_err() {
            return false;
        }
        let Range { mut start, mut end } = range;
        if let Some((&left, entry)) = self.entries.range(..start).next_back()
            && entry.end == start
            && entry.generation == key.generation
        {
            self.entries.remove(&left);
            start = left;
        }
        if self.entries.get(&end).is_some_and(|right| right.generation == key.generation) {
            end = self.entries.remove(&end).map_or(end, |right| right.end);
        }
        self.insert_piece(start..end, key.generation, Some(note));
        true
    }

    /// Forgets what is left of an owned entry that once was this range.
    pub fn forget(&mut self, range: Range<usize>, key: Key) {
        let pieces = self.entries.range(range).filter(|(_, entry)| entry.generation == key.generation);
        let starts: Vec<usize> = pieces.map(|(&start, _)| start).collect();
        for start in starts {
            self.entries.remove(&start);
        }
    }

    /// Forgets an adopted entry that has left. A stale key does nothing.
    pub fn remove(&mut self, key: Key) {
        let Some(entry) = self.get_mut(key) else { return };
        let unlocking = entry.unlocking.clone();
        self.entries.remove(&key.start);
        for page in self.edges(&unlocking) {
            if self.edge_pages.get(&page) == Some(&0) {
                self.edge_pages.remove(&page);
            }
        }
    }

    /// Whether one pinned entry holds all bytes from the first to the last. An empty range is not pinned.
    pub fn covers(&self, address: usize, len: usize) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        len > 0 && self.find(address).is_some_and(|found| end <= found.range.end)
    }

    /// The pinned entry that holds this byte.
    pub fn find(&self, address: usize) -> Option<Found<'_, T>> {
        let (&start, entry) = self.entries.range(..=address).next_back()?;
        let holds = entry.state == State::Pinned && address < entry.end;
        holds.then_some(Found { range: start..entry.end, adopted: entry.adopted, note: entry.note.as_ref() })
    }

    /// Number of entries, whatever their state.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn add(&mut self, range: Range<usize>, state: State, adopted: bool, note: Option<Arc<T>>) -> Key {
        let generation = self.next_generation;
        self.next_generation += 1;
        let entry = Entry { end: range.end, generation, state, users: 1, adopted, unlocking: 0..0, note };
        self.entries.insert(range.start, entry);
        Key { start: range.start, generation }
    }

    fn insert_piece(&mut self, range: Range<usize>, generation: u64, note: Option<Arc<T>>) {
        let (state, unlocking) = (State::Pinned, 0..0);
        let entry = Entry { end: range.end, generation, state, users: 1, adopted: false, unlocking, note };
        self.entries.insert(range.start, entry);
    }

    fn get_mut(&mut self, key: Key) -> Option<&mut Entry<T>> {
        self.entries.get_mut(&key.start).filter(|entry| entry.generation == key.generation)
    }

    fn check_overlap(&self, range: &Range<usize>) -> Result<()> {
        match self.entries.range(..range.end).next_back() {
            Some((&start, entry)) if entry.end > range.start => Err(Error::Overlap {
                wanted: (range.start, range.end - range.start),
                existing: (start, entry.end - start),
                adopted: entry.adopted,
            }),
            _ => Ok(()),
        }
    }

    /// Whether an entry that holds a part of this page is arriving. Drivers that map whole pages are asked first
    /// whether they know them, and could not tell of two neighbours that arrive at once.
    fn is_arriving_on(&self, page: usize) -> bool {
        let before_end = self.entries.range(..page + self.page).rev();
        before_end.take_while(|(_, entry)| entry.end > page).any(|(_, entry)| entry.state == State::Arriving)
    }

    /// The first and the last page of a range; one page where they are the same, none for an empty range.
    fn edges(&self, range: &Range<usize>) -> Vec<usize> {
        if range.is_empty() {
            return Vec::new();
        }
        let floor = |address: usize| address / self.page * self.page;
        let (first, last) = (floor(range.start), floor(range.end - 1));
        if first == last { vec![first] } else { vec![first, last] }
    }

    /// Gives up the edge pages of a range, and answers which of its pages are nobody else's now.
    fn release_edges(&mut self, range: &Range<usize>) -> Range<usize> {
        let edges = self.edges(range);
        for page in &edges {
            if let Some(count) = self.edge_pages.get_mut(page) {
                *count -= 1;
            }
        }
        let shared = |page: usize| self.edge_pages.get(&page).is_some_and(|&count| count > 0);
        let (first, last) = (edges[0], edges[edges.len() - 1]);
        let start = if shared(first) { first + self.page } else { first };
        let end = if shared(last) { last } else { last + self.page };
        start..end.max(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: usize = 16;

    fn adopt(registry: &mut Registry<()>, range: Range<usize>) -> Key {
        match registry.adopt(range).expect("no overlap") {
            Adoption::Arriving(key) => {
                registry.publish(key, Arc::default());
                key
            }
            Adoption::Shared(key) => key,
            Adoption::Busy => panic!("nothing is on its way"),
        }
    }

    #[test]
    fn answers_are_about_the_whole_extent() {
        let mut registry = Registry::<()>::new(PAGE);
        registry.insert(160..320, Arc::default()).expect("free");
        registry.insert(320..480, Arc::default()).expect("free");
        assert!(registry.covers(160, 160) && registry.covers(319, 1));
        for (address, len) in [(159, 1), (159, 2), (160, 161), (200, 0), (200, usize::MAX), (480, 1)] {
            assert!(!registry.covers(address, len), "{address}+{len}");
        }
    }

    #[test]
    fn neighbours_on_one_page_do_not_unlock_each_other() {
        let mut registry = Registry::<()>::new(PAGE);
        let left = adopt(&mut registry, 3..40);
        let right = adopt(&mut registry, 40..100);
        assert_eq!(registry.retire(left), Some(0..32), "the page at 32 is the right one's too");
        registry.remove(left);
        assert_eq!(registry.retire(right), Some(32..112));
        registry.remove(right);
        assert!(registry.is_empty() && registry.edge_pages.is_empty());
    }

    #[test]
    fn a_page_that_is_being_unlocked_is_busy_until_its_entry_is_gone() {
        let mut registry = Registry::<()>::new(PAGE);
        let left = adopt(&mut registry, 3..40);
        assert_eq!(registry.retire(left), Some(0..48));
        assert!(!registry.covers(3, 1));
        assert_eq!(registry.adopt(40..44).expect("no overlap"), Adoption::Busy);
        assert_eq!(registry.adopt(3..40).expect("the same range"), Adoption::Busy);
        registry.remove(left);
        assert!(matches!(registry.adopt(40..44), Ok(Adoption::Arriving(_))));
    }

    #[test]
    fn neighbours_on_one_page_arrive_one_after_the_other() {
        let mut registry = Registry::<()>::new(PAGE);
        let Ok(Adoption::Arriving(first)) = registry.adopt(3..40) else { panic!("nothing is there") };
        for neighbour in [40..44, 44..100, 0..2] {
            assert_eq!(registry.adopt(neighbour.clone()).expect("no overlap"), Adoption::Busy, "{neighbour:?}");
        }
        let apart = adopt(&mut registry, 48..52);
        registry.publish(first, Arc::default());
        let second = adopt(&mut registry, 40..44);
        assert_eq!(registry.retire(first), Some(0..32));
        for key in [second, apart] {
            registry.retire(key);
        }
        for key in [first, second, apart] {
            registry.remove(key);
        }
        assert!(registry.is_empty() && registry.edge_pages.is_empty());
    }

    #[test]
    fn identical_ranges_are_counted_and_others_refused_by_name() {
        let mut registry = Registry::<()>::new(PAGE);
        let key = adopt(&mut registry, 100..200);
        assert_eq!(registry.adopt(100..200).expect("the same"), Adoption::Shared(key));
        let refusal = registry.adopt(150..250).expect_err("overlaps").to_string();
        assert!(refusal.contains("0x96+100") && refusal.contains("0x64+100"), "{refusal}");
        assert_eq!(registry.retire(key), None);
        assert!(registry.covers(100, 100));
        assert!(registry.retire(key).is_some());
    }

    #[test]
    fn a_carved_block_is_not_pinned_until_it_is_restored() {
        for hole in [160..192, 224..256, 288..320, 160..320] {
            let mut registry = Registry::<()>::new(PAGE);
            let key = registry.insert(160..320, Arc::default()).expect("free");
            assert!(registry.carve(hole.clone()));
            let pinned: Vec<usize> = (150..330).filter(|&byte| registry.covers(byte, 1)).collect();
            let expected: Vec<usize> = (160..320).filter(|byte| !hole.contains(byte)).collect();
            assert_eq!(pinned, expected);
            assert!(!registry.carve(hole.clone()), "it is out already");
            registry.restore(hole.clone(), key, Arc::default());
            assert!(registry.covers(160, 160) && registry.len() == 1);
            registry.carve(hole);
            registry.forget(160..320, key);
            assert!(registry.is_empty());
        }
    }

    #[test]
    fn a_range_that_its_owner_unmapped_gives_way_to_a_new_region() {
        let mut registry = Registry::<()>::new(PAGE);
        let old = adopt(&mut registry, 100..200);
        adopt(&mut registry, 100..200);
        assert!(registry.insert(96..320, Arc::default()).is_err());
        registry.bury(&(96..320), |()| false);
        assert!(registry.covers(100, 100), "its note holds it");
        registry.bury(&(96..320), |()| true);
        registry.insert(96..320, Arc::default()).expect("free");
        assert_eq!(registry.retire(old), None);
        assert!(registry.covers(96, 224) && registry.edge_pages.is_empty());
    }

    #[test]
    fn a_stale_key_does_nothing() {
        let mut registry = Registry::<()>::new(PAGE);
        let old = adopt(&mut registry, 100..200);
        registry.retire(old);
        registry.remove(old);
        let new = adopt(&mut registry, 100..200);
        assert_eq!(registry.retire(old), None);
        registry.remove(old);
        assert!(registry.covers(100, 100) && new != old);
    }

    #[test]
    fn an_entry_whose_pages_could_not_be_unlocked_stays() {
        let mut registry = Registry::<()>::new(PAGE);
        let key = adopt(&mut registry, 100..200);
        registry.retire(key);
        registry.keep(key);
        assert!(registry.covers(100, 100));
        assert!(registry.retire(key).is_some());
    }

    proptest! {
        /// Against a list of ranges, and one lock count a page.
        #[test]
        fn agrees_with_the_model(operations in prop::collection::vec((0..3_u8, 0..200_usize, 1..60_usize), 1..80)) {
            let mut registry = Registry::<()>::new(PAGE);
            let mut model: Vec<(Range<usize>, Key)> = Vec::new();
            let pages = |range: &Range<usize>| range.start / PAGE..(range.end - 1) / PAGE + 1;
            for (operation, start, len) in operations {
                let range = start..start + len;
                if operation == 0 && !model.is_empty() {
                    let (gone, key) = model.swap_remove(start % model.len());
                    let still = model.iter().any(|(other, _)| *other == gone);
                    let unlocked = registry.retire(key);
                    prop_assert_eq!(unlocked.is_none(), still);
                    if let Some(unlocked) = unlocked {
                        for page in pages(&gone) {
                            let shared = model.iter().any(|(other, _)| pages(other).contains(&page));
                            prop_assert_eq!(unlocked.contains(&(page * PAGE)), !shared, "page {}", page);
                        }
                        registry.remove(key);
                    }
                } else if model.iter().any(|(o, _)| *o != range && o.start < range.end && range.start < o.end) {
                    prop_assert!(registry.adopt(range).is_err());
                } else {
                    model.push((range.clone(), adopt(&mut registry, range)));
                }
                for address in 0..260 {
                    let end = model.iter().find(|(r, _)| r.contains(&address)).map(|(r, _)| r.end);
                    prop_assert_eq!(registry.covers(address, 1), end.is_some());
                    if let Some(end) = end {
                        prop_assert!(registry.covers(address, end - address));
                        prop_assert!(!registry.covers(address, end - address + 1));
                    }
                }
            }
            for (_, key) in model {
                if registry.retire(key).is_some() {
                    registry.remove(key);
                }
            }
            prop_assert!(registry.is_empty() && registry.edge_pages.is_empty());
        }
    }
}
