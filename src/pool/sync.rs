//! Locks and atomics of the pool: the standard library's, or in `make model` those of loom, which tries every order of
//! events.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
#[cfg(loom)]
pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(loom)]
pub(super) use loom::thread_local;
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
#[cfg(not(loom))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(super) use std::thread_local;

use std::sync::PoisonError;

/// Locks. A panic elsewhere left the data whole: nothing here panics halfway.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
