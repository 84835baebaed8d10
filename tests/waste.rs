//! How much more than was asked for a pool reserves, on what offload programs really ask for. Nothing is touched, so
//! the sizes are the real ones.

mod common;

use common::{GIB, MIB, page, unlocked_pool};
use pinpool::{Block, Pool};

/// Address space, not memory.
const PLENTY: usize = 1 << 42;

/// Sizes in order, each with how often.
type Trace = Vec<(usize, usize)>;

/// `quarters` of a MiB, because partitions of 10.75 and 31.25 MiB are among them.
const fn mib(quarters: usize) -> usize {
    quarters * MIB / 4
}

/// `thousandths` of a GiB.
const fn gib(thousandths: usize) -> usize {
    thousandths * GIB / 1000
}

fn total(trace: &Trace) -> usize {
    trace.iter().map(|(size, count)| size * count).sum()
}

/// `ZeRO`-3 with parameters and optimizer on the CPU, one of 8 ranks: the partitions of all parameters one by one, then
/// the flat copy, the gradients in 4 bytes, and the flat gradients.
fn zero_3(partitions: Trace, gradients: &[usize]) -> Trace {
    let flat = total(&partitions);
    let mut trace = partitions;
    trace.push((flat, 1));
    trace.extend(gradients.iter().map(|&bytes| (bytes, 1)));
    trace.push((flat, 1));
    trace
}

fn partitions_7b() -> Trace {
    vec![(mib(16), 128), (mib(43), 96), (mib(125), 2)]
}

fn partitions_70b() -> Trace {
    vec![(mib(8), 160), (mib(64), 160), (mib(224), 240), (mib(1002), 2)]
}

/// What one rank of 8 asks for, for a model of 6.7 billion parameters (hidden 4096, 32 layers).
fn traces_7b() -> Vec<(&'static str, Trace)> {
    let flat = total(&partitions_7b());
    vec![
        ("ZeRO-3", zero_3(partitions_7b(), &[2 * flat])),
        ("ZeRO-2", vec![(gib(3_140), 1), (gib(1_570), 1), (gib(3_140), 1), (250 * MIB, 1)]),
        ("optimizer on NVMe", vec![(2 * flat, 4)]),
        ("parameters on NVMe", vec![(200_000_000, 5)]),
        ("offload_states", vec![(gib(3_140), 1), (gib(1_570), 2), (gib(3_140), 2)]),
    ]
}

/// The same for 70.6 billion (hidden 8192, 80 layers, vocabulary 128256).
fn traces_70b() -> Vec<(&'static str, Trace)> {
    let gradients = [3_747, 3_805, 3_727, 3_734, 3_805, 3_766, 3_805, 3_766, 2_700].map(gib);
    vec![
        ("ZeRO-3", zero_3(partitions_70b(), &gradients)),
        ("ZeRO-2", vec![(gib(32_850), 1), (gib(16_430), 1), (gib(32_850), 1), (gib(1_960), 1)]),
        ("optimizer on NVMe", vec![(gib(3_805), 4)]),
        ("parameters on NVMe", vec![(gib(931), 1)]),
        ("offload_states", vec![(gib(32_850), 1), (gib(16_430), 2), (gib(32_850), 2)]),
    ]
}

/// Tensors whose pinned copies were reported to take up to twice their size.
fn reported() -> Vec<(&'static str, Trace)> {
    vec![
        ("half precision, 18944 x 3584", vec![(18_944 * 3_584 * 2, 1)]),
        ("half precision, 14336 x 4096", vec![(14_336 * 4_096 * 2, 1)]),
        ("half precision, 4347592704", vec![(4_347_592_704 * 2, 1)]),
        ("24 times int8, 2053 x 1089536", vec![(2_053 * 1_089_536, 24)]),
        ("24 times int8, 1971 x 1089536", vec![(1_971 * 1_089_536, 24)]),
        ("8,000,000 bytes", vec![(8_000_000, 1)]),
    ]
}

fn take(pool: &Pool, trace: &Trace) -> Vec<Block> {
    let sizes = trace.iter().flat_map(|&(size, count)| std::iter::repeat_n(size, count));
    sizes.map(|size| pool.take(size).expect("address space")).collect()
}

/// Checks what the live blocks of a pool cost.
fn assert_little_waste(name: &str, pool: &Pool, requested: usize) {
    let now = pool.stats().expect("the pool is ours");
    assert_eq!(now.requested_bytes, requested, "{name}");
    let waste = now.reserved_bytes as f64 / now.requested_bytes as f64;
    assert!((1.0..=1.03).contains(&waste), "{name}: {waste} times what was asked for");
}

#[test]
fn zero_reserves_what_it_asks_for() {
    for (name, trace) in traces_7b().into_iter().chain(traces_70b()) {
        let pool = unlocked_pool(PLENTY);
        let blocks = take(&pool, &trace);
        assert_little_waste(name, &pool, total(&trace));
        let lens: usize = blocks.iter().map(Block::len).sum();
        assert_eq!(lens, total(&trace), "{name}: whoever asks sees the size asked for");
    }
}

#[test]
fn the_second_run_of_zero_reserves_no_more() {
    for (name, trace) in traces_7b().into_iter().chain(traces_70b()) {
        let pool = unlocked_pool(PLENTY);
        drop(take(&pool, &trace));
        let reserved = pool.stats().expect("ours").reserved_bytes;
        let mut blocks = take(&pool, &trace);
        assert_eq!(pool.stats().expect("ours").reserved_bytes, reserved, "{name}");
        blocks.reverse();
        drop(blocks);
        let _blocks = take(&pool, &trace);
        assert_little_waste(name, &pool, total(&trace));
    }
}

#[test]
fn reported_tensors_take_their_size() {
    for (name, trace) in reported() {
        let pool = unlocked_pool(PLENTY);
        let blocks = take(&pool, &trace);
        assert_little_waste(name, &pool, total(&trace));
        assert!(blocks.iter().all(|block| block.capacity() < block.len() + page()), "{name}");
    }
}

#[test]
fn all_of_them_in_one_pool_take_their_size() {
    let traces: Vec<_> = traces_7b().into_iter().chain(traces_70b()).chain(reported()).collect();
    let pool = unlocked_pool(PLENTY);
    let _blocks: Vec<_> = traces.iter().map(|(_, trace)| take(&pool, trace)).collect();
    assert_little_waste("all", &pool, traces.iter().map(|(_, trace)| total(trace)).sum());
}

#[test]
fn the_traces_are_the_ones_that_were_measured() {
    let sums = |traces: Vec<(&str, Trace)>| {
        traces.iter().map(|(_, trace)| total(trace) as f64 / GIB as f64).collect::<Vec<_>>()
    };
    let (sums_7b, sums_70b) = (sums(traces_7b()), sums(traces_70b()));
    let close =
        |sums: &[f64], expected: [f64; 5]| sums.iter().zip(expected).all(|(sum, wanted)| (sum - wanted).abs() < 0.06);
    assert!(close(&sums_7b, [7.84, 8.09, 12.55, 0.931, 12.55]), "{sums_7b:?}");
    assert!(close(&sums_70b, [82.1, 84.1, 15.2, 0.931, 131.4]), "{sums_70b:?}");
}
