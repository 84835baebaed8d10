//! An open store: its files, its entries, and the order of the operations on one key.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use super::data::Data;
use super::entry::{self, Entry, Record};
use super::fixed::FixedBuffers;
use super::index::{Index, storage};
use super::meter::Meter;
use super::queue::Queue;
use super::ticket::{Action, Operation, Unheard};
use super::transfer::{Digest, Next, Piece, Transfer};

use super::{Checked, Chosen, Engine, Inject, Stats, lock};
use crate::error::{Error, Result};
use crate::os::{self, EventFd};

/// The digest of so many bytes is made sooner than another thread wakes up.
const SMALL: usize = 64 << 10;

/// See the module.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) directory: PathBuf,
    pub(super) data: Data,
    pub(super) queue: Queue,
    /// `None` once the store is closed. Held while it is written: no one else needs it.
    index: Mutex<Option<Index>>,
    keys: Mutex<Keys>,
    writes: Mutex<Meter>,
    reads: Mutex<Meter>,
    pub(super) fixed: OnceLock<Arc<FixedBuffers>>,
    /// Of tickets that were dropped.
    pub(super) unheard: Arc<Unheard>,
    bounces: AtomicUsize,
    bounced_bytes: AtomicUsize,
    block_bytes: usize,
    queue_depth: usize,
    max_bytes: Option<usize>,
    engine: Engine,
    engine_reason: Option<String>,
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

impl Store {
    pub(super) fn open(directory: &Path, options: &Checked, chosen: Chosen) -> Result<Self> {
        std::fs::create_dir_all(directory).map_err(|source| storage("making", directory, &source))?;
        let data = Data::open(directory.join("data"), options.direct, options.max_bytes)?;
        let mut records = Records::new();
        let index = Index::open(&directory.join("index"), data.bytes() == 0, |record| replay(record, &mut records))?;
        let entries = claim_all(records, &data, options.max_bytes.is_some())?;
        let Chosen { engine, engine_reason, queue_depth } = chosen;
        let bell = (engine == Engine::IoUring).then(EventFd::new).transpose();
        let bell = bell.map_err(|source| Error::Os { call: "eventfd", bytes: 0, source })?;
        let Checked { block_bytes, max_bytes, .. } = *options;
        Ok(Self {
            directory: directory.to_owned(),
            data,
            queue: Queue::new(bell),
            index: Mutex::new(Some(index)),
            keys: Mutex::new(Keys { entries, lines: HashMap::new() }),
            writes: Mutex::default(),
            reads: Mutex::default(),
            fixed: OnceLock::new(),
            unheard: Arc::default(),
            bounces: AtomicUsize::new(0),
            bounced_bytes: AtomicUsize::new(0),
            block_bytes,
            queue_depth,
            max_bytes,
            engine,
            engine_reason,
            inject: options.inject.clone(),
            fork_generation: os::fork_generation(),
        })
    }

    pub(super) fn begin_write(&self, operation: &Arc<Operation>) -> Result<()> {
        self.admit()?;
        let begun = self.data.claim(operation.len, self.block_bytes).map(|claim| {
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
                let (label, len) = line.newest.as_ref().ok_or_else(|| self.unknown(&operation.key))?;
                check_value(operation, label, *len)?;
                line.waiting.push_back(transfer);
                return Ok(());
            }
            let entry = keys.entries.get(&operation.key).ok_or_else(|| self.unknown(&operation.key))?;
            check_value(operation, &entry.label, entry.len)?;
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
            Action::Read(_) => Some(&self.reads),
            Action::Delete => None,
        }
    }

    /// Lets a test have its way with a call to the kernel.
    pub(super) fn tamper(&self, piece: &mut Piece) {
        let fault = self.inject.as_ref().and_then(|inject| inject.fault(piece.is_write, piece.offset, piece.len()));
        piece.inject(fault);
    }

    /// The kernel has answered.
    pub(super) fn moved(&self, piece: Piece, answer: io::Result<usize>) {
        self.go_on(piece.moved(answer, &self.data.path));
    }

    /// A digest is to be made: at once, or where one thread moves everything, by another.
    pub(super) fn digest(&self, digest: Digest) {
        if self.engine == Engine::IoUring && digest.len() > SMALL {
            self.queue.digest_later(digest);
        } else {
            self.make_digest(digest);
        }
    }

    pub(super) fn make_digest(&self, digest: Digest) {
        self.go_on(digest.make());
    }

    fn go_on(&self, next: Next) {
        match next {
            Next::Again(rest) => self.queue.again(rest),
            Next::Digest(digest) => self.digest(digest),
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
            Action::Read(_) => self.check(transfer),
            Action::Delete => self.commit_delete(&operation.key),
        });
        // Room that this was the last to use is free before anybody is told of the end.
        drop(lock(&transfer.claim).take());
        drop(lock(&transfer.entry).take());
        if let Some(meter) = self.meter(operation) {
            lock(meter).stop(if result.is_ok() { operation.len } else { 0 });
        }
        if !matches!(operation.action, Action::Read(_)) {
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
        let entry = lock(&transfer.entry).clone().expect("a read that has not ended has an entry");
        if transfer.checksum() == entry.checksum {
            return Ok(());
        }
        let what = format!(
            "the checksum of the entry {:?} is wrong: it was changed on the disk, or in memory while it was written; write it again, or \
             delete it",
            transfer.operation.key
        );
        let offset = entry.claim.extents().first().map_or(0, |extent| extent.offset as u64);
        Err(Error::Damaged { file: self.data.path.clone(), offset, bytes: entry.len, what })
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
            if !matches!(transfer.operation.action, Action::Read(_)) {
                begin.push(transfer);
                break;
            }
            let entry = entries.get(key).ok_or_else(|| self.unknown(key));
            match entry.and_then(|entry| check_value(&transfer.operation, &entry.label, entry.len).map(|()| entry)) {
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
        let keys = lock(&self.keys);
        let is_settled = |key: &&Arc<str>| !keys.lines.contains_key(*key);
        let coming = keys.lines.iter().filter(|(_, line)| line.newest.is_some()).map(|(key, _)| key);
        keys.entries.keys().filter(is_settled).chain(coming).cloned().collect()
    }

    pub(super) fn flush(&self) -> Result<()> {
        let index = lock(&self.index).as_ref().ok_or(Error::SwapperClosed)?.handle()?;
        self.data.flush()?;
        index.sync_data().map_err(|source| storage("flushing", &self.directory.join("index"), &source))
    }

    /// Gives free room back to the file system.
    pub(super) fn trim(&self) -> Result<usize> {
        self.admit()?; // the store is nobody else's before the end
        let trimmed = self.data.trim();
        self.queue.dismiss();
        trimmed
    }

    /// Lets go of the files. A second call does nothing.
    pub(super) fn finish(&self) -> Result<()> {
        let mut guard = lock(&self.index);
        let Some(mut index) = guard.take() else { return Ok(()) };
        let written = if index.is_fresh() { Ok(()) } else { index.rewrite(&self.records()) };
        drop(guard);
        written.and(self.data.unlock())
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
            direct: self.data.direct,
            direct_reason: self.data.direct_reason.clone(),
            block_bytes: self.block_bytes,
            queue_depth: self.queue_depth,
            unfinished: self.queue.unfinished(),
            entries: lock(&self.keys).entries.len(),
            stored_bytes: self.data.space.used(),
            file_bytes: self.data.bytes(),
            max_bytes: self.max_bytes,
            bytes_written: writes.bytes(),
            bytes_read: reads.bytes(),
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

/// Refuses to read a value of another size or label than is expected.
fn check_value(operation: &Operation, label: &str, len: usize) -> Result<()> {
    let (key, asked) = (&operation.key, operation.len);
    if len != asked {
        let why = format!("{key:?} is {len} bytes long, and the memory to read it into {asked}");
        return Err(Error::invalid("memory", why));
    }
    match &operation.action {
        Action::Read(Some(expected)) if **expected != *label => {
            let why = format!(
                "{key:?} is {label}, and not {expected} any more, as when this read was begun: it was replaced, or the \
                 write that was to replace it failed; read it again"
            );
            Err(Error::invalid("key", why))
        }
        _ => Ok(()),
    }
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
fn claim_all(records: Records, data: &Data, has_limit: bool) -> Result<HashMap<Arc<str>, Arc<Entry>>> {
    let mut entries = HashMap::with_capacity(records.len());
    for record in records.into_values() {
        let Record::Put { key, label, len, block, checksum, extents } = record else { continue };
        let offset = extents.first().map_or(0, |extent| extent.offset);
        let end = extents.iter().map(|extent| extent.offset.saturating_add(extent.len)).max().unwrap_or(0);
        let limit = data.space.limit();
        if has_limit && end > limit {
            let file = data.path.display();
            let why = format!("{limit} bytes are less than {file} takes already: the entry {key:?} ends at {end}");
            return Err(Error::invalid("max_bytes", why));
        }
        let claim = data.space.claim_again(extents).ok_or_else(|| Error::Damaged {
            file: data.path.clone(),
            offset: offset as u64,
            bytes: len,
            what: format!("the index has the entry {key:?} there, and another one; move the directory away"),
        })?;
        entries.insert(key.into(), Arc::new(Entry { label, len, block, checksum, claim }));
    }
    Ok(entries)
}
