//! The doctor's report as Python's own dicts and lists.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::doctor::{Finding, Section, examine};

/// Examines the machine, this process and the drivers. The stub documents the keys.
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
