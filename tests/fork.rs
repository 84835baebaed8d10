//! Forks: the child owns nothing of its parent's, can read all of it, and can have a pool of its own.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::maps::{Memory, is_locked, is_mapped, locked_bytes};
use common::process::{alone, in_forked_child};
use common::{MIB, address, go_on, is_pinned, page, pin, pinned_ranges, pool, region_of, try_adopt};
use pinpool::{Block, Error, Pages, pool::unpin};

fn filled(pool: &pinpool::Pool, len: usize, byte: u8) -> Block {
    let mut block = pool.take(len).expect("room");
    block.as_mut_slice().fill(byte);
    block
}

#[test]
fn the_parents_pool_refuses_the_child_and_its_memory_can_be_read() {
    alone("the_parents_pool_refuses_the_child_and_its_memory_can_be_read", || {
        let pool = pool(6 * MIB);
        let (small, mut large) = (filled(&pool, 100, 1), filled(&pool, MIB, 2));
        drop(pool.take(10).expect("room")); // so that the cache has something
        in_forked_child(|| {
            assert!(small.as_slice() == [1; 100] && large.as_slice().iter().all(|&byte| byte == 2));
            assert!(!is_pinned(&small) && !is_pinned(&large) && pinned_ranges() == 0);
            assert!(matches!(pool.take(10), Err(Error::Forked)) && matches!(pool.take(0), Err(Error::Forked)));
            assert!(matches!(pool.take_cached(10), Err(Error::Forked)));
            assert!(matches!(pool.take_within(MIB, None, &mut go_on), Err(Error::Forked)));
            assert!(matches!(pool.reserve(10, &mut go_on), Err(Error::Forked)));
            assert!(matches!(pool.trim(), Err(Error::Forked)) && matches!(pool.stats(), Err(Error::Forked)));
            assert!(!unpin(address(&small)).expect("it is the parent's"));
            large.as_mut_slice().fill(3); // the child's own copy
            pool.close().expect("it is the parent's to close");
            assert!(!pool.is_closed());
            assert_eq!(locked_bytes(), 0, "the kernel hands no lock down");
        });
        assert!(!pool.is_closed() && is_pinned(&small) && is_pinned(&large));
        assert!(large.as_slice().iter().all(|&byte| byte == 2));
        assert_eq!(locked_bytes(), pool.stats().expect("ours").locked_bytes);
        filled(&pool, 10, 4);
    });
}

#[test]
fn what_the_child_drops_stays_with_the_parent() {
    alone("what_the_child_drops_stays_with_the_parent", || {
        let memory = Memory::new(2);
        // SAFETY: the memory outlives the adoption.
        let mut adopted = Some(unsafe { try_adopt(memory.start(), 2 * page()) }.expect("memory of our own"));
        let mut pinned = Some(pin(MIB, &region_of(Pages::Base)).expect("a region"));
        let mut own_pool = Some(pool(4 * MIB));
        let own = own_pool.as_ref().expect("made just now");
        let mut blocks = vec![filled(own, 10, 1), filled(own, MIB, 2)];
        let closed = pool(MIB);
        let mut last = Some(filled(&closed, MIB, 3));
        closed.close().expect("nothing is idle");
        drop(closed);
        let (ranges, locked) = (pinned_ranges(), locked_bytes());
        let places: Vec<_> =
            blocks.iter().chain(last.as_ref()).map(|b| address(b)..address(b) + b.capacity()).collect();
        in_forked_child(|| {
            let mut handle = adopted.take().expect("the parent's");
            handle.release().expect("nothing happens");
            drop(handle);
            pinned.take().expect("the parent's").release().expect("nothing happens");
            blocks.clear();
            own_pool = None;
            last = None;
            assert!(places.iter().all(is_mapped), "who else holds the addresses may read them");
        });
        assert_eq!((pinned_ranges(), locked_bytes()), (ranges, locked));
        assert!(places.iter().all(is_locked) && is_locked(&memory.range()));
        assert!(blocks.iter().chain(&last).all(is_pinned));
        drop((adopted, pinned, blocks, own_pool, last));
        assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
    });
}

#[test]
fn a_child_and_a_grandchild_have_pools_of_their_own() {
    alone("a_child_and_a_grandchild_have_pools_of_their_own", || {
        let parents = pool(2 * MIB);
        let parents_block = filled(&parents, MIB, 1);
        in_forked_child(|| {
            let childs = pool(2 * MIB);
            let block = filled(&childs, MIB, 2);
            assert!(is_pinned(&block) && !is_pinned(&parents_block));
            assert!(is_locked(&(address(&block)..address(&block) + MIB)) && locked_bytes() == MIB);
            assert_ne!(address(&block), address(&parents_block));
            // SAFETY: the parent's memory is mapped here, too, as ordinary memory of this process.
            let adopted = unsafe { try_adopt(address(&parents_block), MIB) }.expect("nobody pins it here");
            assert!(is_pinned(&parents_block) && locked_bytes() == 2 * MIB);
            in_forked_child(|| {
                assert!(matches!(childs.take(1), Err(Error::Forked)) && matches!(parents.take(1), Err(Error::Forked)));
                assert_eq!(pinned_ranges(), 0);
                let grandchilds = pool(MIB);
                assert!(is_pinned(&filled(&grandchilds, MIB, 3)));
                assert!(block.as_slice().iter().all(|&byte| byte == 2));
            });
            drop(adopted);
            drop(block);
            assert_eq!(childs.trim().expect("all idle"), MIB);
            assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
        });
        assert!(is_pinned(&parents_block) && locked_bytes() == MIB);
    });
}

/// Forks while other threads are in the middle of everything, which the child's copy of the locks then shows for good.
fn fork_while(busy: impl Fn() + Sync, child: impl Fn()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    busy();
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..200 {
                in_forked_child(&child);
            }
        }));
        done.store(true, Ordering::Relaxed);
        result.expect("no child hangs");
    });
}

#[test]
fn a_child_does_not_hang_on_blocks_that_other_threads_take_and_drop() {
    alone("a_child_does_not_hang_on_blocks_that_other_threads_take_and_drop", || {
        let pool = pool(4 * MIB);
        let held = filled(&pool, page(), 5);
        let busy = || {
            drop(pool.take(10).expect("room"));
            drop(pool.take(MIB).expect("room"));
            let _ = pool.trim().expect("the kernel takes it");
            assert!(is_pinned(&held));
        };
        fork_while(busy, || {
            assert!(!is_pinned(&held) && held.as_slice().iter().all(|&byte| byte == 5));
            assert!(matches!(pool.take(10), Err(Error::Forked)));
            let own = common::pool(page());
            assert!(is_pinned(&own.take(10).expect("room")));
        });
        assert!(is_pinned(&held));
    });
}

#[test]
fn a_child_does_not_hang_on_pools_that_other_threads_make_and_look_through() {
    alone("a_child_does_not_hang_on_pools_that_other_threads_make_and_look_through", || {
        let (held, busy) = (pool(MIB), || {
            drop(pool(MIB));
            assert!(!unpin(1).expect("no such block"));
        });
        fork_while(busy, || {
            assert!(!unpin(1).expect("no such block"));
            let own = common::pool(page());
            assert!(is_pinned(&own.take(10).expect("room")));
        });
        drop(held);
    });
}

#[test]
fn a_child_does_not_hang_on_ranges_that_other_threads_adopt() {
    alone("a_child_does_not_hang_on_ranges_that_other_threads_adopt", || {
        let memory = Memory::new(1);
        // SAFETY: the memory outlives the adoption.
        let adopt = || unsafe { try_adopt(memory.start(), 100) }.expect("memory of our own");
        fork_while(
            || drop(adopt()),
            || {
                let adopted = adopt();
                assert!(pinpool::registry::shared::is_pinned(memory.start(), 100) && pinned_ranges() == 1);
                drop(adopted);
                assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
            },
        );
    });
}
