//! Streams and events of a CUDA driver: whose copies still run, and what is refused.

mod common;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::thread;

use common::books::{Books, device_pool};
use common::driver::{EVENT_CALLS, Fake};
use common::maps::is_locked;
use common::process::{alone, in_forked_child};
use common::{KIB, MIB, Random, address, defer, page, record_stream, stats};
use pinpool::driver::{Event, Stream};
use pinpool::pool::unpin;
use pinpool::{Block, Error, Pool};

const INVALID_HANDLE: u32 = 400;
const LAUNCH_FAILED: u32 = 719;

fn range(block: &Block) -> Range<usize> {
    address(block)..address(block) + block.len()
}

fn record(block: &Block, stream: usize) -> pinpool::Result<()> {
    record_stream(&range(block), stream)
}

/// What a driver answered.
fn code(answer: pinpool::Result<()>) -> u32 {
    match answer {
        Err(Error::Driver { code, .. }) => u32::try_from(code).expect("a code"),
        other => panic!("no answer of the driver: {other:?}"),
    }
}

/// A driver with a pool on its first device, and a program that has made a stream.
struct Scene {
    fake: Fake,
    books: Books,
    pool: Pool,
    context: usize,
    stream: usize,
}

impl Scene {
    fn new() -> Self {
        let fake = Fake::new(2);
        let books = Books::open(&fake);
        let pool = device_pool(8 * MIB, &fake.devices(1));
        let context = fake.enter_context(0);
        let stream = fake.stream_create(context);
        Self { fake, books, pool, context, stream }
    }

    fn take(&self) -> Block {
        self.pool.take(page()).expect("room")
    }

    /// Ends it all: everything is given back, and nobody did wrong but in these ways.
    fn end(self, provoked: &[&str]) {
        self.fake.advance_all();
        self.pool.close().expect("nothing is refused");
        drop(self.pool);
        assert_eq!(self.fake.live_events(), 0);
        self.fake.leave_context(0);
        self.books.close_but_for(&self.fake, provoked);
    }
}

#[test]
fn a_recorded_stream_keeps_a_block_until_its_copies_are_done() {
    alone("a_recorded_stream_keeps_a_block_until_its_copies_are_done", || {
        let scene = Scene::new();
        let mut target = vec![0_u8; page()];
        let mut block = scene.take();
        block.as_mut_slice().fill(7);
        let start = address(&block);
        assert_eq!(scene.fake.copy_async(scene.stream, target.as_mut_ptr() as usize, start, page()), 0);
        record(&block, scene.stream).expect("a stream");
        assert_eq!(scene.fake.current(), scene.context, "the caller's context is back");
        let calls = scene.fake.all_calls();
        drop(block);
        assert_eq!(scene.fake.all_calls(), calls, "nothing is asked while a block goes");
        let mut other = scene.take();
        other.as_mut_slice().fill(9);
        assert_ne!(address(&other), start);
        scene.fake.advance(scene.stream, 1);
        assert!(target.iter().all(|&byte| byte == 7), "copied before anybody else wrote there");
        assert_ne!(address(&scene.take()), start, "the event comes after the copy");
        scene.fake.advance(scene.stream, 1);
        let held = [scene.take(), scene.take()];
        assert!(held.iter().any(|block| address(block) == start));
        drop((held, other));
        scene.end(&[]);
    });
}

#[test]
fn a_stream_of_any_device_of_the_driver_will_do() {
    alone("a_stream_of_any_device_of_the_driver_will_do", || {
        let scene = Scene::new();
        scene.fake.leave_context(0);
        let other = scene.fake.enter_context(1);
        let stream = scene.fake.stream_create(other);
        for (stream, name) in [(stream, "named"), (0, "legacy"), (1, "legacy"), (2, "per thread")] {
            let block = scene.take();
            let start = address(&block);
            record(&block, stream).expect("registrations are portable");
            assert_eq!(scene.fake.current(), other);
            drop(block);
            assert_eq!(stats(&scene.pool).pending_bytes, page(), "{name}");
            let second = scene.take();
            assert_ne!(address(&second), start);
            scene.fake.advance_all();
            assert_eq!(address(&scene.take()), start, "{name}");
        }
        scene.fake.stream_destroy(stream);
        scene.fake.leave_context(1);
        scene.fake.enter_context(0);
        scene.end(&[]);
    });
}

#[test]
fn a_default_stream_is_that_of_the_device_it_is_said_to_be_of() {
    alone("a_default_stream_is_that_of_the_device_it_is_said_to_be_of", || {
        let scene = Scene::new();
        scene.fake.leave_context(0);
        scene.fake.enter_context(1);
        let (mut target, mut block) = (vec![0_u8; page()], scene.take());
        block.as_mut_slice().fill(7);
        let start = address(&block);
        assert_eq!(scene.fake.copy_async(0, target.as_mut_ptr() as usize, start, page()), 0, "on the second device");
        let second = scene.fake.current();
        scene.fake.bare().push(scene.context);
        record_stream(&range(&block), Stream { handle: 0, ordinal: Some(1) }).expect("a default stream");
        assert_eq!(scene.fake.current(), scene.context);
        scene.fake.bare().pop();
        drop(block);
        let other = scene.take();
        assert_ne!(address(&other), start, "the first device is idle, the second is not");
        assert_eq!(scene.fake.current(), second);
        scene.fake.advance_all();
        assert!(target.iter().all(|&byte| byte == 7));
        assert_eq!(address(&scene.take()), start);
        drop(other);
        scene.fake.leave_context(1);
        scene.fake.enter_context(0);
        scene.end(&[]);
    });
}

#[test]
fn a_device_that_nobody_uses_has_no_streams_and_gets_no_context() {
    alone("a_device_that_nobody_uses_has_no_streams_and_gets_no_context", || {
        let scene = Scene::new();
        for ordinal in [1, 7] {
            let block = scene.take();
            let start = address(&block);
            let refusal =
                record_stream(&range(&block), Stream { handle: 0, ordinal: Some(ordinal) }).expect_err("unused");
            assert!(refusal.to_string().contains(&format!("cuda:{ordinal} is not in use")), "{refusal}");
            drop(block);
            scene.pool.trim().expect("nothing is refused");
            assert_eq!(stats(&scene.pool).quarantined_bytes, 0, "nothing was queued, so nothing is lost: {start:#x}");
        }
        assert_eq!((scene.fake.contexts_made(1), scene.fake.retained(1)), (0, 0));
        scene.end(&[]);
    });
}

#[test]
fn a_default_stream_without_a_context_is_that_of_the_pools_device() {
    alone("a_default_stream_without_a_context_is_that_of_the_pools_device", || {
        let scene = Scene::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                let block = scene.take();
                assert_eq!(scene.fake.current(), 0);
                record(&block, 0).expect("the device's");
                assert_eq!(scene.fake.current(), 0);
            });
        });
        assert_eq!(stats(&scene.pool).pending_bytes, page());
        scene.end(&[]);
    });
}

#[test]
fn what_a_refused_stream_still_does_to_a_block_is_not_known_until_a_call_succeeds() {
    alone("what_a_refused_stream_still_does_to_a_block_is_not_known_until_a_call_succeeds", || {
        let scene = Scene::new();
        let gone = scene.fake.stream_create(scene.context);
        scene.fake.stream_destroy(gone);
        let (lost, kept) = (scene.take(), scene.take());
        let refusal = record(&lost, gone).expect_err("it was destroyed").to_string();
        assert!(refusal.contains("no such stream"), "{refusal}");
        assert_eq!(code(record(&kept, gone)), INVALID_HANDLE);
        record(&kept, scene.stream).expect("a live one");
        let (lost_start, kept_start) = (address(&lost), address(&kept));
        drop((lost, kept));
        scene.fake.advance_all();
        let blocks: Vec<_> = (0..8).map(|_| address(&scene.take())).collect();
        assert!(blocks.contains(&kept_start) && !blocks.contains(&lost_start));
        let now = stats(&scene.pool);
        assert_eq!(now.quarantined_bytes, page());
        assert!(now.quarantine_reason.expect("why").contains("cuStreamGetCtx"));
        scene.pool.close().expect("the rest is idle");
        assert!(is_locked(&(lost_start..lost_start + page())));
        assert_eq!(scene.fake.live().len(), 1, "what may be in use stays registered");
    });
}

#[test]
fn a_capture_is_not_broken_and_its_blocks_are_never_reused() {
    alone("a_capture_is_not_broken_and_its_blocks_are_never_reused", || {
        let scene = Scene::new();
        let (captured, other) = (scene.take(), scene.take());
        record(&other, scene.stream).expect("not captured yet");
        scene.fake.begin_capture(scene.stream);
        assert!(matches!(record(&captured, scene.stream), Err(Error::Captured { .. })));
        let start = address(&captured);
        drop(other);
        drop(scene.pool.take(MIB).expect("growing breaks no capture"));
        scene.pool.trim().expect("giving back breaks none"); // asks the event of `other`, too
        assert_eq!(scene.fake.end_capture(scene.stream), 0, "the capture is whole");
        record(&captured, scene.stream).expect("captured no more");
        drop(captured);
        scene.fake.advance_all();
        assert!((0..100).all(|_| address(&scene.take()) != start), "the graph may be launched at any time");
        assert_eq!(stats(&scene.pool).quarantined_bytes, page());
        assert_eq!(scene.fake.wrong(), Vec::<String>::new());
    });
}

#[test]
fn the_legacy_stream_is_not_touched_while_a_stream_that_waits_for_it_is_captured() {
    alone("the_legacy_stream_is_not_touched_while_a_stream_that_waits_for_it_is_captured", || {
        let scene = Scene::new();
        let blocking = scene.fake.blocking_stream_create(scene.context);
        let block = scene.take();
        scene.fake.begin_capture(blocking);
        assert!(matches!(record(&block, 0), Err(Error::Captured { .. })));
        assert_eq!(scene.fake.end_capture(blocking), 0);
        assert_eq!(scene.fake.wrong(), Vec::<String>::new());
    });
}

#[test]
fn a_device_that_fails_quarantines_what_it_may_use() {
    alone("a_device_that_fails_quarantines_what_it_may_use", || {
        let scene = Scene::new();
        let block = scene.take();
        let start = address(&block);
        record(&block, scene.stream).expect("a stream");
        drop(block);
        scene.fake.break_context(0, LAUNCH_FAILED);
        scene.pool.trim().map(drop).unwrap_or_default();
        let now = stats(&scene.pool);
        assert_eq!((now.quarantined_bytes, now.pending_bytes), (page(), 0));
        assert!(now.quarantine_reason.expect("why").contains("CUDA_ERROR_LAUNCH_FAILED"));
        assert!(is_locked(&(start..start + page())));
    });
}

#[test]
fn a_driver_that_is_gone_moves_no_more_bytes() {
    alone("a_driver_that_is_gone_moves_no_more_bytes", || {
        let scene = Scene::new();
        let block = scene.take();
        record(&block, scene.stream).expect("a stream");
        drop(block);
        scene.fake.teardown();
        scene.pool.close().expect("what is gone needs no farewell");
        assert_eq!((stats(&scene.pool).reserved_bytes, stats(&scene.pool).pending_bytes), (0, 0));
    });
}

#[test]
fn events_are_made_once_and_used_again() {
    alone("events_are_made_once_and_used_again", || {
        let scene = Scene::new();
        for _ in 0..1000 {
            let block = scene.take();
            record(&block, scene.stream).expect("a stream");
            drop(block);
            scene.fake.advance_all();
        }
        assert!(scene.fake.calls("cuEventCreate") <= 2, "{}", scene.fake.calls("cuEventCreate"));
        let block = scene.take();
        for _ in 0..1000 {
            record(&block, scene.stream).expect("a stream"); // weights that stay: one event tells of all copies
        }
        assert!(scene.fake.live_events() <= 4, "{}", scene.fake.live_events());
        drop(block);
        scene.end(&[]);
    });
}

#[test]
fn any_call_about_events_may_fail_and_the_block_is_not_reused() {
    alone("any_call_about_events_may_fail_and_the_block_is_not_reused", || {
        const UNKNOWN: u32 = 999;
        let scene = Scene::new();
        for call in EVENT_CALLS {
            scene.fake.fail(call, 0, UNKNOWN);
            let block = scene.take();
            let start = address(&block);
            let refused = record(&block, scene.stream).is_err();
            drop(block);
            let blocks: Vec<_> = (0..8).map(|_| scene.take()).collect();
            assert!(blocks.iter().all(|block| address(block) != start), "{call}");
            scene.fake.fail(call, 0, 0);
            let harmless = ["cuEventQuery", "cuEventDestroy_v2", "cuThreadExchangeStreamCaptureMode"].contains(&call);
            assert_eq!(refused, !harmless, "{call}");
            assert_eq!(scene.fake.current(), scene.context, "{call}");
        }
    });
}

#[test]
fn a_driver_without_events_says_so_and_registers_all_the_same() {
    alone("a_driver_without_events_says_so_and_registers_all_the_same", || {
        let fake = Fake::lacking(1, &["without_events"]);
        let pool = device_pool(MIB, &fake.devices(1));
        let block = pool.take(10).expect("memory needs no events");
        let refusal = record(&block, 0).expect_err("nobody can tell");
        assert!(matches!(refusal, Error::Unsupported { .. }) && refusal.to_string().contains("cuEvent"), "{refusal}");
    });
}

#[test]
fn where_streams_have_no_identity_no_event_stands_for_another() {
    alone("where_streams_have_no_identity_no_event_stands_for_another", || {
        for (missing, kept) in [(&[][..], 1), (&["without_stream_id"][..], 5)] {
            let fake = Fake::lacking(1, missing);
            let pool = device_pool(MIB, &fake.devices(1));
            let stream = fake.stream_create(fake.enter_context(0));
            let block = pool.take(10).expect("room");
            for _ in 0..5 {
                record(&block, stream).expect("a stream");
            }
            let start = address(&block);
            drop(block);
            assert_eq!(fake.pending_work(), 5);
            fake.advance(stream, 4);
            assert_ne!(address(&pool.take(10).expect("room")), start, "the last is not done");
            assert_eq!(fake.live_events() - u64::from(missing.is_empty()), kept, "{missing:?}");
            fake.advance(stream, 1);
            assert!([pool.take(10), pool.take(10)].iter().flatten().any(|block| address(block) == start));
        }
    });
}

#[test]
fn unlocking_waits_for_nobody_and_refuses_while_copies_run() {
    alone("unlocking_waits_for_nobody_and_refuses_while_copies_run", || {
        let scene = Scene::new();
        let block = scene.pool.take(MIB).expect("room");
        record(&block, scene.stream).expect("a stream");
        assert!(unpin(address(&block)).expect_err("in flight").to_string().contains("not done"));
        drop(block);
        scene.end(&[]);
    });
}

#[test]
fn a_forked_child_leaves_what_is_in_flight_to_its_parent() {
    alone("a_forked_child_leaves_what_is_in_flight_to_its_parent", || {
        let scene = Scene::new();
        let (pending, live) = (scene.take(), scene.take());
        record(&pending, scene.stream).expect("a stream");
        record(&live, scene.stream).expect("a stream");
        let live_range = range(&live);
        drop(pending);
        let calls = scene.fake.all_calls();
        let mut held = Some((scene, live));
        in_forked_child(|| {
            let (scene, live) = held.take().expect("the child's own copy");
            assert!(record_stream(&live_range, scene.stream).is_err());
            drop(live);
            drop(scene.pool);
            assert_eq!((scene.fake.all_calls(), scene.fake.wrong()), (calls, vec![]));
        });
        let (scene, live) = held.expect("the parent's own");
        drop(live);
        assert_eq!(stats(&scene.pool).pending_bytes, 2 * page());
        scene.end(&[]);
    });
}

/// Four threads copy out of blocks that they drop at once. Events come late and in no order of the threads. Every copy must
/// find what its own thread wrote, so no block was reused before its copy was done.
#[test]
fn a_million_reuses_tear_no_copy() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 250_000;
    const WORDS: usize = 4 * KIB / 8;
    /// Copies under way in a thread before it looks at them.
    const BATCH: usize = 50;
    const BLOCKS: usize = 150;
    alone("a_million_reuses_tear_no_copy", || {
        let fake = Fake::new(1);
        let pool = device_pool(BLOCKS * 4 * KIB, &fake.devices(1));
        let context = fake.enter_context(0);
        let streams: Vec<usize> = (0..THREADS).map(|_| fake.stream_create(context)).collect();
        let copy_out = |thread: usize| {
            let (stream, mut random) = (streams[thread], Random::new(thread as u64));
            let mut targets = vec![[0_u64; WORDS]; BATCH];
            for first in (0..ROUNDS).step_by(BATCH) {
                for (slot, target) in targets.iter_mut().enumerate() {
                    let word = ((thread * ROUNDS + first + slot) as u64).to_le_bytes();
                    let mut more = |_: usize, _: usize| {
                        fake.advance(stream, 4); // the device goes on while somebody waits
                        ControlFlow::Continue(())
                    };
                    let mut block = pool.take_within(4 * KIB, None, &mut more).expect("it waits");
                    block.as_mut_slice().chunks_exact_mut(8).for_each(|bytes| bytes.copy_from_slice(&word));
                    assert_eq!(fake.copy_async(stream, target.as_mut_ptr() as usize, address(&block), 4 * KIB), 0);
                    record(&block, stream).expect("a stream");
                    drop(block);
                    if random.below(4) == 0 {
                        let steps = u32::try_from(random.below(8)).expect("few");
                        fake.advance(streams[random.below(THREADS)], steps);
                    }
                }
                fake.advance(stream, u32::MAX);
                for (slot, target) in targets.iter().enumerate() {
                    let word = (thread * ROUNDS + first + slot) as u64;
                    assert!(target.iter().all(|&copied| copied == word), "round {word} was torn");
                }
            }
        };
        thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || copy_out(thread));
            }
        });
        let now = stats(&pool);
        assert_eq!((now.blocks, now.quarantined_bytes), (0, 0));
        assert!(now.reserved_bytes <= BLOCKS * 4 * KIB, "a million takes of {BLOCKS} blocks");
        assert!(fake.live_events() <= (2 * BLOCKS) as u64, "{}", fake.live_events());
        assert_eq!(fake.wrong(), Vec::<String>::new());
    });
}

#[test]
fn events_of_the_callers_own_and_of_the_driver_both_count() {
    #[derive(Debug)]
    struct Never;
    impl Event for Never {
        fn query(&self) -> Result<bool, String> {
            Ok(false)
        }
    }
    alone("events_of_the_callers_own_and_of_the_driver_both_count", || {
        let scene = Scene::new();
        let block = scene.take();
        record(&block, scene.stream).expect("a stream");
        defer(&range(&block), Arc::new(Never)).expect("live");
        drop(block);
        scene.fake.advance_all();
        scene.pool.trim().expect("nothing is refused");
        assert_eq!(stats(&scene.pool).pending_bytes, page());
    });
}
