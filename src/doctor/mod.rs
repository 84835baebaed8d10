//! The doctor: what stands in the way of a large pin on this machine, and what helps.
//!
//! [`examine`] reads `/proc` and `/sys`, asks each driver for its devices (no context is made on any), and pins a few
//! mebibytes for a moment. `facts` reads, `machine` and `drivers` judge, and nothing here prints.

mod drivers;
mod facts;
mod machine;

use std::ops::ControlFlow;

use crate::driver::{Registering, VENDORS};
use crate::error::Result;
use crate::pinned::{Pinned, Released};
use crate::region::RegionOptions;
use facts::Facts;

const MIB: usize = 1 << 20;
/// What the trial pins.
const TRIAL: usize = 4 * MIB;

/// What the doctor found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The findings, by subject.
    pub sections: Vec<Section>,
}

/// The findings on one subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// The subject: "limits", "pages", or a driver's name.
    pub title: &'static str,
    /// In the order in which to read them.
    pub findings: Vec<Finding>,
}

/// One fact, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What it is about, in a word or two.
    pub topic: String,
    /// What is the case.
    pub fact: String,
    /// How bad it is.
    pub severity: Severity,
    /// What helps: always there for a warning and a failure. Beside a fact that is fine, it is how to get more.
    pub remedy: Option<String>,
}

/// How bad a fact is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Fine, or of no consequence.
    Ok,
    /// Pinning works, but less of it, slower, or without a device that is there.
    Warning,
    /// Nothing can be pinned.
    Failure,
}

impl Severity {
    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failure => "failure",
        }
    }
}

impl Report {
    /// 0: all is fine. 1: pinning works, with warnings. 2: nothing can be pinned.
    pub fn verdict(&self) -> u8 {
        let findings = self.sections.iter().flat_map(|section| &section.findings);
        match findings.map(|finding| finding.severity).max() {
            None | Some(Severity::Ok) => 0,
            Some(Severity::Warning) => 1,
            Some(Severity::Failure) => 2,
        }
    }
}

impl Finding {
    fn new(topic: &str, severity: Severity, fact: impl Into<String>, remedy: Option<String>) -> Self {
        Self { topic: topic.to_owned(), fact: fact.into(), severity, remedy }
    }

    fn fine(topic: &str, fact: impl Into<String>) -> Self {
        Self::new(topic, Severity::Ok, fact, None)
    }

    fn warning(topic: &str, fact: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(topic, Severity::Warning, fact, Some(remedy.into()))
    }

    fn failure(topic: &str, fact: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(topic, Severity::Failure, fact, Some(remedy.into()))
    }

    /// The same with a hint at how to get more.
    fn hinting(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// Examines the machine, the process and the drivers. `libraries`: for a kind of device ("cuda", "xpu"), the library to
/// load instead of the usual one.
pub fn examine(libraries: &[(&str, &str)]) -> Report {
    let facts = Facts::read();
    let trial = enough_for_a_trial(facts.memory.headroom.bytes).then(try_to_pin);
    let mut sections = machine::sections(&facts);
    sections.push(Section { title: "trial", findings: vec![machine::trial(&facts, trial.as_ref())] });
    sections.extend(VENDORS.into_iter().map(|vendor| {
        let library = libraries.iter().find(|(kind, _)| *kind == vendor.kind).map(|&(_, library)| library);
        drivers::section(vendor, library, &vendor.find(library), &facts.hardware)
    }));
    Report { sections }
}

/// Whether trying is safe: whoever runs a machine or a control group out of memory may be killed for it.
fn enough_for_a_trial(headroom: usize) -> bool {
    headroom >= 8 * TRIAL
}

fn try_to_pin() -> Result<()> {
    let options = RegionOptions { threads: Some(1), ..RegionOptions::default() };
    let mut go_on = |_, _| ControlFlow::Continue(());
    let pinned = Pinned::allocate(TRIAL, &options, &Registering::NONE, &mut go_on).map_err(|refused| refused.error)?;
    match pinned.release()? {
        Released::Gone => Ok(()),
        Released::Lingering(_) => unreachable!("no driver knows the range"),
    }
}

/// A number of bytes in the largest unit that it fills.
fn size(bytes: usize) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes == usize::MAX {
        return "unlimited".to_owned();
    }
    let power = (bytes.max(1).ilog2() / 10) as usize;
    if power == 0 {
        return format!("{bytes} bytes");
    }
    let power = power.min(UNITS.len());
    let value = bytes as f64 / (1_u64 << (10 * power)) as f64;
    let decimals = usize::from(value.fract() != 0.0);
    format!("{value:.decimals$} {}", UNITS[power - 1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    #[test]
    fn sizes_are_short() {
        assert_eq!(size(0), "0 bytes");
        assert_eq!(size(1023), "1023 bytes");
        assert_eq!(size(8 * MIB), "8 MiB");
        assert_eq!(size(3 << 29), "1.5 GiB");
        assert_eq!(size(usize::MAX), "unlimited");
        assert_eq!(size(usize::MAX - 1), "16384 PiB");
    }

    #[test]
    fn the_worst_finding_is_the_verdict() {
        let report = |findings| Report { sections: vec![Section { title: "any", findings }] };
        let (fine, warning) = (Finding::fine("a", "b"), Finding::warning("a", "b", "c"));
        assert_eq!(report(vec![]).verdict(), 0);
        assert_eq!(report(vec![fine.clone().hinting("d")]).verdict(), 0);
        assert_eq!(report(vec![warning.clone(), fine.clone()]).verdict(), 1);
        assert_eq!(report(vec![warning, Finding::failure("a", "b", "c"), fine]).verdict(), 2);
    }

    #[test]
    fn a_library_that_is_named_and_not_there_is_reported_in_words() {
        let report = examine(&[("cuda", "/no/such/library.so"), ("xpu", "/nor/this/one.so")]);
        for (title, library) in [("CUDA", "/no/such/library.so"), ("Level Zero", "/nor/this/one.so")] {
            let section = report.sections.iter().find(|section| section.title == title).expect("one for each driver");
            assert_eq!(section.findings[0].topic, "library");
            assert!(section.findings[0].fact.contains(library), "{section:?}");
        }
    }

    #[test]
    fn whatever_is_bad_here_has_a_remedy_and_nothing_stays_pinned() {
        let before = limits::locked_bytes();
        let report = examine(&[]);
        let findings = report.sections.iter().flat_map(|section| &section.findings);
        let bad = findings.filter(|finding| finding.severity > Severity::Ok);
        assert!(bad.clone().all(|finding| finding.remedy.is_some()), "{report:?}");
        assert!(limits::locked_bytes() <= before + TRIAL, "other tests aside");
    }
}
