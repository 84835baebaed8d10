//! Blocks that came back and cannot be reused yet: device work may use them, or their pages are unlocked.
//!
//! A block waits for one event at a time. Where that event is in a queue, it stands in line behind the blocks that wait
//! for earlier ones, so that a look at the pool's pending blocks asks the first of each line, however many there are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::record::Record;
use crate::driver::Place;

pub(super) type Queue = (u64, u64);

/// Tells one stay of a block here from a later one, while somebody asks its events.
type Stay = u64;

#[derive(Debug, Default)]
pub(super) struct Pending {
    /// By the numbers of their events, and their own.
    lines: BTreeMap<Queue, BTreeMap<(u64, Stay), Arc<Record>>>,
    /// What is in no line, in the order in which it came.
    others: BTreeMap<Stay, Arc<Record>>,
    /// Where each block is, by its address.
    places: BTreeMap<usize, (Option<Place>, Stay)>,
    stays: Stay,
    /// Whose turn it is among the others.
    next: Stay,
    bytes: usize,
}

/// A block that was pending at some moment. It may have left since, and come back.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) record: Arc<Record>,
    /// Its place in a line; none: it is among the others.
    place: Option<Place>,
    stay: Stay,
}

impl Candidate {
    /// Whether it waits for what it waited for when it was put there.
    pub(super) fn is_in_its_place(&self) -> bool {
        self.record.place() == self.place
    }
}

impl Pending {
    pub(super) fn add(&mut self, record: Arc<Record>) {
        self.bytes += record.len;
        self.stays += 1;
        let place = record.place();
        self.places.insert(record.address, (place, self.stays));
        match place {
            Some(Place { queue, number }) => {
                self.lines.entry(queue).or_default().insert((number, self.stays), record);
            }
            None => {
                self.others.insert(self.stays, record);
            }
        }
    }

    /// Takes a block out. False: another thread has done so.
    pub(super) fn take(&mut self, waiting: &Candidate) -> bool {
        let taken = match waiting.place {
            Some(place) => self.take_from_line(place, waiting.stay),
            None => self.others.remove(&waiting.stay),
        };
        if let Some(record) = &taken {
            self.bytes -= record.len;
            self.places.remove(&record.address);
        }
        taken.is_some()
    }

    fn take_from_line(&mut self, Place { queue, number }: Place, stay: Stay) -> Option<Arc<Record>> {
        let line = self.lines.get_mut(&queue)?;
        let taken = line.remove(&(number, stay));
        if line.is_empty() {
            self.lines.remove(&queue);
        }
        taken
    }

    /// A block that is here.
    pub(super) fn find(&self, record: &Arc<Record>) -> Option<Candidate> {
        let &(place, stay) = self.places.get(&record.address)?;
        Some(Candidate { record: Arc::clone(record), place, stay })
    }

    pub(super) fn queues(&self) -> Vec<Queue> {
        self.lines.keys().copied().collect()
    }

    /// The first in a line.
    pub(super) fn first(&self, queue: Queue) -> Option<Candidate> {
        let (&(number, stay), record) = self.lines.get(&queue)?.first_key_value()?;
        Some(Candidate { record: Arc::clone(record), place: Some(Place { queue, number }), stay })
    }

    /// Those in no line, at most so many, and the next time those that come after them.
    pub(super) fn others(&mut self, most: usize) -> Vec<Candidate> {
        let (after, before) = (self.others.range(self.next..), self.others.range(..self.next));
        let candidate = |(&stay, record)| Candidate { record: Arc::clone(record), place: None, stay };
        let others: Vec<_> = after.chain(before).take(most).map(candidate).collect();
        self.next = others.last().map_or(0, |last| last.stay + 1);
        others
    }

    pub(super) fn records(&self) -> impl Iterator<Item = &Arc<Record>> {
        self.lines.values().flat_map(BTreeMap::values).chain(self.others.values())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.others.is_empty()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// When the oldest event of them all was recorded.
    pub(super) fn since(&self) -> Option<Instant> {
        self.records().filter_map(|record| record.in_flight_since()).min()
    }
}
