//! `Registration`: memory that its caller owns, pinned in place; and the question whether memory is pinned.
#![allow(unsafe_code)] // adopts memory that an object keeps alive

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use super::extent::{Extent, Owner, Span, span_of};
use super::{detached, devices};
use crate::driver::Registering;
use crate::pinned::Adopted;
use crate::registry::shared::{is_pinned as range_is_pinned, is_registered as range_is_registered};

/// Memory that its caller owns, pinned in place until `close()`. It keeps the object alive. Also a context manager.
#[pyclass(frozen, weakref, module = "pinpool")]
pub(crate) struct Registration {
    address: usize,
    nbytes: usize,
    unregistered: Option<String>,
    held: Mutex<Option<Held>>,
    /// Held while the memory is being unpinned, and never together with a call into Python.
    closing: Mutex<()>,
}

/// The lock on the pages, and what keeps them where they are: in that order, because that is the order of the end.
struct Held {
    adopted: Adopted,
    owner: Option<Owner>,
}

impl Registration {
    /// Pins the bytes of an object, and registers them as the pool does.
    pub(super) fn new(py: Python<'_>, obj: &Bound<'_, PyAny>, registering: &Registering<'_>) -> PyResult<Self> {
        let Extent { span: Span { address, len: nbytes, .. }, owner } = Extent::of(obj)?;
        let mut owner = Some(owner);
        let mut stuck = false;
        let adopted = detached(
            py,
            |_, _, _| Ok(()),
            |progress| {
                // SAFETY: the owner keeps the memory mapped, and lives as long as what is adopted here. For a bare pair of
                // address and length, that is the caller's promise.
                unsafe { Adopted::adopt(address, nbytes, registering, progress) }.map_err(|refused| {
                    stuck = refused.stuck;
                    refused.error
                })
            },
        );
        if stuck {
            std::mem::forget(owner.take()); // a driver may still map it
        }
        let held = Held { adopted: adopted?, owner };
        let unregistered = held.adopted.refusal().map(ToString::to_string);
        let closing = Mutex::new(());
        Ok(Self { address, nbytes, unregistered, held: Mutex::new(Some(held)), closing })
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends what is held, without the interpreter. A second thread waits for the first.
    fn end(&self) -> crate::Result<Option<Held>> {
        let _turn = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mut held) = self.held().take() else { return Ok(None) };
        match held.adopted.release() {
            Ok(()) => Ok(Some(held)),
            Err(error) => {
                *self.held() = Some(held);
                Err(error)
            }
        }
    }
}

#[pymethods]
impl Registration {
    /// Unpins the memory now, and lets go of the object. A second call does nothing.
    ///
    /// OSError or DriverError where that is refused: the memory is still pinned then, and `close()` may be called
    /// again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let ended = py.detach(|| self.end())?;
        drop(ended); // attached again: this lets go of the object
        Ok(())
    }

    /// Why the memory is not registered with the pool's devices, where register="try" let that pass.
    #[getter]
    fn unregistered(&self) -> Option<&str> {
        self.unregistered.as_deref()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.held().is_none()
    }

    /// Address of the first byte.
    #[getter]
    fn ptr(&self) -> usize {
        self.address
    }

    /// Bytes of the object.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (_kind=None, _value=None, _traceback=None))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: Option<&Bound<'_, PyAny>>,
        _value: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { ", closed" } else { "" };
        format!("Registration(ptr={:#x}, nbytes={}{state})", self.address, self.nbytes)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(held) = self.held.try_lock() else { return Ok(()) };
        match held.as_ref().and_then(|held| held.owner.as_ref()) {
            Some(Owner::Object(object)) => visit.call(object),
            Some(Owner::Buffer(view)) => view.visit(&visit),
            None => Ok(()),
        }
    }

    fn __clear__(&self) {
        let held = self.held().take();
        drop(held); // after the lock: what the owner's end runs may ask this object something
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Without the interpreter where there is one: unlocking a large range takes long.
        let adopted = &mut self.adopted;
        let released = Python::try_attach(|py| py.detach(|| adopted.release())).unwrap_or(Ok(()));
        if released.is_err() || !self.adopted.is_forgotten() {
            std::mem::forget(self.owner.take()); // the pages stay locked or mapped, so their owner stays, too
        }
    }
}

/// Pins memory that its caller owns, in place. See `PinnedPool.register`.
#[pyfunction]
pub(crate) fn register(py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<Registration> {
    Registration::new(py, obj, &Registering::NONE)
}

/// Whether all bytes of a tensor, an array, a buffer or an (address, nbytes) pair lie in one pinned range.
///
/// Asks neither a driver nor torch. A strided view is asked about from its first to its last byte. An object without
/// bytes is not pinned, nor is a tensor that has no host memory.
#[pyfunction]
pub(crate) fn is_pinned(obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(span_of(obj)?.is_some_and(|span| range_is_pinned(span.address, span.len)))
}

/// Whether all bytes of an object are registered with a device ("cuda:0", "xpu:1", or an object with `.type` and
/// `.index`), or with one whose registrations serve it. Asks no driver.
#[pyfunction]
pub(crate) fn is_registered(obj: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (kind, ordinal) = devices::name(device)?;
    Ok(span_of(obj)?.is_some_and(|span| range_is_registered(span.address, span.len, &kind, ordinal)))
}
