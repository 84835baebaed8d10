//! The bytes of one operation on their way between memory and the data file, piece by piece.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::entry::{self, Entry};
use super::space::{Claim, UNIT};
use super::ticket::{Action, Operation};
use super::{Fault, lock};
use crate::error::Error;
use crate::os;

/// An operation as the engine sees it.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) operation: Arc<Operation>,
    /// Of a write, where it goes; then it is the entry's.
    pub(super) claim: Mutex<Option<Claim>>,
    /// Of a read, what is read, until its end.
    pub(super) entry: Mutex<Option<Arc<Entry>>>,
    plan: OnceLock<Plan>,
    state: Mutex<State>,
}

/// What the transfer is made of, known when it begins.
#[derive(Debug)]
struct Plan {
    block: usize,
    /// Where in the file each piece is.
    offsets: Box<[u64]>,
    digests: Box<[AtomicU64]>,
}

#[derive(Debug, Default)]
struct State {
    /// Pieces that were given out.
    issued: usize,
    /// Calls to the kernel, and digests, that were begun or are to come for these.
    in_flight: usize,
    failure: Option<Error>,
}

/// One call to the kernel: a piece, or what is left of one.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) transfer: Arc<Transfer>,
    number: usize,
    pub(super) is_write: bool,
    pub(super) address: usize,
    len: usize,
    pub(super) offset: u64,
    /// What the kernel is asked for: all of it, unless a test injects a fault.
    pub(super) asked: usize,
    refusal: Option<i32>,
    /// Of a write, until it is handed to the kernel: its digest is to be made meanwhile.
    digest: Option<Digest>,
}

/// The checksum of a piece, which is to be made.
#[derive(Debug)]
pub(super) struct Digest {
    transfer: Arc<Transfer>,
    number: usize,
}

/// What is to be done after a call to the kernel.
#[derive(Debug)]
pub(super) enum Next {
    /// The rest of the piece.
    Again(Piece),
    /// What was read is to be checked.
    Digest(Digest),
    /// Nothing: other pieces are to come, or under way.
    Nothing,
    /// The transfer is complete, or has failed and rests.
    Finish(Arc<Transfer>),
}

impl Transfer {
    pub(super) fn new(operation: Arc<Operation>, claim: Option<Claim>) -> Arc<Self> {
        let (claim, entry, plan) = (Mutex::new(claim), Mutex::default(), OnceLock::new());
        Arc::new(Self { operation, claim, entry, plan, state: Mutex::default() })
    }

    /// Makes the plan of a write in pieces of `block` bytes.
    pub(super) fn plan_write(&self, block: usize) {
        if let Some(claim) = &*lock(&self.claim) {
            self.plan(block, claim);
        }
    }

    /// Makes the plan of a read.
    pub(super) fn plan_read(&self, entry: Arc<Entry>) {
        self.plan(entry.block, &entry.claim);
        *lock(&self.entry) = Some(entry);
    }

    fn plan(&self, block: usize, claim: &Claim) {
        let starts = (0..self.operation.len).step_by(block);
        let offsets: Box<[u64]> = starts.map(|start| claim.offset_of(start) as u64).collect();
        let digests = offsets.iter().map(|_| AtomicU64::new(0)).collect();
        let _ = self.plan.set(Plan { block, offsets, digests });
    }

    fn is_write(&self) -> bool {
        matches!(self.operation.action, Action::Write(_))
    }

    /// The pieces; none before the plan is made, or where there is nothing to move.
    fn pieces(&self) -> usize {
        self.plan.get().map_or(0, |plan| plan.offsets.len())
    }

    /// Nothing of it is to be given out.
    pub(super) fn is_issued(&self) -> bool {
        let state = lock(&self.state);
        state.issued == self.pieces() || state.failure.is_some()
    }

    /// The next piece to be moved.
    pub(super) fn issue(self: &Arc<Self>) -> Option<Piece> {
        let plan = self.plan.get()?;
        let mut state = lock(&self.state);
        if state.issued == plan.offsets.len() || state.failure.is_some() {
            return None;
        }
        let number = state.issued;
        state.issued += 1;
        state.in_flight += if self.is_write() { 2 } else { 1 };
        drop(state);
        let start = number * plan.block;
        let len = plan.block.min(self.operation.len - start).next_multiple_of(UNIT);
        let (address, offset, is_write) = (self.operation.address + start, plan.offsets[number], self.is_write());
        let transfer = Arc::clone(self);
        let digest = is_write.then(|| Digest { transfer: Arc::clone(self), number });
        Some(Piece { transfer, number, is_write, address, len, offset, asked: len, refusal: None, digest })
    }

    /// There is nothing to move.
    pub(super) fn is_without_pieces(&self) -> bool {
        self.pieces() == 0
    }

    /// The bytes of a piece that count.
    #[allow(unsafe_code)] // looks at memory that the operation keeps alive
    fn bytes_of(&self, number: usize, block: usize) -> &[u8] {
        let start = number * block;
        let len = block.min(self.operation.len - start);
        // SAFETY: the operation keeps the block from reuse until its end, and its makers have promised that nobody
        // writes to it before that.
        unsafe { std::slice::from_raw_parts((self.operation.address + start) as *const u8, len) }
    }

    /// The checksum of all that was moved.
    pub(super) fn checksum(&self) -> u64 {
        let digests = self.plan.get().map_or(&[][..], |plan| &plan.digests);
        entry::checksum(digests.iter().map(|digest| digest.load(Ordering::Relaxed)))
    }

    /// What kept it from being done. Nothing of it is given out from then on.
    pub(super) fn take_failure(&self) -> Option<Error> {
        let mut state = lock(&self.state);
        state.issued = self.pieces();
        state.failure.take()
    }

    /// A call to the kernel, or a digest, has ended.
    fn one_is_over(self: Arc<Self>, failure: Option<Error>) -> Next {
        let mut state = lock(&self.state);
        state.in_flight -= 1;
        if state.failure.is_none() {
            state.failure = failure;
        }
        let is_over = state.in_flight == 0 && (state.issued == self.pieces() || state.failure.is_some());
        drop(state);
        if is_over { Next::Finish(self) } else { Next::Nothing }
    }
}

impl Digest {
    /// Bytes to look at, or a little more.
    pub(super) fn len(&self) -> usize {
        self.transfer.plan.get().map_or(0, |plan| plan.block.min(self.transfer.operation.len))
    }

    /// Makes it.
    pub(super) fn make(self) -> Next {
        let Self { transfer, number } = self;
        if let Some(plan) = transfer.plan.get() {
            let digest = entry::digest(transfer.bytes_of(number, plan.block));
            plan.digests[number].store(digest, Ordering::Relaxed); // the lock below orders it
        }
        transfer.one_is_over(None)
    }
}

impl Piece {
    /// Bytes that are left to be moved.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Lets a test have its way with the call.
    pub(super) fn inject(&mut self, fault: Option<Fault>) {
        (self.asked, self.refusal) = match fault {
            None => (self.len, None),
            Some(Fault::Short(bytes)) => (bytes.min(self.len), None),
            Some(Fault::Refusal(code)) => (self.len, Some(code)),
        };
    }

    /// What is to be made while the kernel writes the piece.
    pub(super) fn take_digest(&mut self) -> Option<Digest> {
        self.digest.take()
    }

    /// Takes note of what the kernel answered: how many bytes it moved.
    pub(super) fn moved(mut self, answer: io::Result<usize>, data: &Path) -> Next {
        let answer = self.refusal.map_or(answer, |code| Err(io::Error::from_raw_os_error(code)));
        let failure = match answer {
            Ok(bytes) if bytes >= self.len => None,
            Err(error) if error.kind() == io::ErrorKind::Interrupted || error.raw_os_error() == Some(os::TRY_AGAIN) => {
                return Next::Again(self);
            }
            // What comes next must be aligned as the whole is.
            Ok(bytes) if bytes >= UNIT => {
                let bytes = bytes / UNIT * UNIT;
                self.address += bytes;
                self.offset += bytes as u64;
                self.len -= bytes;
                return Next::Again(self);
            }
            Ok(bytes) => Some(self.stopped(bytes, data)),
            Err(error) => Some(self.refused(&error, data)),
        };
        if failure.is_none() && !self.is_write {
            return Next::Digest(Digest { transfer: self.transfer, number: self.number });
        }
        self.transfer.one_is_over(failure)
    }

    /// The kernel goes no further, and gives no reason.
    fn stopped(&self, bytes: usize, data: &Path) -> Error {
        let (file, offset, key) = (data.to_owned(), self.offset + bytes as u64, &self.transfer.operation.key);
        let left = self.len - bytes;
        if self.is_write {
            let help = format!("the write of {key:?} got no further; what was stored under that key before still is");
            return Error::Storage { call: "writing", file, place: Some((offset, left)), code: os::DISK_ERROR, help };
        }
        let what = format!("the file ends there, in the middle of the entry {key:?}");
        Error::Damaged { file, offset, bytes: left, what }
    }

    /// Some file systems open a file for direct transfers, and then refuse them.
    fn hint(error: &io::Error) -> &'static str {
        if error.raw_os_error() == Some(os::INVALID) { "; if direct transfers fail here, say direct=False" } else { "" }
    }

    fn refused(&self, error: &io::Error, data: &Path) -> Error {
        let key = &self.transfer.operation.key;
        let (call, help) = match (self.is_write, error.kind()) {
            (true, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                let help = "was not written, and what was stored under that key before still is: make room there, \
                            trim(), or delete entries";
                ("writing", format!("{key:?} {help}"))
            }
            (true, _) => {
                let help = "was not written, and what was stored under that key before still is";
                ("writing", format!("{key:?} {help}{}", Self::hint(error)))
            }
            (false, _) => ("reading", format!("{key:?} could not be read{}", Self::hint(error))),
        };
        let code = error.raw_os_error().unwrap_or(os::DISK_ERROR);
        Error::Storage { call, file: data.to_owned(), place: Some((self.offset, self.len)), code, help }
    }
}
