//! How fast transfers are.

use std::time::{Duration, Instant};

/// How much was moved, and how long that was under way.
#[derive(Debug, Default)]
pub(super) struct Meter {
    running: usize,
    since: Option<Instant>,
    busy: Duration,
    bytes: usize,
}

impl Meter {
    /// Something begins.
    pub(super) fn start(&mut self) {
        if self.running == 0 {
            self.since = Some(Instant::now());
        }
        self.running += 1;
    }

    /// Something that began has ended, and so many bytes were moved.
    pub(super) fn stop(&mut self, bytes: usize) {
        self.running -= 1;
        self.bytes += bytes;
        if self.running == 0 {
            self.busy += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    /// How long something was under way.
    pub(super) fn busy(&self) -> Duration {
        self.busy + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Bytes that were moved.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
