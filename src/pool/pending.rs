//! Blocks that came back and cannot be reused yet: device work may use them, or their pages are unlocked.
//!
//! A block waits for one event at a time. Where that event is in a queue, it stands in line behind the blocks that wait
//! for earlier ones, so that a look at the pool's pending blocks asks the first of each line, however many there are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::record::Record;
use crate::driver::Place;

pub(super) type Queue = (usize, u64);

#[derive(Debug, Default)]
pub(super) struct Pending {
    lines: BTreeMap<Queue, BTreeMap<u64, Arc<Record>>>,
    /// What is in no line, in the order in which it came.
    others: BTreeMap<u64, Arc<Record>>,
    /// Blocks that ever came to the others.
    count: u64,
    bytes: usize,
}

/// A block that was pending at some moment, and where. It may have left since, and come back elsewhere.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) record: Arc<Record>,
    spot: Spot,
}

#[derive(Clone, Copy, Debug)]
enum Spot {
    InLine(Place),
    /// Among the others, as the so-manieth that ever came.
    Aside(u64),
}

impl Waiting {
    /// Whether it waits for what it waited for when it was put there.
    pub(super) fn is_in_its_place(&self) -> bool {
        match self.spot {
            Spot::InLine(place) => self.record.place() == Some(place),
            Spot::Aside(_) => self.record.place().is_none(),
        }
    }
}

impl Pending {
    pub(super) fn add(&mut self, record: Arc<Record>) {
        self.bytes += record.len;
        if let Some(Place { queue, number }) = record.place() {
            self.lines.entry(queue).or_default().insert(number, record);
        } else {
            self.count += 1;
            self.others.insert(self.count, record);
        }
    }

    /// Takes a block out. False: another thread has done so.
    pub(super) fn take(&mut self, waiting: &Waiting) -> bool {
        let taken = match waiting.spot {
            Spot::InLine(place) => self.take_from_line(place),
            Spot::Aside(number) => self.others.remove(&number),
        };
        self.bytes -= taken.as_ref().map_or(0, |record| record.len);
        taken.is_some()
    }

    fn take_from_line(&mut self, Place { queue, number }: Place) -> Option<Arc<Record>> {
        let line = self.lines.get_mut(&queue)?;
        let taken = line.remove(&number);
        if line.is_empty() {
            self.lines.remove(&queue);
        }
        taken
    }

    pub(super) fn queues(&self) -> Vec<Queue> {
        self.lines.keys().copied().collect()
    }

    /// The first in a line.
    pub(super) fn first(&self, queue: Queue) -> Option<Waiting> {
        let (&number, record) = self.lines.get(&queue)?.first_key_value()?;
        Some(Waiting { record: Arc::clone(record), spot: Spot::InLine(Place { queue, number }) })
    }

    /// Those in no line.
    pub(super) fn others(&self) -> Vec<Waiting> {
        let waiting = |(&number, record)| Waiting { record: Arc::clone(record), spot: Spot::Aside(number) };
        self.others.iter().map(waiting).collect()
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
