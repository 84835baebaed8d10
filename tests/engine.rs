//! The registration engine, and what is above it, over a driver that a test makes up: what no CUDA driver does.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::books::{adopt_for, device_options, device_pool, says};
use common::maps::{Memory, is_locked, is_unlocked, is_unmapped, locked_bytes};
use common::process::alone;
use common::{GIB, MIB, address, go_on, is_pinned, page, pinned_ranges, region_of, stats};
use pinpool::driver::engine::{Cut, Registrations};
use pinpool::driver::{Device, DeviceId, Ending, Method, Registering, Request, Sizes};
use pinpool::pinned::{Adopted, Pinned, Released, leaked_bytes};
use pinpool::pool::unpin_within;
use pinpool::registry::shared::is_registered;
use pinpool::{Error, Pages, Pool, Result};

/// What a device was asked for: a start and a length, behind `+` to register and `-` to unregister.
type Log = Arc<Mutex<Vec<(char, &'static str, usize, usize)>>>;

/// A device that does as it is told, and writes it down.
#[derive(Debug)]
struct Made {
    kind: &'static str,
    ordinal: u32,
    alignment: usize,
    sizes: Sizes,
    log: Log,
    /// The next calls that are refused: how many go by first, for `+` and for `-`.
    refuse: Mutex<Vec<(char, usize)>>,
    /// It still knows what was unregistered.
    lingers: Mutex<bool>,
    /// The next range that it registers it gives up at once.
    fumbles: Mutex<bool>,
}

impl Made {
    fn new(kind: &'static str, ordinal: u32, log: &Log) -> Self {
        let sizes = Sizes { largest: 64 * GIB, usual: GIB };
        let (refuse, lingers, fumbles) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { kind, ordinal, alignment: 1, sizes, log: Arc::clone(log), refuse, lingers, fumbles }
    }

    fn refuse(&self, call: char, after: usize) {
        self.refuse.lock().expect("no panic").push((call, after));
    }

    fn linger(&self, lingers: bool) {
        *self.lingers.lock().expect("no panic") = lingers;
    }

    fn called(&self, call: char, request: &Request) -> Result<()> {
        let mut refuse = self.refuse.lock().expect("no panic");
        let due = refuse.iter().position(|&(refused, after)| refused == call && after == 0);
        for (_, after) in refuse.iter_mut().filter(|(refused, after)| *refused == call && *after > 0) {
            *after -= 1;
        }
        if let Some(due) = due {
            refuse.remove(due);
            return Err(self.refusal(if call == '+' { "register" } else { "unregister" }, request.len));
        }
        self.log.lock().expect("no panic").push((call, self.kind, request.address, request.len));
        Ok(())
    }

    fn refusal(&self, call: &'static str, bytes: usize) -> Error {
        let (device, code_name) = (Some(self.id().to_string().into()), "NO".into());
        Error::Driver { driver: "Made", call, code: 13, code_name, device, bytes, advice: "nothing helps" }
    }
}

impl Device for Made {
    fn id(&self) -> DeviceId {
        DeviceId { kind: self.kind, ordinal: self.ordinal, uuid: [0; 16] }
    }

    fn method(&self) -> Method {
        Method::HostRegister
    }

    fn sizes(&self) -> Sizes {
        self.sizes
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn is_too_large(&self, _: &Error) -> bool {
        false
    }

    fn serves(&self, kind: &str, ordinal: u32) -> bool {
        (self.kind, self.ordinal) == (kind, ordinal)
    }

    fn register(&self, request: &Request) -> Result<()> {
        self.called('+', request)?;
        if !std::mem::take(&mut *self.fumbles.lock().expect("no panic")) {
            return Ok(());
        }
        self.called('-', request)?;
        let (device, why) = (self.id().to_string().into(), "update it".to_owned());
        Err(Error::Lingering { device, address: request.address, bytes: request.len, why })
    }

    fn unregister(&self, request: &Request) -> Result<Ending> {
        self.called('-', request)?;
        Ok(if *self.lingers.lock().expect("no panic") { Ending::Lingering } else { Ending::Done })
    }

    fn has_forgotten(&self, _: &Request) -> bool {
        !*self.lingers.lock().expect("no panic")
    }
}

fn devices(made: &[&Arc<Made>]) -> Vec<Arc<dyn Device>> {
    made.iter().map(|&device| Arc::clone(device) as Arc<dyn Device>).collect()
}

fn taken(log: &Log) -> Vec<(char, &'static str, usize, usize)> {
    std::mem::take(&mut *log.lock().expect("no panic"))
}

const REQUEST: Request = Request { address: 1 << 46, len: 64 * MIB, read_only: false };

#[test]
fn devices_come_in_order_and_go_in_reverse() {
    let log = Log::default();
    let made = ["a", "b", "c"].map(|kind| Arc::new(Made::new(kind, 0, &log)));
    let devices = devices(&made.each_ref());
    let all = |call: char| ["a", "b", "c"].map(|kind| (call, kind, REQUEST.address, REQUEST.len));
    let registrations = Registrations::make(&devices, &REQUEST, Cut::Whole, &mut go_on).expect("they take it");
    assert_eq!(taken(&log), all('+'));
    assert!(["a", "b", "c"].iter().all(|kind| registrations.serves(kind, 0) && !registrations.serves(kind, 1)));
    registrations.end().expect("they take it");
    registrations.end().expect("a second time does nothing");
    let mut reverse = all('-');
    reverse.reverse();
    assert_eq!(taken(&log), reverse);
    made[2].refuse('+', 0);
    let refused = Registrations::make(&devices, &REQUEST, Cut::Whole, &mut go_on).expect_err("the third does not");
    says(&refused.error, &["Made: register on c:0 of 67108864 bytes answered 13 (NO)"]);
    assert!(refused.stuck.is_none());
    assert_eq!(taken(&log), [all('+')[0], all('+')[1], reverse[1], reverse[2]]);
}

#[test]
fn a_refused_end_keeps_that_registration_and_those_before_it() {
    let log = Log::default();
    let made = ["a", "b", "c"].map(|kind| Arc::new(Made::new(kind, 0, &log)));
    let registrations =
        Registrations::make(&devices(&made.each_ref()), &REQUEST, Cut::Whole, &mut go_on).expect("they take it");
    made[1].refuse('-', 0);
    assert!(registrations.end().is_err());
    assert!(registrations.serves("a", 0) && registrations.serves("b", 0) && !registrations.serves("c", 0));
    assert_eq!(registrations.bytes().len(), 2);
    registrations.end().expect("it refused once");
    let order: Vec<_> = taken(&log).into_iter().filter(|call| call.0 == '-').map(|call| call.1).collect();
    assert!(order == ["c", "b", "a"] && registrations.are_forgotten());
}

#[test]
fn ranges_grow_to_whole_units_of_the_driver() {
    let log = Log::default();
    let mut made = Made::new("a", 0, &log);
    (made.alignment, made.sizes.usual) = (64 << 10, 16 * MIB);
    let request = Request { address: REQUEST.address + 100, len: 40 * MIB, read_only: false };
    let device = devices(&[&Arc::new(made)]);
    let registrations = Registrations::make(&device, &request, Cut::Pieces, &mut go_on).expect("it takes them");
    let calls = taken(&log);
    assert_eq!((calls[0].2, calls.iter().map(|call| call.3).sum()), (REQUEST.address, (40 * MIB) + (64 << 10)));
    assert!(calls.len() == 3 && calls.iter().all(|call| (call.2 | call.3).is_multiple_of(64 << 10)), "{calls:x?}");
    registrations.end().expect("it takes them");
}

#[test]
fn a_caller_who_stops_between_pieces_finds_everything_undone() {
    let log = Log::default();
    let mut made = Made::new("a", 0, &log);
    made.sizes.usual = 16 * MIB;
    let made = devices(&[&Arc::new(made)]);
    let mut seen = Vec::new();
    let mut stop_at_half = |done: usize, total: usize| {
        seen.push((done, total));
        if done == total / 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let refused = Registrations::make(&made, &REQUEST, Cut::Pieces, &mut stop_at_half).expect_err("stopped");
    assert!(matches!(refused.error, Error::Interrupted) && refused.stuck.is_none());
    assert_eq!(seen, [(16 * MIB, 64 * MIB), (32 * MIB, 64 * MIB)]);
    assert_eq!(taken(&log).into_iter().map(|call| call.0).collect::<String>(), "++--");
}

#[test]
fn what_lingers_is_kept_until_the_driver_has_forgotten_it() {
    alone("what_lingers_is_kept_until_the_driver_has_forgotten_it", || {
        let log = Log::default();
        let made = Arc::new(Made::new("a", 0, &log));
        let device = devices(&[&made]);
        let registering = Registering { devices: &device, required: true };
        made.linger(true);
        let pinned = Pinned::allocate(MIB, &region_of(Pages::Base), &registering, &mut go_on).expect("a region");
        let range = pinned.region().address()..pinned.region().address() + MIB;
        assert!(is_registered(range.start, MIB, "a", 0));
        let Ok(Released::Lingering(pinned)) = pinned.release() else { panic!("the driver knows it still") };
        assert!(is_locked(&range) && pinned_ranges() == 0 && leaked_bytes() == 0);
        let Ok(Released::Lingering(pinned)) = pinned.release() else { panic!("the driver knows it still") };
        made.linger(false);
        assert!(matches!(pinned.release(), Ok(Released::Gone)) && is_unmapped(&range));
        let calls: String = taken(&log).into_iter().map(|call| call.0).collect();
        assert_eq!((calls.as_str(), locked_bytes()), ("+-", 0), "it is unregistered once");

        made.linger(true);
        drop(Pinned::allocate(MIB, &region_of(Pages::Base), &registering, &mut go_on).expect("a region"));
        assert_eq!((leaked_bytes(), locked_bytes()), (MIB, MIB), "nobody is left to ask the driver again");
    });
}

#[test]
fn a_pool_keeps_what_lingers_in_its_budget_and_gives_it_back_later() {
    alone("a_pool_keeps_what_lingers_in_its_budget_and_gives_it_back_later", || {
        let log = Log::default();
        let made = Arc::new(Made::new("a", 0, &log));
        let pool = device_pool(4 * MIB, &devices(&[&made]));
        made.linger(true);
        let block = pool.take(3 * MIB).expect("room");
        let range = address(&block)..address(&block) + 3 * MIB;
        drop(block);
        assert_eq!(pool.trim().expect("it is no error"), 0);
        let stats = pool.stats().expect("ours");
        assert_eq!((stats.pending_bytes, stats.reserved_bytes, stats.leaked_bytes), (3 * MIB, 3 * MIB, 0));
        assert!(stats.cached_bytes == 0 && is_locked(&range));
        let refusal = pool.take(2 * MIB).expect_err("the memory is still there");
        assert!(matches!(refusal, Error::OutOfPinnedMemory { pending, .. } if pending == 3 * MIB), "{refusal}");
        made.linger(false);
        drop(pool.take(2 * MIB).expect("the driver has forgotten it, and nobody had to trim"));
        drop(pool);
        assert!(is_unmapped(&range) && (locked_bytes(), leaked_bytes()) == (0, 0));
    });
}

#[test]
fn borrowed_memory_may_go_when_the_driver_has_forgotten_it() {
    alone("borrowed_memory_may_go_when_the_driver_has_forgotten_it", || {
        let log = Log::default();
        let made = Arc::new(Made::new("a", 0, &log));
        let memory = Memory::new(2);
        made.linger(true);
        // SAFETY: the memory outlives the adoption.
        let mut adopted = unsafe { adopt_for(&devices(&[&made]), memory.start(), 2 * page()) }.expect("it takes it");
        adopted.release().expect("the driver says yes");
        assert!(adopted.is_released() && !adopted.registrations().are_forgotten() && pinned_ranges() == 0);
        made.linger(false);
        assert!(adopted.registrations().are_forgotten());
    });
}

/// The first refusal is told, and the pages stay until the driver has forgotten them.
#[test]
fn what_a_driver_gives_up_and_knows_still_when_it_refuses_is_stuck() {
    let log = Log::default();
    let made = ["a", "b"].map(|kind| Arc::new(Made::new(kind, 0, &log)));
    let devices = devices(&made.each_ref());
    made[1].linger(true);
    *made[1].fumbles.lock().expect("no panic") = true;
    let refused = Registrations::make(&devices, &REQUEST, Cut::Whole, &mut go_on).expect_err("the second fumbles");
    says(&refused.error, &["b:0's driver still knows 0x400000000000+67108864", "do not use this memory", "update it"]);
    let stuck = refused.stuck.expect("b knows it");
    assert!(!stuck.are_forgotten() && stuck.bytes().is_empty());
    stuck.end().expect("nothing is registered");
    assert_eq!(
        taken(&log).into_iter().map(|call| (call.0, call.1)).collect::<Vec<_>>(),
        [('+', "a"), ('+', "b"), ('-', "b"), ('-', "a")]
    );
    made[1].linger(false);
    assert!(stuck.are_forgotten());
}

#[test]
fn forgetting_is_awaited_until_the_limit() {
    let log = Log::default();
    let made = Arc::new(Made::new("a", 0, &log));
    let registrations = Registrations::make(&devices(&[&made]), &REQUEST, Cut::Whole, &mut go_on).expect("it takes it");
    made.linger(true);
    registrations.end().expect("the driver says yes");
    assert!(!registrations.await_forgotten(Duration::ZERO, &mut go_on).expect("nobody stops it"));
    let mut stop = |_, _| ControlFlow::Break(());
    assert!(matches!(registrations.expect_forgotten(&mut stop), Err(Error::Interrupted)));
    assert!(registrations.expect_forgotten(&mut forget_at_third_look(&made)).is_ok());
    assert!(registrations.are_none());
    assert!(registrations.await_forgotten(Duration::ZERO, &mut stop).expect("there is nothing to wait for"));
}

/// While it is asked, others ask, too: each of them hears that it is not forgotten.
#[test]
fn what_lingers_is_not_forgotten_for_anybody_while_the_driver_is_asked() {
    let log = Log::default();
    let made = Arc::new(Made::new("a", 0, &log));
    let registrations = Registrations::make(&devices(&[&made]), &REQUEST, Cut::Whole, &mut go_on).expect("it takes it");
    made.linger(true);
    registrations.end().expect("the driver says yes");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!((0..5_000).all(|_| !registrations.are_forgotten())));
        }
    });
    made.linger(false);
    assert!(registrations.are_forgotten());
}

/// A progress callback.
fn forget_at_third_look(made: &Made) -> impl FnMut(usize, usize) -> ControlFlow<()> + '_ {
    let mut looks = 0;
    move |_, _| {
        looks += 1;
        made.linger(looks < 3);
        ControlFlow::Continue(())
    }
}

#[test]
fn unpinning_waits_until_the_driver_has_forgotten_the_block() {
    alone("unpinning_waits_until_the_driver_has_forgotten_the_block", || {
        let log = Log::default();
        let made = Arc::new(Made::new("a", 0, &log));
        let pool = device_pool(8 * MIB, &devices(&[&made]));
        let block = pool.take(3 * MIB).expect("room");
        let own = address(&block)..address(&block) + 3 * MIB;
        made.linger(true);
        let stopped = unpin_within(own.start, &mut |_, _| {
            assert!(!is_pinned(&block) && is_locked(&own), "nobody finds it meanwhile");
            ControlFlow::Break(())
        });
        assert!(matches!(stopped, Err(Error::Interrupted)));
        assert!(is_pinned(&block) && is_locked(&own) && !is_registered(own.start, 1, "a", 0));
        assert!(unpin_within(own.start, &mut forget_at_third_look(&made)).expect("it is forgotten"));
        assert!(!is_pinned(&block) && is_unlocked(&own));
        assert_eq!(taken(&log).into_iter().map(|call| call.0).collect::<String>(), "+-");
        drop(block);
        assert!(is_unmapped(&own) && stats(&pool).reserved_bytes == 0);
    });
}

#[test]
fn a_block_whose_driver_does_not_forget_it_stays_mapped_and_unused() {
    alone("a_block_whose_driver_does_not_forget_it_stays_mapped_and_unused", || {
        let log = Log::default();
        let made = Arc::new(Made::new("a", 0, &log));
        let pool = device_pool(3 * MIB, &devices(&[&made]));
        let block = pool.take(3 * MIB).expect("room");
        let own = address(&block)..address(&block) + 3 * MIB;
        made.linger(true);
        assert!(unpin_within(own.start, &mut |_, _| ControlFlow::Break(())).is_err());
        drop(block);
        assert_eq!((stats(&pool).pending_bytes, stats(&pool).reserved_bytes), (3 * MIB, 3 * MIB));
        assert!(is_locked(&own) && pinned_ranges() == 0 && pool.take(1).is_err());
        made.linger(false);
        assert!(is_registered(address(&pool.take(3 * MIB).expect("it is forgotten")), 3 * MIB, "a", 0));
        drop(pool);
        assert_eq!((locked_bytes(), leaked_bytes()), (0, 0));
    });
}

#[test]
fn a_range_that_is_pinned_already_is_shared_where_its_devices_are_enough() {
    alone("a_range_that_is_pinned_already_is_shared_where_its_devices_are_enough", || {
        let log = Log::default();
        let made = ["a", "b"].map(|kind| Arc::new(Made::new(kind, 0, &log)));
        let (both, first) = (devices(&made.each_ref()), devices(&[&made[0]]));
        let memory = Memory::new(2);
        // SAFETY: the memory outlives the adoptions.
        let adopt = |devices: &[Arc<dyn Device>]| unsafe { adopt_for(devices, memory.start(), 2 * page()) };
        let owner = adopt(&first).expect("it takes it");
        let shared = [adopt(&first), adopt(&[])].map(|shared| shared.expect("it is registered already"));
        let refused = adopt(&both).expect_err("it is not registered with b");
        assert!(matches!(refused.error, Error::Unsupported { .. }) && !refused.stuck);
        says(&refused.error, &["registering this range with b:0", "close that registration first"]);
        let lenient = Registering { devices: &both, required: false };
        // SAFETY: the memory outlives the adoption.
        let lenient = unsafe { Adopted::adopt(memory.start(), 2 * page(), &lenient, &mut go_on) }.expect("locked");
        assert!(lenient.refusal().is_some() && is_registered(memory.start(), 2 * page(), "a", 0));
        assert_eq!(taken(&log).len(), 1);
        drop((owner, shared));
        assert!(is_registered(memory.start(), 2 * page(), "a", 0) && is_locked(&memory.range()));
        made[0].refuse('-', 0);
        drop(lenient);
        assert_eq!(leaked_bytes(), 2 * page(), "the last owner's refusal counts");
        std::mem::forget(memory);
    });
}

#[test]
fn a_pool_that_fails_on_the_third_of_four_devices_undoes_the_first_two() {
    alone("a_pool_that_fails_on_the_third_of_four_devices_undoes_the_first_two", || {
        let log = Log::default();
        let made = ["a", "b", "c", "d"].map(|kind| Arc::new(Made::new(kind, 0, &log)));
        let pool = device_pool(8 * MIB, &devices(&made.each_ref()));
        made[2].refuse('+', 0);
        assert!(pool.take(MIB).is_err());
        assert_eq!(taken(&log).into_iter().map(|call| call.0).collect::<String>(), "++--");
        assert_eq!((pool.stats().expect("ours").reserved_bytes, locked_bytes(), pinned_ranges()), (0, 0, 0));
        let block = pool.take(MIB).expect("it refused once");
        assert!(["a", "b", "c", "d"].iter().all(|kind| is_registered(address(&block), MIB, kind, 0)));
        assert_eq!(pool.stats().expect("ours").registered_bytes.len(), 4);
        // One of them keeps it: the region stays, though the others have let go.
        made[1].refuse('-', 0);
        drop(block);
        says(&pool.close().expect_err("one refuses"), &["unregister on b:0"]);
        assert_eq!((pool.stats().expect("ours").leaked_bytes, locked_bytes()), (MIB, MIB));
    });
}

#[test]
fn devices_that_cannot_share_a_range_cannot_share_a_pool() {
    let log = Log::default();
    let made = [0, 1].map(|ordinal| Arc::new(Made::new("a", ordinal, &log)));
    let refusal = Pool::new(device_options(MIB, &devices(&made.each_ref()))).expect_err("one range, one device");
    says(&refusal, &["one pool for a:0 and a:1", "use one pool a device"]);
}

#[test]
fn regions_that_are_gone_leave_nothing_on_the_heap() {
    alone("regions_that_are_gone_leave_nothing_on_the_heap", || {
        // SAFETY: takes nothing, and only counts.
        let heap_bytes = || unsafe { libc::mallinfo2() }.uordblks;
        let log = Log::default();
        let device = devices(&[&Arc::new(Made::new("a", 0, &log))]);
        let registering = Registering { devices: &device, required: true };
        let round = || {
            let pinned = Pinned::allocate(page(), &region_of(Pages::Base), &registering, &mut go_on).expect("a region");
            assert!(matches!(pinned.release(), Ok(Released::Gone)));
            taken(&log).clear();
        };
        (0..10).for_each(|_| round());
        let before = heap_bytes();
        (0..500).for_each(|_| round());
        assert!(heap_bytes() < before + 4096, "{} bytes for 500 regions", heap_bytes() - before);
    });
}
