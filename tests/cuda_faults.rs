//! Every call of the driver fails in turn: the caller is told, and all is as it was; or, where the driver does not take
//! back what it was given, exactly that stays, and is counted.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::books::{Books, adopt_for, block_is_registered, device_options, device_pool, driver_answer, is_registered};
use common::driver::{CALLS, Fake, cuda};
use common::maps::{Memory, is_locked, is_unlocked, is_unmapped, locked_bytes, mapped_bytes};
use common::process::alone;
use common::{MIB, address, go_on, is_pinned, page, pinned_ranges, room};
use pinpool::driver::engine::{Cut, Registrations};
use pinpool::driver::{Device, Request};
use pinpool::pinned::leaked_bytes;
use pinpool::{Error, Pool, PoolOptions, Result};

/// Of each call's answers, these: one that means the argument, one that may mean the size, one that means anything.
const CODES: [u32; 3] = [1, 2, 999];
/// Less than the smallest region, and more than a test's own bookkeeping takes.
const NOISE: usize = MIB;

/// How the scenario opens its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Register {
    Require,
    Try,
}

/// What a program does with devices, from the first call of the driver to the last.
fn scenario(fake: &Fake, devices: u32, register: Register, memory: &Memory) -> Result<()> {
    let found = cuda().find(Some(fake.path()))?;
    assert_eq!(found.len(), devices as usize);
    let open = |ordinal| cuda().open(Some(fake.path()), ordinal);
    let devices: Vec<Arc<dyn Device>> = (0..devices).map(open).collect::<Result<_>>()?;
    let register_if_possible = register == Register::Try;
    let options = PoolOptions { register_if_possible, ..device_options(16 * MIB, &devices) };
    let pool = Pool::new(options)?;
    let blocks = [pool.take(100)?, pool.take(5 * MIB)?];
    for block in &blocks {
        assert!(is_pinned(block) && (register_if_possible || block_is_registered(block, 0)));
    }
    // SAFETY: the memory outlives the scenario, and whoever released it in vain does so again.
    let mut adopted = unsafe { adopt_for(&devices, memory.start(), memory.range().len()) }.map_err(|refusal| {
        assert!(!refusal.stuck);
        refusal.error
    })?;
    assert!(is_registered(memory.start(), memory.range().len(), devices.len() as u32 - 1));
    drop((blocks, devices));
    let released = adopted.release().inspect_err(|_| {
        assert!(!adopted.is_released() && is_locked(&memory.range()), "what was not released stays pinned");
        assert!(is_registered(memory.start(), memory.range().len(), 0));
        adopted.release().expect("the driver refuses once");
    });
    let trimmed = pool.trim().map(drop);
    let stats = pool.stats()?;
    assert_eq!((stats.reserved_bytes, stats.locked_bytes, stats.regions), (stats.leaked_bytes, stats.leaked_bytes, 0));
    assert_eq!(stats.leaked_bytes > 0, trimmed.is_err());
    pool.close().expect("nothing is left to give back");
    released.and(trimmed)
}

/// What a failure of this call must come to. `None`: it goes unnoticed, and rightly.
fn expected(call: &str, code: u32, register: Register, refusal: Option<&Error>) {
    let text = refusal.map(ToString::to_string).unwrap_or_default();
    match (call, refusal) {
        ("cuInit", Some(Error::DriverUnavailable { .. })) => assert!(text.contains(&format!("answered {code}"))),
        // A shared region that is too large for the driver is tried again in the size that is needed.
        ("cuMemHostRegister_v2" | "cuCtxPushCurrent_v2", None) => assert!(register == Register::Try || code == 2),
        ("cuDeviceGetAttribute", Some(Error::Unsupported { .. })) // the attribute counts as 0
        | ("cuDeviceGetAttribute" | "cuCtxPopCurrent_v2" | "cuDevicePrimaryCtxRelease_v2" | "cuGetErrorName", None) => {}
        (_, Some(error)) => {
            let (named, answer) = driver_answer(error);
            assert_eq!((named, answer), (call.trim_end_matches("_v2"), i64::from(code)), "{text}");
        }
        (_, None) => panic!("{call} answered {code}, and nobody was told"),
    }
}

/// Runs the scenario with the nth call failing. False: there are not so many calls of it.
fn inject(fake: &Fake, (call, nth, code): (&str, u32, u32), devices: u32, register: Register) -> bool {
    let memory = Memory::new(16);
    let (live, leaked, locked, mapped) = (fake.live(), leaked_bytes(), locked_bytes(), mapped_bytes());
    let retained: Vec<u64> = (0..4).map(|device| fake.retained(device)).collect();
    let calls = fake.calls(call);
    fake.fail(call, nth, code);
    let refusal = scenario(fake, devices, register, &memory).err();
    fake.fail(call, 1, 0);
    if fake.calls(call) < calls + u64::from(nth) {
        assert!(refusal.is_none(), "{refusal:?}");
        return false;
    }
    let what = format!("{call} number {nth} answered {code} on {devices} devices, {register:?}: {refusal:?}");
    expected(call, code, register, refusal.as_ref());
    if call == "cuCtxPopCurrent_v2" {
        fake.bare().pop(); // what it did not do, nobody can make up for
    }
    let stays: Vec<Range<usize>> = fake.live().into_iter().filter(|range| !live.contains(range)).collect();
    let stay: usize = stays.iter().map(Range::len).sum();
    assert!(stays.is_empty() || call == "cuMemHostUnregister" && stays.len() == 1, "{what}: {stays:?}");
    assert!(stays.iter().all(is_locked), "{what}: {stays:?} must stay mapped and locked");
    assert_eq!((leaked_bytes() - leaked, locked_bytes() - locked), (stay, stay), "{what}");
    assert!(is_unlocked(&memory.range()) && pinned_ranges() == 0, "{what}");
    assert!(mapped_bytes() < mapped + stay + NOISE, "{what}: {} bytes", mapped_bytes() - mapped);
    for device in 0..4 {
        let kept = u64::from(call == "cuDevicePrimaryCtxRelease_v2" || stay > 0);
        let more = fake.retained(device) - retained[device as usize];
        assert!(more <= kept, "{what}: the context of device {device} is retained");
    }
    assert!(fake.wrong().is_empty() && fake.current() == 0 && fake.depth_of_all() == 0, "{what}: {:?}", fake.wrong());
    true
}

/// Lets the first call fail, then the second, and so on. Answers how many there are.
fn inject_until_unused(fake: &Fake, (call, code): (&str, u32), devices: u32, register: Register) -> u32 {
    let mut nth = 1;
    while inject(fake, (call, nth, code), devices, register) {
        nth += 1;
    }
    nth - 1
}

fn inject_everywhere(devices: u32, register: Register) {
    let _turn = room(64 * MIB);
    let fake = Fake::new(devices);
    let memory = Memory::new(16);
    let books = Books::open(&fake);
    for _ in 0..2 {
        scenario(&fake, devices, register, &memory).expect("nothing fails"); // the second has what malloc keeps
        books.close(&fake);
    }
    // Those that leave something behind come last.
    let (quiet, loud): (Vec<&str>, Vec<&str>) =
        CALLS.into_iter().partition(|call| !["cuMemHostUnregister", "cuDevicePrimaryCtxRelease_v2"].contains(call));
    for call in quiet {
        for code in CODES {
            let times = inject_until_unused(&fake, (call, code), devices, register);
            let unused = ["cuCtxGetCurrent", "cuCtxGetDevice", "cuGetErrorName"].contains(&call);
            assert_eq!(times == 0, unused, "{call}: {times} calls");
        }
    }
    books.close(&fake);
    for call in loud {
        for code in CODES {
            assert!(inject_until_unused(&fake, (call, code), devices, register) > 0);
        }
    }
}

#[test]
fn every_failure_on_one_device() {
    alone("every_failure_on_one_device", || inject_everywhere(1, Register::Require));
}

#[test]
fn every_failure_on_two_devices() {
    alone("every_failure_on_two_devices", || inject_everywhere(2, Register::Require));
}

#[test]
fn every_failure_on_four_devices() {
    alone("every_failure_on_four_devices", || inject_everywhere(4, Register::Require));
}

#[test]
fn every_failure_where_registering_is_tried_only() {
    alone("every_failure_where_registering_is_tried_only", || inject_everywhere(1, Register::Try));
}

#[test]
fn a_failure_whose_name_cannot_be_had_is_told_by_its_number() {
    alone("a_failure_whose_name_cannot_be_had_is_told_by_its_number", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(8 * MIB, &fake.devices(1));
        for (code, hidden) in [(12_345, false), (999, true)] {
            if hidden {
                fake.fail("cuGetErrorName", 1, 3);
            }
            fake.fail("cuMemHostRegister_v2", 1, code);
            let text = pool.take(MIB).expect_err("refused").to_string();
            assert!(text.contains(&format!("answered {code} (an unknown code)")), "{text}");
        }
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn a_region_that_the_driver_keeps_stays_and_is_counted_and_the_others_go() {
    alone("a_region_that_the_driver_keeps_stays_and_is_counted_and_the_others_go", || {
        let fake = Fake::new(2);
        let pool = device_pool(32 * MIB, &fake.devices(2));
        let blocks = [3, 4, 5].map(|len| pool.take(len * MIB).expect("room"));
        let ranges = blocks.each_ref().map(|block| address(block)..address(block) + block.capacity());
        drop(blocks);
        fake.fail("cuMemHostUnregister", 2, 700);
        let refusal = pool.close().expect_err("the driver keeps one");
        assert_eq!(driver_answer(&refusal), ("cuMemHostUnregister", 700));
        let kept = fake.live();
        assert!(kept.len() == 1 && ranges.contains(&kept[0]) && is_locked(&kept[0]), "{kept:?} of {ranges:?}");
        assert!(ranges.iter().all(|range| *range == kept[0] || is_unmapped(range)));
        let (stats, bytes) = (pool.stats().expect("ours"), kept[0].len());
        assert_eq!((stats.leaked_bytes, stats.reserved_bytes, stats.locked_bytes), (bytes, bytes, bytes));
        assert_eq!((leaked_bytes(), locked_bytes(), stats.cached_bytes, stats.allocated_bytes), (bytes, bytes, 0, 0));
        pool.close().expect("it was told");
        drop(pool);
        assert_eq!((fake.live(), fake.retained(0), fake.wrong()), (kept, 1, vec![]), "its context stays with it");
    });
}

#[test]
fn a_block_that_outlives_its_pool_and_is_kept_by_the_driver_is_counted() {
    alone("a_block_that_outlives_its_pool_and_is_kept_by_the_driver_is_counted", || {
        let fake = Fake::new(1);
        let pool = device_pool(32 * MIB, &fake.devices(1));
        let block = pool.take(3 * MIB).expect("room");
        drop(pool);
        fake.fail("cuMemHostUnregister", 0, 1);
        let range = address(&block)..address(&block) + 3 * MIB;
        drop(block);
        assert!(is_locked(&range) && leaked_bytes() == 3 * MIB && pinned_ranges() == 0);
        assert_eq!(fake.live(), [range]);
    });
}

#[test]
fn borrowed_memory_that_the_driver_keeps_stays_pinned_and_can_be_released_later() {
    alone("borrowed_memory_that_the_driver_keeps_stays_pinned_and_can_be_released_later", || {
        let fake = Fake::new(1);
        let (books, devices, memory) = (Books::open(&fake), fake.devices(1), Memory::new(4));
        // SAFETY: the memory outlives the adoption.
        let mut adopted = unsafe { adopt_for(&devices, memory.start(), 4 * page()) }.expect("it is there");
        fake.fail("cuMemHostUnregister", 0, 700);
        for _ in 0..3 {
            assert_eq!(driver_answer(&adopted.release().expect_err("kept")), ("cuMemHostUnregister", 700));
            assert!(!adopted.is_released() && !adopted.registrations().are_forgotten() && is_locked(&memory.range()));
            assert!(is_registered(memory.start(), 4 * page(), 0) && leaked_bytes() == 0);
        }
        fake.fail("cuMemHostUnregister", 0, 0);
        adopted.release().expect("the driver has come to its senses");
        assert!(adopted.is_released() && adopted.registrations().are_forgotten() && is_unlocked(&memory.range()));
        drop((adopted, devices));
        books.close(&fake);
    });
}

#[test]
fn borrowed_memory_that_is_dropped_and_kept_by_the_driver_is_counted() {
    alone("borrowed_memory_that_is_dropped_and_kept_by_the_driver_is_counted", || {
        let fake = Fake::new(1);
        let (devices, memory) = (fake.devices(1), Memory::new(4));
        // SAFETY: the memory outlives the process.
        let adopted = unsafe { adopt_for(&devices, memory.start(), 4 * page()) }.expect("it is there");
        fake.fail("cuMemHostUnregister", 1, 700);
        drop((adopted, devices));
        assert_eq!((leaked_bytes(), fake.live(), fake.retained(0)), (4 * page(), vec![memory.range()], 1));
        assert!(is_locked(&memory.range()) && is_registered(memory.start(), 4 * page(), 0));
        std::mem::forget(memory);
    });
}

/// A piece is not registered any more, and the one before it is: no copy may count on the whole.
#[test]
fn a_range_that_is_registered_in_part_does_not_count_as_registered() {
    alone("a_range_that_is_registered_in_part_does_not_count_as_registered", || {
        let _turn = room(40 * MIB);
        let fake = Fake::new(1);
        fake.set("max_bytes", 16 * MIB as u64);
        let (books, devices, memory) = (Books::open(&fake), fake.devices(1), Memory::new(32 * MIB / page()));
        let (start, len) = (memory.start(), memory.range().len());
        // SAFETY: the memory outlives the adoption.
        let mut adopted = unsafe { adopt_for(&devices, start, len) }.expect("in two pieces");
        assert!(is_registered(start, len, 0) && fake.live().len() == 2);
        fake.fail("cuMemHostUnregister", 2, 700);
        assert_eq!(driver_answer(&adopted.release().expect_err("the first piece is kept")).1, 700);
        let kept = start..start + len / 2;
        assert_eq!(fake.live(), std::slice::from_ref(&kept));
        assert!(!is_registered(start + len / 2, len / 2, 0), "the driver does not know the second half");
        assert!(!is_registered(start, len, 0));
        adopted.release().expect("it refused once");
        drop((adopted, devices));
        books.close(&fake);
    });
}

#[test]
fn what_a_rollback_cannot_undo_stays_and_is_counted() {
    alone("what_a_rollback_cannot_undo_stays_and_is_counted", || {
        let _turn = room(40 * MIB);
        let fake = Fake::new(1);
        fake.set("max_bytes", 16 * MIB as u64);
        let (devices, memory) = (fake.devices(1), Memory::new(32 * MIB / page()));
        let (start, len) = (memory.start(), memory.range().len());
        fake.fail("cuMemHostRegister_v2", 3, 700); // 32 MiB is too large, the first half is fine
        fake.fail("cuMemHostUnregister", 0, 999);
        // SAFETY: the memory outlives the process.
        let refused = unsafe { adopt_for(&devices, start, len) }.expect_err("the second half is refused");
        assert!(refused.stuck, "the caller must know that the memory has to stay");
        assert_eq!(driver_answer(&refused.error), ("cuMemHostRegister", 700), "the first refusal is told");
        let kept = start..start + len / 2;
        assert_eq!((fake.live().as_slice(), leaked_bytes()), (std::slice::from_ref(&kept), len));
        assert!(is_locked(&memory.range()), "what a device may still write to must not move");
        assert!(!is_registered(start, len, 0) && !is_registered(start + len / 2, len / 2, 0));
        drop(devices);
        assert_eq!((fake.retained(0), fake.wrong()), (1, vec![]));
        std::mem::forget(memory);
    });
}

#[test]
fn a_rollback_is_undone_piece_by_piece_until_one_is_refused() {
    alone("a_rollback_is_undone_piece_by_piece_until_one_is_refused", || {
        let fake = Fake::new(1);
        fake.set("max_bytes", 16 * MIB as u64);
        fake.set("check_maps", 0);
        let devices = fake.devices(1);
        let request = Request { address: 1 << 46, len: 64 * MIB, read_only: false };
        fake.fail("cuMemHostRegister_v2", 6, 700); // 64 and 32 MiB, three pieces, and the fourth
        fake.fail("cuMemHostUnregister", 2, 1);
        let refused = Registrations::make(&devices, &request, Cut::Pieces, &mut go_on).expect_err("refused");
        let stuck = refused.stuck.expect("the second piece is kept, and so is the first, which was not asked for");
        let pieces = [0, 16].map(|at| request.address + at * MIB..request.address + (at + 16) * MIB);
        assert_eq!((driver_answer(&refused.error).1, fake.live()), (700, pieces.to_vec()));
        assert!(!stuck.are_forgotten() && stuck.bytes().len() == 2);
        stuck.end().expect("it refused once");
        assert!(stuck.are_forgotten() && fake.live().is_empty());
        drop((stuck, devices));
        assert_eq!((fake.retained(0), fake.wrong()), (0, vec![]));
    });
}

#[test]
fn registrations_that_went_with_their_context_are_no_longer_mapped_and_do_no_harm() {
    alone("registrations_that_went_with_their_context_are_no_longer_mapped_and_do_no_harm", || {
        let fake = Fake::new(1);
        let (devices, memory) = (fake.devices(1), Memory::new(4));
        // SAFETY: the memory outlives the process.
        let mut adopted = unsafe { adopt_for(&devices, memory.start(), 4 * page()) }.expect("it is there");
        fake.reset_context(0);
        assert_eq!(driver_answer(&adopted.release().expect_err("nobody can prove that it is gone")).1, 709);
        assert!(is_locked(&memory.range()) && !adopted.is_released());
        drop((adopted, devices));
        assert_eq!((leaked_bytes(), fake.live()), (4 * page(), vec![]));
        std::mem::forget(memory);
    });
}
