//! Swap: pool blocks to a file on local storage and back, without a copy on the way.
//!
//! A store is a directory with two files, `data` and `index`. An entry lies in whole units of 4096 bytes in `data`, in one
//! piece or more; `index` is a log of what was put and deleted. A write goes to free room, and only when all of it is
//! there is its record appended to the index: that is the moment in which it takes the place of what was stored under
//! its key before. So a key is replaced whole or not at all.
//!
//! An operation goes this way: the caller's thread finds the block and keeps it from reuse (`ticket.rs`), claims room
//! (`space.rs`) and hands a transfer (`transfer.rs`) to the queue (`queue.rs`); an engine, `uring.rs` or `threads.rs`, takes
//! pieces from there; whoever moves the last of them finishes the operation (`store.rs`).
//!
//! Operations on one key take effect in the order of their calls.
//!
//! # What survives
//! An operation whose ticket is done survives the end of the process, however it ends. The loss of power survives what was
//! done when [`Swapper::flush`] was called, and was not replaced or deleted after that. Anything that is lost or changed
//! on the disk is found by a checksum when it is read, or when the store is opened, and is an error: never other data.

mod busy;
mod data;
mod entry;
mod fixed;
mod index;
mod meter;
mod queue;
mod space;
mod store;
mod threads;
mod ticket;
mod transfer;
mod uring;

use std::fmt;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::block::Block;
use crate::error::{Error, Result};
use crate::os;
use crate::region::Progress;

use space::UNIT;
use store::Store;
use ticket::{Action, Memory, Operation};
pub use ticket::{Outcome, Ticket, Watch, check_fit};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who makes the transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// `io_uring` where the kernel lets this process have it, else threads; [`Stats::engine_reason`] then says why.
    #[default]
    Auto,
    /// `io_uring`, or an error.
    IoUring,
    /// Threads that call pread and pwrite.
    Threads,
}

impl Engine {
    /// Reads a name: `auto`, `io_uring` or `threads`.
    ///
    /// # Errors
    /// `Invalid` for another name.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::IoUring),
            "threads" => Ok(Self::Threads),
            _ => Err(Error::invalid("engine", format!("{name:?} is none of \"auto\", \"io_uring\", \"threads\""))),
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct SwapOptions {
    /// Bytes of one transfer, and of one piece of a checksum: a multiple of 4096, at most 1 GiB. `None`: 1 MiB.
    pub block_bytes: Option<usize>,
    /// How many transfers the kernel has at most at a time, 1 to 4096. `None`: 32.
    pub queue_depth: Option<usize>,
    /// Who makes them.
    pub engine: Engine,
    /// The most that the data file may hold, in bytes. `None`: what the file system has.
    pub max_bytes: Option<usize>,
    /// Past the page cache (`O_DIRECT`), or through it. `None`: past it, where the file system can.
    pub direct: Option<bool>,
    /// Make pool regions known to `io_uring`, once each, so that it need not look their pages up for every transfer. They
    /// count as locked memory of the user's; where the limit is too small, `io_uring` does without.
    pub fixed_buffers: bool,
    /// Faults to be injected, for tests.
    #[doc(hidden)]
    pub inject: Option<Arc<dyn Inject>>,
}

impl Default for SwapOptions {
    fn default() -> Self {
        Self {
            block_bytes: None,
            queue_depth: None,
            engine: Engine::Auto,
            max_bytes: None,
            direct: None,
            fixed_buffers: true,
            inject: None,
        }
    }
}

/// What a test does to a call to the kernel.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The kernel is asked for so many bytes only, in whole units.
    Short(usize),
    /// The kernel's answer is replaced by this error.
    Refusal(i32),
}

/// Chooses the calls to the kernel that go wrong.
#[doc(hidden)]
pub trait Inject: Send + Sync + fmt::Debug {
    /// What happens to a transfer of `len` bytes at this offset of the data file.
    fn fault(&self, is_write: bool, offset: u64, len: usize) -> Option<Fault>;
}

/// What a swapper has done, and what its store holds. Sizes in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Stats {
    /// Who makes the transfers.
    pub engine: Engine,
    /// Why it is not `io_uring`, where that was not asked for.
    pub engine_reason: Option<String>,
    /// Whether transfers go past the page cache.
    pub direct: bool,
    /// Why they do not, where that was not asked for.
    pub direct_reason: Option<String>,
    /// Bytes of one transfer.
    pub block_bytes: usize,
    /// How many of them the kernel has at most at a time.
    pub queue_depth: usize,
    /// Operations that have not ended.
    pub unfinished: usize,
    /// Entries of the store.
    pub entries: usize,
    /// What they take in the data file, in whole units.
    pub stored_bytes: usize,
    /// How long the data file is.
    pub file_bytes: usize,
    /// The most that it may hold; `None`: as much as the file system.
    pub max_bytes: Option<usize>,
    /// Written so far, by writes that ended well.
    pub bytes_written: usize,
    /// Read so far, by reads that ended well.
    pub bytes_read: usize,
    /// Copies that were made because memory could not be transferred as it is.
    pub bounces: usize,
    /// Bytes of them.
    pub bounced_bytes: usize,
    /// How long writes were under way, at least one at a time.
    pub write_time: Duration,
    /// How long reads were.
    pub read_time: Duration,
    /// Bytes of pool regions that `io_uring` has as fixed buffers.
    pub fixed_bytes: usize,
    /// Why it does not have the newest region that it does not have.
    pub fixed_reason: Option<String>,
}

/// An open store. Dropping it closes it once all that was begun is done, without waiting for that.
#[derive(Debug)]
pub struct Swapper {
    store: Arc<Store>,
    engine: Mutex<Vec<JoinHandle<()>>>,
    fork_generation: u64,
}

impl Swapper {
    /// Opens the store in a directory, which is made where it is missing, and locks it against all others.
    ///
    /// # Errors
    /// `Invalid` for options that make no sense, `Storage` where the system refuses or another has the store open,
    /// `Damaged` where the index is not what was written, `Unsupported` for an engine that cannot be had.
    ///
    /// # Examples
    /// ```
    /// use pinpool::swap::{SwapOptions, Swapper};
    /// use std::sync::Arc;
    ///
    /// # let directory = std::env::temp_dir().join(format!("pinpool-doc-{}", std::process::id()));
    /// let pool = pinpool::Pool::new(pinpool::PoolOptions::default())?;
    /// let swapper = Swapper::open(&directory, &SwapOptions::default())?;
    /// let mut block = pool.take(10_000)?;
    /// block.as_mut_slice().fill(7);
    /// swapper.write("weights", "ten thousand sevens", Arc::new(block))?.wait()?;
    /// let ticket = swapper.read("weights", pool.take(10_000)?)?;
    /// ticket.wait()?;
    /// assert_eq!(ticket.take_block().expect("read").as_slice(), [7; 10_000]);
    /// # swapper.close()?;
    /// # std::fs::remove_dir_all(&directory)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn open(directory: &Path, options: &SwapOptions) -> Result<Self> {
        let fork_generation = os::fork_generation();
        let options = Checked::new(options)?;
        let (ring, engine_reason) = uring::choose(&options)?;
        let chosen = match ring {
            Some(_) => Chosen { engine: Engine::IoUring, engine_reason, queue_depth: options.queue_depth },
            None => Chosen { engine: Engine::Threads, engine_reason, queue_depth: threads::depth(options.queue_depth) },
        };
        let store = Arc::new(Store::open(directory, &options, chosen)?);
        let threads = match ring {
            Some(ring) => uring::start(ring, &store, &options),
            None => threads::start(&store, &options),
        };
        match threads {
            Ok(threads) => Ok(Self { store, engine: Mutex::new(threads), fork_generation }),
            Err(source) => {
                store.queue.close();
                Err(Error::Os { call: "starting a thread", bytes: 0, source })
            }
        }
    }

    /// Begins to store a block, with a label that comes back with it. Nobody may write to the block before the end.
    ///
    /// # Errors
    /// `Storage` where there is no room for it; `SwapperClosed`, `SwapperForked`.
    pub fn write(&self, key: &str, label: &str, block: Arc<Block>) -> Result<Ticket> {
        self.begin_write(key, label, Memory::of_block(block))
    }

    /// The same from any part of a pool's block, found by its address, which starts at a multiple of 4096 bytes. The block
    /// is not reused before the end, whatever becomes of its owners. Device work that was recorded of it, and reads into
    /// the same bytes that are under way, are waited for first: `progress` is asked meanwhile, with no bytes.
    ///
    /// # Errors
    /// As [`write`](Self::write), and `Invalid` for memory that is no pool's or is not aligned; `Interrupted`.
    ///
    /// # Safety
    /// Nobody writes to the memory before the end.
    #[allow(unsafe_code)] // passes the promise on to the caller
    pub unsafe fn write_from(
        &self,
        key: &str,
        label: &str,
        range: Range<usize>,
        progress: &mut Progress<'_>,
    ) -> Result<Ticket> {
        self.check_process()?;
        self.begin_write(key, label, Memory::part(range, false, progress)?)
    }

    fn begin_write(&self, key: &str, label: &str, memory: Memory) -> Result<Ticket> {
        self.check_process()?;
        check_text("key", key)?;
        check_text("label", label)?;
        let operation = Operation::new(key.into(), Action::Write(label.into()), memory, &self.store.unheard);
        self.store.begin_write(&operation)?;
        Ok(Ticket::new(operation))
    }

    /// Begins to read an entry into a block of its size. The block comes back by [`Ticket::take_block`].
    ///
    /// # Errors
    /// `UnknownKey`, `Invalid` for a block of another size; `SwapperClosed`, `SwapperForked`.
    pub fn read(&self, key: &str, block: Block) -> Result<Ticket> {
        self.begin_read(key, None, Memory::of_block(Arc::new(block)))
    }

    /// The same into any part of a pool's block, found by its address, which starts at a multiple of 4096 bytes, and ends
    /// at one or at the end of the block. It is waited for as in [`write_from`](Self::write_from),
    /// and for writes of the same bytes. `label`: that of the
    /// value which is expected; another one, of the same size or not, is not read.
    ///
    /// # Errors
    /// As [`read`](Self::read), and `Invalid` for memory that is no pool's or is not aligned, or another value;
    /// `Interrupted`.
    ///
    /// # Safety
    /// Nobody reads the memory, or writes to it, before the end.
    #[allow(unsafe_code)] // passes the promise on to the caller
    pub unsafe fn read_into(
        &self,
        key: &str,
        label: Option<&str>,
        range: Range<usize>,
        progress: &mut Progress<'_>,
    ) -> Result<Ticket> {
        self.check_process()?;
        self.begin_read(key, label, Memory::part(range, true, progress)?)
    }

    fn begin_read(&self, key: &str, label: Option<&str>, memory: Memory) -> Result<Ticket> {
        self.check_process()?;
        let operation = Operation::new(key.into(), Action::Read(label.map(Box::from)), memory, &self.store.unheard);
        self.store.begin_read(&operation)?;
        Ok(Ticket::new(operation))
    }

    /// Begins to delete an entry. Its room is free for others when the reads of it that are under way are done.
    ///
    /// # Errors
    /// `UnknownKey`; `SwapperClosed`, `SwapperForked`.
    pub fn delete(&self, key: &str) -> Result<Ticket> {
        self.check_process()?;
        let operation = Operation::new(key.into(), Action::Delete, Memory::nothing(), &self.store.unheard);
        self.store.begin_delete(&operation)?;
        Ok(Ticket::new(operation))
    }

    /// The label and the size of what [`read`](Self::read) would read.
    ///
    /// # Errors
    /// `UnknownKey`; `SwapperForked`.
    pub fn describe(&self, key: &str) -> Result<(Box<str>, usize)> {
        self.check_process()?;
        self.store.describe(key)
    }

    /// The keys that [`read`](Self::read) would find, in no order.
    ///
    /// # Errors
    /// `SwapperForked`.
    pub fn keys(&self) -> Result<Vec<Arc<str>>> {
        self.check_process()?;
        Ok(self.store.keys())
    }

    /// Makes all operations that are done survive a loss of power.
    ///
    /// # Errors
    /// `Storage` where the system refuses; `SwapperClosed`, `SwapperForked`.
    pub fn flush(&self) -> Result<()> {
        self.check_process()?;
        self.store.flush()
    }

    /// Gives room that no entry uses back to the file system, and answers how many bytes that were.
    ///
    /// # Errors
    /// `Storage` where the system refuses; `SwapperClosed`, `SwapperForked`.
    pub fn trim(&self) -> Result<usize> {
        self.check_process()?;
        self.store.trim()
    }

    /// Refuses further operations, waits for those that were begun, and lets go of the store. A second call does nothing;
    /// in a forked child, nor does the first.
    ///
    /// # Errors
    /// `Storage` where the index could not be written anew: nothing is lost, and the store is closed.
    pub fn close(&self) -> Result<()> {
        self.close_within(&mut |_, _| ControlFlow::Continue(()))
    }

    /// As [`close`](Self::close), and asks `progress` now and then, with no bytes, while operations are under way.
    ///
    /// # Errors
    /// As [`close`](Self::close), and `Interrupted` when `progress` says so: call it again.
    pub fn close_within(&self, progress: &mut Progress<'_>) -> Result<()> {
        const STEP: Duration = Duration::from_millis(50);
        if self.check_process().is_err() {
            return Ok(()); // it is the parent's to close
        }
        self.store.queue.close();
        while !self.store.queue.wait_idle(STEP) {
            if progress(0, 0).is_break() {
                return Err(Error::Interrupted);
            }
        }
        for thread in std::mem::take(&mut *lock(&self.engine)) {
            let _ = thread.join(); // they do not panic
        }
        self.store.finish()
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.check_process().is_ok() && self.store.queue.is_closing()
    }

    /// Counts a copy that the caller has made because memory could not be transferred as it is.
    pub fn count_bounce(&self, bytes: usize) {
        self.store.count_bounce(bytes);
    }

    /// What it has done, and what its store holds.
    ///
    /// # Errors
    /// `SwapperForked`.
    pub fn stats(&self) -> Result<Stats> {
        self.check_process()?;
        Ok(self.store.stats())
    }

    /// The first failure of a write or a deletion that nobody has waited for, since the last time that this was asked.
    pub fn take_unheard(&self) -> Option<Arc<Error>> {
        self.check_process().ok()?;
        self.store.unheard.take()
    }

    /// The store's directory.
    pub fn directory(&self) -> &Path {
        &self.store.directory
    }

    fn check_process(&self) -> Result<()> {
        if self.fork_generation == os::fork_generation() { Ok(()) } else { Err(Error::SwapperForked) }
    }
}

impl Drop for Swapper {
    fn drop(&mut self) {
        if self.check_process().is_ok() {
            self.store.queue.close(); // the engine's last thread lets go of the store
        } else if let Ok(threads) = self.engine.get_mut() {
            std::mem::forget(std::mem::take(threads)); // the parent's, and not there
        }
    }
}

fn check_text(parameter: &'static str, text: &str) -> Result<()> {
    const MOST: usize = 1 << 16;
    if text.len() <= MOST {
        return Ok(());
    }
    Err(Error::invalid(parameter, format!("{} bytes are more than the {MOST} that the index keeps", text.len())))
}

/// Options that make sense, with the defaults filled in.
#[derive(Debug)]
struct Checked {
    block_bytes: usize,
    queue_depth: usize,
    engine: Engine,
    max_bytes: Option<usize>,
    direct: Option<bool>,
    fixed_buffers: bool,
    inject: Option<Arc<dyn Inject>>,
}

/// Who makes the transfers, why it is not `io_uring`, and how many at a time.
#[derive(Debug)]
struct Chosen {
    engine: Engine,
    engine_reason: Option<String>,
    queue_depth: usize,
}

impl Checked {
    fn new(options: &SwapOptions) -> Result<Self> {
        const MOST: usize = 1 << 30;
        let SwapOptions { block_bytes, queue_depth, engine, max_bytes, direct, fixed_buffers, inject } =
            options.clone();
        let block_bytes = block_bytes.unwrap_or(1 << 20);
        if !(UNIT..=MOST).contains(&block_bytes) || !block_bytes.is_multiple_of(UNIT) {
            let why = format!("{block_bytes} is not a multiple of {UNIT} between that and {MOST} bytes");
            return Err(Error::invalid("block_bytes", why));
        }
        let queue_depth = queue_depth.unwrap_or(32);
        if !(1..=4096).contains(&queue_depth) {
            return Err(Error::invalid("queue_depth", format!("{queue_depth} is not between 1 and 4096")));
        }
        if max_bytes.is_some_and(|bytes| bytes < UNIT) {
            return Err(Error::invalid("max_bytes", format!("a store needs room for at least {UNIT} bytes")));
        }
        Ok(Self { block_bytes, queue_depth, engine, max_bytes, direct, fixed_buffers, inject })
    }
}
