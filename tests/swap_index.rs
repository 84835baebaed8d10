//! The index of a swap store: whatever becomes of the file, a store opens with what was written, or not at all.

mod common;

use std::sync::Arc;

use common::process::{alone, in_forked_child};
use common::swap::{Directory, block, check, engines, get, keys, put, says_damaged};
use common::{MIB, pool};
use pinpool::Pool;
use pinpool::swap::{Engine, SwapOptions};

const LEN: usize = 100;
const KEYS: [&str; 4] = ["a", "b", "c", "d"];

fn options() -> SwapOptions {
    SwapOptions { engine: Engine::Threads, queue_depth: Some(1), ..SwapOptions::default() }
}

fn fill(directory: &Directory, pool: &Pool) -> pinpool::swap::Swapper {
    let swapper = directory.open(&options());
    for (seed, key) in (0..).zip(KEYS) {
        put(&swapper, pool, key, LEN, seed).expect("room");
    }
    swapper
}

/// A store that was closed in good order, or one whose process was killed: everything was appended.
fn stores(pool: &Pool) -> [(Directory, bool); 2] {
    let (closed, killed) = (Directory::new(), Directory::new());
    fill(&closed, pool).close().expect("our own files");
    in_forked_child(|| {
        let pool = common::pool(MIB);
        std::mem::forget(fill(&killed, &pool));
    });
    [(closed, true), (killed, false)]
}

/// Opens a store whose index holds these bytes. The entries that are there must be the first ones of all, and whole.
fn entries_of(directory: &Directory, pool: &Pool, index: &[u8]) -> Result<usize, pinpool::Error> {
    std::fs::write(directory.index(), index).expect("our own file");
    let swapper = directory.try_open(&options())?;
    let found = keys(&swapper);
    assert_eq!(found, KEYS[..found.len()], "the first ones");
    for (seed, key) in (0..).zip(&found) {
        check(&swapper, pool, key, LEN, seed);
    }
    let fresh = directory.index();
    drop(swapper.close());
    assert!(fresh.exists());
    Ok(found.len())
}

#[test]
fn a_byte_of_the_index_that_was_changed_is_found_wherever_it_is() {
    alone("a_byte_of_the_index_that_was_changed_is_found_wherever_it_is", || {
        let pool = pool(MIB);
        for (directory, is_closed) in stores(&pool) {
            let sound = std::fs::read(directory.index()).expect("ours");
            for at in 0..sound.len() {
                for mask in [1, 0x80, 0xFF] {
                    let mut index = sound.clone();
                    index[at] ^= mask;
                    let error = entries_of(&directory, &pool, &index).expect_err("it was changed");
                    says_damaged(&error, "index");
                }
            }
            assert_eq!(entries_of(&directory, &pool, &sound).expect("nothing is wrong"), KEYS.len(), "{is_closed}");
        }
    });
}

#[test]
fn an_index_that_was_cut_is_an_error_or_holds_the_first_entries() {
    alone("an_index_that_was_cut_is_an_error_or_holds_the_first_entries", || {
        let pool = pool(MIB);
        for (directory, is_closed) in stores(&pool) {
            let sound = std::fs::read(directory.index()).expect("ours");
            let mut seen = [false; KEYS.len() + 1];
            for len in 0..sound.len() {
                // Where it was cut, and where a loss of power has left zeros.
                let mut zeros = sound[..len].to_vec();
                zeros.resize(sound.len() + 100, 0);
                for index in [&sound[..len], &zeros] {
                    match entries_of(&directory, &pool, index) {
                        Ok(entries) => seen[entries] = true,
                        Err(error) => says_damaged(&error, "index"),
                    }
                }
            }
            assert_eq!(seen[..KEYS.len()], [!is_closed; KEYS.len()], "what was written at once is whole or damaged");
        }
    });
}

#[test]
fn an_index_that_is_gone_or_empty_is_no_new_store() {
    let pool = pool(MIB);
    let directory = Directory::new();
    fill(&directory, &pool).close().expect("our own files");
    let sound = std::fs::read(directory.index()).expect("ours");
    says_damaged(&entries_of(&directory, &pool, &[]).expect_err("it is empty"), "index");
    std::fs::remove_file(directory.index()).expect("ours");
    says_damaged(&directory.try_open(&options()).expect_err("it is gone"), "index");
    says_damaged(&directory.try_open(&options()).expect_err("nor was one made"), "index");
    assert_eq!(entries_of(&directory, &pool, &sound).expect("it is back"), KEYS.len());
}

#[test]
fn noise_behind_the_index_is_damage() {
    let pool = pool(MIB);
    let directory = Directory::new();
    fill(&directory, &pool).close().expect("our own files");
    let sound = std::fs::read(directory.index()).expect("ours");
    for noise in [&[1_u8; 16][..], &[0xFF; 100], &sound[32..], &sound] {
        let index = [&sound, noise].concat();
        match entries_of(&directory, &pool, &index) {
            Ok(entries) => assert_eq!(entries, KEYS.len(), "the same records once more change nothing"),
            Err(error) => says_damaged(&error, "index"),
        }
    }
    let error =
        entries_of(&directory, &pool, b"#!/bin/sh\necho this is no index of anybody's\n").expect_err("another's");
    assert!(error.to_string().contains("no index"), "{error}");
}

#[test]
fn ten_thousand_entries_are_there_again() {
    const ENTRIES: u64 = 10_000;
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&SwapOptions { direct: Some(false), ..options.clone() });
        for start in (0..ENTRIES).step_by(200) {
            let write = |seed: u64| {
                let source = Arc::new(block(&pool, seed as usize % 50, seed));
                swapper.write(&format!("key {seed}"), &seed.to_string(), source).expect("room")
            };
            let tickets: Vec<_> = (start..start + 200).map(write).collect();
            for ticket in &tickets {
                ticket.wait().expect("room");
            }
        }
        swapper.close().expect("our own files");
        let swapper = directory.open(&options);
        assert_eq!(swapper.stats().expect("ours").entries, ENTRIES as usize);
        for seed in (0..ENTRIES).step_by(97) {
            check(&swapper, &pool, &format!("key {seed}"), seed as usize % 50, seed);
        }
    }
}

#[test]
fn an_index_stays_short_however_often_its_entries_are_replaced() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&SwapOptions { direct: Some(false), ..options.clone() });
        let (label, mut longest) = ("x".repeat(1 << 16), 0);
        let source = Arc::new(block(&pool, LEN, 1));
        put(&swapper, &pool, "stays", LEN, 2).expect("room");
        for _ in 0..150 {
            swapper.write("key", &label, Arc::clone(&source)).expect("room").wait().expect("room");
            longest = longest.max(std::fs::metadata(directory.index()).expect("ours").len());
        }
        let appended = 150 << 16;
        assert!(longest < appended / 4, "{longest} bytes, of {appended} that were appended");
        assert!(longest > 1 << 20, "it is not written anew each time");
        // As after the end of a process.
        let index = std::fs::read(directory.index()).expect("ours");
        swapper.close().expect("our own files");
        let short = std::fs::metadata(directory.index()).expect("ours").len();
        assert!(short < 2 << 16, "{short} bytes for two entries");
        for index in [Some(index), None] {
            if let Some(index) = index {
                std::fs::write(directory.index(), index).expect("ours");
            }
            let swapper = directory.open(&options);
            assert_eq!(keys(&swapper), ["key", "stays"]);
            check(&swapper, &pool, "stays", LEN, 2);
            assert!(get(&swapper, &pool, "key").is_ok());
            swapper.close().expect("our own files");
        }
    }
}

#[test]
fn a_tail_that_was_never_written_costs_what_was_not_flushed_and_no_more() {
    let options = SwapOptions { engine: Engine::Threads, ..SwapOptions::default() };
    let pool = pool(MIB);
    let (directory, copy) = (Directory::new(), Directory::new());
    let swapper = directory.open(&options);
    put(&swapper, &pool, "flushed", LEN, 1).expect("room");
    swapper.flush().expect("our own files");
    let flushed = std::fs::metadata(directory.index()).expect("there").len() as usize;
    let label = "a label that is longer than what a disk writes at once ".repeat(100);
    swapper.write("late", &label, Arc::new(block(&pool, LEN, 2))).expect("room").wait().expect("room");
    let (index, data) =
        (std::fs::read(directory.index()).expect("there"), std::fs::read(directory.data()).expect("there"));
    std::fs::create_dir_all(copy.path()).expect("our own");
    std::fs::write(copy.data(), data).expect("our own");
    // The file is as long as it was, and from some place on it holds zeros.
    for written in (flushed..index.len() - 512).step_by(97).chain([flushed, index.len() - 512]) {
        let mut bytes = index.clone();
        bytes[written..].fill(0);
        std::fs::write(copy.index(), bytes).expect("our own");
        let swapper = copy.reopen(&options);
        assert_eq!(keys(&swapper), ["flushed"], "{written}");
        check(&swapper, &pool, "flushed", LEN, 1);
        swapper.close().expect("our own files");
    }
}
