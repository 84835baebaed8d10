//! Swap: what is written comes back, whole, under its key, in the order of the calls, and nothing else is touched.
#![allow(unsafe_code)] // names memory by its address

mod common;

use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::sync::mpsc;

use common::maps::Memory;
use common::swap::{
    Directory, Gate, Opened, UNIT, asks, block, check, contents, engines, engines_and_ways, get, keys, put,
};
use common::{MIB, Random, address, go_on, page, pool, try_adopt, unlocked_pool};
use pinpool::swap::{Engine, Fault, SwapOptions, Swapper};
use pinpool::{Error, Pool};

/// In the middle of a unit, of a piece, on their edges, and nothing at all. A piece is four units in these tests.
const LENGTHS: [usize; 12] = [
    0,
    1,
    511,
    UNIT - 1,
    UNIT,
    UNIT + 1,
    4 * UNIT - 1,
    4 * UNIT,
    4 * UNIT + 1,
    9 * UNIT,
    12 * UNIT - 1,
    50 * UNIT + 17,
];

fn invalid(error: &Error, words: &[&str]) {
    assert!(matches!(error, Error::Invalid { parameter: "memory", .. }), "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word:?} is missing in: {error}");
    }
}

#[test]
fn entries_of_any_size_come_back_now_and_after_reopening() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(4 * MIB));
        let check_all = |swapper: &Swapper| {
            for (seed, len) in (0..).zip(LENGTHS) {
                check(swapper, &pool, &format!("key {len}"), len, seed);
            }
        };
        let swapper = directory.open(&options);
        for (seed, len) in (0..).zip(LENGTHS) {
            put(&swapper, &pool, &format!("key {len}"), len, seed).expect("room");
        }
        check_all(&swapper);
        let stats = swapper.stats().expect("ours");
        let (bytes, units) = (LENGTHS.iter().sum(), LENGTHS.iter().map(|len| len.next_multiple_of(UNIT)).sum());
        assert_eq!(
            (stats.entries, stats.stored_bytes, stats.bytes_written, stats.bytes_read),
            (12, units, bytes, bytes)
        );
        assert_eq!(stats.direct, options.direct == Some(true));
        swapper.flush().expect("our own files");
        swapper.close().expect("our own files");
        // With pieces of another size, by the other engine, the other way.
        let others =
            engines().into_iter().map(|other| SwapOptions { block_bytes: Some(UNIT), direct: Some(false), ..other });
        for other in others.chain([options]) {
            let swapper = directory.reopen(&other);
            check_all(&swapper);
            assert_eq!(swapper.stats().expect("ours").stored_bytes, units);
        }
    }
}

#[test]
fn keys_and_labels_are_any_text() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        let long = "x".repeat(1 << 16);
        let texts = ["", "\0", "../data", "key\nkey", "ключ 🔑", &long];
        for (seed, text) in texts.iter().enumerate() {
            swapper.write(text, text, Arc::new(block(&pool, 100, seed as u64))).expect("any").wait().expect("room");
        }
        let too_long = "x".repeat((1 << 16) + 1);
        for (key, label, parameter) in [(&*too_long, "", "key"), ("", &*too_long, "label")] {
            let error = swapper.write(key, label, Arc::new(block(&pool, 1, 0))).expect_err("too long");
            assert!(matches!(error, Error::Invalid { parameter: p, .. } if p == parameter), "{error}");
        }
        swapper.close().expect("our own files");
        let swapper = directory.open(&options);
        for (seed, text) in texts.iter().enumerate() {
            assert_eq!(swapper.describe(text).expect("stored"), ((*text).into(), 100));
            assert_eq!(get(&swapper, &pool, text).expect("stored"), contents(100, seed as u64));
        }
    }
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let options = SwapOptions::default();
    let wrong = [
        ("block_bytes", SwapOptions { block_bytes: Some(0), ..options.clone() }),
        ("block_bytes", SwapOptions { block_bytes: Some(UNIT + 1), ..options.clone() }),
        ("block_bytes", SwapOptions { block_bytes: Some((1 << 30) + UNIT), ..options.clone() }),
        ("queue_depth", SwapOptions { queue_depth: Some(0), ..options.clone() }),
        ("queue_depth", SwapOptions { queue_depth: Some(4097), ..options.clone() }),
        ("max_bytes", SwapOptions { max_bytes: Some(UNIT - 1), ..options }),
    ];
    let directory = Directory::new();
    for (name, options) in wrong {
        let error = directory.try_open(&options).expect_err("no sense");
        assert!(matches!(error, Error::Invalid { parameter, .. } if parameter == name), "{error}");
    }
    assert!(!directory.path().exists(), "nothing was made");
    for engine in [Engine::Auto, Engine::IoUring, Engine::Threads] {
        assert_eq!(Engine::from_name(engine.name()).expect("its name"), engine);
    }
    assert!(matches!(Engine::from_name("aio"), Err(Error::Invalid { parameter: "engine", .. })));
    let deep = SwapOptions { queue_depth: Some(4096), ..SwapOptions::default() };
    let (pool, swapper) = (pool(MIB), directory.open(&deep));
    put(&swapper, &pool, "key", 100, 1).expect("room");
    check(&swapper, &pool, "key", 100, 1);
}

#[test]
fn what_is_not_there_is_unknown_and_another_size_is_refused() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        let unknown = |error: Error| {
            assert!(
                matches!(&error, Error::UnknownKey { key, store } if &**key == "key" && *store == directory.path())
            );
            assert!(error.to_string().contains("\"key\""), "{error}");
        };
        let all_unknown = || {
            unknown(swapper.read("key", pool.take(10).expect("room")).expect_err("nothing"));
            unknown(swapper.delete("key").expect_err("nothing"));
            unknown(swapper.describe("key").expect_err("nothing"));
        };
        all_unknown();
        put(&swapper, &pool, "key", 5000, 1).expect("room");
        for len in [0, 4999, 5001, 8192] {
            let error = swapper.read("key", pool.take(len).expect("room")).expect_err("another size");
            invalid(&error, &["\"key\"", "5000", &len.to_string()]);
        }
        swapper.delete("key").expect("stored").wait().expect("deleted");
        all_unknown();
        assert!(keys(&swapper).is_empty());
        swapper.close().expect("our own files");
        let swapper = directory.open(&options);
        assert!(keys(&swapper).is_empty() && swapper.stats().expect("ours").stored_bytes == 0);
    }
}

#[test]
fn operations_on_one_key_take_effect_in_the_order_of_their_calls() {
    for options in engines_and_ways() {
        let (directory, pool, gate) = (Directory::new(), pool(MIB), Gate::closed(|_| true));
        let swapper = directory.open(&SwapOptions { inject: Some(gate.clone()), ..options.clone() });
        let opened = Opened(gate);
        let write =
            |seed, len| swapper.write("key", &format!("{seed}"), Arc::new(block(&pool, len, seed))).expect("room");
        let read = |len| swapper.read("key", pool.take(len).expect("room"));
        // Nothing is moved before the gate opens; all of it is accepted, or not, in the light of what is to come.
        let first = [write(1, 9000), write(2, 5000)];
        let read_2 = [read(5000).expect("it is on its way"), read(5000).expect("twice")];
        assert_eq!(swapper.describe("key").expect("on its way"), ("2".into(), 5000));
        assert!(matches!(read(9000), Err(Error::Invalid { .. })), "the size of what was there before");
        let delete = swapper.delete("key").expect("on its way");
        assert!(matches!(read(5000), Err(Error::UnknownKey { .. })), "the deletion is on its way");
        assert!(matches!(swapper.delete("key"), Err(Error::UnknownKey { .. })), "the deletion is on its way");
        assert!(matches!(swapper.describe("key"), Err(Error::UnknownKey { .. })));
        let third = write(3, 7000);
        let read_3 = read(7000).expect("on its way");
        let fourth = write(4, 100);
        assert_eq!(keys(&swapper), ["key"], "a read would find it");
        assert!(!first[0].is_done() && !read_2[0].is_done() && !delete.is_done() && !fourth.is_done());
        drop(opened);
        for ticket in first.iter().chain(&read_2).chain([&delete, &third, &read_3, &fourth]) {
            ticket.wait().expect("in order");
        }
        for (ticket, len, seed) in [(&read_2[0], 5000, 2), (&read_2[1], 5000, 2), (&read_3, 7000, 3)] {
            assert!(ticket.take_block().expect("read").as_slice() == contents(len, seed), "the value of {seed}");
            assert!(ticket.take_block().is_none(), "the first to ask gets it");
        }
        check(&swapper, &pool, "key", 100, 4);
        assert_eq!(swapper.stats().expect("ours").stored_bytes, UNIT);
        swapper.close().expect("our own files");
        check(&directory.open(&options), &pool, "key", 100, 4);
    }
}

#[test]
fn a_read_that_is_under_way_gets_the_old_value_whole() {
    const LEN: usize = 20 * UNIT;
    for options in engines_and_ways() {
        // Depth 1: the read's first piece is at the gate, the others are not begun, when the value is replaced. With
        // one engine's thread that is held at the gate, the replacement has to wait, too: it is then done in between.
        let (directory, pool, gate) = (Directory::new(), pool(4 * MIB), Gate::closed(|is_write| !is_write));
        let swapper = directory.open(&SwapOptions { inject: Some(gate.clone()), ..options });
        let opened = Opened(gate.clone());
        put(&swapper, &pool, "key", LEN, 1).expect("writes pass");
        let reading = swapper.read("key", pool.take(LEN).expect("room")).expect("stored");
        gate.wait_for(1);
        let mut tickets: Vec<_> = (2..6)
            .map(|seed| swapper.write("key", &seed.to_string(), Arc::new(block(&pool, LEN, seed))).expect("room"))
            .collect();
        // The old value's room is not used by anybody else while it is read.
        tickets.push(swapper.write("other", "9", Arc::new(block(&pool, LEN, 9))).expect("room"));
        drop(opened);
        for ticket in &tickets {
            ticket.wait().expect("written");
        }
        reading.wait().expect("read");
        assert!(reading.take_block().expect("read").as_slice() == contents(LEN, 1));
        check(&swapper, &pool, "key", LEN, 5);
        check(&swapper, &pool, "other", LEN, 9);
        assert_eq!(swapper.stats().expect("ours").stored_bytes, 2 * LEN, "the old values' room is free");
    }
}

#[test]
fn what_waits_behind_a_write_that_fails_finds_what_was_there() {
    for options in engines_and_ways() {
        for first in [true, false] {
            let (directory, pool, gate) = (Directory::new(), pool(MIB), Gate::closed(|_| true));
            let held = gate.clone();
            let inject = asks(move |is_write, offset, len| {
                pinpool::swap::Inject::fault(&*held, is_write, offset, len);
                (is_write && len == 3 * UNIT).then_some(Fault::Refusal(libc::EIO)) // those of 11 units, in their last
            });
            if first {
                put(&directory.open(&options), &pool, "key", 11 * UNIT, 1).expect("no faults here");
            }
            let swapper = directory.reopen(&SwapOptions { inject: Some(inject), ..options.clone() });
            let opened = Opened(gate);
            let write = |seed, len| swapper.write("key", "", Arc::new(block(&pool, len, seed))).expect("room");
            let read = |len| swapper.read("key", pool.take(len).expect("room")).expect("on its way");
            let failing = write(2, 11 * UNIT);
            let reading = read(11 * UNIT);
            let deleting = swapper.delete("key").expect("on its way");
            let failing_again = write(3, 11 * UNIT);
            let reading_again = read(11 * UNIT);
            let last = write(4, 100);
            drop(opened);
            for ticket in [&failing, &failing_again] {
                assert!(matches!(&*ticket.wait().expect_err("the fault"), Error::Storage { code: libc::EIO, .. }));
            }
            if first {
                reading.wait().expect("the old value");
                assert!(reading.take_block().expect("read").as_slice() == contents(11 * UNIT, 1));
                deleting.wait().expect("the old value is gone");
            } else {
                for ticket in [&reading, &deleting] {
                    assert!(matches!(&*ticket.wait().expect_err("nothing"), Error::UnknownKey { .. }));
                }
            }
            assert!(matches!(&*reading_again.wait().expect_err("deleted"), Error::UnknownKey { .. }));
            last.wait().expect("no fault");
            assert_eq!(get(&swapper, &pool, "key").expect("stored"), contents(100, 4));
            swapper.close().expect("our own files");
        }
    }
}

#[test]
fn a_value_of_another_label_is_not_read_for_the_one_that_was_to_be_there() {
    const LEN: usize = 3 * UNIT - 100;
    for options in engines() {
        let (directory, pool, gate) = (Directory::new(), pool(MIB), Gate::closed(|_| true));
        directory
            .open(&options)
            .write("key", "old", Arc::new(block(&pool, LEN, 1)))
            .expect("room")
            .wait()
            .expect("room");
        let held = gate.clone();
        let inject = asks(move |is_write, offset, len| {
            pinpool::swap::Inject::fault(&*held, is_write, offset, len);
            is_write.then_some(Fault::Refusal(libc::EIO))
        });
        let swapper = directory.reopen(&SwapOptions { inject: Some(inject), ..options });
        let opened = Opened(gate);
        let target = block(&pool, LEN, 9);
        let range = address(&target)..address(&target) + LEN;
        // SAFETY: nobody looks at the block before the end.
        let read = |label| unsafe { swapper.read_into("key", Some(label), range.clone(), &mut go_on) };
        assert!(matches!(read("new"), Err(Error::Invalid { parameter: "key", .. })), "it is not there yet");
        let failing = swapper.write("key", "new", Arc::new(block(&pool, LEN, 2))).expect("room");
        let reading = read("new").expect("it is on its way");
        drop(opened);
        failing.wait().expect_err("a fault");
        assert!(matches!(&*reading.wait().expect_err("the old one"), Error::Invalid { parameter: "key", .. }));
        assert!(target.as_slice() == contents(LEN, 9), "nothing was read");
        read("old").expect("it is there").wait().expect("read");
        assert!(target.as_slice() == contents(LEN, 1));
    }
}

#[test]
fn an_entry_lies_in_the_holes_of_others_and_all_room_can_be_used() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let options = SwapOptions { block_bytes: Some(UNIT), max_bytes: Some(16 * UNIT), ..options };
        let swapper = directory.open(&options);
        for number in 0..8 {
            put(&swapper, &pool, &number.to_string(), 2 * UNIT, number).expect("room");
        }
        for number in [1, 3, 4, 6] {
            swapper.delete(&number.to_string()).expect("stored").wait().expect("deleted");
        }
        put(&swapper, &pool, "pieces", 8 * UNIT - 3, 9).expect("room in three holes");
        let check_all = |swapper: &Swapper| {
            check(swapper, &pool, "pieces", 8 * UNIT - 3, 9);
            for number in [0, 2, 5, 7] {
                check(swapper, &pool, &number.to_string(), 2 * UNIT, number);
            }
            assert_eq!(keys(swapper).len(), 5);
        };
        check_all(&swapper);
        assert_eq!(swapper.stats().expect("ours").file_bytes, 16 * UNIT);
        swapper.close().expect("our own files");
        let swapper = directory.open(&options);
        check_all(&swapper);
        assert!(put(&swapper, &pool, "more", 1, 1).is_err(), "all of it is used");
    }
}

#[test]
fn any_views_of_a_block_are_written_and_read_and_their_neighbours_are_not_changed() {
    const LEN: usize = 6 * UNIT + 100;
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        let source = block(&pool, LEN, 1);
        let mut target = block(&pool, LEN, 2);
        let (from, to) = (address(&source), address(&target));
        let views =
            [0..LEN, 0..UNIT, UNIT..3 * UNIT, UNIT..3 * UNIT - 7, 6 * UNIT..LEN, 5 * UNIT..LEN, 2 * UNIT..2 * UNIT];
        for view in views {
            let key = format!("{view:?}");
            // SAFETY: nobody writes to it meanwhile.
            let ticket = unsafe { swapper.write_from(&key, "", from + view.start..from + view.end, &mut go_on) };
            ticket.expect("aligned").wait().expect("room");
            target.as_mut_slice().copy_from_slice(&contents(LEN, 2));
            // SAFETY: nobody looks at it meanwhile.
            let ticket = unsafe { swapper.read_into(&key, None, to + view.start..to + view.end, &mut go_on) };
            let mut expected = contents(LEN, 2);
            if view.end.is_multiple_of(UNIT) || view.end == LEN {
                let ticket = ticket.expect("its end is one of a unit's, or the block's");
                ticket.wait().expect("stored");
                assert!(ticket.take_block().is_none(), "the memory is the caller's");
                expected[view.clone()].copy_from_slice(&contents(LEN, 1)[view.clone()]);
            } else {
                let error = ticket.expect_err("it would overwrite what lies behind");
                invalid(&error, &["overwrite", "copy=True"]);
            }
            assert!(target.as_slice() == expected, "{view:?}");
        }
        assert!(source.as_slice() == contents(LEN, 1), "only read");
    }
}

#[test]
fn memory_that_is_no_pools_or_not_aligned_is_refused_by_name() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        put(&swapper, &pool, "key", UNIT, 1).expect("room");
        let of_pool = pool.take(3 * UNIT).expect("room");
        let idle = address(&pool.take(2 * UNIT).expect("room"));
        let heap = vec![0_u8; 3 * UNIT];
        let on_heap = (heap.as_ptr() as usize).next_multiple_of(UNIT);
        let memory = Memory::new(2);
        // SAFETY: the memory outlives the adoption.
        let adopted = unsafe { try_adopt(memory.start(), 2 * page()) }.expect("memory of our own");
        let start = address(&of_pool);
        for (range, words) in [
            (on_heap..on_heap + UNIT, &["is in no pool"][..]),
            (memory.start()..memory.start() + UNIT, &["Registration"]),
            (start + 1..start + 1 + UNIT, &["multiple of 4096"]),
            (start + 2048..start + 2048 + UNIT, &["multiple of 4096"]),
            (idle..idle + UNIT, &["block"]),
            (start..start + 3 * UNIT + 1, &[]),
            (usize::MAX - UNIT + 1..usize::MAX, &[]),
        ] {
            // SAFETY: nobody uses the memory.
            let refused = [unsafe { swapper.write_from("new", "", range.clone(), &mut go_on) }, unsafe {
                swapper.read_into("key", None, range.clone(), &mut go_on)
            }];
            for refused in refused {
                invalid(&refused.expect_err("not ours"), words);
            }
        }
        assert_eq!(keys(&swapper), ["key"]);
        drop(adopted);
    }
}

#[test]
fn blocks_of_any_pool_are_written_and_read_by_their_address() {
    let make: [fn() -> Pool; 2] = [|| pool(MIB), || unlocked_pool(MIB)];
    for options in engines_and_ways() {
        for (make, is_unpinned) in [(make[0], false), (make[1], false), (make[0], true)] {
            let (directory, pool) = (Directory::new(), make());
            let swapper = directory.open(&options);
            let (source, target) = (block(&pool, 5000, 1), pool.take(5000).expect("room"));
            if is_unpinned {
                assert!(pinpool::pool::unpin(address(&source)).expect("the kernel takes it"));
            }
            let range = |block: &pinpool::Block| address(block)..address(block) + block.len();
            // SAFETY: nobody writes to it meanwhile.
            let ticket = unsafe { swapper.write_from("key", "", range(&source), &mut go_on) };
            ticket.expect("a pool's memory").wait().expect("room");
            // SAFETY: nobody looks at it meanwhile.
            let ticket = unsafe { swapper.read_into("key", None, range(&target), &mut go_on) };
            ticket.expect("a pool's memory").wait().expect("stored");
            assert!(target.as_slice() == contents(5000, 1));
        }
    }
}

#[test]
fn trimming_gives_the_disk_its_blocks_back() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(8 * MIB));
        let swapper = directory.open(&options);
        for key in ["a", "b", "c", "d"] {
            put(&swapper, &pool, key, MIB, 1).expect("room");
        }
        let on_disk = || std::fs::metadata(directory.data()).expect("ours").blocks() as usize * 512;
        let before = on_disk();
        assert!(before >= 4 * MIB, "the room was reserved");
        swapper.delete("b").expect("stored").wait().expect("deleted"); // a hole
        swapper.delete("d").expect("stored").wait().expect("deleted"); // the end
        let freed = swapper.trim().expect("the kernel takes it");
        assert_eq!(on_disk(), before - freed, "what was answered");
        assert!((2 * MIB..3 * MIB).contains(&freed), "{freed}");
        assert_eq!(swapper.stats().expect("ours").file_bytes, 3 * MIB);
        assert_eq!(swapper.trim().expect("the kernel takes it"), 0, "nothing is left to give back");
        for (key, seed) in [("b", 2), ("d", 3), ("e", 4)] {
            put(&swapper, &pool, key, MIB, seed).expect("room is made again");
        }
        for (key, seed) in [("a", 1), ("b", 2), ("c", 1), ("d", 3), ("e", 4)] {
            check(&swapper, &pool, key, MIB, seed);
        }
        swapper.flush().expect("our own files");
    }
}

#[test]
fn a_closed_swapper_refuses_everything_and_has_let_go_of_its_store() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        put(&swapper, &pool, "key", 100, 1).expect("room");
        assert!(!swapper.is_closed());
        swapper.close().expect("our own files");
        swapper.close().expect("nothing is left to do");
        assert!(swapper.is_closed());
        let source = Arc::new(block(&pool, 100, 2));
        assert!(matches!(swapper.write("key", "", source), Err(Error::SwapperClosed)));
        assert!(matches!(swapper.read("key", pool.take(100).expect("room")), Err(Error::SwapperClosed)));
        assert!(matches!(swapper.delete("key"), Err(Error::SwapperClosed)));
        assert!(matches!(swapper.trim(), Err(Error::SwapperClosed)));
        assert!(matches!(swapper.flush(), Err(Error::SwapperClosed)));
        check(&directory.open(&options), &pool, "key", 100, 1);
    }
}

#[test]
fn a_watch_is_readable_when_the_operation_is_done_and_not_before() {
    let is_readable = |watch: &pinpool::swap::Watch| {
        let mut poll = libc::pollfd { fd: watch.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which the kernel fills.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    };
    for options in engines() {
        let (directory, pool, gate) = (Directory::new(), pool(MIB), Gate::closed(|_| true));
        let swapper = directory.open(&SwapOptions { inject: Some(gate.clone()), ..options });
        let opened = Opened(gate);
        let ticket = swapper.write("key", "", Arc::new(block(&pool, 100, 1))).expect("room");
        let watches = [ticket.watch().expect("a descriptor"), ticket.watch().expect("another")];
        assert!(!watches.iter().any(is_readable) && !ticket.is_done());
        let soon = std::time::Duration::from_millis(1);
        assert!(ticket.wait_within(Some(soon), &mut common::go_on).expect("nobody stops it").is_none());
        let stopped = ticket.wait_within(None, &mut |_, _| std::ops::ControlFlow::Break(()));
        assert!(matches!(stopped, Err(Error::Interrupted)));
        let stopped = swapper.close_within(&mut |_, _| std::ops::ControlFlow::Break(()));
        assert!(matches!(stopped, Err(Error::Interrupted)));
        drop(opened);
        let mut poll = libc::pollfd { fd: watches[0].fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which the kernel fills.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, -1) }, 1);
        ticket.wait().expect("room");
        assert!(is_readable(&ticket.watch().expect("it is done already")));
        swapper.close().expect("our own files");
    }
}

#[test]
fn many_threads_use_one_swapper_and_each_finds_its_own() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(8 * MIB));
        let swapper = directory.open(&options);
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (swapper, pool, sender) = (&swapper, &pool, sender.clone());
                scope.spawn(move || {
                    let (mut random, mut stored) = (Random::new(thread + 1), [None; 8]);
                    for step in 0..100 {
                        let number = random.below(stored.len());
                        let key = format!("{thread} {number}");
                        match (random.below(4), stored[number]) {
                            (0, Some(_)) => {
                                swapper.delete(&key).expect("stored").wait().expect("deleted");
                                stored[number] = None;
                            }
                            (1, Some((len, seed))) => check(swapper, pool, &key, len, seed),
                            (2, _) => drop(swapper.trim().expect("the kernel takes it")),
                            _ => {
                                let (len, seed) = (random.below(20 * UNIT), thread << 32 | step);
                                put(swapper, pool, &key, len, seed).expect("room");
                                stored[number] = Some((len, seed));
                            }
                        }
                    }
                    sender.send((thread, stored)).expect("the test listens");
                });
            }
        });
        drop(sender);
        let all: Vec<_> = receiver.into_iter().collect();
        swapper.close().expect("our own files");
        let swapper = directory.open(&options);
        let mut entries = 0;
        for (thread, stored) in all {
            for (number, stored) in stored.iter().enumerate() {
                let Some((len, seed)) = *stored else { continue };
                check(&swapper, &pool, &format!("{thread} {number}"), len, seed);
                entries += 1;
            }
        }
        assert_eq!(keys(&swapper).len(), entries);
    }
}
