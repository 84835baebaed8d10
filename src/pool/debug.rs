//! Debug mode: released blocks are filled with a pattern, and whoever wrote to one after its release is found out when it
//! is handed out again or given back.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::inner::Inner;
use super::record::Record;
use super::sync::{Mutex, MutexGuard, lock};
use crate::error::{Error, Overwritten, Result};

/// What released memory holds: NaN in every floating-point type, -1 in every integer.
pub(super) const PATTERN: u8 = 0xff;

/// What debug mode knows of blocks, by their addresses.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<BTreeMap<usize, Entry>>);

#[derive(Clone, Debug, Default)]
struct Entry {
    /// How often a block that begins here was handed out.
    generation: u64,
    /// Where the last owner took it.
    origin: Option<Box<str>>,
    /// It is filled with the pattern.
    poisoned: bool,
}

/// A block that has an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// First byte.
    pub address: usize,
    /// Bytes, in whole pages.
    pub len: usize,
    /// How often a block at this address was handed out.
    pub generation: u64,
    /// Where it was taken, where that was noted.
    pub origin: Option<Box<str>>,
}

impl Ledger {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<usize, Entry>> {
        lock(&self.0)
    }
}

impl Inner {
    /// Fills a block that nobody owns.
    pub(super) fn poison(&self, record: &Record) {
        let Some(ledger) = &self.ledger else { return };
        let region = self.store().region_of(record);
        if let Some(region) = region {
            region.region().fill(&record.range(), PATTERN);
            ledger.entries().entry(record.address).or_default().poisoned = true;
        }
    }

    /// A block is handed out: nobody may have written to it meanwhile. One that was written to is not used again.
    pub(super) fn begin_generation(&self, record: &Record) -> Result<()> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let checked = self.check_pattern(record);
        let mut entries = ledger.entries();
        let entry = entries.entry(record.address).or_default();
        *entry = Entry { generation: entry.generation + 1, origin: None, poisoned: false };
        checked
    }

    /// Takes the blocks out that were written to after their release, and reports the first.
    pub(super) fn check_idle(&self, idle: &mut Vec<Arc<Record>>) -> Result<()> {
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let mut first = None;
        idle.retain(|record| match self.check_pattern(record) {
            Ok(()) => {
                ledger.entries().entry(record.address).or_default().poisoned = false;
                true
            }
            Err(error) => {
                self.store().quarantine(Arc::clone(record), error.to_string());
                first.get_or_insert(error);
                false
            }
        });
        first.map_or(Ok(()), Err)
    }

    fn check_pattern(&self, record: &Record) -> Result<()> {
        let ledger = self.ledger.as_ref();
        let entry = ledger.and_then(|ledger| ledger.entries().get(&record.address).cloned()).unwrap_or_default();
        let region = self.store().region_of(record);
        let (true, Some(region)) = (entry.poisoned, region) else { return Ok(()) };
        let Some(offset) = region.region().find_other(&record.range(), PATTERN) else { return Ok(()) };
        let Entry { generation, origin, .. } = entry;
        let found = Overwritten { address: record.address, len: record.len, offset, generation, origin };
        let error = Error::WrittenAfterRelease(Box::new(found));
        record.condemn(error.to_string());
        Err(error)
    }

    /// Notes where a block was taken.
    pub(super) fn note_origin(&self, address: usize, origin: Box<str>) {
        if let Some(ledger) = &self.ledger {
            ledger.entries().entry(address).or_default().origin = Some(origin);
        }
    }

    /// Every block that has an owner.
    pub(super) fn live_blocks(&self) -> Vec<LiveBlock> {
        let Some(ledger) = &self.ledger else { return Vec::new() };
        let live: Vec<_> = self.store().records().filter(|record| record.is_owned()).map(Arc::clone).collect();
        let entries = ledger.entries();
        let describe = |record: Arc<Record>| {
            let Entry { generation, origin, .. } = entries.get(&record.address).cloned().unwrap_or_default();
            LiveBlock { address: record.address, len: record.len, generation, origin }
        };
        live.into_iter().map(describe).collect()
    }
}
