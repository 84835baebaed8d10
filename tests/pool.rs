//! The pool: exact sizes, reuse, the budget to the last page, trim and close.

mod common;

use common::maps::{is_locked, is_mapped, is_unlocked, locked_bytes};
use common::process::alone;
use common::{GIB, KIB, MIB, address, go_on, is_pinned, page, pinned_ranges, pool, room, stats, unlocked_pool};
use pinpool::{Block, Error, Pool, PoolOptions};
use proptest::prelude::*;

fn take(pool: &Pool, len: usize) -> Block {
    pool.take(len).expect("room in the budget")
}

#[test]
fn blocks_start_on_a_page_and_have_the_size_asked_for() {
    let _room = room(8 * MIB);
    let pool = pool(7 * MIB);
    for len in [1, 100, page(), page() + 1, 8_000, MIB - 1, MIB, MIB + 1] {
        let mut block = take(&pool, len);
        assert_eq!((block.len(), block.as_slice().len(), address(&block) % page()), (len, len, 0));
        assert_eq!(block.capacity(), len.next_multiple_of(page()));
        assert!(is_pinned(&block) && is_locked(&(address(&block)..address(&block) + block.capacity())));
        assert!(block.as_slice().iter().all(|&byte| byte == 0), "fresh memory is zeroed");
        block.as_mut_slice()[len - 1] = 0;
        let now = stats(&pool);
        assert_eq!((now.requested_bytes, now.allocated_bytes, now.blocks), (len, block.capacity(), 1));
        assert_eq!(now.allocated_bytes + now.cached_bytes, now.reserved_bytes);
        assert_eq!(now.locked_bytes, now.reserved_bytes);
    }
}

#[test]
fn the_next_request_of_a_size_gets_the_same_memory() {
    let _room = room(4 * MIB);
    let pool = pool(4 * MIB);
    for len in [10, 3 * page(), MIB, MIB + 5] {
        let mut block = take(&pool, len);
        block.as_mut_slice().fill(7);
        let first = address(&block);
        drop(block);
        let (calls, before) = (stats(&pool).regions, stats(&pool).hits);
        let again = take(&pool, len - 1);
        assert_eq!((address(&again), again.len()), (first, len - 1));
        assert!(again.as_slice().iter().all(|&byte| byte == 7), "it is the same memory, as it was left");
        assert_eq!((stats(&pool).regions, stats(&pool).hits), (calls, before + 1));
    }
}

#[test]
fn a_smaller_block_never_serves_a_larger_request() {
    for unit in [KIB, MIB, GIB] {
        let pool = unlocked_pool(1 << 42);
        let small = take(&pool, 150 * unit);
        let small_range = address(&small)..address(&small) + small.capacity();
        drop(small);
        let large = take(&pool, 200 * unit);
        assert!(large.capacity() >= 200 * unit);
        let range = address(&large)..address(&large) + large.capacity();
        assert!(is_mapped(&range));
        if 150 * unit >= MIB {
            assert!(range.end <= small_range.start || small_range.end <= range.start, "the small one is cached still");
        }
    }
}

#[test]
fn a_cached_block_is_reused_for_less_only_within_a_64th() {
    for pages in [6_400, 640] {
        let pool = unlocked_pool(GIB);
        let block = take(&pool, pages * page());
        let first = address(&block);
        drop(block);
        let close = take(&pool, (pages - pages / 65) * page());
        assert_eq!((address(&close), close.capacity()), (first, pages * page()));
        drop(close);
        let far = take(&pool, (pages - pages / 64 - 1) * page());
        assert_ne!(address(&far), first, "more than a 64th would be wasted");
        assert_eq!(far.capacity(), (pages - pages / 64 - 1) * page());
    }
}

proptest! {
    #[test]
    fn live_blocks_are_large_enough_never_wasteful_and_never_overlap(
        sizes in prop::collection::vec((1..9 * MIB, any::<prop::sample::Index>(), any::<bool>()), 1..60),
    ) {
        let pool = unlocked_pool(1 << 40);
        let mut live: Vec<Block> = Vec::new();
        for (len, which, keep) in sizes {
            // Sizes of all magnitudes: the small ones are where blocks share a region.
            let block = take(&pool, (len >> (which.index(12))).max(1));
            let padded = block.len().next_multiple_of(page());
            prop_assert!((padded..=padded + padded / 64).contains(&block.capacity()));
            prop_assert_eq!(address(&block) % page(), 0);
            let (start, end) = (address(&block), address(&block) + block.capacity());
            prop_assert!(live.iter().all(|other| end <= address(other) || address(other) + other.capacity() <= start));
            live.push(block);
            if !keep {
                live.swap_remove(which.index(live.len()));
            }
            let (now, allocated) = (stats(&pool), live.iter().map(Block::capacity).sum::<usize>());
            prop_assert_eq!(now.requested_bytes, live.iter().map(Block::len).sum::<usize>());
            prop_assert_eq!((now.blocks, now.allocated_bytes), (live.len(), allocated));
            prop_assert_eq!(now.allocated_bytes + now.cached_bytes, now.reserved_bytes);
        }
        drop(live);
        pool.trim().expect("all idle");
        let now = stats(&pool);
        prop_assert_eq!((now.reserved_bytes, now.regions, now.blocks), (0, 0, 0));
    }
}

#[test]
fn the_budget_is_used_to_its_last_page_and_not_beyond() {
    alone("the_budget_is_used_to_its_last_page_and_not_beyond", || {
        let pool = pool(4 * MIB);
        let blocks = (take(&pool, 3 * MIB), take(&pool, MIB));
        assert_eq!((stats(&pool).reserved_bytes, locked_bytes()), (4 * MIB, 4 * MIB));
        for wanted in [page(), 1, MIB] {
            match pool.take(wanted) {
                Err(Error::OutOfPinnedMemory { wanted: bytes, limit, allocated, cached, pending, budget, .. }) => {
                    assert_eq!((bytes, limit), (wanted.next_multiple_of(page()), 4 * MIB));
                    assert_eq!((allocated, cached, pending, budget), (4 * MIB, 0, 0, "max_bytes"));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((stats(&pool).reserved_bytes, locked_bytes(), pinned_ranges()), (4 * MIB, 4 * MIB, 2));
        drop(blocks.1);
        let smaller = take(&pool, MIB - 16 * page()); // more than a 64th smaller: no reuse of the block that is back
        let last: Vec<Block> = (0..16).map(|_| take(&pool, page())).collect();
        assert!(is_pinned(&smaller) && last.iter().all(is_pinned));
        assert_eq!(stats(&pool).reserved_bytes, 4 * MIB);
    });
}

#[test]
fn small_blocks_fill_the_budget_page_by_page() {
    let _room = room(MIB);
    let pool = pool(64 * page());
    let blocks: Vec<Block> = (0..64).map(|_| take(&pool, 1)).collect();
    assert!(matches!(pool.take(1), Err(Error::OutOfPinnedMemory { cached: 0, .. })));
    assert_eq!((stats(&pool).requested_bytes, stats(&pool).reserved_bytes), (64, 64 * page()));
    assert!(blocks.iter().all(is_pinned));
}

#[test]
fn idle_memory_of_other_sizes_makes_way_within_the_budget() {
    alone("idle_memory_of_other_sizes_makes_way_within_the_budget", || {
        let pool = pool(4 * MIB);
        for len in [MIB, 2 * MIB, 4 * MIB, 100, 4 * MIB, 3 * MIB, page()] {
            let block = take(&pool, len);
            assert!(is_pinned(&block) && locked_bytes() <= 4 * MIB && stats(&pool).reserved_bytes <= 4 * MIB);
        }
        assert_eq!(stats(&pool).peak_reserved_bytes, 4 * MIB);
    });
}

#[test]
fn zero_bytes_need_no_memory() {
    let pool = pool(page());
    let mut blocks = [take(&pool, 0), take(&pool, 0)];
    for block in &mut blocks {
        assert!(block.is_empty() && block.as_slice().is_empty() && block.as_mut_slice().is_empty());
        assert!(!block.as_ptr().is_null() && block.capacity() == 0 && !is_pinned(block));
    }
    assert_eq!((stats(&pool).reserved_bytes, stats(&pool).allocated_bytes), (0, 0));
}

#[test]
fn sizes_and_budgets_that_make_no_sense_are_refused() {
    let pool = unlocked_pool(usize::MAX);
    for len in [usize::MAX, usize::MAX - page() + 1, isize::MAX as usize + 1, isize::MAX as usize] {
        assert!(matches!(pool.take(len), Err(Error::Invalid { parameter: "nbytes", .. })), "{len}");
        assert!(pool.reserve(len, &mut go_on).is_err(), "{len}");
    }
    assert_eq!(stats(&pool).reserved_bytes, 0);
    let none = Pool::new(PoolOptions { max_bytes: Some(0), ..PoolOptions::default() });
    assert!(matches!(none, Err(Error::Invalid { parameter: "max_bytes", .. })));
}

#[test]
fn trim_gives_back_what_is_idle_and_nothing_else() {
    alone("trim_gives_back_what_is_idle_and_nothing_else", || {
        let pool = pool(7 * MIB);
        assert_eq!(pool.trim().expect("nothing there"), 0);
        let (idle, live) = ([take(&pool, MIB), take(&pool, MIB + page())], [take(&pool, 2 * MIB), take(&pool, 10)]);
        let ranges = idle.each_ref().map(|block| address(block)..address(block) + block.capacity());
        let reserved = stats(&pool).reserved_bytes;
        drop(idle);
        assert!(ranges.iter().all(is_locked), "idle memory stays until it is trimmed");
        assert_eq!(pool.trim().expect("the kernel takes it"), 2 * MIB + page());
        assert!(ranges.iter().all(is_unlocked) && live.iter().all(is_pinned));
        assert_eq!(stats(&pool).reserved_bytes, reserved - 2 * MIB - page());
        assert_eq!(locked_bytes(), stats(&pool).locked_bytes);
        drop(live);
        assert_eq!(pool.trim().expect("the kernel takes it"), reserved - 2 * MIB - page());
        assert_eq!((locked_bytes(), pinned_ranges(), stats(&pool).reserved_bytes), (0, 0, 0));
        assert!(is_pinned(&take(&pool, MIB)), "a trimmed pool goes on");
    });
}

#[test]
fn reserved_memory_serves_later_requests() {
    let _room = room(4 * MIB);
    let pool = pool(4 * MIB);
    pool.reserve(3 * MIB, &mut go_on).expect("room");
    pool.reserve(0, &mut go_on).expect("nothing to do");
    assert_eq!((stats(&pool).reserved_bytes, stats(&pool).cached_bytes, stats(&pool).regions), (3 * MIB, 3 * MIB, 1));
    let blocks = [take(&pool, 2 * MIB), take(&pool, 10), take(&pool, MIB - page())];
    assert_eq!((stats(&pool).reserved_bytes, stats(&pool).regions), (3 * MIB, 1));
    assert!(matches!(pool.reserve(2 * MIB, &mut go_on), Err(Error::OutOfPinnedMemory { .. })));
    assert!(blocks.iter().all(is_pinned));
}

#[test]
fn a_closed_pool_lives_until_its_last_block_and_leaves_nothing() {
    alone("a_closed_pool_lives_until_its_last_block_and_leaves_nothing", || {
        let pool = pool(7 * MIB);
        let mut blocks = vec![take(&pool, MIB), take(&pool, 10), take(&pool, 20), take(&pool, 2 * MIB)];
        drop(take(&pool, MIB + page()));
        blocks[1].as_mut_slice().fill(9);
        pool.close().expect("the kernel takes what is idle");
        pool.close().expect("a second call does nothing");
        assert!(pool.is_closed());
        assert!(matches!(pool.take(10), Err(Error::Closed)) && matches!(pool.take(0), Err(Error::Closed)));
        assert!(matches!(pool.reserve(10, &mut go_on), Err(Error::Closed)));
        assert_eq!(pool.trim().expect("nothing is idle"), 0);
        assert!(blocks.iter().all(is_pinned) && blocks[1].as_slice() == [9; 10]);
        let (now, live) = (stats(&pool), 3 * MIB + 2 * page());
        assert_eq!((now.blocks, now.allocated_bytes, now.regions), (4, live, 3));
        assert_eq!((now.reserved_bytes, now.locked_bytes), (locked_bytes(), live + now.cached_bytes));
        blocks.swap_remove(0);
        assert_eq!(stats(&pool).locked_bytes, locked_bytes());
        drop(pool);
        assert!(blocks.iter().all(is_pinned), "blocks outlive their pool");
        while let Some(block) = blocks.pop() {
            let range = address(&block)..address(&block) + block.capacity();
            assert!(is_locked(&range));
            std::thread::spawn(move || drop(block)).join().expect("dropped");
            assert!(!pinpool::registry::shared::is_pinned(range.start, 1) || range.end - range.start == page());
        }
        assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
    });
}

#[test]
fn the_fast_path_of_a_closed_pool_says_so() {
    let _room = room(MIB);
    let pool = pool(MIB);
    assert!(matches!(pool.take_cached(10), Ok(None)));
    assert!(matches!(pool.take_cached(usize::MAX), Ok(None)));
    pool.close().expect("nothing there");
    assert!(matches!(pool.take_cached(0), Err(Error::Closed)));
    assert!(matches!(pool.take_cached(10), Err(Error::Closed)));
}

#[test]
fn a_pool_that_is_closed_while_it_grows_leaves_nothing() {
    alone("a_pool_that_is_closed_while_it_grows_leaves_nothing", || {
        let close_then_go_on = |pool: &Pool| {
            pool.close().expect("nothing is idle");
            std::ops::ControlFlow::Continue(())
        };
        for len in [10, MIB] {
            let pool = pool(4 * MIB);
            let taken = pool.take_within(len, None, &mut |_, _| close_then_go_on(&pool));
            assert!(matches!(taken, Err(Error::Closed)), "{taken:?}");
            assert_eq!((locked_bytes(), stats(&pool).reserved_bytes), (0, 0));
        }
        let pool = pool(4 * MIB);
        let reserved = pool.reserve(MIB, &mut |_, _| close_then_go_on(&pool));
        assert_eq!((locked_bytes(), stats(&pool).reserved_bytes), (0, 0), "nobody can take it any more: {reserved:?}");
        assert!(matches!(reserved, Err(Error::Closed)));
    });
}

#[test]
fn a_block_goes_back_from_any_thread() {
    let _room = room(2 * MIB);
    let pool = pool(2 * MIB);
    let block = take(&pool, MIB);
    let first = address(&block);
    std::thread::spawn(move || drop(block)).join().expect("dropped");
    assert_eq!((stats(&pool).blocks, stats(&pool).cached_bytes), (0, MIB));
    assert_eq!(address(&take(&pool, MIB)), first, "whoever asks next gets it, on whatever thread");
}
