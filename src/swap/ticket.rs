//! One operation under way: what it does, the memory that it owns meanwhile, and whoever waits for its end.

use std::ops::{ControlFlow, Range};
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::busy::{self, Claimed};
use super::lock;
use super::space::UNIT;
use crate::block::Block;
use crate::error::{Error, Result};
use crate::os::{self, EventFd};
use crate::pool::{self, Found, Hold};
use crate::region::Progress;
use crate::registry::shared::global;

/// How an operation ended. Whoever asks gets the same.
pub type Outcome = std::result::Result<(), Arc<Error>>;

/// Memory of a pool's, which is kept from reuse for as long as this lives, by whatever owners it has.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) address: usize,
    pub(super) len: usize,
    keep: Keep,
}

#[derive(Debug)]
enum Keep {
    Block(Arc<Block>),
    #[allow(dead_code)] // held, never read
    Part(Hold, Claimed),
    Nothing,
}

impl Memory {
    /// A whole block.
    pub(super) fn of_block(block: Arc<Block>) -> Self {
        Self { address: block.as_ptr() as usize, len: block.len(), keep: Keep::Block(block) }
    }

    /// A part of whatever block it is in, to be written from, or `filled` by a read: once device work on the block is done,
    /// and transfers that use the same bytes otherwise.
    pub(super) fn part(range: Range<usize>, filled: bool, progress: &mut Progress<'_>) -> Result<Self> {
        let Some(found) = find(&range)? else { return Ok(Self::nothing()) };
        if filled {
            check_tail(&range, &found)?;
        }
        found.settle(progress)?;
        let (address, len) = (range.start, range.end - range.start);
        let end = (address + len).next_multiple_of(UNIT);
        let claimed = busy::claim(address..end, filled, progress)?;
        Ok(Self { address, len, keep: Keep::Part(found.hold()?, claimed) })
    }

    /// No bytes.
    pub(super) fn nothing() -> Self {
        Self { address: 0, len: 0, keep: Keep::Nothing }
    }
}

/// Whether a range can be written from, or as a `target` read into, as it is.
///
/// # Errors
/// `Invalid` with the reason why it cannot.
pub fn check_fit(range: &Range<usize>, target: bool) -> Result<()> {
    match find(range)? {
        Some(found) if target => check_tail(range, &found),
        _ => Ok(()),
    }
}

/// The block that holds a range which direct transfers can start at; `None` for no bytes.
fn find(range: &Range<usize>) -> Result<Option<Found>> {
    if range.is_empty() {
        return Ok(None);
    }
    check_ours(range)?;
    if !range.start.is_multiple_of(UNIT) {
        let (address, len) = (range.start, range.end - range.start);
        let why = format!(
            "{address:#x}+{len} does not start at a multiple of {UNIT} bytes, as direct transfers must; write and read \
             whole blocks, or views that start so, or say copy=True"
        );
        return Err(Error::invalid("memory", why));
    }
    pool::find(range).map(Some)
}

/// Refuses what a read would overrun: it fills whole units, so what lies behind must not be anybody's.
fn check_tail(range: &Range<usize>, found: &Found) -> Result<()> {
    if range.end.is_multiple_of(UNIT) || range.end == found.requested().end {
        return Ok(());
    }
    let (start, len) = (range.start, range.end - range.start);
    let why = format!(
        "{start:#x}+{len} ends inside of a block, and not at a multiple of {UNIT} bytes: a direct read would overwrite \
         what lies behind it; read into a block of its own, or say copy=True"
    );
    Err(Error::invalid("memory", why))
}

/// Refuses memory of the caller's own, which may be freed at any time: one look into the registry.
fn check_ours(range: &Range<usize>) -> Result<()> {
    let (address, len) = (range.start, range.end - range.start);
    let whose = match global().read(|registry| registry.find(address).map(|found| found.adopted)) {
        Some(false) => return Ok(()),
        Some(true) => "is pinned by a Registration, and belongs to its caller",
        None if pool::find(range).is_ok() => return Ok(()), // a block that was unpinned is a block
        None => "is in no pool",
    };
    let why = format!(
        "{address:#x}+{len} {whose}: a transfer without a copy needs memory that is not freed before its end; use a \
         tensor or an array of a PinnedPool, or say copy=True"
    );
    Err(Error::invalid("memory", why))
}

/// What an operation does with its key.
#[derive(Debug)]
pub(super) enum Action {
    /// Stores the memory, and this label with it.
    Write(Box<str>),
    /// Fills the memory, with a value of this label, if one is given.
    Read(Option<Box<str>>),
    Delete,
}

/// One operation.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) key: Arc<str>,
    pub(super) action: Action,
    pub(super) address: usize,
    pub(super) len: usize,
    keep: Mutex<Keep>,
    outcome: OnceLock<Outcome>,
    /// Where its failure is kept until somebody is told.
    unheard: Arc<Unheard>,
    /// Readable once the operation is done, for those who wait for several things.
    watchers: Mutex<Vec<Arc<EventFd>>>,
    done: Condvar,
}

impl Operation {
    pub(super) fn new(key: Arc<str>, action: Action, memory: Memory, unheard: &Arc<Unheard>) -> Arc<Self> {
        let Memory { address, len, keep } = memory;
        let (keep, outcome, unheard) = (Mutex::new(keep), OnceLock::new(), Arc::clone(unheard));
        let (watchers, done) = (Mutex::default(), Condvar::new());
        Arc::new(Self { key, action, address, len, keep, outcome, unheard, watchers, done })
    }

    /// The kernel is done with the memory: lets go of it, and tells everybody. A block that was read into stays for
    /// [`Ticket::take_block`].
    pub(super) fn end(&self, outcome: Outcome) {
        let is_read = matches!(self.action, Action::Read(_)) && outcome.is_ok();
        let mut keep = lock(&self.keep);
        let kept = if is_read && matches!(*keep, Keep::Block(_)) { Keep::Nothing } else { take(&mut keep) };
        drop(keep);
        drop(kept);
        if let (false, Err(failure)) = (matches!(self.action, Action::Read(_)), &outcome) {
            self.unheard.keep(failure);
        }
        let _ = self.outcome.set(outcome);
        let watchers = std::mem::take(&mut *lock(&self.watchers));
        self.done.notify_all();
        for watcher in watchers {
            watcher.notify();
        }
    }
}

/// Failures of writes and deletions that nobody has been told of: the first ones.
#[derive(Debug, Default)]
pub(super) struct Unheard(Mutex<Vec<Arc<Error>>>);

impl Unheard {
    const MOST: usize = 100;

    fn keep(&self, failure: &Arc<Error>) {
        let mut failures = lock(&self.0);
        if failures.len() < Self::MOST {
            failures.push(Arc::clone(failure));
        }
    }

    fn tell(&self, told: &Arc<Error>) {
        lock(&self.0).retain(|failure| !Arc::ptr_eq(failure, told));
    }

    /// The first of them; whoever asks is told of all.
    pub(super) fn take(&self) -> Option<Arc<Error>> {
        std::mem::take(&mut *lock(&self.0)).into_iter().next()
    }
}

fn take(keep: &mut Keep) -> Keep {
    std::mem::replace(keep, Keep::Nothing)
}

/// A write, a read or a deletion that was begun. It goes on when this is dropped. The failure of a write or a deletion that
/// nobody waits for is kept for [`Swapper::take_unheard`](super::Swapper::take_unheard).
#[derive(Debug)]
pub struct Ticket {
    operation: Arc<Operation>,
    fork_generation: u64,
}

impl Ticket {
    pub(super) fn new(operation: Arc<Operation>) -> Self {
        Self { operation, fork_generation: os::fork_generation() }
    }

    /// What the operation concerns.
    pub fn key(&self) -> &str {
        &self.operation.key
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.operation.outcome.get().is_some()
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// What kept the operation from being done.
    pub fn wait(&self) -> Outcome {
        loop {
            if let Some(outcome) = self.wait_within(None, &mut |_, _| ControlFlow::Continue(())).map_err(Arc::new)? {
                return outcome;
            }
        }
    }

    /// Waits for the end, up to `timeout` (`None`: for ever), and asks `progress` now and then, with no bytes. `None`: the
    /// time is up, and the operation goes on.
    ///
    /// # Errors
    /// `Interrupted` when `progress` says so, and the operation goes on; `SwapperForked` in a forked child.
    pub fn wait_within(&self, timeout: Option<Duration>, progress: &mut Progress<'_>) -> Result<Option<Outcome>> {
        const STEP: Duration = Duration::from_millis(50);
        let Operation { outcome, watchers, done, .. } = &*self.operation;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(outcome) = outcome.get() {
                if let (Err(failure), Ok(())) = (outcome, self.check_process()) {
                    self.operation.unheard.tell(failure);
                }
                return Ok(Some(outcome.clone()));
            }
            self.check_process()?;
            let left = deadline.map_or(STEP, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(None);
            }
            let guard = lock(watchers);
            if outcome.get().is_none() {
                drop(done.wait_timeout(guard, left.min(STEP)).unwrap_or_else(PoisonError::into_inner));
            }
            if outcome.get().is_none() && progress(0, 0).is_break() {
                return Err(Error::Interrupted);
            }
        }
    }

    /// A descriptor that is readable from the end on, for event loops. It is closed with what is returned.
    ///
    /// # Errors
    /// `Os` where the process has no descriptor left; `SwapperForked` in a forked child.
    pub fn watch(&self) -> Result<Watch> {
        self.check_process()?;
        let event = EventFd::new().map_err(|source| Error::Os { call: "eventfd", bytes: 0, source })?;
        let event = Arc::new(event);
        let mut watchers = lock(&self.operation.watchers);
        if self.is_done() {
            event.notify();
        } else {
            watchers.push(Arc::clone(&event));
        }
        drop(watchers);
        Ok(Watch { operation: Arc::clone(&self.operation), event, fork_generation: self.fork_generation })
    }

    /// The block that was read into, once the read has ended well. The first to ask gets it.
    pub fn take_block(&self) -> Option<Arc<Block>> {
        if self.check_process().is_err() || !matches!(self.operation.outcome.get(), Some(Ok(()))) {
            return None;
        }
        match take(&mut lock(&self.operation.keep)) {
            Keep::Block(block) => Some(block),
            Keep::Part(..) | Keep::Nothing => None,
        }
    }

    fn check_process(&self) -> Result<()> {
        if self.fork_generation == os::fork_generation() { Ok(()) } else { Err(Error::SwapperForked) }
    }
}

/// See [`Ticket::watch`].
#[derive(Debug)]
pub struct Watch {
    operation: Arc<Operation>,
    event: Arc<EventFd>,
    fork_generation: u64,
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.fork_generation == os::fork_generation() {
            lock(&self.operation.watchers).retain(|watcher| !Arc::ptr_eq(watcher, &self.event));
        }
    }
}

impl Watch {
    /// The descriptor.
    pub fn fd(&self) -> RawFd {
        self.event.raw()
    }
}
