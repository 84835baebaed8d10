//! Swap when something goes wrong: the disk, the limits, the files, the kernel. Whoever asks is told which, and what was
//! stored before still is.
#![allow(unsafe_code)] // sets limits, and names memory by its address

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use common::process::{alone, become_nobody, in_forked_child};
use common::seccomp::{Rule, paused, refused};
use common::swap::{
    Directory, UNIT, asks, block, check, contents, engines, engines_and_ways, get, keys, put, refusal, say,
    says_damaged,
};
use common::{MIB, go_on, pool};
use pinpool::Error;
use pinpool::swap::{Engine, Fault, SwapOptions, Swapper};

const LEN: usize = 10 * UNIT - 100;

#[test]
fn a_write_that_the_disk_refuses_leaves_the_old_value() {
    // In the first piece, in a later one, and in the padded last one.
    for (options, bad) in engines_and_ways().into_iter().flat_map(|options| [0, 1, 2].map(|bad| (options.clone(), bad)))
    {
        for code in [libc::EIO, libc::ENOSPC] {
            let (directory, pool, calls) = (Directory::new(), pool(MIB), Arc::new(AtomicUsize::new(0)));
            let counter = Arc::clone(&calls);
            let inject = asks(move |is_write, _, _| {
                // The first three writes are those of the old value.
                let fails = is_write && counter.fetch_add(1, Ordering::SeqCst) == 3 + bad;
                fails.then_some(Fault::Refusal(code))
            });
            let swapper = directory.open(&SwapOptions { inject: Some(inject), ..options.clone() });
            put(&swapper, &pool, "key", LEN, 1).expect("no fault yet");
            let error = put(&swapper, &pool, "key", LEN, 2).expect_err("a fault");
            assert_eq!((refusal(&error).0, refusal(&error).1), ("writing", code), "{error}");
            assert!(error.to_string().contains("\"key\""), "{error}");
            check(&swapper, &pool, "key", LEN, 1);
            let stats = swapper.stats().expect("ours");
            assert_eq!((stats.entries, stats.stored_bytes), (1, 10 * UNIT), "its room is free again");
            assert_eq!(stats.bytes_written, LEN);
            put(&swapper, &pool, "key", LEN, 3).expect("the fault is over");
            check(&swapper, &pool, "key", LEN, 3);
            swapper.close().expect("our own files");
            check(&directory.open(&options), &pool, "key", LEN, 3);
        }
    }
}

#[test]
fn a_failure_is_kept_for_whoever_asks_when_its_ticket_is_gone() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let inject = asks(|is_write, _, _| is_write.then_some(Fault::Refusal(libc::EIO)));
        let swapper = directory.open(&SwapOptions { inject: Some(inject), ..options.clone() });
        let begin = |key: &str| swapper.write(key, "", Arc::new(block(&pool, LEN, 1))).expect("room");
        begin("heard").wait().expect_err("a fault");
        assert!(swapper.take_unheard().is_none(), "it was told of");
        drop(begin("first"));
        drop(begin("second"));
        swapper.close().expect("its own files are fine");
        let unheard = swapper.take_unheard().expect("two were dropped");
        assert!(["\"first\"", "\"second\""].iter().any(|key| unheard.to_string().contains(key)), "{unheard}");
        assert!(swapper.take_unheard().is_none(), "once");
    }
}

#[test]
fn nothing_of_a_transfer_is_moved_after_it_has_failed() {
    // One piece at a time: the others of a transfer still wait when the first has failed.
    for options in engines_and_ways() {
        let (directory, pool, calls) = (Directory::new(), pool(MIB), Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&calls);
        let inject =
            asks(move |_, _, _| (counter.fetch_add(1, Ordering::SeqCst) == 0).then_some(Fault::Refusal(libc::EIO)));
        let options = SwapOptions { inject: Some(inject), queue_depth: Some(1), ..options };
        let swapper = directory.open(&options);
        put(&swapper, &pool, "key", 100 * UNIT, 1).expect_err("a fault");
        put(&swapper, &pool, "other", UNIT, 2).expect("the fault is over");
        check(&swapper, &pool, "other", UNIT, 2);
        assert!(calls.load(Ordering::SeqCst) <= 4, "{} calls for three", calls.load(Ordering::SeqCst));
        swapper.close().expect("our own files");
        assert_eq!(keys(&directory.open(&options)), ["other"]);
    }
}

#[test]
fn a_read_that_the_disk_refuses_is_an_error_and_the_next_one_is_not() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let first = AtomicUsize::new(0);
        let inject = asks(move |is_write, _, _| {
            (!is_write && first.fetch_add(1, Ordering::SeqCst) == 0).then_some(Fault::Refusal(libc::EIO))
        });
        let swapper = directory.open(&SwapOptions { inject: Some(inject), ..options });
        put(&swapper, &pool, "key", LEN, 1).expect("no fault for writes");
        let target = pool.take(LEN).expect("room");
        let ticket = swapper.read("key", target).expect("stored");
        let error = ticket.wait().expect_err("a fault");
        assert_eq!((refusal(&error).0, refusal(&error).1), ("reading", libc::EIO), "{error}");
        assert!(matches!(&*error, Error::Storage { place: Some((_, bytes)), .. } if *bytes > 0) && ticket.is_done());
        assert!(ticket.take_block().is_none(), "nothing was read");
        check(&swapper, &pool, "key", LEN, 1);
    }
}

#[test]
fn short_transfers_are_continued_and_interrupted_ones_are_made_again() {
    for options in engines_and_ways() {
        let (directory, pool, calls) = (Directory::new(), pool(MIB), Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&calls);
        let inject = asks(move |_, _, len| match counter.fetch_add(1, Ordering::SeqCst) % 4 {
            0 if len > UNIT => Some(Fault::Short(UNIT)),
            1 => Some(Fault::Refusal(libc::EINTR)),
            2 => Some(Fault::Refusal(libc::EAGAIN)),
            _ => None,
        });
        let swapper = directory.open(&SwapOptions { inject: Some(inject), ..options });
        for seed in 0..10 {
            put(&swapper, &pool, &seed.to_string(), LEN + seed as usize, seed).expect("no lasting fault");
        }
        for seed in 0..10 {
            check(&swapper, &pool, &seed.to_string(), LEN + seed as usize, seed);
        }
        assert!(calls.load(Ordering::SeqCst) > 10 * 2 * 3, "some were made again");
    }
}

#[test]
fn a_write_that_gets_no_further_is_an_error() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let inject = asks(|is_write, _, len| (is_write && len == UNIT).then_some(Fault::Short(0)));
        let swapper = directory.open(&SwapOptions { inject: Some(inject), ..options });
        let error = put(&swapper, &pool, "key", 5 * UNIT, 1).expect_err("the second piece is one unit");
        assert_eq!(refusal(&error).1, libc::EIO, "{error}");
        assert!(keys(&swapper).is_empty());
    }
}

#[test]
fn a_file_that_was_cut_behind_our_back_is_damaged_there() {
    for options in engines_and_ways() {
        // In front of the entry, in it, in the middle of a unit of it.
        for cut in [0, 3 * UNIT, 4 * UNIT, 4 * UNIT + 512, 9 * UNIT + 1] {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let swapper = directory.open(&options);
            put(&swapper, &pool, "key", LEN, 1).expect("room");
            Directory::truncate(&directory.data(), cut as u64);
            let error = get(&swapper, &pool, "key").expect_err("it is not there");
            says_damaged(&error, "data");
            assert!(error.to_string().contains("\"key\""), "{error}");
            let first_missing =
                |offset: u64| offset <= cut as u64 && cut as u64 - offset < 4 * UNIT as u64 || offset >= cut as u64;
            assert!(
                matches!(&*error, Error::Damaged { offset, .. } if first_missing(*offset)),
                "cut at {cut}: {error}"
            );
        }
    }
}

#[test]
fn a_byte_that_was_changed_on_the_disk_is_found_wherever_it_is() {
    const LEN: usize = 2 * UNIT + 10;
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&SwapOptions { block_bytes: Some(UNIT), ..options });
        put(&swapper, &pool, "before", LEN, 1).expect("room");
        put(&swapper, &pool, "key", LEN, 2).expect("room");
        put(&swapper, &pool, "behind", LEN, 3).expect("room");
        let start = 3 * UNIT; // it was the second of three entries, which were written one after the other
        for at in [0, 1, 511, UNIT - 1, UNIT, 2 * UNIT - 1, 2 * UNIT, LEN - 1] {
            Directory::flip(&directory.data(), (start + at) as u64);
            let error = get(&swapper, &pool, "key").expect_err("it was changed");
            says_damaged(&error, "data");
            assert!(error.to_string().contains("\"key\"") && error.to_string().contains("checksum"), "{error}");
            check(&swapper, &pool, "before", LEN, 1);
            check(&swapper, &pool, "behind", LEN, 3);
            Directory::flip(&directory.data(), (start + at) as u64);
            check(&swapper, &pool, "key", LEN, 2);
        }
        Directory::flip(&directory.data(), (start + LEN) as u64);
        check(&swapper, &pool, "key", LEN, 2); // what lies behind its end is not part of it
    }
}

#[test]
fn a_store_that_is_full_says_so_and_goes_on() {
    for options in engines_and_ways() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let options = SwapOptions { max_bytes: Some(12 * UNIT), ..options };
        let swapper = directory.open(&options);
        put(&swapper, &pool, "key", 10 * UNIT, 1).expect("room");
        let full = |error: &Error| {
            assert_eq!(refusal(error).1, libc::ENOSPC, "{error}");
            assert!(refusal(error).2.contains("max_bytes"), "{error}");
        };
        full(&put(&swapper, &pool, "other", 2 * UNIT + 1, 2).expect_err("three units"));
        full(&put(&swapper, &pool, "key", 10 * UNIT, 2).expect_err("the old one is still there"));
        check(&swapper, &pool, "key", 10 * UNIT, 1);
        put(&swapper, &pool, "other", 2 * UNIT, 3).expect("it fits exactly");
        swapper.delete("key").expect("stored").wait().expect("deleted");
        put(&swapper, &pool, "key", 9 * UNIT + 1, 4).expect("ten units");
        let stats = swapper.stats().expect("ours");
        assert_eq!((stats.stored_bytes, stats.file_bytes), (12 * UNIT, 12 * UNIT));
        swapper.close().expect("our own files");
        let too_small = SwapOptions { max_bytes: Some(11 * UNIT), ..options.clone() };
        let refused = directory.try_open(&too_small).expect_err("less than it takes");
        assert!(matches!(refused, Error::Invalid { parameter: "max_bytes", .. }), "{refused}");
        let swapper = directory.open(&options);
        check(&swapper, &pool, "key", 9 * UNIT + 1, 4);
        check(&swapper, &pool, "other", 2 * UNIT, 3);
    }
}

/// Takes the mount away from the directory, which can then be removed.
fn unmount(directory: &Path) {
    let path = std::ffi::CString::new(directory.as_os_str().as_encoded_bytes()).expect("no zero byte");
    // SAFETY: a string that ends with zero.
    assert_eq!(unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) }, 0);
}

/// Mounts a file system of so many bytes, seen by this process alone.
fn mount_small(directory: &Path, bytes: usize) -> Result<(), std::io::Error> {
    let path = std::ffi::CString::new(directory.as_os_str().as_encoded_bytes()).expect("no zero byte");
    let size = std::ffi::CString::new(format!("size={bytes}")).expect("no zero byte");
    // SAFETY: takes a number only; mounts of this thread are its own from now on.
    let unshared = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    let (root, none) = (c"/".as_ptr(), std::ptr::null());
    // SAFETY: strings that end with zero; nothing that is mounted here is seen elsewhere.
    let private = unsafe { libc::mount(none, root, none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) };
    // SAFETY: the same.
    let mounted = unsafe { libc::mount(c"tmpfs".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, size.as_ptr().cast()) };
    if unshared == 0 && private == 0 && mounted == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

#[test]
fn a_full_disk_refuses_the_write_and_room_that_is_made_there_is_used() {
    alone("a_full_disk_refuses_the_write_and_room_that_is_made_there_is_used", || {
        for options in engines() {
            let (directory, pool) = (Directory::new(), pool(MIB));
            std::fs::create_dir(directory.path()).expect("the temporary directory is ours");
            if let Err(refusal) = mount_small(directory.path(), 64 * UNIT) {
                return say(&format!("no small file system: {refusal}"));
            }
            let swapper = directory.open(&options);
            put(&swapper, &pool, "key", 20 * UNIT, 1).expect("room");
            let error = put(&swapper, &pool, "big", 60 * UNIT, 2).expect_err("no room");
            assert_eq!(refusal(&error).1, libc::ENOSPC, "{error}");
            assert!(refusal(&error).2.contains("make room"), "{error}");
            assert_eq!(keys(&swapper), ["key"]);
            assert_eq!(swapper.stats().expect("ours").stored_bytes, 20 * UNIT);
            put(&swapper, &pool, "key", 20 * UNIT, 3).expect("room for two of them");
            check(&swapper, &pool, "key", 20 * UNIT, 3);
            swapper.delete("key").expect("stored").wait().expect("deleted");
            put(&swapper, &pool, "big", 50 * UNIT, 4).expect("room");
            check(&swapper, &pool, "big", 50 * UNIT, 4);
            swapper.close().expect("the index finds room");
            check(&directory.open(&options), &pool, "big", 50 * UNIT, 4);
            unmount(directory.path());
        }
    });
}

fn limit_files(bytes: usize) {
    let limit = libc::rlimit { rlim_cur: bytes as libc::rlim_t, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel reads the struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}

#[test]
fn a_file_that_may_not_grow_is_an_error_and_no_signal() {
    alone("a_file_that_may_not_grow_is_an_error_and_no_signal", || {
        for options in engines() {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let swapper = directory.open(&options);
            limit_files(32 * UNIT + 100);
            put(&swapper, &pool, "key", 20 * UNIT, 1).expect("room");
            let error = put(&swapper, &pool, "big", 20 * UNIT, 2).expect_err("the limit");
            assert_eq!(refusal(&error).1, libc::EFBIG, "{error}");
            assert!(refusal(&error).2.contains("RLIMIT_FSIZE"), "{error}");
            put(&swapper, &pool, "small", 12 * UNIT, 3).expect("it fits exactly");
            limit_files(UNIT);
            let label = "x".repeat(2 * UNIT);
            let error = swapper.write("small", &label, Arc::new(block(&pool, 10, 4))).map_err(Arc::new);
            let error = error.and_then(|ticket| ticket.wait()).expect_err("neither the data nor the index may grow");
            assert_eq!(refusal(&error).1, libc::EFBIG, "{error}");
            check(&swapper, &pool, "key", 20 * UNIT, 1);
            check(&swapper, &pool, "small", 12 * UNIT, 3);
            // The index alone: there is room in the data file.
            limit_files(libc::RLIM_INFINITY as usize);
            swapper.delete("key").expect("stored").wait().expect("deleted");
            limit_files(UNIT);
            let error = swapper.write("small", &label, Arc::new(block(&pool, 10, 4))).expect("room").wait();
            let error = error.expect_err("the index may not grow");
            assert!(matches!(&*error, Error::Storage { file, .. } if file.ends_with("index")), "{error}");
            check(&swapper, &pool, "small", 12 * UNIT, 3);
            limit_files(libc::RLIM_INFINITY as usize);
            swapper.close().expect("our own files");
            let swapper = directory.open(&options);
            assert_eq!(keys(&swapper), ["small"]);
            check(&swapper, &pool, "small", 12 * UNIT, 3);
        }
    });
}

#[test]
fn a_directory_without_permission_is_named() {
    alone("a_directory_without_permission_is_named", || {
        let directory = Directory::new();
        std::fs::create_dir(directory.path()).expect("the temporary directory is ours");
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o500)).expect("ours");
        for options in engines() {
            in_forked_child(|| {
                become_nobody(MIB);
                let below = directory.path().join("below");
                for (path, call) in [(directory.path(), "opening"), (&below, "making")] {
                    let error = Swapper::open(path, &options).expect_err("not ours");
                    assert_eq!((refusal(&error).0, refusal(&error).1), (call, libc::EACCES), "{error}");
                    let text = error.to_string();
                    assert!(text.contains(&path.display().to_string()) && text.contains("permission"), "{text}");
                }
            });
        }
        let file = directory.path().join("file");
        std::fs::write(&file, "").expect("root may");
        let error = Swapper::open(&file, &SwapOptions::default()).expect_err("no directory");
        assert!(error.to_string().contains("file"), "{error}");
    });
}

#[test]
fn without_io_uring_auto_takes_threads_and_says_why() {
    for (code, word) in [(libc::EPERM, "seccomp"), (libc::ENOSYS, "the kernel has none")] {
        refused(&[Rule::every(libc::SYS_io_uring_setup, code)], || {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let swapper = directory.open(&SwapOptions::default());
            let stats = swapper.stats().expect("ours");
            assert_eq!(stats.engine, Engine::Threads);
            let reason = stats.engine_reason.expect("a reason");
            assert!(reason.contains("io_uring_setup") && reason.contains(word), "{reason}");
            put(&swapper, &pool, "key", LEN, 1).expect("threads do it");
            check(&swapper, &pool, "key", LEN, 1);
            let elsewhere = Directory::new();
            let wanted = SwapOptions { engine: Engine::IoUring, ..SwapOptions::default() };
            let error = elsewhere.try_open(&wanted).expect_err("it was asked for by name");
            assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(word), "{error}");
            assert!(error.to_string().contains("threads"), "{error}");
            assert!(!elsewhere.path().exists(), "nothing was made");
        });
    }
    let directory = Directory::new();
    let stats = directory.open(&SwapOptions { engine: Engine::Threads, ..SwapOptions::default() }).stats();
    assert_eq!(stats.expect("ours").engine_reason, None, "threads were asked for");
}

#[test]
fn where_memlock_is_too_small_io_goes_on_without_fixed_buffers() {
    alone("where_memlock_is_too_small_io_goes_on_without_fixed_buffers", || {
        let Some(options) = engines().into_iter().find(|options| options.engine == Engine::IoUring) else { return };
        become_nobody(3 * MIB);
        let (directories, pool) = ([(); 4].map(|()| Directory::new()), pool(MIB));
        pool.reserve(MIB, &mut go_on).expect("room"); // one region
        // Each ring counts the region anew, beside what the pool has locked.
        let swappers = directories.each_ref().map(|directory| directory.open(&options));
        for (seed, swapper) in swappers.iter().enumerate() {
            put(swapper, &pool, "key", LEN, seed as u64).expect("with fixed buffers or without");
            check(swapper, &pool, "key", LEN, seed as u64);
        }
        let stats = swappers.each_ref().map(|swapper| swapper.stats().expect("ours"));
        assert!(stats[0].fixed_bytes > 0 && stats[0].fixed_reason.is_none(), "{:?}", stats[0]);
        assert_eq!(stats[3].fixed_bytes, 0);
        let reason = stats[3].fixed_reason.as_ref().expect("a reason");
        assert!(reason.contains("RLIMIT_MEMLOCK"), "{reason}");
    });
}

#[test]
fn fixed_buffers_that_were_not_wanted_are_not_made() {
    for options in engines() {
        for wanted in [true, false] {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let swapper = directory.open(&SwapOptions { fixed_buffers: wanted, ..options.clone() });
            put(&swapper, &pool, "key", LEN, 1).expect("room");
            check(&swapper, &pool, "key", LEN, 1);
            let stats = swapper.stats().expect("ours");
            assert_eq!(stats.fixed_bytes > 0, wanted && stats.engine == Engine::IoUring, "{stats:?}");
        }
    }
}

#[test]
fn a_store_that_is_open_is_refused_to_all_others_and_its_holder_is_named() {
    alone("a_store_that_is_open_is_refused_to_all_others_and_its_holder_is_named", || {
        for options in engines() {
            let (directory, pool) = (Directory::new(), pool(MIB));
            let swapper = directory.open(&options);
            put(&swapper, &pool, "key", LEN, 1).expect("room");
            let holder = std::process::id();
            let refused = || {
                let error = directory.try_open(&options).expect_err("it is open");
                assert_eq!((refusal(&error).0, refusal(&error).1), ("locking", libc::EWOULDBLOCK), "{error}");
                assert!(error.to_string().contains(&format!("process {holder} ")), "{error}");
            };
            refused();
            in_forked_child(refused);
            refused(); // the child's attempt has changed nothing
            check(&swapper, &pool, "key", LEN, 1);
            swapper.close().expect("our own files");
            check(&directory.open(&options), &pool, "key", LEN, 1);
        }
    });
}

#[test]
fn room_that_is_being_trimmed_is_not_missing() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        for key in ["a", "b", "c"] {
            put(&swapper, &pool, key, LEN, 1).expect("room");
        }
        swapper.delete("b").expect("stored").wait().expect("deleted");
        let punches = Rule::every(libc::SYS_fallocate, 0);
        std::thread::scope(|scope| {
            let ((), writing) = paused(
                punches,
                || assert!(swapper.trim().expect("the kernel takes it") > 0),
                || {
                    let (source, about_to) = (block(&pool, LEN, 2), Arc::new(Barrier::new(2)));
                    let (swapper, begins) = (&swapper, Arc::clone(&about_to));
                    let writing = scope.spawn(move || {
                        begins.wait();
                        swapper.write("d", "2", Arc::new(source)).map(|ticket| ticket.wait())
                    });
                    about_to.wait();
                    // It may have to wait for the trim: nobody can wait for it here.
                    (0..1000).for_each(|_| std::thread::yield_now());
                    writing
                },
            );
            writing.join().expect("no panic").expect("there is room").expect("written");
        });
        check(&swapper, &pool, "d", LEN, 2);
    }
}

#[test]
fn a_store_that_is_closed_is_not_trimmed_any_more() {
    for options in engines() {
        let (directory, pool) = (Directory::new(), pool(MIB));
        let swapper = directory.open(&options);
        for key in ["a", "b", "c"] {
            put(&swapper, &pool, key, LEN, 1).expect("room");
        }
        swapper.delete("b").expect("stored").wait().expect("deleted");
        let (_, ()) = paused(
            Rule::every(libc::SYS_fallocate, 0),
            || swapper.trim(),
            || {
                // The close must wait for the trim, or the trim for nobody: whoever has the store next is not harmed.
                let closed = swapper.close_within(&mut |_, _| std::ops::ControlFlow::Break(()));
                if closed.is_ok() {
                    let next = directory.reopen(&options);
                    put(&next, &pool, "d", LEN, 2).expect("room");
                    next.close().expect("our own files");
                }
            },
        );
        swapper.close().expect("our own files");
        let next = directory.reopen(&options);
        for key in keys(&next) {
            get(&next, &pool, &key).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
    }
}

#[test]
fn an_index_whose_directory_cannot_be_read_is_still_the_one_that_is_there() {
    alone("an_index_whose_directory_cannot_be_read_is_still_the_one_that_is_there", || {
        let outer = Directory::new();
        std::fs::create_dir(outer.path()).expect("the temporary directory is ours");
        std::fs::set_permissions(outer.path(), std::fs::Permissions::from_mode(0o777)).expect("ours");
        for options in engines() {
            let path = outer.path().join(options.engine.name());
            in_forked_child(|| {
                become_nobody(MIB);
                let pool = pool(MIB);
                let swapper = Swapper::open(&path, &options).expect("a store of our own");
                std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o300)).expect("ours");
                let label = "x".repeat(1 << 16);
                for seed in 0..40 {
                    // Long records: the index is written anew on the way.
                    let source = Arc::new(block(&pool, 100, seed));
                    swapper.write("key", &label, source).expect("room").wait().expect("written");
                }
                put(&swapper, &pool, "last", 100, 7).expect("room");
                std::mem::forget(swapper); // it is not closed
            });
            let pool = pool(MIB);
            let swapper = loop {
                match Swapper::open(&path, &options) {
                    Err(Error::Storage { call: "locking", .. }) => std::thread::yield_now(), // the child's ring goes
                    other => break other.expect("root may"),
                }
            };
            assert!(get(&swapper, &pool, "key").expect("stored") == contents(100, 39));
            check(&swapper, &pool, "last", 100, 7);
        }
    });
}

#[test]
fn an_index_that_cannot_be_appended_to_changes_nothing_and_can_be_later() {
    // The refusal is on the engine's threads, which the filtered thread starts: pwrite for the data is another call.
    alone("an_index_that_cannot_be_appended_to_changes_nothing_and_can_be_later", || {
        let (directory, pool) = (Directory::new(), pool(MIB));
        for options in engines() {
            let swapper = directory.reopen(&options);
            put(&swapper, &pool, "key", LEN, 1).expect("room");
            swapper.close().expect("our own files");
            in_forked_child(|| {
                let index = std::fs::metadata(directory.index()).expect("ours").len();
                refused(&[Rule::every(libc::SYS_lseek, libc::EIO)], || {
                    let pool = common::pool(MIB);
                    let swapper = directory.open(&options);
                    let error = put(&swapper, &pool, "key", LEN, 2).expect_err("no record");
                    assert!(matches!(&*error, Error::Storage { file, code: libc::EIO, .. } if file.ends_with("index")));
                    check(&swapper, &pool, "key", LEN, 1);
                    assert_eq!(swapper.stats().expect("ours").stored_bytes, 10 * UNIT);
                    let error = swapper.delete("key").expect("stored").wait().expect_err("no record");
                    assert_eq!(refusal(&error).1, libc::EIO);
                    check(&swapper, &pool, "key", LEN, 1);
                    drop(swapper.close());
                });
                assert_eq!(std::fs::metadata(directory.index()).expect("ours").len(), index);
            });
            check(&directory.open(&options), &pool, "key", LEN, 1);
        }
    });
}
