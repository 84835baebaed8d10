//! What pinpool adds to the driver's own calls: a range is registered and unregistered, by the bare calls of the fake
//! driver and through pinpool; and what a block in flight costs, beside one that is not. The difference is the
//! bookkeeping.
#![allow(unsafe_code)] // adopting means to vouch for the memory

#[path = "../tests/common/driver.rs"]
mod driver;

use std::hint::black_box;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use driver::Fake;
use pinpool::driver::engine::{Cut, Registrations};
use pinpool::driver::{Device, Registering, Request};
use pinpool::pinned::Adopted;
use pinpool::pool::find;
use pinpool::{Block, Pool, PoolOptions};

const LEN: usize = 64 << 10;

/// Memory of whole pages, already touched.
struct Memory(Vec<u8>);

impl Memory {
    fn new() -> Self {
        Self(vec![1; 2 * LEN])
    }

    fn start(&self) -> usize {
        (self.0.as_ptr() as usize).next_multiple_of(LEN)
    }
}

fn go_on(_: usize, _: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn lock(start: usize) {
    // SAFETY: locking changes no contents.
    assert_eq!(unsafe { libc::mlock(start as *const _, LEN) }, 0);
}

fn unlock(start: usize) {
    // SAFETY: as for locking.
    assert_eq!(unsafe { libc::munlock(start as *const _, LEN) }, 0);
}

fn register(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("register + unregister 64 KiB");
    group.sample_size(50).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    let (fake, memory) = (Fake::new(1), Memory::new());
    fake.set("check_maps", 0);
    let (start, devices) = (memory.start(), fake.devices(1));
    let calls = fake.bare();
    fake.enter_context(0);
    group.bench_function("bare calls", |bencher| {
        bencher.iter(|| {
            calls.register(black_box(start), LEN);
            calls.unregister(start);
        });
    });
    fake.leave_context(0);
    let context = fake.enter_context(0);
    calls.pop();
    group.bench_function("bare calls, with the context pushed and popped", |bencher| {
        bencher.iter(|| {
            calls.push(context);
            calls.register(black_box(start), LEN);
            calls.pop();
            calls.unregister(start);
        });
    });
    let request = Request { address: start, len: LEN, read_only: false };
    group.bench_function("Registrations", |bencher| {
        bencher.iter(|| registered(&devices, black_box(&request)).end().expect("the fake takes it"));
    });
    group.bench_function("bare calls, with mlock and munlock", |bencher| {
        bencher.iter(|| {
            lock(start);
            calls.push(context);
            calls.register(black_box(start), LEN);
            calls.pop();
            calls.unregister(start);
            unlock(start);
        });
    });
    let registering = Registering { devices: &devices, required: true };
    group.bench_function("Adopted", |bencher| {
        // SAFETY: the memory outlives the adoption.
        let adopt = || unsafe { Adopted::adopt(black_box(start), LEN, &registering, &mut go_on) };
        bencher.iter(|| drop(adopt().expect("the fake takes it")));
    });
    let unregistered = Registering::NONE;
    group.bench_function("Adopted, for no device", |bencher| {
        // SAFETY: the memory outlives the adoption.
        let adopt = || unsafe { Adopted::adopt(black_box(start), LEN, &unregistered, &mut go_on) };
        bencher.iter(|| drop(adopt().expect("it is there")));
    });
    fake.release_context(0);
    group.finish();
}

fn registered(devices: &[Arc<dyn Device>], request: &Request) -> Registrations {
    Registrations::make(devices, request, Cut::Pieces, &mut go_on).expect("the fake takes it")
}

/// A block is taken, copied from, dropped; the copy ends.
fn in_flight(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("take, copy and return 64 KiB");
    group.sample_size(50).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    let fake = Fake::new(1);
    fake.set("check_maps", 0);
    let options = PoolOptions { max_bytes: Some(1 << 30), devices: fake.devices(1), ..PoolOptions::default() };
    let pool = Pool::new(options).expect("a pool of nothing yet");
    let context = fake.enter_context(0);
    let (stream, stuck) = (fake.stream_create(context), fake.stream_create(context));
    group.bench_function("not recorded", |bencher| bencher.iter(|| drop(pool.take(black_box(LEN)).expect("room"))));
    let lap = || {
        drop(recorded(&pool, stream));
        fake.advance(stream, 1);
    };
    group.bench_function("recorded", |bencher| bencher.iter(lap));
    for _ in 0..1000 {
        drop(recorded(&pool, stuck));
    }
    group.bench_function("recorded, beside 1,000 blocks that wait for another stream", |bencher| bencher.iter(lap));
    fake.advance_all();
    group.finish();
}

fn recorded(pool: &Pool, stream: usize) -> Block {
    let block = pool.take(black_box(LEN)).expect("room");
    let start = block.as_ptr() as usize;
    find(&(start..start + LEN)).and_then(|found| found.record_stream(stream.into())).expect("a stream of the fake's");
    block
}

criterion_group!(benches, register, in_flight);
criterion_main!(benches);
