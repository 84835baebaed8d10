//! What one thread sees while another one is in the middle of a system call: no lock is held, nothing half-made is
//! handed out, and the books are right afterwards.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::maps::{Memory, is_locked, locked_bytes, page_is_locked};
use common::process::alone;
use common::seccomp::{Rule, paused};
use common::{MIB, address, is_pinned, page, pinned_ranges, pool, stats, try_adopt};
use pinpool::Error;
use pinpool::pinned::Adopted;
use pinpool::pool::unpin;
use pinpool::registry::shared;

fn adopt(start: usize, len: usize) -> Adopted {
    // SAFETY: the tests keep what they lend for longer than the adoption.
    unsafe { try_adopt(start, len) }.expect("memory of our own")
}

/// Rules that stop at each call that makes or ends a region of this length.
fn calls_for_a_region(len: usize) -> [Rule; 4] {
    let populate = Rule::madvise(libc::MADV_POPULATE_WRITE, 0);
    [Rule::mmap(len, 0), populate, Rule::mlock(0).with(1, len), Rule::munmap(len, 0)]
}

#[test]
fn everything_else_goes_on_while_a_region_is_made_or_ended() {
    alone("everything_else_goes_on_while_a_region_is_made_or_ended", || {
        // The region that the small block lies in is too small for the others.
        let pool = pool(7 * MIB);
        let (held, memory) = (pool.take(10).expect("room"), Memory::new(1));
        let make_and_end = || {
            drop(pool.take(2 * MIB).expect("room"));
            pool.trim().expect("the kernel takes it");
        };
        for rule in calls_for_a_region(2 * MIB) {
            paused(rule, make_and_end, || {
                assert!(is_pinned(&held) && !unpin(1).expect("no such block"));
                drop(adopt(memory.start(), 100));
                assert!(is_pinned(&pool.take(10).expect("room")));
                assert!(is_pinned(&pool.take(3 * MIB).expect("room")));
                assert!(stats(&pool).reserved_bytes <= 7 * MIB);
                drop(common::pool(MIB).take(MIB).expect("room"));
                pool.trim().expect("the kernel takes it");
            });
        }
        drop(held);
        pool.close().expect("the kernel takes it");
        assert_eq!((stats(&pool).reserved_bytes, pinned_ranges(), locked_bytes()), (0, 0, 0));
    });
}

#[test]
fn everything_else_goes_on_while_a_range_is_adopted_or_released() {
    alone("everything_else_goes_on_while_a_range_is_adopted_or_released", || {
        let (memory, pool) = (Memory::new(2), pool(2 * MIB));
        for rule in [Rule::mlock(0), Rule::munlock(0)] {
            let body = || drop(adopt(memory.start(), page()));
            paused(rule, body, || {
                assert!(!shared::is_pinned(memory.start(), 1), "on its way in or out is not pinned");
                assert_eq!(pinned_ranges(), 1);
                drop(adopt(memory.start() + page(), page()));
                drop(pool.take(10).expect("room"));
                pool.trim().expect("the kernel takes it");
            });
            assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
        }
    });
}

#[test]
fn a_region_on_its_way_is_charged_already() {
    alone("a_region_on_its_way_is_charged_already", || {
        for rule in calls_for_a_region(MIB) {
            let pool = pool(MIB);
            let make_and_end = || pool.take(MIB).map(drop).and_then(|()| pool.trim());
            let (freed, ()) = paused(rule, make_and_end, || {
                assert_eq!(stats(&pool).reserved_bytes, MIB);
                assert!(locked_bytes() <= MIB);
            });
            assert_eq!((freed.expect("room"), stats(&pool).reserved_bytes), (MIB, 0));
        }
    });
}

#[test]
fn a_pool_that_is_closed_while_another_thread_makes_a_region_leaves_nothing() {
    alone("a_pool_that_is_closed_while_another_thread_makes_a_region_leaves_nothing", || {
        for rule in [Rule::mlock(0), Rule::madvise(libc::MADV_POPULATE_WRITE, 0)] {
            for len in [10, MIB] {
                let pool = pool(4 * MIB);
                let take = || pool.take(len).map(drop);
                let (taken, ()) = paused(rule.clone(), take, || pool.close().expect("nothing is idle"));
                assert!(matches!(taken, Err(Error::Closed)), "{taken:?}");
                assert_eq!((stats(&pool).reserved_bytes, pinned_ranges(), locked_bytes()), (0, 0, 0));
            }
        }
    });
}

#[test]
fn whoever_adopts_a_range_on_its_way_in_waits_until_it_is_locked() {
    alone("whoever_adopts_a_range_on_its_way_in_waits_until_it_is_locked", || {
        let memory = Memory::new(1);
        thread::scope(|scope| {
            let (first, second) = paused(
                Rule::mlock(0),
                || adopt(memory.start(), page()),
                || {
                    let second = scope.spawn(|| {
                        let adopted = adopt(memory.start(), page());
                        assert!(page_is_locked(memory.start()) && shared::is_pinned(memory.start(), page()));
                        adopted
                    });
                    assert!(!page_is_locked(memory.start()) && !second.is_finished());
                    second
                },
            );
            let second = second.join().expect("it saw a locked page");
            assert_eq!(pinned_ranges(), 1);
            drop(first);
            assert!(shared::is_pinned(memory.start(), page()) && page_is_locked(memory.start()));
            drop(second);
            assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
        });
    });
}

#[test]
fn whoever_adopts_a_page_on_its_way_out_gets_it_locked() {
    alone("whoever_adopts_a_page_on_its_way_out_gets_it_locked", || {
        let memory = Memory::new(1);
        let half = page() / 2;
        for other in [memory.start(), memory.start() + half] {
            thread::scope(|scope| {
                let first = adopt(memory.start(), half);
                let ((), second) = paused(
                    Rule::munlock(0),
                    || drop(first),
                    || {
                        let second = scope.spawn(move || adopt(other, half));
                        assert!(!shared::is_pinned(other, half) && !second.is_finished());
                        second
                    },
                );
                let second = second.join().expect("it is adopted");
                assert!(shared::is_pinned(other, half) && page_is_locked(memory.start()));
                drop(second);
                assert_eq!((pinned_ranges(), locked_bytes()), (0, 0));
            });
        }
    });
}

/// Whoever unpins a block should hold it; whoever does not must not break the pool's books.
#[test]
fn a_block_that_is_dropped_and_trimmed_while_it_is_unpinned_is_refunded() {
    alone("a_block_that_is_dropped_and_trimmed_while_it_is_unpinned_is_refunded", || {
        for len in [10, MIB] {
            let pool = pool(MIB);
            let block = pool.take(len).expect("room");
            let first = address(&block);
            let unpin_it = || unpin(first).expect("the kernel takes it");
            let (unpinned, _) = paused(Rule::munlock(0), unpin_it, || {
                drop(block);
                pool.trim().expect("the kernel takes it")
            });
            assert!(unpinned);
            pool.trim().expect("the kernel takes it");
            assert_eq!((locked_bytes(), stats(&pool).reserved_bytes), (0, 0), "{len}");
            let again = pool.take(MIB).expect("the whole budget is free");
            assert!(is_pinned(&again) && is_locked(&(address(&again)..address(&again) + MIB)));
        }
    });
}

/// The budget counts what another thread is giving back this moment. That is no reason to tell a caller that memory is
/// out, when nobody holds any of it: the request has to wait for those few microseconds.
#[test]
fn a_request_does_not_fail_on_memory_that_another_thread_is_trimming() {
    alone("a_request_does_not_fail_on_memory_that_another_thread_is_trimming", || {
        let pool = pool(2 * MIB);
        drop([pool.take(MIB).expect("room"), pool.take(MIB).expect("room")]);
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let trim = || pool.trim().expect("the kernel takes it");
            paused(Rule::munmap(MIB, 0), trim, || {
                scope.spawn(|| {
                    sender.send(pool.take(2 * MIB).map(drop).map_err(|error| error.to_string())).expect("we listen");
                });
                // Right is to wait for the trim, which goes on after this; wrong is to fail now.
                let early = receiver.recv_timeout(Duration::from_millis(100));
                assert!(early.is_err(), "nobody holds a block, and the request failed: {early:?}");
            });
            assert_eq!(receiver.recv().expect("an answer"), Ok(()));
        });
    });
}

/// Drivers that map whole pages are asked first whether they know them: of two neighbours that come at once, each would
/// hear that they do not.
#[test]
fn neighbours_on_one_page_are_not_adopted_at_once() {
    alone("neighbours_on_one_page_are_not_adopted_at_once", || {
        let memory = Memory::new(2);
        let middle = memory.start() + page() + 100;
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let (left, ()) = paused(
                Rule::mlock(0),
                || adopt(memory.start(), page() + 100),
                || {
                    scope.spawn(|| sender.send(adopt(middle, 100)).expect("we listen"));
                    let early = receiver.recv_timeout(Duration::from_millis(100));
                    assert!(early.is_err(), "the other one is on its way");
                },
            );
            let right = receiver.recv().expect("an answer");
            assert!(shared::is_pinned(memory.start(), page() + 100) && shared::is_pinned(middle, 100));
            drop((left, right));
        });
        assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
    });
}
