//! What the kernel does not take back stays mapped, locked and charged, and is counted: nobody is told a comfortable
//! story.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::ops::Range;

use common::maps::{Memory, is_locked, is_unlocked, locked_bytes, mapped_bytes, page_is_locked};
use common::process::alone;
use common::seccomp::{Rule, refuse, refused};
use common::{MIB, address, is_pinned, os_answer, page, pin, pinned_ranges, pool, region_of, try_adopt};
use pinpool::pinned::leaked_bytes;
use pinpool::{Block, Error, Pages};

const NO: i32 = libc::EPERM;

fn range(block: &Block) -> Range<usize> {
    address(block)..address(block) + block.capacity()
}

#[test]
fn a_region_that_cannot_be_unmapped_stays_locked_and_is_counted() {
    alone("a_region_that_cannot_be_unmapped_stays_locked_and_is_counted", || {
        let regions = [(MIB, "released"), (2 * MIB, "dropped")].map(|(len, end)| {
            let pinned = pin(len, &region_of(Pages::Base)).expect("a region");
            (pinned.region().address()..pinned.region().address() + len, pinned, end)
        });
        let mut leaked = 0;
        for (range, pinned, end) in regions {
            let len = range.end - range.start;
            let result = refused(&[Rule::munmap(len, NO)], || match end {
                "dropped" => {
                    drop(pinned);
                    Ok(())
                }
                _ => pinned.release().map(drop),
            });
            if end == "released" {
                assert_eq!(os_answer(&result.expect_err("the kernel's refusal")), ("munmap", NO));
            }
            leaked += len;
            assert_eq!((leaked_bytes(), locked_bytes()), (leaked, 3 * MIB));
            assert!(is_locked(&range), "{end}");
            assert_eq!(pinned_ranges(), 2 - leaked / MIB / 2 - 1, "what was given up is not pinned any more");
        }
    });
}

#[test]
fn trim_reports_the_region_that_stays_and_gives_back_the_others() {
    alone("trim_reports_the_region_that_stays_and_gives_back_the_others", || {
        let pool = pool(8 * MIB);
        let lens = [MIB, MIB + page(), MIB + 2 * page()];
        let blocks = lens.map(|len| pool.take(len).expect("room"));
        let ranges = blocks.each_ref().map(range);
        drop(blocks);
        let refusal = refused(&[Rule::munmap(lens[1], NO)], || pool.trim()).expect_err("one stays");
        assert_eq!(os_answer(&refusal), ("munmap", NO));
        assert!(is_unlocked(&ranges[0]) && is_unlocked(&ranges[2]) && is_locked(&ranges[1]));
        let stats = pool.stats().expect("ours");
        assert_eq!((stats.reserved_bytes, stats.leaked_bytes, stats.cached_bytes), (lens[1], lens[1], 0));
        assert_eq!((leaked_bytes(), locked_bytes(), stats.allocated_bytes), (lens[1], lens[1], 0));
        assert_eq!(pool.trim().expect("nothing more to give"), 0, "what is given up is not tried again");
        pool.take(lens[1]).map(|block| assert_ne!(range(&block), ranges[1])).expect("room for another one");
    });
}

#[test]
fn leaked_bytes_stay_charged_and_are_not_called_cached() {
    alone("leaked_bytes_stay_charged_and_are_not_called_cached", || {
        let pool = pool(4 * MIB);
        drop(pool.take(MIB).expect("room"));
        refused(&[Rule::munmap(MIB, NO)], || pool.trim()).expect_err("it stays");
        let block = pool.take(MIB).expect("room");
        match pool.take(3 * MIB) {
            Err(Error::OutOfPinnedMemory { wanted, limit, allocated, cached, pending, .. }) => {
                assert_eq!((wanted, limit, allocated, pending), (3 * MIB, 4 * MIB, MIB, 0));
                assert_eq!(cached, 0, "leaked memory is not idle memory");
            }
            other => panic!("one MiB has leaked and one is out: {other:?}"),
        }
        assert_eq!(pool.stats().expect("ours").locked_bytes, locked_bytes(), "leaked memory is still locked");
        drop(block);
    });
}

#[test]
fn a_closed_pool_counts_what_it_could_not_give_back() {
    alone("a_closed_pool_counts_what_it_could_not_give_back", || {
        let pool = pool(8 * MIB);
        let late = pool.take(MIB + page()).expect("room");
        drop(pool.take(MIB).expect("room"));
        let refusal = refused(&[Rule::munmap(MIB, NO)], || pool.close()).expect_err("one stays");
        assert_eq!(os_answer(&refusal), ("munmap", NO));
        assert!(pool.is_closed() && is_pinned(&late));
        assert_eq!((leaked_bytes(), pool.stats().expect("ours").leaked_bytes), (MIB, MIB));
        refused(&[Rule::munmap(MIB + page(), NO)], || drop(late));
        let stats = pool.stats().expect("ours");
        let both = 2 * MIB + page();
        assert_eq!(
            (stats.leaked_bytes, stats.reserved_bytes, leaked_bytes(), locked_bytes()),
            (both, both, both, both)
        );
        assert_eq!((stats.blocks, pinned_ranges()), (0, 0));
    });
}

#[test]
fn a_region_that_fails_and_cannot_be_unmapped_is_counted() {
    alone("a_region_that_fails_and_cannot_be_unmapped_is_counted", || {
        let (pool, before) = (pool(64 * MIB), mapped_bytes());
        let rules = [Rule::munmap(32 * MIB, NO), Rule::mlock(libc::EAGAIN)];
        let refusal = refused(&rules, || pool.take(32 * MIB).map(drop)).expect_err("not locked");
        assert_eq!(os_answer(&refusal).0, "mlock");
        assert!(mapped_bytes() >= before + 32 * MIB, "this test has provoked nothing");
        let stats = pool.stats().expect("ours");
        assert_eq!((leaked_bytes(), stats.leaked_bytes, stats.reserved_bytes), (32 * MIB, 32 * MIB, 32 * MIB));
    });
}

#[test]
fn slack_that_cannot_be_unmapped_is_counted() {
    alone("slack_that_cannot_be_unmapped_is_counted", || {
        // Two huge pages, so that whoever wants them aligned maps more and has to unmap the rest.
        let before = mapped_bytes();
        refuse(&[Rule::every(libc::SYS_munmap, NO)]);
        for _ in 0..16 {
            if let Err(refusal) = pin(4 * MIB, &region_of(Pages::Auto)) {
                assert_eq!(os_answer(&refusal), ("munmap", NO));
            }
        }
        let (grown, counted) = (mapped_bytes() - before, leaked_bytes());
        assert!(grown >= 64 * MIB, "this test has provoked nothing");
        assert!(grown - counted < 4 * MIB, "{grown} bytes are left and {counted} are counted");
    });
}

#[test]
fn an_adopted_range_that_cannot_be_unlocked_stays_pinned_until_it_can() {
    alone("an_adopted_range_that_cannot_be_unlocked_stays_pinned_until_it_can", || {
        let memory = Memory::new(3);
        let (first, len) = (memory.start() + 100, 2 * page());
        // SAFETY: the memory outlives the adoption.
        let mut adopted = unsafe { try_adopt(first, len) }.expect("memory of our own");
        for _ in 0..3 {
            let refusal = refused(&[Rule::munlock(NO)], || adopted.release()).expect_err("refused");
            assert_eq!(os_answer(&refusal), ("munlock", NO));
            assert!(!adopted.is_released() && pinpool::registry::shared::is_pinned(first, len));
            assert!(is_locked(&memory.range()));
        }
        adopted.release().expect("nothing refuses now");
        assert!(adopted.is_released() && !pinpool::registry::shared::is_pinned(first, 1));
        assert_eq!((locked_bytes(), pinned_ranges(), leaked_bytes()), (0, 0, 0));
    });
}

#[test]
fn an_adopted_range_that_is_dropped_locked_is_counted() {
    alone("an_adopted_range_that_is_dropped_locked_is_counted", || {
        let memory = Memory::new(1);
        // SAFETY: the memory outlives the adoption.
        let adopted = unsafe { try_adopt(memory.start() + 1, 1000) }.expect("memory of our own");
        refused(&[Rule::munlock(NO)], || drop(adopted));
        assert!(page_is_locked(memory.start()) && pinpool::registry::shared::is_pinned(memory.start() + 1, 1000));
        assert_eq!((leaked_bytes(), pinned_ranges()), (1000, 1));
    });
}

/// The kernel has one number for "not mapped" and "too many mappings"; the second one unlocks nothing.
#[test]
fn an_enomem_from_mapped_memory_is_a_refusal() {
    alone("an_enomem_from_mapped_memory_is_a_refusal", || {
        let memory = Memory::new(1);
        // SAFETY: the memory outlives the adoption.
        let mut adopted = unsafe { try_adopt(memory.start(), page()) }.expect("memory of our own");
        let released = refused(&[Rule::munlock(libc::ENOMEM)], || adopted.release());
        assert!(page_is_locked(memory.start()));
        assert_eq!(os_answer(&released.expect_err("the page is locked as before")), ("munlock", libc::ENOMEM));
        assert!(pinpool::registry::shared::is_pinned(memory.start(), page()));
    });
}
