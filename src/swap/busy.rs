//! The memory that transfers are using, of all swappers of the process.
//!
//! Any number of writes may take from the same bytes at a time; a read that fills them has them for itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

use super::lock;
use crate::error::{Error, Result};
use crate::fork::PerProcess;
use crate::os;
use crate::region::Progress;

/// Ranges in use.
#[derive(Debug, Default)]
struct Busy {
    /// By first byte and end: how many transfers use it, and whether one fills it.
    ranges: BTreeMap<(usize, usize), (usize, bool)>,
    /// No range was longer.
    longest: usize,
}

static BUSY: PerProcess<Mutex<Busy>> = PerProcess::new();

/// A transfer's claim on its memory, while this lives.
#[derive(Debug)]
pub(super) struct Claimed {
    range: Range<usize>,
    fork_generation: u64,
}

impl Busy {
    /// Whether a transfer may begin beside those that are under way.
    fn has_room_for(&self, range: &Range<usize>, fills: bool) -> bool {
        let near = self.ranges.range(..(range.end, 0)).rev();
        let mut near = near.take_while(|&(&(start, _), _)| start + self.longest > range.start);
        !near.any(|(&(_, end), &(_, is_filled))| end > range.start && (fills || is_filled))
    }

    fn enter(&mut self, range: &Range<usize>, fills: bool) {
        self.longest = self.longest.max(range.len());
        self.ranges.entry((range.start, range.end)).or_insert((0, fills)).0 += 1;
    }

    fn leave(&mut self, range: &Range<usize>) {
        let key = (range.start, range.end);
        if let Some((users, _)) = self.ranges.get_mut(&key) {
            *users -= 1;
            if *users == 0 {
                self.ranges.remove(&key);
            }
        }
    }
}

/// Claims a range, once those who use it otherwise are done: `progress` is asked meanwhile, with no bytes.
pub(super) fn claim(range: Range<usize>, fills: bool, progress: &mut Progress<'_>) -> Result<Claimed> {
    const STEP: Duration = Duration::from_micros(200);
    loop {
        let mut busy = lock(BUSY.get());
        if busy.has_room_for(&range, fills) {
            busy.enter(&range, fills);
            return Ok(Claimed { range, fork_generation: os::fork_generation() });
        }
        drop(busy);
        if progress(0, 0).is_break() {
            return Err(Error::Interrupted);
        }
        std::thread::sleep(STEP);
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if self.fork_generation == os::fork_generation() {
            lock(BUSY.get()).leave(&self.range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_a_list(operations in prop::collection::vec((0..60_usize, 1..30_usize, any::<bool>(), any::<bool>()), 1..80)) {
            let (mut busy, mut list) = (Busy::default(), Vec::<(Range<usize>, bool)>::new());
            for (start, len, fills, leaves) in operations {
                if leaves && !list.is_empty() {
                    let (range, _) = list.swap_remove(start % list.len());
                    busy.leave(&range);
                    continue;
                }
                let range = start..start + len;
                let overlaps = |other: &Range<usize>| other.start < range.end && range.start < other.end;
                let free = !list.iter().any(|(other, filled)| overlaps(other) && (fills || *filled));
                prop_assert_eq!(busy.has_room_for(&range, fills), free);
                if free {
                    busy.enter(&range, fills);
                    list.push((range, fills));
                }
            }
        }
    }
}
