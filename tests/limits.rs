//! How much may be locked: the memlock limit of a process without rights, and the memory that the machine has.
#![allow(unsafe_code)] // adopting means to vouch for the memory

mod common;

use common::maps::{Memory, locked_bytes};
use common::process::{alone, become_nobody, enter_user_namespace, in_forked_child, limit_memlock};
use common::{KIB, MIB, go_on, is_pinned, page, pinned_ranges, pool, region_of, try_adopt};
use pinpool::region::Region;
use pinpool::{Block, Error, Pages, Pool, PoolOptions};

fn assert_memlock(error: &Error, wanted: usize, locked: usize, limit: usize) {
    match error {
        Error::MemlockLimit { wanted: w, locked: l, soft, hard } => {
            assert_eq!((*w, *l, *soft, *hard), (wanted, locked, limit, limit));
        }
        other => panic!("{other:?} instead of the memlock limit"),
    }
    let text = error.to_string();
    for part in [&wanted.to_string(), &limit.to_string(), "ulimit -l", "--ulimit memlock", "CAP_IPC_LOCK"] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
}

fn default_pool() -> Pool {
    Pool::new(PoolOptions::default()).expect("a pool of nothing yet")
}

#[test]
fn a_request_over_the_memlock_limit_names_it_and_a_smaller_one_works() {
    alone("a_request_over_the_memlock_limit_names_it_and_a_smaller_one_works", || {
        become_nobody(8 * MIB);
        let pool = pool(64 * MIB);
        assert_memlock(&pool.take(16 * MIB).expect_err("too much"), 16 * MIB, 0, 8 * MIB);
        assert_eq!((locked_bytes(), pinned_ranges(), pool.stats().expect("ours").reserved_bytes), (0, 0, 0));
        let block = pool.take(4 * MIB).expect("half of the limit");
        assert!(is_pinned(&block) && locked_bytes() == 4 * MIB);
        assert_memlock(&pool.take(5 * MIB).expect_err("too much"), 5 * MIB, 4 * MIB, 8 * MIB);
        assert_memlock(&pool.reserve(6 * MIB, &mut go_on).expect_err("too much"), 6 * MIB, 4 * MIB, 8 * MIB);
        let rest = pool.take(4 * MIB).expect("the rest of the limit");
        assert!(is_pinned(&rest) && locked_bytes() == 8 * MIB);
        assert_eq!(pool.stats().expect("ours").reserved_bytes, 8 * MIB);
    });
}

#[test]
fn idle_memory_makes_way_under_the_memlock_limit() {
    alone("idle_memory_makes_way_under_the_memlock_limit", || {
        become_nobody(8 * MIB);
        let pool = pool(64 * MIB);
        for len in [8 * MIB, 3 * MIB, 7 * MIB, 10, 8 * MIB] {
            assert!(is_pinned(&pool.take(len).expect("what is idle is given up for it")));
        }
    });
}

#[test]
fn a_pool_without_a_budget_takes_the_memlock_limit_for_it() {
    alone("a_pool_without_a_budget_takes_the_memlock_limit_for_it", || {
        become_nobody(8 * MIB);
        let pool = default_pool();
        assert_eq!(pool.stats().expect("ours").max_bytes, 8 * MIB);
        assert_memlock(&pool.take(16 * MIB).expect_err("too much"), 16 * MIB, 0, 8 * MIB);
        let block = pool.take(8 * MIB).expect("all of it");
        assert_memlock(&pool.take(1).expect_err("one page more"), page(), 8 * MIB, 8 * MIB);
        drop(block);
        let blocks: Vec<Block> = (0..100).map(|_| pool.take(64 * KIB).expect("room")).collect();
        assert!(blocks.iter().all(is_pinned));
    });
}

#[test]
fn a_process_that_may_lock_nothing_is_told_of_the_limit() {
    alone("a_process_that_may_lock_nothing_is_told_of_the_limit", || {
        become_nobody(0);
        let explicit = pool(MIB).take(10).expect_err("not a page may be locked");
        assert!(matches!(explicit, Error::MemlockLimit { locked: 0, soft: 0, hard: 0, .. }), "{explicit:?}");
        let default = Pool::new(PoolOptions::default()).and_then(|pool| pool.take(10)).expect_err("as above");
        assert!(matches!(default, Error::MemlockLimit { soft: 0, hard: 0, .. }), "{default}");
    });
}

/// A pool grows for small requests by more than they ask for, which must not be what breaks the limit.
#[test]
fn a_small_request_fits_into_the_last_pages_of_the_limit() {
    alone("a_small_request_fits_into_the_last_pages_of_the_limit", || {
        become_nobody(8 * MIB);
        let pool = pool(64 * MIB);
        let large = pool.take(7 * MIB).expect("room");
        let small = pool.take(10).expect("a MiB is left, and a page is wanted");
        assert!(is_pinned(&large) && is_pinned(&small));
    });
}

#[test]
fn two_pools_share_the_limit() {
    alone("two_pools_share_the_limit", || {
        become_nobody(8 * MIB);
        let (one, other) = (default_pool(), default_pool());
        let block = one.take(6 * MIB).expect("room");
        assert_memlock(&other.take(3 * MIB).expect_err("too much"), 3 * MIB, 6 * MIB, 8 * MIB);
        assert!(is_pinned(&other.take(MIB).expect("the rest")) && is_pinned(&block));
        let late = default_pool();
        assert_eq!(late.stats().expect("ours").max_bytes, MIB, "what is locked already is not there to be had");
    });
}

#[test]
fn regions_and_adopted_ranges_heed_the_limit() {
    alone("regions_and_adopted_ranges_heed_the_limit", || {
        become_nobody(MIB);
        let refusal = Region::map(2 * MIB, &region_of(Pages::Base), &mut go_on).expect_err("too much");
        assert_memlock(&refusal, 2 * MIB, 0, MIB);
        let memory = Memory::new(2 * MIB / page());
        // SAFETY: the memory outlives the adoption.
        let adopt = |len| unsafe { try_adopt(memory.start(), len) };
        assert_memlock(&adopt(2 * MIB).expect_err("too much"), 2 * MIB, 0, MIB);
        assert_eq!((locked_bytes(), pinned_ranges()), (0, 0));
        let adopted = adopt(MIB).expect("all of the limit");
        assert_eq!((locked_bytes(), pinned_ranges()), (MIB, 1));
        drop(adopted);
    });
}

/// Rootless containers: the process shows every capability, and the kernel heeds none of them for the limit.
#[test]
fn a_capability_of_a_user_namespace_does_not_lift_the_limit() {
    alone("a_capability_of_a_user_namespace_does_not_lift_the_limit", || {
        in_forked_child(|| {
            enter_user_namespace();
            limit_memlock(8 * MIB);
            let refusal = pool(64 * MIB).take(16 * MIB).expect_err("the kernel refuses");
            assert_memlock(&refusal, 16 * MIB, 0, 8 * MIB);
            assert_eq!(default_pool().stats().expect("ours").max_bytes, 8 * MIB);
        });
    });
}

#[test]
fn more_than_the_machine_has_is_refused_before_it_is_tried() {
    alone("more_than_the_machine_has_is_refused_before_it_is_tried", || {
        let (pool, calls) = (pool(usize::MAX), pinpool::memory_calls());
        match pool.take(1 << 46) {
            Err(Error::OutOfPinnedMemory { wanted, limit, allocated: 0, cached: 0, pending: 0, budget, .. }) => {
                assert_eq!(wanted, 1 << 46);
                assert!(limit < 1 << 46 && (budget.contains("available") || budget.contains("control group")));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(pinpool::memory_calls(), calls);
    });
}
