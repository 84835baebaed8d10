//! An open store: its files, its entries, and the order of the operations on one key.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::entry::{self, Entry, Record};
use super::index::{Index, check_size, storage};
use super::queue::Queue;
use super::space::{Claim, Space, UNIT};
use super::ticket::{Action, Operation};
use super::transfer::{Next, Piece, Transfer};
use super::uring::FixedBuffers;
use super::{Checked, Engine, Inject, Stats, file_of, lock, threads};
use crate::error::{Error, Result};
use crate::os::{self, EventFd};

/// Room of the data file is made in steps of an eighth of it, up to this.
const LARGEST_STEP: usize = 64 << 20;
/// No file system holds more.
const MOST_BYTES: usize = 1 << 60;

/// See the module.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) directory: PathBuf,
    data_path: PathBuf,
    /// It carries the lock of the store, so that this lasts as long as the kernel's last transfer.
    pub(super) data: File,
    pub(super) queue: Queue,
    space: Arc<Space>,
    /// How long the data file is.
    file_bytes: AtomicUsize,
    /// Held while that changes, over the system calls that it takes: nobody else needs it.
    growing: Mutex<()>,
    /// `None` once the store is closed. Held while it is written: no one else needs it.
    index: Mutex<Option<Index>>,
    keys: Mutex<Keys>,
    writes: Mutex<Meter>,
    reads: Mutex<Meter>,
    pub(super) fixed: OnceLock<Arc<FixedBuffers>>,
    bounces: AtomicUsize,
    bounced_bytes: AtomicUsize,
    block_bytes: usize,
    queue_depth: usize,
    max_bytes: Option<usize>,
    engine: Engine,
    engine_reason: Option<String>,
    direct: bool,
    direct_reason: Option<String>,
    inject: Option<Arc<dyn Inject>>,
    fork_generation: u64,
}

/// What is stored, and what is about to be.
#[derive(Debug, Default)]
struct Keys {
    entries: HashMap<Arc<str>, Arc<Entry>>,
    /// Of each key that is being written or deleted.
    lines: HashMap<Arc<str>, Line>,
}

/// The operations that wait for a write or a deletion of their key.
#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<Arc<Transfer>>,
    /// What a read at its end will find, if all goes well.
    newest: Option<(Box<str>, usize)>,
}

/// How much was moved, and how long that was under way.
#[derive(Debug, Default)]
struct Meter {
    running: usize,
    since: Option<Instant>,
    busy: Duration,
    bytes: usize,
}

impl Meter {
    fn start(&mut self) {
        if self.running == 0 {
            self.since = Some(Instant::now());
        }
        self.running += 1;
    }

    fn stop(&mut self, bytes: usize) {
        self.running -= 1;
        self.bytes += bytes;
        if self.running == 0 {
            self.busy += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    fn busy(&self) -> Duration {
        self.busy + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Store {
    pub(super) fn open(
        directory: &Path,
        options: &Checked,
        has_ring: bool,
        engine_reason: Option<String>,
    ) -> Result<Self> {
        std::fs::create_dir_all(directory).map_err(|source| storage("making", directory, &source))?;
        let data_path = file_of(directory, "data");
        let (data, direct, direct_reason) = open_data(&data_path, options.direct)?;
        lock_data(&data, &data_path)?;
        let limit = options.max_bytes.unwrap_or(MOST_BYTES);
        let (space, mut entries) = (Space::new(limit), HashMap::new());
        let file_bytes = data.metadata().map_err(|source| storage("reading", &data_path, &source))?.len() as usize;
        let index = file_of(directory, "index");
        let index = Index::open(&index, file_bytes == 0, |record| replay(record, &mut entries))?;
        let entries = claim_all(entries, &space, &data_path)?;
        let bell = has_ring.then(EventFd::new).transpose();
        let bell = bell.map_err(|source| Error::Os { call: "eventfd", bytes: 0, source })?;
        let Checked { block_bytes, queue_depth, max_bytes, .. } = *options;
        Ok(Self {
            directory: directory.to_owned(),
            data_path,
            data,
            queue: Queue::new(bell),
            space,
            file_bytes: AtomicUsize::new(file_bytes),
            growing: Mutex::new(()),
            index: Mutex::new(Some(index)),
            keys: Mutex::new(Keys { entries, lines: HashMap::new() }),
            writes: Mutex::default(),
            reads: Mutex::default(),
            fixed: OnceLock::new(),
            bounces: AtomicUsize::new(0),
            bounced_bytes: AtomicUsize::new(0),
            block_bytes,
            queue_depth: if has_ring { queue_depth } else { threads::depth(queue_depth) },
            max_bytes,
            engine: if has_ring { Engine::IoUring } else { Engine::Threads },
            engine_reason,
            direct,
            direct_reason,
            inject: options.inject.clone(),
            fork_generation: os::fork_generation(),
        })
    }

    pub(super) fn begin_write(&self, operation: &Arc<Operation>) -> Result<()> {
        self.admit()?;
        let begun = self.claim(operation.len).map(|claim| {
            let transfer = Transfer::new(Arc::clone(operation), Some(claim));
            transfer.plan_write(self.block_bytes);
            let Action::Write(label) = &operation.action else { unreachable!("a write") };
            let newest = Some((label.clone(), operation.len));
            let mut keys = lock(&self.keys);
            if let Some(line) = keys.lines.get_mut(&operation.key) {
                line.newest = newest;
                line.waiting.push_back(transfer);
            } else {
                keys.lines.insert(Arc::clone(&operation.key), Line { newest, ..Line::default() });
                drop(keys);
                self.start(transfer);
            }
        });
        begun.inspect_err(|_| self.queue.dismiss())
    }

    pub(super) fn begin_read(&self, operation: &Arc<Operation>) -> Result<()> {
        self.admit()?;
        let transfer = Transfer::new(Arc::clone(operation), None);
        let begin = || {
            let mut keys = lock(&self.keys);
            if let Some(line) = keys.lines.get_mut(&operation.key) {
                let (_, len) = line.newest.as_ref().ok_or_else(|| self.unknown(&operation.key))?;
                check_len(&operation.key, *len, operation.len)?;
                line.waiting.push_back(transfer);
                return Ok(());
            }
            let entry = keys.entries.get(&operation.key).ok_or_else(|| self.unknown(&operation.key))?;
            check_len(&operation.key, entry.len, operation.len)?;
            transfer.plan_read(Arc::clone(entry));
            drop(keys);
            self.start(transfer);
            Ok(())
        };
        begin().inspect_err(|_| self.queue.dismiss())
    }

    pub(super) fn begin_delete(&self, operation: &Arc<Operation>) -> Result<()> {
        self.admit()?;
        let transfer = Transfer::new(Arc::clone(operation), None);
        let begin = || {
            let mut keys = lock(&self.keys);
            if let Some(line) = keys.lines.get_mut(&operation.key) {
                line.newest.take().ok_or_else(|| self.unknown(&operation.key))?;
                line.waiting.push_back(transfer);
                return Ok(());
            }
            if !keys.entries.contains_key(&operation.key) {
                return Err(self.unknown(&operation.key));
            }
            keys.lines.insert(Arc::clone(&operation.key), Line::default());
            drop(keys);
            self.start(transfer);
            Ok(())
        };
        begin().inspect_err(|_| self.queue.dismiss())
    }

    fn admit(&self) -> Result<()> {
        if self.queue.admit() { Ok(()) } else { Err(Error::SwapperClosed) }
    }

    fn unknown(&self, key: &str) -> Error {
        Error::UnknownKey { key: key.into(), store: self.directory.clone() }
    }

    fn start(&self, transfer: Arc<Transfer>) {
        if let Some(meter) = self.meter(&transfer.operation) {
            lock(meter).start();
        }
        self.queue.begin(transfer);
    }

    fn meter(&self, operation: &Operation) -> Option<&Mutex<Meter>> {
        match operation.action {
            Action::Write(_) => Some(&self.writes),
            Action::Read => Some(&self.reads),
            Action::Delete => None,
        }
    }

    /// Finds room for so many bytes, on the disk, too.
    fn claim(&self, len: usize) -> Result<Claim> {
        let padded = len.next_multiple_of(UNIT);
        let claim = || self.space.claim(padded, self.block_bytes);
        let after_trim = || {
            drop(lock(&self.growing)); // while room is trimmed, it is nobody's
            claim()
        };
        let claim = claim().or_else(after_trim).ok_or_else(|| {
            let (limit, used) = (self.space.limit(), self.space.used());
            let help = format!(
                "the store may hold {limit} bytes (max_bytes), {used} are taken, and {padded} more are needed: a new \
                 value is written before the old one goes; delete entries, or raise max_bytes"
            );
            self.refusal("making room in", os::FULL, help)
        })?;
        check_size(&self.data_path, claim.end() as u64)?;
        self.grow(claim.end())?;
        Ok(claim)
    }

    /// Makes the data file at least so long, with room on the disk for all of it.
    fn grow(&self, end: usize) -> Result<()> {
        let fits = || end <= self.file_bytes.load(Ordering::Acquire);
        if fits() {
            return Ok(());
        }
        let _growing = lock(&self.growing);
        if fits() {
            return Ok(());
        }
        let start = self.file_bytes.load(Ordering::Acquire);
        let step = (end / 8).min(LARGEST_STEP) / UNIT * UNIT;
        let ahead = (end + step).min(self.space.limit()).min(os::file_size_limit() as usize / UNIT * UNIT).max(end);
        let allocate = |end: usize| os::allocate(&self.data, start as u64, (end - start) as u64).map(|()| end);
        let grown = allocate(ahead).or_else(|refusal| match refusal.raw_os_error() {
            // The file system has no such call: the room is looked for when it is written to.
            Some(os::NOT_SUPPORTED) => self.data.set_len(end as u64).map(|()| end),
            _ => allocate(end),
        });
        let grown = grown.map_err(|source| {
            let _ = self.data.set_len(start as u64); // what was made of it
            storage("growing", &self.data_path, &source)
        })?;
        self.file_bytes.store(grown, Ordering::Release);
        Ok(())
    }

    fn refusal(&self, call: &'static str, code: i32, help: String) -> Error {
        Error::Storage { call, file: self.data_path.clone(), place: None, code, help }
    }

    /// Lets a test have its way with a call to the kernel.
    pub(super) fn tamper(&self, piece: &mut Piece) {
        let fault = self.inject.as_ref().and_then(|inject| inject.fault(piece.is_write, piece.offset, piece.len()));
        piece.inject(fault);
    }

    /// The kernel has answered.
    pub(super) fn moved(&self, piece: Piece, answer: io::Result<usize>) {
        match piece.moved(answer, &self.data_path) {
            Next::Again(rest) => self.queue.again(rest),
            Next::Nothing => {}
            Next::Finish(transfer) => self.finish_transfer(&transfer),
        }
    }

    /// All of a transfer is moved, or no more of it will be.
    pub(super) fn finish_transfer(&self, transfer: &Transfer) {
        let operation = &transfer.operation;
        let moved = transfer.take_failure().map_or(Ok(()), Err);
        let result = moved.and_then(|()| match &operation.action {
            Action::Write(label) => self.commit_put(transfer, label),
            Action::Read => self.check(transfer),
            Action::Delete => self.commit_delete(&operation.key),
        });
        drop(lock(&transfer.claim).take()); // of a write that failed: its room is free
        if let Some(meter) = self.meter(operation) {
            lock(meter).stop(if result.is_ok() { operation.len } else { 0 });
        }
        if !matches!(operation.action, Action::Read) {
            self.advance(&operation.key);
        }
        operation.end(result.map_err(Arc::new));
        self.queue.dismiss();
    }

    /// From here on the key has the new value.
    fn commit_put(&self, transfer: &Transfer, label: &str) -> Result<()> {
        let operation = &transfer.operation;
        let claim = lock(&transfer.claim).take().expect("a write that has not ended has its room");
        let (len, block, checksum) = (operation.len, self.block_bytes, transfer.checksum());
        let entry = Entry { label: label.into(), len, block, checksum, claim };
        self.commit(&entry::put(&operation.key, &entry), |entries| {
            entries.insert(Arc::clone(&operation.key), Arc::new(entry))
        })
    }

    fn commit_delete(&self, key: &Arc<str>) -> Result<()> {
        if !lock(&self.keys).entries.contains_key(key) {
            return Err(self.unknown(key)); // the write before it has failed
        }
        self.commit(&entry::delete(key), |entries| entries.remove(key))
    }

    /// Appends a change to the index, and makes it.
    fn commit(
        &self,
        record: &[u8],
        change: impl FnOnce(&mut HashMap<Arc<str>, Arc<Entry>>) -> Option<Arc<Entry>>,
    ) -> Result<()> {
        let mut guard = lock(&self.index);
        let index = guard.as_mut().ok_or(Error::SwapperClosed)?;
        index.append(record)?;
        let replaced = change(&mut lock(&self.keys).entries);
        if index.is_long() {
            let _ = index.rewrite(&self.records()); // where that is refused, it stays long
        }
        drop(guard);
        drop(replaced); // its room is free, once nobody reads it any more
        Ok(())
    }

    fn records(&self) -> Vec<Vec<u8>> {
        lock(&self.keys).entries.iter().map(|(key, entry)| entry::put(key, entry)).collect()
    }

    /// Whether what was read is what was written.
    fn check(&self, transfer: &Transfer) -> Result<()> {
        let entry = transfer.entry.get().expect("a read that has ended has an entry");
        if transfer.checksum() == entry.checksum {
            return Ok(());
        }
        let what = format!(
            "the checksum of the entry {:?} is wrong; it was changed on the disk, or in memory while it was written",
            transfer.operation.key
        );
        let offset = entry.claim.extents().first().map_or(0, |extent| extent.offset as u64);
        Err(Error::Damaged { file: self.data_path.clone(), offset, bytes: entry.len, what })
    }

    /// The write or the deletion at the head of a key's line has ended: what waits for it may begin, up to the next one.
    fn advance(&self, key: &Arc<str>) {
        let (mut begin, mut fail) = (Vec::new(), Vec::new());
        let mut keys = lock(&self.keys);
        let Keys { entries, lines } = &mut *keys;
        while let Some(line) = lines.get_mut(key) {
            let Some(transfer) = line.waiting.pop_front() else {
                lines.remove(key);
                break;
            };
            if !matches!(transfer.operation.action, Action::Read) {
                begin.push(transfer);
                break;
            }
            let entry = entries.get(key).ok_or_else(|| self.unknown(key));
            match entry.and_then(|entry| check_len(key, entry.len, transfer.operation.len).map(|()| entry)) {
                Ok(entry) => {
                    transfer.plan_read(Arc::clone(entry));
                    begin.push(transfer);
                }
                Err(refusal) => fail.push((transfer, refusal)), // the write before it has failed
            }
        }
        drop(keys);
        for transfer in begin {
            self.start(transfer);
        }
        for (transfer, refusal) in fail {
            transfer.operation.end(Err(Arc::new(refusal)));
            self.queue.dismiss();
        }
    }

    pub(super) fn describe(&self, key: &str) -> Result<(Box<str>, usize)> {
        let keys = lock(&self.keys);
        let found = match keys.lines.get(key) {
            Some(line) => line.newest.clone(),
            None => keys.entries.get(key).map(|entry| (entry.label.clone(), entry.len)),
        };
        found.ok_or_else(|| self.unknown(key))
    }

    pub(super) fn keys(&self) -> Vec<Arc<str>> {
        lock(&self.keys).entries.keys().cloned().collect()
    }

    pub(super) fn flush(&self) -> Result<()> {
        let index = lock(&self.index).as_ref().ok_or(Error::SwapperClosed)?.handle()?;
        self.data.sync_data().map_err(|source| storage("flushing", &self.data_path, &source))?;
        index.sync_data().map_err(|source| storage("flushing", &file_of(&self.directory, "index"), &source))
    }

    /// Gives free room back to the file system.
    pub(super) fn trim(&self) -> Result<usize> {
        self.admit()?; // the store is nobody else's before the end
        let trimmed = self.trim_data().map_err(|source| storage("trimming", &self.data_path, &source));
        self.queue.dismiss();
        trimmed
    }

    fn trim_data(&self) -> io::Result<usize> {
        const BLOCK: u64 = 512; // the unit of `blocks`, on every file system
        let _growing = lock(&self.growing);
        let end = self.file_bytes.load(Ordering::Acquire);
        let free = self.space.claim_free(end);
        let before = self.data.metadata()?.blocks();
        for extent in free.extents() {
            if extent.end() >= end {
                self.data.set_len(extent.offset as u64)?;
                self.file_bytes.store(extent.offset, Ordering::Release);
            } else {
                os::punch(&self.data, extent.offset as u64, extent.len as u64)?;
            }
        }
        Ok((before.saturating_sub(self.data.metadata()?.blocks()) * BLOCK) as usize)
    }

    /// Lets go of the files. A second call does nothing.
    pub(super) fn finish(&self) -> Result<()> {
        let mut guard = lock(&self.index);
        let Some(mut index) = guard.take() else { return Ok(()) };
        let written = if index.is_fresh() { Ok(()) } else { index.rewrite(&self.records()) };
        drop(guard);
        let unlocked = self.data.unlock().map_err(|source| storage("unlocking", &self.data_path, &source));
        written.and(unlocked)
    }

    pub(super) fn count_bounce(&self, bytes: usize) {
        self.bounces.fetch_add(1, Ordering::Relaxed);
        self.bounced_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn stats(&self) -> Stats {
        let (writes, reads) = (lock(&self.writes), lock(&self.reads));
        let (fixed_bytes, fixed_reason) = self.fixed.get().map_or((0, None), |fixed| fixed.stats());
        Stats {
            engine: self.engine,
            engine_reason: self.engine_reason.clone(),
            direct: self.direct,
            direct_reason: self.direct_reason.clone(),
            block_bytes: self.block_bytes,
            queue_depth: self.queue_depth,
            unfinished: self.queue.unfinished(),
            entries: lock(&self.keys).entries.len(),
            stored_bytes: self.space.used(),
            file_bytes: self.file_bytes.load(Ordering::Relaxed),
            max_bytes: self.max_bytes,
            bytes_written: writes.bytes,
            bytes_read: reads.bytes,
            bounces: self.bounces.load(Ordering::Relaxed),
            bounced_bytes: self.bounced_bytes.load(Ordering::Relaxed),
            write_time: writes.busy(),
            read_time: reads.busy(),
            fixed_bytes,
            fixed_reason,
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.fork_generation == os::fork_generation() {
            let _ = self.finish(); // the log holds everything, in whatever length
        }
    }
}

/// Refuses memory of another size than the entry's.
fn check_len(key: &str, stored: usize, asked: usize) -> Result<()> {
    if stored == asked {
        return Ok(());
    }
    Err(Error::invalid("memory", format!("{key:?} is {stored} bytes long, and the memory to read it into {asked}")))
}

/// Opens the data file, past the page cache where that can be had, and says why where it cannot.
fn open_data(path: &Path, direct: Option<bool>) -> Result<(File, bool, Option<String>)> {
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
fn lock_data(data: &File, path: &Path) -> Result<()> {
    const STEP: Duration = Duration::from_millis(5);
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let holder = match data.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => holder(data),
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

type Records = HashMap<Box<str>, Record>;

fn replay(record: Record, entries: &mut Records) -> std::result::Result<(), String> {
    match &record {
        Record::Put { key, .. } => {
            entries.insert(key.clone(), record);
        }
        Record::Delete { key } => {
            entries.remove(key).ok_or_else(|| format!("{key:?} is deleted, and was not there"))?;
        }
    }
    Ok(())
}

/// Makes entries of what an index holds in the end.
fn claim_all(records: Records, space: &Arc<Space>, data: &Path) -> Result<HashMap<Arc<str>, Arc<Entry>>> {
    let mut entries = HashMap::with_capacity(records.len());
    for record in records.into_values() {
        let Record::Put { key, label, len, block, checksum, extents } = record else { continue };
        let (offset, end) =
            (extents.first().map_or(0, |extent| extent.offset), extents.iter().map(|e| e.offset + e.len).max());
        if end.is_some_and(|end| end > space.limit()) {
            let why = format!(
                "{} bytes are less than the store in {} takes already: {key:?} ends at {}",
                space.limit(),
                data.display(),
                end.unwrap_or(0)
            );
            return Err(Error::invalid("max_bytes", why));
        }
        let claim = space.claim_again(extents).ok_or_else(|| Error::Damaged {
            file: data.with_file_name("index"),
            offset: offset as u64,
            bytes: len,
            what: format!("the entry {key:?} lies where another one does"),
        })?;
        entries.insert(key.into(), Arc::new(Entry { label, len, block, checksum, claim }));
    }
    Ok(entries)
}
