//! Where memory, drivers and registry meet: memory of our own, and memory that the caller lends.
//!
//! This file owns the teardown order (out of the registry first, so that nobody finds the range any more; then those
//! who hold its pages let go, then unregister in reverse; then unlock; then unmap) and the leak rule: what a driver may still map, or the system will
//! not take back, stays as it is and stays counted.
#![allow(unsafe_code)] // adopting means to believe the caller about memory that is not ours

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::driver::engine::{Cut, Refused, Registrations};
use crate::driver::{DeviceId, Registering, Request};
use crate::error::{Error, NotPinned, Result};
use crate::fork::PerProcess;
use crate::region::{self, Progress, Region, RegionOptions, count_leaked, lock_in_steps, lock_refused};
use crate::registry::shared::global;
use crate::registry::{Adoption, Key};
use crate::{limits, os};

/// Bytes of this process that could not be given back, all pools and registrations together.
pub fn leaked_bytes() -> usize {
    region::leaked_bytes()
}

/// A region of our own, in the registry while it is locked.
#[derive(Debug)]
pub struct Pinned {
    /// `None` once it is released.
    region: Option<Region>,
    registrations: Arc<Registrations>,
    /// Unpinning has ended some of these, or all.
    has_lost_registrations: AtomicBool,
    refusal: Option<Error>,
    key: Option<Key>,
    fork_generation: u64,
}

/// How giving a region back ended.
#[derive(Debug)]
pub enum Released {
    /// The memory is the system's again.
    Gone,
    /// A driver still knows the range: release it again later.
    Lingering(Pinned),
}

impl Pinned {
    /// Makes a region as [`Region::map`] does, registers it with all devices, in one piece each, and enters it.
    ///
    /// # Errors
    /// Those of [`Region::map`] and of the drivers. Nothing remains, unless a driver refuses to undo a registration:
    /// then the region does, and is counted in [`leaked_bytes`].
    pub fn allocate(
        len: usize,
        options: &RegionOptions,
        registering: &Registering<'_>,
        progress: &mut Progress<'_>,
    ) -> std::result::Result<Self, NotPinned> {
        let fork_generation = os::fork_generation();
        let region = Region::make(len, options, progress)?;
        if fork_generation != os::fork_generation() {
            return Err(Error::Forked.into()); // the callback forked, and this is the child
        }
        let range = region.address()..region.address() + region.len();
        let request = Request { address: region.address(), len: region.len(), read_only: false };
        let (registrations, refusal) = match Registrations::make(registering.devices, &request, Cut::Whole, progress) {
            Ok(registrations) => (registrations, None),
            Err(Refused { error, stuck: Some(registrations) }) => {
                abandon(region.len(), Arc::new(*registrations));
                std::mem::forget(region);
                return Err(NotPinned { error, stuck: true });
            }
            Err(Refused { error, stuck: None }) if registering.required => return Err(region.give_up(error)),
            Err(Refused { error, stuck: None }) => (Registrations::default(), Some(error)),
        };
        let registrations = Arc::new(registrations);
        let region = Some(region);
        let has_lost_registrations = AtomicBool::new(false);
        let mut pinned = Self { region, registrations, has_lost_registrations, refusal, key: None, fork_generation };
        if options.lock {
            let note = Arc::clone(&pinned.registrations);
            pinned.key = Some(global().change(|registry| {
                // The kernel has given us these addresses: whoever adopted them has unmapped them since.
                registry.bury(&range, Registrations::are_none);
                registry.insert(range, note)
            })?);
        }
        Ok(pinned)
    }

    /// The mapping.
    ///
    /// # Panics
    /// Never: a released region is not to be had any more.
    pub fn region(&self) -> &Region {
        self.region.as_ref().expect("only `release` and `drop` take it out")
    }

    /// Whether the pages are locked.
    pub fn is_locked(&self) -> bool {
        self.key.is_some()
    }

    /// Why it is not registered, where that was not required.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }

    /// Bytes that are registered with each device.
    pub fn registered(&self) -> Vec<(DeviceId, usize)> {
        self.registrations.bytes()
    }

    /// Unlocks whole pages of the region, which stay mapped, and are not pinned from then on. `false`: they were not.
    ///
    /// The registrations of the region end, too, where the range is all of it. Pages of a part share them with their
    /// neighbours, from whom they cannot be taken: the drivers know these pages until the region goes, though nobody
    /// finds them registered any more.
    ///
    /// Some Level Zero drivers keep what they were told to give up, and hand it to others for some seconds. Such a
    /// range is waited for: `progress` is asked meanwhile, with no bytes.
    ///
    /// On an error the pages are still pinned. What of their registrations was ended before is not made again: they do
    /// not count as registered with those devices, [`has_lost_registrations`](Self::has_lost_registrations) says so,
    /// and another call goes on from there.
    ///
    /// # Errors
    /// `Driver` with a driver's refusal, `Os` with the kernel's; `Lingering` where a driver has not forgotten the range
    /// in time, or `Interrupted` when `progress` says so: then its owner must not use the memory.
    pub fn unpin(&self, range: &Range<usize>, progress: &mut Progress<'_>) -> Result<bool> {
        let Some(key) = self.key else { return Ok(false) };
        // Out of the registry first: nobody is to find what is about to end.
        if !self.has_pages(range) || !global().change(|registry| registry.carve(range.clone())) {
            return Ok(false);
        }
        let ended = if *range == self.range() {
            tell_holders(range);
            self.end_registrations(progress)
        } else {
            Ok(())
        };
        let unpinned = ended.and_then(|()| {
            let bytes = range.end - range.start;
            os::unlock(range.start, bytes).map_err(|source| Error::Os { call: "munlock", bytes, source })
        });
        if unpinned.is_err() {
            self.restore(range, key);
        }
        unpinned.map(|()| true)
    }

    /// First byte and end.
    fn range(&self) -> Range<usize> {
        let region = self.region();
        region.address()..region.address() + region.len()
    }

    /// Whether a range is made of pages of the region.
    fn has_pages(&self, range: &Range<usize>) -> bool {
        let (all, page) = (self.range(), os::page_size());
        let inside = all.start <= range.start && range.end <= all.end;
        !range.is_empty() && inside && range.start.is_multiple_of(page) && range.end.is_multiple_of(page)
    }

    /// Unregisters the region, and waits until the drivers have forgotten it.
    fn end_registrations(&self, progress: &mut Progress<'_>) -> Result<()> {
        let before = self.registrations.bytes().len();
        let ended = self.registrations.end();
        if self.registrations.bytes().len() < before {
            self.has_lost_registrations.store(true, Ordering::Release);
        }
        ended.map_err(|refusal| if self.has_lost_registrations() { ended_in_part(refusal) } else { refusal })?;
        self.registrations.expect_forgotten(progress)
    }

    /// Whether [`unpin`](Self::unpin) has ended registrations of the region, all of them or, where a driver refused,
    /// some. They are not made again: once its owner is gone, the region is to be released, and not to be used again.
    pub fn has_lost_registrations(&self) -> bool {
        self.has_lost_registrations.load(Ordering::Acquire)
    }

    /// Locks again what [`unpin`](Self::unpin) unlocked.
    ///
    /// # Errors
    /// `MemlockLimit` or `Os`, or `Invalid` where the region has lost registrations: the pages stay as they were, not
    /// pinned.
    pub fn repin(&self, range: &Range<usize>) -> Result<()> {
        let Some(key) = self.key else { return Ok(()) };
        if self.has_lost_registrations() {
            return Err(Error::invalid(
                "block",
                "unpinning it has ended its registrations; release its region instead",
            ));
        }
        let bytes = range.end - range.start;
        os::lock(range.start, bytes).map_err(|source| {
            let refusal = lock_refused(bytes, 0, source);
            let _ = os::unlock(range.start, bytes); // a refused mlock may have locked a part
            refusal
        })?;
        if self.restore(range, key) {
            return Ok(());
        }
        // Its last owner registered it, and that registration is still open: it holds the lock now.
        Err(Error::invalid("block", "a registration still holds it"))
    }

    fn restore(&self, range: &Range<usize>, key: Key) -> bool {
        if self.fork_generation != os::fork_generation() {
            return false; // the callback forked, and this is the child
        }
        let note = Arc::clone(&self.registrations);
        global().change(|registry| registry.restore(range.clone(), key, note))
    }

    /// Leaves a region as it is, mapped and registered, because something may use it that nobody can ask.
    pub fn keep_for_good(this: Arc<Self>) {
        count_leaked(this.region().len());
        std::mem::forget(this);
    }

    /// Gives the memory back to the system.
    ///
    /// # Errors
    /// `Driver` where a driver refuses to unregister it, `Os` where the kernel refuses to unmap it: the pages stay
    /// mapped, locked and counted in [`leaked_bytes`].
    pub fn release(mut self) -> Result<Released> {
        Ok(if self.try_release()? { Released::Gone } else { Released::Lingering(self) })
    }

    /// `Ok(false)`: a driver still knows the range, and all is as it was but for the registry. In every other case the
    /// region is taken out.
    fn try_release(&mut self) -> Result<bool> {
        let Some(region) = self.region.take() else { return Ok(true) };
        if self.fork_generation != os::fork_generation() {
            std::mem::forget(region); // the parent's memory is not ours to unmap
            return Ok(true);
        }
        let (address, len) = (region.address(), region.len());
        if let Some(key) = self.key.take() {
            global().change(|registry| registry.forget(address..address + len, key));
        }
        tell_holders(&(address..address + len));
        if let Err(error) = self.registrations.end() {
            abandon(len, Arc::clone(&self.registrations));
            std::mem::forget(region);
            return Err(error);
        }
        if self.registrations.are_forgotten() {
            return region.unmap().map(|()| true);
        }
        self.region = Some(region);
        Ok(false)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Ok(false) = self.try_release()
            && let Some(region) = self.region.take()
        {
            abandon(region.len(), Arc::clone(&self.registrations)); // nobody is left to ask the driver again
            std::mem::forget(region);
        }
    }
}

/// Who keeps pages of regions for uses of its own, beside the drivers: a ring with fixed buffers.
///
/// It holds them while the region lives, whatever its blocks are, and never beyond.
pub(crate) trait Holder: Send + Sync + std::fmt::Debug {
    /// Nobody uses these pages, and they are about to go, or to be unlocked: lets go of them before this returns.
    fn let_go(&self, range: &Range<usize>);
}

static HOLDERS: PerProcess<Mutex<Vec<Weak<dyn Holder>>>> = PerProcess::new();

/// From now on, as long as it lives, a holder is told of regions that are about to go.
pub(crate) fn add_holder(holder: Weak<dyn Holder>) {
    HOLDERS.get().lock().unwrap_or_else(PoisonError::into_inner).push(holder);
}

/// Makes everybody let go of a region that nobody uses.
fn tell_holders(range: &Range<usize>) {
    let mut holders = HOLDERS.get().lock().unwrap_or_else(PoisonError::into_inner);
    holders.retain(|holder| holder.strong_count() > 0);
    let alive: Vec<_> = holders.iter().filter_map(Weak::upgrade).collect();
    drop(holders);
    for holder in alive {
        holder.let_go(range);
    }
}

/// The refusal of a driver, when others have let go of the range already.
fn ended_in_part(refusal: Error) -> Error {
    match refusal {
        Error::Driver { driver, call, code, code_name, device, bytes, .. } => {
            let advice = "the memory is still pinned, and registered with this device, but no more with others that \
                          have let go of it before; unpin it again, or drop it";
            Error::Driver { driver, call, code, code_name, device, bytes, advice }
        }
        other => other,
    }
}

/// A range of the caller's memory, locked in place and registered. Dropping it undoes both.
#[derive(Debug)]
pub struct Adopted {
    range: Range<usize>,
    registrations: Arc<Registrations>,
    refusal: Option<Error>,
    key: Option<Key>,
    fork_generation: u64,
}

impl Adopted {
    /// Locks the pages that hold `len` bytes from `address` on, and registers the bytes with all devices. The very
    /// same range may be adopted again, and stays pinned until each of its owners has let go.
    ///
    /// Page locks do not nest in the kernel: pages that the caller has locked by other means are unlocked with the
    /// last owner.
    ///
    /// # Safety
    /// The memory is mapped, and stays so for as long as this value lives; after its release until the drivers have
    /// forgotten it, as [`into_registrations`](Self::into_registrations) tells. Where it is dropped before, for good.
    ///
    /// # Errors
    /// `Overlap` with a pinned range that is not the very same, `Unsupported` where that one is not registered with
    /// all of these devices, `MemlockLimit`, `Os`, or what a driver says. Nothing stays locked.
    pub unsafe fn adopt(
        address: usize,
        len: usize,
        registering: &Registering<'_>,
        progress: &mut Progress<'_>,
    ) -> std::result::Result<Self, NotPinned> {
        let end =
            address.checked_add(len).filter(|end| len > 0 && end.checked_next_multiple_of(os::page_size()).is_some());
        let end = end.ok_or_else(|| {
            Error::invalid(
                "nbytes",
                format!("{address:#x}+{len} is no range of memory; it must hold at least one byte"),
            )
        })?;
        let fork_generation = os::fork_generation();
        let range = address..end;
        let (key, (registrations, refusal)) = match global().adopt(&range)? {
            Adoption::Arriving(key) => (key, arrive(key, &range, registering, progress)?),
            Adoption::Shared(key) => (key, share(key, &range, registering)?),
            Adoption::Busy => unreachable!("the shared registry waits"),
        };
        Ok(Self { range, registrations, refusal, key: Some(key), fork_generation })
    }

    /// First byte and end.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Whether it was released.
    pub fn is_released(&self) -> bool {
        self.key.is_none()
    }

    /// Why it is not registered, where that was not required.
    pub fn refusal(&self) -> Option<&Error> {
        self.refusal.as_ref()
    }

    /// What the drivers know of the range.
    pub fn registrations(&self) -> &Arc<Registrations> {
        &self.registrations
    }

    /// What the drivers know of a range that was released. Only when they have forgotten it may the memory go, or be
    /// used.
    pub fn into_registrations(mut self) -> Arc<Registrations> {
        std::mem::take(&mut self.registrations)
    }

    /// Unregisters the range and unlocks the pages that nobody else has adopted. A second call does nothing.
    ///
    /// Some Level Zero drivers keep what they were told to give up, and hand it to others for some seconds. The memory
    /// must not be used before [`Registrations::expect_forgotten`], of what
    /// [`into_registrations`](Self::into_registrations) gives, says that it is forgotten.
    ///
    /// # Errors
    /// `Driver` or `Os` with the refusal: the range stays pinned, and the call may be made again.
    pub fn release(&mut self) -> Result<()> {
        let Some(key) = self.key else { return Ok(()) };
        if self.fork_generation == os::fork_generation() && !leave(key, &self.registrations)? {
            self.registrations = Arc::default(); // they are the other owners' concern from here on
        }
        self.key = None;
        Ok(())
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        if self.fork_generation != os::fork_generation() {
            return; // it is the parent's
        }
        if self.release().is_err() || !self.registrations.are_forgotten() {
            abandon(self.range.end - self.range.start, Arc::clone(&self.registrations));
        }
    }
}

/// Locks and registers an arriving range, and publishes it.
fn arrive(
    key: Key,
    range: &Range<usize>,
    registering: &Registering<'_>,
    progress: &mut Progress<'_>,
) -> std::result::Result<Known, NotPinned> {
    let _guard = AbortOnPanic(key);
    let (page, len) = (os::page_size(), range.end - range.start);
    let pages = range.start / page * page..range.end.next_multiple_of(page);
    if let Err(refusal) = lock_in_steps(&pages, progress) {
        abort(key); // a refused mlock may have locked a part
        return Err(refusal.into());
    }
    match register(range, registering, progress) {
        Ok(registrations) => Ok((publish(key, registrations), None)),
        Err(Refused { error, stuck: None }) if registering.required => {
            abort(key);
            Err(error.into())
        }
        Err(Refused { error, stuck: None }) => Ok((publish(key, Registrations::default()), Some(error))),
        Err(Refused { error, stuck: Some(registrations) }) => {
            abandon(len, publish(key, *registrations));
            Err(NotPinned { error, stuck: true })
        }
    }
}

/// Registers a range of the caller's memory. Whether it is mapped read-only takes long to find out, so it is found out
/// only where a driver refuses it as such, or would not.
fn register(
    range: &Range<usize>,
    registering: &Registering<'_>,
    progress: &mut Progress<'_>,
) -> std::result::Result<Registrations, Refused> {
    let refusals: Vec<_> = registering.devices.iter().map(|device| device.refusal_of_read_only()).collect();
    let read_only = refusals.contains(&None) && limits::is_read_only(range);
    let request = Request { address: range.start, len: range.end - range.start, read_only };
    match Registrations::make(registering.devices, &request, Cut::Pieces, progress) {
        Err(Refused { error: Error::Driver { code, .. }, stuck: None })
            if !read_only && refusals.contains(&Some(code)) && limits::is_read_only(range) =>
        {
            let request = Request { read_only: true, ..request };
            Registrations::make(registering.devices, &request, Cut::Pieces, progress)
        }
        made => made,
    }
}

/// Forgets an arriving entry when the caller's progress callback panics.
struct AbortOnPanic(Key);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            abort(self.0);
        }
    }
}

/// What the drivers know of a range, and why they do not know more.
type Known = (Arc<Registrations>, Option<Error>);

fn publish(key: Key, registrations: Registrations) -> Arc<Registrations> {
    let registrations = Arc::new(registrations);
    global().change(|registry| registry.publish(key, Arc::clone(&registrations)));
    registrations
}

/// Joins the owners of a range that is pinned already.
fn share(key: Key, range: &Range<usize>, registering: &Registering<'_>) -> std::result::Result<Known, NotPinned> {
    let note = global().read(|registry| registry.find(range.start).and_then(|found| found.note.cloned()));
    let registrations = note.unwrap_or_default();
    let Some(device) = registering.devices.iter().find(|device| !registrations.serve(device.as_ref())) else {
        return Ok((registrations, None));
    };
    let why = "it is pinned already, but not registered with that device; close that registration first";
    let refusal = Error::unsupported(format!("registering this range with {}", device.id()), why);
    if !registering.required {
        return Ok((registrations, Some(refusal)));
    }
    // Whoever was the last owner may have left while we looked, and left the end to us.
    let stuck = leave(key, &registrations).map_or(true, |last| last && !registrations.are_forgotten());
    if stuck {
        abandon(range.end - range.start, registrations);
    }
    Err(NotPinned { error: refusal, stuck })
}

/// Takes one owner off an adopted range. The last one unregisters and unlocks. False: it was not the last.
fn leave(key: Key, registrations: &Registrations) -> Result<bool> {
    let Some(pages) = global().change(|registry| registry.retire(key)) else { return Ok(false) };
    match registrations.end().and_then(|()| unlock(&pages)) {
        Ok(()) => {
            global().change(|registry| registry.remove(key));
            Ok(true)
        }
        Err(error) => {
            global().change(|registry| registry.keep(key));
            Err(error)
        }
    }
}

/// Forgets an arriving entry whose pages were not locked, or not all of them.
fn abort(key: Key) {
    if let Some(pages) = global().change(|registry| registry.retire(key)) {
        let _ = unlock(&pages); // there is nothing left to undo when this fails, too
        global().change(|registry| registry.remove(key));
    }
}

fn unlock(pages: &Range<usize>) -> Result<()> {
    let (bytes, page) = (pages.end - pages.start, os::page_size());
    if bytes == 0 {
        return Ok(());
    }
    match os::unlock(pages.start, bytes) {
        // Perhaps a part was unmapped by its owner, and took its lock with it: the kernel stops there.
        Err(source) if source.kind() == io::ErrorKind::OutOfMemory && bytes > page => {
            let middle = pages.start + (bytes / 2).next_multiple_of(page);
            let (left, right) = (unlock(&(pages.start..middle)), unlock(&(middle..pages.end)));
            left.and(right)
        }
        Err(source) if source.kind() == io::ErrorKind::OutOfMemory && !os::is_mapped(pages.start) => Ok(()),
        unlocked => unlocked.map_err(|source| Error::Os { call: "munlock", bytes, source }),
    }
}

static ABANDONED: PerProcess<Mutex<Vec<Arc<Registrations>>>> = PerProcess::new();

pub(crate) fn make_statics() {
    ABANDONED.get();
    HOLDERS.get();
}

/// Counts memory that cannot be given back, and keeps alive what its registrations need.
fn abandon(len: usize, registrations: Arc<Registrations>) {
    count_leaked(len);
    ABANDONED.get().lock().unwrap_or_else(PoisonError::into_inner).push(registrations);
}
