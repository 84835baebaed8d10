//! Stores of a test's own, contents that tell where they belong, and engines that a test holds back or lies to.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use pinpool::swap::{Engine, Fault, Inject, SwapOptions, Swapper};
use pinpool::{Block, Error, Pool};

/// Offsets in the data file are multiples of this.
pub(crate) const UNIT: usize = 4096;

/// A directory for one store, which goes with the value.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    process: u32,
}

impl Directory {
    pub(crate) fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let (process, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("pinpool-swap-test-{process}-{number}"));
        let _ = std::fs::remove_dir_all(&path); // of a process of this number that was killed
        Self { path, process }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    pub(crate) fn index(&self) -> PathBuf {
        self.path.join("index")
    }

    pub(crate) fn open(&self, options: &SwapOptions) -> Swapper {
        self.try_open(options).expect("a store of our own")
    }

    pub(crate) fn try_open(&self, options: &SwapOptions) -> pinpool::Result<Swapper> {
        Swapper::open(&self.path, options)
    }

    /// Opens a store whose last user has not quite gone: its last thread, or the kernel, still lets go of the lock.
    pub(crate) fn reopen(&self, options: &SwapOptions) -> Swapper {
        loop {
            match self.try_open(options) {
                Err(Error::Storage { call: "locking", .. }) => std::thread::yield_now(),
                other => return other.expect("a store of our own"),
            }
        }
    }

    /// Changes one byte of a file behind everybody's back.
    pub(crate) fn flip(path: &Path, offset: u64) {
        let file = edit(path);
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).expect("within the file");
        file.write_all_at(&[byte[0] ^ 0x10], offset).expect("our own file");
        file.sync_all().expect("our own file"); // so that a direct read sees it
    }

    pub(crate) fn truncate(path: &Path, len: u64) {
        edit(path).set_len(len).expect("our own file");
    }
}

fn edit(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).expect("our own file")
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // A swapper that was dropped just now may still write its index there. A forked child leaves it to its parent.
            let gone = |_: &usize| std::fs::remove_dir_all(&self.path).is_ok() || !self.path.exists();
            let _ = (0..1000).inspect(|_| std::thread::yield_now()).find(gone);
        }
    }
}

/// What is tested with each engine. One that this kernel refuses is left out, and that is said.
pub(crate) fn engines() -> Vec<SwapOptions> {
    let directory = Directory::new();
    let one = |engine| SwapOptions { engine, block_bytes: Some(4 * UNIT), ..SwapOptions::default() };
    let mut engines = vec![one(Engine::Threads)];
    match directory.try_open(&one(Engine::IoUring)) {
        Ok(_) => engines.push(one(Engine::IoUring)),
        Err(refusal) => say(&format!("not tested with io_uring: {refusal}")),
    }
    engines
}

/// The same, past the page cache and through it.
pub(crate) fn engines_and_ways() -> Vec<SwapOptions> {
    let ways =
        |options: SwapOptions| [true, false].map(|direct| SwapOptions { direct: Some(direct), ..options.clone() });
    let can = |options: &SwapOptions| match Directory::new().try_open(options) {
        Err(Error::Unsupported { .. }) => {
            say("not tested with direct transfers: the file system of the temporary directory has none");
            false
        }
        _ => true,
    };
    engines().into_iter().flat_map(ways).filter(can).collect()
}

pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Bytes that no other seed has, none of them zero for long.
pub(crate) fn contents(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A block with the contents of this seed.
pub(crate) fn block(pool: &Pool, len: usize, seed: u64) -> Block {
    let mut block = pool.take(len).expect("room");
    block.as_mut_slice().copy_from_slice(&contents(len, seed));
    block
}

/// Stores the contents of a seed, labelled with it, and waits.
pub(crate) fn put(swapper: &Swapper, pool: &Pool, key: &str, len: usize, seed: u64) -> Result<(), Arc<Error>> {
    let block = Arc::new(block(pool, len, seed));
    swapper.write(key, &seed.to_string(), block).map_err(Arc::new)?.wait()
}

/// Reads an entry of whatever size it is, and waits.
pub(crate) fn get(swapper: &Swapper, pool: &Pool, key: &str) -> Result<Vec<u8>, Arc<Error>> {
    let (_, len) = swapper.describe(key).map_err(Arc::new)?;
    let mut target = pool.take(len).expect("room");
    target.as_mut_slice().fill(0xEE);
    let ticket = swapper.read(key, target).map_err(Arc::new)?;
    ticket.wait()?;
    Ok(ticket.take_block().expect("it was read").as_slice().to_vec())
}

/// The entry holds what its label says.
pub(crate) fn check(swapper: &Swapper, pool: &Pool, key: &str, len: usize, seed: u64) {
    assert_eq!(swapper.describe(key).expect("stored"), (seed.to_string().into(), len), "{key}");
    let bytes = get(swapper, pool, key).unwrap_or_else(|error| panic!("{key}: {error}"));
    assert!(bytes == contents(len, seed), "{key} does not hold what was written");
}

/// The keys, in order.
pub(crate) fn keys(swapper: &Swapper) -> Vec<String> {
    let mut keys: Vec<_> = swapper.keys().expect("ours").iter().map(ToString::to_string).collect();
    keys.sort();
    keys
}

/// Holds transfers back until it is opened: the engine has them, and the kernel does not.
#[derive(Debug)]
pub(crate) struct Gate {
    holds: fn(is_write: bool) -> bool,
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    open: bool,
    arrived: usize,
}

impl Gate {
    pub(crate) fn closed(holds: fn(is_write: bool) -> bool) -> Arc<Self> {
        Arc::new(Self { holds, state: Mutex::default(), changed: Condvar::new() })
    }

    pub(crate) fn open(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).open = true;
        self.changed.notify_all();
    }

    /// Waits until so many calls wait at the gate, or have.
    pub(crate) fn wait_for(&self, calls: usize) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(state, |state| state.arrived < calls).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Inject for Gate {
    fn fault(&self, is_write: bool, _offset: u64, _len: usize) -> Option<Fault> {
        if (self.holds)(is_write) {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.arrived += 1;
            self.changed.notify_all();
            drop(self.changed.wait_while(state, |state| !state.open).unwrap_or_else(PoisonError::into_inner));
        }
        None
    }
}

/// Opens a gate at the end of a test, passed or not, so that no engine waits for ever.
#[derive(Debug)]
pub(crate) struct Opened(pub(crate) Arc<Gate>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Asks a closure about each call to the kernel.
pub(crate) struct Asks<F>(pub(crate) F);

impl<F> fmt::Debug for Asks<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Asks")
    }
}

impl<F: Fn(bool, u64, usize) -> Option<Fault> + Send + Sync> Inject for Asks<F> {
    fn fault(&self, is_write: bool, offset: u64, len: usize) -> Option<Fault> {
        self.0(is_write, offset, len)
    }
}

/// Faults chosen by a closure.
pub(crate) fn asks(choose: impl Fn(bool, u64, usize) -> Option<Fault> + Send + Sync + 'static) -> Arc<dyn Inject> {
    Arc::new(Asks(choose))
}

/// The call, the code and the help of a refusal of the system's.
pub(crate) fn refusal(error: &Error) -> (&'static str, i32, &str) {
    match error {
        Error::Storage { call, code, help, .. } => (call, *code, help),
        other => panic!("no refusal of the system's: {other:?}"),
    }
}

/// A damaged file of this name is what the error tells of.
pub(crate) fn says_damaged(error: &Error, name: &str) {
    let is_so = matches!(error, Error::Damaged { file, .. } if file.ends_with(name));
    assert!(is_so, "no damage of {name}: {error}");
}
