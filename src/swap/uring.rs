//! The engine of Linux: one thread and a ring. Memory of pools' regions is made known to the ring once, as fixed buffers.
#![allow(unsafe_code)] // hands memory to the kernel

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, Weak};
use std::thread::{Builder, JoinHandle};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::queue::Work;
use super::store::Store;
use super::transfer::Piece;
use super::{Checked, Engine, lock};
use crate::error::{Error, Result};
use crate::os;
use crate::pinned::{self, Holder};
use crate::registry::shared::global;

/// The ring of one engine.
pub(super) type Ring = Arc<IoUring>;

/// The user data of the call that waits for the queue's bell.
const BELL: u64 = u64::MAX;

/// A ring, if that is the engine to use; else why not.
pub(super) fn choose(options: &Checked) -> Result<(Option<Ring>, Option<String>)> {
    if options.engine == Engine::Threads {
        return Ok((None, None));
    }
    let refusal = match make(options.queue_depth) {
        Ok(ring) => return Ok((Some(Arc::new(ring)), None)),
        Err(refusal) => explain(&refusal),
    };
    if options.engine == Engine::IoUring {
        return Err(Error::unsupported(
            "engine \"io_uring\"",
            format!("{refusal}; use engine \"threads\" or \"auto\""),
        ));
    }
    Ok((None, Some(refusal)))
}

fn make(queue_depth: usize) -> io::Result<IoUring> {
    let ring = IoUring::new(queue_depth as u32 + 1)?; // and the bell
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
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
    Err(io::Error::new(io::ErrorKind::Unsupported, "the kernel's io_uring lacks reads and writes (Linux 5.6 has them)"))
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

/// Starts the engine's thread. It ends when the queue is closed and empty.
pub(super) fn start(ring: Ring, store: &Arc<Store>, options: &Checked) -> io::Result<Vec<JoinHandle<()>>> {
    if options.fixed_buffers {
        let _ = store.fixed.set(FixedBuffers::new(Arc::clone(&ring)));
    }
    let engine = RingEngine { ring, store: Arc::clone(store), depth: options.queue_depth };
    Builder::new().name("pinpool-swap".to_owned()).spawn(move || engine.run()).map(|thread| vec![thread])
}

struct RingEngine {
    ring: Ring,
    store: Arc<Store>,
    depth: usize,
}

impl RingEngine {
    fn run(self) {
        // What the kernel has, by its user data.
        let mut slots: Vec<Option<Piece>> = (0..self.depth).map(|_| None).collect();
        let mut free: Vec<usize> = (0..self.depth).rev().collect();
        let mut hears_bell = false;
        loop {
            if !hears_bell {
                self.listen();
                hears_bell = true;
            }
            self.fill(&mut slots, &mut free);
            if free.len() == self.depth && self.store.queue.is_over() {
                break;
            }
            self.submit();
            let mut answers = Vec::new();
            // SAFETY: this thread alone uses the completion queue.
            for completion in unsafe { self.ring.completion_shared() } {
                answers.push((completion.user_data(), completion.result()));
            }
            let mut moved = Vec::with_capacity(answers.len());
            for (user_data, result) in answers {
                if user_data == BELL {
                    self.bell().drain();
                    hears_bell = false;
                    continue;
                }
                let slot = user_data as usize;
                free.push(slot);
                moved.extend(slots[slot].take().map(|piece| (piece, answer(result))));
            }
            // The kernel gets its next work before this thread looks at what it has done.
            self.fill(&mut slots, &mut free);
            self.hand_over();
            for (piece, answer) in moved {
                self.store.moved(piece, answer);
            }
        }
        if let Some(fixed) = self.store.fixed.get() {
            fixed.let_go(&(0..usize::MAX));
        }
    }

    fn bell(&self) -> &os::EventFd {
        self.store.queue.bell.as_ref().expect("the queue of a ring has a bell")
    }

    /// The next notice of the bell wakes the thread.
    fn listen(&self) {
        const READABLE: u32 = 1; // POLLIN
        let call = opcode::PollAdd::new(types::Fd(self.bell().raw()), READABLE).build().user_data(BELL);
        // SAFETY: the bell lives as long as the store, and the ring's entries never outlive this thread.
        unsafe { self.push(&call) };
    }

    /// Takes work from the queue, as far as there are slots for it.
    fn fill(&self, slots: &mut [Option<Piece>], free: &mut Vec<usize>) {
        while let Some(&slot) = free.last() {
            match self.store.queue.next() {
                None => return,
                Some(Work::Finish(transfer)) => self.store.finish_transfer(&transfer),
                Some(Work::Move(mut piece)) => {
                    self.store.tamper(&mut piece);
                    free.pop();
                    let call = self.call(&piece).user_data(slot as u64);
                    slots[slot] = Some(piece);
                    // SAFETY: the piece keeps its operation, and that its memory from reuse, until the kernel is done;
                    // and the operation's makers have promised that nobody uses it meanwhile as the kernel does.
                    unsafe { self.push(&call) };
                }
            }
        }
    }

    fn call(&self, piece: &Piece) -> squeue::Entry {
        let (file, memory, len) =
            (types::Fd(self.store.data.as_raw_fd()), piece.address as *mut u8, piece.asked as u32);
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
    fn submit(&self) {
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

/// The parts of pools' regions that a ring knows.
///
/// A region is made known when a piece of it is first moved, in parts of a gigabyte, which is the most that the kernel
/// takes at once; from then on the kernel holds its pages. A region that goes takes its parts along: until then its
/// addresses mean the same memory.
pub(super) struct FixedBuffers {
    ring: Ring,
    table: Mutex<Table>,
}

impl fmt::Debug for FixedBuffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedBuffers").field("table", &self.table).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Table {
    /// By their first byte: the end, and the slot; none: the kernel has refused it.
    parts: BTreeMap<usize, (usize, Option<u16>)>,
    free: Vec<u16>,
    bytes: usize,
    reason: Option<String>,
}

impl Table {
    /// The most that the kernel takes in one slot.
    const LARGEST: usize = 1 << 30;

    /// The part of a region to make known for an address that is not. An unpinned block splits its region for a while, so
    /// parts may be there that are none of the region's as it is now.
    fn unknown_part(&self, region: &Range<usize>, address: usize) -> Range<usize> {
        let start = region.start + (address - region.start) / Self::LARGEST * Self::LARGEST;
        let end = region.end.min(start + Self::LARGEST);
        let before = self.parts.range(..=address).next_back().map_or(start, |(_, &(end, _))| end);
        let behind = self.parts.range(address..).next().map_or(end, |(&start, _)| start);
        start.max(before)..end.min(behind)
    }
}

impl FixedBuffers {
    const SLOTS: u16 = 1024;

    fn new(ring: Ring) -> Arc<Self> {
        let mut table = Table::default();
        match ring.submitter().register_buffers_sparse(Self::SLOTS.into()) {
            Ok(()) => table.free = (0..Self::SLOTS).rev().collect(),
            Err(refusal) => table.reason = Some(format!("the kernel has no table for fixed buffers: {refusal}")),
        }
        let fixed = Arc::new(Self { ring, table: Mutex::new(table) });
        let holder: Weak<dyn Holder> = Arc::<Self>::downgrade(&fixed);
        pinned::add_holder(holder);
        fixed
    }

    /// The buffer that holds a range, which is now made known if it is not. The range is in a block that lives.
    fn find(&self, address: usize, len: usize) -> Option<u16> {
        if let Some((range, slot)) = self.known(address) {
            return slot.filter(|_| address + len <= range.end);
        }
        let region = global().read(|registry| registry.find(address).map(|found| found.range))?;
        let (part, slot) = {
            let mut table = lock(&self.table);
            (table.unknown_part(&region, address), table.free.pop()?)
        };
        let refusal = self.update(slot, &part).err();
        let mut table = lock(&self.table);
        if let Some(refusal) = refusal {
            table.free.push(slot);
            table.reason = Some(explain_fixed(&part, &refusal));
            table.parts.insert(part.start, (part.end, None));
            return None;
        }
        table.bytes += part.len();
        table.parts.insert(part.start, (part.end, Some(slot)));
        Some(slot).filter(|_| address + len <= part.end)
    }

    fn known(&self, address: usize) -> Option<(Range<usize>, Option<u16>)> {
        let table = lock(&self.table);
        let (&start, &(end, slot)) = table.parts.range(..=address).next_back()?;
        (address < end).then_some((start..end, slot))
    }

    /// Puts memory into a slot of the ring; no memory takes it out.
    fn update(&self, slot: u16, part: &Range<usize>) -> io::Result<()> {
        let buffer = os::io_vector(part);
        // SAFETY: the region is mapped, and is taken out before it is unmapped.
        unsafe { self.ring.submitter().register_buffers_update(slot.into(), &[buffer], None) }.map(drop)
    }

    pub(super) fn stats(&self) -> (usize, Option<String>) {
        let table = lock(&self.table);
        (table.bytes, table.reason.clone())
    }
}

impl Holder for FixedBuffers {
    fn let_go(&self, range: &Range<usize>) {
        let mut table = lock(&self.table);
        let starts: Vec<usize> = table.parts.range(range.clone()).map(|(&start, _)| start).collect();
        let parts: Vec<_> = starts.iter().filter_map(|start| Some((*start, table.parts.remove(start)?))).collect();
        table.bytes -= parts.iter().filter(|part| part.1.1.is_some()).map(|part| part.1.0 - part.0).sum::<usize>();
        drop(table);
        for slot in parts.into_iter().filter_map(|part| part.1.1) {
            // Refused, it keeps the pages, and the slot is not used again.
            if self.update(slot, &(0..0)).is_ok() {
                lock(&self.table).free.push(slot);
            }
        }
    }
}

fn explain_fixed(part: &Range<usize>, refusal: &io::Error) -> String {
    let why = match refusal.kind() {
        io::ErrorKind::OutOfMemory => " (they count against RLIMIT_MEMLOCK of the user: raise it with `ulimit -l`)",
        _ => "",
    };
    let len = part.len();
    format!("{:#x}+{len} is no fixed buffer, and its pages are looked up for each transfer: {refusal}{why}", part.start)
}
