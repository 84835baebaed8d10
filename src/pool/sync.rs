//! Locks, atomics and statics of the pool: the standard library's, or in `make model` those of loom, which tries every
//! order of events.

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
#[cfg(loom)]
pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
#[cfg(not(loom))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(super) use std::thread_local;

use std::sync::PoisonError;
use std::time::Duration;

/// Locks. A panic elsewhere left the data whole: nothing here panics halfway.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long whoever waits for a notice does so, before looking up once more.
pub(super) const WAIT_STEP: Duration = Duration::from_millis(50);

/// Lets go of the lock until there is a notice, or the time is up.
#[cfg(not(loom))]
pub(super) fn wait<T>(condvar: &Condvar, guard: MutexGuard<'_, T>, timeout: Duration) {
    drop(condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner));
}

/// Time stands still in a model. A short wait is one for something that nobody tells of, and lets the others go on; from
/// `WAIT_STEP` on it is one for a notice, which must come.
#[cfg(loom)]
pub(super) fn wait<T>(condvar: &Condvar, guard: MutexGuard<'_, T>, timeout: Duration) {
    if timeout < WAIT_STEP {
        drop(guard);
        loom::thread::yield_now();
    } else {
        drop(condvar.wait(guard).unwrap_or_else(PoisonError::into_inner));
    }
}

/// A static with one value for each process; in a model, for each run.
#[cfg(not(loom))]
macro_rules! per_process {
    (static $name:ident: $kind:ty;) => {
        static $name: crate::fork::PerProcess<$kind> = crate::fork::PerProcess::new();
    };
}
#[cfg(loom)]
macro_rules! per_process {
    (static $name:ident: $kind:ty;) => {
        loom::lazy_static! { static ref $name: $kind = <$kind>::default(); }
        impl $name {
            fn get(&'static self) -> &'static $kind {
                self
            }
        }
    };
}
pub(super) use per_process;

/// The next number. Each thread asks for one, once.
#[cfg(not(loom))]
pub(super) fn deal() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(loom)]
pub(super) fn deal() -> usize {
    per_process! { static NEXT: AtomicUsize; }
    NEXT.get().fetch_add(1, Ordering::Relaxed)
}

/// loom's, which does not know of `const`.
#[cfg(loom)]
macro_rules! modelled_thread_local {
    (static $name:ident: $kind:ty = const $init:block;) => {
        loom::thread_local! { static $name: $kind = $init; }
    };
}
#[cfg(loom)]
pub(super) use modelled_thread_local as thread_local;
