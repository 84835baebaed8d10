//! The doctor's report as Python's own dicts and lists.
#![allow(clippy::doc_link_with_quotes)] // Python shows these comments

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::doctor::{Finding, Section, examine};

/// Examine what stands in the way of a large pin: limits, memory, pages, drivers. Makes no context on a device.
///
/// The libraries are loaded instead of the usual ones. A dict with the keys `verdict` (0: all is fine, 1: pinning
/// works, with warnings, 2: nothing can be pinned) and `sections`: dicts with `title` and `findings`, which are dicts
/// with `topic`, `fact`, `severity` ("ok", "warning", "failure") and `remedy` (or None).
///
/// >>> from pinpool._pinpool import doctor
/// >>> [section["title"] for section in doctor(None, None)["sections"]]
/// ['system', 'limits', 'pages', 'NUMA', 'trial', 'CUDA', 'Level Zero']
#[pyfunction]
pub(crate) fn doctor<'py>(
    py: Python<'py>,
    cuda_library: Option<&str>,
    level_zero_library: Option<&str>,
) -> PyResult<Bound<'py, PyDict>> {
    let named = [("cuda", cuda_library), ("xpu", level_zero_library)];
    let libraries: Vec<(&str, &str)> = named.into_iter().filter_map(|(kind, name)| Some((kind, name?))).collect();
    let report = py.detach(|| examine(&libraries));
    let dict = PyDict::new(py);
    dict.set_item("verdict", report.verdict())?;
    let sections = report.sections.iter().map(|section| section_dict(py, section));
    dict.set_item("sections", sections.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

fn section_dict<'py>(py: Python<'py>, section: &Section) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("title", section.title)?;
    let findings = section.findings.iter().map(|finding| finding_dict(py, finding));
    dict.set_item("findings", findings.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}

fn finding_dict<'py>(py: Python<'py>, finding: &Finding) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("topic", &finding.topic)?;
    dict.set_item("fact", &finding.fact)?;
    dict.set_item("severity", finding.severity.name())?;
    dict.set_item("remedy", &finding.remedy)?;
    Ok(dict)
}
