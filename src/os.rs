//! Every libc call of the crate, each with its pre- and postcondition, as an [`io::Result`].
//!
//! Ranges of memory are whole pages of the caller's own mapping unless a function says otherwise. Nothing here keeps state but
//! the count of memory calls and the fork generation.
#![allow(unsafe_code)] // the one file that talks to libc

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static MEMORY_CALLS: AtomicU64 = AtomicU64::new(0);
static FORK_GENERATION: AtomicU64 = AtomicU64::new(0);

/// Memory system calls (mmap, mbind, madvise, mlock, munlock, munmap) made so far in this process.
pub fn memory_calls() -> u64 {
    MEMORY_CALLS.load(Ordering::Relaxed)
}

fn counted(result: libc::c_int) -> io::Result<()> {
    MEMORY_CALLS.fetch_add(1, Ordering::Relaxed);
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Size of a base page. Never assume 4096: aarch64 kernels also come with 16 and 64 KiB pages.
pub(crate) fn page_size() -> usize {
    static SIZE: OnceLock<usize> = OnceLock::new();
    // SAFETY: sysconf takes no pointer.
    *SIZE.get_or_init(|| unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize)
}

/// Which huge pages of the kernel's own pool a mapping asks for: the base-two logarithm of their size.
pub(crate) type HugetlbShift = u32;

/// What [`map`] maps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    /// From the kernel's pool of huge pages: the length must be a multiple of that page, and the kernel answers
    /// ENOMEM when its pool is short.
    pub(crate) hugetlb: Option<HugetlbShift>,
    /// Let the kernel refuse what it could never back with memory. Off for address space that nobody will touch.
    pub(crate) charge: bool,
}

/// Maps `len` bytes of private, zeroed, anonymous memory that nothing has touched yet.
pub(crate) fn map(len: usize, mapping: Mapping) -> io::Result<usize> {
    let huge = |shift: HugetlbShift| libc::MAP_HUGETLB | ((shift as libc::c_int) << libc::MAP_HUGE_SHIFT);
    let charge = if mapping.charge { 0 } else { libc::MAP_NORESERVE };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | charge | mapping.hugetlb.map_or(0, huge);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    MEMORY_CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: a new private mapping at an address of the kernel's choice touches no memory of ours.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(address as usize) }
}

/// Unmaps whole pages of a mapping of ours.
///
/// # Safety
/// The pages come from [`map`], and nobody reads or writes them any more.
pub(crate) unsafe fn unmap(address: usize, len: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    counted(unsafe { libc::munmap(address as *mut libc::c_void, len) })
}

/// What `madvise` can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Advice {
    /// Back the range with transparent huge pages.
    HugePages,
    /// Keep to base pages.
    BasePages,
    /// Touch every page now, writable (Linux 5.14).
    Populate,
}

/// Advises the kernel about whole pages of a mapping of ours.
pub(crate) fn advise(address: usize, len: usize, advice: Advice) -> io::Result<()> {
    let advice = match advice {
        Advice::HugePages => libc::MADV_HUGEPAGE,
        Advice::BasePages => libc::MADV_NOHUGEPAGE,
        Advice::Populate => libc::MADV_POPULATE_WRITE,
    };
    // SAFETY: none of the three changes what the memory holds.
    counted(unsafe { libc::madvise(address as *mut libc::c_void, len, advice) })
}

/// Writes a zero to each page of a fresh mapping, for kernels without [`Advice::Populate`].
///
/// # Safety
/// The range is a mapping of ours that nobody else uses yet.
pub(crate) unsafe fn touch(address: usize, len: usize) {
    for page in (address..address + len).step_by(page_size()) {
        // SAFETY: inside the caller's own mapping.
        unsafe { (page as *mut u8).write_volatile(0) };
    }
}

/// Keeps the pages in RAM. Page locks do not nest, and a refusal may leave some of the pages locked.
///
/// A raw system call, like its counterpart: sanitizers replace libc's functions of these names by ones that do nothing.
pub(crate) fn lock(address: usize, len: usize) -> io::Result<()> {
    // SAFETY: locking changes neither contents nor protection, and an unmapped range is an ENOMEM.
    counted(unsafe { libc::syscall(libc::SYS_mlock, address, len) } as libc::c_int)
}

/// Lets the kernel move the pages out again.
pub(crate) fn unlock(address: usize, len: usize) -> io::Result<()> {
    // SAFETY: as for `lock`.
    counted(unsafe { libc::syscall(libc::SYS_munlock, address, len) } as libc::c_int)
}

/// Whether a page is mapped at all.
pub(crate) fn is_mapped(page: usize) -> bool {
    let mut resident = 0_u8;
    // SAFETY: asks about one page, and writes one byte that we own.
    let answer = unsafe { libc::mincore(page as *mut libc::c_void, page_size(), &raw mut resident) };
    answer == 0 || io::Error::last_os_error().kind() != io::ErrorKind::OutOfMemory
}

/// Binds untouched pages to one NUMA node, strictly.
pub(crate) fn bind_to_node(address: usize, len: usize, node: u32) -> io::Result<()> {
    const MPOL_BIND: libc::c_ulong = 2;
    const BITS: u32 = libc::c_ulong::BITS;
    let mut mask = vec![0 as libc::c_ulong; (node / BITS) as usize + 1];
    mask[(node / BITS) as usize] |= 1 << (node % BITS);
    // The kernel reads one bit less than it is told.
    let bits = mask.len() as libc::c_ulong * libc::c_ulong::from(BITS) + 1;
    // SAFETY: the mask outlives the call and is as long as `bits` says.
    let result = unsafe { libc::syscall(libc::SYS_mbind, address, len, MPOL_BIND, mask.as_ptr(), bits, 0) };
    counted(result as libc::c_int)
}

/// `RLIMIT_MEMLOCK` in bytes, soft and hard; `usize::MAX` means that there is none.
pub(crate) fn memlock_limit() -> (usize, usize) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the struct that we own.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    let bytes = |value: libc::rlim_t| if value == libc::RLIM_INFINITY { usize::MAX } else { value as usize };
    (bytes(limit.rlim_cur), bytes(limit.rlim_max))
}

/// Opens a file to be read and written, and makes it where there is none. `direct`: past the page cache, so that memory,
/// offsets and lengths must be aligned; where the file system has no such thing, the answer is EINVAL.
pub(crate) fn open(path: &Path, direct: bool) -> io::Result<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(flags).open(path)
}

/// What offsets and addresses must be multiples of in direct transfers, where the kernel tells (Linux 6.1). Zero: there
/// are none for this file.
pub(crate) fn direct_alignment(file: &File) -> Option<usize> {
    // SAFETY: all zeros is a `statx` of nothing.
    let mut answer: libc::statx = unsafe { std::mem::zeroed() };
    let (path, flags, mask) = (CString::default(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // A raw system call: old C libraries lack the function.
    // SAFETY: the path is the empty one, which means the file itself, and the kernel fills the struct that we own.
    let refused =
        unsafe { libc::syscall(libc::SYS_statx, file.as_raw_fd(), path.as_ptr(), flags, mask, &raw mut answer) };
    let told = refused == 0 && answer.stx_mask & libc::STATX_DIOALIGN != 0;
    told.then(|| answer.stx_dio_mem_align.max(answer.stx_dio_offset_align) as usize)
}

/// Reads from a file into memory, as far as one call goes; 0 at its end.
///
/// # Safety
/// The `len` bytes from `address` on are mapped, and nobody reads or writes them meanwhile.
pub(crate) unsafe fn read_at(file: RawFd, address: usize, len: usize, offset: u64) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    transferred(unsafe { libc::pread(file, address as *mut libc::c_void, len, offset as libc::off_t) })
}

/// Writes memory to a file, as far as one call goes.
///
/// # Safety
/// The `len` bytes from `address` on are mapped.
pub(crate) unsafe fn write_at(file: RawFd, address: usize, len: usize, offset: u64) -> io::Result<usize> {
    // SAFETY: the caller's promise.
    transferred(unsafe { libc::pwrite(file, address as *const libc::c_void, len, offset as libc::off_t) })
}

/// A range of memory as the kernel's calls on vectors take it; the empty one is none.
pub(crate) fn io_vector(range: &Range<usize>) -> libc::iovec {
    let base = if range.is_empty() { std::ptr::null_mut() } else { range.start as *mut libc::c_void };
    libc::iovec { iov_base: base, iov_len: range.len() }
}

fn transferred(bytes: isize) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}

/// Reserves room on the disk for a part of a file, which grows to hold it.
pub(crate) fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    loop {
        // SAFETY: takes no pointer.
        let answer = done(unsafe { libc::fallocate(file.as_raw_fd(), 0, offset as libc::off_t, len as libc::off_t) });
        if !matches!(&answer, Err(refusal) if refusal.kind() == io::ErrorKind::Interrupted) {
            return answer;
        }
    }
}

/// Gives the room of a part of a file back to the file system; it reads as zeros from then on.
pub(crate) fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: takes no pointer.
    done(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) })
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How long a file that this process writes may get: beyond it the kernel sends a signal that ends the process.
pub(crate) fn file_size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the struct that we own.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur // RLIM_INFINITY is the largest number
}

/// The error of a disk without room.
pub(crate) const FULL: i32 = libc::ENOSPC;
/// The error of a file that would get longer than it may.
pub(crate) const TOO_LARGE: i32 = libc::EFBIG;
/// The error of something that another has locked.
pub(crate) const IN_USE: i32 = libc::EWOULDBLOCK;
/// The error of an argument that the kernel cannot take.
pub(crate) const INVALID: i32 = libc::EINVAL;
/// The error of a call that a file system does not have.
pub(crate) const NOT_SUPPORTED: i32 = libc::EOPNOTSUPP;
/// The error of a disk.
pub(crate) const DISK_ERROR: i32 = libc::EIO;
/// The error of a ring whose answers are to be taken first.
pub(crate) const BUSY: i32 = libc::EBUSY;
/// The error of a call that is to be made again.
pub(crate) const TRY_AGAIN: i32 = libc::EAGAIN;

/// A counter that becomes readable when it is notified, for whoever waits for several things at once.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes no pointer.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, owned by nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes it readable. A counter that is full is readable already.
    pub(crate) fn notify(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes that we own.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
    }

    /// Takes all notices, so that it is not readable any more.
    pub(crate) fn drain(&self) {
        let mut count = 0_u64;
        // SAFETY: eight bytes that we own.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// How many forks lie between the first process that asked and this one. Costs one load.
///
/// Memory made under another generation belongs to the parent. (A raw `clone` system call goes unseen, as it does by
/// libc itself.)
pub(crate) fn fork_generation() -> u64 {
    static WATCH: OnceLock<()> = OnceLock::new();
    WATCH.get_or_init(|| {
        // SAFETY: the handler touches one atomic, which is safe in a child of any process.
        unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    });
    FORK_GENERATION.load(Ordering::Relaxed)
}

extern "C" fn count_fork() {
    FORK_GENERATION.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: Mapping = Mapping { hugetlb: None, charge: true };

    #[test]
    fn a_mapping_starts_zeroed_and_every_call_is_counted() {
        let before = memory_calls();
        let len = 4 * page_size();
        let address = map(len, ANY).expect("map");
        // SAFETY: the mapping is ours and untouched.
        unsafe { touch(address, len) };
        // SAFETY: the mapping is ours and lives until the unmap below.
        assert_eq!(unsafe { *(address as *const u8) }, 0);
        // SAFETY: nobody uses the mapping any more.
        unsafe { unmap(address, len) }.expect("unmap");
        assert!(memory_calls() >= before + 2);
    }

    #[test]
    fn a_node_that_is_not_there_is_refused() {
        let len = page_size();
        let address = map(len, ANY).expect("map");
        assert!(bind_to_node(address, len, 1000).is_err());
        // SAFETY: nobody uses the mapping any more.
        unsafe { unmap(address, len) }.expect("unmap");
    }
}
