//! What the drivers answer, and what that means for registering. Pure.

use super::facts::Hardware;
use super::{Finding, Section, Severity};
use crate::driver::{Found, Method, Vendor};
use crate::error::{Error, Result};

/// What helps with a driver. One entry a vendor; a vendor without one gets general words.
struct Advice {
    kind: &'static str,
    /// The vendor's number on the PCI bus.
    pci: u32,
    /// There is no library, or no device.
    missing: &'static str,
    /// It is there and does not start.
    failing: &'static str,
    /// A device is there and no memory can be registered with it.
    refusing: &'static str,
}

const ADVICE: [Advice; 2] = [
    Advice {
        kind: "cuda",
        pci: 0x10de,
        missing: "for an NVIDIA GPU: install its driver (Debian: nvidia-driver and libcuda1; Ubuntu: `ubuntu-drivers \
                  install`); a container gets it from the host: nvidia-container-toolkit there, and `docker run --gpus \
                  all`; see that CUDA_VISIBLE_DEVICES hides no device",
        failing: "see whether `nvidia-smi` works; after an update reload the kernel module or reboot; in a container \
                  start with `docker run --gpus all`",
        refusing: "devices=None locks the memory only; register=\"try\" goes on without a registration",
    },
    Advice {
        kind: "xpu",
        pci: 0x8086,
        missing: "for an Intel GPU: `apt install libze1 intel-opencl-icd` (Debian), or libze1 and libze-intel-gpu1 \
                  (Intel's repository: intel-level-zero-gpu); a container needs `docker run --device /dev/dri`",
        failing: "install the GPU's driver (`apt install intel-opencl-icd`; Intel's repository: libze-intel-gpu1 or \
                  intel-level-zero-gpu); let this user open the device (`ls -l /dev/dri`, `usermod -aG render USER` \
                  and a new login); in a container `docker run --device /dev/dri`",
        refusing: "update the GPU's driver to 25.44 or later; devices=None locks the memory only",
    },
];

const GENERAL: Advice = Advice {
    kind: "",
    pci: 0,
    missing: "for such a device: install its driver, with the library of that name",
    failing: "see what the vendor's own tools say",
    refusing: "devices=None locks the memory only",
};

fn advice(vendor: &Vendor) -> &'static Advice {
    ADVICE.iter().find(|advice| advice.kind == vendor.kind).unwrap_or(&GENERAL)
}

/// What a vendor's driver answered when it was asked for its devices. `library`: what was loaded instead of the usual.
pub(super) fn section(
    vendor: &Vendor,
    library: Option<&str>,
    answer: &Result<Vec<Found>>,
    hardware: &Hardware,
) -> Section {
    let advice = advice(vendor);
    let signs = signs(advice, hardware);
    let mut findings = match answer {
        Ok(found) => started(library.unwrap_or(vendor.library), found, advice, &signs),
        Err(error) => vec![refused(library.is_some(), error, advice, &signs)],
    };
    if !signs.is_empty() {
        findings.push(Finding::fine("hardware", signs.join("; ")));
    }
    Section { title: vendor.title, findings }
}

fn started(library: &str, found: &[Found], advice: &Advice, signs: &[String]) -> Vec<Finding> {
    let count = match found.len() {
        0 => "no device".to_owned(),
        1 => "1 device".to_owned(),
        count => format!("{count} devices"),
    };
    let fact = format!("{library} loaded, {count}");
    let severity = if found.is_empty() && !signs.is_empty() { Severity::Warning } else { Severity::Ok };
    let remedy = found.is_empty().then(|| advice.missing.to_owned());
    let library = Finding::new("library", severity, fact, remedy);
    std::iter::once(library).chain(found.iter().map(|device| describe(device, advice))).collect()
}

/// No driver is fine where nothing asks for one: nobody named a library, and no hardware is to be seen.
fn refused(named: bool, error: &Error, advice: &Advice, signs: &[String]) -> Finding {
    let (reason, absent) = match error {
        Error::DriverUnavailable { reason, absent, .. } => (reason.clone(), *absent),
        other => (other.to_string(), false),
    };
    if !absent {
        return Finding::warning("library", reason, advice.failing);
    }
    let severity = if named || !signs.is_empty() { Severity::Warning } else { Severity::Ok };
    Finding::new("library", severity, reason, Some(advice.missing.to_owned()))
}

fn describe(device: &Found, advice: &Advice) -> Finding {
    let topic = device.id.to_string();
    let who = format!("{}, UUID {}", device.name, uuid(device.id.uuid));
    match &device.method {
        Ok(Method::Import) => {
            let fact = format!("{who}; registers by {} only, which has to be asked for", Method::Import.call());
            Finding::warning(&topic, fact, advice.refusing)
        }
        Ok(method) => Finding::fine(&topic, format!("{who}; registers by {}", method.call())),
        Err(why) => Finding::warning(&topic, format!("{who}; registers no memory: {why}"), advice.refusing),
    }
}

/// As `nvidia-smi` and torch write them.
fn uuid(bytes: [u8; 16]) -> String {
    let hex = bytes.map(|byte| format!("{byte:02x}")).concat();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// What tells of a vendor's devices without its driver.
fn signs(advice: &Advice, hardware: &Hardware) -> Vec<String> {
    // Intel's graphics in the CPU is always there, and no reason to warn anybody who has no driver for it.
    let is_extra = |address: &str| advice.kind != "xpu" || !address.ends_with(":00:02.0");
    let of_vendor = hardware.controllers.iter().filter(|(vendor, address)| *vendor == advice.pci && is_extra(address));
    let addresses: Vec<&str> = of_vendor.map(|(_, address)| address.as_str()).collect();
    let bus = (!addresses.is_empty()).then(|| format!("on the PCI bus at {}", addresses.join(", ")));
    let module = hardware.nvidia_module.as_ref().filter(|_| advice.kind == "cuda");
    bus.into_iter().chain(module.cloned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{DeviceId, VENDORS};

    fn hardware(vendor: u32, address: &str) -> Hardware {
        Hardware { controllers: vec![(vendor, address.to_owned())], nvidia_module: None }
    }

    fn unavailable(absent: bool) -> Error {
        Error::DriverUnavailable { driver: "any", reason: "it is so".to_owned(), absent }
    }

    fn found(method: std::result::Result<Method, String>) -> Vec<Found> {
        let uuid = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255];
        vec![Found { id: DeviceId { kind: "cuda", ordinal: 0, uuid }, name: "H200".to_owned(), method }]
    }

    fn findings(
        vendor: usize,
        library: Option<&str>,
        answer: &Result<Vec<Found>>,
        hardware: &Hardware,
    ) -> Vec<Finding> {
        section(VENDORS[vendor], library, answer, hardware).findings
    }

    #[test]
    fn no_driver_is_fine_and_says_what_to_install() {
        for vendor in 0..VENDORS.len() {
            let first = findings(vendor, None, &Err(unavailable(true)), &Hardware::default()).remove(0);
            assert_eq!((first.severity, first.fact.as_str()), (Severity::Ok, "it is so"));
            assert!(first.remedy.expect("how to get one").contains("install"));
        }
    }

    #[test]
    fn no_driver_is_a_warning_where_somebody_counts_on_one() {
        let there = [hardware(0x10de, "0000:17:00.0"), hardware(0x8086, "0000:3a:00.0")];
        for (vendor, hardware) in there.iter().enumerate() {
            let found = findings(vendor, None, &Err(unavailable(true)), hardware);
            assert_eq!(found[0].severity, Severity::Warning);
            assert!(found[1].fact.contains("on the PCI bus at 0000:"), "{found:?}");
        }
        let named = findings(0, Some("mine.so"), &Err(unavailable(true)), &Hardware::default());
        assert_eq!(named[0].severity, Severity::Warning);
    }

    #[test]
    fn graphics_in_the_cpu_and_other_vendors_are_no_reason_to_warn() {
        for other in [hardware(0x8086, "0000:00:02.0"), hardware(0x1a03, "0000:17:00.0")] {
            let found = findings(1, None, &Err(unavailable(true)), &other);
            assert_eq!((found.len(), found[0].severity), (1, Severity::Ok));
        }
    }

    #[test]
    fn a_driver_that_fails_is_a_warning() {
        let cuda = findings(0, None, &Err(unavailable(false)), &Hardware::default()).remove(0);
        assert_eq!(cuda.severity, Severity::Warning);
        assert!(cuda.remedy.expect("as every warning").contains("nvidia-smi"));
        let xpu = findings(1, None, &Err(unavailable(false)), &Hardware::default()).remove(0);
        assert!(xpu.remedy.expect("as every warning").contains("intel-opencl-icd"));
        let other = findings(0, None, &Err(Error::Closed), &Hardware::default()).remove(0);
        assert_eq!((other.severity, other.fact), (Severity::Warning, Error::Closed.to_string()));
    }

    #[test]
    fn devices_are_told_with_uuid_and_method() {
        let fine = findings(0, None, &Ok(found(Ok(Method::HostRegister))), &Hardware::default());
        assert_eq!(fine[0].fact, "libcuda.so.1 loaded, 1 device");
        let fact = "H200, UUID 00010203-0405-0607-0809-0a0b0c0d0eff; registers by cuMemHostRegister";
        assert_eq!((fine[1].topic.as_str(), fine[1].fact.as_str(), fine[1].severity), ("cuda:0", fact, Severity::Ok));
    }

    #[test]
    fn a_device_that_refuses_is_a_warning_with_the_reason() {
        let refusing = findings(0, None, &Ok(found(Err("it cannot".to_owned()))), &Hardware::default()).remove(1);
        assert_eq!(refusing.severity, Severity::Warning);
        assert!(refusing.fact.ends_with("registers no memory: it cannot") && refusing.remedy.is_some());
        let import = findings(1, None, &Ok(found(Ok(Method::Import))), &Hardware::default()).remove(1);
        assert_eq!(import.severity, Severity::Warning);
    }

    #[test]
    fn a_driver_without_devices_is_a_warning_only_where_there_are_some() {
        let idle = findings(0, Some("mine.so"), &Ok(vec![]), &Hardware::default()).remove(0);
        assert_eq!((idle.fact.as_str(), idle.severity), ("mine.so loaded, no device", Severity::Ok));
        let module = Hardware { nvidia_module: Some("NVRM version: 580".to_owned()), ..Hardware::default() };
        let hidden = findings(0, None, &Ok(vec![]), &module);
        assert_eq!((hidden[0].severity, hidden[1].fact.as_str()), (Severity::Warning, "NVRM version: 580"));
    }
}
