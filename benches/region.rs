//! What fresh locked memory costs, by page kind and by hand. 256 MiB; `PINPOOL_BENCH_MIB=2048` for another size.
//!
//! Only the making is timed, not the giving back.
#![allow(unsafe_code)] // does by hand what a region does

mod peer;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};
use std::{env, io, thread};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use peer::{LockedHeap, label, may_lock};
use pinpool::region::Region;
use pinpool::{Pages, RegionOptions};

const MIB: usize = 1 << 20;
const HUGE_PAGE: usize = 2 * MIB;
const PAGES: [Pages; 3] = [Pages::Auto, Pages::Base, Pages::Transparent];

fn regions(criterion: &mut Criterion) {
    let mib: usize = env::var("PINPOOL_BENCH_MIB").ok().and_then(|text| text.parse().ok()).unwrap_or(256);
    let len = mib * MIB;
    // This first lock also has a virtual machine find the memory, which nobody below should pay for alone.
    if !may_lock(len) {
        return;
    }
    let mut group = criterion.benchmark_group(format!("region of {}", label(len)));
    group.sampling_mode(SamplingMode::Flat).sample_size(10).throughput(Throughput::Bytes(len as u64));
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_secs(3));
    for pages in PAGES.into_iter().filter(|&pages| region(len, pages).is_ok()) {
        time_making(&mut group, &format!("pinpool {}", pages.name()), || region(len, pages));
    }
    time_making(&mut group, "posix_memalign + mlock", || LockedHeap::new(len));
    let cores = thread::available_parallelism().map_or(1, usize::from);
    for threads in [1, cores] {
        time_making(&mut group, &format!("by hand, threads: {threads}"), || HandMade::new(len, threads));
    }
}

/// Times the making alone.
fn time_making<T>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, make: impl Fn() -> io::Result<T>) {
    let time = || {
        let start = Instant::now();
        let made = make().expect("memory for a benchmark");
        let spent = start.elapsed();
        drop(made);
        spent
    };
    group.bench_function(name, |bencher| bencher.iter_custom(|times| (0..times).map(|_| time()).sum()));
}

fn region(len: usize, pages: Pages) -> io::Result<Region> {
    let options = RegionOptions { pages, ..RegionOptions::default() };
    Region::map(len, &options, &mut |_, _| ControlFlow::Continue(())).map_err(io::Error::other)
}

/// The best way known for a machine that gives huge pages: advise, populate, lock.
struct HandMade {
    address: *mut libc::c_void,
    len: usize,
}

impl HandMade {
    fn new(len: usize, threads: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let len = len + HUGE_PAGE; // wherever the mapping starts, the pages of interest fit
        // SAFETY: a new private mapping at an address of the kernel's choice touches no memory of ours.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let made = Self { address, len };
        made.populate_and_lock(threads)?;
        Ok(made)
    }

    fn populate_and_lock(&self, threads: usize) -> io::Result<()> {
        let start = (self.address as usize).next_multiple_of(HUGE_PAGE);
        let len = self.len - HUGE_PAGE;
        advise(start, len, libc::MADV_HUGEPAGE)?;
        let share = (len / threads).next_multiple_of(HUGE_PAGE);
        thread::scope(|scope| {
            let shares = (0..len).step_by(share).map(|offset| (start + offset, share.min(len - offset)));
            let populate = |(start, len)| scope.spawn(move || advise(start, len, libc::MADV_POPULATE_WRITE));
            let workers: Vec<_> = shares.map(populate).collect();
            workers.into_iter().try_for_each(|worker| worker.join().expect("a worker"))
        })?;
        // SAFETY: locking changes neither contents nor protection.
        checked(unsafe { libc::mlock(start as *const libc::c_void, len) })
    }
}

impl Drop for HandMade {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody else has its address.
        unsafe { libc::munmap(self.address, self.len) };
    }
}

fn advise(address: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: neither of the two advices that are given changes what the memory holds.
    checked(unsafe { libc::madvise(address as *mut libc::c_void, len, advice) })
}

fn checked(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

criterion_group!(benches, regions);
criterion_main!(benches);
