//! What a pool costs: hits by size, among many sizes, on many threads and beside many live blocks; misses; and the
//! heap, plain and locked, beside them.

mod peer;

use std::cell::LazyCell;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use peer::{LockedHeap, label, may_lock};
use pinpool::{Block, Pool, PoolOptions, RegionOptions};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const HIT_SIZES: [usize; 5] = [PAGE, 64 << 10, MIB, 16 * MIB, 64 * MIB];
const MISS_SIZES: [usize; 2] = [MIB, 16 * MIB];
const DISTINCT_SIZES: usize = 1000;
const THREADS: [usize; 3] = [1, 2, 4];
const LIVE_BLOCKS: [usize; 3] = [10, 1_000, 100_000];
/// Cuts between two clean-ups, which are not timed.
const CUTS: u64 = 64;

fn pool(lock: bool) -> Pool {
    // Unlocked regions are address space only, so their budget is no one's memory.
    let max_bytes = (!lock).then_some(1 << 40);
    let region = RegionOptions { lock, ..RegionOptions::default() };
    Pool::new(PoolOptions { max_bytes, region, ..PoolOptions::default() }).expect("a pool")
}

fn take(pool: &Pool, len: usize) -> Block {
    pool.take(len).expect("memory for a benchmark")
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat).sample_size(20);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    group
}

/// Take and return, the block having been there before.
fn hit(criterion: &mut Criterion) {
    let mut group = group(criterion, "hit");
    for size in HIT_SIZES.into_iter().filter(|&size| may_lock(size)) {
        let pool = LazyCell::new(|| pool(true));
        group.bench_function(BenchmarkId::new("pinpool", label(size)), |bencher| {
            bencher.iter(|| take(&pool, black_box(size)));
        });
        group.bench_function(BenchmarkId::new("heap, not locked", label(size)), |bencher| {
            bencher.iter(|| Vec::<u8>::with_capacity(black_box(size)));
        });
        group.bench_function(BenchmarkId::new("posix_memalign + mlock", label(size)), |bencher| {
            bencher.iter(|| LockedHeap::new(black_box(size)).expect("may lock"));
        });
    }
}

/// A hit in a pool that has one block each of a thousand lengths, asked for in no order.
fn hit_among_sizes(criterion: &mut Criterion) {
    let pool = LazyCell::new(|| {
        let pool = pool(false);
        let blocks: Vec<Block> = (1..=DISTINCT_SIZES).map(|pages| take(&pool, pages * PAGE)).collect();
        drop(blocks);
        pool
    });
    let mut pages = 0;
    group(criterion, "hit among sizes").bench_function(DISTINCT_SIZES.to_string(), |bencher| {
        bencher.iter(|| {
            pages = (pages + 617) % DISTINCT_SIZES; // 617 and 1000 share no factor: every size has its turn
            take(&pool, (pages + 1) * PAGE)
        });
    });
}

/// The same on several threads. The throughput is pairs a second, all threads together.
fn hit_on_threads(criterion: &mut Criterion) {
    let mut group = group(criterion, "hit on threads");
    for threads in THREADS {
        let pool = pool(true);
        group.throughput(Throughput::Elements(threads as u64));
        group.bench_function(BenchmarkId::new("pinpool", threads), |bencher| {
            bencher.iter_custom(|pairs| on_threads(threads, pairs, || take(&pool, black_box(PAGE))));
        });
        group.bench_function(BenchmarkId::new("heap, not locked", threads), |bencher| {
            bencher.iter_custom(|pairs| on_threads(threads, pairs, || Vec::<u8>::with_capacity(black_box(PAGE))));
        });
        group.bench_function(BenchmarkId::new("posix_memalign + mlock", threads), |bencher| {
            bencher.iter_custom(|pairs| on_threads(threads, pairs, || LockedHeap::new(PAGE).expect("may lock")));
        });
    }
}

/// How long the threads take, from the first start to the last end, for so many pairs each.
fn on_threads<T>(threads: usize, pairs: u64, make: impl Fn() -> T + Sync) -> Duration {
    let barrier = Barrier::new(threads);
    let work = || {
        let first = make();
        barrier.wait(); // each thread holds one now, so each has its own to come back to
        drop(first);
        barrier.wait();
        let start = Instant::now();
        for _ in 0..pairs {
            black_box(make());
        }
        (start, Instant::now())
    };
    let spans: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker")).collect()
    });
    let start = spans.iter().map(|span| span.0).min();
    let end = spans.iter().map(|span| span.1).max();
    end.zip(start).map_or(Duration::ZERO, |(end, start)| end - start)
}

/// Take, return and trim: what a request costs that nothing in the pool can serve.
fn miss(criterion: &mut Criterion) {
    let mut group = group(criterion, "miss");
    for size in MISS_SIZES.into_iter().filter(|&size| may_lock(size)) {
        let pool = pool(true);
        group.bench_function(BenchmarkId::new("own region", label(size)), |bencher| {
            bencher.iter(|| {
                drop(take(&pool, size));
                pool.trim().expect("the system takes it back")
            });
        });
        group.bench_function(BenchmarkId::new("posix_memalign + mlock", label(size)), |bencher| {
            bencher.iter(|| LockedHeap::new(size).expect("may lock"));
        });
    }
}

/// A hit, and a cut from a shared region, beside so many live blocks with as many holes between them.
fn growth(criterion: &mut Criterion) {
    let mut group = group(criterion, "growth");
    for live in LIVE_BLOCKS {
        let crowd = LazyCell::new(|| crowd(live));
        group.bench_function(BenchmarkId::new("hit", live), |bencher| {
            let (pool, _) = &*crowd;
            bencher.iter(|| take(pool, black_box(PAGE)));
        });
        group.bench_function(BenchmarkId::new("cut", live), |bencher| {
            let (pool, _) = &*crowd;
            bencher.iter_custom(|cuts| time_cuts(pool, cuts));
        });
    }
}

fn crowd(live: usize) -> (Pool, Vec<Block>) {
    let pool = pool(false);
    let mut blocks: Vec<Block> = (0..2 * live).map(|_| take(&pool, PAGE)).collect();
    let mut keep = false;
    blocks.retain(|_| {
        keep = !keep;
        keep
    });
    pool.trim().expect("from the cache to the arena");
    (pool, blocks)
}

fn time_cuts(pool: &Pool, cuts: u64) -> Duration {
    let (mut spent, mut left) = (Duration::ZERO, cuts);
    let mut blocks = Vec::with_capacity(CUTS as usize);
    while left > 0 {
        let batch = left.min(CUTS);
        pool.trim().expect("from the cache to the arena");
        let start = Instant::now();
        blocks.extend((0..batch).map(|_| take(pool, PAGE)));
        spent += start.elapsed();
        blocks.clear();
        left -= batch;
    }
    spent
}

criterion_group!(benches, hit, hit_among_sizes, hit_on_threads, miss, growth);
criterion_main!(benches);
