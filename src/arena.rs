//! Free space inside the pool's shared regions, or inside a swap file: best fit, cut and coalesced at the caller's
//! granularity. Pure.
//!
//! A *span* is one region's address range. A cut never crosses the end of its span, even where two regions happen to
//! be neighbours in the address space, because the driver may know them as two registrations. All costs are
//! logarithmic in the number of free pieces.

use std::collections::{BTreeMap, BTreeSet};

/// Free space of any number of spans. Addresses and lengths are bytes.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    spans: BTreeMap<usize, Span>,
    free: BTreeMap<usize, usize>,
    free_by_len: BTreeSet<(usize, usize)>,
    /// Starts of the spans that are free from end to end.
    idle: BTreeSet<usize>,
    span_bytes: usize,
}

#[derive(Debug)]
struct Span {
    len: usize,
    free: usize,
}

impl Arena {
    /// Adds a span, all of it free. It must not overlap another one.
    pub(crate) fn add_span(&mut self, start: usize, len: usize) {
        let before = self.spans.insert(start, Span { len, free: len });
        debug_assert!(before.is_none(), "span {start:#x} was there already");
        self.insert_free(start, len);
        self.idle.insert(start);
        self.span_bytes += len;
    }

    /// Takes the starts of all spans that are wholly free out of the arena.
    pub(crate) fn remove_idle_spans(&mut self) -> Vec<usize> {
        let idle: Vec<usize> = std::mem::take(&mut self.idle).into_iter().collect();
        for &start in &idle {
            let span = self.spans.remove(&start).expect("an idle span is a span");
            self.remove_free(start, span.len);
            self.span_bytes -= span.len;
        }
        idle
    }

    /// Cuts `len` bytes from the smallest free piece that holds them; of equals, the one at the lowest address.
    pub(crate) fn take(&mut self, len: usize) -> Option<usize> {
        let &(piece, start) = self.free_by_len.range((len, 0)..).next()?;
        self.remove_free(start, piece);
        if piece > len {
            self.insert_free(start + len, piece - len);
        }
        let (span_start, span) = self.span_of(start);
        span.free -= len;
        self.idle.remove(&span_start);
        Some(start)
    }

    /// Cuts a given range. False: it is not all free, or crosses the end of a span.
    pub(crate) fn take_at(&mut self, start: usize, len: usize) -> bool {
        let Some((&piece, &piece_len)) = self.free.range(..=start).next_back() else { return false };
        let (end, piece_end) = (start + len, piece + piece_len);
        if end > piece_end {
            return false;
        }
        self.remove_free(piece, piece_len);
        if piece < start {
            self.insert_free(piece, start - piece);
        }
        if end < piece_end {
            self.insert_free(end, piece_end - end);
        }
        let (span_start, span) = self.span_of(start);
        span.free -= len;
        self.idle.remove(&span_start);
        true
    }

    /// The length of the longest free piece.
    pub(crate) fn longest(&self) -> usize {
        self.free_by_len.last().map_or(0, |&(len, _)| len)
    }

    /// Every free piece: start and length, from the lowest on.
    pub(crate) fn free_pieces(&self) -> impl Iterator<Item = (usize, usize)> {
        self.free.iter().map(|(&start, &len)| (start, len))
    }

    /// Gives back what [`take`](Self::take) or [`take_at`](Self::take_at) cut, and joins it with its free neighbours of the same span.
    pub(crate) fn give(&mut self, start: usize, len: usize) {
        let (span_start, span) = self.span_of(start);
        span.free += len;
        let (span_end, is_idle) = (span_start + span.len, span.free == span.len);
        if is_idle {
            self.idle.insert(span_start);
        }
        let (mut piece_start, mut piece_end) = (start, start + len);
        if let Some((&left, &left_len)) = self.free.range(span_start..start).next_back()
            && left + left_len == start
        {
            self.remove_free(left, left_len);
            piece_start = left;
        }
        if piece_end < span_end
            && let Some(&right_len) = self.free.get(&piece_end)
        {
            self.remove_free(piece_end, right_len);
            piece_end += right_len;
        }
        self.insert_free(piece_start, piece_end - piece_start);
    }

    /// Bytes of all spans.
    pub(crate) fn span_bytes(&self) -> usize {
        self.span_bytes
    }

    fn span_of(&mut self, address: usize) -> (usize, &mut Span) {
        let (&start, span) = self.spans.range_mut(..=address).next_back().expect("a cut lies in a span");
        debug_assert!(address < start + span.len, "{address:#x} lies in no span");
        (start, span)
    }

    fn insert_free(&mut self, start: usize, len: usize) {
        self.free.insert(start, len);
        self.free_by_len.insert((len, start));
    }

    fn remove_free(&mut self, start: usize, len: usize) {
        self.free.remove(&start);
        self.free_by_len.remove(&(len, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn best_fit_takes_the_smallest_hole() {
        let mut arena = Arena::default();
        arena.add_span(0, 100);
        let cuts: Vec<usize> = [10, 1, 5, 1, 83].iter().map(|&len| arena.take(len).expect("fits")).collect();
        arena.give(cuts[0], 10);
        arena.give(cuts[2], 5);
        assert_eq!(arena.take(4), Some(cuts[2]));
        assert_eq!(arena.take(6), Some(cuts[0]));
    }

    #[test]
    fn neighbouring_spans_never_join() {
        let mut arena = Arena::default();
        arena.add_span(0, 10);
        arena.add_span(10, 10);
        assert_eq!(arena.take(11), None);
        let (a, b) = (arena.take(10).expect("fits"), arena.take(10).expect("fits"));
        arena.give(b, 10);
        arena.give(a, 10);
        assert_eq!(arena.take(11), None);
        assert_eq!(arena.remove_idle_spans(), vec![0, 10]);
    }

    /// The naive model: one owner a byte.
    #[derive(Default)]
    struct Model {
        spans: Vec<(usize, usize)>,
        cuts: Vec<(usize, usize)>,
    }

    impl Model {
        fn is_free(&self, byte: usize) -> bool {
            self.spans.iter().any(|&(start, len)| (start..start + len).contains(&byte))
                && !self.cuts.iter().any(|&(start, len)| (start..start + len).contains(&byte))
        }

        /// Lengths of the maximal free runs, none of which crosses a span's end.
        fn runs(&self) -> Vec<usize> {
            let mut runs = Vec::new();
            for &(start, len) in &self.spans {
                let mut run = 0;
                for byte in start..=start + len {
                    if byte < start + len && self.is_free(byte) {
                        run += 1;
                    } else if run > 0 {
                        runs.push(std::mem::take(&mut run));
                    }
                }
            }
            runs
        }
    }

    proptest! {
        #[test]
        fn agrees_with_the_model(operations in prop::collection::vec((0..5_u8, 1..24_usize, any::<prop::sample::Index>()), 1..120)) {
            let (mut arena, mut model) = (Arena::default(), Model::default());
            let mut next_span = 0;
            for (operation, len, which) in operations {
                match operation {
                    3 if next_span > 0 => {
                        let start = which.index(next_span);
                        let same_span = |&(first, length): &(usize, usize)| first <= start && start + len <= first + length;
                        let free = model.spans.iter().any(same_span) && (start..start + len).all(|byte| model.is_free(byte));
                        prop_assert_eq!(arena.take_at(start, len), free);
                        if free {
                            model.cuts.push((start, len));
                        }
                    }
                    0 => {
                        arena.add_span(next_span, len);
                        model.spans.push((next_span, len));
                        next_span += len;
                    }
                    1 if !model.cuts.is_empty() => {
                        let (start, len) = model.cuts.swap_remove(which.index(model.cuts.len()));
                        arena.give(start, len);
                    }
                    2 if len < 3 => {
                        let gone = arena.remove_idle_spans();
                        let idle = |&(start, len): &(usize, usize)| (start..start + len).all(|byte| model.is_free(byte));
                        let expected: Vec<usize> = model.spans.iter().filter(|s| idle(s)).map(|s| s.0).collect();
                        prop_assert_eq!(&gone, &expected);
                        model.spans.retain(|span| !gone.contains(&span.0));
                    }
                    _ => {
                        let best = model.runs().into_iter().filter(|&run| run >= len).min();
                        let cut = arena.take(len);
                        prop_assert_eq!(cut.is_some(), best.is_some());
                        if let Some(start) = cut {
                            prop_assert!((start..start + len).all(|byte| model.is_free(byte)));
                            model.cuts.push((start, len));
                        }
                    }
                }
                prop_assert_eq!(arena.longest(), model.runs().into_iter().max().unwrap_or(0));
                prop_assert!(arena.free_pieces().map(|piece| (piece.1, piece.0)).collect::<BTreeSet<_>>() == arena.free_by_len);
                let mut pieces: Vec<usize> = arena.free_by_len.iter().map(|piece| piece.0).collect();
                let mut runs = model.runs();
                pieces.sort_unstable();
                runs.sort_unstable();
                prop_assert_eq!(pieces, runs);
            }
        }
    }
}
