//! `Registration`: memory that its caller owns, pinned in place; and the question whether memory is pinned.
#![allow(unsafe_code)] // adopts memory that an object keeps alive

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use super::extent::{Extent, Owner, Span, span_of};
use crate::pinned::Adopted;
use crate::registry::shared::is_pinned as range_is_pinned;

/// Memory that its caller owns, pinned in place until `close()`. It keeps the object alive. Also a context manager.
#[pyclass(frozen, weakref, module = "pinpool")]
pub(crate) struct Registration {
    address: usize,
    nbytes: usize,
    held: Mutex<Option<Held>>,
}

/// The lock on the pages, and what keeps them where they are: in that order, because that is the order of the end.
struct Held {
    adopted: Adopted,
    owner: Option<Owner>,
}

impl Registration {
    pub(super) fn new(py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Extent { span, owner } = Extent::of(obj)?;
        let Span { address, len: nbytes, .. } = span;
        // SAFETY: the owner keeps the memory mapped, and lives as long as what is adopted here. For a bare pair of
        // address and length, that is the caller's promise.
        let adopted = py.detach(|| unsafe { Adopted::adopt(address, nbytes) })?;
        Ok(Self { address, nbytes, held: Mutex::new(Some(Held { adopted, owner: Some(owner) })) })
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Registration {
    /// Unpins the memory now, and lets go of the object. A second call does nothing.
    ///
    /// OSError where the kernel refuses: the memory is still pinned then, and `close()` may be called again.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let Some(mut held) = self.held().take() else { return Ok(()) };
        if let Err(error) = py.detach(|| held.adopted.release()) {
            *self.held() = Some(held);
            return Err(error.into());
        }
        Ok(())
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
        drop(self.held().take());
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.adopted.release().is_err() {
            // The pages stay locked, so their owner stays, too.
            std::mem::forget(self.owner.take());
        }
    }
}

/// Pins memory that its caller owns, in place. See `PinnedPool.register`.
#[pyfunction]
pub(crate) fn register(py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<Registration> {
    Registration::new(py, obj)
}

/// Whether all bytes of a tensor, an array, a buffer or an (address, nbytes) pair lie in one pinned range.
///
/// Asks neither a driver nor torch. A strided view is asked about from its first to its last byte. An object without
/// bytes is not pinned, nor is a tensor that has no host memory.
#[pyfunction]
pub(crate) fn is_pinned(obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(span_of(obj)?.is_some_and(|span| range_is_pinned(span.address, span.len)))
}
