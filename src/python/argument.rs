//! Arguments: sizes, shapes, element types and timeouts, each checked before anything is allocated.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString, PyTuple, PyType};

use crate::dlpack::{ELEMENT_TYPES, ElementType, checked_bytes};

/// An array to be made.
pub(super) struct Layout {
    pub(super) shape: Vec<i64>,
    pub(super) element: &'static ElementType,
    pub(super) nbytes: usize,
}

impl Layout {
    /// Reads a shape (an integer, or a sequence of them) and a dtype (none: bytes).
    pub(super) fn new(shape: &Bound<'_, PyAny>, dtype: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let (shape, element) = (dimensions(shape)?, dtype.map_or(Ok(&ELEMENT_TYPES[0]), element_type)?);
        let nbytes = checked_bytes(&shape, element)?;
        Ok(Self { shape, element, nbytes })
    }

    /// Reads `shape` and `dtype` of a tensor or an array.
    pub(super) fn like(obj: &Bound<'_, PyAny>) -> PyResult<Self> {
        Self::new(&obj.getattr("shape")?, Some(&obj.getattr("dtype")?))
    }
}

fn dimensions(shape: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    if let Ok(tuple) = shape.cast::<PyTuple>() {
        return tuple.iter_borrowed().map(|dimension| integer(&dimension, "shape")).collect();
    }
    if shape.is_instance_of::<PyInt>() {
        return Ok(vec![integer(shape, "shape")?]); // asking an integer for an iterator makes an exception first
    }
    match shape.try_iter() {
        Ok(dimensions) => dimensions.map(|dimension| integer(&dimension?, "shape")).collect(),
        Err(_) => Ok(vec![integer(shape, "shape")?]),
    }
}

/// An integer that fits 63 bits, or a `ValueError` that names the argument.
pub(super) fn integer(value: &Bound<'_, PyAny>, name: &str) -> PyResult<i64> {
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            return PyValueError::new_err(format!("invalid {name}: {value} does not fit 63 bits"));
        }
        error
    })
}

/// A number of bytes.
pub(super) fn byte_count(value: &Bound<'_, PyAny>, name: &str) -> PyResult<usize> {
    let bytes = integer(value, name)?;
    usize::try_from(bytes).map_err(|_| PyValueError::new_err(format!("invalid {name}: {bytes} is negative")))
}

/// Seconds to wait: `None` waits for ever.
pub(super) fn timeout(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(seconds) = seconds else { return Ok(None) };
    if seconds.is_nan() || seconds < 0.0 {
        let reason = format!("invalid timeout: {seconds} is not a number of seconds; None waits for ever");
        return Err(PyValueError::new_err(reason));
    }
    Ok(Duration::try_from_secs_f64(seconds).ok()) // more than can be counted is for ever
}

/// Tell whether a pool makes arrays of a dtype of this name.
#[pyfunction]
pub(crate) fn is_element_type(name: &str) -> bool {
    ElementType::from_name(name).is_ok()
}

/// The element type that a name, a numpy dtype or a torch dtype stands for.
fn element_type(dtype: &Bound<'_, PyAny>) -> PyResult<&'static ElementType> {
    /// Dtypes that were seen before, kept alive so that their addresses name them. Most are singletons of their package.
    static SEEN: Mutex<Vec<(Py<PyAny>, &ElementType)>> = Mutex::new(Vec::new());
    const MOST: usize = 64;
    let seen = || SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, element)) = seen().iter().find(|(known, _)| known.is(dtype)) {
        return Ok(element);
    }
    let element = ElementType::from_name(&name_of(dtype)?)?;
    let mut seen = seen();
    if seen.len() < MOST {
        seen.push((dtype.clone().unbind(), element));
    }
    Ok(element)
}

fn name_of(dtype: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(name) = dtype.cast::<PyString>() {
        return Ok(name.to_str()?.to_owned());
    }
    if let Ok(class) = dtype.cast::<PyType>() {
        let name = class.name()?.to_str()?.to_owned(); // numpy.float32 and its like
        if matches!(name.as_str(), "float" | "int" | "complex") {
            let reason = format!("invalid dtype: {name} has no one size; say \"{name}64\" or another");
            return Err(PyValueError::new_err(reason));
        }
        return Ok(name);
    }
    if let Ok(name) = dtype.getattr("name") {
        if !dtype.getattr("isnative").and_then(|native| native.extract()).unwrap_or(true) {
            return Err(PyValueError::new_err(format!(
                "dtype {dtype} is of foreign byte order; use .newbyteorder('=')"
            )));
        }
        return name.extract();
    }
    let name = dtype.str()?;
    let name = name.to_str()?;
    Ok(name.strip_prefix("torch.").unwrap_or(name).to_owned())
}
