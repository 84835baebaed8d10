//! Events: when the work that a stream was given is done.
//!
//! An event belongs to the context of its stream, which may be of another device than the one that is open here. Creating
//! events takes the driver's locks, so those that have served are kept for the next stream of their context.

use std::ffi::c_int;
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::sys::{self, Context, Events};
use super::{CudaDevice, Driver};
use crate::driver::{Event, Place, Stream};
use crate::error::{Error, Result};

/// Events that nobody waits for.
#[derive(Default)]
pub(super) struct IdleEvents(Mutex<Vec<Handle>>);

/// An event of the driver's, and the identity of the context that it works in.
#[derive(Clone, Copy)]
struct Handle {
    event: sys::Event,
    context: u64,
}

/// An event that was recorded.
struct CudaEvent {
    device: Arc<CudaDevice>,
    handle: Handle,
    place: Option<Place>,
    /// It answered with an error: nothing is known of it.
    failed: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for CudaEvent {}

/// Records an event on a stream. See [`Device::record`](crate::driver::Device::record).
pub(super) fn record(device: Arc<CudaDevice>, stream: Stream) -> Result<Arc<dyn Event>> {
    device.check_process("recording a stream")?;
    let number = next_number(); // taken now: what has a lower one was queued before this is recorded
    let (handle, stream) = device.record_on(stream)?;
    let place = stream.map(|stream| Place { queue: (handle.context, stream), number });
    Ok(Arc::new(CudaEvent { device, handle, place, failed: AtomicBool::new(false) }))
}

fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    NUMBERS.fetch_add(1, Ordering::Relaxed)
}

impl CudaDevice {
    /// Records an event, and tells the stream's identity where the driver knows it.
    fn record_on(&self, stream: Stream) -> Result<(Handle, Option<u64>)> {
        let events = self.events()?;
        let _relaxed = self.driver.relax_capture();
        let context = self.context_of(events, stream)?;
        let _entered = self.enter(context, 0)?;
        self.check_not_capturing(events, stream.handle)?;
        let id = self.context_id(context);
        let reused = self.take_idle_event(id).filter(|idle| self.record_again(events, *idle, stream.handle));
        let handle = match reused {
            Some(handle) => handle,
            None => self.record_new(events, id, stream.handle)?,
        };
        Ok((handle, self.stream_id(stream.handle)))
    }

    /// Records an event that has served before. One that cannot be recorded is destroyed.
    fn record_again(&self, events: &Events, idle: Handle, stream: sys::Stream) -> bool {
        self.record_event(events, idle, stream).inspect_err(|_| self.destroy_event(idle)).is_ok()
    }

    fn record_new(&self, events: &Events, context: u64, stream: sys::Stream) -> Result<Handle> {
        let mut event = null_mut();
        // SAFETY: the driver fills the pointer that we own.
        let created = unsafe { (events.create)(&raw mut event, sys::EVENT_DISABLE_TIMING) };
        self.driver.check("cuEventCreate", 0, Some(self.id), created)?;
        let made = Handle { event, context };
        self.record_event(events, made, stream).inspect_err(|_| self.destroy_event(made))?;
        Ok(made)
    }

    /// An identity of a stream that no later one has, although it may have the same handle. The default stream of each
    /// thread has none: one name stands for many.
    fn stream_id(&self, stream: sys::Stream) -> Option<u64> {
        let mut id = 0;
        // SAFETY: the driver fills the number that we own.
        let code = unsafe { (self.driver.functions.stream_id?)(stream, &raw mut id) };
        (code == sys::SUCCESS && stream != sys::STREAM_PER_THREAD).then_some(id)
    }

    /// The same of a context; of an older driver its address.
    fn context_id(&self, context: Context) -> u64 {
        let mut id = 0;
        // SAFETY: the driver fills the number that we own.
        let code = self.driver.functions.context_id.map(|context_id| unsafe { context_id(context, &raw mut id) });
        if code == Some(sys::SUCCESS) { id } else { context as u64 }
    }

    fn events(&self) -> Result<&Events> {
        let missing = |why: &String| Error::unsupported(format!("recording a stream of {}", self.id), why.clone());
        self.driver.functions.events.as_ref().map_err(missing)
    }

    /// The context of a stream. Of a default stream it is the primary one of its device, else the one that is current, or
    /// else the open device's.
    fn context_of(&self, events: &Events, stream: Stream) -> Result<Context> {
        let mut context = null_mut();
        if stream.handle <= sys::STREAM_PER_THREAD {
            match stream.ordinal {
                Some(ordinal) if ordinal == self.id.ordinal => return Ok(self.context),
                Some(ordinal) => return self.primary_context(ordinal),
                // SAFETY: the driver fills the pointer that we own.
                None => unsafe { (self.driver.functions.memory.current_context)(&raw mut context) },
            };
            return Ok(if context.is_null() { self.context } else { context });
        }
        // SAFETY: the driver fills the pointer that we own, and says when there is no such stream.
        let code = unsafe { (events.stream_context)(stream.handle, &raw mut context) };
        self.driver.check("cuStreamGetCtx", 0, Some(self.id), code).map(|()| context)
    }

    /// The primary context of another device, where somebody has made it: no context is made here for that.
    fn primary_context(&self, ordinal: u32) -> Result<Context> {
        let no_context = || Error::invalid("stream", format!("cuda:{ordinal} is not in use, so it has no streams"));
        let (device, id) = self.driver.identify(ordinal as c_int).map_err(|_| no_context())?;
        let (mut flags, mut is_active, mut context) = (0, 0, null_mut());
        let memory = &self.driver.functions.memory;
        // SAFETY: the driver fills the numbers that we own.
        let state = unsafe { (memory.context_state)(device, &raw mut flags, &raw mut is_active) };
        self.driver.check("cuDevicePrimaryCtxGetState", 0, Some(id), state)?;
        if is_active == 0 {
            return Err(no_context());
        }
        // SAFETY: the driver fills the pointer that we own.
        let retained = unsafe { (memory.retain_context)(&raw mut context, device) };
        self.driver.check("cuDevicePrimaryCtxRetain", 0, Some(id), retained)?;
        // SAFETY: retained just now, and by whoever made it.
        unsafe { (memory.release_context)(device) };
        Ok(context)
    }

    fn check_not_capturing(&self, events: &Events, stream: sys::Stream) -> Result<()> {
        let mut status = sys::CAPTURE_NONE;
        // SAFETY: the driver fills the number that we own.
        match unsafe { (events.is_capturing)(stream, &raw mut status) } {
            sys::CAPTURE_IMPLICIT => return Err(Error::Captured { stream }), // another stream of this context is
            code => self.driver.check("cuStreamIsCapturing", 0, Some(self.id), code)?,
        }
        if status == sys::CAPTURE_NONE { Ok(()) } else { Err(Error::Captured { stream }) }
    }

    fn record_event(&self, events: &Events, handle: Handle, stream: sys::Stream) -> Result<()> {
        // SAFETY: an event of the context that is current; what the stream is worth, the driver says.
        let code = unsafe { (events.record)(handle.event, stream) };
        self.driver.check("cuEventRecord", 0, Some(self.id), code)
    }

    fn take_idle_event(&self, context: u64) -> Option<Handle> {
        let mut idle = self.idle_events.lock();
        let found = idle.iter().rposition(|handle| handle.context == context)?;
        Some(idle.swap_remove(found))
    }

    fn destroy_event(&self, handle: Handle) {
        if let Ok(events) = &self.driver.functions.events {
            // SAFETY: nobody uses the event any more. Whatever the answer, it is forgotten here.
            unsafe { (events.destroy)(handle.event) };
        }
    }

    pub(super) fn destroy_idle_events(&self) {
        let idle = std::mem::take(&mut *self.idle_events.lock());
        for handle in idle {
            self.destroy_event(handle);
        }
    }
}

impl IdleEvents {
    fn lock(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Event for CudaEvent {
    fn query(&self) -> std::result::Result<bool, String> {
        let driver: &Driver = &self.device.driver;
        let (true, Ok(events)) = (self.device.is_ours(), &driver.functions.events) else {
            return Ok(false); // a forked child cannot know
        };
        let _relaxed = driver.relax_capture();
        // SAFETY: the event lives as long as this value.
        match unsafe { (events.query)(self.handle.event) } {
            sys::SUCCESS | sys::DEINITIALIZED => Ok(true), // a driver that is gone moves no more bytes
            sys::NOT_READY => Ok(false),
            code => {
                self.failed.store(true, Ordering::Relaxed);
                let checked = driver.check("cuEventQuery", 0, Some(self.device.id), code);
                Err(checked.map_or_else(|error| error.to_string(), |()| String::new()))
            }
        }
    }

    fn place(&self) -> Option<Place> {
        self.place
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if !self.device.is_ours() {
            return; // it is the parent's
        }
        if self.failed.load(Ordering::Relaxed) {
            self.device.destroy_event(self.handle);
        } else {
            self.device.idle_events.lock().push(self.handle);
        }
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEvent").field("device", &self.device.id).field("place", &self.place).finish_non_exhaustive()
    }
}
