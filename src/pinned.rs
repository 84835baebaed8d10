//! Where memory and the registry meet: memory of our own, and memory that the caller lends.
//!
//! This file owns the teardown order (out of the registry first, so that nobody finds the range any more; then
//! unlock; then unmap) and the leak rule: what cannot be undone stays as it is and stays counted.
#![allow(unsafe_code)] // adopting means to believe the caller about memory that is not ours

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};
use crate::os;
use crate::region::{Progress, Region, RegionOptions, lock_refused};
use crate::registry::shared::global;
use crate::registry::{Adoption, Key};

static LEAKED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes of this process that could not be given back, all pools and registrations together.
pub fn leaked_bytes() -> usize {
    LEAKED_BYTES.load(Ordering::Relaxed)
}

/// A region of our own, in the registry while it is locked.
#[derive(Debug)]
pub struct Pinned {
    region: ManuallyDrop<Region>,
    key: Option<Key>,
    fork_generation: u64,
}

impl Pinned {
    /// Makes a region as [`Region::map`] does, and enters it.
    ///
    /// # Errors
    /// Those of [`Region::map`].
    pub fn allocate(len: usize, options: &RegionOptions, progress: &mut Progress<'_>) -> Result<Self> {
        let fork_generation = os::fork_generation();
        let region = Region::map(len, options, progress)?;
        let range = region.address()..region.address() + region.len();
        let key = if options.lock { Some(global().change(|registry| registry.insert(range))?) } else { None };
        Ok(Self { region: ManuallyDrop::new(region), key, fork_generation })
    }

    /// The mapping.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Whether the pages are locked.
    pub fn is_locked(&self) -> bool {
        self.key.is_some()
    }

    /// Unlocks whole pages of the region, which are not pinned from then on. Nothing changes on an error.
    ///
    /// # Errors
    /// `Os` with the kernel's refusal.
    pub fn unpin(&self, range: &Range<usize>) -> Result<bool> {
        let Some(key) = self.key else { return Ok(false) };
        if !global().change(|registry| registry.carve(range.clone())) {
            return Ok(false);
        }
        let bytes = range.end - range.start;
        os::unlock(range.start, bytes).map_err(|source| {
            global().change(|registry| registry.restore(range.clone(), key));
            Error::Os { call: "munlock", bytes, source }
        })?;
        Ok(true)
    }

    /// Locks again what [`unpin`](Self::unpin) unlocked.
    ///
    /// # Errors
    /// `MemlockLimit` or `Os`: the pages stay as they were, not pinned.
    pub fn repin(&self, range: &Range<usize>) -> Result<()> {
        let Some(key) = self.key else { return Ok(()) };
        let bytes = range.end - range.start;
        os::lock(range.start, bytes).map_err(|source| {
            let refusal = lock_refused(bytes, source);
            let _ = os::unlock(range.start, bytes); // a refused mlock may have locked a part
            refusal
        })?;
        global().change(|registry| registry.restore(range.clone(), key));
        Ok(())
    }

    /// Gives the memory back to the system.
    ///
    /// # Errors
    /// `Os` where the kernel refuses to unmap: the pages stay mapped, locked and counted in [`leaked_bytes`].
    pub fn release(self) -> Result<()> {
        ManuallyDrop::new(self).release_in_place()
    }

    fn release_in_place(&mut self) -> Result<()> {
        if self.fork_generation != os::fork_generation() {
            return Ok(()); // the parent's memory is not ours to unmap
        }
        let (address, len) = (self.region.address(), self.region.len());
        if let Some(key) = self.key {
            global().change(|registry| registry.forget(address..address + len, key));
        }
        // SAFETY: both callers give up `self`, so the region is taken out once.
        let region = unsafe { ManuallyDrop::take(&mut self.region) };
        region.unmap().inspect_err(|_| {
            LEAKED_BYTES.fetch_add(len, Ordering::Relaxed);
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.release_in_place(); // counted in `leaked_bytes`
    }
}

/// A range of the caller's memory, locked in place. Dropping it unlocks.
#[derive(Debug)]
pub struct Adopted {
    range: Range<usize>,
    key: Option<Key>,
    fork_generation: u64,
}

impl Adopted {
    /// Locks the pages that hold `len` bytes from `address` on. The very same range may be adopted again, and stays
    /// pinned until each of its owners has let go.
    ///
    /// Page locks do not nest in the kernel: pages that the caller has locked by other means are unlocked with the
    /// last owner.
    ///
    /// # Safety
    /// The memory is mapped, and stays so for as long as this value lives.
    ///
    /// # Errors
    /// `Overlap` with a pinned range that is not the very same, `MemlockLimit`, or `Os`. Nothing stays locked.
    pub unsafe fn adopt(address: usize, len: usize) -> Result<Self> {
        let end = address.checked_add(len).filter(|_| len > 0);
        let end = end.ok_or_else(|| Error::invalid("nbytes", "a range to pin holds at least one byte"))?;
        let fork_generation = os::fork_generation();
        let range = address..end;
        let key = match global().adopt(&range)? {
            Adoption::Shared(key) => key,
            Adoption::Arriving(key) => lock_and_publish(key, &range)?,
            Adoption::Busy => unreachable!("the shared registry waits"),
        };
        Ok(Self { range, key: Some(key), fork_generation })
    }

    /// First byte and end.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Whether it was released.
    pub fn is_released(&self) -> bool {
        self.key.is_none()
    }

    /// Unlocks the pages that nobody else has adopted. A second call does nothing.
    ///
    /// # Errors
    /// `Os` where the kernel refuses: the range stays pinned, and the call may be made again.
    pub fn release(&mut self) -> Result<()> {
        let Some(key) = self.key else { return Ok(()) };
        if self.fork_generation == os::fork_generation() {
            retire_and_unlock(key)?;
        }
        self.key = None;
        Ok(())
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        if self.release().is_err() {
            LEAKED_BYTES.fetch_add(self.range.end - self.range.start, Ordering::Relaxed);
        }
    }
}

fn lock_and_publish(key: Key, range: &Range<usize>) -> Result<Key> {
    let page = os::page_size();
    let start = range.start / page * page;
    match os::lock(start, range.end.next_multiple_of(page) - start) {
        Ok(()) => {
            global().change(|registry| registry.publish(key));
            Ok(key)
        }
        Err(source) => {
            let refusal = lock_refused(range.end - range.start, source);
            let _ = retire_and_unlock(key); // a refused mlock may have locked a part
            Err(refusal)
        }
    }
}

/// Takes one owner off an adopted range, and unlocks with the last one.
fn retire_and_unlock(key: Key) -> Result<()> {
    let Some(pages) = global().change(|registry| registry.retire(key)) else { return Ok(()) };
    let bytes = pages.end - pages.start;
    let unlocked = if bytes > 0 { os::unlock(pages.start, bytes) } else { Ok(()) };
    match unlocked {
        // Pages that their owner has unmapped took their lock with them.
        Err(source) if source.kind() != io::ErrorKind::OutOfMemory => {
            global().change(|registry| registry.keep(key));
            Err(Error::Os { call: "munlock", bytes, source })
        }
        _ => {
            global().change(|registry| registry.remove(key));
            Ok(())
        }
    }
}
