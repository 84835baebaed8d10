//! Which parts of the data file belong to which entry. Pure: the file itself is grown elsewhere.

use std::sync::{Arc, Mutex};

use super::lock;
use crate::arena::Arena;

/// Offsets and lengths in the data file are multiples of this, on whatever machine: fit for direct transfers.
pub(super) const UNIT: usize = 4096;

/// A part of the data file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: usize,
    pub(super) len: usize,
}

impl Extent {
    pub(super) fn end(self) -> usize {
        self.offset + self.len
    }
}

/// The room of a data file.
#[derive(Debug)]
pub(super) struct Space {
    state: Mutex<State>,
    limit: usize,
}

#[derive(Debug)]
struct State {
    arena: Arena,
    used: usize,
}

/// The parts of one entry, in its order. They are free again once it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    space: Arc<Space>,
    extents: Box<[Extent]>,
}

impl Space {
    /// All of it free: `limit` bytes, in whole units.
    pub(super) fn new(limit: usize) -> Arc<Self> {
        let limit = limit / UNIT * UNIT;
        let mut arena = Arena::default();
        if limit > 0 {
            arena.add_span(0, limit);
        }
        Arc::new(Self { state: Mutex::new(State { arena, used: 0 }), limit })
    }

    /// Claims `len` bytes, whole units: in one piece if there is one, else in several, cut at multiples of `block`.
    /// `None`: there is not so much room.
    pub(super) fn claim(self: &Arc<Self>, len: usize, block: usize) -> Option<Claim> {
        let mut extents = Vec::new();
        let mut state = lock(&self.state);
        let mut left = len;
        while left > 0 {
            let longest = state.arena.longest();
            let piece = if longest < left { longest / block * block } else { left };
            let Some(offset) = Some(piece).filter(|&piece| piece > 0).and_then(|piece| state.arena.take(piece)) else {
                state.give(&extents);
                return None;
            };
            extents.push(Extent { offset, len: piece });
            left -= piece;
        }
        state.used += len;
        drop(state);
        Some(Claim { space: Arc::clone(self), extents: extents.into() })
    }

    /// Claims `len` bytes in the free pieces below `end`, cut at multiples of `block`. `None`: there are not so many.
    pub(super) fn claim_below(self: &Arc<Self>, end: usize, len: usize, block: usize) -> Option<Claim> {
        let mut state = lock(&self.state);
        let mut extents = Vec::new();
        let mut left = len;
        for (offset, piece) in state.arena.free_pieces().take_while(|&(offset, _)| offset < end) {
            let room = piece.min((end - offset) / UNIT * UNIT);
            let len = if room < left { room / block * block } else { left };
            if len > 0 {
                extents.push(Extent { offset, len });
                left -= len;
            }
        }
        if left > 0 {
            return None;
        }
        for extent in &extents {
            state.arena.take_at(extent.offset, extent.len);
        }
        state.used += len;
        drop(state);
        Some(Claim { space: Arc::clone(self), extents: extents.into() })
    }

    /// Claims the parts that an entry has had before. `None`: they are not free, or make no sense.
    pub(super) fn claim_again(self: &Arc<Self>, extents: Vec<Extent>) -> Option<Claim> {
        let mut state = lock(&self.state);
        for (claimed, extent) in extents.iter().enumerate() {
            let end = extent.offset.checked_add(extent.len).filter(|&end| end <= self.limit);
            let whole = extent.len > 0 && extent.offset.is_multiple_of(UNIT) && extent.len.is_multiple_of(UNIT);
            if end.is_none() || !whole || !state.arena.take_at(extent.offset, extent.len) {
                state.give(&extents[..claimed]);
                return None;
            }
        }
        state.used += extents.iter().map(|extent| extent.len).sum::<usize>();
        drop(state);
        Some(Claim { space: Arc::clone(self), extents: extents.into() })
    }

    /// Claims all free room below `end`, so that nobody writes there for a while.
    pub(super) fn claim_free(self: &Arc<Self>, end: usize) -> Claim {
        let end = end.next_multiple_of(UNIT);
        let mut state = lock(&self.state);
        let pieces = state.arena.free_pieces().take_while(|&(offset, _)| offset < end);
        let extents: Box<[Extent]> =
            pieces.map(|(offset, len)| Extent { offset, len: len.min(end - offset) }).collect();
        for extent in &extents {
            state.arena.take_at(extent.offset, extent.len);
            state.used += extent.len;
        }
        drop(state);
        Claim { space: Arc::clone(self), extents }
    }

    /// The most bytes that may be claimed.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes that are claimed.
    pub(super) fn used(&self) -> usize {
        lock(&self.state).used
    }
}

impl State {
    fn give(&mut self, extents: &[Extent]) {
        for extent in extents {
            self.arena.give(extent.offset, extent.len);
        }
    }
}

impl Claim {
    pub(super) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Where the last part ends.
    pub(super) fn end(&self) -> usize {
        self.extents.iter().map(|extent| extent.end()).max().unwrap_or(0)
    }

    /// Where in the data file the byte at `position` of the entry is.
    pub(super) fn offset_of(&self, position: usize) -> usize {
        let mut before = 0;
        for extent in &self.extents {
            if position < before + extent.len {
                return extent.offset + (position - before);
            }
            before += extent.len;
        }
        unreachable!("{position} lies behind the end of an entry of {before} bytes")
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = lock(&self.space.state);
        state.give(&self.extents);
        state.used -= self.extents.iter().map(|extent| extent.len).sum::<usize>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(claim: &Claim) -> Vec<(usize, usize)> {
        claim.extents().iter().map(|extent| (extent.offset / UNIT, extent.len / UNIT)).collect()
    }

    #[test]
    fn a_hole_is_used_before_the_end() {
        let space = Space::new(100 * UNIT);
        let [a, b, c] = [4, 2, 1].map(|units| space.claim(units * UNIT, UNIT).expect("room"));
        drop(b);
        let again = space.claim(2 * UNIT, UNIT).expect("room");
        assert_eq!((extents(&again), extents(&a), extents(&c)), (vec![(4, 2)], vec![(0, 4)], vec![(6, 1)]));
        assert_eq!(space.used(), 7 * UNIT);
    }

    #[test]
    fn what_fits_in_no_hole_is_cut_at_blocks_and_all_room_can_be_used() {
        let space = Space::new(10 * UNIT);
        let mut claims: Vec<_> = (0..10).map(|_| space.claim(UNIT, UNIT).expect("room")).collect();
        for at in [8, 7, 4, 3, 2] {
            claims.remove(at);
        }
        // Holes of three, two units: in blocks of two that is room for 2 + 2 + 1, the last in the rest of the first.
        let claim = space.claim(5 * UNIT, 2 * UNIT).expect("all of it");
        assert_eq!(claim.extents().iter().map(|extent| extent.len).sum::<usize>(), 5 * UNIT);
        let (last, others) = claim.extents().split_last().expect("some");
        assert!(others.iter().all(|extent| extent.len.is_multiple_of(2 * UNIT)), "{others:?} {last:?}");
        assert_eq!(claim.offset_of(2 * UNIT + 5), last.offset + 5);
        assert!(space.claim(UNIT, UNIT).is_none());
        drop(claim);
        assert!(space.claim(6 * UNIT, UNIT).is_none(), "more than there is");
        assert_eq!(space.used(), 5 * UNIT, "and nothing of it is kept");
    }

    #[test]
    fn holes_below_an_end_are_put_together() {
        let space = Space::new(1 << 40);
        let mut claims: Vec<_> = (0..8).map(|_| space.claim(UNIT, UNIT).expect("room")).collect();
        for at in [6, 4, 2] {
            claims.remove(at);
        }
        assert!(space.claim_below(8 * UNIT, 4 * UNIT, UNIT).is_none());
        let claim = space.claim_below(8 * UNIT, 3 * UNIT, UNIT).expect("three holes");
        assert_eq!(extents(&claim), [(2, 1), (4, 1), (6, 1)]);
        assert_eq!(space.used(), 8 * UNIT);
    }

    #[test]
    fn only_what_is_free_and_whole_is_claimed_again() {
        let space = Space::new(10 * UNIT);
        let extent = |offset, len| Extent { offset, len };
        let claim = space.claim_again(vec![extent(UNIT, UNIT), extent(5 * UNIT, 2 * UNIT)]).expect("free");
        for wrong in [extent(6 * UNIT, UNIT), extent(9 * UNIT, 2 * UNIT), extent(1, UNIT), extent(0, 0)] {
            assert!(space.claim_again(vec![extent(3 * UNIT, UNIT), wrong]).is_none(), "{wrong:?}");
        }
        assert!(space.claim_again(vec![extent(usize::MAX - UNIT + 1, UNIT)]).is_none());
        assert_eq!(space.used(), 3 * UNIT);
        let free = space.claim_free(8 * UNIT);
        assert_eq!(extents(&free), [(0, 1), (2, 3), (7, 1)]);
        drop((claim, free));
        assert_eq!(space.used(), 0);
    }
}
