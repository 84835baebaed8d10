//! What a program does without pinpool: page-aligned heap memory, locked.
#![allow(unsafe_code)] // calls libc as a C program would

use std::io::{self, Write};

/// Memory of `posix_memalign`, locked with `mlock`. Dropping it unlocks and frees.
#[derive(Debug)]
pub(crate) struct LockedHeap {
    address: *mut libc::c_void,
    len: usize,
}

impl LockedHeap {
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the call writes the address into our variable, and nothing else.
        let code = unsafe { libc::posix_memalign(&raw mut address, 4096, len) };
        if code != 0 {
            return Err(io::Error::from_raw_os_error(code));
        }
        let heap = Self { address, len };
        // SAFETY: locking changes neither contents nor protection.
        if unsafe { libc::mlock(address, len) } == 0 { Ok(heap) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for LockedHeap {
    fn drop(&mut self) {
        // SAFETY: unlocking changes neither contents nor protection.
        unsafe { libc::munlock(self.address, self.len) };
        // SAFETY: the address came from `posix_memalign`, and nobody else has it.
        unsafe { libc::free(self.address) };
    }
}

/// Whether this process may lock so many bytes; says so on stderr where it may not, and the benchmark is left out.
pub(crate) fn may_lock(len: usize) -> bool {
    let refusal = LockedHeap::new(len).err();
    if let Some(error) = &refusal {
        let _ = writeln!(io::stderr(), "left out: cannot lock {} ({error}); see `ulimit -l`", label(len));
    }
    refusal.is_none()
}

/// A size as benchmark names have it.
pub(crate) fn label(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    }
}
