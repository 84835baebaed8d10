//! DLPack's C exchange API: the way to make a tensor of a framework, or to look into one, without a capsule.
//!
//! The framework's tensor type carries a table of functions in a capsule (DLPack 1.3; torch from 2.10 on). The edge
//! passes the types in: nothing here knows a framework's name.
#![allow(clippy::doc_markdown)] // Python shows these comments
#![allow(unsafe_code)] // calls through the framework's table

use std::ffi::{CStr, c_int, c_void};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyType};

use super::argument::{Layout, timeout as parse_timeout};
use super::extent::Span;
use super::pool::PinnedPool;
use crate::block::Block;
use crate::dlpack::{self, ManagedTensorVersioned, Tensor};

const CAPSULE_NAME: &CStr = c"dlpack_exchange_api";
const MAJOR_VERSION: u32 = 1;

/// `DLPackExchangeAPI`.
#[repr(C)]
struct Table {
    version: [u32; 2],
    previous: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: Option<unsafe extern "C" fn(*mut ManagedTensorVersioned, *mut *mut c_void) -> c_int>,
    look: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int>,
    current_stream: Option<unsafe extern "C" fn(c_int, c_int, *mut *mut c_void) -> c_int>,
}

struct ExchangeApi {
    table: &'static Table,
    import: unsafe extern "C" fn(*mut ManagedTensorVersioned, *mut *mut c_void) -> c_int,
    /// The exact types whose objects `look` may be asked about: subclasses may mean something else by their data.
    types: Vec<Py<PyType>>,
}

// SAFETY: the table is constant for the life of the process, and its functions are called attached only.
unsafe impl Send for ExchangeApi {}
// SAFETY: as above.
unsafe impl Sync for ExchangeApi {}

static API: PyOnceLock<ExchangeApi> = PyOnceLock::new();

/// Use the DLPack exchange API of these tensor types, which share the first one's. False: it has none that fits.
#[pyfunction]
pub(crate) fn use_exchange_api(py: Python<'_>, types: Vec<Bound<'_, PyType>>) -> bool {
    let Some(Ok(capsule)) = types.first().map(|class| class.getattr("__dlpack_c_exchange_api__")) else {
        return false;
    };
    let Ok(capsule) = capsule.cast::<PyCapsule>() else { return false };
    let Ok(pointer) = capsule.pointer_checked(Some(CAPSULE_NAME)) else { return false };
    // SAFETY: a capsule of this name holds a table that lives as long as the process (DLPack 1.3).
    let table = unsafe { pointer.cast::<Table>().as_ref() };
    let Some(import) = table.import.filter(|_| table.version[0] == MAJOR_VERSION) else { return false };
    let used =
        API.get_or_init(py, || ExchangeApi { table, import, types: types.into_iter().map(Bound::unbind).collect() });
    std::ptr::eq(used.table, table) // the first framework's stays
}

/// Make an uninitialized tensor in pool memory.
///
/// The memory goes back to the pool with the last tensor that shares it. `shape` is in elements, `timeout` in seconds;
/// both, and the errors, are those of `PinnedPool.empty`.
///
/// >>> import torch, pinpool, pinpool.torch
/// >>> pinpool.torch.empty(pinpool.PinnedPool(), (2, 3), torch.bfloat16).shape
/// torch.Size([2, 3])
#[pyfunction]
#[pyo3(
    signature = (pool, shape, dtype, *, timeout=Some(0.0)),
    text_signature = "(pool, shape, dtype, *, timeout=0.0)"
)]
pub(crate) fn torch_empty<'py>(
    py: Python<'py>,
    pool: &Bound<'py, PinnedPool>,
    shape: &Bound<'py, PyAny>,
    dtype: &Bound<'py, PyAny>,
    timeout: Option<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let api = API.get(py).ok_or_else(|| PyRuntimeError::new_err("no exchange API is in use"))?;
    let layout = Layout::new(shape, Some(dtype))?;
    let block = pool.get().take(py, layout.nbytes, parse_timeout(timeout)?)?;
    import(py, api, block, &layout)
}

fn import<'py>(py: Python<'py>, api: &ExchangeApi, block: Block, layout: &Layout) -> PyResult<Bound<'py, PyAny>> {
    let data = block.as_ptr();
    let tensor = dlpack::export_versioned(block, data, &layout.shape, layout.element);
    let mut object = std::ptr::null_mut();
    // SAFETY: attached, the tensor is whole, and `object` is ours to be written.
    if unsafe { (api.import)(tensor, &raw mut object) } == 0 {
        // SAFETY: success hands over one reference.
        return unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) };
    }
    let error = PyErr::fetch(py);
    if !dlpack::was_just_deleted(tensor) {
        // SAFETY: refused and not deleted, so still whole.
        unsafe { dlpack::discard_versioned(tensor) };
    }
    Err(error)
}

/// The bytes of a host tensor of one of the known types; `None` where another way has to tell.
pub(super) fn look(obj: &Bound<'_, PyAny>) -> Option<Span> {
    let api = API.get(obj.py())?;
    let look = api.table.look?;
    let class = obj.get_type_ptr();
    if !api.types.iter().any(|known| known.as_ptr().cast() == class) {
        return None;
    }
    let mut tensor = std::mem::MaybeUninit::<Tensor>::uninit();
    // SAFETY: attached, and `tensor` is ours to be written.
    if unsafe { look(obj.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
        // SAFETY: attached.
        unsafe { ffi::PyErr_Clear() };
        return None;
    }
    // SAFETY: success fills all of it, and the object, which is alive, owns what it points to.
    unsafe { Span::of_tensor(tensor.assume_init_ref()) }
}

/// The framework's current stream of a CUDA device, which must be in use. `None`: the framework does not say.
pub(super) fn current_cuda_stream(py: Python<'_>, ordinal: u32) -> PyResult<Option<usize>> {
    const CUDA: c_int = 2;
    let Some(current_stream) = API.get(py).and_then(|api| api.table.current_stream) else { return Ok(None) };
    let mut stream = std::ptr::null_mut();
    // SAFETY: attached, and `stream` is ours to be written.
    match unsafe { current_stream(CUDA, ordinal as c_int, &raw mut stream) } {
        0 => Ok(Some(stream as usize)),
        _ => Err(PyErr::fetch(py)),
    }
}
