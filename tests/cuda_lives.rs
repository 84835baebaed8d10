//! A CUDA driver and the life of the process: forks, threads, a driver that is gone first, and every order of exit.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::cell::RefCell;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use common::books::{
    Books, adopt_for, block_is_registered, device_options, device_pool, driver_answer, is_registered, says,
};
use common::driver::{Fake, cuda};
use common::maps::{Memory, is_unlocked, locked_bytes};
use common::process::{alone, in_forked_child};
use common::{MIB, page, pinned_ranges};
use pinpool::driver::Device;
use pinpool::pinned::{Adopted, leaked_bytes};
use pinpool::{Block, Error, Pool};

/// What a program holds when it forks or ends.
struct Held {
    adopted: Adopted,
    memory: Memory,
    blocks: Vec<Block>,
    pool: Pool,
    devices: Vec<Arc<dyn Device>>,
}

impl Held {
    fn new(fake: &Fake) -> Self {
        let (devices, memory) = (fake.devices(2), Memory::new(4));
        let pool = device_pool(16 * MIB, &devices);
        let blocks = [100, 3 * MIB, 4 * MIB].map(|len| pool.take(len).expect("room"));
        // SAFETY: the memory is dropped after the adoption.
        let adopted = unsafe { adopt_for(&devices, memory.start(), 4 * page()) }.expect("it is there");
        Self { adopted, memory, blocks: blocks.into_iter().skip(1).collect(), pool, devices }
    }
}

#[test]
fn a_forked_child_asks_nothing_of_the_driver() {
    alone("a_forked_child_asks_nothing_of_the_driver", || {
        let fake = Fake::new(2);
        let books = Books::open(&fake);
        let mut held = Some(Held::new(&fake));
        let calls = fake.all_calls();
        in_forked_child(|| {
            let mut held = held.take().expect("the child's own copy");
            assert!(!is_registered(held.memory.start(), 1, 0) && !block_is_registered(&held.blocks[0], 0));
            held.adopted.release().expect("it is the parent's");
            assert!(held.adopted.is_released());
            held.pool.close().expect("it is the parent's to close");
            assert!(held.pool.trim().is_err() && held.pool.take(10).is_err());
            let own = Memory::new(1);
            // SAFETY: the memory outlives the adoption.
            drop(unsafe { adopt_for(&[], own.start(), page()) }.expect("without devices"));
            drop(device_pool(MIB, &[]).take(MIB).expect("without devices"));
            drop(held);
            assert_eq!((fake.all_calls(), fake.wrong()), (calls, vec![]));
            assert_eq!((leaked_bytes(), locked_bytes()), (0, 0));
        });
        assert_eq!((fake.all_calls(), fake.live().len()), (calls, 4), "the parent has what it had");
        drop(held);
        books.close(&fake);
    });
}

#[test]
fn a_forked_child_is_told_that_its_parents_device_is_not_its_own() {
    alone("a_forked_child_is_told_that_its_parents_device_is_not_its_own", || {
        let fake = Fake::new(2);
        let books = Books::open(&fake);
        let devices = fake.devices(2);
        let calls = fake.all_calls();
        in_forked_child(|| {
            let refusal = Pool::new(device_options(8 * MIB, &devices)).and_then(|pool| pool.take(MIB));
            says(&refusal.expect_err("the device is the parent's"), &["fork", "spawn"]);
            let memory = Memory::new(1);
            // SAFETY: the memory outlives the adoption.
            let refusal =
                unsafe { adopt_for(&devices, memory.start(), page()) }.expect_err("the device is the parent's");
            says(&refusal.error, &["fork", "spawn"]);
            assert!(is_unlocked(&memory.range()) && pinned_ranges() == 0);
            assert_eq!((fake.all_calls(), fake.wrong()), (calls, vec![]));
        });
        drop(devices);
        books.close(&fake);
    });
}

#[test]
fn a_child_forked_before_the_driver_is_used_has_one_of_its_own() {
    alone("a_child_forked_before_the_driver_is_used_has_one_of_its_own", || {
        let fake = Fake::new(2);
        let use_it = || {
            let books = Books::open(&fake);
            drop(Held::new(&fake));
            books.close(&fake);
        };
        in_forked_child(use_it);
        assert_eq!(fake.all_calls(), 0);
        use_it();
        in_forked_child(|| {
            let refusal = cuda().open(Some(fake.path()), 0).expect_err("the driver is the parent's");
            assert!(matches!(refusal, Error::DriverUnavailable { absent: false, .. }));
            says(&refusal, &["cuInit answered 3", "forked after it was initialized; use spawn"]);
        });
    });
}

#[test]
fn eight_threads_register_and_unregister_a_thousand_times() {
    alone("eight_threads_register_and_unregister_a_thousand_times", || {
        let fake = Fake::new(2);
        let (books, devices) = (Books::open(&fake), fake.devices(2));
        let common = Memory::new(1);
        std::thread::scope(|scope| {
            for number in 0..8_usize {
                let (fake, devices, common) = (&fake, &devices, &common);
                scope.spawn(move || {
                    let own = Memory::new(2);
                    for round in 0..1000 {
                        let memory = if (round + number) % 4 == 0 { common } else { &own };
                        let (start, len) = (memory.start(), memory.range().len());
                        // SAFETY: the memory outlives the adoption.
                        let mut adopted = unsafe { adopt_for(devices, start, len) }.expect("it is there");
                        assert!(is_registered(start, len, 0) && is_registered(start + 1, len - 1, 1));
                        assert!(fake.is_live(start, len) && !is_registered(start, len + 1, 0));
                        adopted.release().expect("the driver takes it");
                        assert!(!fake.is_live(own.start(), 1) && !is_registered(own.start(), 1, 0));
                    }
                    assert_eq!(fake.current(), 0);
                });
            }
        });
        assert_eq!(fake.calls("cuMemHostRegister_v2"), fake.calls("cuMemHostUnregister"));
        drop(devices);
        books.close(&fake);
    });
}

#[test]
fn eight_threads_grow_and_trim_one_pool() {
    alone("eight_threads_grow_and_trim_one_pool", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(64 * MIB, &fake.devices(1));
        std::thread::scope(|scope| {
            for number in 0..8 {
                let pool = &pool;
                scope.spawn(move || {
                    for round in 0..50 {
                        let block = pool.take(MIB + (number + round) % 5 * page()).expect("room");
                        assert!(block_is_registered(&block, 0));
                        if round % 3 == 0 {
                            drop(block);
                            pool.trim().expect("the driver takes it");
                        }
                    }
                });
            }
        });
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn a_driver_that_is_gone_first_has_forgotten_everything() {
    alone("a_driver_that_is_gone_first_has_forgotten_everything", || {
        let fake = Fake::new(2);
        let mut held = Held::new(&fake);
        fake.teardown();
        let refusal = held.pool.take(5 * MIB).expect_err("the driver is gone");
        assert_eq!(driver_answer(&refusal).1, 4);
        says(&refusal, &["the driver is shutting down"]);
        held.adopted.release().expect("the driver maps it no more");
        assert!(is_unlocked(&held.memory.range()));
        held.blocks.clear();
        held.pool.close().expect("the driver maps nothing any more");
        assert_eq!(held.pool.stats().expect("ours").reserved_bytes, 0);
        drop(held);
        assert_eq!((locked_bytes(), pinned_ranges(), leaked_bytes()), (0, 0, 0));
        assert_eq!((fake.wrong(), fake.depth_of_all()), (vec![], 0));
        assert!(matches!(cuda().find(Some(fake.path())), Err(Error::DriverUnavailable { absent: false, .. })));
    });
}

/// What was held at exit, and the driver, for those who come after `main`.
static HELD: Mutex<Option<Held>> = Mutex::new(None);
static FAKE: OnceLock<Fake> = OnceLock::new();

thread_local! {
    static OF_THE_THREAD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

fn keep(held: Held) {
    *HELD.lock().expect("no panic") = Some(held);
}

extern "C" fn drop_held() {
    drop(HELD.lock().expect("no panic").take());
    let fake = FAKE.get().expect("it was made");
    let left = (leaked_bytes(), locked_bytes(), pinned_ranges(), fake.wrong().len());
    if left != (0, 0, 0, 0) {
        // SAFETY: ends the process.
        unsafe { libc::_exit(9) };
    }
}

extern "C" fn teardown() {
    FAKE.get().expect("it was made").teardown();
}

fn at_exit(handler: extern "C" fn()) {
    // SAFETY: the handler uses what lives as long as the process.
    assert_eq!(unsafe { libc::atexit(handler) }, 0);
}

type Order = (&'static str, fn(Held));

/// Handlers run the last first.
const ORDERS: [Order; 9] = [
    ("nothing is dropped", keep),
    ("everything is forgotten", std::mem::forget),
    ("the driver goes first, and then what is held", |held| {
        keep(held);
        at_exit(drop_held);
        at_exit(teardown);
    }),
    ("what is held goes first, and then the driver", |held| {
        keep(held);
        at_exit(teardown);
        at_exit(drop_held);
    }),
    ("blocks outlive their pool and its devices", |held| {
        let Held { adopted, memory, blocks, pool, devices } = held;
        drop((pool, devices));
        std::mem::forget((blocks, adopted, memory));
    }),
    ("the main thread's own", |held| OF_THE_THREAD.set(Some(held))),
    ("another thread's own", |held| {
        std::thread::spawn(|| OF_THE_THREAD.set(Some(held))).join().expect("no panic");
        assert_eq!((leaked_bytes(), locked_bytes(), pinned_ranges()), (0, 0, 0));
    }),
    ("a thread is at it", |held| {
        std::thread::spawn(move || {
            loop {
                drop(held.pool.take(2 * MIB));
                drop(held.pool.trim());
            }
        });
    }),
    ("a thread is at it, and the driver goes", |held| {
        std::thread::spawn(move || {
            loop {
                drop(held.pool.take(2 * MIB));
                drop(held.pool.trim());
            }
        });
        at_exit(teardown);
    }),
];

/// Names the order in which a process is to end.
const ROLE: &str = "PINPOOL_TEST_EXIT";

#[test]
fn a_process_ends_in_peace_in_every_order() {
    const TEST: &str = "a_process_ends_in_peace_in_every_order";
    if let Ok(role) = std::env::var(ROLE) {
        // SAFETY: takes a number only; a process that takes so long hangs.
        unsafe { libc::alarm(60) };
        let (_, order) = ORDERS.iter().find(|order| order.0 == role).expect("an order");
        let fake = FAKE.get_or_init(|| Fake::new(2));
        order(Held::new(fake));
        std::process::exit(42);
    }
    for (order, _) in ORDERS {
        let program = std::env::current_exe().expect("the test's own program");
        let arguments = [TEST, "--exact", "--nocapture", "--test-threads=1"];
        let mut process = Command::new(program);
        process.args(arguments).env(ROLE, order).env("ASAN_OPTIONS", "detect_leaks=0"); // some orders forget things
        let output = process.output().expect("it starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(42), "{order}: {}\n{stderr}", output.status);
    }
}
