//! Who outlives whom: blocks, tickets, swappers and pools that go while something is under way, and forked children.
#![allow(unsafe_code)] // names memory by its address

mod common;

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;

use common::maps::is_unmapped;
use common::process::{alone, in_forked_child};
use common::swap::{
    Directory, Gate, Opened, UNIT, block, check, contents, engines, engines_and_ways, get, keys, put, say,
};
use common::{MIB, address, go_on, page, pool, region_of, stats};
use pinpool::swap::{Engine, SwapOptions, Swapper, Ticket};
use pinpool::{Block, Error, Pages, Pool, PoolOptions};

const LEN: usize = 10 * UNIT - 100;

fn range(block: &Block) -> Range<usize> {
    address(block)..address(block) + block.len()
}

/// A swapper whose engine is held back.
fn held(directory: &Directory, options: &SwapOptions) -> (Swapper, Opened) {
    let gate = Gate::closed(|_| true);
    let swapper = directory.reopen(&SwapOptions { inject: Some(gate.clone()), ..options.clone() });
    (swapper, Opened(gate))
}

fn write_from(swapper: &Swapper, key: &str, label: &str, block: &Block) -> Ticket {
    // SAFETY: nobody writes to the block before the end.
    unsafe { swapper.write_from(key, label, range(block), &mut go_on) }.expect("a pool's memory")
}

fn read_into(swapper: &Swapper, key: &str, block: &Block) -> Ticket {
    // SAFETY: nobody looks at the block before the end.
    unsafe { swapper.read_into(key, None, range(block), &mut go_on) }.expect("a pool's memory")
}

#[test]
fn a_block_that_was_dropped_is_not_handed_out_before_the_transfer_is_done() {
    for options in engines_and_ways() {
        for debug in [false, true] {
            let directory = Directory::new();
            let pool = Pool::new(PoolOptions {
                max_bytes: Some(MIB),
                region: region_of(Pages::Base),
                debug,
                ..PoolOptions::default()
            });
            let pool = pool.expect("a pool of nothing yet");
            put(&directory.open(&options), &pool, "old", LEN, 1).expect("room");
            let (swapper, opened) = held(&directory, &options);
            let (source, target) = (block(&pool, LEN, 2), block(&pool, LEN, 3));
            let places = [address(&source), address(&target)];
            let tickets = [write_from(&swapper, "new", "2", &source), read_into(&swapper, "old", &target)];
            drop((source, target));
            let capacity = LEN.next_multiple_of(page());
            assert_eq!(stats(&pool).pending_bytes, 2 * capacity);
            let others = [(); 4].map(|()| pool.take(LEN).expect("room"));
            assert!(others.iter().all(|other| !places.contains(&address(other))), "they are not free");
            // A whole pool of nothing else is not enough to get them.
            assert!(pool.take(MIB - 5 * capacity).is_err());
            drop(others);
            drop(opened);
            for ticket in &tickets {
                ticket.wait().expect("the memory is still there");
            }
            assert_eq!(stats(&pool).pending_bytes, 0, "they are at hand, and nobody had to ask");
            check(&swapper, &pool, "new", LEN, 2);
            let taken: Vec<_> = std::iter::from_fn(|| pool.take(LEN).ok()).collect();
            assert!(places.iter().all(|place| taken.iter().any(|block| address(block) == *place)), "they are free");
            assert_eq!(stats(&pool).pending_bytes, 0);
        }
    }
}

#[test]
fn what_was_begun_is_done_in_whatever_order_its_owners_go() {
    // Each order of the four: ticket, swapper, pool, and the gate that lets the engine go on.
    for options in engines() {
        for order in orders() {
            let directory = Directory::new();
            let pool = pool(MIB);
            put(&directory.open(&options), &pool, "old", LEN, 1).expect("room");
            let (swapper, opened) = held(&directory, &options);
            let source = block(&pool, LEN, 2);
            let tickets = vec![
                write_from(&swapper, "by address", "2", &source),
                swapper.write("whole", "3", Arc::new(block(&pool, LEN, 3))).expect("room"),
                swapper.read("old", pool.take(LEN).expect("room")).expect("stored"),
                swapper.delete("old").expect("stored"),
            ];
            drop(source);
            let mut owners = (Some(tickets), Some(swapper), Some(pool), Some(opened));
            for owner in order {
                match owner {
                    0 => owners.0 = None,
                    1 => owners.1 = None,
                    2 => owners.2 = None,
                    _ => owners.3 = None,
                }
            }
            let pool = common::pool(MIB);
            let swapper = directory.reopen(&options);
            assert_eq!(keys(&swapper), ["by address", "whole"], "{order:?}");
            check(&swapper, &pool, "by address", LEN, 2);
            check(&swapper, &pool, "whole", LEN, 3);
        }
    }
}

fn orders() -> Vec<[usize; 4]> {
    let all = (0..256).map(|code| [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6]);
    all.filter(|order| (0..4).all(|owner| order.contains(&owner))).collect()
}

#[test]
fn a_store_is_locked_until_the_last_transfer_is_done() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let (swapper, opened) = held(&directory, &options);
        let ticket = swapper.write("key", "1", Arc::new(block(&pool, LEN, 1))).expect("room");
        drop(swapper);
        assert!(matches!(directory.try_open(&options), Err(Error::Storage { call: "locking", .. })));
        assert!(!ticket.is_done());
        drop(opened);
        ticket.wait().expect("it goes on");
        check(&directory.reopen(&options), &pool, "key", LEN, 1);
    }
}

#[test]
fn the_regions_of_a_dropped_pool_go_when_the_last_transfer_is_done() {
    alone("the_regions_of_a_dropped_pool_go_when_the_last_transfer_is_done", || {
        for options in engines() {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let (swapper, opened) = held(&directory, &options);
            let source = block(&pool, LEN, 1);
            let place = range(&source);
            let ticket = write_from(&swapper, "key", "1", &source);
            drop((source, pool));
            assert!(!is_unmapped(&place), "the kernel may read it");
            drop(opened);
            ticket.wait().expect("the memory is still there");
            let other = common::pool(MIB);
            check(&swapper, &other, "key", LEN, 1);
            swapper.close().expect("our own files");
        }
    });
}

/// Bytes that the kernel holds for `io_uring` and its like.
fn held_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let number = text.lines().find_map(|line| line.strip_prefix("VmPin:")).expect("a line of its own");
    number.split_whitespace().next().and_then(|number| number.parse::<usize>().ok()).expect("a number of kB") * 1024
}

fn ring_options() -> Option<SwapOptions> {
    engines().into_iter().find(|options| options.engine == Engine::IoUring)
}

#[test]
fn a_fixed_buffer_goes_with_its_region_and_what_is_mapped_there_next_is_other_memory() {
    alone("a_fixed_buffer_goes_with_its_region_and_what_is_mapped_there_next_is_other_memory", || {
        let Some(options) = ring_options() else { return };
        let (directory, pool) = (Directory::new(), pool(16 * MIB));
        let swapper = directory.open(&options);
        let before = held_bytes();
        let mut places = Vec::new();
        for round in 0..20 {
            let source = block(&pool, 2 * MIB, round); // a region of its own
            places.push(address(&source));
            let ticket = write_from(&swapper, "key", &round.to_string(), &source);
            drop(source);
            ticket.wait().expect("room");
            check(&swapper, &pool, "key", 2 * MIB, round);
            assert!(swapper.stats().expect("ours").fixed_bytes >= 2 * MIB);
            assert!(held_bytes() >= before + 2 * MIB, "the kernel holds its pages");
            let trimmed = pool.trim().expect("the kernel takes it");
            assert!(trimmed >= 2 * MIB && stats(&pool).regions == 0);
            assert_eq!((swapper.stats().expect("ours").fixed_bytes, held_bytes()), (0, before));
        }
        places.sort_unstable();
        places.dedup();
        if places.len() == 20 {
            say("no address came twice (sanitizers do that): only that the memory was let go of is tested");
        }
        pool.reserve(MIB, &mut go_on).expect("room");
        put(&swapper, &pool, "key", LEN, 1).expect("room");
        assert!(held_bytes() > before);
        swapper.close().expect("our own files");
        assert_eq!(
            (swapper.stats().expect("ours").fixed_bytes, held_bytes()),
            (0, before),
            "with its region still there"
        );
    });
}

#[test]
fn a_region_of_which_a_part_was_unpinned_meanwhile_is_let_go_of_whole() {
    alone("a_region_of_which_a_part_was_unpinned_meanwhile_is_let_go_of_whole", || {
        let Some(options) = ring_options() else { return };
        let (directory, pool) = (Directory::new(), pool(16 * MIB));
        let swapper = directory.open(&options);
        let before = held_bytes();
        pool.reserve(100 * UNIT, &mut go_on).expect("room");
        let blocks: Vec<_> = (0..3).map(|seed| block(&pool, LEN, seed)).collect();
        assert!(pinpool::pool::unpin(address(&blocks[1])).expect("the kernel takes it"));
        // Now the registry has the region in two parts, and then in one again.
        write_from(&swapper, "a", "0", &blocks[0]).wait().expect("room");
        let mut blocks = blocks.into_iter();
        let (first, second, third) = (blocks.next(), blocks.next(), blocks.next().expect("three"));
        drop(second);
        write_from(&swapper, "c", "2", &third).wait().expect("room");
        check(&swapper, &pool, "a", LEN, 0);
        check(&swapper, &pool, "c", LEN, 2);
        assert!(swapper.stats().expect("ours").fixed_bytes <= stats(&pool).reserved_bytes);
        drop((first, third));
        pool.trim().expect("the kernel takes it");
        assert_eq!(stats(&pool).regions, 0);
        assert_eq!((swapper.stats().expect("ours").fixed_bytes, held_bytes()), (0, before));
    });
}

#[test]
fn a_forked_child_can_do_nothing_with_its_parents_swapper_and_the_parent_goes_on() {
    alone("a_forked_child_can_do_nothing_with_its_parents_swapper_and_the_parent_goes_on", || {
        for options in engines_and_ways() {
            let (directory, pool) = (Directory::new(), pool(MIB));
            put(&directory.open(&options), &pool, "old", LEN, 1).expect("room");
            let (swapper, opened) = held(&directory, &options);
            let source = block(&pool, LEN, 2);
            let write = write_from(&swapper, "new", "2", &source);
            let read = swapper.read("old", pool.take(LEN).expect("room")).expect("stored");
            let (mut swapper, mut tickets, mut source) = (Some(swapper), Some([write, read]), Some(source));
            in_forked_child(|| {
                let theirs = swapper.take().expect("the parent's");
                let forked = |error: Error| assert!(matches!(error, Error::SwapperForked), "{error}");
                let own = common::pool(MIB);
                forked(theirs.write("key", "", Arc::new(block(&own, 10, 1))).expect_err("the parent's"));
                forked(theirs.read("old", own.take(LEN).expect("room")).expect_err("the parent's"));
                // SAFETY: it is refused.
                forked(unsafe { theirs.write_from("key", "", 0..1, &mut go_on) }.expect_err("the parent's"));
                // SAFETY: it is refused.
                forked(unsafe { theirs.read_into("old", None, 0..1, &mut go_on) }.expect_err("the parent's"));
                forked(theirs.delete("old").expect_err("the parent's"));
                forked(theirs.describe("old").expect_err("the parent's"));
                forked(theirs.keys().expect_err("the parent's"));
                forked(theirs.flush().expect_err("the parent's"));
                forked(theirs.trim().expect_err("the parent's"));
                forked(theirs.stats().expect_err("the parent's"));
                let tickets = tickets.take().expect("the parent's");
                for ticket in &tickets {
                    assert!(matches!(&*ticket.wait().expect_err("the parent's"), Error::SwapperForked));
                    forked(ticket.watch().expect_err("the parent's"));
                    assert!(!ticket.is_done() && ticket.take_block().is_none());
                }
                assert!(matches!(directory.try_open(&options), Err(Error::Storage { call: "locking", .. })));
                theirs.close().expect("it is the parent's to close");
                assert!(!theirs.is_closed());
                drop(source.take());
                drop(tickets);
                drop(theirs);
                // The child can have a store of its own.
                let elsewhere = Directory::new();
                let swapper = elsewhere.open(&options);
                put(&swapper, &own, "key", LEN, 3).expect("room");
                check(&swapper, &own, "key", LEN, 3);
                swapper.close().expect("its own files");
                std::fs::remove_dir_all(elsewhere.path()).expect("its own files");
            });
            assert!(
                matches!(directory.try_open(&options), Err(Error::Storage { call: "locking", .. })),
                "the parent's"
            );
            drop(opened);
            let (swapper, [write, read]) = (swapper.expect("ours"), tickets.expect("ours"));
            write.wait().expect("the parent's goes on");
            read.wait().expect("the parent's goes on");
            assert!(read.take_block().expect("read").as_slice() == contents(LEN, 1));
            check(&swapper, &pool, "new", LEN, 2);
            drop(source);
            swapper.close().expect("our own files");
            check(&directory.open(&options), &pool, "new", LEN, 2);
        }
    });
}

#[test]
fn the_threads_of_a_child_are_its_own_when_it_drops_its_parents_swapper() {
    alone("the_threads_of_a_child_are_its_own_when_it_drops_its_parents_swapper", || {
        for options in engines() {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let mut swapper = Some(directory.open(&options));
            put(swapper.as_ref().expect("ours"), &pool, "key", LEN, 1).expect("room");
            in_forked_child(|| {
                let (sender, receiver) = mpsc::channel::<()>();
                let receiver = std::sync::Mutex::new(receiver);
                std::thread::scope(|scope| {
                    // Their stacks may be those that the parent's threads had.
                    let waits = || receiver.lock().expect("no panic").recv().is_err();
                    let threads: Vec<_> = (0..20).map(|_| scope.spawn(waits)).collect();
                    drop(swapper.take());
                    drop(sender);
                    for thread in threads {
                        assert!(thread.join().expect("it is the child's to join"));
                    }
                });
            });
            check(swapper.as_ref().expect("ours"), &pool, "key", LEN, 1);
        }
    });
}

#[test]
fn children_that_are_forked_in_the_middle_of_everything_end() {
    alone("children_that_are_forked_in_the_middle_of_everything_end", || {
        for options in engines() {
            let (directory, pool) = (Directory::new(), pool(4 * MIB));
            let mut swapper = Some(directory.open(&options));
            let done = std::sync::atomic::AtomicBool::new(false);
            let busy = || {
                let mine = Directory::new();
                let swapper = mine.open(&options);
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    put(&swapper, &pool, "key", LEN, 1).expect("room");
                    check(&swapper, &pool, "key", LEN, 1);
                    let _ = swapper.trim().expect("the kernel takes it");
                    let _ = pool.trim().expect("the kernel takes it");
                }
            };
            std::thread::scope(|scope| {
                let threads = [scope.spawn(busy), scope.spawn(busy)];
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    for _ in 0..30 {
                        in_forked_child(|| {
                            let own = common::pool(MIB);
                            let mut elsewhere = Some(Directory::new());
                            let store = elsewhere.as_ref().expect("made just now").open(&options);
                            put(&store, &own, "key", LEN, 2).expect("room");
                            assert!(get(&store, &own, "key").expect("stored") == contents(LEN, 2));
                            store.close().expect("its own files");
                            drop(swapper.take());
                            drop((own, elsewhere.take()));
                        });
                    }
                }));
                done.store(true, std::sync::atomic::Ordering::Relaxed);
                for thread in threads {
                    thread.join().expect("nothing fails here");
                }
                result.expect("no child hangs");
            });
            put(swapper.as_ref().expect("ours"), &pool, "key", LEN, 3).expect("room");
        }
    });
}

#[test]
fn parts_of_one_block_are_transferred_side_by_side_and_only_the_same_bytes_are_waited_for() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        put(&directory.open(&options), &pool, "old", UNIT, 1).expect("room");
        let (swapper, opened) = held(&directory, &options);
        let whole = block(&pool, 4 * UNIT, 2);
        let part = |number: usize| address(&whole) + number * UNIT..address(&whole) + (number + 1) * UNIT;
        let stop = &mut |_: usize, _: usize| std::ops::ControlFlow::Break(());
        // SAFETY: nobody looks at the block, or writes to it, before the end.
        let (write, read) = unsafe {
            let write =
                |key: &str, range, stop: &mut pinpool::region::Progress<'_>| swapper.write_from(key, "1", range, stop);
            let read = |range, stop: &mut pinpool::region::Progress<'_>| swapper.read_into("old", None, range, stop);
            (write, read)
        };
        let mut tickets = vec![write("a", part(0), stop).expect("free"), write("b", part(0), stop).expect("only read")];
        tickets.push(read(part(2), stop).expect("free"));
        assert!(matches!(read(part(0), stop), Err(Error::Interrupted)), "it is being written");
        assert!(matches!(write("c", part(2), stop), Err(Error::Interrupted)), "it is being filled");
        drop(opened);
        for ticket in tickets {
            ticket.wait().expect("room");
        }
        write("c", part(2), stop).expect("free now").wait().expect("room");
        check(&swapper, &pool, "c", UNIT, 1);
    }
}
