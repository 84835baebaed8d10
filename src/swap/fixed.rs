//! Fixed buffers: memory of pools' regions that a ring knows, so that the kernel need not look its pages up each time.
#![allow(unsafe_code)] // hands memory to the kernel

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use io_uring::IoUring;

use super::lock;
use crate::os;
use crate::pinned::{self, Holder};
use crate::registry::shared::global;

/// The parts of pools' regions that a ring knows.
///
/// A region is made known when a piece of it is first moved, in parts of a gigabyte, which is the most that the kernel
/// takes at once; from then on the kernel holds its pages. A region that goes takes its parts along: until then its
/// addresses mean the same memory.
pub(super) struct FixedBuffers {
    ring: Arc<IoUring>,
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

    pub(super) fn new(ring: Arc<IoUring>) -> Arc<Self> {
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
    pub(super) fn find(&self, address: usize, len: usize) -> Option<u16> {
        if let Some((range, slot)) = self.known(address) {
            return slot.filter(|_| address + len <= range.end);
        }
        let region = global().read(|registry| registry.find(address).map(|found| found.range))?;
        let (part, slot) = {
            let mut table = lock(&self.table);
            let slot = table.free.pop();
            if slot.is_none() && table.reason.is_none() {
                table.reason = Some(format!("all {} slots are taken", Self::SLOTS));
            }
            (table.unknown_part(&region, address), slot?)
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
