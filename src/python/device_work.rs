//! Device work in flight: which stream or event a caller means, and events that Python knows.
#![allow(clippy::doc_markdown)] // Python shows these comments

use std::ops::Range;
use std::sync::Arc;

use pyo3::exceptions::{PyException, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use super::array::PinnedArray;
use super::exchange;
use super::extent::{Span, span_of};
use crate::driver::{Event, Stream};
use crate::pool::{self, Found};

/// An object with `query()`: torch.cuda.Event, torch.xpu.Event, or the caller's own.
#[derive(Debug)]
struct PythonEvent(Py<PyAny>);

impl PythonEvent {
    fn of(event: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Event>> {
        let query = event.getattr_opt("query")?;
        if query.is_some_and(|query| query.is_callable()) {
            return Ok(Arc::new(Self(event.clone().unbind())));
        }
        let class = event.get_type().fully_qualified_name()?;
        Err(PyTypeError::new_err(format!("{class} is no event: it has no query() that tells whether it is done")))
    }
}

impl PythonEvent {
    fn ask(&self, py: Python<'_>) -> Result<bool, String> {
        match self.0.call_method0(py, "query").and_then(|done| done.is_truthy(py)) {
            Ok(done) => Ok(done),
            Err(error) if error.is_instance_of::<PyException>(py) => {
                Err(format!("the query() of {} failed: {error}", describe(self.0.bind(py))))
            }
            Err(_) => {
                interrupt_again();
                Ok(false)
            }
        }
    }
}

impl Event for PythonEvent {
    fn query(&self) -> Result<bool, String> {
        let ask = |py: Python<'_>| {
            let pending = PyErr::take(py); // a pool may go while an exception is on its way
            let answer = self.ask(py);
            if let Some(error) = pending {
                error.restore(py);
            }
            answer
        };
        Python::try_attach(ask).unwrap_or(Ok(false)) // the interpreter is gone: nobody will reuse anything
    }
}

/// Ctrl-C in the middle of somebody's `query()`: whoever waits for memory is to see it, not the event.
#[allow(unsafe_code)] // asks the interpreter for a signal
fn interrupt_again() {
    // SAFETY: may be called at any time.
    unsafe { pyo3::ffi::PyErr_SetInterrupt() };
}

fn describe(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "an event".to_owned(), |name| name.to_string())
}

/// The stream that a caller means.
fn stream_of(stream: &Bound<'_, PyAny>) -> PyResult<Stream> {
    if stream.is_exact_instance_of::<PyInt>() {
        return Ok(Stream::from(extract_handle(stream)?));
    }
    let Some(handle) = handle_of(stream)? else {
        let class = stream.get_type().fully_qualified_name()?;
        return Err(PyTypeError::new_err(format!(
            "{class} is no CUDA stream: pass a torch.cuda.Stream, an object with __cuda_stream__(), a handle, or None; \
             for streams of other devices, pass an event to defer(obj, event)"
        )));
    };
    Ok(Stream { handle: extract_handle(&handle)?, ordinal: ordinal_of(stream)? })
}

fn extract_handle(handle: &Bound<'_, PyAny>) -> PyResult<usize> {
    handle.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(handle.py()) {
            return PyValueError::new_err(format!("invalid stream: {handle} is no handle of a CUDA stream"));
        }
        error
    })
}

fn handle_of<'py>(stream: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if let Some(protocol) = stream.getattr_opt("__cuda_stream__")? {
        return protocol.call0()?.get_item(1).map(Some); // version and handle, as NVIDIA's packages and torch have it
    }
    let device = stream.getattr_opt("device")?;
    if device.is_none_or(|device| device.getattr("type").is_ok_and(|kind| kind.eq("cuda").unwrap_or(false))) {
        for attribute in ["cuda_stream", "native_handle", "ptr"] {
            if let Some(handle) = stream.getattr_opt(attribute)? {
                return Ok(Some(handle)); // older versions of torch, its plain Stream, and CuPy
            }
        }
    }
    let is_integer = stream.is_instance_of::<PyInt>() && !stream.is_instance_of::<PyBool>();
    Ok(is_integer.then(|| stream.clone()))
}

/// The device that a stream object says it is of: default streams have the same handle on all of them.
fn ordinal_of(stream: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let (object, attribute) = match stream.getattr_opt("device")? {
        Some(device) => (device, "index"),     // torch
        None => (stream.clone(), "device_id"), // CuPy
    };
    Ok(object.getattr_opt(attribute)?.and_then(|ordinal| ordinal.extract().ok()))
}

/// Keeps a block from reuse until the work of a stream is done. None: torch's current one.
pub(super) fn record(py: Python<'_>, found: &Found, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    if let Some(stream) = stream {
        let stream = stream_of(stream)?;
        return Ok(py.detach(|| found.record_stream(stream))?);
    }
    let Some((kind, ordinal)) = found.device() else { return Ok(()) };
    let torch = py.import("pinpool._devices")?.call_method0("torch_streams")?;
    if !torch.call_method1("is_used", (kind,))?.extract::<bool>()? {
        return Ok(()); // nothing of its work is under way
    }
    if kind != "cuda" {
        return defer_to(py, found, &torch.call_method1("current_event", (kind,))?);
    }
    let handle = match exchange::current_cuda_stream(py, ordinal)? {
        Some(handle) => handle,
        None => torch.call_method1("current_cuda_stream", (ordinal,))?.extract()?,
    };
    Ok(py.detach(|| found.record_stream(Stream { handle, ordinal: Some(ordinal) }))?)
}

/// Keeps a block from reuse until an event is done.
pub(super) fn defer_to(py: Python<'_>, found: &Found, event: &Bound<'_, PyAny>) -> PyResult<()> {
    let event = PythonEvent::of(event)?;
    Ok(py.detach(|| found.defer(event))?)
}

/// The bytes that an object stands for; `None` where it has none.
pub(super) fn range_of(obj: &Bound<'_, PyAny>) -> PyResult<Option<Range<usize>>> {
    if let Ok(array) = obj.cast::<PinnedArray>() {
        array.get().block()?; // what was released may be in use all the same, by a view
    }
    let Some(Span { address, len, .. }) = span_of(obj)? else {
        return Err(PyValueError::new_err("invalid memory: it is not in host memory; pass the tensor on the host"));
    };
    Ok((len > 0).then(|| address..address.saturating_add(len)))
}

/// Keep a block from reuse until the work is done that was queued on a CUDA stream before this call.
///
/// Call it behind every copy to or from pool memory that may still run when the tensor goes: registered memory is
/// copied without the host, and torch follows only blocks of its own. `obj`: anything in the block, a view or a slice
/// will do, of whatever pool. `stream`: a torch.cuda.Stream, an object with `__cuda_stream__()`, a handle (an integer),
/// or None for torch's current stream. Costs one event; nothing waits. For memory without a device it does nothing: its
/// copies are done when they return. (Kernels that read host memory by themselves, as on Grace, need `defer`.)
/// `PinnedPool.record_stream` also checks that the block is of that pool.
///
/// ValueError: `obj` is in no live block. TypeError: no stream. DriverError: the stream is none of the driver's.
/// PinpoolError: a graph is being captured from the stream. After the last two the block is not reused at all, unless a
/// later call succeeds; never after a capture, since a graph may be launched at any time.
///
/// >>> import pinpool
/// >>> pool = pinpool.PinnedPool("host")
/// >>> pinpool.record_stream(pool.empty(100), 0)
#[pyfunction]
#[pyo3(signature = (obj, stream=None))]
pub(crate) fn record_stream(py: Python<'_>, obj: &Bound<'_, PyAny>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
    let Some(range) = range_of(obj)? else { return Ok(()) };
    record(py, &pool::find(&range)?, stream)
}

/// Keep a block from reuse until an event is done.
///
/// `obj`: anything in the block, of whatever pool. `event`: anything with `query()` that tells whether it is done:
/// torch.cuda.Event, torch.xpu.Event, or your own. It is asked when memory is wanted, on the thread that wants it, and
/// never when a tensor goes; if it raises, the block is never reused, and `stats()` says why. It must not keep `obj`
/// or the pool alive. `PinnedPool.defer` also checks that the block is of that pool.
///
/// ValueError: `obj` is in no live block. TypeError: no event.
///
/// >>> import threading, pinpool
/// >>> class Copied(threading.Event):
/// ...     query = threading.Event.is_set
/// >>> pool, copied = pinpool.PinnedPool("host"), Copied()
/// >>> array = pool.empty(100)
/// >>> pinpool.defer(array, copied)
/// >>> array.release()
/// >>> pool.stats()["pending_bytes"]
/// 4096
/// >>> copied.set()
/// >>> del (_ := [pool.empty(100)])[:]
/// >>> pool.stats()["pending_bytes"]
/// 0
#[pyfunction]
pub(crate) fn defer(py: Python<'_>, obj: &Bound<'_, PyAny>, event: &Bound<'_, PyAny>) -> PyResult<()> {
    let Some(range) = range_of(obj)? else { return Ok(()) };
    defer_to(py, &pool::find(&range)?, event)
}

/// Tell whether all bytes of an object lie in one live block of a pool.
#[pyfunction]
pub(crate) fn is_pool_memory(obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    let span = span_of(obj)?.filter(|span| span.len > 0);
    Ok(span.is_some_and(|Span { address, len, .. }| pool::find(&(address..address.saturating_add(len))).is_ok()))
}
