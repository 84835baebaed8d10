//! What a store costs: large values by engine, block size and queue depth, and small operations beside many entries.
//!
//! With `--test` the sizes are small. The store is in the target directory, and is removed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use pinpool::swap::{Engine, SwapOptions, Swapper};
use pinpool::{Block, Pool, PoolOptions};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const BLOCKS: [usize; 4] = [256 << 10, MIB, 4 * MIB, 16 * MIB];
const DEPTHS: [usize; 4] = [1, 4, 32, 64];

/// Nothing is measured, and every benchmark runs once.
fn is_test() -> bool {
    std::env::args().any(|argument| argument == "--test")
}

/// A store in a directory of its own, which goes with it.
struct Store {
    swapper: Swapper,
    pool: Pool,
    directory: PathBuf,
}

impl Store {
    fn new(name: &str, options: &SwapOptions) -> Self {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let swapper = Swapper::open(&directory, options).expect("a store in the target directory");
        Self { swapper, pool: Pool::new(PoolOptions::default()).expect("a pool"), directory }
    }

    fn block(&self, len: usize) -> Block {
        let mut block = self.pool.take(len).expect("memory for a benchmark");
        for (word, number) in block.as_mut_slice().chunks_exact_mut(size_of::<u64>()).zip(0_u64..) {
            word.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        block
    }

    fn write(&self, key: &str, block: &Arc<Block>) {
        let written = self.swapper.write(key, "", Arc::clone(block)).map(|ticket| ticket.wait());
        written.expect("an open store").expect("a write");
    }

    fn read(&self, key: &str, block: Block) -> Block {
        let ticket = self.swapper.read(key, block).expect("an entry");
        ticket.wait().expect("a read");
        Arc::into_inner(ticket.take_block().expect("it was read into")).expect("the only owner")
    }

    fn delete(&self, key: &str) {
        self.swapper.delete(key).expect("an entry").wait().expect("a deletion");
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.swapper.close();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat).sample_size(10);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    group
}

/// Writes a value over and over, and reads it as often.
fn there_and_back(group: &mut BenchmarkGroup<'_, WallTime>, label: &str, options: &SwapOptions, bytes: usize) {
    let store = Store::new("swap-large", options);
    let source = Arc::new(store.block(bytes));
    store.write("key", &source);
    store.write("key", &source); // from here on there is room for both, and the file grows no more
    group.throughput(Throughput::Bytes(bytes as u64));
    group.bench_function(BenchmarkId::new("write", label), |bencher| bencher.iter(|| store.write("key", &source)));
    let mut target = Some(store.block(bytes));
    group.bench_function(BenchmarkId::new("read", label), |bencher| {
        bencher.iter(|| target = target.take().map(|block| store.read("key", block)));
    });
}

fn by_engine(criterion: &mut Criterion) {
    let mut group = group(criterion, "swap by engine");
    let sizes = if is_test() { [MIB, 2 * MIB] } else { [64 * MIB, 256 * MIB] };
    let engines = [
        ("io_uring, fixed buffers", Engine::Auto, true),
        ("io_uring", Engine::Auto, false),
        ("threads", Engine::Threads, false),
    ];
    for (name, engine, fixed_buffers) in engines {
        for bytes in sizes {
            let options = SwapOptions { engine, fixed_buffers, ..SwapOptions::default() };
            there_and_back(&mut group, &format!("{name}, {} MiB", bytes / MIB), &options, bytes);
        }
    }
    group.finish();
}

fn by_block_and_depth(criterion: &mut Criterion) {
    let mut group = group(criterion, "swap by block and depth");
    let bytes = if is_test() { MIB } else { 64 * MIB };
    for block in BLOCKS {
        for depth in DEPTHS {
            let options = SwapOptions { block_bytes: Some(block), queue_depth: Some(depth), ..SwapOptions::default() };
            there_and_back(&mut group, &format!("{} KiB, {depth} deep", block >> 10), &options, bytes);
        }
    }
    group.finish();
}

/// One page at a time, beside so many other entries. The numbers of one operation are to be the same.
fn growth(criterion: &mut Criterion) {
    let mut group = group(criterion, "swap growth");
    let counts = if is_test() { [10, 100, 200] } else { [10, 1_000, 100_000] };
    for entries in counts {
        let store = Store::new("swap-growth", &SwapOptions::default());
        let page = Arc::new(store.block(PAGE));
        let begin = |number| store.swapper.write(&format!("entry {number}"), "", Arc::clone(&page)).expect("room");
        let tickets: Vec<_> = (0..entries).map(begin).collect();
        for ticket in tickets {
            ticket.wait().expect("a write");
        }
        group.bench_function(BenchmarkId::new("replace 4 KiB", entries), |bencher| {
            bencher.iter(|| store.write("entry 7", &page));
        });
        let mut target = Some(store.block(PAGE));
        group.bench_function(BenchmarkId::new("read 4 KiB", entries), |bencher| {
            bencher.iter(|| target = target.take().map(|block| store.read("entry 7", block)));
        });
        let timed = |operations: u64, is_delete: bool| {
            let mut spent = Duration::ZERO;
            for _ in 0..operations {
                let start = Instant::now();
                store.write("new", &page);
                let written = Instant::now();
                store.delete("new");
                spent += if is_delete { written.elapsed() } else { written - start };
            }
            spent
        };
        group.bench_function(BenchmarkId::new("write 4 KiB", entries), |bencher| {
            bencher.iter_custom(|operations| timed(operations, false));
        });
        group.bench_function(BenchmarkId::new("delete 4 KiB", entries), |bencher| {
            bencher.iter_custom(|operations| timed(operations, true));
        });
    }
    group.finish();
}

criterion_group!(benches, by_engine, by_block_and_depth, growth);
criterion_main!(benches);
