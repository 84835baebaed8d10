//! The swap store, as the Python class `Swapper` uses it: ranges of bytes, labels, tickets.
#![allow(clippy::doc_markdown)] // Python shows these comments
#![allow(unsafe_code)] // hands memory over for the time of a transfer

use std::ops::Range;
use std::path::PathBuf;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::argument::{byte_count, timeout as parse_timeout};
use super::array::PinnedArray;
use super::detached;
use super::extent::{Span, span_of};
use crate::error::Error;
use crate::swap::{self, Engine, SwapOptions, Swapper, Ticket, Watch};

/// A swap store. See `pinpool.Swapper`, which is made of it.
#[pyclass(frozen, module = "pinpool._pinpool")]
#[derive(Debug)]
pub(crate) struct SwapStore {
    swapper: Swapper,
}

#[pymethods]
impl SwapStore {
    #[new]
    #[pyo3(signature = (path, *, block_bytes, queue_depth, engine, max_bytes, direct, fixed_buffers))]
    #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)] // all but the first by keyword; a path is made
    fn new(
        py: Python<'_>,
        path: PathBuf,
        block_bytes: Option<&Bound<'_, PyAny>>,
        queue_depth: Option<&Bound<'_, PyAny>>,
        engine: &str,
        max_bytes: Option<&Bound<'_, PyAny>>,
        direct: Option<bool>,
        fixed_buffers: bool,
    ) -> PyResult<Self> {
        let count = |value: Option<&Bound<'_, PyAny>>, name| value.map(|value| byte_count(value, name)).transpose();
        let options = SwapOptions {
            block_bytes: count(block_bytes, "block_bytes")?,
            queue_depth: count(queue_depth, "queue_depth")?,
            engine: Engine::from_name(engine)?,
            max_bytes: count(max_bytes, "max_bytes")?,
            direct,
            fixed_buffers,
            ..SwapOptions::default()
        };
        let swapper = py.detach(|| Swapper::open(&path, &options))?;
        Ok(Self { swapper })
    }

    /// Begin to store the bytes of an object, with a label.
    fn write(&self, py: Python<'_>, key: &str, label: &str, obj: &Bound<'_, PyAny>) -> PyResult<SwapOperation> {
        let range = range_of(obj)?;
        // SAFETY: the block is kept from reuse; that nobody writes to it meanwhile is what the caller was told.
        let ticket =
            detached(py, |_, _, _| Ok(()), |progress| unsafe { self.swapper.write_from(key, label, range, progress) })?;
        Ok(SwapOperation { ticket })
    }

    /// Begin to read an entry of this label into the bytes of an object.
    fn read(&self, py: Python<'_>, key: &str, label: &str, obj: &Bound<'_, PyAny>) -> PyResult<SwapOperation> {
        let range = range_of(obj)?;
        // SAFETY: the block is kept from reuse; that nobody uses it meanwhile is what the caller was told.
        let ticket = detached(
            py,
            |_, _, _| Ok(()),
            |progress| unsafe { self.swapper.read_into(key, Some(label), range, progress) },
        )?;
        Ok(SwapOperation { ticket })
    }

    /// Begin to delete an entry.
    fn delete(&self, py: Python<'_>, key: &str) -> PyResult<SwapOperation> {
        let ticket = py.detach(|| self.swapper.delete(key))?;
        Ok(SwapOperation { ticket })
    }

    /// Tell the label and the number of bytes of what `read` would read.
    fn describe(&self, py: Python<'_>, key: &str) -> PyResult<(String, usize)> {
        let (label, bytes) = py.detach(|| self.swapper.describe(key))?;
        Ok((label.into(), bytes))
    }

    /// List the keys of all entries, in no order.
    fn keys(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let keys = py.detach(|| self.swapper.keys())?;
        Ok(keys.iter().map(ToString::to_string).collect())
    }

    /// Make everything that is done survive a loss of power.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.swapper.flush())?;
        self.raise_unheard()
    }

    /// Give free room back to the file system, and return how many bytes that were.
    fn trim(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(py.detach(|| self.swapper.trim())?)
    }

    /// Wait for everything that was begun, and close the store.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, |_, _, _| Ok(()), |progress| self.swapper.close_within(progress))?;
        self.raise_unheard()
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.swapper.is_closed()
    }

    /// Count a copy that was made because memory could not be transferred as it is.
    fn count_bounce(&self, nbytes: usize) {
        self.swapper.count_bounce(nbytes);
    }

    /// Tell what was done, and what is stored.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.swapper.stats())?;
        let dict = PyDict::new(py);
        let numbers = [
            ("block_bytes", stats.block_bytes),
            ("queue_depth", stats.queue_depth),
            ("unfinished", stats.unfinished),
            ("entries", stats.entries),
            ("stored_bytes", stats.stored_bytes),
            ("file_bytes", stats.file_bytes),
            ("bytes_written", stats.bytes_written),
            ("bytes_read", stats.bytes_read),
            ("bounces", stats.bounces),
            ("bounced_bytes", stats.bounced_bytes),
            ("fixed_bytes", stats.fixed_bytes),
        ];
        numbers.iter().try_for_each(|(name, number)| dict.set_item(name, number))?;
        let rates = [
            ("write", stats.bytes_written, stats.write_time.as_secs_f64()),
            ("read", stats.bytes_read, stats.read_time.as_secs_f64()),
        ];
        for (verb, bytes, seconds) in rates {
            dict.set_item(format!("{verb}_seconds"), seconds)?;
            let rate = if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
            dict.set_item(format!("{verb}_gb_per_s"), rate)?;
        }
        dict.set_item("max_bytes", stats.max_bytes)?;
        dict.set_item("engine", stats.engine.name())?;
        dict.set_item("engine_reason", stats.engine_reason)?;
        dict.set_item("direct", stats.direct)?;
        dict.set_item("direct_reason", stats.direct_reason)?;
        dict.set_item("fixed_reason", stats.fixed_reason)?;
        Ok(dict)
    }
}

impl SwapStore {
    fn raise_unheard(&self) -> PyResult<()> {
        self.swapper.take_unheard().map_or(Ok(()), |failure| Err(PyErr::from(&*failure)))
    }
}

/// One write, read or deletion under way. See `pinpool.Ticket`, which is made of it.
#[pyclass(frozen, module = "pinpool._pinpool")]
#[derive(Debug)]
pub(crate) struct SwapOperation {
    ticket: Ticket,
}

#[pymethods]
impl SwapOperation {
    /// Wait for the end. False: the time is up.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = parse_timeout(timeout)?;
        let outcome = detached(py, |_, _, _| Ok(()), |progress| self.ticket.wait_within(timeout, progress))?;
        match outcome {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(error)) => Err(PyErr::from(&*error)),
        }
    }

    /// Tell whether it has ended, well or not.
    fn done(&self) -> bool {
        self.ticket.is_done()
    }

    /// Make a file descriptor that is readable from the end on.
    fn watch(&self) -> PyResult<SwapWatch> {
        Ok(SwapWatch { watch: self.ticket.watch()? })
    }
}

/// A file descriptor that is readable from the end of an operation on. It is closed with this object.
#[pyclass(frozen, module = "pinpool._pinpool")]
#[derive(Debug)]
pub(crate) struct SwapWatch {
    watch: Watch,
}

#[pymethods]
impl SwapWatch {
    /// Tell its number.
    fn fileno(&self) -> i32 {
        self.watch.fd()
    }
}

/// Tell why the bytes of an object cannot be transferred as they are; None: they can. `target`: to be read into.
#[pyfunction]
pub(crate) fn swap_misfit(py: Python<'_>, obj: &Bound<'_, PyAny>, target: bool) -> PyResult<Option<String>> {
    let range = match range_of(obj) {
        Ok(range) => range,
        Err(error) if error.is_instance_of::<PyTypeError>(py) => return Ok(Some(error.value(py).to_string())),
        Err(error) => return Err(error),
    };
    match py.detach(|| swap::check_fit(&range, target)) {
        Ok(()) => Ok(None),
        Err(Error::Invalid { reason, .. }) => Ok(Some(reason)),
        Err(error) => Err(error.into()),
    }
}

const NO_MEMORY: &str = "it has no dense memory of its own on the host; pass a contiguous tensor or array of a \
                         PinnedPool, or say copy=True";

fn range_of(obj: &Bound<'_, PyAny>) -> PyResult<Range<usize>> {
    if let Ok(array) = obj.cast::<PinnedArray>() {
        array.get().block()?; // or it was released, and has no bytes any more
    }
    match span_of(obj)? {
        Some(Span { address, len, dense: true }) => Ok(address..address + len),
        _ => Err(PyTypeError::new_err(NO_MEMORY)),
    }
}
