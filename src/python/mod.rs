//! The Python face: converts arguments, lets go of the interpreter, calls the library once, maps the error.

mod argument;
mod array;
mod device_work;
mod devices;
mod doctor;
mod exchange;
mod extent;
mod pool;
mod registration;
mod swap;

use std::ops::ControlFlow;

use pyo3::exceptions::{PyKeyError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::error::Error;

pyo3::create_exception!(pinpool, PinpoolError, PyRuntimeError, "Base of pinpool's own errors.");
pyo3::create_exception!(
    pinpool,
    MemlockLimitError,
    PinpoolError,
    "The kernel refuses to lock more memory: attributes wanted, locked, soft_limit, hard_limit, in bytes."
);
pyo3::create_exception!(
    pinpool,
    DriverUnavailableError,
    PinpoolError,
    "A driver, or the device that was asked for, cannot be used: attribute absent says whether there is none at all."
);
pyo3::create_exception!(
    pinpool,
    DriverError,
    PinpoolError,
    "A driver refused a call: attributes driver, call, code, code_name, device, bytes."
);
pyo3::create_exception!(
    pinpool,
    OutOfPinnedMemoryError,
    PinpoolError,
    "The pool's budget is used up: attributes wanted, limit, allocated, cached, pending, lost, in bytes; \
     oldest, in seconds."
);
pyo3::create_exception!(
    pinpool,
    WrittenAfterReleaseError,
    PinpoolError,
    "Debug mode: a block was written to after its release: attributes address, nbytes, offset, generation, origin."
);

pyo3::create_exception!(
    pinpool,
    StoreDamagedError,
    PinpoolError,
    "A file of a swap store does not hold what was written to it: attributes file, offset, nbytes."
);

// What the audit behind this looked at is in ARCHITECTURE.md, under Threads.
#[pymodule(gil_used = false)]
mod _pinpool {
    #[pymodule_export]
    use super::StoreDamagedError;
    #[pymodule_export]
    use super::WrittenAfterReleaseError;
    #[pymodule_export]
    use super::argument::is_element_type;
    #[pymodule_export]
    use super::array::PinnedArray;
    #[pymodule_export]
    use super::device_work::{defer, is_pool_memory, record_stream};
    #[pymodule_export]
    use super::devices::{current_device, find_devices, ordinal_of};
    #[pymodule_export]
    use super::doctor::doctor;
    #[pymodule_export]
    use super::exchange::{torch_empty, use_exchange_api};
    #[pymodule_export]
    use super::pool::{PinnedPool, unpin};
    #[pymodule_export]
    use super::registration::{Registration, is_pinned, is_registered, register};
    #[pymodule_export]
    use super::swap::{SwapOperation, SwapStore, SwapWatch, swap_misfit};
    #[pymodule_export]
    use super::{DriverError, DriverUnavailableError, MemlockLimitError, OutOfPinnedMemoryError, PinpoolError};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::make_statics(); // before any thread could fork in the middle of it
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        (&error).into()
    }
}

impl From<&Error> for PyErr {
    fn from(error: &Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Os { source, .. } => match source.raw_os_error() {
                Some(errno) => PyOSError::new_err((errno, text)),
                None => PyOSError::new_err(text),
            },
            Error::Storage { code, .. } => PyOSError::new_err((*code, text)),
            Error::Damaged { file, offset, bytes, .. } => with_attributes(StoreDamagedError::new_err(text), |value| {
                value.setattr("file", file)?;
                value.setattr("offset", offset)?;
                value.setattr("nbytes", bytes)
            }),
            Error::UnknownKey { .. } => PyKeyError::new_err(text),
            &Error::MemlockLimit { wanted, locked, soft, hard } => with_numbers(
                MemlockLimitError::new_err(text),
                &[("wanted", wanted), ("locked", locked), ("soft_limit", soft), ("hard_limit", hard)],
            ),
            &Error::OutOfPinnedMemory { wanted, limit, allocated, cached, pending, oldest, lost, .. } => {
                let error = with_numbers(
                    OutOfPinnedMemoryError::new_err(text),
                    &[
                        ("wanted", wanted),
                        ("limit", limit),
                        ("allocated", allocated),
                        ("cached", cached),
                        ("pending", pending),
                        ("lost", lost),
                    ],
                );
                with_attributes(error, |value| value.setattr("oldest", oldest.map(|age| age.as_secs_f64())))
            }
            Error::WrittenAfterRelease(found) => with_attributes(WrittenAfterReleaseError::new_err(text), |value| {
                value.setattr("address", found.address)?;
                value.setattr("nbytes", found.len)?;
                value.setattr("offset", found.offset)?;
                value.setattr("generation", found.generation)?;
                value.setattr("origin", found.origin.as_deref())
            }),
            &Error::DriverUnavailable { absent, .. } => {
                with_attributes(DriverUnavailableError::new_err(text), |value| value.setattr("absent", absent))
            }
            Error::Driver { driver, call, code, code_name, device, bytes, .. } => {
                with_attributes(DriverError::new_err(text), |value| {
                    value.setattr("driver", driver)?;
                    value.setattr("call", call)?;
                    value.setattr("code", code)?;
                    value.setattr("code_name", &**code_name)?;
                    value.setattr("device", device.as_deref())?;
                    value.setattr("bytes", bytes)
                })
            }
            Error::Overlap { .. } | Error::Invalid { .. } | Error::Closed | Error::SwapperClosed => {
                PyValueError::new_err(text)
            }
            Error::Unsupported { .. }
            | Error::Lingering { .. }
            | Error::Captured { .. }
            | Error::Forked
            | Error::SwapperForked
            | Error::Interrupted => PinpoolError::new_err(text),
        }
    }
}

/// Gives an exception its numbers as attributes.
fn with_numbers(error: PyErr, numbers: &[(&str, usize)]) -> PyErr {
    with_attributes(error, |value| numbers.iter().try_for_each(|&(name, number)| value.setattr(name, number)))
}

/// Lets `set` give an exception its attributes.
fn with_attributes(error: PyErr, set: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>) -> PyErr {
    Python::attach(|py| set(error.value(py)).err().unwrap_or(error))
}

/// Runs a long call without the interpreter. The call may ask, between its steps, whether a signal handler or the
/// caller's own `report` wants it to stop; their exception is then the result.
fn detached<T: Send>(
    py: Python<'_>,
    report: impl Fn(Python<'_>, usize, usize) -> PyResult<()> + Sync,
    call: impl FnOnce(&mut crate::region::Progress<'_>) -> crate::Result<T> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let result = py.detach(|| {
        call(&mut |done, total| {
            let asked = Python::try_attach(|py| py.check_signals().and_then(|()| report(py, done, total)));
            match asked.unwrap_or_else(hang) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    raised = Some(error);
                    ControlFlow::Break(())
                }
            }
        })
    });
    match raised {
        Some(error) => Err(error),
        None => Ok(result?),
    }
}

/// The interpreter is going down, and this daemon thread may not go back to it: it waits for the end of the process.
fn hang<T>() -> T {
    loop {
        std::thread::park();
    }
}
