//! Closed pools that have something to give back later: device work may use it, or a driver has not forgotten it. Whoever
//! uses a pool looks after them, too.

use std::sync::Arc;

use super::inner::Inner;
use super::sync::{Mutex, MutexGuard, lock, per_process};

impl Inner {
    /// Has a closed pool looked after, if there is anything to do.
    pub(super) fn finish_later(self: &Arc<Self>) {
        let is_unfinished = self.store().is_unfinished();
        let mut unfinished = unfinished();
        if is_unfinished && !unfinished.iter().any(|known| Arc::ptr_eq(known, self)) {
            unfinished.push(Arc::clone(self));
        }
    }
}

/// Gives back what can be given back by now.
pub(super) fn finish() {
    let pools = unfinished().clone();
    if pools.is_empty() {
        return;
    }
    for pool in &pools {
        let _ = pool.trim(); // what the system refuses is counted as leaked
    }
    let finished: Vec<_> = unfinished().extract_if(.., |pool| !pool.store().is_unfinished()).collect();
    drop(finished); // with no lock held: they may be gone with that
}

pub(super) fn make_statics() {
    drop(unfinished());
}

fn unfinished() -> MutexGuard<'static, Vec<Arc<Inner>>> {
    per_process! { static UNFINISHED: Mutex<Vec<Arc<Inner>>>; }
    lock(UNFINISHED.get())
}
