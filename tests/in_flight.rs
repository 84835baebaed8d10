//! Blocks that device work may still use: they are not reused, not given back and not unlocked before it is done.

mod common;

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use common::maps::{is_locked, locked_bytes};
use common::process::alone;
use common::{MIB, address, defer, go_on, page, pinned_ranges, pool, record_stream, stats};
use pinpool::driver::{Event, Place};
use pinpool::pool::{find, unpin};
use pinpool::{Block, Error, Pool};

const DONE: u8 = 1;
const FAILED: u8 = 2;

/// Device work whose end the test decides.
#[derive(Debug, Default)]
struct Work {
    state: AtomicU8,
    asked: AtomicUsize,
    place: Option<Place>,
}

impl Work {
    fn on_queue(queue: u64, number: u64) -> Arc<Self> {
        Arc::new(Self { place: Some(Place { queue: (0, queue), number }), ..Self::default() })
    }

    fn end(&self) {
        self.state.store(DONE, Ordering::SeqCst);
    }

    fn fail(&self) {
        self.state.store(FAILED, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Event for Work {
    fn query(&self) -> Result<bool, String> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        match self.state.load(Ordering::SeqCst) {
            FAILED => Err("the device fell off the bus".to_owned()),
            state => Ok(state == DONE),
        }
    }

    fn place(&self) -> Option<Place> {
        self.place
    }
}

fn range(block: &Block) -> Range<usize> {
    address(block)..address(block) + block.len()
}

fn work_on(block: &Block) -> Arc<Work> {
    let work = Arc::<Work>::default();
    defer(&range(block), work.clone()).expect("the block is live");
    work
}

/// Every byte is somebody's.
fn check_books(pool: &Pool) {
    let now = stats(pool);
    let parts = now.allocated_bytes + now.cached_bytes + now.pending_bytes + now.quarantined_bytes + now.leaked_bytes;
    assert_eq!(parts, now.reserved_bytes, "{now:?}");
}

#[test]
fn a_block_is_reused_when_all_its_work_is_done_and_not_before() {
    for len in [10, MIB] {
        let pool = pool(8 * MIB);
        let block = pool.take(len).expect("room");
        let (first, second) = (work_on(&block), work_on(&block));
        let start = address(&block);
        drop(block);
        assert_eq!((first.asked(), second.asked()), (0, 0), "nobody asks while a block goes");
        assert_eq!(stats(&pool).pending_bytes, len.next_multiple_of(page()));
        check_books(&pool);
        let others = [&second, &first].map(|done| {
            let other = pool.take(len).expect("room");
            done.end();
            other
        });
        assert!(others.iter().all(|other| address(other) != start));
        assert_eq!(address(&pool.take(len).expect("it is free again")), start);
        assert_eq!(stats(&pool).pending_bytes, 0);
    }
}

#[test]
fn any_part_of_a_block_stands_for_it_and_nothing_else_does() {
    let pool = pool(4 * MIB);
    let (block, idle) = (pool.take(3 * page() - 5).expect("room"), pool.take(page()).expect("room"));
    let (start, end) = (address(&block), address(&block) + block.capacity());
    let gone = range(&idle);
    drop(idle);
    for inside in [start..start + 1, end - 1..end, start + 7..end - 7] {
        defer(&inside, Arc::<Work>::default()).expect("inside");
    }
    let on_the_stack = 0_u8;
    let foreign = (&raw const on_the_stack) as usize;
    for outside in [start - 1..start, end - 1..end + 1, foreign..foreign + 1, gone, 0..1, usize::MAX - 1..usize::MAX] {
        assert!(find(&outside).is_err());
        for refused in [defer(&outside, Arc::<Work>::default()), record_stream(&outside, 0)] {
            assert!(matches!(refused, Err(Error::Invalid { parameter: "memory", .. })), "{outside:x?}: {refused:?}");
        }
    }
}

#[test]
fn a_pool_says_whose_block_it_is() {
    let (pool, other) = (pool(MIB), pool(MIB));
    let block = pool.take(10).expect("room");
    pool.find(&range(&block)).expect("its own");
    let refusal = other.find(&range(&block)).expect_err("another's");
    assert!(refusal.to_string().contains("another pool"), "{refusal}");
}

#[test]
fn memory_that_no_device_knows_needs_no_events() {
    let pool = pool(MIB);
    let block = pool.take(10).expect("room");
    record_stream(&range(&block), 0xbad).expect("copies of it are done when they return");
    let start = address(&block);
    drop(block);
    assert_eq!(address(&pool.take(10).expect("idle")), start);
}

#[test]
fn one_stuck_event_holds_up_its_own_block_only() {
    let pool = pool(8 * MIB);
    let blocks: Vec<_> = (0..100).map(|_| pool.take(page()).expect("room")).collect();
    let works: Vec<_> = blocks.iter().map(work_on).collect();
    let stuck = address(&blocks[50]);
    drop(blocks);
    works.iter().enumerate().filter(|(at, _)| *at != 50).for_each(|(_, work)| work.end());
    let again: Vec<_> = (0..99).map(|_| pool.take(page()).expect("free again")).collect();
    assert!(again.iter().all(|block| address(block) != stuck));
    assert_eq!((stats(&pool).pending_bytes, stats(&pool).regions), (page(), 1));
}

#[test]
fn of_blocks_in_one_queue_the_first_that_must_wait_answers_for_those_behind_it() {
    let pool = pool(8 * MIB);
    let blocks: Vec<_> = (0..100).map(|_| pool.take(page()).expect("room")).collect();
    let works: Vec<_> = (0..100).map(|number| Work::on_queue(1, number)).collect();
    let elsewhere = Work::on_queue(2, 1000);
    for (block, work) in blocks.iter().zip(&works) {
        defer(&range(block), work.clone()).expect("live");
    }
    let (other, first) = (pool.take(page()).expect("room"), address(&blocks[0]));
    defer(&range(&other), elsewhere.clone()).expect("live");
    let other_start = address(&other);
    drop(other);
    blocks.into_iter().rev().for_each(drop); // the order of return does not matter
    elsewhere.end();
    assert_eq!(address(&pool.take(page()).expect("the other queue is done")), other_start);
    assert_eq!(works.iter().map(|work| work.asked()).sum::<usize>(), 1, "only the first is asked");
    works[0].end();
    let taken = [pool.take(page()).expect("room"), pool.take(page()).expect("room")].map(|block| address(&block));
    assert!(taken.contains(&first), "past the first, the second is asked");
    assert_eq!(works[2].asked(), 0);
}

#[test]
fn blocks_that_share_an_event_are_two_all_the_same() {
    let pool = pool(MIB);
    let blocks = [pool.take(page()).expect("room"), pool.take(page()).expect("room")];
    let work = Work::on_queue(1, 1);
    for block in &blocks {
        defer(&range(block), work.clone()).expect("live");
    }
    drop(blocks);
    assert_eq!(stats(&pool).pending_bytes, 2 * page());
    work.end();
    let again = [pool.take(page()).expect("free"), pool.take(page()).expect("free")];
    assert_eq!(stats(&pool).pending_bytes, 0);
    assert_ne!(address(&again[0]), address(&again[1]));
    check_books(&pool);
}

#[test]
fn an_event_may_be_recorded_while_the_block_is_being_unlocked() {
    let pool = Arc::new(pool(MIB));
    for _ in 0..300 {
        let block = pool.take(page()).expect("room");
        let start = address(&block);
        let work = thread::scope(|scope| {
            scope.spawn(|| unpin(start));
            work_on(&block)
        });
        drop(block);
        assert_ne!(address(&pool.take(page()).expect("other memory")), start);
        work.end();
    }
}

#[test]
fn later_events_of_a_queue_replace_the_earlier_ones() {
    let pool = pool(MIB);
    let block = pool.take(10).expect("room");
    let works: Vec<_> = (0..1000).map(|number| Work::on_queue(1, number)).collect();
    for work in &works {
        defer(&range(&block), work.clone()).expect("live");
    }
    let kept = works.iter().filter(|work| Arc::strong_count(work) > 1).count();
    assert_eq!(kept, 1);
    let others: Vec<_> = (0..1000).map(|_| work_on(&block)).inspect(|work| work.end()).collect();
    assert!(others.iter().filter(|work| Arc::strong_count(work) > 1).count() < 20, "those that are done are let go");
}

#[test]
fn a_failed_event_keeps_its_block_from_use_for_good() {
    alone("a_failed_event_keeps_its_block_from_use_for_good", || {
        for len in [page(), MIB] {
            let (locked, pool) = (locked_bytes(), pool(8 * MIB));
            let block = pool.take(len).expect("room");
            let (start, work) = (address(&block), work_on(&block));
            work.fail();
            drop(block);
            for _ in 0..3 {
                assert_ne!(address(&pool.take(len).expect("other memory")), start);
            }
            let now = stats(&pool);
            assert_eq!((now.quarantined_bytes, now.pending_bytes), (len, 0));
            assert!(now.quarantine_reason.expect("why").contains("fell off the bus"));
            check_books(&pool);
            pool.trim().expect("the rest is idle");
            pool.close().expect("the rest is idle");
            drop(pool);
            assert!(is_locked(&(start..start + len)) && locked_bytes() > locked, "a device may still write there");
        }
    });
}

#[test]
fn trimming_and_unlocking_leave_a_block_in_flight_alone() {
    alone("trimming_and_unlocking_leave_a_block_in_flight_alone", || {
        for len in [10, MIB] {
            let pool = pool(8 * MIB);
            let block = pool.take(len).expect("room");
            let (start, work) = (address(&block), work_on(&block));
            let refusal = unpin(start).expect_err("a device uses it");
            assert!(refusal.to_string().contains("not done"), "{refusal}");
            drop(block);
            let reserved = stats(&pool).reserved_bytes;
            assert_eq!(pool.trim().expect("nothing to do"), 0);
            assert!(is_locked(&(start..start + len)));
            work.end();
            assert_eq!(pool.trim().expect("idle by now"), reserved);
            assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
        }
    });
}

#[test]
fn work_that_is_done_does_not_keep_a_block_from_being_unlocked() {
    let pool = pool(MIB);
    let block = pool.take(10).expect("room");
    work_on(&block).end();
    assert!(unpin(address(&block)).expect("nothing uses it"));
    defer(&range(&block), Arc::new(Work { state: AtomicU8::new(DONE), ..Work::default() })).expect("live");
    drop(block);
    assert_eq!(stats(&pool).pending_bytes, page());
    drop(pool.take(10).expect("locked again"));
    assert_eq!(stats(&pool).pending_bytes, 0);
}

#[test]
fn a_closed_pool_gives_back_what_was_in_flight_when_any_pool_is_used() {
    alone("a_closed_pool_gives_back_what_was_in_flight_when_any_pool_is_used", || {
        for dropped_first in [true, false] {
            let pool = pool(8 * MIB);
            let block = pool.take(MIB).expect("room");
            let (range, work) = (range(&block), work_on(&block));
            let block = (!dropped_first).then_some(block);
            pool.close().expect("nothing is refused");
            drop(block);
            drop(pool);
            assert!(is_locked(&range), "a device may still use it");
            let other = common::pool(MIB);
            drop(other.take(page()).expect("room"));
            assert!(is_locked(&range));
            work.end();
            drop(other.take(MIB / 2).expect("room"));
            other.trim().expect("idle");
            assert_eq!((locked_bytes(), pinned_ranges()), (0, 0), "dropped first: {dropped_first}");
        }
    });
}

#[test]
fn a_request_polls_what_is_pending_after_it_has_trimmed_what_is_idle_and_then_says_what_it_saw() {
    let pool = pool(2 * MIB);
    let (busy, idle) = (pool.take(MIB).expect("room"), pool.take(MIB).expect("room"));
    let work = work_on(&busy);
    drop((busy, idle));
    drop(pool.take(MIB / 2).expect("what is idle is given up for it"));
    match pool.take(MIB + page()).expect_err("a device uses the rest") {
        refusal @ Error::OutOfPinnedMemory { pending: MIB, oldest: Some(_), .. } => {
            let text = refusal.to_string();
            assert!(text.contains(&format!("pending {MIB} (device work or transfers, the oldest ")), "{text}");
        }
        other => panic!("{other}"),
    }
    work.end();
    drop(pool.take(MIB + page()).expect("all is idle"));
}

#[test]
fn waiting_for_memory_waits_for_device_work() {
    let pool = pool(MIB);
    let block = pool.take(MIB).expect("room");
    let (start, work) = (address(&block), work_on(&block));
    drop(block);
    let mut asked = 0;
    let taken = pool.take_within(MIB, None, &mut |_, _| {
        asked += 1;
        if asked == 5 {
            work.end();
        }
        ControlFlow::Continue(())
    });
    assert_eq!(address(&taken.expect("the work is done")), start);
    assert!(work.asked() >= 5);
}

#[test]
fn an_event_may_use_the_pool_that_asks_it() {
    #[derive(Debug)]
    struct Nosy(Arc<Pool>, Mutex<Vec<Block>>);
    impl Event for Nosy {
        fn query(&self) -> Result<bool, String> {
            let block = self.0.take(page()).expect("room");
            self.1.lock().expect("no panic").push(block);
            self.0.stats().map(|_| true).map_err(|error| error.to_string())
        }
    }
    let pool = Arc::new(pool(MIB));
    let block = pool.take(2 * page()).expect("room");
    let start = address(&block);
    defer(&range(&block), Arc::new(Nosy(Arc::clone(&pool), Mutex::default()))).expect("live");
    drop(block);
    assert_eq!(address(&pool.take(2 * page()).expect("done")), start);
    assert_eq!(stats(&pool).blocks, 0, "the event's own block went with it");
}

#[test]
fn threads_that_look_at_once_hand_a_block_out_once() {
    let pool = Arc::new(pool(64 * MIB));
    for _ in 0..50 {
        let blocks: Vec<_> = (0..16).map(|_| pool.take(page()).expect("room")).collect();
        let works: Vec<_> = blocks.iter().map(work_on).collect();
        drop(blocks);
        let (sender, taken) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..4 {
                let (sender, pool) = (sender.clone(), &pool);
                scope.spawn(move || (0..8).for_each(|_| sender.send(pool.take(page()).expect("room")).expect("heard")));
            }
            for work in &works {
                work.end();
            }
        });
        drop(sender);
        let blocks: Vec<Block> = taken.iter().collect();
        let mut starts: Vec<_> = blocks.iter().map(address).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 32);
    }
    check_books(&pool);
    pool.reserve(0, &mut go_on).expect("nothing to do");
}
