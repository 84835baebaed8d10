//! The engine for everywhere: threads that call pread and pwrite.
#![allow(unsafe_code)] // hands memory to the kernel

use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use super::Checked;
use super::queue::Work;
use super::store::Store;
use super::transfer::Piece;
use crate::os;

/// More threads than this make nothing faster.
const MOST_THREADS: usize = 16;

/// How many transfers the kernel has at a time with this engine.
pub(super) fn depth(queue_depth: usize) -> usize {
    queue_depth.min(MOST_THREADS)
}

/// Starts the threads. They end when the queue is closed and empty.
pub(super) fn start(store: &Arc<Store>, options: &Checked) -> io::Result<Vec<JoinHandle<()>>> {
    let start = |_| {
        let store = Arc::clone(store);
        Builder::new().name("pinpool-swap".to_owned()).spawn(move || run(&store))
    };
    (0..depth(options.queue_depth)).map(start).collect()
}

fn run(store: &Store) {
    while let Some(work) = store.queue.wait_next() {
        match work {
            Work::Move(mut piece) => {
                store.tamper(&mut piece);
                let answer = transfer(store, &piece);
                let digest = piece.take_digest();
                store.moved(piece, answer);
                if let Some(digest) = digest {
                    store.digest(digest);
                }
            }
            Work::Finish(transfer) => store.finish_transfer(&transfer),
        }
    }
}

fn transfer(store: &Store, piece: &Piece) -> io::Result<usize> {
    let file = store.data.file.as_raw_fd();
    // SAFETY: the operation keeps the memory from reuse until its end, and its makers have promised that nobody uses it
    // before that as the kernel does.
    unsafe {
        if piece.is_write {
            os::write_at(file, piece.address, piece.asked, piece.offset)
        } else {
            os::read_at(file, piece.address, piece.asked, piece.offset)
        }
    }
}
