//! Memory that the caller lends: locked in whole pages, pinned to the byte, and never unlocked under a neighbour.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use common::maps::{Memory, is_locked, is_unlocked, locked_bytes, page_is_locked};
use common::process::alone;
use common::{MIB, address, go_on, page, pin, pinned_ranges, pool, region_of, try_adopt};
use pinpool::pinned::Adopted;
use pinpool::registry::shared::is_pinned;
use pinpool::{Error, Pages};

fn adopt(start: usize, len: usize) -> Adopted {
    // SAFETY: the tests keep what they lend for longer than the adoption, or ask what happens when they do not.
    unsafe { try_adopt(start, len) }.expect("memory of our own")
}

fn refusal(start: usize, len: usize) -> Error {
    // SAFETY: what is adopted in spite of all is released at once.
    unsafe { try_adopt(start, len) }.expect_err("it must be refused")
}

#[test]
fn adopting_locks_whole_pages_and_pins_the_very_bytes() {
    alone("adopting_locks_whole_pages_and_pins_the_very_bytes", || {
        let memory = Memory::new(5);
        let (start, len) = (memory.pages(1..2).start + 100, 2 * page());
        let mut adopted = adopt(start, len);
        assert_eq!(adopted.range(), start..start + len);
        assert!(is_locked(&memory.pages(1..4)) && is_unlocked(&memory.pages(0..1)) && is_unlocked(&memory.pages(4..5)));
        assert!(is_pinned(start, len) && is_pinned(start, 1) && is_pinned(start + len - 1, 1));
        for (address, len) in [(start, len + 1), (start - 1, 1), (start - 1, len), (start + len, 1), (start, 0)] {
            assert!(!is_pinned(address, len), "{address:#x}+{len}");
        }
        adopted.release().expect("the kernel takes it");
        assert!(adopted.is_released() && !is_pinned(start, 1) && is_unlocked(&memory.range()));
        assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
    });
}

#[test]
fn neighbours_that_share_a_page_do_not_unlock_each_other() {
    alone("neighbours_that_share_a_page_do_not_unlock_each_other", || {
        let memory = Memory::new(3);
        let cuts = [10, page() - 1, page() + 7, page() + 8, 2 * page() + 1, 3 * page()].map(|cut| memory.start() + cut);
        // Every order in which five neighbours can go, by the digits of a number.
        for order in 0..120 {
            let mut neighbours: Vec<_> = cuts.windows(2).map(|cut| adopt(cut[0], cut[1] - cut[0])).collect();
            let mut order = order;
            while !neighbours.is_empty() {
                for number in 0..3 {
                    let bytes = memory.pages(number..number + 1);
                    let wanted =
                        neighbours.iter().any(|one| one.range().start < bytes.end && bytes.start < one.range().end);
                    assert_eq!(page_is_locked(bytes.start), wanted, "page {number} of {neighbours:?}");
                }
                let next = order % neighbours.len();
                order /= neighbours.len();
                let gone = neighbours.swap_remove(next).range();
                assert!(!is_pinned(gone.start, 1));
                assert!(neighbours.iter().all(|one| is_pinned(one.range().start, one.range().end - one.range().start)));
            }
            assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
        }
    });
}

#[test]
fn a_range_that_is_adopted_thrice_is_released_thrice() {
    alone("a_range_that_is_adopted_thrice_is_released_thrice", || {
        let memory = Memory::new(2);
        let mut owners = [(); 3].map(|()| adopt(memory.start() + 8, page()));
        for _ in 0..5 {
            owners[1].release().expect("the kernel takes it");
            assert!(is_pinned(memory.start() + 8, page()) && is_locked(&memory.range()), "one owner lets go once only");
        }
        owners[0].release().expect("the kernel takes it");
        assert!(is_pinned(memory.start() + 8, page()) && is_locked(&memory.range()));
        assert_eq!((pinned_ranges(), locked_bytes()), (1, 2 * page()));
        drop(owners);
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn an_overlap_is_refused_by_name_and_changes_nothing() {
    alone("an_overlap_is_refused_by_name_and_changes_nothing", || {
        let memory = Memory::new(4);
        let (start, len) = (memory.pages(1..2).start, 2 * page());
        let adopted = adopt(start, len);
        let overlaps =
            [(start - 1, 2), (start, len - 1), (start + 1, len - 1), (start + len - 1, 1), (start - 8, len + 16)];
        for (wanted, wanted_len) in overlaps {
            let refusal = refusal(wanted, wanted_len);
            match refusal {
                Error::Overlap { wanted: w, existing, adopted: true } => {
                    assert_eq!((w, existing), ((wanted, wanted_len), (start, len)));
                }
                ref other => panic!("{other:?}"),
            }
            let text = refusal.to_string();
            assert!(text.contains(&format!("{start:#x}+{len}")) && text.contains(&format!("{wanted:#x}+")), "{text}");
        }
        assert_eq!((pinned_ranges(), locked_bytes()), (1, len));
        drop(adopted);
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0), "a refused neighbour has left no claim on a page");
    });
}

#[test]
fn memory_of_a_pool_cannot_be_adopted() {
    alone("memory_of_a_pool_cannot_be_adopted", || {
        let pool = pool(4 * MIB);
        for block in [pool.take(MIB).expect("room"), pool.take(10).expect("room")] {
            let refusal = refusal(address(&block), block.len());
            assert!(matches!(refusal, Error::Overlap { adopted: false, .. }), "{refusal:?}");
            assert!(refusal.to_string().contains("pool memory is pinned already"), "{refusal}");
            assert!(is_pinned(address(&block), block.len()) && page_is_locked(address(&block)));
        }
    });
}

#[test]
fn ranges_that_make_no_sense_are_refused() {
    alone("ranges_that_make_no_sense_are_refused", || {
        for (start, len) in
            [(0x1000, 0), (usize::MAX, 1), (usize::MAX - 10, 11), (1, usize::MAX), (usize::MAX, usize::MAX)]
        {
            let refusal = refusal(start, len);
            assert!(matches!(refusal, Error::Invalid { parameter: "nbytes", .. }), "{start:#x}+{len}: {refusal}");
        }
        assert_eq!(pinned_ranges(), 0);
    });
}

#[test]
fn the_last_page_of_the_address_space_is_refused_and_forgotten() {
    alone("the_last_page_of_the_address_space_is_refused_and_forgotten", || {
        for (start, len) in [(usize::MAX - 10, 10), (usize::MAX - page(), page()), (page(), usize::MAX - page() - 1)] {
            let result = std::panic::catch_unwind(|| refusal(start, len));
            assert_eq!(pinned_ranges(), 0, "{start:#x}+{len}");
            assert!(result.is_ok(), "{start:#x}+{len} is an error, not a panic");
        }
    });
}

#[test]
fn memory_that_is_not_all_there_is_refused_and_nothing_stays_locked() {
    alone("memory_that_is_not_all_there_is_refused_and_nothing_stays_locked", || {
        for hole in 0..5 {
            let memory = Memory::new(5);
            memory.unmap(hole..hole + 1);
            let refusal = refusal(memory.start(), 5 * page());
            assert!(matches!(refusal, Error::Os { call: "mlock", bytes, .. } if bytes == 5 * page()), "{refusal:?}");
            assert_eq!((pinned_ranges(), locked_bytes()), (0, 0), "a hole at page {hole}");

            let memory = Memory::new(5);
            memory.protect(hole..hole + 1, libc::PROT_NONE);
            assert!(matches!(self::refusal(memory.start(), 5 * page()), Error::Os { call: "mlock", .. }));
            assert_eq!((pinned_ranges(), locked_bytes()), (0, 0), "page {hole} cannot be read");
        }
    });
}

#[test]
fn a_refused_range_unlocks_nothing_of_its_neighbours() {
    alone("a_refused_range_unlocks_nothing_of_its_neighbours", || {
        let memory = Memory::new(4);
        let left = adopt(memory.start(), page() + 100);
        memory.unmap(3..4);
        refusal(memory.start() + page() + 100, 3 * page() - 100);
        assert!(is_locked(&memory.pages(0..2)) && is_unlocked(&memory.pages(2..3)));
        drop(left);
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn memory_that_can_only_be_read_is_adopted() {
    alone("memory_that_can_only_be_read_is_adopted", || {
        let memory = Memory::new(2);
        memory.protect(0..2, libc::PROT_READ);
        let adopted = adopt(memory.start(), 2 * page());
        assert!(is_locked(&memory.range()) && is_pinned(memory.start(), 2 * page()));
        drop(adopted);
        assert!(is_unlocked(&memory.range()));
    });
}

#[test]
fn memory_that_its_owner_has_unmapped_is_released_in_peace() {
    alone("memory_that_its_owner_has_unmapped_is_released_in_peace", || {
        let memory = Memory::new(4);
        let mut adopted = adopt(memory.start(), 4 * page());
        memory.unmap(0..4);
        adopted.release().expect("the lock went with the pages");
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

/// What is left of the memory is the owner's, who cannot know that it is still locked.
#[test]
fn the_rest_of_memory_that_its_owner_has_unmapped_in_part_is_unlocked() {
    alone("the_rest_of_memory_that_its_owner_has_unmapped_in_part_is_unlocked", || {
        for hole in [0..1, 1..2, 3..4, 0..3, 1..4] {
            let memory = Memory::new(4);
            let mut adopted = adopt(memory.start(), 4 * page());
            memory.unmap(hole.clone());
            adopted.release().expect("some of the pages are gone");
            assert_eq!((pinned_ranges(), locked_bytes()), (0, 0), "pages {hole:?} were unmapped");
        }
    });
}

#[test]
fn a_stale_handle_releases_nobody_elses_range() {
    alone("a_stale_handle_releases_nobody_elses_range", || {
        let memory = Memory::new(1);
        let mut old = adopt(memory.start(), page());
        old.release().expect("the kernel takes it");
        let new = adopt(memory.start(), page());
        old.release().expect("nothing to do");
        drop(old);
        assert!(is_pinned(memory.start(), page()) && page_is_locked(memory.start()));
        drop(new);
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn two_halves_of_a_page_come_and_go_on_two_threads() {
    alone("two_halves_of_a_page_come_and_go_on_two_threads", || {
        let memory = Memory::new(1);
        std::thread::scope(|scope| {
            for half in [memory.start(), memory.start() + page() / 2] {
                let memory = &memory;
                scope.spawn(move || {
                    for _ in 0..5_000 {
                        let adopted = adopt(half, page() / 2);
                        assert!(page_is_locked(memory.start()), "the other half took the lock with it");
                        assert!(is_pinned(half, page() / 2));
                        drop(adopted);
                        assert!(!is_pinned(half, 1));
                    }
                });
            }
        });
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn one_range_is_adopted_and_released_by_many_threads() {
    alone("one_range_is_adopted_and_released_by_many_threads", || {
        let memory = Memory::new(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let adopted = adopt(memory.start() + 1, 2 * page());
                        assert!(is_pinned(memory.start() + 1, 2 * page()));
                        assert!((0..3).all(|number| page_is_locked(memory.pages(number..4).start)));
                        drop(adopted);
                    }
                });
            }
        });
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn a_region_is_unpinned_and_pinned_again_in_part() {
    alone("a_region_is_unpinned_and_pinned_again_in_part", || {
        let pinned = pin(8 * page(), &region_of(Pages::Base)).expect("a region");
        let start = pinned.region().address();
        let part = start + 2 * page()..start + 5 * page();
        assert!(pinned.is_locked() && is_pinned(start, 8 * page()));
        assert!(pinned.unpin(&part, &mut go_on).expect("the kernel takes it"));
        assert!(!pinned.unpin(&part, &mut go_on).expect("it is unpinned already"));
        assert!(is_unlocked(&part) && is_pinned(start, 2 * page()) && is_pinned(part.end, 3 * page()));
        assert!((2..5).all(|number| !is_pinned(start + number * page(), 1)));
        assert_eq!(locked_bytes(), 5 * page());
        pinned.repin(&part).expect("the kernel takes it");
        assert!(is_pinned(start, 8 * page()) && is_locked(&(start..start + 8 * page())));
        assert!(pinned.unpin(&part, &mut go_on).expect("once more"));
        pinned.release().expect("the kernel takes it");
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn a_region_does_not_unpin_what_is_not_its_own() {
    alone("a_region_does_not_unpin_what_is_not_its_own", || {
        let [one, other] = [(); 2].map(|()| pin(2 * page(), &region_of(Pages::Base)).expect("a region"));
        let starts = [one.region().address(), other.region().address()];
        assert!(!one.unpin(&(starts[1]..starts[1] + page()), &mut go_on).is_ok_and(|unpinned| unpinned));
        let nothing = starts[0] + page()..starts[0] + page();
        assert!(!one.unpin(&nothing, &mut go_on).is_ok_and(|unpinned| unpinned));
        assert!(starts.iter().all(|&start| is_pinned(start, 2 * page()) && page_is_locked(start)));
    });
}
