//! How a pool gets new regions: charged to the budget first, made without a lock, entered then.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use super::MIB;
use super::inner::Inner;
use super::record::Record;
use crate::driver::engine::SMALLEST_PIECE;
use crate::error::{Error, NotPinned, Result};
use crate::limits::{self, Budget, Source};
use crate::os;
use crate::pinned::Pinned;
use crate::region::Progress;

/// Requests from this size on get a region of their own.
const OWN_REGION: usize = MIB;
/// Shared regions: the smallest, the largest, and the share of what there is already that the next one adds.
const SMALLEST_GROWTH: usize = 2 * MIB;
const LARGEST_GROWTH: usize = 64 * MIB;
const GROWTH_SHARE: usize = 32;

impl Inner {
    /// A block from a new region: its own for a large one, else cut from a shared one.
    pub(super) fn grow(&self, len: usize, progress: &mut Progress<'_>) -> Result<Arc<Record>> {
        let unit = self.options.region.pages.granularity();
        if len >= OWN_REGION && len.is_multiple_of(unit) {
            let pinned = self.make_region(len, progress)?;
            return Ok(self.store().add_own(pinned));
        }
        let (least, growth) = (len.next_multiple_of(unit), self.growth().max(len).next_multiple_of(unit));
        let pinned = match self.make_region(growth, progress) {
            Err(refusal) if self.is_shortage(&refusal) && least < growth => self.make_region(least, progress)?,
            made => made?,
        };
        let mut store = self.store();
        store.add_shared(pinned);
        let record = store.cut(len).expect("nobody else has cut the region that was added under this very lock");
        drop(store);
        self.announce(); // what is left of it may serve somebody who waits
        Ok(record)
    }

    /// Bytes of the next shared region. Near the end of the budget it must not take all that is left.
    fn growth(&self) -> usize {
        let store = self.store();
        let left = self.budget.bytes.saturating_sub(store.reserved());
        (store.shared_bytes() / GROWTH_SHARE).clamp(SMALLEST_GROWTH, LARGEST_GROWTH).min(left / 4)
    }

    /// Grows by shared regions of `len` bytes in all: one, or several where the devices want smaller registrations.
    pub(super) fn reserve(&self, len: usize, progress: &mut Progress<'_>) -> Result<()> {
        let len = len.checked_next_multiple_of(self.options.region.pages.granularity());
        let len = len.ok_or_else(|| Error::invalid("nbytes", "more bytes than memory has"))?;
        let short = self.store().reserved().saturating_add(len) > self.budget.bytes;
        if short {
            self.trim()?;
        }
        let mut made = Vec::new();
        match self.make_regions(len, &mut made, progress) {
            Ok(()) => {
                let mut store = self.store();
                for pinned in made {
                    store.add_shared(pinned);
                }
                drop(store);
                self.announce();
                Ok(())
            }
            Err(refusal) => {
                for pinned in made.into_iter().rev() {
                    let _ = self.release(pinned); // what is refused is counted as leaked
                }
                Err(refusal)
            }
        }
    }

    fn make_regions(&self, len: usize, made: &mut Vec<Pinned>, progress: &mut Progress<'_>) -> Result<()> {
        let devices = &self.options.devices;
        let mut piece = devices.iter().map(|device| device.sizes().usual).min().unwrap_or(len);
        let mut done = 0;
        while done < len {
            let piece_len = piece.min(len - done);
            let mut report = |piece_done: usize, _: usize| -> ControlFlow<()> { progress(done + piece_done, len) };
            match self.make_region(piece_len, &mut report) {
                Ok(pinned) => {
                    made.push(pinned);
                    done += piece_len;
                }
                Err(refusal)
                    if piece_len > SMALLEST_PIECE && devices.iter().any(|device| device.is_too_large(&refusal)) =>
                {
                    piece = (piece_len / 2).next_multiple_of(self.options.region.pages.granularity());
                    if piece >= piece_len {
                        return Err(refusal); // one huge page, and there is no smaller piece
                    }
                }
                Err(refusal) => return Err(refusal),
            }
        }
        Ok(())
    }

    /// Charges and makes a region. On failure the charge is taken back, unless a driver kept the memory.
    fn make_region(&self, len: usize, progress: &mut Progress<'_>) -> Result<Pinned> {
        let charge = self.charge(len)?;
        match Pinned::allocate(len, &self.options.region, &self.options.registering(), progress) {
            Ok(pinned) => {
                charge.keep();
                Ok(pinned)
            }
            Err(NotPinned { error, stuck: false }) => Err(error),
            Err(NotPinned { error, stuck: true }) => {
                charge.keep();
                self.store().count_leaked(len);
                Err(error)
            }
        }
    }

    fn charge(&self, len: usize) -> Result<Charge<'_>> {
        let region = &self.options.region;
        let backed = region.lock && !region.pages.come_from_the_kernels_pool();
        let headroom = if backed { limits::memory_headroom_on(region.numa) } else { self.budget };
        let shortage = {
            let mut store = self.store();
            if len <= headroom.bytes && store.charge(len, self.budget.bytes) {
                return Ok(Charge { pool: self, len });
            }
            let allocated = self.cache.counters().allocated_bytes.cast_unsigned();
            Shortage {
                allocated,
                cached: store.cached_bytes(allocated),
                pending: store.pending_bytes(),
                oldest: store.pending.since(),
                lost: store.lost_bytes(),
            }
        };
        let budget = if len > headroom.bytes { headroom } else { self.budget };
        Err(shortage.into_error(len, budget))
    }
}

/// Bytes that are charged for a region in the making: taken back on drop, unless the region is there.
struct Charge<'a> {
    pool: &'a Inner,
    len: usize,
}

impl Charge<'_> {
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        if self.pool.check_process().is_ok() {
            self.pool.store().refund(self.len);
            self.pool.announce();
        }
    }
}

/// What the pool held when it was asked for too much.
struct Shortage {
    allocated: usize,
    cached: usize,
    pending: usize,
    oldest: Option<Instant>,
    lost: usize,
}

impl Shortage {
    fn into_error(self, wanted: usize, budget: Budget) -> Error {
        if budget.source == Source::Memlock {
            let (soft, hard) = os::memlock_limit();
            return Error::MemlockLimit { wanted, locked: limits::locked_bytes(), soft, hard };
        }
        let Self { allocated, cached, pending, oldest, lost } = self;
        let oldest = oldest.map(|since| since.elapsed());
        let (limit, budget) = (budget.bytes, budget.source.text());
        Error::OutOfPinnedMemory { wanted, limit, allocated, cached, pending, oldest, lost, budget }
    }
}
