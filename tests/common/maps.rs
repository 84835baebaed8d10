//! What the kernel says about this process's memory, and memory that a test owns.

use std::fs;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::page;

/// Bytes that are locked.
pub(crate) fn locked_bytes() -> usize {
    status("VmLck:")
}

/// Bytes of address space that are mapped.
pub(crate) fn mapped_bytes() -> usize {
    status("VmSize:")
}

/// Bytes that are in RAM.
pub(crate) fn resident_bytes() -> usize {
    status("VmRSS:")
}

fn status(name: &str) -> usize {
    let text = fs::read_to_string("/proc/self/status").expect("procfs");
    let number = text.lines().find_map(|line| line.strip_prefix(name)).and_then(|rest| rest.split_whitespace().next());
    number.and_then(|kilobytes| kilobytes.parse::<usize>().ok()).expect("a number of kB") * 1024
}

/// A mapping in `/proc/self/smaps`: where it lies, and its two-letter flags.
struct Area {
    range: Range<usize>,
    flags: String,
}

impl Area {
    fn has(&self, flag: &str) -> bool {
        self.flags.split_whitespace().any(|one| one == flag)
    }
}

/// The mappings that hold a part of the range, each cut to it.
fn areas(range: &Range<usize>) -> Vec<Area> {
    let text = fs::read_to_string("/proc/self/smaps").expect("procfs");
    let (mut areas, mut current) = (Vec::new(), 0..0);
    for line in text.lines() {
        if let Some(bounds) = bounds(line) {
            current = bounds.start.max(range.start)..bounds.end.min(range.end);
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && !current.is_empty()
        {
            areas.push(Area { range: current.clone(), flags: flags.to_owned() });
        }
    }
    areas
}

/// The range in front of a mapping's line.
fn bounds(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

fn bytes(areas: &[Area]) -> usize {
    areas.iter().map(|area| area.range.end - area.range.start).sum()
}

/// Whether every byte of the range is mapped.
pub(crate) fn is_mapped(range: &Range<usize>) -> bool {
    bytes(&areas(range)) == range.end - range.start
}

/// Whether no byte of the range is mapped. Only where nobody can have mapped something else there since.
pub(crate) fn is_unmapped(range: &Range<usize>) -> bool {
    // The sanitizer's own mappings soon take the place of ours; they are not locked.
    let others_map_here = std::env::var_os("ASAN_OPTIONS").is_some();
    areas(range).iter().all(|area| others_map_here && !area.has("lo"))
}

/// Whether all of the range is mapped with this flag of smaps: `lo` locked, `hg` and `nh` huge pages wanted and not.
pub(crate) fn has_flag(range: &Range<usize>, flag: &str) -> bool {
    let areas = areas(range);
    bytes(&areas) == range.end - range.start && areas.iter().all(|area| area.has(flag))
}

/// Whether every page of the range is locked, and in RAM.
pub(crate) fn is_locked(range: &Range<usize>) -> bool {
    let pages = pages_of(range);
    has_flag(&pages, "lo") && resident_pages(&pages) * page() == pages.end - pages.start
}

/// Whether no page of the range is locked.
pub(crate) fn is_unlocked(range: &Range<usize>) -> bool {
    !areas(&pages_of(range)).iter().any(|area| area.has("lo"))
}

/// The whole pages that hold the range.
fn pages_of(range: &Range<usize>) -> Range<usize> {
    range.start / page() * page()..range.end.next_multiple_of(page())
}

/// How many pages of a mapped range are in RAM.
pub(crate) fn resident_pages(pages: &Range<usize>) -> usize {
    let mut resident = vec![0_u8; (pages.end - pages.start) / page()];
    // SAFETY: the kernel fills one byte a page, and an unmapped page is an error.
    let result = unsafe { libc::mincore(pages.start as *mut _, pages.end - pages.start, resident.as_mut_ptr()) };
    assert_eq!(result, 0, "mincore: {}", std::io::Error::last_os_error());
    resident.iter().filter(|&&byte| byte & 1 == 1).count()
}

/// Whether the page at this address is locked, by one system call: the kernel does not let locked pages grow cold.
pub(crate) fn page_is_locked(page_start: usize) -> bool {
    // SAFETY: the advice changes no contents.
    let result = unsafe { libc::madvise(page_start as *mut _, page(), libc::MADV_COLD) };
    match (result, std::io::Error::last_os_error().raw_os_error()) {
        (0, _) => false,
        (_, Some(libc::EINVAL)) => true,
        (_, other) => panic!("madvise(MADV_COLD) of a mapped page: {other:?}"),
    }
}

/// Fresh private memory of whole pages, which the test owns.
pub(crate) struct Memory {
    start: usize,
    len: usize,
    /// Some pages are gone, and whoever mapped there since would be hit by an unmap of the whole.
    has_holes: AtomicBool,
}

impl Memory {
    pub(crate) fn new(pages: usize) -> Self {
        let (len, protection) = (pages * page(), libc::PROT_READ | libc::PROT_WRITE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping touches no memory that is there.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        Self { start: start as usize, len, has_holes: AtomicBool::new(false) }
    }

    pub(crate) fn start(&self) -> usize {
        self.start
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Addresses of these pages, counted from the first.
    pub(crate) fn pages(&self, pages: Range<usize>) -> Range<usize> {
        self.start + pages.start * page()..self.start + pages.end * page()
    }

    /// Unmaps these pages.
    pub(crate) fn unmap(&self, pages: Range<usize>) {
        let range = self.pages(pages);
        self.has_holes.store(true, Ordering::Relaxed);
        // SAFETY: the memory is ours, and no reference into it exists.
        let result = unsafe { libc::munmap(range.start as *mut _, range.end - range.start) };
        assert_eq!(result, 0, "munmap: {}", std::io::Error::last_os_error());
    }

    /// Allows these pages less or more: `PROT_NONE`, `PROT_READ`.
    pub(crate) fn protect(&self, pages: Range<usize>, protection: libc::c_int) {
        let range = self.pages(pages);
        // SAFETY: the memory is ours, and no reference into it exists.
        let result = unsafe { libc::mprotect(range.start as *mut _, range.end - range.start, protection) };
        assert_eq!(result, 0, "mprotect: {}", std::io::Error::last_os_error());
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.has_holes.load(Ordering::Relaxed) {
            // SAFETY: the memory is ours, all of it.
            unsafe { libc::munmap(self.start as *mut _, self.len) };
        }
    }
}
