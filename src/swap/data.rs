//! The data file: its opening, its lock, its length.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::index::{check_size, storage};
use super::lock;
use super::space::{Claim, Space, UNIT};
use crate::error::{Error, Result};
use crate::os;

/// Room of the file is made in steps of an eighth of it, up to this.
const LARGEST_STEP: usize = 64 << 20;
/// No file system holds more.
const MOST_BYTES: usize = 1 << 60;

/// The data file of an open store.
#[derive(Debug)]
pub(super) struct Data {
    pub(super) path: PathBuf,
    /// It carries the lock of the store, so that this lasts as long as the kernel's last transfer.
    pub(super) file: File,
    pub(super) space: Arc<Space>,
    /// How long it is.
    bytes: AtomicUsize,
    /// Held while that changes, over the system calls that it takes: nobody else needs it.
    growing: Mutex<()>,
    /// Transfers go past the page cache.
    pub(super) direct: bool,
    /// Why they do not, where that was not asked for.
    pub(super) direct_reason: Option<String>,
}

impl Data {
    /// Opens the file, or makes it, and keeps all others from the store.
    pub(super) fn open(path: PathBuf, direct: Option<bool>, max_bytes: Option<usize>) -> Result<Self> {
        let (file, direct, direct_reason) = open_file(&path, direct)?;
        lock_file(&file, &path)?;
        let bytes = file.metadata().map_err(|source| storage("reading", &path, &source))?.len() as usize;
        let space = Space::new(max_bytes.unwrap_or(MOST_BYTES));
        let (bytes, growing) = (AtomicUsize::new(bytes), Mutex::new(()));
        Ok(Self { path, file, space, bytes, growing, direct, direct_reason })
    }

    /// How long it is, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Finds room for so many bytes, on the disk, too.
    pub(super) fn claim(&self, len: usize, block: usize) -> Result<Claim> {
        let padded = len.next_multiple_of(UNIT);
        let claim = || self.space.claim(padded, block);
        let after_trim = || {
            let _growing = lock(&self.growing); // while room is trimmed, it is nobody's
            claim()
        };
        let claim = claim().or_else(after_trim).ok_or_else(|| {
            let (limit, used) = (self.space.limit(), self.space.used());
            let help = format!(
                "the store may hold {limit} bytes (max_bytes), {used} are taken, and {padded} more are needed: a new \
                 value is written before the old one goes; delete entries, or raise max_bytes"
            );
            Error::Storage { call: "allocation", file: self.path.clone(), place: None, code: os::FULL, help }
        })?;
        let grown = check_size(&self.path, claim.end() as u64).and_then(|()| self.grow(claim.end()));
        match grown {
            Ok(()) => Ok(claim),
            // The file gets no longer. Perhaps there are holes enough in it.
            Err(refusal) => {
                drop(claim);
                let _growing = lock(&self.growing); // or a trim could cut off what is claimed here
                let end = self.bytes().min(os::file_size_limit() as usize);
                self.space.claim_below(end, padded, block).ok_or(refusal)
            }
        }
    }

    /// Makes the data file at least so long, with room on the disk for all of it.
    fn grow(&self, end: usize) -> Result<()> {
        let fits = || end <= self.bytes.load(Ordering::Acquire);
        if fits() {
            return Ok(());
        }
        let _growing = lock(&self.growing);
        if fits() {
            return Ok(());
        }
        let start = self.bytes.load(Ordering::Acquire);
        let step = (end / 8).min(LARGEST_STEP) / UNIT * UNIT;
        let ahead = (end + step).min(self.space.limit()).min(os::file_size_limit() as usize / UNIT * UNIT).max(end);
        let allocate = |end: usize| os::allocate(&self.file, start as u64, (end - start) as u64).map(|()| end);
        let grown = allocate(ahead).or_else(|refusal| match refusal.raw_os_error() {
            // The file system has no such call: the room is looked for when it is written to.
            Some(os::NOT_SUPPORTED) => self.file.set_len(end as u64).map(|()| end),
            _ => allocate(end),
        });
        let grown = grown.map_err(|source| {
            let _ = self.file.set_len(start as u64); // what was made of it
            storage("growing", &self.path, &source)
        })?;
        self.bytes.store(grown, Ordering::Release);
        Ok(())
    }

    /// Gives free room back to the file system, and answers how many bytes that were.
    pub(super) fn trim(&self) -> Result<usize> {
        self.give_back().map_err(|source| storage("trimming", &self.path, &source))
    }

    fn give_back(&self) -> io::Result<usize> {
        const BLOCK: u64 = 512; // the unit of `blocks`, on every file system
        let _growing = lock(&self.growing);
        let end = self.bytes.load(Ordering::Acquire);
        let free = self.space.claim_free(end);
        let before = self.file.metadata()?.blocks();
        for extent in free.extents() {
            if extent.end() >= end {
                self.file.set_len(extent.offset as u64)?;
                self.bytes.store(extent.offset, Ordering::Release);
            } else {
                match os::punch(&self.file, extent.offset as u64, extent.len as u64) {
                    Err(refusal) if refusal.raw_os_error() != Some(os::NOT_SUPPORTED) => return Err(refusal),
                    _ => {} // where holes cannot be punched, the end can still be cut
                }
            }
        }
        Ok((before.saturating_sub(self.file.metadata()?.blocks()) * BLOCK) as usize)
    }

    /// Makes what was written survive a loss of power.
    pub(super) fn flush(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| storage("flushing", &self.path, &source))
    }

    /// Lets others have the store.
    pub(super) fn unlock(&self) -> Result<()> {
        self.file.unlock().map_err(|source| storage("unlocking", &self.path, &source))
    }
}

/// Opens the data file, past the page cache where that can be had, and says why where it cannot.
fn open_file(path: &Path, direct: Option<bool>) -> Result<(File, bool, Option<String>)> {
    let refused = |source: io::Error| storage("opening", path, &source);
    if direct == Some(false) {
        return os::open(path, false).map(|file| (file, false, None)).map_err(refused);
    }
    let reason = match os::open(path, true) {
        Ok(file) => match os::direct_alignment(&file) {
            Some(0) => "the file system has no direct transfers for this file".to_owned(),
            Some(alignment) if alignment > UNIT => {
                format!("the disk wants direct transfers aligned to {alignment} bytes")
            }
            _ => return Ok((file, true, None)),
        },
        Err(source) if source.raw_os_error() == Some(os::INVALID) => {
            "the file system does not open files with O_DIRECT".to_owned()
        }
        Err(source) => return Err(refused(source)),
    };
    if direct == Some(true) {
        let what = format!("O_DIRECT for {}", path.display());
        return Err(Error::unsupported(what, format!("{reason}; use another file system, or leave direct=None")));
    }
    os::open(path, false).map(|file| (file, false, Some(reason))).map_err(refused)
}

/// Keeps all others from the store. A process that was killed may hold it for a moment, until its last transfers are done.
fn lock_file(file: &File, path: &Path) -> Result<()> {
    const STEP: Duration = Duration::from_millis(5);
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let holder = match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => holder(file),
            Err(TryLockError::Error(source)) => return Err(storage("locking", path, &source)),
        };
        if holder.is_none() && Instant::now() < deadline {
            std::thread::sleep(STEP);
            continue;
        }
        let who = holder
            .map_or("a child of a process that has ended, or one that is not seen from here,".into(), |id| {
                format!("process {id}")
            });
        let help = format!("{who} has the store open; close it there, or use another directory");
        return Err(Error::Storage { call: "locking", file: path.to_owned(), place: None, code: os::IN_USE, help });
    }
}

/// Who has locked a file, as far as the kernel tells.
fn holder(file: &File) -> Option<u32> {
    let inode = format!(":{}", file.metadata().ok()?.ino());
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let line = locks.lines().find(|line| {
        let mut fields = line.split_whitespace();
        line.contains("FLOCK") && fields.any(|field| field.ends_with(&inode))
    })?;
    line.split_whitespace().find_map(|field| field.parse().ok())
}
