//! An offload loop: what it frees and takes again costs no system call, and what it gives up is really given back.

mod common;

use common::maps::{is_locked, locked_bytes, resident_bytes};
use common::process::{alone, memlock_limit};
use common::seccomp::{Rule, refuse};
use common::{GIB, KIB, MIB, address, is_pinned, page, pool, pool_of};
use pinpool::{Block, Pool, RegionOptions, memory_calls};

/// The memory calls of pinpool, all refused. malloc's munmap is too: nothing here shrinks its heap.
fn refuse_memory_calls() {
    let private = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    let calls = [libc::SYS_mbind, libc::SYS_madvise, libc::SYS_mlock, libc::SYS_munlock, libc::SYS_munmap];
    let mut rules = calls.map(|call| Rule::every(call, libc::EPERM)).to_vec();
    rules.push(Rule::every(libc::SYS_mmap, libc::EPERM).with(3, private));
    refuse(&rules);
}

fn lap(pool: &Pool, sizes: &[usize], blocks: &mut Vec<Block>) {
    for &size in sizes {
        blocks.push(pool.take(size).expect("the memory is there"));
    }
    blocks.clear();
}

#[test]
fn the_second_lap_makes_no_memory_call() {
    alone("the_second_lap_makes_no_memory_call", || {
        // Small ones and large ones, several of a size, and sizes that differ within their last page.
        let sizes = [10, 4 * KIB, 5_000, 64 * KIB, 64 * KIB, 300 * KIB, MIB, MIB + 1, MIB + 2, 2 * MIB - 5];
        let pool = pool(7 * MIB + 512 * KIB);
        let mut blocks = Vec::with_capacity(sizes.len());
        lap(&pool, &sizes, &mut blocks);
        let (before, misses) = (memory_calls(), pool.stats().expect("ours").misses);
        refuse_memory_calls();
        for _ in 0..100 {
            lap(&pool, &sizes, &mut blocks);
        }
        assert!(pool.take(MIB + MIB / 4).is_err(), "a new region would need the calls that are refused");
        for &size in sizes.iter().rev() {
            blocks.push(pool.take(size).expect("the memory is there, in any order"));
        }
        assert!(blocks.iter().all(is_pinned));
        assert_eq!(pool.stats().expect("ours").misses, misses);
        let calls_of_the_refused_one = 1;
        assert!(memory_calls() <= before + calls_of_the_refused_one, "{} calls", memory_calls() - before);
    });
}

#[test]
fn a_lap_on_another_thread_makes_no_memory_call() {
    alone("a_lap_on_another_thread_makes_no_memory_call", || {
        let sizes = [10, 100 * KIB, MIB, MIB];
        let pool = pool(7 * MIB);
        lap(&pool, &sizes, &mut Vec::new());
        let before = memory_calls();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| lap(&pool, &sizes, &mut Vec::new())).join().expect("the memory is there");
            }
        });
        assert_eq!(memory_calls(), before);
    });
}

#[test]
fn small_blocks_stay_cut_while_the_budget_lasts() {
    alone("small_blocks_stay_cut_while_the_budget_lasts", || {
        let pool = pool(7 * MIB);
        let sizes: Vec<usize> = (1..=64).map(|pages| pages * page()).collect();
        let mut blocks = Vec::new();
        lap(&pool, &sizes[..32], &mut blocks);
        let first = memory_calls();
        lap(&pool, &sizes[..32], &mut blocks);
        assert_eq!(memory_calls(), first, "the same sizes again");
        drop(pool.take(33 * page()).expect("room"));
        let second = memory_calls();
        lap(&pool, &sizes[..32], &mut blocks);
        assert_eq!(memory_calls(), second, "one more size has not broken up the others");
    });
}

#[test]
fn a_trimmed_gibibyte_is_gone_from_memory() {
    alone("a_trimmed_gibibyte_is_gone_from_memory", || {
        // What this process may lock, where that is less, as long as it stands out from noise.
        let len = memlock_limit().map_or(GIB, |limit| limit.min(GIB));
        let noise = len / 16;
        assert!(len >= 64 * MIB, "RLIMIT_MEMLOCK allows {len} bytes: run this test with `ulimit -l 65536` or as root");
        let pool = pool_of(len, RegionOptions::default());
        let before = resident_bytes();
        let block = pool.take(len).expect("this test needs a GiB of memory");
        assert!(is_pinned(&block) && locked_bytes() == len && is_locked(&(address(&block)..address(&block) + len)));
        assert!(resident_bytes() + noise > before + len);
        drop(block);
        assert!(resident_bytes() + noise > before + len && locked_bytes() == len, "idle memory stays");
        assert_eq!(pool.trim().expect("the kernel takes it"), len);
        assert!(resident_bytes() < before + noise, "{} bytes stayed", resident_bytes() - before);
        assert_eq!((locked_bytes(), pool.stats().expect("ours").reserved_bytes), (0, 0));
    });
}
