//! Which bytes an object stands for: a `PinnedArray`, an `(address, nbytes)` pair, a tensor, a buffer.
#![allow(unsafe_code)] // reads the C structs of buffers and DLPack tensors

use std::ffi::CStr;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use super::argument::byte_count;
use super::array::PinnedArray;
use super::exchange;
use crate::block::Block;
use crate::dlpack::{ManagedTensor, ManagedTensorVersioned, Tensor};

/// DLPack's kinds of host memory: plain, pinned by CUDA, pinned by ROCm.
const HOST_KINDS: [i32; 3] = [1, 3, 11];

/// The bytes of an array from the first to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) address: usize,
    pub(super) len: usize,
    /// Whether the elements fill the span: no gaps, no overlap.
    pub(super) dense: bool,
}

impl Span {
    fn solid(address: usize, len: usize) -> Self {
        Self { address, len, dense: true }
    }

    /// The span of a strided array; strides are in units of `unit` bytes, elements are `element` bytes.
    fn strided(base: usize, shape: &[i64], strides: &[i64], unit: i64, element: i64) -> Option<Self> {
        if shape.contains(&0) {
            return Some(Self::solid(base, 0));
        }
        let (mut low, mut high, mut bytes) = (0_i64, element, element);
        for (&count, &stride) in shape.iter().zip(strides) {
            let reach = (count - 1).checked_mul(stride)?.checked_mul(unit)?;
            low = low.checked_add(reach.min(0))?;
            high = high.checked_add(reach.max(0))?;
            bytes = bytes.checked_mul(count)?;
        }
        let len = high.checked_sub(low)?;
        Some(Self { address: base.wrapping_add_signed(low as isize), len: len as usize, dense: len == bytes })
    }

    /// The span of a DLPack tensor in host memory; `None` for any other, and for elements of less than a byte.
    ///
    /// # Safety
    /// The tensor and what it points to are alive.
    pub(super) unsafe fn of_tensor(tensor: &Tensor) -> Option<Self> {
        let bits = i64::from(tensor.dtype.bits) * i64::from(tensor.dtype.lanes);
        if !HOST_KINDS.contains(&tensor.device.kind) || bits % 8 != 0 {
            return None;
        }
        let base = tensor.data as usize + tensor.byte_offset as usize;
        let rank = usize::try_from(tensor.ndim).ok()?;
        if rank == 0 {
            return Some(Self::solid(base, bits as usize / 8));
        }
        // SAFETY: a tensor points to `ndim` lengths.
        let shape = unsafe { std::slice::from_raw_parts(tensor.shape, rank) };
        if tensor.strides.is_null() {
            let bytes = shape.iter().try_fold(bits / 8, |bytes, &count| bytes.checked_mul(count))?;
            return Some(Self::solid(base, bytes as usize));
        }
        // SAFETY: and to as many strides, when it has any.
        let strides = unsafe { std::slice::from_raw_parts(tensor.strides, rank) };
        Self::strided(base, shape, strides, bits / 8, bits / 8)
    }
}

/// A range of bytes to pin, and what keeps it where it is.
pub(super) struct Extent {
    pub(super) span: Span,
    pub(super) owner: Owner,
}

/// What keeps memory alive.
pub(super) enum Owner {
    /// The object itself, or the capsule that it exported.
    Object(Py<PyAny>),
    /// A buffer view, which also keeps a `bytearray` from moving.
    Buffer(BufferView),
    /// A pool's block.
    Block(#[allow(dead_code)] Arc<Block>), // held, never read
}

/// What an object turns out to be.
enum Found {
    Memory(Extent),
    /// A tensor without host memory of its own, and why.
    NoMemory(String),
}

/// The bytes of an object, for a question that is over before the object can go. `None`: a tensor without host memory.
pub(super) fn span_of(obj: &Bound<'_, PyAny>) -> PyResult<Option<Span>> {
    if let Some(span) = quick_span(obj)? {
        return Ok(Some(span));
    }
    match find(obj)? {
        Found::Memory(extent) => Ok(Some(extent.span)),
        Found::NoMemory(_) => Ok(None),
    }
}

impl Extent {
    /// The bytes of an object that are to be pinned, and a hold on them.
    pub(super) fn of(obj: &Bound<'_, PyAny>) -> PyResult<Self> {
        let extent = match simple_span(obj)? {
            Some(span) => Self { span, owner: owner_of(obj)? },
            None => match find(obj)? {
                Found::Memory(extent) => extent,
                Found::NoMemory(why) => return Err(PyTypeError::new_err(format!("cannot pin {why}"))),
            },
        };
        if extent.span.dense {
            return Ok(extent);
        }
        Err(PyTypeError::new_err(
            "cannot pin a non-contiguous view: its elements do not fill the memory from the first to the last; pin the \
             whole tensor or array, or a contiguous() copy",
        ))
    }
}

/// What keeps an object of [`simple_span`] where it is: for an array its block, since the array may be released.
fn owner_of(obj: &Bound<'_, PyAny>) -> PyResult<Owner> {
    match obj.cast::<PinnedArray>() {
        Ok(array) => array.get().block().map(Owner::Block),
        Err(_) => Ok(Owner::Object(obj.clone().unbind())),
    }
}

/// The cases that need no import and no call into Python.
fn quick_span(obj: &Bound<'_, PyAny>) -> PyResult<Option<Span>> {
    match exchange::look(obj) {
        Some(span) => Ok(Some(span)),
        None => simple_span(obj),
    }
}

/// Objects that are only a range.
fn simple_span(obj: &Bound<'_, PyAny>) -> PyResult<Option<Span>> {
    if let Ok(array) = obj.cast::<PinnedArray>() {
        let (address, len) = array.get().extent();
        return Ok(Some(Span::solid(address, len)));
    }
    match obj.cast::<PyTuple>() {
        Ok(pair) if pair.len() == 2 => {
            let (address, len) = (pair.get_item(0)?, pair.get_item(1)?);
            Ok(Some(Span::solid(byte_count(&address, "address")?, byte_count(&len, "nbytes")?)))
        }
        _ => Ok(None),
    }
}

fn find(obj: &Bound<'_, PyAny>) -> PyResult<Found> {
    let tensor = obj.py().import("pinpool._extent")?.call_method1("tensor_extent", (obj,))?;
    if let Ok(why) = tensor.extract::<String>() {
        return Ok(Found::NoMemory(why));
    }
    if !tensor.is_none() {
        let (address, len, dense, owner) = tensor.extract()?;
        let owner = Owner::Object(owner);
        return Ok(Found::Memory(Extent { span: Span { address, len, dense }, owner }));
    }
    // SAFETY: attached, and `obj` is an object.
    if unsafe { ffi::PyObject_CheckBuffer(obj.as_ptr()) } != 0 {
        let view = BufferView::get(obj)?;
        let span = view.span().ok_or_else(|| PyBufferError::new_err("the buffer's strides make no sense"))?;
        return Ok(Found::Memory(Extent { span, owner: Owner::Buffer(view) }));
    }
    if obj.hasattr("__dlpack__")? && obj.hasattr("__dlpack_device__")? {
        return find_exported(obj);
    }
    let class = obj.get_type().fully_qualified_name()?;
    Err(PyTypeError::new_err(format!(
        "{class} is no memory: pass a CPU tensor or array, an object with the buffer protocol or DLPack, or an \
         (address, nbytes) pair"
    )))
}

/// Looks into the capsule that an object exports. Unconsumed, the capsule keeps the memory alive.
fn find_exported(obj: &Bound<'_, PyAny>) -> PyResult<Found> {
    let class = obj.get_type().fully_qualified_name()?;
    let elsewhere = || Found::NoMemory(format!("{class}: it is not in host memory"));
    let (kind, _): (i32, i32) = obj.call_method0("__dlpack_device__")?.extract()?;
    if !HOST_KINDS.contains(&kind) {
        return Ok(elsewhere());
    }
    let exported = obj.call_method0("__dlpack__")?;
    let capsule = exported.cast::<PyCapsule>()?;
    let pointer = |name: &'static CStr| capsule.pointer_checked(Some(name)).ok();
    let span = if let Some(tensor) = pointer(c"dltensor") {
        // SAFETY: that is what a capsule of this name holds.
        let tensor = unsafe { tensor.cast::<ManagedTensor>().as_ref() };
        // SAFETY: alive as long as the capsule.
        unsafe { Span::of_tensor(&tensor.tensor) }
    } else if let Some(tensor) = pointer(c"dltensor_versioned") {
        // SAFETY: that is what a capsule of this name holds.
        let tensor = unsafe { tensor.cast::<ManagedTensorVersioned>().as_ref() };
        // SAFETY: alive as long as the capsule; the layout is that of major version 1.
        if tensor.version[0] == 1 { unsafe { Span::of_tensor(&tensor.tensor) } } else { None }
    } else {
        None
    };
    Ok(match span {
        Some(span) => Found::Memory(Extent { span, owner: Owner::Object(exported.unbind()) }),
        None => elsewhere(),
    })
}

/// A view of a buffer, released on drop.
pub(super) struct BufferView(Box<ffi::Py_buffer>);

// SAFETY: a view may be released from any thread that is attached, and `drop` attaches.
unsafe impl Send for BufferView {}
// SAFETY: nothing is changed through a shared reference.
unsafe impl Sync for BufferView {}

impl BufferView {
    /// Asks for strides but no format, because not every element type has one.
    fn get(obj: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: the view is ours to be filled, and stays at its address until it is released.
        let answer = unsafe { ffi::PyObject_GetBuffer(obj.as_ptr(), &raw mut *view, ffi::PyBUF_STRIDES) };
        if answer == 0 { Ok(Self(view)) } else { Err(PyErr::fetch(obj.py())) }
    }

    fn span(&self) -> Option<Span> {
        let (view, rank) = (&self.0, usize::try_from(self.0.ndim).ok()?);
        if rank == 0 || view.shape.is_null() || view.strides.is_null() {
            return Some(Span::solid(view.buf as usize, view.len as usize));
        }
        // SAFETY: the exporter fills `ndim` lengths, and they live as long as the view. (isize is i64 here.)
        let shape = unsafe { std::slice::from_raw_parts(view.shape.cast::<i64>(), rank) };
        // SAFETY: the same for the strides, which were asked for.
        let strides = unsafe { std::slice::from_raw_parts(view.strides.cast::<i64>(), rank) };
        Span::strided(view.buf as usize, shape, strides, 1, view.itemsize as i64)
    }

    /// Shows the object behind the view to the garbage collector.
    pub(super) fn visit(&self, visit: &pyo3::PyVisit<'_>) -> Result<(), pyo3::PyTraverseError> {
        if self.0.obj.is_null() {
            return Ok(());
        }
        // SAFETY: only lends the reference that the view holds; the copy is never dropped.
        let object =
            std::mem::ManuallyDrop::new(unsafe { std::ptr::read((&raw const self.0.obj).cast::<Py<PyAny>>()) });
        visit.call(&*object)
    }
}

impl Drop for BufferView {
    fn drop(&mut self) {
        // SAFETY: filled by `get`, and released once.
        let release = |_: Python<'_>| unsafe { ffi::PyBuffer_Release(&raw mut *self.0) };
        Python::try_attach(release); // the end of the interpreter needs no release
    }
}
