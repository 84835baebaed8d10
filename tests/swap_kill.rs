//! Processes that are killed while they write: what is found afterwards is whole, old or new, or not there.
#![allow(unsafe_code)] // forks and kills

mod common;

use std::io::{Read as _, Write as _};
use std::os::fd::FromRawFd as _;
use std::sync::Arc;

use common::process::alone;
use common::swap::{Directory, UNIT, contents, engines_and_ways, get};
use common::{Random, pool};
use pinpool::swap::{SwapOptions, Swapper};
use pinpool::{Block, Pool};

/// Over all engines and ways.
const ROUNDS: usize = 320;
const KEYS: usize = 6;
const HEADER: usize = 16;

/// The value of a key in one version: both, and then what follows from them.
fn value(key: usize, version: u64) -> Vec<u8> {
    let len = HEADER + Random::new(version << 8 | key as u64).below(12 * UNIT);
    let mut bytes = [(key as u64).to_le_bytes(), version.to_le_bytes()].concat();
    bytes.extend(contents(len - HEADER, version << 8 | key as u64));
    bytes
}

fn block_of(pool: &Pool, bytes: &[u8]) -> Block {
    let mut block = pool.take(bytes.len()).expect("room");
    block.as_mut_slice().copy_from_slice(bytes);
    block
}

/// What a process tells of a key in a version, in three numbers: this is the last.
const WRITTEN: u64 = 0;
const DELETED: u64 = 1;
const DELETING: u64 = 2;
const LINE: usize = 24;

/// Writes, replaces and deletes until it is killed, and tells what is sure to be so from then on.
fn work(swapper: &Swapper, pool: &Pool, first: u64, mut told: std::fs::File) -> ! {
    let mut random = Random::new(first + 1);
    let mut version = first;
    let mut tell = |key: usize, version: u64, what| {
        let line = [key as u64, version, what].map(u64::to_le_bytes).concat();
        told.write_all(&line).expect("the parent listens");
    };
    loop {
        let mut tickets = Vec::new();
        for _ in 0..4 {
            let (key, name) = (random.below(KEYS), random.below(KEYS).to_string());
            version += 1;
            if random.below(5) == 0 && swapper.describe(&name).is_ok() {
                let key = name.parse().expect("a number");
                tell(key, version, DELETING);
                tickets.push((swapper.delete(&name).expect("on its way"), key, version, DELETED));
            } else {
                let block = Arc::new(block_of(pool, &value(key, version)));
                let ticket = swapper.write(&key.to_string(), &version.to_string(), block).expect("room");
                tickets.push((ticket, key, version, WRITTEN));
            }
        }
        for (ticket, key, version, what) in tickets {
            ticket.wait().expect("nothing fails here");
            tell(key, version, what);
        }
    }
}

#[test]
fn whatever_a_killed_process_wrote_is_whole_old_or_new_or_absent() {
    alone("whatever_a_killed_process_wrote_is_whole_old_or_new_or_absent", || {
        let rows = engines_and_ways();
        let mut told = 0;
        for options in &rows {
            let directory = Directory::new();
            for round in 0..ROUNDS / rows.len() {
                told += kill_and_look(&directory, options, round);
            }
        }
        assert!(told > ROUNDS, "some was written");
    });
}

fn kill_and_look(directory: &Directory, options: &SwapOptions, round: usize) -> usize {
    let mut ends = [0; 2];
    // SAFETY: the kernel fills two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: new descriptors, each ours alone.
    let [mut reader, writer] = ends.map(|end| unsafe { std::fs::File::from_raw_fd(end) });
    // SAFETY: the child works, and is killed.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: takes a number only.
        unsafe { libc::alarm(30) };
        drop(reader);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let pool = pool(4 << 20);
            let swapper = directory.reopen(options);
            let first = 1 + swapper.keys().expect("ours").iter().fold(round as u64 * 1_000_000, |most, key| {
                most.max(swapper.describe(key).expect("stored").0.parse().expect("a version"))
            });
            work(&swapper, &pool, first, writer)
        }));
        // SAFETY: ends the child without the parent's destructors.
        unsafe { libc::_exit(i32::from(result.is_err())) };
    }
    drop(writer);
    // At any moment from the first record on: after so many lines, and a little.
    let mut random = Random::new(round as u64 + 7);
    let mut lines = vec![0; LINE * (1 + random.below(20))];
    reader.read_exact(&mut lines).expect("the child tells so much");
    (0..random.below(3000)).for_each(|_| std::hint::spin_loop());
    // SAFETY: a child of ours, which nobody has waited for.
    assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
    let mut status = 0;
    // SAFETY: the kernel fills the number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "the child failed: {status:#x}");
    reader.read_to_end(&mut lines).expect("what it told before");
    look(directory, options, &lines);
    lines.len() / LINE
}

/// What was told is there, or something newer, and everything that is there is whole.
fn look(directory: &Directory, options: &SwapOptions, lines: &[u8]) {
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let (mut written, mut deleted, mut deleting) = ([0; KEYS], [0; KEYS], [0; KEYS]);
    for line in lines.chunks_exact(LINE) {
        let (key, version) = (number(&line[..8]) as usize, number(&line[8..16]));
        match number(&line[16..]) {
            WRITTEN => written[key] = version,
            DELETED => deleted[key] = version,
            _ => deleting[key] = version,
        }
    }
    let (pool, swapper) = (pool(4 << 20), directory.reopen(options));
    let mut room = 0;
    for key in 0..KEYS {
        let name = key.to_string();
        let Ok((label, len)) = swapper.describe(&name) else {
            assert!(written[key] <= deleting[key], "{name} was {}, is gone, and was not deleted", written[key]);
            continue;
        };
        let version: u64 = label.parse().expect("a version");
        let bytes = get(&swapper, &pool, &name).unwrap_or_else(|error| panic!("{name} in version {version}: {error}"));
        assert!(bytes.len() == len && bytes == value(key, version), "{name} is not that of version {version}");
        assert!(version >= written[key], "{name} was {}, and is {version}", written[key]);
        assert!(version > deleted[key], "{name} was deleted at {}, and is {version}", deleted[key]);
        room += len.next_multiple_of(UNIT);
    }
    assert_eq!(swapper.stats().expect("ours").stored_bytes, room, "nothing else takes room");
    swapper.close().expect("our own files");
}
