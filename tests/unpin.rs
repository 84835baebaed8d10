//! Unpinning a live block: its pages are unlocked, its memory stays, and it is pinned again before anyone gets it.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::ops::Range;

use common::maps::{Memory, is_locked, is_unlocked, locked_bytes};
use common::process::alone;
use common::seccomp::{Rule, refused};
use common::{MIB, address, is_pinned, os_answer, page, pinned_ranges, pool, stats, try_adopt};
use pinpool::pool::unpin;
use pinpool::{Block, Error};

fn range(block: &Block) -> Range<usize> {
    address(block)..address(block) + block.capacity()
}

#[test]
fn an_unpinned_block_is_unlocked_and_keeps_its_bytes() {
    alone("an_unpinned_block_is_unlocked_and_keeps_its_bytes", || {
        for len in [3 * page() - 5, MIB] {
            let pool = pool(4 * MIB);
            let (mut block, neighbour) = (pool.take(len).expect("room"), pool.take(len).expect("room"));
            block.as_mut_slice().fill(5);
            // Any address in it will do, the padding's too.
            assert!(unpin(address(&block) + block.capacity() - 1).expect("the kernel takes it"));
            assert!(!is_pinned(&block) && is_unlocked(&range(&block)));
            assert!(is_pinned(&neighbour) && is_locked(&range(&neighbour)));
            assert_eq!(stats(&pool).locked_bytes, locked_bytes());
            assert_eq!(stats(&pool).reserved_bytes - stats(&pool).locked_bytes, block.capacity());
            assert!(!unpin(address(&block)).expect("it is unpinned already"));
            block.as_mut_slice()[len - 1] = 6;
            assert!(block.as_slice()[..len - 1].iter().all(|&byte| byte == 5));
            drop(block);
            drop(neighbour);
            assert_eq!(stats(&pool).blocks, 0);
            drop(pool);
            assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
        }
    });
}

#[test]
fn only_a_live_block_can_be_unpinned() {
    alone("only_a_live_block_can_be_unpinned", || {
        let pool = pool(4 * MIB);
        let on_the_stack = 0_u8;
        let block = pool.take(page()).expect("room");
        let (first, end) = (address(&block), address(&block) + page());
        let foreign = [0, 1, usize::MAX, (&raw const on_the_stack) as usize, first - 1, end];
        assert!(foreign.iter().all(|&address| !unpin(address).expect("nothing to do")));
        drop(block);
        assert!(!unpin(first).expect("it is idle"), "idle memory stays pinned");
        assert_eq!(locked_bytes(), stats(&pool).locked_bytes);
        let block = pool.take(page()).expect("room");
        assert!(address(&block) == first && is_pinned(&block));
    });
}

#[test]
fn a_block_that_came_back_unpinned_is_pinned_for_the_next_owner() {
    alone("a_block_that_came_back_unpinned_is_pinned_for_the_next_owner", || {
        for (len, budget) in [(10, page()), (MIB, MIB), (MIB / 2, MIB), (10, 4 * MIB), (MIB, 4 * MIB)] {
            let pool = pool(budget);
            let mut laps = Vec::new();
            for _ in 0..4 {
                let block = pool.take(len).expect("room");
                assert!(is_pinned(&block) && is_locked(&range(&block)));
                laps.push(address(&block));
                assert!(unpin(address(&block)).expect("the kernel takes it"));
                drop(block);
                let now = stats(&pool);
                assert!(now.pending_bytes >= len.next_multiple_of(page()) && now.blocks == 0);
                assert_eq!(now.cached_bytes + now.pending_bytes, now.reserved_bytes);
                assert_eq!(now.locked_bytes, locked_bytes());
            }
            let again = pool.take(len).expect("room");
            assert!(is_pinned(&again) && is_locked(&range(&again)), "{len} bytes of {budget}: {laps:x?}");
            drop(again);
            let reserved = stats(&pool).reserved_bytes;
            assert_eq!(pool.trim().expect("all idle"), reserved);
            assert_eq!((locked_bytes(), pinned_ranges(), stats(&pool).reserved_bytes), (0, 0, 0));
        }
    });
}

#[test]
fn a_refused_unlock_leaves_the_block_pinned() {
    alone("a_refused_unlock_leaves_the_block_pinned", || {
        let pool = pool(4 * MIB);
        let block = pool.take(5 * page()).expect("room");
        for _ in 0..2 {
            let refusal = refused(&[Rule::munlock(libc::ENOMEM)], || unpin(address(&block))).expect_err("refused");
            assert_eq!(os_answer(&refusal), ("munlock", libc::ENOMEM));
            assert!(is_pinned(&block) && is_locked(&range(&block)));
            assert_eq!(stats(&pool).locked_bytes, locked_bytes());
        }
        assert!(unpin(address(&block)).expect("nothing refuses now"));
    });
}

#[test]
fn a_block_that_cannot_be_locked_again_waits_and_is_not_handed_out() {
    alone("a_block_that_cannot_be_locked_again_waits_and_is_not_handed_out", || {
        let pool = pool(2 * page());
        let (block, neighbour) = (pool.take(10).expect("room"), pool.take(10).expect("room"));
        assert!(unpin(address(&block)).expect("the kernel takes it"));
        drop(block);
        let refusal = refused(&[Rule::mlock(libc::EAGAIN)], || pool.take(10).map(drop)).expect_err("nothing is pinned");
        match refusal {
            Error::OutOfPinnedMemory { pending, allocated, .. } => assert_eq!((pending, allocated), (page(), page())),
            other => panic!("{other:?}"),
        }
        assert_eq!(stats(&pool).pending_bytes, page());
        let again = pool.take(10).expect("the lock is not refused any more");
        assert!(is_pinned(&again) && is_pinned(&neighbour));
    });
}

#[test]
fn closing_needs_no_lock_to_give_back_what_is_unpinned() {
    alone("closing_needs_no_lock_to_give_back_what_is_unpinned", || {
        for drop_first in [true, false] {
            let pool = pool(4 * MIB);
            let block = pool.take(10).expect("room");
            assert!(unpin(address(&block)).expect("the kernel takes it"));
            refused(&[Rule::mlock(libc::EAGAIN)], || {
                let block = (!drop_first).then_some(block);
                pool.close().expect("the kernel takes it");
                drop(block);
            });
            assert_eq!((stats(&pool).reserved_bytes, locked_bytes()), (0, 0), "dropped first: {drop_first}");
        }
    });
}

#[test]
fn memory_that_its_owner_has_pinned_is_not_a_pools_to_unpin() {
    alone("memory_that_its_owner_has_pinned_is_not_a_pools_to_unpin", || {
        let memory = Memory::new(1);
        // SAFETY: the memory outlives the adoption.
        let adopted = unsafe { try_adopt(memory.start(), page()) }.expect("memory of our own");
        let refusal = unpin(memory.start()).expect_err("whoever adopted it lets go of it");
        assert!(matches!(refusal, Error::Invalid { parameter: "memory", .. }), "{refusal:?}");
        assert!(is_locked(&memory.range()));
        drop(adopted);
        assert!(!unpin(memory.start()).expect("nothing to do"));
    });
}
