//! The index: a log of what was put and deleted, beside the data file.
//!
//! A header tells how many bytes behind it were written at once, by a new file that took the old one's place: the index is
//! never shorter than that. Changes are appended behind. Each record is framed by its length and checksums of both, and
//! an incomplete one at the end is what a process left that was killed while it wrote: it is cut off. Everything else
//! that does not fit is damage, and is reported.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::entry::{Record, digest};
use crate::error::{Error, Result};
use crate::os;

const MAGIC: &[u8; 16] = b"pinpool swap 1\n\0";
const HEADER: usize = 32;
const FRAME: usize = 16;
/// What a disk writes at once, at least.
const SECTOR: usize = 512;
/// An index gets this much longer, at least, before it is written anew.
const SLACK: u64 = 1 << 20;

/// The open index of a store.
#[derive(Debug)]
pub(super) struct Index {
    path: PathBuf,
    file: File,
    /// Where the next record goes.
    end: u64,
    /// Where what was written at once ends.
    snapshot_end: u64,
    /// How long it may get before it is written anew.
    most: u64,
    /// A record was left in pieces that could not be cut off: nothing may be appended behind it.
    torn: bool,
}

impl Index {
    /// Opens the index of a store, or makes that of a new one, and hands every record to `replay` in its order.
    pub(super) fn open(
        path: &Path,
        is_new: bool,
        mut replay: impl FnMut(Record) -> std::result::Result<(), String>,
    ) -> Result<Self> {
        let refused = |call| move |source: io::Error| storage(call, path, &source);
        let mut file = os::open(path, false).map_err(refused("opening"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(refused("reading"))?;
        if bytes.is_empty() {
            drop(file);
            if !is_new {
                let what =
                    "it is missing or empty, and the data file is not; if nothing in there is needed, delete both";
                return Err(damaged(path, 0, HEADER, what));
            }
            let (index, synced) = Self::create(path, &[])?;
            return synced.map(|()| index);
        }
        let snapshot_end = read_header(&bytes).map_err(|what| damaged(path, 0, HEADER, &what))?;
        if (bytes.len() as u64) < snapshot_end {
            let what = format!("{snapshot_end} bytes of it were written at once, and it ends at {}", bytes.len());
            return Err(damaged(path, bytes.len(), snapshot_end as usize - bytes.len(), &what));
        }
        let mut at = HEADER;
        while let Some(record) = next_record(&bytes, at).map_err(|what| damaged(path, at, bytes.len() - at, &what))? {
            let sense = Record::read(record).ok_or_else(|| "a record makes no sense".to_owned()).and_then(&mut replay);
            sense.map_err(|what| damaged(path, at, FRAME + record.len(), &what))?;
            at += FRAME + record.len();
        }
        if (at as u64) < snapshot_end {
            return Err(damaged(path, at, snapshot_end as usize - at, "a record is incomplete"));
        }
        file.set_len(at as u64).map_err(refused("cutting"))?;
        Ok(Self { path: path.to_owned(), file, end: at as u64, snapshot_end, most: longest(snapshot_end), torn: false })
    }

    /// Puts an index with these records in the place of the one that is there, if any, at once; then tells whether that
    /// is sure to survive a loss of power.
    fn create(path: &Path, records: &[Vec<u8>]) -> Result<(Self, Result<()>)> {
        let refused = |call| move |source: io::Error| storage(call, path, &source);
        let framed: usize = records.iter().map(|record| FRAME + record.len()).sum();
        let mut bytes = header(HEADER + framed);
        for record in records {
            frame(&mut bytes, record);
        }
        check_size(path, bytes.len() as u64)?;
        let new = path.with_extension("new");
        let written = os::open(&new, false).and_then(|mut file| {
            file.set_len(0)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            let directory = path.parent().map(File::open).transpose()?;
            std::fs::rename(&new, path)?;
            Ok((file, directory))
        });
        let (file, directory) =
            written.inspect_err(|_| drop(std::fs::remove_file(&new))).map_err(refused("writing"))?;
        let synced = directory.map_or(Ok(()), |directory| directory.sync_all()).map_err(refused("entering"));
        let end = bytes.len() as u64;
        Ok((Self { path: path.to_owned(), file, end, snapshot_end: end, most: longest(end), torn: false }, synced))
    }

    /// Appends a record, whole or not at all.
    pub(super) fn append(&mut self, record: &[u8]) -> Result<()> {
        let mut bytes = Vec::with_capacity(FRAME + record.len());
        frame(&mut bytes, record);
        check_size(&self.path, self.end + bytes.len() as u64)?;
        if self.torn {
            self.cut()?;
        }
        let written = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(&bytes));
        match written {
            Ok(()) => {
                self.end += bytes.len() as u64;
                Ok(())
            }
            Err(source) => {
                self.torn = true;
                let _ = self.cut(); // if it cannot be done now, it is before the next record
                Err(storage("writing", &self.path, &source))
            }
        }
    }

    /// Cuts off what was left of a record.
    fn cut(&mut self) -> Result<()> {
        self.file.set_len(self.end).map_err(|source| storage("cutting", &self.path, &source))?;
        self.torn = false;
        Ok(())
    }

    /// Whether most of it tells of entries that are gone.
    pub(super) fn is_long(&self) -> bool {
        self.end > self.most
    }

    /// Whether it is as it was written at once.
    pub(super) fn is_fresh(&self) -> bool {
        self.end == self.snapshot_end && !self.torn
    }

    /// Writes the index anew, at once, from the records of all entries. On an error nothing is lost.
    pub(super) fn rewrite(&mut self, records: &[Vec<u8>]) -> Result<()> {
        self.most = longest(self.end); // not again at once, if it fails
        let (index, synced) = Self::create(&self.path, records)?;
        *self = index;
        synced
    }

    /// Another handle of the file as it is now, to be flushed without holding up those who append.
    pub(super) fn handle(&self) -> Result<File> {
        self.file.try_clone().map_err(|source| storage("opening", &self.path, &source))
    }
}

/// How long an index of this length may get: each rewriting is paid for by as many appended bytes.
fn longest(end: u64) -> u64 {
    2 * end + SLACK
}

fn header(end: usize) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&(end as u64).to_le_bytes());
    let check = digest(&bytes);
    bytes.extend_from_slice(&check.to_le_bytes());
    bytes
}

fn read_header(bytes: &[u8]) -> std::result::Result<u64, String> {
    let header = bytes.get(..HEADER).ok_or("it is too short for a header")?;
    let (told, check) = header.split_at(HEADER - size_of::<u64>());
    if !told.starts_with(MAGIC) {
        return Err("it is no index of pinpool's, or one of another version".to_owned());
    }
    if digest(told).to_le_bytes() != check {
        return Err("the checksum of its header is wrong".to_owned());
    }
    Ok(number(&told[MAGIC.len()..]))
}

/// A frame: the length of the record, half of a checksum of that and of the frame's place, and a checksum of the record.
fn frame(bytes: &mut Vec<u8>, record: &[u8]) {
    let len = record.len() as u32;
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&length_check(len).to_le_bytes());
    bytes.extend_from_slice(&digest(record).to_le_bytes());
    bytes.extend_from_slice(record);
}

fn length_check(len: u32) -> u32 {
    digest(&len.to_le_bytes()) as u32
}

/// The record at a place; `None` at the end, or where only a part of one follows.
fn next_record(bytes: &[u8], at: usize) -> std::result::Result<Option<&[u8]>, String> {
    let rest = &bytes[at..];
    // The file had grown, and its last bytes were not written, when the machine lost power: no record ends in so many
    // zeros, and what was flushed lies before.
    if rest[rest.len().saturating_sub(SECTOR)..].iter().all(|&byte| byte == 0) && record_at(rest).is_err() {
        return Ok(None);
    }
    record_at(rest)
}

/// The record at the beginning of these bytes; `None` where only a part of one is there.
fn record_at(rest: &[u8]) -> std::result::Result<Option<&[u8]>, String> {
    let Some(frame) = rest.get(..FRAME) else { return Ok(None) };
    let len = number(&[&frame[..4], &[0; 4]].concat()) as u32;
    if length_check(len).to_le_bytes() != frame[4..8] {
        return Err("the checksum of a record's length is wrong".to_owned());
    }
    let Some(record) = rest.get(FRAME..FRAME + len as usize) else { return Ok(None) };
    if digest(record) != number(&frame[8..]) {
        return Err("the checksum of a record is wrong".to_owned());
    }
    Ok(Some(record))
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

fn damaged(path: &Path, offset: usize, bytes: usize, what: &str) -> Error {
    let what = format!("{what}; restore the file, or move the directory away: its values cannot be had");
    Error::Damaged { file: path.to_owned(), offset: offset as u64, bytes, what }
}

/// The refusal of a call that concerns a file as such.
pub(super) fn storage(call: &'static str, path: &Path, source: &io::Error) -> Error {
    let code = source.raw_os_error().unwrap_or(os::DISK_ERROR);
    let help = match source.kind() {
        io::ErrorKind::PermissionDenied => "the process needs permission to read and write there",
        io::ErrorKind::ReadOnlyFilesystem => "a store must be on a file system that can be written",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "nothing was changed; make room there, trim(), or delete entries"
        }
        _ => "",
    };
    Error::Storage { call, file: path.to_owned(), place: None, code, help: help.to_owned() }
}

/// Refuses what would make a file longer than this process may: the kernel would end the process for it.
pub(super) fn check_size(path: &Path, end: u64) -> Result<()> {
    let limit = os::file_size_limit();
    if end <= limit {
        return Ok(());
    }
    let help = format!(
        "the file would be {end} bytes long, and RLIMIT_FSIZE allows this process {limit}; raise it with `ulimit -f \
         unlimited` in the shell that starts the program"
    );
    Err(Error::Storage { call: "growing", file: path.to_owned(), place: None, code: os::TOO_LARGE, help })
}
