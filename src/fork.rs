//! One value for each generation of forks: a child starts with a fresh one, because its parent's may be locked by a
//! thread that the child does not have, and describes memory that is not the child's.

use std::sync::OnceLock;

use crate::os;

/// A process-wide value that a forked child does not inherit.
pub(crate) struct PerProcess<T> {
    first: OnceLock<Generation<T>>,
}

struct Generation<T> {
    value: T,
    child: OnceLock<Box<Generation<T>>>,
}

impl<T: Default> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    /// The value of this process.
    pub(crate) fn get(&self) -> &T {
        let mut generation = self.first.get_or_init(Generation::new);
        for _ in 0..os::fork_generation() {
            generation = generation.child.get_or_init(|| Box::new(Generation::new()));
        }
        &generation.value
    }
}

impl<T: Default> Generation<T> {
    fn new() -> Self {
        Self { value: T::default(), child: OnceLock::new() }
    }
}
