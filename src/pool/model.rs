//! The pool in every order of events: with `--cfg loom` its locks and atomics are loom's, which runs a model again and
//! again until it has seen all orders that differ (and, for loads, all values that the memory model allows).
//!
//! A block without a pool (`Record`) is tried in full. Models of a whole pool switch between threads up to so many times
//! where no thread has to wait. Nothing here waits for a clock: see `sync::wait`. What models do not see: the registry of
//! pinned ranges and the counts of `Arc`, whose steps happen at once with the step before them.
#![allow(clippy::print_stderr)] // how many orders were tried is worth knowing

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic as unseen;
use std::time::Instant;

use loom::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use loom::thread::{self, JoinHandle};

use super::in_flight::Known;
use super::record::{Record, Return, Unpinning};
use super::{Pool, PoolOptions, find, unfinished, unpin};
use crate::block::Block;
use crate::driver::{Event, Place};
use crate::error::{Error, Result};
use crate::os;
use crate::region::{Pages, RegionOptions};
use crate::registry::shared::is_pinned;

/// Tries all orders, or those in which at most so many switches between threads were not necessary.
fn in_every_order(switches: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    /// Where one model has unmapped memory, another one would map some.
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let started = Instant::now();
    let orders = Arc::new(unseen::AtomicUsize::new(0));
    let counted = Arc::clone(&orders);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(switches);
    builder.max_branches = 100_000;
    builder.check(move || {
        counted.fetch_add(1, unseen::Ordering::Relaxed);
        model();
    });
    let orders = orders.load(unseen::Ordering::Relaxed);
    eprintln!("{orders} orders in {:.1?}", started.elapsed());
    assert!(orders > 1, "nothing was tried");
}

/// For models of a whole pool. Mistakes that were put into it for a try all showed with two.
const SWITCHES: Option<usize> = Some(3);

const RUNNING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// Device work whose end a model decides.
#[derive(Debug)]
struct Work {
    state: AtomicU8,
    place: Option<Place>,
}

impl Work {
    fn new() -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(RUNNING), place: None })
    }

    fn in_queue(number: u64) -> Arc<Self> {
        Arc::new(Self { state: AtomicU8::new(RUNNING), place: Some(Place { queue: (0, 0), number }) })
    }

    fn end(&self) {
        self.state.store(DONE, Ordering::Release);
    }

    fn fail(&self) {
        self.state.store(FAILED, Ordering::Release);
    }

    /// Whether that it is done was seen before: this look alone may see an older state.
    fn is_over(&self) -> bool {
        self.state.load(Ordering::Relaxed) == DONE
    }
}

impl Event for Work {
    fn query(&self) -> std::result::Result<bool, String> {
        match self.state.load(Ordering::Acquire) {
            FAILED => Err("the device fell off the bus".to_owned()),
            state => Ok(state == DONE),
        }
    }

    fn place(&self) -> Option<Place> {
        self.place
    }
}

fn event(work: &Arc<Work>) -> Arc<dyn Event> {
    Arc::clone(work) as Arc<dyn Event>
}

/// A block of no pool, that a caller owns.
fn record() -> Arc<Record> {
    let record = Arc::new(Record::new(os::page_size(), os::page_size(), false));
    record.take();
    record
}

/// Runs on a thread of its own.
fn spawn<T: 'static>(record: &Arc<Record>, run: impl FnOnce(&Record) -> T + 'static) -> JoinHandle<T> {
    let record = Arc::clone(record);
    thread::spawn(move || run(&record))
}

fn join<T>(thread: JoinHandle<T>) -> T {
    thread.join().expect("a thread of a model panics only when the model fails")
}

/// A pool that never holds more than so many pages.
fn pool_of(pages: usize) -> Arc<Pool> {
    pool_with(pages, false)
}

fn pool_with(pages: usize, lock: bool) -> Arc<Pool> {
    let region = RegionOptions { pages: Pages::Base, threads: Some(1), lock, ..RegionOptions::default() };
    let options = PoolOptions { max_bytes: Some(pages * os::page_size()), region, ..PoolOptions::default() };
    let pool = Pool::new(options).expect("nothing is mapped yet");
    if pages > 1 {
        // In one region, so that their order is the same whenever the model runs.
        pool.reserve(pages * os::page_size(), &mut |_, _| ControlFlow::Continue(())).expect("it is the whole budget");
    }
    Arc::new(pool)
}

fn take(pool: &Pool) -> Result<Block> {
    pool.take(os::page_size())
}

fn range(block: &Block) -> Range<usize> {
    let start = block.as_ptr() as usize;
    start..start + block.len()
}

fn address(block: &Block) -> usize {
    block.as_ptr() as usize
}

fn work_on(block: &Block) -> Arc<Work> {
    let work = Work::new();
    defer(&range(block), event(&work)).expect("the block is live");
    work
}

/// Every byte of a pool that nobody uses is idle or in quarantine.
fn check_books(pool: &Pool) {
    let now = pool.stats().expect("it is our process's");
    let parts = now.allocated_bytes + now.cached_bytes + now.pending_bytes + now.quarantined_bytes + now.leaked_bytes;
    assert_eq!(parts, now.reserved_bytes, "{now:?}");
    assert_eq!((now.blocks, now.requested_bytes), (0, 0), "{now:?}");
}

/// Closes a pool that nobody uses, and checks that nothing of it is left.
fn end(pool: Arc<Pool>) {
    check_books(&pool);
    let inner = Arc::downgrade(&pool.inner);
    drop(pool);
    assert_eq!(inner.strong_count(), 0, "the pool is gone");
}

// One block, in full.

#[test]
fn a_block_is_whole_only_when_all_its_work_is_done() {
    in_every_order(None, || {
        let (record, work) = (record(), Work::new());
        let following = {
            let work = Arc::clone(&work);
            spawn(&record, move |record| record.follow(|| Ok(event(&work))).is_ok())
        };
        let device = device(&work);
        let returned = record.give_back();
        let known = record.look();
        let over = work.is_over();
        let followed = join(following);
        match returned {
            Return::Whole => assert!(!followed, "a block that was reused is followed by nobody"),
            Return::Pending => assert!(followed && (known == Known::Busy || over), "{known:?}"),
            Return::Later => panic!("nobody unlocks it"),
        }
        join(device);
        assert_eq!((record.look(), record.is_in_flight()), (Known::Done, false));
    });
}

#[test]
fn a_block_waits_for_each_of_several_events_that_its_owners_record_at_once() {
    in_every_order(None, || {
        let (record, works, owners) = (record(), [Work::new(), Work::new()], Arc::new(AtomicUsize::new(2)));
        let following = [0, 1].map(|which| {
            let (work, owners) = (Arc::clone(&works[which]), Arc::clone(&owners));
            spawn(&record, move |record| {
                record.follow(|| Ok(event(&work))).expect("it is live");
                if owners.fetch_sub(1, Ordering::AcqRel) == 1 {
                    assert_eq!(record.give_back(), Return::Pending);
                }
            })
        });
        works[0].end();
        record.look();
        following.into_iter().for_each(join);
        assert_eq!((record.look(), record.is_in_flight()), (Known::Busy, true));
        works[1].end();
        assert_eq!((record.look(), record.is_in_flight()), (Known::Done, false));
    });
}

#[test]
fn a_later_event_of_a_queue_takes_the_place_of_an_earlier_one_in_whatever_order_they_arrive() {
    in_every_order(None, || {
        let (record, works) = (record(), [Work::in_queue(1), Work::in_queue(2)]);
        let following = [0, 1].map(|which| {
            let work = Arc::clone(&works[which]);
            spawn(&record, move |record| record.follow(|| Ok(event(&work))).expect("it is live"))
        });
        record.look();
        following.into_iter().for_each(join);
        assert_eq!(record.give_back(), Return::Pending);
        works[0].end();
        assert_eq!((record.look(), record.is_in_flight()), (Known::Busy, true));
        works[1].end();
        assert_eq!((record.look(), record.is_in_flight()), (Known::Done, false));
    });
}

#[test]
fn a_block_whose_event_could_not_be_recorded_is_never_whole_again() {
    in_every_order(None, || {
        let (record, work) = (record(), Work::new());
        let following = {
            let work = Arc::clone(&work);
            spawn(&record, move |record| {
                let refused = record.follow(|| Err(Error::Captured { stream: 1 }));
                let followed = record.follow(|| Ok(event(&work)));
                (refused.is_err(), followed.is_ok())
            })
        };
        let looking = spawn(&record, Record::look);
        let returned = record.give_back();
        work.end();
        let (_, followed) = join(following);
        join(looking);
        match returned {
            Return::Pending => assert!(matches!(record.look(), Known::Never(_)) && record.is_in_flight()),
            _ => assert_eq!((record.look(), followed), (Known::Done, false)),
        }
    });
}

#[test]
fn a_block_that_is_unlocked_and_in_flight_is_not_whole_and_one_thread_sees_to_its_return() {
    in_every_order(None, || {
        let (record, work) = (record(), Work::new());
        let unlocking = spawn(&record, |record| match record.begin_unpin() {
            Unpinning::Begun => record.end_unpin(true),
            _ => None,
        });
        let following = {
            let work = Arc::clone(&work);
            spawn(&record, move |record| record.follow(|| Ok(event(&work))))
        };
        let returned = record.give_back();
        let (seen_to, followed) = (join(unlocking), join(following).is_ok());
        assert_eq!(seen_to.is_some(), returned == Return::Later, "one of the two sees to it");
        let returned = seen_to.unwrap_or(returned);
        assert_eq!(returned == Return::Whole, !followed && !record.is_unpinned());
        assert_eq!((record.look() == Known::Busy, record.is_in_flight()), (followed, followed));
    });
}

// A whole pool. With one page, whoever gets memory gets that page.

#[test]
fn memory_is_handed_out_again_only_after_the_device_is_done_with_it() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let work = work_on(&block);
        let device = device(&work);
        let owner = thread::spawn(move || drop(block));
        if let Ok(again) = take(&pool) {
            assert!(work.is_over(), "the device uses the page");
            drop(again);
        }
        join(owner);
        join(device);
        drop(take(&pool).expect("the page is idle now"));
        end(pool);
    });
}

#[test]
fn memory_in_a_queue_is_handed_out_again_in_its_order() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(2);
        let blocks = [1, 2].map(|_| take(&pool).expect("there are two pages"));
        let works = [1, 2].map(Work::in_queue);
        for (block, work) in blocks.iter().zip(&works) {
            defer(&range(block), event(work)).expect("the block is live");
        }
        let device = {
            let works = works.clone();
            thread::spawn(move || works.iter().for_each(|work| work.end()))
        };
        let starts = blocks.each_ref().map(address);
        let [first, second] = blocks;
        let owner = thread::spawn(move || drop(second));
        drop(first);
        if let Ok(again) = take(&pool) {
            let which = starts.iter().position(|start| *start == address(&again)).expect("there are two pages");
            assert!(works[which].is_over(), "the device uses that page");
        }
        join(owner);
        join(device);
        let all = [1, 2].map(|_| take(&pool).expect("both are idle now"));
        assert_ne!(address(&all[0]), address(&all[1]));
        drop(all);
        end(pool);
    });
}

#[test]
fn memory_of_several_owners_waits_for_the_work_of_each() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = Arc::new(take(&pool).expect("there is a page"));
        let owners = Arc::new(AtomicUsize::new(2)); // as `block` counts them, but where the model sees it
        let works = [1, 2].map(|_| Work::new());
        let threads = [0, 1].map(|which| {
            let (block, owners, work) = (Arc::clone(&block), Arc::clone(&owners), Arc::clone(&works[which]));
            thread::spawn(move || {
                defer(&range(&block), event(&work)).expect("the block is live");
                owners.fetch_sub(1, Ordering::AcqRel);
                drop(block);
            })
        });
        drop(block);
        works[0].end();
        assert!(take(&pool).is_err(), "it is owned, or the second work is not done");
        works[1].end();
        if let Ok(again) = take(&pool) {
            assert_eq!(owners.load(Ordering::Acquire), 0, "it is owned");
            drop(again);
        }
        threads.into_iter().for_each(join);
        drop(take(&pool).expect("the page is idle now"));
        end(pool);
    });
}

#[test]
fn work_that_is_told_of_by_address_while_the_owner_lets_go_is_waited_for_or_refused() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let (work, range) = (Work::new(), range(&block));
        let teller = {
            let work = Arc::clone(&work);
            thread::spawn(move || defer(&range, event(&work)).is_ok())
        };
        let owner = thread::spawn(move || drop(block));
        let early = take(&pool);
        let told = join(teller);
        join(owner);
        drop(early); // its work may be meant, if it was told of after that
        assert_eq!(take(&pool).is_err(), told, "the device uses the page from when that was told");
        work.end();
        drop(take(&pool).expect("the page is idle now"));
        end(pool);
    });
}

#[test]
fn memory_is_not_unlocked_while_the_device_uses_it_nor_handed_out_unlocked() {
    in_every_order(SWITCHES, || {
        let pool = pool_with(1, true);
        let block = take(&pool).expect("there is a page that can be locked");
        let (work, range) = (Work::new(), range(&block));
        let start = range.start;
        let owner = thread::spawn(move || drop(block));
        let unlocker = thread::spawn(move || {
            unpin(start).ok(); // refused while the device uses it
        });
        let told = defer(&range, event(&work)).is_ok();
        let was_pinned = is_pinned(start, 1);
        join(owner);
        join(unlocker);
        if told {
            assert_eq!(is_pinned(start, 1), was_pinned, "the device uses it");
            assert!(take(&pool).is_err(), "the device uses it");
        }
        work.end();
        let again = take(&pool).expect("the page is idle now");
        assert!(is_pinned(address(&again), again.len()));
        drop(again);
        end(pool);
    });
}

#[test]
fn two_who_ask_the_same_event_do_not_both_get_the_memory_and_one_does() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let work = work_on(&block);
        drop(block);
        work.end();
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || take(&pool))
        };
        let both = [take(&pool), join(other)];
        assert_eq!(both.iter().filter(|taken| taken.is_ok()).count(), 1, "{both:?}");
        drop(both);
        end(pool);
    });
}

#[test]
fn two_who_ask_while_a_block_returns_get_memory_of_their_own() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(2);
        let blocks = [1, 2].map(|_| take(&pool).expect("there are two pages"));
        let works = blocks.each_ref().map(work_on);
        let device = device(&works[1]);
        works[0].end();
        drop(blocks);
        let other = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || take(&pool))
        };
        let (mine, theirs) = (take(&pool), join(other));
        join(device);
        let taken: Vec<_> = [mine, theirs].into_iter().flatten().collect();
        assert!(!taken.is_empty(), "a page was idle");
        if let [mine, theirs] = &taken[..] {
            assert_ne!(address(mine), address(theirs));
            assert!(works[1].is_over());
        }
        drop(taken);
        end(pool);
    });
}

#[test]
fn memory_whose_work_failed_is_never_handed_out_again() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let (work, start) = (work_on(&block), address(&block));
        let device = {
            let work = Arc::clone(&work);
            thread::spawn(move || work.fail())
        };
        let owner = thread::spawn(move || drop(block));
        assert!(take(&pool).is_err(), "nobody knows whether the device uses the page");
        join(owner);
        join(device);
        assert!(take(&pool).is_err(), "nobody knows whether the device uses the page");
        assert_eq!(pool.stats().expect("it is our process's").quarantined_bytes, os::page_size());
        end(pool);
        assert!(os::is_mapped(start), "it stays, for good");
    });
}

#[test]
fn memory_that_the_device_uses_is_not_given_back_to_the_system() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let (work, start) = (work_on(&block), address(&block));
        let owner = thread::spawn(move || drop(block));
        let trimmer = {
            let pool = Arc::clone(&pool);
            thread::spawn(move || pool.trim().expect("the system takes everything back"))
        };
        work.end();
        assert!(os::is_mapped(start), "it was not done when that was looked at last");
        join(owner);
        let early = join(trimmer);
        assert_eq!(early + pool.trim().expect("the system takes everything back"), os::page_size());
        assert!(!os::is_mapped(start), "it was done");
        end(pool);
    });
}

#[test]
fn a_pool_that_closes_while_memory_returns_unmaps_it_after_its_work_and_is_gone_then() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let (work, start, inner) = (work_on(&block), address(&block), Arc::downgrade(&pool.inner));
        let owner = thread::spawn(move || drop(block));
        let closer = thread::spawn(move || drop(pool));
        work.end();
        assert!(os::is_mapped(start), "it was not done when that was looked at last");
        join(owner);
        join(closer);
        unfinished::finish();
        assert!(!os::is_mapped(start), "it was done");
        assert_eq!(inner.strong_count(), 0, "the pool is gone");
    });
}

#[test]
fn a_pool_that_closes_while_memory_is_unlocked_and_returns_leaves_nothing() {
    in_every_order(SWITCHES, || {
        let pool = pool_with(1, true);
        let block = take(&pool).expect("there is a page that can be locked");
        let (start, inner) = (address(&block), Arc::downgrade(&pool.inner));
        let owner = thread::spawn(move || drop(block));
        let unlocker = thread::spawn(move || unpin(start).expect("the system unlocks it"));
        drop(pool);
        join(owner);
        join(unlocker);
        unfinished::finish();
        assert!(!os::is_mapped(start), "nobody uses it");
        assert_eq!(inner.strong_count(), 0, "the pool is gone");
    });
}

#[test]
fn a_closed_pool_that_two_look_after_is_not_forgotten_before_its_work_is_done() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(2);
        let blocks = [1, 2].map(|_| take(&pool).expect("there are two pages"));
        let works = blocks.each_ref().map(work_on);
        let (starts, inner) = (blocks.each_ref().map(address), Arc::downgrade(&pool.inner));
        let [first, second] = blocks;
        drop(first);
        drop(pool); // closes it
        works[0].end();
        let other = thread::spawn(unfinished::finish);
        let owner = thread::spawn(move || drop(second));
        unfinished::finish();
        works[1].end();
        assert!(os::is_mapped(starts[1]), "it was not done when that was looked at last");
        join(owner);
        join(other);
        unfinished::finish();
        assert!(starts.iter().all(|start| !os::is_mapped(*start)), "all is done");
        assert_eq!(inner.strong_count(), 0, "the pool is gone");
    });
}

#[test]
fn who_waits_for_memory_gets_it_when_it_returns_and_needs_no_clock_for_that() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let waiter = wait_for_memory(&pool);
        drop(block);
        join(waiter).expect("it came back");
        end(pool);
    });
}

#[test]
fn who_waits_for_memory_gets_it_when_its_work_is_done() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let work = work_on(&block);
        let waiter = wait_for_memory(&pool);
        drop(block);
        work.end();
        join(waiter).expect("its work is done");
        end(pool);
    });
}

#[test]
fn who_waits_for_memory_is_told_when_the_pool_closes() {
    in_every_order(SWITCHES, || {
        let pool = pool_of(1);
        let block = take(&pool).expect("there is a page");
        let waiter = wait_for_memory(&pool);
        pool.close().expect("nothing is idle");
        assert!(matches!(join(waiter), Err(Error::Closed)));
        drop(block);
        end(pool);
    });
}

/// Waits for a page on a thread of its own, and drops it there.
fn wait_for_memory(pool: &Arc<Pool>) -> JoinHandle<Result<()>> {
    let pool = Arc::clone(pool);
    let wait = move || pool.take_within(os::page_size(), None, &mut |_, _| ControlFlow::Continue(())).map(drop);
    thread::spawn(wait)
}

fn defer(range: &Range<usize>, event: Arc<dyn Event>) -> Result<()> {
    find(range)?.defer(event)
}

/// Does work on a thread of its own.
fn device(work: &Arc<Work>) -> JoinHandle<()> {
    let work = Arc::clone(work);
    thread::spawn(move || work.end())
}
