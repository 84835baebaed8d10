//! What a pool hands out: whole pages of its own, which go back when the block is dropped, on whatever thread.
#![allow(unsafe_code)] // gives the bytes out as a slice

use std::ptr::NonNull;

use crate::pool::Slot;

/// A block of pinned memory. It starts on a page and is padded to one; [`len`](Self::len) is what was asked for.
#[derive(Debug)]
pub struct Block {
    /// `None` for a block of zero bytes, which needs no memory.
    slot: Option<Slot>,
    len: usize,
}

impl Block {
    pub(crate) fn new(slot: Slot, len: usize) -> Self {
        Self { slot: Some(slot), len }
    }

    pub(crate) fn empty() -> Self {
        Self { slot: None, len: 0 }
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First byte; dangling for a block of zero bytes. Valid for reads and writes while the block lives.
    pub fn as_ptr(&self) -> *mut u8 {
        match &self.slot {
            Some(slot) => slot.address() as *mut u8,
            None => NonNull::dangling().as_ptr(),
        }
    }

    /// Bytes from the first on that belong to the block: [`len`](Self::len) rounded up to pages, or a little more.
    pub fn capacity(&self) -> usize {
        self.slot.as_ref().map_or(0, Slot::len)
    }

    /// The bytes. A new block holds what its last owner left there, or zeros.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the pages are mapped and initialized (the kernel zeroes them), and ours alone while we live.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.give_back(self.len);
        }
    }
}
