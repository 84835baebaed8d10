//! One mapping that we own: mapped, placed, advised, prefaulted and locked, in that order, and undone on drop.
//!
//! The order matters. Placing must come before the first touch, and locking a huge-page range that nothing has
//! touched is several times slower than touching it first.
#![allow(unsafe_code)] // unmaps and touches the mapping that it owns

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::error::{Error, NotPinned, Result};
use crate::fork::PerProcess;
use crate::os::{self, Advice};
use crate::{limits, os::HugetlbShift};

const MIB: usize = 1 << 20;
/// Size of a transparent huge page, and the alignment of regions that may hold one.
const HUGE_PAGE: usize = 2 * MIB;
/// Prefault works in steps of this size, between which it reports and can be stopped.
const PREFAULT_STEP: usize = 32 * MIB;
/// Locking touched pages is quicker, so its steps are larger.
const LOCK_STEP: usize = 256 * MIB;
/// More threads than this only queue up for the kernel's lock on the address space.
const MAX_THREADS: usize = 16;

static LEAKED_BYTES: PerProcess<AtomicUsize> = PerProcess::new();

/// Bytes of this process that could not be given back.
pub(crate) fn leaked_bytes() -> usize {
    LEAKED_BYTES.get().load(Ordering::Relaxed)
}

/// Counts memory that stays mapped or locked for good.
pub(crate) fn count_leaked(len: usize) {
    LEAKED_BYTES.get().fetch_add(len, Ordering::Relaxed);
}

/// Told the bytes done and the bytes in all, between two steps; `Break` stops and undoes everything.
pub type Progress<'a> = dyn FnMut(usize, usize) -> ControlFlow<()> + 'a;

/// What a caller wants a region to be made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Transparent huge pages where the kernel gives them freely, else base pages.
    #[default]
    Auto,
    /// Base pages (4 KiB on x86-64).
    Base,
    /// Transparent huge pages, or an error.
    Transparent,
    /// 2 MiB pages of the kernel's own pool, or an error.
    Huge2M,
    /// 1 GiB pages of the kernel's own pool, or an error.
    Huge1G,
}

impl Pages {
    fn hugetlb(self) -> Option<HugetlbShift> {
        match self {
            Self::Huge2M => Some(21),
            Self::Huge1G => Some(30),
            _ => None,
        }
    }

    /// Whether they come from the kernel's pool of huge pages, and not from free memory.
    pub(crate) fn come_from_the_kernels_pool(self) -> bool {
        self.hugetlb().is_some()
    }

    /// The size that regions of this kind are multiples of.
    pub fn granularity(self) -> usize {
        match self {
            Self::Transparent | Self::Huge2M => HUGE_PAGE,
            Self::Huge1G => 1 << 30,
            Self::Auto | Self::Base => os::page_size(),
        }
    }

    /// The name that Python and `stats()` use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Base => "4k",
            Self::Transparent => "thp",
            Self::Huge2M => "2m",
            Self::Huge1G => "1g",
        }
    }

    /// The kind of that name.
    ///
    /// # Errors
    /// `Invalid` names the five.
    pub fn from_name(name: &str) -> Result<Self> {
        let all = [Self::Auto, Self::Base, Self::Transparent, Self::Huge2M, Self::Huge1G];
        all.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            Error::invalid("pages", format!("{name:?} is none of \"auto\", \"4k\", \"thp\", \"2m\", \"1g\""))
        })
    }
}

/// How a region is made.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    /// What it is made of.
    pub pages: Pages,
    /// The NUMA node that all of it must lie on. `None`: wherever the touching threads run.
    pub numa: Option<u32>,
    /// Threads that prefault. `None`: one a core, at most 16.
    pub threads: Option<usize>,
    /// Prefault and lock. Off, the memory is only mapped: it costs address space and nothing else, is not pinned, and
    /// serves to try a policy on sizes that this machine does not have.
    pub lock: bool,
}

impl Default for RegionOptions {
    fn default() -> Self {
        Self { pages: Pages::Auto, numa: None, threads: None, lock: true }
    }
}

/// An owned mapping. Dropping it unmaps, which unlocks too.
#[derive(Debug)]
pub struct Region {
    address: usize,
    len: usize,
    pages: Pages,
}

impl Region {
    /// Makes a region of at least `len` bytes, rounded up to its pages.
    ///
    /// # Errors
    /// `Unsupported` for pages that this machine does not have, `MemlockLimit`, `Os` for any other refusal,
    /// `Interrupted` when `progress` says so. Nothing stays mapped or locked.
    pub fn map(len: usize, options: &RegionOptions, progress: &mut Progress<'_>) -> Result<Self> {
        Self::make(len, options, progress).map_err(|refused| refused.error)
    }

    /// As [`map`](Self::map), and tells when the system would not take back what it had given.
    pub(crate) fn make(
        len: usize,
        options: &RegionOptions,
        progress: &mut Progress<'_>,
    ) -> std::result::Result<Self, NotPinned> {
        let mut region = Self::map_aligned(len, options)?;
        match region.furnish(options, progress) {
            Ok(()) => Ok(region),
            Err(error) => Err(region.give_up(error)),
        }
    }

    /// Places, advises, prefaults and locks.
    fn furnish(&mut self, options: &RegionOptions, progress: &mut Progress<'_>) -> Result<()> {
        if let Some(node) = options.numa {
            os::bind_to_node(self.address, self.len, node).map_err(|source| node_refused(node, &source))?;
        }
        self.advise(options)?;
        if options.lock {
            self.prefault(options, progress)?;
            self.check_huge(options)?;
            lock_in_steps(&(self.address..self.address + self.len), progress)?;
        }
        Ok(())
    }

    /// First byte, on a page.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Bytes, whole pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// A region is never empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What it is made of: never `Auto`.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    /// Fills a part that nobody uses at this moment.
    pub(crate) fn fill(&self, range: &Range<usize>, byte: u8) {
        // SAFETY: mapped, inside, and by the caller's word nobody else's now.
        unsafe { std::ptr::write_bytes(self.pointer_to(range), byte, range.end - range.start) };
    }

    /// Where in a part that nobody should use the first other byte is.
    pub(crate) fn find_other(&self, range: &Range<usize>, byte: u8) -> Option<usize> {
        // SAFETY: mapped and inside. Whoever writes to it after all is the one to be found out.
        let bytes = unsafe { std::slice::from_raw_parts(self.pointer_to(range), range.end - range.start) };
        bytes.iter().position(|&found| found != byte)
    }

    fn pointer_to(&self, range: &Range<usize>) -> *mut u8 {
        assert!(self.address <= range.start && range.end <= self.address + self.len, "inside the region");
        range.start as *mut u8
    }

    /// Unmaps now.
    ///
    /// # Errors
    /// `Os` with the kernel's refusal: the pages are still there then, and the region is given up for lost.
    pub fn unmap(self) -> Result<()> {
        let region = std::mem::ManuallyDrop::new(self);
        region.unmap_in_place()
    }

    fn unmap_in_place(&self) -> Result<()> {
        // SAFETY: the region owns the mapping, and whoever drops it has given up every address in it.
        let unmapped = unsafe { os::unmap(self.address, self.len) };
        unmapped.map_err(os_error("munmap", self.len)).inspect_err(|_| count_leaked(self.len))
    }

    /// Unmaps a region that is not wanted after all.
    pub(crate) fn give_up(self, error: Error) -> NotPinned {
        NotPinned { error, stuck: self.unmap().is_err() }
    }

    /// Maps, on a huge page's boundary where a transparent one may fit.
    fn map_aligned(len: usize, options: &RegionOptions) -> std::result::Result<Self, NotPinned> {
        let unit = options.pages.granularity();
        let len = len.checked_next_multiple_of(unit).filter(|&len| len > 0 && isize::try_from(len).is_ok());
        let len = len.ok_or_else(|| Error::invalid("nbytes", "a region holds 1 to 2^63 - 1 bytes"))?;
        let may_be_huge = matches!(options.pages, Pages::Auto | Pages::Transparent) && len >= HUGE_PAGE;
        let slack = if may_be_huge { HUGE_PAGE - os::page_size() } else { 0 };
        let mapping = os::Mapping { hugetlb: options.pages.hugetlb(), charge: options.lock };
        let start = os::map(len + slack, mapping).map_err(|source| map_refused(len, options.pages, source))?;
        let mut region = Self { address: start, len: len + slack, pages: options.pages };
        if slack > 0
            && let Err(error) = region.shrink_to(start.next_multiple_of(HUGE_PAGE), len)
        {
            return Err(region.give_up(error));
        }
        Ok(region)
    }

    /// Unmaps what lies before and behind `address..address + len`.
    fn shrink_to(&mut self, address: usize, len: usize) -> Result<()> {
        let (head, tail) = (address - self.address, self.address + self.len - (address + len));
        if tail > 0 {
            // SAFETY: the tail is part of this untouched mapping.
            unsafe { os::unmap(address + len, tail) }.map_err(os_error("munmap", tail))?;
            self.len -= tail;
        }
        if head > 0 {
            // SAFETY: as for the tail.
            unsafe { os::unmap(self.address, head) }.map_err(os_error("munmap", head))?;
            (self.address, self.len) = (address, len);
        }
        Ok(())
    }

    /// Settles what the region is made of, and tells the kernel.
    fn advise(&mut self, options: &RegionOptions) -> Result<()> {
        let (available, setting) = limits::transparent_huge_pages();
        self.pages = match options.pages {
            Pages::Transparent if !available => {
                let why = format!(
                    "/sys/kernel/mm/transparent_hugepage/enabled says {setting:?}; as root, write \"madvise\" there, \
                     or ask for \"auto\" or \"4k\""
                );
                return Err(Error::unsupported("pages=\"thp\"", why));
            }
            Pages::Auto if available && self.len >= HUGE_PAGE => Pages::Transparent,
            Pages::Auto => Pages::Base,
            explicit => explicit,
        };
        match self.pages {
            Pages::Transparent => self.advise_all(Advice::HugePages, "madvise(MADV_HUGEPAGE)"),
            Pages::Base if available => self.advise_all(Advice::BasePages, "madvise(MADV_NOHUGEPAGE)"),
            _ => Ok(()),
        }
    }

    fn advise_all(&self, advice: Advice, call: &'static str) -> Result<()> {
        os::advise(self.address, self.len, advice).map_err(os_error(call, self.len))
    }

    /// Explicitly transparent pages must all be huge.
    fn check_huge(&self, options: &RegionOptions) -> Result<()> {
        if options.pages != Pages::Transparent {
            return Ok(());
        }
        let huge = limits::huge_bytes(&(self.address..self.address + self.len));
        if huge >= self.len {
            return Ok(());
        }
        let why = format!(
            "the kernel backed only {huge} of {} bytes with huge pages: memory is too fragmented, or \
             /sys/kernel/mm/transparent_hugepage/defrag is \"never\"; ask for \"auto\", which takes what it gets",
            self.len
        );
        Err(Error::unsupported("pages=\"thp\"", why))
    }

    /// Touches every page. With "auto", the first step decides whether huge pages are worth their price here.
    fn prefault(&mut self, options: &RegionOptions, progress: &mut Progress<'_>) -> Result<()> {
        let mut done = 0;
        if options.pages == Pages::Auto && self.pages == Pages::Transparent {
            let stalls_before = limits::compaction_stalls();
            done = PREFAULT_STEP.min(self.len);
            populate(self.address, done)?;
            if compaction_is_slow(limits::compaction_stalls().saturating_sub(stalls_before), done) {
                self.pages = Pages::Base;
                self.advise_all(Advice::BasePages, "madvise(MADV_NOHUGEPAGE)")?;
            }
            if progress(done, self.len).is_break() {
                return Err(Error::Interrupted);
            }
        }
        prefault_in_parallel(self.address, self.len, done, threads(options), progress)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let _ = self.unmap_in_place(); // a refusal is counted
    }
}

/// Whether so many waits for compaction, while so many bytes were touched, say that memory is too fragmented for huge
/// pages: a wait for every fourth page is where they cost more time than base pages.
fn compaction_is_slow(stalls: usize, touched: usize) -> bool {
    stalls > (touched / HUGE_PAGE / 4).max(1)
}

fn threads(options: &RegionOptions) -> usize {
    let cores = || thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MAX_THREADS);
    options.threads.unwrap_or_else(cores).max(1)
}

/// Touches `address + done..address + len` in steps that all threads draw from; the calling thread also reports.
fn prefault_in_parallel(
    address: usize,
    len: usize,
    done: usize,
    threads: usize,
    progress: &mut Progress<'_>,
) -> Result<()> {
    let (next, finished, stop) = (AtomicUsize::new(done), AtomicUsize::new(done), AtomicBool::new(false));
    let step = || -> Option<Result<()>> {
        let start = next.fetch_add(PREFAULT_STEP, Ordering::Relaxed);
        if start >= len || stop.load(Ordering::Relaxed) {
            return None;
        }
        let step_len = PREFAULT_STEP.min(len - start);
        let result = populate(address + start, step_len);
        finished.fetch_add(step_len, Ordering::Relaxed);
        stop.fetch_or(result.is_err(), Ordering::Relaxed);
        Some(result)
    };
    let work = || std::iter::from_fn(step).collect::<Result<()>>();
    let mut report_between_steps = || -> Result<()> {
        while let Some(result) = step() {
            result?;
            if progress(finished.load(Ordering::Relaxed), len).is_break() {
                stop.store(true, Ordering::Relaxed);
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    };
    let helpers = (threads - 1).min((len - done) / PREFAULT_STEP);
    thread::scope(|scope| {
        let helpers: Vec<_> =
            (0..helpers).filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok()).collect();
        let mine = report_between_steps();
        let theirs = helpers.into_iter().map(|helper| helper.join().unwrap_or(Ok(())));
        theirs.fold(mine, Result::and)
    })
}

/// Touches whole pages of a fresh mapping.
fn populate(address: usize, len: usize) -> Result<()> {
    match os::advise(address, len, Advice::Populate) {
        Err(source) if source.kind() == std::io::ErrorKind::InvalidInput => {
            // SAFETY: the range is part of a mapping of ours that nobody else has seen yet.
            unsafe { os::touch(address, len) };
            Ok(())
        }
        result => result.map_err(os_error("madvise(MADV_POPULATE_WRITE)", len)),
    }
}

fn os_error(call: &'static str, bytes: usize) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::Os { call, bytes, source }
}

fn map_refused(len: usize, pages: Pages, source: std::io::Error) -> Error {
    let Some(shift) = pages.hugetlb() else { return os_error("mmap", len)(source) };
    let (page, wanted) = (1_usize << shift, len >> shift);
    let why = format!(
        "{source}: {wanted} pages of {} MiB are needed and the kernel's pool has {} free; reserve them as root with \
         `echo {wanted} > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages`, or ask for \"auto\"",
        page / MIB,
        limits::free_huge_pages(page),
        page / 1024
    );
    Error::unsupported(format!("pages={:?} for {len} bytes", pages.name()), why)
}

fn node_refused(node: u32, source: &std::io::Error) -> Error {
    let why = format!("mbind answered: {source}; nodes with memory: {}", limits::memory_nodes());
    Error::unsupported(format!("memory on NUMA node {node}"), why)
}

/// Locks whole pages in steps, between which it can be stopped. On an error some may be locked.
pub(crate) fn lock_in_steps(pages: &Range<usize>, progress: &mut Progress<'_>) -> Result<()> {
    let len = pages.end - pages.start;
    for done in (0..len).step_by(LOCK_STEP) {
        let step = LOCK_STEP.min(len - done);
        os::lock(pages.start + done, step).map_err(|source| lock_refused(len, done, source))?;
        if progress(len, len).is_break() {
            return Err(Error::Interrupted);
        }
    }
    Ok(())
}

/// The error for a refused lock of `len` bytes, of which `done` are locked: the memlock limit when that explains it,
/// else the kernel's word.
pub(crate) fn lock_refused(len: usize, done: usize, source: std::io::Error) -> Error {
    let (soft, hard) = os::memlock_limit();
    let locked = limits::locked_bytes().saturating_sub(done);
    if !limits::may_lock_without_limit() && locked.saturating_add(len) > soft {
        return Error::MemlockLimit { wanted: len, locked, soft, hard };
    }
    os_error("mlock", len)(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_stalls_are_forgiven_and_many_are_not() {
        assert!(!compaction_is_slow(0, PREFAULT_STEP));
        assert!(!compaction_is_slow(4, PREFAULT_STEP));
        assert!(compaction_is_slow(5, PREFAULT_STEP));
        assert!(!compaction_is_slow(1, HUGE_PAGE), "one stall says nothing");
    }

    #[test]
    fn page_kinds_are_found_by_their_names() {
        assert_eq!(Pages::from_name("2m").expect("known").granularity(), HUGE_PAGE);
        assert!(Pages::from_name("3k").expect_err("unknown").to_string().contains("\"thp\""));
    }
}
