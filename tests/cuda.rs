//! CUDA through a real `dlopen`, with the fake: what is found, which contexts are made, and what is registered.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use std::sync::Arc;

use common::books::{Books, adopt_for, block_is_registered, device_pool, driver_answer, is_registered, says};
use common::driver::{Fake, cuda};
use common::maps::Memory;
use common::process::alone;
use common::{KIB, MIB, address, page, pool};
use pinpool::Error;
use pinpool::driver::{Found, Method};

fn found(fake: &Fake) -> pinpool::Result<Vec<Found>> {
    cuda().find(Some(fake.path()))
}

/// Why the driver cannot be used, and whether it is not there at all.
fn unavailable(fake: &Fake) -> (String, bool) {
    for error in [found(fake).map(drop).err(), cuda().open(Some(fake.path()), 0).map(drop).err()] {
        let Some(Error::DriverUnavailable { driver: "CUDA", reason, absent }) = error else { panic!("{error:?}") };
        if fake.contexts_made(0) == 0 {
            return (reason, absent);
        }
    }
    panic!("a context was made");
}

#[test]
fn devices_are_found_with_names_and_identities_and_no_context() {
    alone("devices_are_found_with_names_and_identities_and_no_context", || {
        let fake = Fake::new(4);
        let books = Books::open(&fake);
        for (ordinal, device) in found(&fake).expect("four devices").into_iter().enumerate() {
            assert_eq!((device.id.kind, device.id.ordinal as usize), ("cuda", ordinal));
            assert_eq!(device.name, format!("Fake GPU {ordinal}"));
            assert_eq!(device.id.uuid[..15], *b"fake MIG UUID #", "the newer call tells MIG instances apart");
            assert_eq!((usize::from(device.id.uuid[15]), device.method), (ordinal, Ok(Method::HostRegister)));
            assert_eq!(device.id.to_string(), format!("cuda:{ordinal}"));
            assert_eq!(fake.contexts_made(ordinal as i32), 0);
        }
        assert_eq!((found(&fake).expect("again").len(), fake.calls("cuDevicePrimaryCtxRetain")), (4, 0));
        assert_eq!(cuda().current(Some(fake.path())).expect("it starts"), None);
        books.close(&fake);
    });
}

#[test]
fn a_driver_without_the_newer_uuid_is_asked_the_older_way() {
    alone("a_driver_without_the_newer_uuid_is_asked_the_older_way", || {
        let fake = Fake::lacking(1, &["without_uuid_v2"]);
        assert_eq!(&found(&fake).expect("one device")[0].id.uuid, b"fake GPU UUID #\0");
        drop(fake.device(0));
        assert_eq!(fake.wrong(), [""; 0]);
    });
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    alone("a_driver_that_does_not_start_says_why", || {
        let fake = Fake::new(1);
        let reasons = [
            (34, "stub library; take its folder off LD_LIBRARY_PATH", false),
            (100, "no device (is CUDA_VISIBLE_DEVICES empty, or the container without --gpus?)", true),
            (803, "different versions; reload the module, or reboot", false),
            (804, "forward-compatibility package does not support this GPU", false),
            (3, "forked after it was initialized; use spawn", false),
            (999, "see what nvidia-smi says", false),
        ];
        for (code, reason, absent) in reasons {
            fake.reset(1);
            fake.set("init_code", code);
            let (text, is_absent) = unavailable(&fake);
            assert!(text.contains(&format!("cuInit answered {code}: ")) && text.contains(reason), "{text}");
            assert!(text.contains(fake.path()) && is_absent == absent, "{text}");
            assert_eq!(fake.all_calls(), fake.calls("cuInit"), "nothing is asked of a driver that did not start");
        }
        fake.reset(0);
        assert!(unavailable(&fake).1, "no device");
        assert_eq!(fake.wrong(), [""; 0]);
    });
}

#[test]
fn a_library_that_is_missing_or_too_old_is_a_reason_in_words() {
    alone("a_library_that_is_missing_or_too_old_is_a_reason_in_words", || {
        for path in ["/nowhere/libcuda.so.1", "libcuda-of-nobody.so.7", "/proc/self/status"] {
            let refusal = cuda().find(Some(path)).expect_err("no library");
            assert!(matches!(refusal, Error::DriverUnavailable { absent: true, .. }), "{refusal:?}");
            says(&refusal, &["CUDA cannot be used: cannot load", path]);
        }
        let missing = [("without_register", "cuMemHostRegister_v2"), ("without_context_stack", "cuCtxPushCurrent_v2")];
        for (option, symbol) in missing {
            let fake = Fake::lacking(1, &[option]);
            let (reason, absent) = unavailable(&fake);
            assert!(reason.contains(&format!("no {symbol}: the driver is too old")) && !absent, "{reason}");
            assert_eq!(fake.all_calls(), 0, "a driver that cannot be used is not initialised");
        }
    });
}

#[test]
fn a_device_that_cannot_register_says_why_and_gets_no_context() {
    alone("a_device_that_cannot_register_says_why_and_gets_no_context", || {
        let fake = Fake::new(3);
        let books = Books::open(&fake);
        fake.set("register_supported@1", 0);
        fake.set("register_supported@2", 0);
        fake.set("ats@2", 1);
        let methods: Vec<_> = found(&fake).expect("three devices").into_iter().map(|found| found.method).collect();
        assert_eq!(methods[0], Ok(Method::HostRegister));
        let reasons = [(1, "HOST_REGISTER_SUPPORTED is 0"), (2, "host's own page tables, and needs no registration")];
        for (ordinal, reason) in reasons {
            assert!(methods[ordinal].as_ref().is_err_and(|why| why.contains(reason)), "{methods:?}");
            let refusal = cuda().open(Some(fake.path()), ordinal as u32).expect_err("it cannot");
            assert!(matches!(refusal, Error::Unsupported { .. }));
            says(&refusal, &[&format!("registering memory with cuda:{ordinal}"), reason]);
        }
        let refusal = cuda().open(Some(fake.path()), 3).expect_err("there are three");
        assert!(matches!(refusal, Error::DriverUnavailable { absent: false, .. }));
        says(&refusal, &["there is no cuda:3; the driver has 3 devices", "CUDA_VISIBLE_DEVICES"]);
        fake.set("compute_prohibited@0", 1);
        let refusal = cuda().open(Some(fake.path()), 0).expect_err("it lets nobody compute");
        assert_eq!(driver_answer(&refusal), ("cuDevicePrimaryCtxRetain", 999));
        says(&refusal, &["CUDA: cuDevicePrimaryCtxRetain on cuda:0 answered 999 (CUDA_ERROR_UNKNOWN)"]);
        assert!((0..3).all(|device| fake.contexts_made(device) == 0));
        books.close(&fake);
    });
}

#[test]
fn a_pool_without_devices_touches_no_driver() {
    alone("a_pool_without_devices_touches_no_driver", || {
        let fake = Fake::new(2);
        let books = Books::open(&fake);
        let pool = pool(8 * MIB);
        let block = pool.take(5 * MIB).expect("room");
        assert!(!block_is_registered(&block, 0));
        drop((block, pool));
        assert_eq!(fake.all_calls(), 0);
        books.close(&fake);
    });
}

#[test]
fn the_library_of_a_driver_is_never_unloaded() {
    alone("the_library_of_a_driver_is_never_unloaded", || {
        // No control handle, which would keep it loaded.
        let path = common::driver::compiled(&[]).into_os_string().into_string().expect("UTF-8");
        let is_loaded = || std::fs::read_to_string("/proc/self/maps").expect("procfs").contains(&path);
        assert!(!is_loaded());
        // Each on a thread of its own, whose end lets go of what it had of the library.
        let find = || assert_eq!(cuda().find(Some(&path)).expect("a driver").len(), 1);
        let open = || drop(cuda().open(Some(&path), 0).expect("one device"));
        std::thread::scope(|scope| scope.spawn(find).join().expect("no panic"));
        std::thread::scope(|scope| scope.spawn(open).join().expect("no panic"));
        assert!(is_loaded(), "its threads, exit handlers and caches would go, and cuInit must be paid for again");
    });
}

#[test]
fn one_primary_context_on_the_asked_device_alone_serves_all_pools() {
    alone("one_primary_context_on_the_asked_device_alone_serves_all_pools", || {
        let fake = Fake::new(4);
        let books = Books::open(&fake);
        let [first, second] = [(); 2].map(|()| device_pool(8 * MIB, &[fake.device(2)]));
        let blocks = [first.take(10).expect("room"), second.take(MIB).expect("room")];
        assert_eq!((fake.calls("cuDevicePrimaryCtxRetain"), fake.retained(2)), (1, 1));
        assert!([0, 1, 3].iter().all(|&device| fake.contexts_made(device) == 0));
        drop((first, second));
        assert!(blocks.iter().all(|block| fake.is_live(address(block), block.len())), "blocks outlive their pools");
        assert_eq!(fake.retained(2), 1, "and the context must outlive the registrations");
        drop(blocks);
        assert_eq!((fake.retained(2), fake.calls("cuDevicePrimaryCtxRelease_v2")), (0, 1));
        drop(fake.device(2));
        assert_eq!((fake.contexts_made(2), fake.calls("cuDevicePrimaryCtxRelease_v2")), (2, 2));
        books.close(&fake);
    });
}

#[test]
fn the_context_of_the_caller_stays_current() {
    alone("the_context_of_the_caller_stays_current", || {
        let fake = Fake::new(3);
        let books = Books::open(&fake);
        let mine = fake.enter_context(1);
        assert_eq!(cuda().current(Some(fake.path())).expect("it starts"), Some(1));
        let inside = Books::open(&fake);
        let pool = device_pool(8 * MIB, &[fake.device(0)]);
        let block = pool.take(MIB).expect("room");
        assert!(block_is_registered(&block, 0) && block_is_registered(&block, 1));
        assert_eq!((fake.current(), fake.retained(1), fake.contexts_made(1), fake.retained(0)), (mine, 1, 1, 1));
        assert_eq!((fake.contexts_made(2), fake.depth_of_all()), (0, 1));
        let on_a_thread = std::thread::scope(|scope| {
            let take = || (pool.take(2 * MIB).expect("room"), fake.current());
            scope.spawn(take).join().expect("no panic")
        });
        assert_eq!(on_a_thread.1, 0, "a thread without a context has none afterwards");
        fake.fail("cuMemHostRegister_v2", 1, 999);
        assert!(pool.take(3 * MIB).is_err());
        assert_eq!((fake.current(), fake.depth_of_all()), (mine, 1), "after a refusal, too");
        drop((block, on_a_thread, pool));
        inside.balance(&fake, &[]);
        fake.leave_context(1);
        books.close(&fake);
    });
}

#[test]
fn a_range_is_registered_once_for_all_cuda_devices() {
    alone("a_range_is_registered_once_for_all_cuda_devices", || {
        let fake = Fake::new(4);
        let books = Books::open(&fake);
        let devices = fake.devices(4);
        let pool = device_pool(8 * MIB, &devices);
        let block = pool.take(MIB).expect("room");
        let memory = Memory::new(4);
        // SAFETY: the memory outlives the adoption.
        let adopted = unsafe { adopt_for(&devices, memory.start(), 4 * page()) }.expect("it is there");
        assert_eq!(fake.calls("cuMemHostRegister_v2"), 2);
        for ordinal in 0..4 {
            assert!(block_is_registered(&block, ordinal) && is_registered(memory.start(), 4 * page(), ordinal));
        }
        assert!(!pinpool::registry::shared::is_registered(address(&block), MIB, "xpu", 0));
        assert_eq!(pool.stats().expect("ours").registered_bytes.values().sum::<usize>(), MIB);
        drop((adopted, block, pool, devices));
        books.close(&fake);
    });
}

#[test]
fn regions_are_registered_once_and_blocks_lie_inside_them() {
    alone("regions_are_registered_once_and_blocks_lie_inside_them", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(16 * MIB, &[fake.device(0)]);
        let small: Vec<_> = (1..100).map(|number| pool.take(number * 100).expect("room")).collect();
        assert_eq!((fake.calls("cuMemHostRegister_v2"), fake.live().len()), (1, 1), "one shared region");
        let large = pool.take(5 * MIB).expect("room");
        assert_eq!(fake.calls("cuMemHostRegister_v2"), 2, "and one that is a block's own");
        assert!(fake.live().contains(&(address(&large)..address(&large) + 5 * MIB)));
        for block in small.iter().chain([&large]) {
            assert!(fake.is_live(address(block), block.capacity()) && block_is_registered(block, 0));
            assert!(!is_registered(address(block), 16 * MIB, 0), "not beyond its region");
        }
        drop((small, large));
        let stats = pool.stats().expect("ours");
        assert_eq!(stats.registered_bytes["cuda:0"], stats.reserved_bytes);
        assert_eq!(stats.unregistered, None);
        let calls = fake.all_calls();
        for _ in 0..100 {
            let [block, other] = [100, 5 * MIB].map(|len| pool.take(len).expect("it is cached"));
            assert!(block_is_registered(&block, 0) && block_is_registered(&other, 0));
        }
        pool.take(64 * KIB).expect("there is a hole for it");
        assert_eq!(fake.all_calls(), calls, "reuse asks no driver");
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn an_open_device_is_shared_by_threads_that_ask_at_once() {
    alone("an_open_device_is_shared_by_threads_that_ask_at_once", || {
        let fake = Fake::new(2);
        let books = Books::open(&fake);
        for _ in 0..50 {
            let devices: Vec<_> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| fake.device(1))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            assert!(devices.windows(2).all(|pair| Arc::ptr_eq(&pair[0], &pair[1])));
            assert_eq!((fake.retained(1), fake.retained(0)), (1, 0), "who came late has let go again");
        }
        books.close(&fake);
    });
}
