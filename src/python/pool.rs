//! `PinnedPool`.
#![allow(clippy::doc_markdown, clippy::doc_link_with_quotes)] // Python shows these comments

use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use super::argument::{Layout, byte_count, integer, timeout as parse_timeout};
use super::array::PinnedArray;
use super::device_work::{defer_to, range_of, record};
use super::extent::{Span, span_of};
use super::registration::{Registration, drop_forgotten_owners, is_pinned, is_registered};
use super::{PinpoolError, detached, devices};
use crate::block::Block;
use crate::driver::Device;
use crate::pool::{LiveBlock, Pool, PoolOptions};
use crate::region::{Pages, RegionOptions};

/// A pool of pinned host memory: exact sizes, instant reuse, a hard budget.
///
/// `devices`: what the memory is registered with. "auto": the one device that this process works on (torch's current
/// accelerator; else the device of this thread's CUDA context; else the one of LOCAL_RANK, or the first), or none where
/// there is none. None or "host": it is only locked. Or "cuda:0", "xpu:1", an object with `.type` and `.index`, or a
/// list. CUDA registrations serve every CUDA device; Level Zero maps memory for one device only.
/// `register`: "require" (a device that refuses is an error), "try" (go on with locked memory, and say why in
/// `stats()["unregistered"]`) or "off".
/// `max_bytes`: the most the pool ever holds; unset, 90 % of the memory that the machine and the control group have
/// left, or what RLIMIT_MEMLOCK leaves, whichever is less. `pages`: "auto" (transparent huge pages where they come
/// cheap), "4k", "thp", "2m" or "1g"; a kind that cannot be had is an error. `numa`: the node that all memory lies on.
/// `threads`: how many prefault, by default one a core. `debug`: fill released memory with NaN, and raise
/// WrittenAfterReleaseError when it has been written to before it is used again; slow.
///
/// Threads may share a pool. In a forked child, a pool of the parent refuses every request. Also a context manager.
///
/// >>> from pinpool import PinnedPool
/// >>> with PinnedPool(max_bytes=1 << 20) as pool:
/// ...     array = pool.zeros((2, 3), "float32")
/// ...     bytes(array) == bytes(24), pool.is_pinned(array)
/// (True, True)
#[pyclass(frozen, weakref, module = "pinpool")]
#[derive(Debug)]
pub(crate) struct PinnedPool {
    pool: Pool,
    /// Why there is no device, where register="try" let that pass.
    unregistered: Option<String>,
}

impl PinnedPool {
    /// Takes a block: at once from the cache, else without the interpreter.
    pub(super) fn take(&self, py: Python<'_>, nbytes: usize, timeout: Option<Duration>) -> PyResult<Block> {
        let block = match self.pool.take_cached(nbytes)? {
            Some(block) => block,
            None => detached(py, |_, _, _| Ok(()), |progress| self.pool.take_within(nbytes, timeout, progress))?,
        };
        if self.pool.options().debug {
            let origin: String = py.import("pinpool._origin")?.call_method0("origin")?.extract()?;
            self.pool.note_origin(&block, &origin);
        }
        Ok(block)
    }

    fn array(&self, py: Python<'_>, layout: Layout, timeout: Option<f64>) -> PyResult<PinnedArray> {
        let block = self.take(py, layout.nbytes, parse_timeout(timeout)?)?;
        Ok(PinnedArray::new(block, layout))
    }
}

#[pymethods]
impl PinnedPool {
    #[new]
    #[pyo3(
        signature = (
            devices=Devices::Auto, *, max_bytes=None, register="require", pages="auto", numa=None, threads=None, debug=false
        ),
        text_signature = "(devices='auto', *, max_bytes=None, register='require', pages='auto', numa=None, threads=None, \
                          debug=False)"
    )]
    #[allow(clippy::too_many_arguments)] // all but the first by keyword
    fn new(
        py: Python<'_>,
        devices: Devices<'_>,
        max_bytes: Option<&Bound<'_, PyAny>>,
        register: &str,
        pages: &str,
        numa: Option<&Bound<'_, PyAny>>,
        threads: Option<&Bound<'_, PyAny>>,
        debug: bool,
    ) -> PyResult<Self> {
        let max_bytes = max_bytes.map(|bytes| byte_count(bytes, "max_bytes")).transpose()?;
        let region = RegionOptions {
            pages: Pages::from_name(pages)?,
            numa: numa.map(|node| at_least(node, 0, "numa")).transpose()?,
            threads: threads.map(|count| at_least(count, 1, "threads")).transpose()?.map(|count| count as usize),
            lock: true,
        };
        let Opened { devices, unregistered } = devices.open(py, register)?;
        let options = PoolOptions { max_bytes, region, devices, register_if_possible: register == "try", debug };
        let pool = py.detach(|| Pool::new(options))?;
        Ok(Self { pool, unregistered })
    }

    /// Take an array that holds whatever its memory held before.
    ///
    /// `shape`: lengths in elements. `dtype`: a name ("bfloat16"), a numpy or a torch dtype; by default uint8.
    /// `timeout`: seconds to wait for memory to come back when the budget is used up; 0: fail at once, None: wait.
    ///
    /// ValueError: bad shape or dtype, or the pool is closed. OutOfPinnedMemoryError, MemlockLimitError: over the
    /// budget. PinpoolError: the pool is of the parent process, or its page kind cannot be had. OSError: the system
    /// refused.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> PinnedPool().empty((3, 5), "bfloat16").nbytes
    /// 30
    #[pyo3(
        signature = (shape, dtype=None, *, timeout=Some(0.0)),
        text_signature = "($self, shape, dtype=None, *, timeout=0.0)"
    )]
    fn empty(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<PinnedArray> {
        self.array(py, Layout::new(shape, dtype)?, timeout)
    }

    /// Take an array and fill it with zeros. Otherwise as `empty`.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> bytes(PinnedPool().zeros(4)) == bytes(4)
    /// True
    #[pyo3(
        signature = (shape, dtype=None, *, timeout=Some(0.0)),
        text_signature = "($self, shape, dtype=None, *, timeout=0.0)"
    )]
    fn zeros(
        &self,
        py: Python<'_>,
        shape: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<PinnedArray> {
        let layout = Layout::new(shape, dtype)?;
        let mut block = self.take(py, layout.nbytes, parse_timeout(timeout)?)?;
        py.detach(|| block.as_mut_slice().fill(0));
        Ok(PinnedArray::new(block, layout))
    }

    /// Take an array of the `shape` and `dtype` of a tensor or an array. Otherwise as `empty`.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> pool.empty_like(pool.empty((2, 2), "int16")).shape
    /// (2, 2)
    #[pyo3(signature = (obj, *, timeout=Some(0.0)), text_signature = "($self, obj, *, timeout=0.0)")]
    fn empty_like(&self, py: Python<'_>, obj: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<PinnedArray> {
        self.array(py, Layout::like(obj)?, timeout)
    }

    /// Pin memory that its caller owns, in place, and register it with the pool's devices.
    ///
    /// `obj`: a torch tensor, a numpy array, anything on the CPU with the buffer protocol or DLPack, or an
    /// `(address, nbytes)` pair. The very same range may be registered again, and stays pinned until every
    /// registration of it is closed. Read-only memory is fine.
    ///
    /// TypeError: no dense host memory. ValueError: overlaps another pinned range, or has no bytes.
    /// MemlockLimitError, OSError: the system refused.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> buffer = bytearray(10_000)
    /// >>> with pool.register(buffer):
    /// ...     pool.is_pinned(memoryview(buffer)[100:200])
    /// True
    fn register(&self, py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<Registration> {
        Registration::new(py, obj, &self.pool.options().registering())
    }

    /// Tell whether all bytes of an object are registered with a device. See `pinpool.is_registered`.
    #[allow(clippy::unused_self)] // there is one truth a process
    fn is_registered(&self, obj: &Bound<'_, PyAny>, device: &Bound<'_, PyAny>) -> PyResult<bool> {
        is_registered(obj, device)
    }

    /// Tell whether all bytes of an object are pinned, by whatever pool or registration of this process.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> pool.is_pinned(pool.empty(100)), pool.is_pinned(bytes(100))
    /// (True, False)
    #[allow(clippy::unused_self)] // there is one truth a process
    fn is_pinned(&self, obj: &Bound<'_, PyAny>) -> PyResult<bool> {
        is_pinned(obj)
    }

    /// Keep a block of this pool from reuse until the work is done that was queued on a CUDA stream before.
    ///
    /// See `pinpool.record_stream`, which does the same for whatever pool; this one raises ValueError for a block of
    /// another.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool("host")
    /// >>> pool.record_stream(pool.empty(100), 0)
    #[pyo3(signature = (obj, stream=None))]
    fn record_stream(&self, py: Python<'_>, obj: &Bound<'_, PyAny>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Some(range) = range_of(obj)? else { return Ok(()) };
        record(py, &self.pool.find(&range)?, stream)
    }

    /// Keep a block of this pool from reuse until an event is done: anything with `query()`.
    ///
    /// See `pinpool.defer`, which does the same for whatever pool; this one raises ValueError for a block of another.
    fn defer(&self, py: Python<'_>, obj: &Bound<'_, PyAny>, event: &Bound<'_, PyAny>) -> PyResult<()> {
        let Some(range) = range_of(obj)? else { return Ok(()) };
        defer_to(py, &self.pool.find(&range)?, event)
    }

    /// List the blocks that have an owner: address, nbytes, generation and origin of each. For debug=True only.
    ///
    /// Bytes are in whole pages. The generation counts how often a block at that address was handed out; the origin is
    /// where in Python that was.
    /// ValueError: without debug=True nothing is kept of them.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool("host", debug=True)
    /// >>> array = pool.empty(100)
    /// >>> [(block["nbytes"], block["generation"]) for block in pool.live_blocks()]
    /// [(4096, 1)]
    fn live_blocks<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        if !self.pool.options().debug {
            return Err(PyValueError::new_err("live_blocks needs a pool made with debug=True"));
        }
        let describe = |block: LiveBlock| {
            let dict = PyDict::new(py);
            dict.set_item("address", block.address)?;
            dict.set_item("nbytes", block.len)?;
            dict.set_item("generation", block.generation)?;
            dict.set_item("origin", block.origin.as_deref())?;
            Ok(dict)
        };
        self.pool.live_blocks().into_iter().map(describe).collect()
    }

    /// Grow the pool by `nbytes` ahead of use, all or nothing.
    ///
    /// `progress`: a callable of (bytes done, bytes in all), or True for a tqdm bar when tqdm is installed. Ctrl-C and
    /// an exception of the callable end it and undo everything. Errors as of `empty`.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> pool.reserve(8 << 20)
    /// >>> pool.stats()["cached_bytes"] == 8 << 20
    /// True
    #[pyo3(signature = (nbytes, *, progress=None))]
    fn reserve(&self, py: Python<'_>, nbytes: &Bound<'_, PyAny>, progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let nbytes = byte_count(nbytes, "nbytes")?;
        let progress = progress.map(|progress| reporter(progress, nbytes)).transpose()?.flatten();
        let report = |py: Python<'_>, done: usize, total: usize| match &progress {
            Some(progress) => progress.call1(py, (done, total)).map(|_| ()),
            None => Ok(()),
        };
        detached(py, report, |progress| self.pool.reserve(nbytes, progress))
    }

    /// Give all idle memory back to the system, and return how many bytes that were.
    ///
    /// OSError where the system refuses some; the rest is given back all the same.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> del (_ := [pool.empty(5 << 20)])[:]
    /// >>> pool.trim() == 5 << 20
    /// True
    fn trim(&self, py: Python<'_>) -> PyResult<usize> {
        drop_forgotten_owners();
        Ok(py.detach(|| self.pool.trim())?)
    }

    /// Tell what the pool holds now, in bytes and counts.
    ///
    /// Reserved is allocated + cached + pending + quarantined + leaked; reserved / requested is the waste. Pending
    /// memory waits for device work or a driver; memory in quarantine is never used again, because an event of it
    /// failed, and `quarantine_reason` says how. `os_calls` counts the memory system calls that pinpool has made in
    /// this process.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> array = pool.empty(5000)
    /// >>> (pool.stats()["requested_bytes"], pool.stats()["blocks"])
    /// (5000, 1)
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.pool.stats())?;
        let numbers = [
            ("requested_bytes", stats.requested_bytes),
            ("allocated_bytes", stats.allocated_bytes),
            ("cached_bytes", stats.cached_bytes),
            ("pending_bytes", stats.pending_bytes),
            ("reserved_bytes", stats.reserved_bytes),
            ("locked_bytes", stats.locked_bytes),
            ("quarantined_bytes", stats.quarantined_bytes),
            ("leaked_bytes", stats.leaked_bytes),
            ("max_bytes", stats.max_bytes),
            ("peak_reserved_bytes", stats.peak_reserved_bytes),
            ("hits", stats.hits),
            ("misses", stats.misses),
            ("blocks", stats.blocks),
            ("regions", stats.regions),
        ];
        let dict = PyDict::new(py);
        numbers.iter().try_for_each(|(name, number)| dict.set_item(name, number))?;
        dict.set_item("registered_bytes", stats.registered_bytes)?;
        dict.set_item("quarantine_reason", stats.quarantine_reason)?;
        dict.set_item("unregistered", stats.unregistered.or_else(|| self.unregistered.clone()))?;
        dict.set_item("process_leaked_bytes", crate::pinned::leaked_bytes())?;
        dict.set_item("pages", stats.pages.name())?;
        dict.set_item("os_calls", crate::memory_calls())?;
        Ok(dict)
    }

    /// Refuse further requests and give idle memory back. Live arrays stay valid. A second call does nothing.
    ///
    /// >>> from pinpool import PinnedPool
    /// >>> pool = PinnedPool()
    /// >>> pool.close()
    /// >>> pool.closed
    /// True
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.pool.close())?)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.pool.is_closed()
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
        match self.pool.stats() {
            Ok(stats) => format!(
                "PinnedPool(reserved_bytes={}, allocated_bytes={}, max_bytes={}, blocks={}{})",
                stats.reserved_bytes,
                stats.allocated_bytes,
                stats.max_bytes,
                stats.blocks,
                if self.pool.is_closed() { ", closed" } else { "" }
            ),
            Err(_) => "PinnedPool(of the parent process)".to_owned(),
        }
    }
}

/// A number of at least `least`.
fn at_least(number: &Bound<'_, PyAny>, least: u32, name: &str) -> PyResult<u32> {
    let number = integer(number, name)?;
    u32::try_from(number)
        .ok()
        .filter(|&number| number >= least)
        .ok_or_else(|| PyValueError::new_err(format!("invalid {name}: {number} is not a number from {least} on")))
}

/// What to call with (done, total): the caller's own callable, or for `True` a bar where one can be had.
fn reporter(progress: &Bound<'_, PyAny>, nbytes: usize) -> PyResult<Option<Py<PyAny>>> {
    let reporter = match progress.extract::<bool>() {
        Ok(false) => return Ok(None),
        Ok(true) => progress.py().import("pinpool._progress")?.call_method1("bar", (nbytes,))?,
        Err(_) if progress.is_callable() => progress.clone(),
        Err(_) => return Err(PyTypeError::new_err("progress is a callable of (done, total), True, False or None")),
    };
    Ok(Some(reporter.unbind()))
}

/// The devices of a pool, and why there is none where that was let pass.
#[derive(Default)]
struct Opened {
    devices: Vec<Arc<dyn Device>>,
    unregistered: Option<String>,
}

/// The devices that a caller asks for.
enum Devices<'py> {
    /// The default.
    Auto,
    Given(Bound<'py, PyAny>),
}

impl<'py> FromPyObject<'_, 'py> for Devices<'py> {
    type Error = PyErr;

    fn extract(devices: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self::Given(devices.to_owned()))
    }
}

impl<'py> Devices<'py> {
    /// Opens them, as far as `register` wants it.
    fn open(self, py: Python<'py>, register: &str) -> PyResult<Opened> {
        let given = match self {
            Self::Auto => PyString::new(py, "auto").into_any(),
            Self::Given(devices) => devices,
        };
        match register {
            "off" => Ok(Opened::default()),
            "require" => Ok(Opened { devices: devices::open(&given, false)?, unregistered: None }),
            "try" => match devices::open(&given, true) {
                Ok(devices) => Ok(Opened { devices, unregistered: None }),
                Err(error) if error.is_instance_of::<PinpoolError>(py) => {
                    Ok(Opened { devices: Vec::new(), unregistered: Some(error.value(py).to_string()) })
                }
                Err(error) => Err(error),
            },
            other => {
                let reason = format!("invalid register: {other:?} is none of \"require\", \"try\", \"off\"");
                Err(PyValueError::new_err(reason))
            }
        }
    }
}

/// Closing a pool takes long when it has much to give back: not with the interpreter.
impl Drop for PinnedPool {
    fn drop(&mut self) {
        let pool = &self.pool;
        // What the system refuses is counted as leaked.
        let _ = Python::try_attach(|py| py.detach(|| pool.close()));
    }
}

/// Unlock the pool block that holds an object now; its memory stays valid until the last alias is gone.
///
/// A block with a region of its own is unregistered, too; drivers that keep such memory for others are waited for.
/// False: no pool block, or unlocked before. ValueError for memory that a Registration pins. Other errors leave the
/// block locked; after PinpoolError, a driver may hand its memory to others, and it is not to be used.
#[pyfunction]
pub(crate) fn unpin(py: Python<'_>, obj: &Bound<'_, PyAny>) -> PyResult<bool> {
    let Some(Span { address, .. }) = span_of(obj)?.filter(|span| span.len > 0) else { return Ok(false) };
    detached(py, |_, _, _| Ok(()), |progress| crate::pool::unpin_within(address, progress))
}
