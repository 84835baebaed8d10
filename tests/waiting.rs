//! Waiting for memory: until some comes back, until the time is up, until the caller has had enough.

mod common;

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::process::alone;
use common::{MIB, address, go_on, page, pool};
use pinpool::{Block, Error, Pool};

/// A waiting caller is asked several times a second. So often would take most of a minute, and only a test that fails
/// asks so often.
const ENOUGH: usize = 1_000;

fn is_out_of_memory(result: &pinpool::Result<Block>) -> bool {
    matches!(result, Err(Error::OutOfPinnedMemory { .. }))
}

/// Waits for a block, tells `waiting` when it first does, and gives up when it was asked too often.
fn wait_for(pool: &Pool, len: usize, waiting: &mpsc::Sender<()>) -> pinpool::Result<Block> {
    let mut asked = 0;
    pool.take_within(len, None, &mut |done, total| {
        if (done, total) == (0, 0) {
            asked += 1;
            if asked == 1 {
                waiting.send(()).expect("the test listens");
            }
        }
        if asked > ENOUGH { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

#[test]
fn no_time_to_wait_is_an_error_at_once() {
    alone("no_time_to_wait_is_an_error_at_once", || {
        let pool = pool(MIB);
        let block = pool.take(MIB).expect("room");
        let asked = &mut |_: usize, _: usize| -> ControlFlow<()> { panic!("nobody waits") };
        assert!(is_out_of_memory(&pool.take_within(MIB, Some(Duration::ZERO), asked)));
        assert!(is_out_of_memory(&pool.take(page())));
        drop(block);
    });
}

#[test]
fn a_wait_ends_with_its_time() {
    alone("a_wait_ends_with_its_time", || {
        let pool = pool(MIB);
        let block = pool.take(MIB).expect("room");
        for timeout in [Duration::from_nanos(1), Duration::from_millis(1), Duration::from_millis(120)] {
            let (start, mut asked) = (Instant::now(), 0);
            let taken = pool.take_within(MIB, Some(timeout), &mut |_, _| {
                asked += 1;
                if asked > ENOUGH { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert!(is_out_of_memory(&taken), "{taken:?} after {asked} rounds, {timeout:?}");
            assert!(start.elapsed() >= timeout, "it has given up too soon");
            assert!(asked < 20, "who waits sleeps meanwhile, and is asked every 50 ms: {asked} times in {timeout:?}");
        }
        drop(block);
        pool.take_within(MIB, Some(Duration::from_nanos(1)), &mut go_on).expect("nothing to wait for");
        pool.take_within(MIB, Some(Duration::MAX), &mut go_on).expect("nothing to wait for");
    });
}

#[test]
fn a_block_that_comes_back_on_another_thread_ends_the_wait() {
    alone("a_block_that_comes_back_on_another_thread_ends_the_wait", || {
        // The same size, another one, and a small one: out of the cache, after a trim, and from a shared region.
        for (held, wanted) in [(MIB, MIB), (MIB, MIB - page()), (MIB, 10), (page(), page())] {
            let pool = pool(held);
            let block = pool.take(held).expect("room");
            let first = address(&block);
            let (waiting, started) = mpsc::channel();
            let taken = thread::scope(|scope| {
                scope.spawn(move || {
                    started.recv().expect("it waits");
                    drop(block);
                });
                wait_for(&pool, wanted, &waiting)
            });
            let taken = taken.expect("the block came back");
            assert!(held != wanted || address(&taken) == first);
            assert_eq!(pool.stats().expect("ours").blocks, 1);
        }
    });
}

#[test]
fn the_caller_can_stop_waiting() {
    alone("the_caller_can_stop_waiting", || {
        let pool = pool(MIB);
        let block = pool.take(MIB).expect("room");
        for timeout in [None, Some(Duration::from_secs(1_000))] {
            let mut asked = 0;
            let refusal = pool.take_within(MIB, timeout, &mut |done, total| {
                assert_eq!((done, total), (0, 0));
                asked += 1;
                if asked == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            assert!(matches!(refusal, Err(Error::Interrupted)) && asked == 3, "{refusal:?} after {asked}");
        }
        drop(block);
        pool.take(MIB).expect("who stopped has taken nothing");
    });
}

#[test]
fn closing_the_pool_ends_the_wait() {
    alone("closing_the_pool_ends_the_wait", || {
        let pool = pool(MIB);
        let block = pool.take(MIB).expect("room");
        let (waiting, started) = mpsc::channel();
        let refusal = thread::scope(|scope| {
            let pool = &pool;
            scope.spawn(move || {
                started.recv().expect("it waits");
                pool.close().expect("nothing is idle");
            });
            wait_for(pool, MIB, &waiting)
        });
        assert!(matches!(refusal, Err(Error::Closed)), "{refusal:?}");
        drop(block);
    });
}

#[test]
fn every_one_of_many_waiters_gets_its_turn() {
    alone("every_one_of_many_waiters_gets_its_turn", || {
        let pool = pool(2 * MIB);
        thread::scope(|scope| {
            for number in 0..6 {
                let pool = &pool;
                scope.spawn(move || {
                    let (waiting, _started) = mpsc::channel();
                    for lap in 0..200 {
                        let len = MIB / 2 * (1 + (number + lap) % 4);
                        let block = wait_for(pool, len, &waiting).expect("the others give back what they take");
                        assert!(block.len() == len && pool.stats().expect("ours").reserved_bytes <= 2 * MIB);
                    }
                });
            }
        });
        let stats = pool.stats().expect("ours");
        assert_eq!((stats.blocks, stats.allocated_bytes), (0, 0));
        assert_eq!((pool.trim().expect("all idle"), stats.reserved_bytes), (stats.cached_bytes, stats.cached_bytes));
    });
}

#[test]
fn a_region_that_another_thread_gave_up_making_ends_the_wait() {
    alone("a_region_that_another_thread_gave_up_making_ends_the_wait", || {
        let pool = pool(2 * MIB);
        let (waiting, started) = mpsc::channel();
        thread::scope(|scope| {
            // The first caller has all of the budget on the way when the second one asks; then it is interrupted.
            let mut second = None;
            let first = pool.take_within(2 * MIB, None, &mut |_, _| {
                let (pool, waiting) = (&pool, waiting.clone());
                second.get_or_insert_with(|| scope.spawn(move || wait_for(pool, 2 * MIB, &waiting).map(drop)));
                started.recv().expect("the second one waits");
                ControlFlow::Break(())
            });
            assert!(matches!(first, Err(Error::Interrupted)), "{first:?}");
            let second = second.expect("the callback was called").join().expect("no panic");
            assert!(second.is_ok(), "nobody holds anything of the budget, and the second one waits: {second:?}");
        });
    });
}
