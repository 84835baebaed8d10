//! What the integration tests share. Everything here looks at pinpool from outside: the kernel's files say what is
//! mapped and locked, not pinpool's own counters.
#![allow(dead_code)] // each test file uses a part of it
#![allow(unsafe_code)] // asks the kernel directly, so that pinpool is not its own witness

pub(crate) mod books;
pub(crate) mod driver;
pub(crate) mod maps;
pub(crate) mod process;
pub(crate) mod seccomp;
pub(crate) mod swap;

use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pinpool::driver::{Event, Registering, Stream};
use pinpool::pinned::{Adopted, Pinned};
use pinpool::pool::find;
use pinpool::{Block, Error, Pages, Pool, PoolOptions, RegionOptions, Stats};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
pub(crate) const GIB: usize = 1 << 30;

/// Size of a base page.
pub(crate) fn page() -> usize {
    // SAFETY: sysconf takes no pointer.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// A progress callback that never stops anything.
#[allow(clippy::unnecessary_wraps)] // the signature is the callback's
pub(crate) fn go_on(_done: usize, _total: usize) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Options for a region of this kind, touched by one thread, so that no other thread's stack is mapped meanwhile.
pub(crate) fn region_of(pages: Pages) -> RegionOptions {
    RegionOptions { pages, threads: Some(1), ..RegionOptions::default() }
}

/// A pool whose regions are made so.
pub(crate) fn pool_of(max_bytes: usize, region: RegionOptions) -> Pool {
    let options = PoolOptions { max_bytes: Some(max_bytes), region, ..PoolOptions::default() };
    Pool::new(options).expect("a pool of nothing yet")
}

/// A pool of locked base pages.
pub(crate) fn pool(max_bytes: usize) -> Pool {
    pool_of(max_bytes, region_of(Pages::Base))
}

/// A pool that only maps: for sizes that this machine does not have.
pub(crate) fn unlocked_pool(max_bytes: usize) -> Pool {
    pool_of(max_bytes, RegionOptions { lock: false, ..RegionOptions::default() })
}

/// A region in the registry, registered with no device.
pub(crate) fn pin(len: usize, options: &RegionOptions) -> pinpool::Result<Pinned> {
    Pinned::allocate(len, options, &Registering::NONE, &mut go_on).map_err(|refusal| refusal.error)
}

/// Pins memory of the test's own, with no device.
///
/// # Safety
/// As for [`Adopted::adopt`].
pub(crate) unsafe fn try_adopt(start: usize, len: usize) -> pinpool::Result<Adopted> {
    // SAFETY: the caller's promise.
    unsafe { Adopted::adopt(start, len, &Registering::NONE, &mut go_on) }.map_err(|refusal| refusal.error)
}

/// Where a block lies.
pub(crate) fn address(block: &Block) -> usize {
    block.as_ptr() as usize
}

/// Whether the registry calls all bytes that were asked for pinned.
pub(crate) fn is_pinned(block: &Block) -> bool {
    pinpool::registry::shared::is_pinned(address(block), block.len())
}

/// Keeps the block that holds a range from reuse until an event is done.
pub(crate) fn defer(range: &Range<usize>, event: Arc<dyn Event>) -> pinpool::Result<()> {
    find(range)?.defer(event)
}

/// The same until the work is done that a stream was given.
pub(crate) fn record_stream(range: &Range<usize>, stream: impl Into<Stream>) -> pinpool::Result<()> {
    find(range)?.record_stream(stream.into())
}

/// What a pool of this process holds.
pub(crate) fn stats(pool: &Pool) -> Stats {
    pool.stats().expect("the pool is ours")
}

/// Entries in the registry of this process.
pub(crate) fn pinned_ranges() -> usize {
    pinpool::registry::shared::global().read(pinpool::registry::Registry::len)
}

/// The kernel's number inside an `Os` error, and the call that it answers.
pub(crate) fn os_answer(error: &Error) -> (&'static str, i32) {
    match error {
        Error::Os { call, source, .. } => (call, source.raw_os_error().expect("the kernel's own number")),
        other => panic!("no answer of the kernel: {other:?}"),
    }
}

/// A turn at locking memory. The memlock limit is one for the process, whose tests run side by side: where it is
/// small, they take turns.
///
/// Panics where the limit is too small for the test.
pub(crate) fn room(bytes: usize) -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    let limit = process::memlock_limit()?;
    assert!(
        bytes <= limit,
        "this test locks {bytes} bytes and RLIMIT_MEMLOCK allows {limit}: run it with `ulimit -l {}` or as root",
        bytes / KIB
    );
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A random number generator of a few lines (xorshift): the same numbers in each run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % end
    }
}
