//! The engine of Linux: one thread and a ring.
#![allow(unsafe_code)] // hands memory to the kernel

use std::io;
use std::num::NonZero;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::fixed::FixedBuffers;
use super::queue::Work;
use super::store::Store;
use super::transfer::{Digest, Piece};
use super::{Checked, Engine};
use crate::error::{Error, Result};
use crate::os;
use crate::pinned::Holder as _;

/// The ring of one engine.
pub(super) type Ring = Arc<IoUring>;

/// More threads than this make no digests faster than memory is read.
const MOST_HELPERS: usize = 4;

/// The user data of the call that waits for the queue's bell.
const BELL: u64 = u64::MAX;

/// A ring, if that is the engine to use; else why not.
pub(super) fn choose(options: &Checked) -> Result<(Option<Ring>, Option<String>)> {
    if options.engine == Engine::Threads {
        return Ok((None, None));
    }
    let refusal = match make(options.queue_depth) {
        Ok(ring) => return Ok((Some(Arc::new(ring)), None)),
        Err(refusal) => refusal,
    };
    if options.engine == Engine::IoUring {
        return Err(Error::unsupported(
            "engine \"io_uring\"",
            format!("{refusal}; use engine \"threads\" or \"auto\""),
        ));
    }
    Ok((None, Some(refusal)))
}

/// A ring, or in words why there is none.
fn make(queue_depth: usize) -> std::result::Result<IoUring, String> {
    let ring = IoUring::new(queue_depth as u32 + 1).map_err(|refusal| explain(&refusal))?; // and the bell
    let mut probe = Probe::new();
    let asked = ring.submitter().register_probe(&mut probe);
    asked.map_err(|refusal| format!("io_uring does not tell what it can do (Linux 5.6 does): {refusal}"))?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::PollAdd::CODE,
    ];
    if needed.iter().all(|&code| probe.is_supported(code)) {
        return Ok(ring);
    }
    Err("the kernel's io_uring has no reads and writes of this kind (Linux 5.6 has them)".to_owned())
}

fn explain(refusal: &io::Error) -> String {
    let why = match refusal.kind() {
        io::ErrorKind::PermissionDenied => {
            " (kernel.io_uring_disabled, or the container's seccomp profile, keeps it from this process)"
        }
        io::ErrorKind::Unsupported => " (the kernel has none, or a seccomp profile hides it)",
        io::ErrorKind::OutOfMemory => " (the memlock limit is too small for the ring: `ulimit -l`)",
        _ => "",
    };
    format!("io_uring_setup failed: {refusal}{why}")
}

/// Starts the engine's threads: one for the ring, and some that make digests meanwhile. They end when the queue is closed
/// and empty.
pub(super) fn start(ring: Ring, store: &Arc<Store>, options: &Checked) -> io::Result<Vec<JoinHandle<()>>> {
    if options.fixed_buffers {
        let _ = store.fixed.set(FixedBuffers::new(Arc::clone(&ring)));
    }
    let engine = RingEngine::new(ring, Arc::clone(store), options.queue_depth);
    let mut threads = vec![spawn("pinpool-swap", move || engine.run())?];
    let helpers = std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST_HELPERS);
    for _ in 0..helpers {
        let store = Arc::clone(store);
        threads.push(spawn("pinpool-digest", move || help(&store))?);
    }
    Ok(threads)
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    Builder::new().name(name.to_owned()).spawn(run)
}

fn help(store: &Store) {
    while let Some(digest) = store.queue.wait_digest() {
        store.make_digest(digest);
    }
}

struct RingEngine {
    ring: Ring,
    store: Arc<Store>,
    /// What the kernel has, by its user data.
    slots: Box<[Option<Piece>]>,
    free: Vec<usize>,
    /// Of what is about to be handed to the kernel.
    digests: Vec<Digest>,
    hears_bell: bool,
}

impl RingEngine {
    fn new(ring: Ring, store: Arc<Store>, depth: usize) -> Self {
        let slots = (0..depth).map(|_| None).collect();
        Self { ring, store, slots, free: (0..depth).rev().collect(), digests: Vec::new(), hears_bell: false }
    }

    fn run(mut self) {
        loop {
            self.listen();
            self.fill();
            if self.free.len() == self.slots.len() && self.store.queue.is_over() {
                break;
            }
            self.wait();
            let moved = self.reap();
            // The kernel gets its next work before this thread looks at what it has done.
            self.fill();
            for (piece, answer) in moved {
                self.store.moved(piece, answer);
            }
        }
        if let Some(fixed) = self.store.fixed.get() {
            fixed.let_go(&(0..usize::MAX));
        }
    }

    /// Takes the kernel's answers.
    fn reap(&mut self) -> Vec<(Piece, io::Result<usize>)> {
        let mut moved = Vec::new();
        // SAFETY: this thread alone uses the completion queue.
        for completion in unsafe { self.ring.completion_shared() } {
            if completion.user_data() == BELL {
                self.bell().drain();
                self.hears_bell = false;
                continue;
            }
            let slot = completion.user_data() as usize;
            self.free.push(slot);
            moved.extend(self.slots[slot].take().map(|piece| (piece, answer(completion.result()))));
        }
        moved
    }

    fn bell(&self) -> &os::EventFd {
        self.store.queue.bell.as_ref().expect("the queue of a ring has a bell")
    }

    /// The next notice of the bell wakes the thread.
    fn listen(&mut self) {
        const READABLE: u32 = 1; // POLLIN
        if std::mem::replace(&mut self.hears_bell, true) {
            return;
        }
        let call = opcode::PollAdd::new(types::Fd(self.bell().raw()), READABLE).build().user_data(BELL);
        // SAFETY: the bell lives as long as the store, and the ring's entries never outlive this thread.
        unsafe { self.push(&call) };
    }

    /// Takes work from the queue, as far as there are slots for it, and hands it to the kernel.
    fn fill(&mut self) {
        while let Some(&slot) = self.free.last() {
            match self.store.queue.next() {
                None => break,
                Some(Work::Finish(transfer)) => self.store.finish_transfer(&transfer),
                Some(Work::Move(mut piece)) => {
                    self.store.tamper(&mut piece);
                    self.digests.extend(piece.take_digest());
                    self.free.pop();
                    let call = self.call(&piece).user_data(slot as u64);
                    self.slots[slot] = Some(piece);
                    // SAFETY: the piece keeps its operation, and that its memory from reuse, until the kernel is done;
                    // and the operation's makers have promised that nobody uses it meanwhile as the kernel does.
                    unsafe { self.push(&call) };
                }
            }
        }
        self.hand_over();
        for digest in self.digests.drain(..) {
            self.store.digest(digest);
        }
    }

    fn call(&self, piece: &Piece) -> squeue::Entry {
        let (file, memory, len) =
            (types::Fd(self.store.data.file.as_raw_fd()), piece.address as *mut u8, piece.asked as u32);
        let fixed = self.store.fixed.get().and_then(|fixed| fixed.find(piece.address, piece.asked));
        match (piece.is_write, fixed) {
            (true, Some(buffer)) => opcode::WriteFixed::new(file, memory, len, buffer).offset(piece.offset).build(),
            (true, None) => opcode::Write::new(file, memory, len).offset(piece.offset).build(),
            (false, Some(buffer)) => opcode::ReadFixed::new(file, memory, len, buffer).offset(piece.offset).build(),
            (false, None) => opcode::Read::new(file, memory, len).offset(piece.offset).build(),
        }
    }

    /// # Safety
    /// What the call uses stays valid until its completion.
    unsafe fn push(&self, call: &squeue::Entry) {
        // SAFETY: this thread alone uses the submission queue; the rest is the caller's promise.
        while unsafe { self.ring.submission_shared().push(call) }.is_err() {
            self.hand_over(); // there are as many entries as slots, and one for the bell: it is full of what was not submitted
        }
    }

    /// Hands the calls to the kernel, if there are some.
    fn hand_over(&self) {
        // SAFETY: this thread alone uses the submission queue.
        if unsafe { self.ring.submission_shared() }.is_empty() {
            return;
        }
        while let Err(refusal) = self.ring.submit() {
            retry(&refusal);
        }
    }

    /// Hands the calls to the kernel, and waits for an answer.
    fn wait(&self) {
        while let Err(refusal) = self.ring.submit_and_wait(1) {
            if refusal.raw_os_error() == Some(os::BUSY) {
                return; // answers are to be taken first
            }
            retry(&refusal);
        }
    }
}

/// The kernel refuses calls only where it is short of something for a moment.
fn retry(refusal: &io::Error) {
    if refusal.kind() != io::ErrorKind::Interrupted {
        std::thread::yield_now();
    }
}

fn answer(result: i32) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))
}
