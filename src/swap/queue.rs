//! What the engine is to do: pieces of transfers in the order in which these were begun.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::lock;
use super::transfer::{Digest, Piece, Transfer};
use crate::os::EventFd;

/// A step for the engine.
#[derive(Debug)]
pub(super) enum Work {
    /// A call to the kernel.
    Move(Piece),
    /// A transfer without anything to move, or that has failed before anything was.
    Finish(Arc<Transfer>),
}

/// The work of one engine.
#[derive(Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// There is work, or there will be no more.
    work: Condvar,
    /// There are digests to be made, or there will be no more.
    digests: Condvar,
    /// There is work, for an engine that sleeps in the kernel.
    pub(super) bell: Option<EventFd>,
    /// Nothing is under way any more.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The rests of pieces.
    rests: VecDeque<Piece>,
    begun: VecDeque<Arc<Transfer>>,
    digests: VecDeque<Digest>,
    /// Operations that were accepted and have not ended.
    unfinished: usize,
    closing: bool,
}

impl Queue {
    pub(super) fn new(bell: Option<EventFd>) -> Self {
        Self { state: Mutex::default(), work: Condvar::new(), digests: Condvar::new(), bell, idle: Condvar::new() }
    }

    /// Counts an operation in. False: the queue is closing.
    pub(super) fn admit(&self) -> bool {
        let mut state = lock(&self.state);
        if !state.closing {
            state.unfinished += 1;
        }
        !state.closing
    }

    /// An operation has ended, or was not begun after all.
    pub(super) fn dismiss(&self) {
        let mut state = lock(&self.state);
        state.unfinished -= 1;
        if state.unfinished == 0 {
            let is_over = state.is_over();
            drop(state);
            self.idle.notify_all();
            if is_over {
                self.wake_all();
            }
        }
    }

    /// Begins a transfer behind the others.
    pub(super) fn begin(&self, transfer: Arc<Transfer>) {
        lock(&self.state).begun.push_back(transfer);
        self.wake_one();
    }

    /// The rest of a piece comes before all else.
    pub(super) fn again(&self, rest: Piece) {
        lock(&self.state).rests.push_back(rest);
        self.wake_one();
    }

    /// Leaves a digest to the threads that make some.
    pub(super) fn digest_later(&self, digest: Digest) {
        lock(&self.state).digests.push_back(digest);
        self.digests.notify_one();
    }

    /// The next digest, when there is one; `None`: there will be no more.
    pub(super) fn wait_digest(&self) -> Option<Digest> {
        let mut state = lock(&self.state);
        loop {
            if let Some(digest) = state.digests.pop_front() {
                return Some(digest);
            }
            if state.is_over() {
                return None;
            }
            state = self.digests.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Nothing more is admitted.
    pub(super) fn close(&self) {
        lock(&self.state).closing = true;
        self.wake_all();
        self.idle.notify_all();
    }

    /// There is work: whoever takes a part of it wakes the next.
    fn wake_one(&self) {
        self.work.notify_one();
        self.ring();
    }

    fn wake_all(&self) {
        self.work.notify_all();
        self.digests.notify_all();
        self.ring();
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell.notify();
        }
    }

    /// The next step, if there is one now.
    pub(super) fn next(&self) -> Option<Work> {
        lock(&self.state).next()
    }

    /// The next step, when there is one; `None`: there will be no more.
    pub(super) fn wait_next(&self) -> Option<Work> {
        let mut state = lock(&self.state);
        loop {
            if let Some(work) = state.next() {
                if state.has_more() {
                    self.work.notify_one();
                }
                return Some(work);
            }
            if state.is_over() {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether there will be no more work.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).is_over()
    }

    /// Waits a while for the moment in which nothing is under way. True: it is here.
    pub(super) fn wait_idle(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let busy = |state: &mut State| state.unfinished > 0;
        let waited = self.idle.wait_timeout_while(state, timeout, busy).unwrap_or_else(PoisonError::into_inner);
        waited.0.unfinished == 0
    }

    pub(super) fn unfinished(&self) -> usize {
        lock(&self.state).unfinished
    }

    pub(super) fn is_closing(&self) -> bool {
        lock(&self.state).closing
    }
}

impl State {
    fn next(&mut self) -> Option<Work> {
        if let Some(rest) = self.rests.pop_front() {
            return Some(Work::Move(rest));
        }
        while let Some(first) = self.begun.front() {
            let piece = first.issue();
            let rests = if piece.is_none() || first.is_issued() { self.begun.pop_front() } else { None };
            match (piece, rests) {
                (Some(piece), _) => return Some(Work::Move(piece)),
                // It has no pieces at all; or one failed, and whoever was the last with one finishes it.
                (None, Some(transfer)) if transfer.is_without_pieces() => return Some(Work::Finish(transfer)),
                (None, _) => {}
            }
        }
        None
    }

    fn has_more(&self) -> bool {
        !self.rests.is_empty() || !self.begun.is_empty()
    }

    fn is_over(&self) -> bool {
        self.closing && self.unfinished == 0
    }
}
