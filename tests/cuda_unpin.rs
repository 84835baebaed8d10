//! Unpinning memory that is registered with CUDA devices: what has a region of its own is unregistered, and never used
//! again; what shares a region with others is unlocked, and found by nobody.
#![allow(unsafe_code)] // the helpers vouch for memory

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::books::{Books, block_is_registered, device_pool, driver_answer, says};
use common::driver::Fake;
use common::maps::{is_locked, is_mapped, is_unlocked, is_unmapped, locked_bytes};
use common::process::alone;
use common::seccomp::{Rule, refused};
use common::{MIB, address, go_on, is_pinned, os_answer, page, pinned_ranges, region_of, stats};
use pinpool::driver::{Device, DeviceId, Ending, Method, Registering, Request, Sizes};
use pinpool::pinned::{Pinned, leaked_bytes};
use pinpool::pool::unpin;
use pinpool::registry::shared::is_registered;
use pinpool::{Block, Error, Pages, Result};

const BUDGET: usize = 32 * MIB;
/// Large enough for a region of its own.
const LARGE: usize = 4 * MIB;

fn range(block: &Block) -> Range<usize> {
    address(block)..address(block) + block.capacity()
}

/// A device of the fake's under another vendor's name: CUDA's own registrations serve all CUDA devices at once.
#[derive(Debug)]
struct Renamed(Arc<dyn Device>);

const OTHER: &str = "other";

impl Device for Renamed {
    fn id(&self) -> DeviceId {
        DeviceId { kind: OTHER, ..self.0.id() }
    }

    fn method(&self) -> Method {
        self.0.method()
    }

    fn sizes(&self) -> Sizes {
        self.0.sizes()
    }

    fn alignment(&self) -> usize {
        self.0.alignment()
    }

    fn is_too_large(&self, refusal: &Error) -> bool {
        self.0.is_too_large(refusal)
    }

    fn serves(&self, kind: &str, ordinal: u32) -> bool {
        (kind, ordinal) == (OTHER, self.0.id().ordinal)
    }

    fn register(&self, request: &Request) -> Result<()> {
        self.0.register(request)
    }

    fn unregister(&self, request: &Request) -> Result<Ending> {
        self.0.unregister(request)
    }

    fn has_forgotten(&self, request: &Request) -> bool {
        self.0.has_forgotten(request)
    }
}

/// Two drivers with a device each. The second one's is called `OTHER`, and is the first to be unregistered.
struct TwoDrivers {
    fakes: [Fake; 2],
    books: [Books; 2],
}

impl TwoDrivers {
    fn new() -> Self {
        let fakes = [Fake::new(1), Fake::lacking(1, &["without_events"])];
        let books = fakes.each_ref().map(Books::open);
        Self { fakes, books }
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![self.fakes[0].device(0), Arc::new(Renamed(self.fakes[1].device(0)))]
    }

    fn live(&self) -> [Vec<Range<usize>>; 2] {
        self.fakes.each_ref().map(Fake::live)
    }

    fn close(&self) {
        self.books.iter().zip(&self.fakes).for_each(|(books, fake)| books.close(fake));
    }
}

/// Whether the registry calls the block registered with either vendor's device.
fn registered_with(block: &Block) -> [bool; 2] {
    ["cuda", OTHER].map(|kind| is_registered(address(block), block.len(), kind, 0))
}

#[test]
fn a_block_with_a_region_of_its_own_is_unregistered_and_keeps_its_bytes() {
    alone("a_block_with_a_region_of_its_own_is_unregistered_and_keeps_its_bytes", || {
        for count in [1, 2] {
            let fake = Fake::new(count);
            let books = Books::open(&fake);
            let pool = device_pool(BUDGET, &fake.devices(count));
            let (mut block, neighbour) = (pool.take(LARGE).expect("room"), pool.take(LARGE).expect("room"));
            block.as_mut_slice().fill(5);
            let (own, others) = (range(&block), range(&neighbour));
            assert_eq!(fake.live().len(), 2);
            assert!(unpin(own.end - 1).expect("driver and kernel take it"));
            assert!(!is_pinned(&block) && (0..count).all(|ordinal| !block_is_registered(&block, ordinal)));
            assert!(is_pinned(&neighbour) && (0..count).all(|ordinal| block_is_registered(&neighbour, ordinal)));
            assert_eq!(fake.live(), std::slice::from_ref(&others));
            assert!(is_unlocked(&own) && is_mapped(&own) && is_locked(&others));
            let now = stats(&pool);
            assert_eq!((locked_bytes(), now.locked_bytes, now.reserved_bytes), (LARGE, LARGE, 2 * LARGE));
            assert_eq!(now.registered_bytes.values().sum::<usize>(), LARGE);
            let unregistered = fake.calls("cuMemHostUnregister");
            assert!(!unpin(own.start).expect("it is unpinned already"));
            assert_eq!((fake.calls("cuMemHostUnregister"), unregistered), (1, 1), "it is unregistered once");
            block.as_mut_slice()[0] = 6;
            assert!(block.as_slice()[1..].iter().all(|&byte| byte == 5));
            drop(block);
            assert!(is_unmapped(&own), "nobody else may have it");
            assert_eq!((stats(&pool).reserved_bytes, stats(&pool).pending_bytes), (LARGE, 0));
            drop((neighbour, pool));
            books.close(&fake);
        }
    });
}

#[test]
fn the_next_owner_gets_registered_memory() {
    alone("the_next_owner_gets_registered_memory", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(LARGE, &fake.devices(1));
        for _ in 0..3 {
            let block = pool.take(LARGE).expect("room for one");
            assert!(is_pinned(&block) && block_is_registered(&block, 0) && is_locked(&range(&block)));
            assert_eq!(fake.live(), [range(&block)]);
            assert!(unpin(address(&block)).expect("driver and kernel take it"));
            assert_eq!((fake.live(), locked_bytes()), (vec![], 0));
        }
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn a_block_that_outlives_its_pool_is_unpinned_and_leaves_nothing() {
    alone("a_block_that_outlives_its_pool_is_unpinned_and_leaves_nothing", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(BUDGET, &fake.devices(1));
        let block = pool.take(LARGE).expect("room");
        let own = range(&block);
        pool.close().expect("nothing is idle");
        assert!(unpin(own.start).expect("driver and kernel take it"));
        assert!(is_unlocked(&own) && is_mapped(&own) && fake.live().is_empty());
        drop(block);
        assert!(is_unmapped(&own) && stats(&pool).reserved_bytes == 0);
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn a_driver_that_refuses_changes_nothing() {
    alone("a_driver_that_refuses_changes_nothing", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(LARGE, &fake.devices(1));
        let block = pool.take(LARGE).expect("room");
        let own = range(&block);
        for _ in 0..2 {
            fake.fail("cuMemHostUnregister", 1, 700);
            let refusal = unpin(own.start).expect_err("the driver refuses");
            assert_eq!(driver_answer(&refusal), ("cuMemHostUnregister", 700));
            assert!(!refusal.to_string().contains("others"), "{refusal}");
            assert!(is_pinned(&block) && block_is_registered(&block, 0) && is_locked(&own) && pinned_ranges() == 1);
            assert_eq!((fake.live(), stats(&pool).locked_bytes), (vec![own.clone()], LARGE));
        }
        drop(block);
        let block = pool.take(LARGE).expect("it is as good as ever");
        assert!(address(&block) == own.start && fake.live() == [own.clone()]);
        assert!(unpin(own.start).expect("nothing refuses now"));
        drop(block);
        assert!(is_unmapped(&own));
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn all_drivers_let_go_of_a_block() {
    alone("all_drivers_let_go_of_a_block", || {
        let drivers = TwoDrivers::new();
        let pool = device_pool(BUDGET, &drivers.devices());
        let block = pool.take(LARGE).expect("room");
        let own = range(&block);
        assert_eq!(drivers.live(), [vec![own.clone()], vec![own.clone()]]);
        assert!(unpin(own.start).expect("drivers and kernel take it"));
        assert_eq!((drivers.live(), registered_with(&block), locked_bytes()), ([vec![], vec![]], [false, false], 0));
        drop(block);
        assert!(is_unmapped(&own));
        drop(pool);
        drivers.close();
    });
}

#[test]
fn a_refusal_of_the_driver_that_is_asked_first_changes_nothing() {
    alone("a_refusal_of_the_driver_that_is_asked_first_changes_nothing", || {
        let drivers = TwoDrivers::new();
        let pool = device_pool(BUDGET, &drivers.devices());
        let block = pool.take(LARGE).expect("room");
        let own = range(&block);
        drivers.fakes[1].fail("cuMemHostUnregister", 1, 700);
        assert_eq!(driver_answer(&unpin(own.start).expect_err("it refuses")), ("cuMemHostUnregister", 700));
        assert_eq!((drivers.live(), registered_with(&block)), ([vec![own.clone()], vec![own.clone()]], [true, true]));
        assert!(is_pinned(&block) && is_locked(&own));
        drop(block);
        assert_eq!(address(&pool.take(LARGE).expect("room")), own.start, "it is as good as ever");
        drop(pool);
        drivers.close();
    });
}

#[test]
fn a_refusal_of_the_driver_that_is_asked_last_tells_that_the_other_has_let_go() {
    alone("a_refusal_of_the_driver_that_is_asked_last_tells_that_the_other_has_let_go", || {
        for again in [true, false] {
            let drivers = TwoDrivers::new();
            let pool = device_pool(BUDGET, &drivers.devices());
            let block = pool.take(LARGE).expect("room");
            let own = range(&block);
            for _ in 0..2 {
                drivers.fakes[0].fail("cuMemHostUnregister", 1, 700);
                let refusal = unpin(own.start).expect_err("it refuses");
                assert_eq!(driver_answer(&refusal), ("cuMemHostUnregister", 700));
                says(&refusal, &["on cuda:0", "still pinned", "others that have let go of it", "unpin it again"]);
                assert_eq!((drivers.live(), registered_with(&block)), ([vec![own.clone()], vec![]], [true, false]));
                assert!(is_pinned(&block) && is_locked(&own));
                assert_eq!((locked_bytes(), stats(&pool).locked_bytes), (LARGE, LARGE));
            }
            if again {
                assert!(unpin(own.start).expect("nothing refuses now"));
                assert_eq!((drivers.live(), locked_bytes()), ([vec![], vec![]], 0));
            }
            drop(block);
            assert!(is_unmapped(&own), "half registered, it is of no use to anybody");
            assert_eq!((stats(&pool).reserved_bytes, leaked_bytes()), (0, 0));
            let next = pool.take(LARGE).expect("room");
            assert_eq!(registered_with(&next), [true, true]);
            drop((next, pool));
            drivers.close();
        }
    });
}

#[test]
fn a_refused_unlock_after_the_driver_let_go_leaves_the_block_locked_only() {
    alone("a_refused_unlock_after_the_driver_let_go_leaves_the_block_locked_only", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(LARGE, &fake.devices(1));
        let block = pool.take(LARGE).expect("room");
        let own = range(&block);
        let refusal = refused(&[Rule::munlock(libc::ENOMEM)], || unpin(own.start)).expect_err("the kernel refuses");
        assert_eq!(os_answer(&refusal), ("munlock", libc::ENOMEM));
        assert!(is_pinned(&block) && is_locked(&own) && !block_is_registered(&block, 0) && fake.live().is_empty());
        assert_eq!(stats(&pool).locked_bytes, locked_bytes());
        assert!(unpin(own.start).expect("nothing refuses now"));
        assert!(is_unlocked(&own) && !is_pinned(&block));
        drop(block);
        assert!(block_is_registered(&pool.take(LARGE).expect("room"), 0));
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn a_block_of_a_shared_region_is_unlocked_and_its_neighbours_stay_registered() {
    alone("a_block_of_a_shared_region_is_unlocked_and_its_neighbours_stay_registered", || {
        let fake = Fake::new(2);
        let books = Books::open(&fake);
        let pool = device_pool(BUDGET, &fake.devices(2));
        let (block, neighbour) = (pool.take(3 * page()).expect("room"), pool.take(10).expect("room"));
        let (live, own) = (fake.live(), range(&block));
        assert!(live.len() == 1 && live[0].start <= own.start && own.end <= live[0].end);
        assert!(unpin(own.start).expect("the kernel takes it"));
        assert!(!is_pinned(&block) && !block_is_registered(&block, 0), "nobody finds it");
        assert!(is_unlocked(&own) && is_pinned(&neighbour) && block_is_registered(&neighbour, 1));
        assert_eq!((fake.live(), locked_bytes()), (live.clone(), live[0].len() - own.len()));
        drop(block);
        let block = pool.take(3 * page()).expect("room");
        assert!(address(&block) == own.start && block_is_registered(&block, 0) && is_locked(&own), "pinned again");
        assert_eq!((fake.live(), locked_bytes()), (live.clone(), live[0].len()));
        assert!(unpin(own.start).expect("the kernel takes it"));
        drop((block, neighbour, pool));
        assert!(is_unmapped(&live[0]));
        books.close(&fake);
    });
}

#[test]
fn a_block_that_fills_a_shared_region_is_unregistered() {
    alone("a_block_that_fills_a_shared_region_is_unregistered", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let pool = device_pool(BUDGET, &fake.devices(1));
        pool.reserve(page(), &mut go_on).expect("room");
        let all = fake.live().remove(0);
        let block = pool.take(all.len()).expect("it is there");
        assert_eq!(range(&block), all);
        assert!(unpin(all.start).expect("driver and kernel take it"));
        assert!(fake.live().is_empty() && is_unlocked(&all));
        drop(block);
        assert!(is_unmapped(&all) && stats(&pool).reserved_bytes == 0);
        drop(pool);
        books.close(&fake);
    });
}

#[test]
fn a_region_that_has_lost_its_registrations_is_not_pinned_again() {
    alone("a_region_that_has_lost_its_registrations_is_not_pinned_again", || {
        let fake = Fake::new(1);
        let books = Books::open(&fake);
        let devices = fake.devices(1);
        let registering = Registering { devices: &devices, required: true };
        let pinned = Pinned::allocate(MIB, &region_of(Pages::Base), &registering, &mut go_on).expect("a region");
        let all = pinned.region().address()..pinned.region().address() + MIB;
        let part = all.start..all.start + page();
        assert!(pinned.unpin(&part, &mut go_on).expect("the kernel takes it") && !pinned.has_lost_registrations());
        assert!(!pinned.unpin(&all, &mut go_on).expect("not all of it is pinned"));
        pinned.repin(&part).expect("the kernel takes it");
        assert!(is_registered(all.start, MIB, "cuda", 0) && fake.live() == [all.clone()]);
        assert!(pinned.unpin(&all, &mut go_on).expect("driver and kernel take it") && pinned.has_lost_registrations());
        says(&pinned.repin(&all).expect_err("it would not be registered"), &["has ended its registrations", "release"]);
        assert!(is_unlocked(&all) && pinned_ranges() == 0 && pinned.registered().is_empty());
        drop((pinned, devices));
        assert!(is_unmapped(&all));
        books.close(&fake);
    });
}
