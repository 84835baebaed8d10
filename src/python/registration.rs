//! `Registration`: memory that its caller owns, pinned in place; and the question whether memory is pinned.
#![allow(clippy::doc_markdown)] // Python shows these comments
#![allow(unsafe_code)] // adopts memory that an object keeps alive

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use super::extent::{Extent, Owner, Span, span_of};
use super::{detached, devices};
use crate::driver::Registering;
use crate::driver::engine::Registrations;
use crate::fork::PerProcess;
use crate::os;
use crate::pinned::Adopted;
use crate::registry::shared::{is_pinned as range_is_pinned, is_registered as range_is_registered};

/// Memory that its caller owns, pinned in place until `close()`. It keeps the object alive.
///
/// Also a context manager.
#[pyclass(frozen, weakref, module = "pinpool")]
pub(crate) struct Registration {
    address: usize,
    nbytes: usize,
    unregistered: Option<String>,
    /// Used without the interpreter, and never while Python is called; nor in a forked child, where it may be locked
    /// for good by a thread that the child does not have.
    adopted: Mutex<Option<Adopted>>,
    /// What the drivers know of the memory since the pinning has ended.
    ended: OnceLock<Arc<Registrations>>,
    fork_generation: u64,
    /// Used with the interpreter only, so that the collector sees it or does not.
    owner: Mutex<Option<Owner>>,
}

impl Registration {
    /// Pins the bytes of an object, and registers them as the pool does.
    pub(super) fn new(py: Python<'_>, obj: &Bound<'_, PyAny>, registering: &Registering<'_>) -> PyResult<Self> {
        let Extent { span: Span { address, len: nbytes, .. }, owner } = Extent::of(obj)?;
        drop_forgotten_owners();
        let mut stuck = false;
        let adopted = detached(
            py,
            |_, _, _| Ok(()),
            |progress| {
                // SAFETY: the owner keeps the memory mapped, and lives as long as what is adopted here. For a bare
                // pair of address and length, that is the caller's promise.
                unsafe { Adopted::adopt(address, nbytes, registering, progress) }.map_err(|refused| {
                    stuck = refused.stuck;
                    refused.error
                })
            },
        );
        match adopted {
            Ok(adopted) => {
                let unregistered = adopted.refusal().map(ToString::to_string);
                let (adopted, owner) = (Mutex::new(Some(adopted)), Mutex::new(Some(owner)));
                let (ended, fork_generation) = (OnceLock::new(), os::fork_generation());
                Ok(Self { address, nbytes, unregistered, adopted, ended, fork_generation, owner })
            }
            Err(error) => {
                if stuck {
                    std::mem::forget(owner); // a driver may still map it
                }
                Err(error)
            }
        }
    }

    /// Whether it is the parent's, and this process a forked child.
    fn is_inherited(&self) -> bool {
        self.fork_generation != os::fork_generation()
    }

    /// Ends the pinning, without the interpreter. A second thread waits for the first.
    fn end(&self) -> crate::Result<&Arc<Registrations>> {
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = adopted.as_mut() {
            held.release()?;
        }
        Ok(self.ended.get_or_init(|| adopted.take().map(Adopted::into_registrations).unwrap_or_default()))
    }

    fn take_owner(&self) -> Option<Owner> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Lets go of the object, or leaves it to whoever comes later, while a driver still knows its memory.
    fn let_go(&self, ended: &Arc<Registrations>) {
        let Some(owner) = self.take_owner() else { return };
        if ended.are_forgotten() {
            drop(owner);
        } else {
            lingering_owners().push((Arc::clone(ended), owner));
        }
    }
}

type Lingering = Vec<(Arc<Registrations>, Owner)>;

/// Objects whose memory a driver still knows after its registration ended.
fn lingering_owners() -> MutexGuard<'static, Lingering> {
    static LINGERING: PerProcess<Mutex<Lingering>> = PerProcess::new();
    LINGERING.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops those that the drivers have forgotten since.
pub(super) fn drop_forgotten_owners() {
    let lingering = std::mem::take(&mut *lingering_owners());
    let (forgotten, known): (Vec<_>, Vec<_>) = lingering.into_iter().partition(|(known, _)| known.are_forgotten());
    lingering_owners().extend(known);
    drop(forgotten); // after the lock
}

#[pymethods]
impl Registration {
    /// Unpin the memory now, and let go of the object. A second call does nothing.
    ///
    /// OSError or DriverError where that is refused: the memory is still pinned then, and `close()` may be called
    /// again. Some Level Zero drivers keep such memory for some seconds, and hand it to others: `close()` waits for its
    /// end, up to 20 seconds. PinpoolError after that, or what a signal handler raises: the memory is not to be used
    /// then, its object is kept, and `close()` may be called again. In a forked child it lets go of the object only.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if !self.is_inherited() {
            detached(py, |_, _, _| Ok(()), |progress| self.end()?.expect_forgotten(progress))?;
        }
        drop(self.take_owner());
        drop_forgotten_owners();
        Ok(())
    }

    /// Why the memory is not registered with the pool's devices, where register="try" let that pass.
    #[getter]
    fn unregistered(&self) -> Option<&str> {
        self.unregistered.as_deref()
    }

    /// Whether the pinning has ended. In a forked child it always has.
    #[getter]
    fn closed(&self) -> bool {
        self.is_inherited() || self.ended.get().is_some()
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
        let Ok(owner) = self.owner.try_lock() else { return Ok(()) };
        match owner.as_ref() {
            Some(Owner::Object(object)) => visit.call(object),
            Some(Owner::Buffer(view)) => view.visit(&visit),
            Some(Owner::Block(_)) | None => Ok(()),
        }
    }

    fn __clear__(&self) {
        self.finish();
    }
}

impl Registration {
    /// As `close`, where nobody is there to be told of an error: the object then stays, as its pages do.
    fn finish(&self) {
        if self.is_inherited() {
            return drop(self.take_owner());
        }
        match self.end() {
            Ok(ended) => self.let_go(ended),
            Err(_) => std::mem::forget(self.take_owner()),
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.is_inherited() {
            return drop(self.take_owner());
        }
        // Without the interpreter where there is one: unlocking a large range takes long.
        match Python::try_attach(|py| py.detach(|| self.end())) {
            Some(Ok(ended)) => self.let_go(ended),
            Some(Err(_)) | None => std::mem::forget(self.take_owner()),
        }
    }
}

/// Pin memory that its caller owns, in place. See `PinnedPool.register`.
///
/// >>> import pinpool
/// >>> registration = pinpool.register(bytearray(5000))
/// >>> registration.nbytes
/// 5000
/// >>> registration.close()
#[pyfunction]
pub(crate) fn register(py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<Registration> {
    Registration::new(py, obj, &Registering::NONE)
}

/// Tell whether all bytes of a tensor, an array, a buffer or an (address, nbytes) pair lie in one pinned range.
///
/// Asks neither a driver nor torch. A strided view is asked about from its first to its last byte. An object without
/// bytes is not pinned, nor is a tensor that has no host memory.
///
/// >>> import pinpool
/// >>> array = pinpool.PinnedPool().empty(100)
/// >>> pinpool.is_pinned((array.ptr + 99, 1)), pinpool.is_pinned((array.ptr, 1 << 40))
/// (True, False)
#[pyfunction]
pub(crate) fn is_pinned(obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(span_of(obj)?.is_some_and(|span| range_is_pinned(span.address, span.len)))
}

/// Tell whether all bytes of an object are registered with a device, or with one whose registrations serve it.
///
/// `device`: "cuda:0", "xpu:1", or an object with `.type` and `.index`. Asks no driver.
///
/// >>> import pinpool
/// >>> pinpool.is_registered(pinpool.PinnedPool("host").empty(100), "cuda:0")
/// False
#[pyfunction]
pub(crate) fn is_registered(obj: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (kind, ordinal) = devices::name(device)?;
    Ok(span_of(obj)?.is_some_and(|span| range_is_registered(span.address, span.len, &kind, ordinal)))
}
