//! The device work that may still use a block, and what is known of its end.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use super::sync::thread_local;
use crate::driver::{Event, Place};
use crate::error::Error;

/// So many events of one block are kept before the first look for those that are done.
const FIRST_LOOK: usize = 8;

/// Device work on one block.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    /// Events that are being recorded at this moment.
    arriving: usize,
    events: Vec<Noted>,
    /// Why the end of some work is not known.
    unknown: Option<Unknown>,
    /// From so many events on, it is time to look for those that are done.
    look_at: usize,
}

#[derive(Clone, Debug)]
struct Noted {
    event: Arc<dyn Event>,
    since: Instant,
}

#[derive(Clone, Debug)]
struct Unknown {
    reason: String,
    /// Later events do not change that.
    for_good: bool,
}

/// What an event answers when it is asked.
pub(super) type Answer = std::result::Result<bool, String>;

/// What is known of the work on a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Known {
    /// All of it is done.
    Done,
    /// Some is not.
    Busy,
    /// Nobody will ever know, and why.
    Never(String),
}

impl InFlight {
    /// From now until [`arrived`](Self::arrived) or [`refused`](Self::refused) an event is being recorded.
    pub(super) fn arrive(&mut self) {
        self.arriving += 1;
    }

    /// The event that was being recorded. What is handed back must be dropped without the lock.
    pub(super) fn arrived(&mut self, event: Arc<dyn Event>, now: Instant) -> Option<Arc<dyn Event>> {
        self.arriving -= 1;
        if self.unknown.as_ref().is_some_and(|unknown| !unknown.for_good) {
            self.unknown = None; // the caller has found the right stream
        }
        // The later event of a queue tells of all work before it.
        let earlier = |noted: &Noted| match (noted.event.place(), event.place()) {
            (Some(old), Some(new)) => old.queue == new.queue && old.number < new.number,
            _ => false,
        };
        let found = self.events.iter().position(earlier);
        let replaced = found.map(|at| self.events.swap_remove(at).event);
        self.events.push(Noted { event, since: now });
        replaced
    }

    /// No event could be recorded.
    pub(super) fn refused(&mut self, refusal: &Error) {
        self.arriving -= 1;
        if matches!(refusal, Error::Invalid { .. }) {
            return; // there is no such stream, and nothing was queued on it
        }
        let for_good = matches!(refusal, Error::Captured { .. });
        if for_good || self.unknown.is_none() {
            self.unknown = Some(Unknown { reason: refusal.to_string(), for_good });
        }
    }

    /// The memory is not to be handed out again.
    pub(super) fn condemn(&mut self, reason: String) {
        self.unknown = Some(Unknown { reason, for_good: true });
    }

    /// Nothing is under way, and nothing is unknown.
    pub(super) fn is_done(&self) -> bool {
        self.arriving == 0 && self.events.is_empty() && self.unknown.is_none()
    }

    /// The same but for transfers of the library's own.
    pub(super) fn has_device_work(&self) -> bool {
        self.arriving > 0 || self.unknown.is_some() || self.events.iter().any(|noted| noted.event.is_device_work())
    }

    /// When the oldest event was recorded.
    pub(super) fn since(&self) -> Option<Instant> {
        self.events.iter().map(|noted| noted.since).min()
    }

    /// Whether a block that stays alive has gathered enough events for a look.
    pub(super) fn is_time_to_look(&self) -> bool {
        self.events.len() >= self.look_at.max(FIRST_LOOK)
    }

    /// Where in what queue the first event is, if it is in one.
    pub(super) fn place(&self) -> Option<Place> {
        self.events.first().and_then(|noted| noted.event.place())
    }

    /// The events, to be asked without the lock.
    pub(super) fn events(&self) -> Vec<Arc<dyn Event>> {
        self.events.iter().map(|noted| Arc::clone(&noted.event)).collect()
    }

    /// Takes note of what events answered, and tells what is known now. What is handed back must be dropped without the
    /// lock.
    pub(super) fn note(&mut self, answers: Vec<(Arc<dyn Event>, Answer)>) -> (Known, Vec<Arc<dyn Event>>) {
        let mut dropped = Vec::new();
        for (event, answer) in answers {
            if answer != Ok(false) {
                self.events.retain(|noted| !Arc::ptr_eq(&noted.event, &event));
            }
            if let Err(reason) = answer {
                self.condemn(reason);
            }
            dropped.push(event); // perhaps the last of it, when another thread has heard that it is done
        }
        self.look_at = 2 * self.events.len();
        (self.known(), dropped)
    }

    fn known(&self) -> Known {
        match &self.unknown {
            _ if self.arriving > 0 || !self.events.is_empty() => Known::Busy,
            Some(unknown) => Known::Never(unknown.reason.clone()),
            None => Known::Done,
        }
    }
}

thread_local! {
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

/// This thread asks events, while this lives.
pub(super) struct Asking;

impl Asking {
    /// `None`: it does so already.
    pub(super) fn begin() -> Option<Self> {
        let begun = IS_ASKING.with(|is_asking| !is_asking.replace(true));
        begun.then(|| Self)
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        IS_ASKING.with(|is_asking| is_asking.set(false));
    }
}
