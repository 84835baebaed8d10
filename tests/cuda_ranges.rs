//! What a CUDA driver is asked to register, and what it refuses: borrowed ranges, chunks, budgets.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::books::{
    Books, adopt_for, block_is_registered, device_options, device_pool, driver_answer, is_registered, says,
};
use common::driver::Fake;
use common::maps::{Memory, is_locked, is_unlocked};
use common::process::alone;
use common::{GIB, MIB, address, go_on, is_pinned, page, pool_of, room};
use pinpool::driver::engine::{Cut, Refused, Registrations};
use pinpool::driver::{Device, Registering, Request};
use pinpool::pinned::{Adopted, leaked_bytes};
use pinpool::{Error, Pool, PoolOptions, RegionOptions};

/// The driver allows this, and pinpool does it where the caller's memory begins or ends within a page.
const PARTS_OF_PAGES: &str = "not whole pages, which the driver allows";

/// Where ranges lie that nobody maps, for a driver that does not look.
const NOWHERE: usize = 1 << 46;

fn adopt(devices: &[Arc<dyn Device>], range: &Range<usize>) -> Result<Adopted, Error> {
    // SAFETY: the tests keep what they lend for longer than the adoption.
    unsafe { adopt_for(devices, range.start, range.len()) }.map_err(|refusal| {
        assert!(!refusal.stuck);
        refusal.error
    })
}

/// Registers memory that is not there, without locking it.
fn register(devices: &[Arc<dyn Device>], range: &Range<usize>, cut: Cut) -> Result<Registrations, Refused> {
    let request = Request { address: range.start, len: range.len(), read_only: false };
    Registrations::make(devices, &request, cut, &mut go_on)
}

fn only_mapped(devices: &[Arc<dyn Device>]) -> Pool {
    let region = RegionOptions { lock: false, ..RegionOptions::default() };
    Pool::new(PoolOptions { region, max_bytes: Some(1 << 44), ..device_options(1, devices) }).expect("nothing yet")
}

/// The pieces lie side by side and are all of the range; each begins on a page, but for the first.
fn check_pieces(pieces: &[Range<usize>], range: &Range<usize>) {
    assert_eq!((pieces[0].start, pieces[pieces.len() - 1].end), (range.start, range.end));
    assert!(pieces.windows(2).all(|pair| pair[0].end == pair[1].start && pair[1].start.is_multiple_of(page())));
}

#[test]
fn borrowed_memory_is_registered_to_the_byte() {
    alone("borrowed_memory_is_registered_to_the_byte", || {
        let fake = Fake::new(1);
        let (books, devices, memory) = (Books::open(&fake), fake.devices(1), Memory::new(6));
        let start = memory.start();
        let ranges = [start + 100..start + 100 + 2 * page(), start + 100 + 2 * page()..start + 3 * page(), {
            start + 4 * page()..start + 4 * page() + 1
        }];
        let mut adopted: Vec<_> = ranges.iter().map(|range| adopt(&devices, range).expect("it is there")).collect();
        assert_eq!(fake.live(), ranges, "neighbours within a page are two registrations");
        for range in &ranges {
            assert!(is_registered(range.start, range.len(), 0));
            assert!(!is_registered(range.start, range.len() + 1, 0) && !is_registered(range.start - 1, 2, 0));
        }
        adopted[0].release().expect("the driver takes it");
        assert_eq!(fake.live(), ranges[1..]);
        assert!(is_locked(&memory.pages(2..3)), "the neighbour's page");
        drop((adopted, devices));
        assert!(is_unlocked(&memory.range()));
        books.close_but_for(&fake, &[PARTS_OF_PAGES]);
    });
}

#[test]
fn memory_that_can_only_be_read_is_registered_as_such() {
    alone("memory_that_can_only_be_read_is_registered_as_such", || {
        let fake = Fake::new(1);
        let (books, memory) = (Books::open(&fake), Memory::new(3));
        memory.protect(1..2, libc::PROT_READ);
        // The fake refuses what can only be read, unless the flag says so.
        for range in [memory.pages(1..2), memory.range()] {
            drop(adopt(&fake.devices(1), &range).expect("the flag is set"));
        }
        fake.fail("cuMemHostRegister_v2", 1, 801);
        assert_eq!(driver_answer(&adopt(&fake.devices(1), &memory.pages(1..2)).expect_err("801")).1, 801);
        fake.set("read_only_supported", 0);
        let devices = fake.devices(1);
        let calls = fake.calls("cuMemHostRegister_v2");
        let refusal = adopt(&devices, &memory.pages(1..2)).expect_err("the device cannot");
        assert!(matches!(refusal, Error::Unsupported { .. }));
        says(&refusal, &["registering read-only memory with cuda:0", "READ_ONLY_HOST_REGISTER_SUPPORTED", "copy it"]);
        assert_eq!(fake.calls("cuMemHostRegister_v2"), calls + 1, "not with a flag that the device does not have");
        drop(adopt(&devices, &memory.pages(0..1)).expect("it can be written"));
        drop(devices);
        books.close(&fake);
    });
}

#[test]
fn what_somebody_else_has_registered_is_refused_by_name() {
    alone("what_somebody_else_has_registered_is_refused_by_name", || {
        let fake = Fake::new(2);
        let (books, memory) = (Books::open(&fake), Memory::new(4));
        fake.enter_context(1);
        assert_eq!(fake.bare().register(memory.pages(1..2).start, page()), 0);
        let devices = fake.devices(1);
        for pages in [0..4, 1..2, 0..2, 1..4] {
            let refusal = adopt(&devices, &memory.pages(pages)).expect_err("a part is somebody else's");
            assert_eq!(driver_answer(&refusal), ("cuMemHostRegister", 712));
            says(&refusal, &["on cuda:0 of ", "HOST_MEMORY_ALREADY_REGISTERED", "somebody else registered a part"]);
        }
        assert!(is_unlocked(&memory.range()));
        drop(adopt(&devices, &memory.pages(2..4)).expect("nobody else's"));
        assert_eq!(fake.live(), [memory.pages(1..2)], "what is somebody else's stays so");
        assert_eq!(fake.bare().unregister(memory.pages(1..2).start), 0);
        fake.leave_context(1);
        drop(devices);
        books.close_but_for(&fake, &["a part is registered already"]);
    });
}

#[test]
fn ranges_are_registered_in_pieces_and_a_refused_piece_is_halved() {
    alone("ranges_are_registered_in_pieces_and_a_refused_piece_is_halved", || {
        let fake = Fake::new(2);
        let (books, devices) = (Books::open(&fake), fake.devices(2));
        fake.set("check_maps", 0);
        let usual = devices[0].sizes().usual;
        let range = NOWHERE + 100..NOWHERE + 3 * usual + 5;
        let registrations = register(&devices, &range, Cut::Pieces).expect("the usual size is fine");
        check_pieces(&fake.live(), &range);
        assert_eq!((fake.calls("cuMemHostRegister_v2"), registrations.bytes().len()), (4, 4));
        registrations.end().expect("the driver takes them");

        let range = NOWHERE..NOWHERE + 256 * MIB;
        for (most, pieces) in [(256, 1_usize), (255, 2), (64, 4), (16, 16)] {
            fake.set("max_bytes", most * MIB as u64);
            let before = fake.calls("cuMemHostRegister_v2");
            let registrations = register(&devices, &range, Cut::Pieces).expect("smaller pieces are fine");
            check_pieces(&fake.live(), &range);
            let halvings = u64::from(pieces.ilog2());
            assert_eq!(fake.live().len(), pieces);
            assert_eq!(fake.calls("cuMemHostRegister_v2") - before, pieces as u64 + halvings, "what fits is kept to");
            registrations.end().expect("the driver takes them");
        }
        fake.set("max_bytes", 16 * MIB as u64 - 1);
        let before = fake.calls("cuMemHostRegister_v2");
        let refused = register(&devices, &range, Cut::Pieces).expect_err("smaller than the floor");
        assert!(driver_answer(&refused.error) == ("cuMemHostRegister", 2) && refused.stuck.is_none());
        assert_eq!(fake.calls("cuMemHostRegister_v2") - before, 5, "256, 128, 64, 32 and 16 MiB");
        // Another refusal than one of the size is not answered by smaller pieces.
        fake.fail("cuMemHostRegister_v2", 1, 1);
        assert_eq!(driver_answer(&register(&devices, &range, Cut::Pieces).expect_err("refused").error).1, 1);
        drop((registrations, refused, devices));
        books.close_but_for(&fake, &[PARTS_OF_PAGES]);
    });
}

#[test]
fn where_a_later_piece_is_refused_the_earlier_ones_are_taken_back() {
    alone("where_a_later_piece_is_refused_the_earlier_ones_are_taken_back", || {
        let fake = Fake::new(1);
        let (books, devices) = (Books::open(&fake), fake.devices(1));
        fake.set("check_maps", 0);
        fake.set("budget_bytes", 100 * MIB as u64);
        let range = NOWHERE..NOWHERE + 256 * MIB;
        let refused = register(&devices, &range, Cut::Pieces).expect_err("over the budget");
        says(&refused.error, &["answered 2 (CUDA_ERROR_OUT_OF_MEMORY)", "WSL", "register=\"try\""]);
        assert!(refused.stuck.is_none() && fake.live().is_empty());
        assert_eq!(fake.calls("cuMemHostUnregister"), 2, "64 and 32 MiB were made");
        fake.set("budget_bytes", u64::MAX);
        fake.set("max_bytes", 64 * MIB as u64);
        for nth in 3..=6 {
            fake.fail("cuMemHostRegister_v2", nth, 700);
            let refused = register(&devices, &range, Cut::Pieces).expect_err("refused");
            assert!(driver_answer(&refused.error).1 == 700 && refused.stuck.is_none());
            assert_eq!(fake.live(), []);
        }
        drop((refused, devices));
        books.close(&fake);
    });
}

#[test]
fn borrowed_memory_in_pieces_is_registered_as_a_whole() {
    alone("borrowed_memory_in_pieces_is_registered_as_a_whole", || {
        let _turn = room(50 * MIB);
        let fake = Fake::new(1);
        let (books, devices) = (Books::open(&fake), fake.devices(1));
        fake.set("max_bytes", 16 * MIB as u64);
        let memory = Memory::new(48 * MIB / page() + 1);
        let adopted = adopt(&devices, &memory.range()).expect("in pieces");
        check_pieces(&fake.live(), &memory.range());
        assert!(fake.live().len() > 3 && is_registered(memory.start(), memory.range().len(), 0));
        drop(adopted);
        fake.fail("cuMemHostRegister_v2", 5, 999);
        assert_eq!(driver_answer(&adopt(&devices, &memory.range()).expect_err("refused")).1, 999);
        assert!(is_unlocked(&memory.range()));
        drop(devices);
        books.close(&fake);
    });
}

#[test]
fn a_block_is_never_cut_and_one_that_is_too_large_says_so() {
    alone("a_block_is_never_cut_and_one_that_is_too_large_says_so", || {
        let fake = Fake::new(2);
        let (books, devices) = (Books::open(&fake), fake.devices(2));
        let (pool, largest) = (only_mapped(&devices), devices[0].sizes().largest);
        let refusal = pool.take(600 * GIB).expect_err("more than one registration holds");
        assert!(matches!(refusal, Error::Unsupported { .. }));
        says(&refusal, &[&(600 * GIB).to_string(), &largest.to_string(), "cuda:0", "use several smaller tensors"]);
        assert_eq!((fake.calls("cuMemHostRegister_v2"), pool.stats().expect("ours").reserved_bytes), (0, 0));
        let block = pool.take(largest).expect("the most that there can be");
        let whole = address(&block)..address(&block) + largest;
        assert_eq!(fake.live(), std::slice::from_ref(&whole));
        drop(block);
        pool.trim().expect("idle");
        fake.set("max_bytes", 64 * MIB as u64);
        let refusal = pool.take(100 * MIB).expect_err("the driver wants it smaller, and a block is one piece");
        assert_eq!(driver_answer(&refusal), ("cuMemHostRegister", 2));
        assert_eq!((pool.stats().expect("ours").reserved_bytes, fake.live().len()), (0, 0));
        drop((pool, devices));
        books.close(&fake);
    });
}

#[test]
fn a_reserve_becomes_several_regions_where_one_is_too_large() {
    alone("a_reserve_becomes_several_regions_where_one_is_too_large", || {
        let fake = Fake::new(1);
        let (books, devices) = (Books::open(&fake), fake.devices(1));
        let pool = only_mapped(&devices);
        let usual = devices[0].sizes().usual;
        pool.reserve(2 * usual + MIB, &mut go_on).expect("address space");
        assert_eq!(fake.live().iter().map(Range::len).filter(|&len| len == usual).count(), 2);
        assert_eq!(pool.stats().expect("ours").regions, 3);
        pool.trim().expect("idle");
        fake.set("max_bytes", 30 * MIB as u64);
        pool.reserve(100 * MIB, &mut go_on).expect("in smaller regions");
        assert_eq!((fake.live().len(), pool.stats().expect("ours").reserved_bytes), (4, 100 * MIB));
        let blocks: Vec<_> = (0..4).map(|_| pool.take(25 * MIB).expect("reserved")).collect();
        assert!(blocks.iter().all(|block| fake.is_live(address(block), block.len())), "none spans two registrations");
        drop(blocks);
        pool.trim().expect("idle");
        fake.fail("cuMemHostRegister_v2", 5, 999);
        assert_eq!(driver_answer(&pool.reserve(100 * MIB, &mut go_on).expect_err("refused")).1, 999);
        assert_eq!((fake.live().len(), pool.stats().expect("ours").reserved_bytes), (0, 0), "all or nothing");
        fake.set("max_bytes", MIB as u64);
        assert_eq!(driver_answer(&pool.reserve(100 * MIB, &mut go_on).expect_err("refused")).1, 2);
        assert_eq!((fake.live().len(), pool.stats().expect("ours").reserved_bytes), (0, 0));
        drop((pool, devices));
        books.close(&fake);
    });
}

#[test]
fn a_budget_of_the_drivers_is_refused_in_words_and_idle_memory_makes_room() {
    alone("a_budget_of_the_drivers_is_refused_in_words_and_idle_memory_makes_room", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        fake.set("budget_bytes", 8 * MIB as u64); // as WSL has one
        let pool = device_pool(64 * MIB, &fake.devices(1));
        let block = pool.take(5 * MIB).expect("within the budget");
        let refusal = pool.take(4 * MIB).expect_err("over the budget");
        assert_eq!(driver_answer(&refusal), ("cuMemHostRegister", 2));
        says(&refusal, &[&format!("of {} bytes", 4 * MIB), "WSL and Windows allow a fraction of the RAM"]);
        let stats = pool.stats().expect("ours");
        assert_eq!((stats.reserved_bytes, stats.registered_bytes["cuda:0"]), (5 * MIB, 5 * MIB));
        drop(block);
        drop(pool.take(6 * MIB).expect("what is idle gives way, as under a budget of the pool's own"));
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn what_cannot_be_registered_is_used_without_where_the_caller_says_so() {
    alone("what_cannot_be_registered_is_used_without_where_the_caller_says_so", || {
        let fake = Fake::new(2);
        let (books, devices, memory) = (Books::open(&fake), fake.devices(2), Memory::new(2));
        fake.set("confidential", 1);
        for options in [device_options(8 * MIB, &devices), device_options(8 * MIB, &devices[1..])] {
            let strict = Pool::new(options.clone()).expect("nothing yet");
            let refusal = strict.take(MIB).expect_err("not with confidential computing");
            assert_eq!(driver_answer(&refusal), ("cuMemHostRegister", 801));
            says(&refusal, &["NOT_SUPPORTED", "with confidential computing no host memory can be registered", "off"]);
            let lenient = Pool::new(PoolOptions { register_if_possible: true, ..options }).expect("nothing yet");
            let block = lenient.take(MIB).expect("locked is good enough");
            assert!(is_pinned(&block) && !block_is_registered(&block, 0) && !block_is_registered(&block, 1));
            let stats = lenient.stats().expect("ours");
            assert!(stats.unregistered.is_some_and(|why| why == refusal.to_string()));
            assert_eq!((stats.registered_bytes.len(), stats.locked_bytes), (0, MIB));
        }
        let refusal = adopt(&devices, &memory.range()).expect_err("not with confidential computing");
        let registering = Registering { devices: &devices, required: false };
        // SAFETY: the memory outlives the adoption.
        let adopted = unsafe { Adopted::adopt(memory.start(), 2 * page(), &registering, &mut go_on) };
        let adopted = adopted.expect("locked is good enough");
        assert!(adopted.refusal().is_some_and(|why| why.to_string() == refusal.to_string()));
        assert!(is_locked(&memory.range()) && !is_registered(memory.start(), 1, 0) && leaked_bytes() == 0);
        drop((adopted, devices));
        assert!(pool_of(MIB, RegionOptions::default()).take(10).is_ok());
        books.close(&fake);
    });
}
