//! `PinnedArray`: a block with a shape, exported through DLPack and the buffer protocol.
#![allow(clippy::doc_markdown)] // Python shows these comments
#![allow(unsafe_code)] // fills the C structs of both

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use super::argument::Layout;
use crate::block::Block;
use crate::dlpack::{self, ELEMENT_TYPES, ElementType, ManagedTensor, ManagedTensorVersioned};

const VERSIONED: &CStr = c"dltensor_versioned";
const LEGACY: &CStr = c"dltensor";

/// Pinned memory with a shape and a dtype. Row-major, starting on a page.
///
/// Hand it to `torch.from_dlpack`, `numpy.asarray` or `file.readinto`. The memory goes back to its pool when the array
/// and everything that was made from it are gone, in any order, on any thread.
#[pyclass(frozen, weakref, module = "pinpool")]
#[derive(Debug)]
pub(crate) struct PinnedArray {
    block: Mutex<Option<Arc<Block>>>,
    shape: Box<[i64]>,
    element: &'static ElementType,
    nbytes: usize,
}

impl PinnedArray {
    pub(super) fn new(block: Block, layout: Layout) -> Self {
        let Layout { shape, element, nbytes } = layout;
        Self { block: Mutex::new(Some(Arc::new(block))), shape: shape.into(), element, nbytes }
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Block>>> {
        self.block.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn block(&self) -> PyResult<Arc<Block>> {
        self.slot().clone().ok_or_else(|| PyValueError::new_err("the array was released"))
    }

    /// First byte and number of bytes: none of a released array.
    pub(super) fn extent(&self) -> (usize, usize) {
        self.slot().as_ref().map_or((0, 0), |block| (block.as_ptr() as usize, self.nbytes))
    }
}

#[pymethods]
impl PinnedArray {
    /// Export the memory as a DLPack capsule: the versioned form where `max_version` is (1, 0) or later.
    ///
    /// The device is the CPU, (1, 0), and the memory is shared. BufferError: another device, a stream, or a copy.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("host memory takes no stream; leave stream=None"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a PinnedArray is exported without a copy; copy it afterwards"));
        }
        if let Some(device) = dl_device.filter(|&device| device != self.__dlpack_device__()) {
            let reason = format!("cannot export to DLPack device {device:?}; the memory is on the CPU, (1, 0)");
            return Err(PyBufferError::new_err(reason));
        }
        let block = self.block()?;
        let data = block.as_ptr();
        if max_version.is_some_and(|(major, _)| major >= 1) {
            let tensor = dlpack::export_versioned(block, data, &self.shape, self.element);
            // SAFETY: a tensor that found no capsule is still whole.
            capsule(py, tensor.cast(), VERSIONED, delete_versioned)
                .inspect_err(|_| unsafe { dlpack::discard_versioned(tensor) })
        } else {
            let tensor = dlpack::export_legacy(block, data, &self.shape, self.element);
            // SAFETY: a tensor that found no capsule is still whole.
            capsule(py, tensor.cast(), LEGACY, delete_legacy).inspect_err(|_| unsafe { dlpack::discard_legacy(tensor) })
        }
    }

    /// Tell the DLPack device: the CPU, (1, 0).
    #[allow(clippy::unused_self)] // the protocol asks the object
    fn __dlpack_device__(&self) -> (i32, i32) {
        (dlpack::CPU.kind, dlpack::CPU.ordinal)
    }

    /// Share the memory as a numpy array. TypeError for element types that numpy lacks (see ml_dtypes).
    #[pyo3(signature = (dtype=None, *, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("pinpool._numpy")?.call_method1("as_array", (slf, dtype, copy))
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: the interpreter hands out a view to fill; an error must leave it without an owner.
        unsafe { (*view).obj = null_mut() };
        let array = slf.get();
        let wants = |flag: c_int| flags & flag == flag;
        if wants(ffi::PyBUF_F_CONTIGUOUS) && array.shape.len() > 1 {
            return Err(PyBufferError::new_err("a PinnedArray is row-major"));
        }
        let format = match array.element.format {
            _ if !wants(ffi::PyBUF_FORMAT) => null_mut(),
            Some(format) => format.as_ptr().cast_mut(),
            None => {
                let name = array.element.name;
                let reason = format!("the buffer protocol has no format for {name}; use DLPack, or read plain bytes");
                return Err(PyBufferError::new_err(reason));
            }
        };
        let mut export = Box::new(Export::new(array.block()?, &array.shape, array.element));
        let rank = array.shape.len();
        let (shape, strides) = (export.dimensions.as_mut_ptr(), export.dimensions[rank..].as_mut_ptr());
        // SAFETY: the interpreter hands out a view to fill.
        let view = unsafe { &mut *view };
        view.buf = export.block.as_ptr().cast();
        view.len = array.nbytes as isize;
        view.itemsize = array.element.bytes as isize;
        view.readonly = 0;
        view.ndim = if wants(ffi::PyBUF_ND) { rank as c_int } else { 1 };
        view.format = format;
        view.shape = if wants(ffi::PyBUF_ND) && rank > 0 { shape } else { null_mut() };
        view.strides = if wants(ffi::PyBUF_STRIDES) && rank > 0 { strides } else { null_mut() };
        view.suboffsets = null_mut();
        view.internal = Box::into_raw(export).cast();
        view.obj = slf.into_any().into_ptr();
        Ok(())
    }

    #[allow(clippy::unused_self)] // the protocol asks the object
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `internal` is what `__getbuffer__` put there, and a view is released once.
        drop(unsafe { Box::from_raw((*view).internal.cast::<Export>()) });
    }

    fn __repr__(&self) -> String {
        let state = if self.released() { ", released" } else { "" };
        format!("PinnedArray(shape={:?}, dtype={:?}, nbytes={}{state})", self.shape, self.element.name, self.nbytes)
    }

    /// Lengths of the dimensions, in elements.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &*self.shape)
    }

    /// Name of the element type, as torch and numpy spell it.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name
    }

    /// Bytes that were asked for.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    /// Address of the first byte; 0 for an array without one. ValueError once released.
    #[getter]
    fn ptr(&self) -> PyResult<usize> {
        let block = self.block()?;
        Ok(if block.is_empty() { 0 } else { block.as_ptr() as usize })
    }

    /// Whether `release` was called.
    #[getter]
    fn released(&self) -> bool {
        self.slot().is_none()
    }

    /// The same memory as one dimension of bytes.
    fn _bytes(&self) -> PyResult<Self> {
        let block = Mutex::new(Some(self.block()?));
        Ok(Self { block, shape: Box::new([self.nbytes as i64]), element: &ELEMENT_TYPES[0], nbytes: self.nbytes })
    }

    /// Let go of the memory now. It returns to the pool with the last tensor or view made from it.
    ///
    /// A second call does nothing.
    fn release(&self) {
        let block = self.slot().take();
        drop(block); // after the lock
    }
}

/// What a buffer view keeps alive.
struct Export {
    block: Arc<Block>,
    /// Lengths in elements, then strides in bytes.
    dimensions: Vec<isize>,
}

impl Export {
    fn new(block: Arc<Block>, shape: &[i64], element: &ElementType) -> Self {
        let rank = shape.len();
        let mut dimensions: Vec<isize> = shape.iter().map(|&len| len as isize).collect();
        dimensions.resize(2 * rank, element.bytes as isize);
        for axis in (0..rank.saturating_sub(1)).rev() {
            dimensions[rank + axis] = dimensions[rank + axis + 1] * dimensions[axis + 1].max(1);
        }
        Self { block, dimensions }
    }
}

/// Wraps a managed tensor; the destructor frees it unless a consumer has.
fn capsule<'py>(
    py: Python<'py>,
    tensor: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyCapsule>> {
    let pointer = NonNull::new(tensor).expect("exports are not null");
    // SAFETY: the pointer is a managed tensor of that name's form, and the destructor knows the form.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, name, Some(destructor)) }
}

/// What an unconsumed capsule of this name holds. A consumer renames the capsule, and owns the tensor from then on.
unsafe fn unconsumed<T>(capsule: *mut ffi::PyObject, name: &CStr) -> Option<*mut T> {
    // SAFETY: the interpreter passes the capsule that it destroys.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: valid, as asked just now.
    Some(unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }.cast())
}

unsafe extern "C" fn delete_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with a capsule of ours.
    if let Some(tensor) = unsafe { unconsumed::<ManagedTensorVersioned>(capsule, VERSIONED) } {
        // SAFETY: nobody consumed the tensor, so it is still whole.
        unsafe { dlpack::discard_versioned(tensor) };
    }
}

unsafe extern "C" fn delete_legacy(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with a capsule of ours.
    if let Some(tensor) = unsafe { unconsumed::<ManagedTensor>(capsule, LEGACY) } {
        // SAFETY: nobody consumed the tensor, so it is still whole.
        unsafe { dlpack::discard_legacy(tensor) };
    }
}
