//! Devices: what callers call them, and what the drivers say of them.
#![allow(clippy::doc_markdown)] // Python shows these comments

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::driver::{Device, Found, vendor};

/// Kind and ordinal of a device that a caller names.
pub(super) fn name(device: &Bound<'_, PyAny>) -> PyResult<(String, u32)> {
    device.py().import("pinpool._devices")?.call_method1("name", (device,))?.extract()
}

/// Opens the devices that a caller asks a pool for; with `import`, by the method of last resort where no other works.
pub(super) fn open(devices: &Bound<'_, PyAny>, import: bool) -> PyResult<Vec<Arc<dyn Device>>> {
    let py = devices.py();
    let names: Vec<(String, Option<String>, u32)> =
        py.import("pinpool._devices")?.call_method1("resolve", (devices,))?.extract()?;
    let open = |(kind, library, ordinal): &(String, Option<String>, u32)| {
        let (vendor, library) = (vendor(kind)?, library.as_deref());
        vendor.open(library, *ordinal).or_else(|refusal| {
            if import { vendor.open_import(library, *ordinal).map_err(|_| refusal) } else { Err(refusal) }
        })
    };
    Ok(py.detach(|| names.iter().map(open).collect::<crate::Result<_>>())?)
}

/// List the devices of a kind: name, ordinal, uuid, description, method (or None) and reason (or None).
#[pyfunction]
pub(crate) fn find_devices<'py>(
    py: Python<'py>,
    kind: &str,
    library: Option<&str>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let found = py.detach(|| vendor(kind)?.find(library))?;
    found.iter().map(|device| describe(py, device)).collect()
}

fn describe<'py>(py: Python<'py>, device: &Found) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", device.id.to_string())?;
    dict.set_item("ordinal", device.id.ordinal)?;
    dict.set_item("uuid", device.id.uuid.map(|byte| format!("{byte:02x}")).concat())?;
    dict.set_item("description", &device.name)?;
    dict.set_item("method", device.method.as_ref().ok().map(|method| method.call()))?;
    dict.set_item("reason", device.method.as_ref().err())?;
    Ok(dict)
}

/// Tell the ordinal of the device that the calling thread works on, where its driver knows such a thing.
#[pyfunction]
pub(crate) fn current_device(py: Python<'_>, kind: &str, library: Option<&str>) -> PyResult<Option<u32>> {
    Ok(py.detach(|| vendor(kind)?.current(library))?)
}

/// Tell the ordinal of the one device of a kind with this UUID. DriverUnavailableError: none, or several.
#[pyfunction]
pub(crate) fn ordinal_of(py: Python<'_>, kind: &str, library: Option<&str>, uuid: [u8; 16]) -> PyResult<u32> {
    Ok(py.detach(|| vendor(kind)?.ordinal_of(library, &uuid))?)
}
