//! What must be the same before and after, by the driver's word, the kernel's and pinpool's.
#![allow(dead_code)] // each test file uses a part of it

use std::sync::Arc;

use pinpool::driver::{Device, Registering};
use pinpool::pinned::{Adopted, leaked_bytes};
use pinpool::{Block, Error, Pages, Pool, PoolOptions};

use super::driver::Fake;
use super::maps::locked_bytes;
use super::{address, go_on, pinned_ranges, region_of};

/// A fake that nobody uses yet, and what the process held then.
pub(crate) struct Books {
    locked: usize,
    ranges: usize,
    leaked: usize,
    current: usize,
}

impl Books {
    pub(crate) fn open(fake: &Fake) -> Self {
        Self { locked: locked_bytes(), ranges: pinned_ranges(), leaked: leaked_bytes(), current: fake.current() }
    }

    /// Everything is given back, and nobody did wrong.
    pub(crate) fn close(&self, fake: &Fake) {
        self.close_but_for(fake, &[]);
    }

    /// The same, where the test itself has provoked some wrongs.
    pub(crate) fn close_but_for(&self, fake: &Fake, provoked: &[&str]) {
        assert_eq!(fake.live(), [], "registered still");
        assert!((0..8).all(|device| fake.retained(device) == 0), "a context is retained still");
        assert_eq!(fake.depth_of_all(), u64::from(self.current != 0), "contexts on the threads' stacks");
        assert_eq!(leaked_bytes(), self.leaked);
        self.balance(fake, provoked);
    }

    /// What the kernel and the registry know is as before.
    pub(crate) fn balance(&self, fake: &Fake, provoked: &[&str]) {
        let wrong = fake.wrong();
        let unexpected = |text: &&String| !provoked.iter().any(|provoked| text.contains(provoked));
        assert_eq!(wrong.iter().find(unexpected), None, "all of them: {wrong:?}");
        assert_eq!(fake.current(), self.current, "the caller's context");
        assert_eq!((locked_bytes(), pinned_ranges()), (self.locked, self.ranges));
    }
}

/// A pool for these devices, of locked base pages.
pub(crate) fn device_pool(max_bytes: usize, devices: &[Arc<dyn Device>]) -> Pool {
    Pool::new(device_options(max_bytes, devices)).expect("a pool of nothing yet")
}

pub(crate) fn device_options(max_bytes: usize, devices: &[Arc<dyn Device>]) -> PoolOptions {
    let (max_bytes, region) = (Some(max_bytes), region_of(Pages::Base));
    PoolOptions { max_bytes, region, devices: devices.to_vec(), ..PoolOptions::default() }
}

/// Why memory was not pinned, and whether something of it remains.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: Error,
    pub(crate) stuck: bool,
}

/// Locks and registers memory of the test's own.
///
/// # Safety
/// As for [`Adopted::adopt`].
#[allow(unsafe_code)] // the caller vouches for the memory
pub(crate) unsafe fn adopt_for(devices: &[Arc<dyn Device>], start: usize, len: usize) -> Result<Adopted, Refusal> {
    // SAFETY: the caller's promise.
    let adopted = unsafe { Adopted::adopt(start, len, &Registering { devices, required: true }, &mut go_on) };
    adopted.map_err(|refused| Refusal { error: refused.error, stuck: refused.stuck })
}

/// Whether the registry calls all of these bytes registered with that CUDA device.
pub(crate) fn is_registered(start: usize, len: usize, ordinal: u32) -> bool {
    pinpool::registry::shared::is_registered(start, len, "cuda", ordinal)
}

/// The same of a block.
pub(crate) fn block_is_registered(block: &Block, ordinal: u32) -> bool {
    is_registered(address(block), block.len(), ordinal)
}

/// The call and the code inside a driver's refusal.
pub(crate) fn driver_answer(error: &Error) -> (&'static str, i64) {
    match error {
        Error::Driver { call, code, .. } => (call, *code),
        other => panic!("no answer of a driver: {other}"),
    }
}

/// The text holds all of these parts.
pub(crate) fn says(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
}
