//! What the registry costs, by the number of ranges in it: is this address pinned, and the bookkeeping of a
//! registration.

use std::cell::LazyCell;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, criterion_group, criterion_main};
use pinpool::driver::engine::Registrations;
use pinpool::registry::shared::{global, is_pinned};
use pinpool::registry::{Adoption, Key, Registry};

const PAGE: usize = 4096;
const COUNTS: [usize; 3] = [10, 1_000, 100_000];
/// Where the ranges lie: nothing is mapped there, and nothing needs to be.
const BASE: usize = 1 << 46;
/// Random addresses that a benchmark goes through, over and over.
const PROBES: usize = 1 << 16;

fn group<'a>(criterion: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(20).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
    group
}

/// The page of this number. Even ones are pinned; the odd ones between them are not.
fn page(number: usize) -> Range<usize> {
    let start = BASE + number * PAGE;
    start..start + PAGE
}

fn filled(count: usize) -> Registry<()> {
    let (mut registry, note) = (Registry::new(PAGE), Arc::new(()));
    for number in 0..count {
        registry.insert(page(2 * number), Arc::clone(&note)).expect("free");
    }
    registry
}

/// Numbers below `count`, in no order (xorshift).
fn random_numbers(count: usize) -> impl Iterator<Item = usize> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % count
    })
}

/// Pages of the even or of the odd numbers, in no order.
fn random_pages(count: usize, pinned: bool) -> Vec<usize> {
    random_numbers(count).take(PROBES).map(|number| page(2 * number + usize::from(!pinned)).start).collect()
}

/// Times one lookup after the other: the next address depends on the answer, so that no two overlap.
fn lookups(group: &mut BenchmarkGroup<'_, WallTime>, count: usize, look: impl Fn(usize, usize) -> bool) {
    for (name, pinned) in [("hit", true), ("miss", false)] {
        let pages = LazyCell::new(|| random_pages(count, pinned));
        let mut at = 0;
        group.bench_function(BenchmarkId::new(name, count), |bencher| {
            let pages = &*pages;
            bencher.iter(|| {
                let found = black_box(look(pages[at] + 64, 1024));
                at = (at + 1 + usize::from(found)) % PROBES;
                found
            });
        });
    }
}

fn bare(criterion: &mut Criterion) {
    let mut group = group(criterion, "Registry::covers");
    for count in COUNTS {
        let registry = LazyCell::new(|| filled(count));
        lookups(&mut group, count, |address, len| registry.covers(address, len));
    }
}

fn shared(criterion: &mut Criterion) {
    let mut group = group(criterion, "is_pinned");
    for count in COUNTS {
        let _ranges = SharedRanges::insert(count);
        lookups(&mut group, count, is_pinned);
    }
}

/// Ranges in the registry of the process, while this lives.
struct SharedRanges(Vec<Key>);

impl SharedRanges {
    fn insert(count: usize) -> Self {
        let note = Arc::new(Registrations::default());
        let insert = |number| {
            let note = Arc::clone(&note);
            global().change(|registry| registry.insert(page(2 * number), note).expect("free"))
        };
        Self((0..count).map(insert).collect())
    }
}

impl Drop for SharedRanges {
    fn drop(&mut self) {
        for (number, &key) in self.0.iter().enumerate() {
            global().change(|registry| registry.forget(page(2 * number), key));
        }
    }
}

/// A region of the pool's comes and goes.
fn regions(criterion: &mut Criterion) {
    let mut group = group(criterion, "insert + forget");
    for count in COUNTS {
        let (mut registry, note) = (LazyCell::new(|| filled(count)), Arc::new(()));
        let mut pages = random_pages(count, false).into_iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            let registry = &mut *registry;
            bencher.iter(|| {
                let start = pages.next().expect("a cycle has no end");
                let key = registry.insert(start..start + PAGE, Arc::clone(&note)).expect("free");
                registry.forget(start..start + PAGE, key);
            });
        });
    }
}

/// A registration of the caller's memory comes and goes: all that is done besides the calls that lock and unlock.
fn registrations(criterion: &mut Criterion) {
    let mut group = group(criterion, "adopt + retire");
    for count in COUNTS {
        let (_ranges, note) = (SharedRanges::insert(count), Arc::new(Registrations::default()));
        let mut pages = random_pages(count, false).into_iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(count), |bencher| {
            bencher.iter(|| {
                let start = pages.next().expect("a cycle has no end");
                let Ok(Adoption::Arriving(key)) = global().adopt(&(start..start + PAGE)) else { panic!("it is free") };
                let note = Arc::clone(&note);
                global().change(|registry| registry.publish(key, note));
                let unlocked = global().change(|registry| registry.retire(key));
                global().change(|registry| registry.remove(key));
                unlocked
            });
        });
    }
}

criterion_group!(benches, bare, shared, regions, registrations);
criterion_main!(benches);
