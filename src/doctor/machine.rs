//! What the facts about kernel, limits, pages and nodes mean for pinning. Pure.

use super::facts::{Facts, HugePool, Kernel, Mappings, Memlock, Memory, Numa, Pages};
use super::{Finding, Section, TRIAL, size};
use crate::error::{Error, Result};
use crate::limits::Source;

const GIB: usize = 1 << 30;
/// Offloading with less memory than this is hardly meant.
const LITTLE: usize = GIB;
/// The default of `vm.max_map_count`, four times over.
const PLENTY_OF_MAPPINGS: usize = 262_144;

const LARGER_CONTAINER: &str = "give it more: `docker run --memory=...`, the limits of a Kubernetes pod, or \
                                `systemctl set-property UNIT MemoryMax=...`";
const MORE_MEMORY: &str = "end what uses it (`ps aux --sort=-rss | head`), or use a machine with more";

/// The sections about the machine and this process.
pub(super) fn sections(facts: &Facts) -> Vec<Section> {
    vec![
        Section { title: "system", findings: system(&facts.kernel) },
        Section { title: "limits", findings: limits(facts) },
        Section { title: "pages", findings: pages(&facts.pages) },
        Section { title: "NUMA", findings: numa(&facts.numa) },
    ]
}

/// What came of pinning a few mebibytes; `None`: it was not tried, for there is too little memory.
pub(super) fn trial(facts: &Facts, result: Option<&Result<()>>) -> Finding {
    let what = format!("pin {}", size(TRIAL));
    match result {
        None => {
            let headroom = facts.memory.headroom;
            let fact = format!("not tried: the {} leaves {} only", headroom.source.text(), size(headroom.bytes));
            Finding::failure(&what, fact, shortage_remedy(headroom.source))
        }
        Some(Ok(())) => Finding::fine(&what, "mapped, locked, and given back"),
        Some(Err(error)) => Finding::failure(&what, error.to_string(), trial_remedy(error, facts)),
    }
}

fn trial_remedy(error: &Error, facts: &Facts) -> String {
    match error {
        Error::MemlockLimit { .. } => raise_memlock(&facts.memlock),
        _ if facts.kernel.has_seccomp_filter => {
            "if a seccomp filter refuses mlock: allow it in the profile (`docker run --security-opt seccomp=FILE`); \
             else raise `ulimit -v`"
                .to_owned()
        }
        _ => "raise what refuses it: `ulimit -l unlimited`, `ulimit -v unlimited`".to_owned(),
    }
}

fn shortage_remedy(source: Source) -> &'static str {
    if source == Source::ControlGroup { LARGER_CONTAINER } else { MORE_MEMORY }
}

// System

fn system(kernel: &Kernel) -> Vec<Finding> {
    let version = Finding::fine("pinpool", env!("CARGO_PKG_VERSION"));
    [Some(version), Some(release(kernel)), windows(kernel), Some(io_uring(kernel))].into_iter().flatten().collect()
}

fn release(kernel: &Kernel) -> Finding {
    let name = format!("Linux {}", kernel.name);
    match kernel.release {
        (6, 11..=13) => Finding::warning(
            "kernel",
            format!("{name}: registering more than 2 GiB with a device in one piece fails on Linux 6.11 to 6.13"),
            "update to Linux 6.14 or later; until then take blocks of at most 2 GiB",
        ),
        (1..=4, _) | (5, 0..=8) => Finding::warning(
            "kernel",
            format!("{name}: before Linux 5.9, a fork may part a process from its registered pages"),
            "update to Linux 5.9 or later; until then start workers with the spawn method",
        ),
        (5, 9..=13) => Finding::fine("kernel", format!("{name}: prefaulting is faster from Linux 5.14 on")),
        _ => Finding::fine("kernel", name),
    }
}

fn windows(kernel: &Kernel) -> Option<Finding> {
    kernel.version.to_lowercase().contains("microsoft").then(|| {
        Finding::warning(
            "WSL",
            "this Linux runs under Windows, whose drivers pin a fraction of the memory only",
            "give WSL more (`memory=` below [wsl2] in %UserProfile%\\.wslconfig, then `wsl --shutdown`); \
             register=\"try\" goes on with memory that is only locked",
        )
    })
}

/// Swapping does without it, so it is never bad.
fn io_uring(kernel: &Kernel) -> Finding {
    let off = |who: &str| {
        let fact = format!("off for {who} (kernel.io_uring_disabled); file transfers do without, at a lower speed");
        Finding::fine("io_uring", fact).hinting("as root: `sysctl -w kernel.io_uring_disabled=0`")
    };
    match kernel.io_uring_disabled {
        Some(2) => off("everybody"),
        Some(1) => off("all but root and the group of kernel.io_uring_group"),
        _ if (1..5).contains(&kernel.release.0) || kernel.release == (5, 0) => {
            Finding::fine("io_uring", "not there before Linux 5.1")
        }
        _ if kernel.has_seccomp_filter => Finding::fine(
            "io_uring",
            "not switched off, but a seccomp filter is at work here, and may refuse it (Docker's own does)",
        ),
        _ => Finding::fine("io_uring", "not switched off"),
    }
}

// Limits

fn limits(facts: &Facts) -> Vec<Finding> {
    let memory = &facts.memory;
    let optional = [address_space(memory), overcommit(memory)];
    let mut findings = vec![memlock(&facts.memlock, memory), available(memory), control_group(memory)];
    findings.extend(optional.into_iter().flatten());
    findings.extend([mappings(&facts.mappings), default_pool(memory)]);
    findings
}

fn memlock(memlock: &Memlock, memory: &Memory) -> Finding {
    let locked = format!("{} locked now", size(memlock.locked));
    if memlock.soft == usize::MAX {
        return Finding::fine("memlock", format!("no limit; {locked}"));
    }
    let limit = format!("limit {}, hard limit {}", size(memlock.soft), size(memlock.hard));
    let capability = match (memlock.has_capability, memlock.in_user_namespace) {
        (true, false) => return Finding::fine("memlock", format!("lifted by CAP_IPC_LOCK ({limit}); {locked}")),
        (true, true) => "CAP_IPC_LOCK does not count in a user namespace (a rootless container)",
        (false, _) => "no CAP_IPC_LOCK",
    };
    let fact = format!("{limit}; {capability}; {locked}");
    match memlock.soft.saturating_sub(memlock.locked) {
        left if left < TRIAL => Finding::failure("memlock", fact, raise_memlock(memlock)),
        left if left < memory.headroom.bytes => Finding::warning("memlock", fact, raise_memlock(memlock)),
        _ => Finding::fine("memlock", fact),
    }
}

fn raise_memlock(memlock: &Memlock) -> String {
    let in_shell = match memlock.hard {
        usize::MAX => "`ulimit -l unlimited` in the shell that starts the program; for good, ".to_owned(),
        hard if hard > memlock.soft => format!("`ulimit -l {}` in this shell; for more, ", hard / 1024),
        _ => String::new(),
    };
    let capability =
        if memlock.in_user_namespace { "" } else { "; or give it CAP_IPC_LOCK (`docker run --cap-add IPC_LOCK`)" };
    format!(
        "{in_shell}as root, `* - memlock unlimited` in /etc/security/limits.conf and a new login; in a container \
         `docker run --ulimit memlock=-1:-1`; in a systemd unit LimitMEMLOCK=infinity{capability}"
    )
}

fn available(memory: &Memory) -> Finding {
    let fact = format!("{} available of {}; swap does not count", size(memory.available), size(memory.total));
    if memory.available < LITTLE {
        return Finding::warning("memory", fact, MORE_MEMORY);
    }
    Finding::fine("memory", fact)
}

fn control_group(memory: &Memory) -> Finding {
    let headroom = memory.headroom;
    if headroom.source != Source::ControlGroup {
        return Finding::fine("control group", "no memory limit below what the machine has");
    }
    let fact = format!("its memory limit leaves {}, file pages not counted", size(headroom.bytes));
    if headroom.bytes < LITTLE {
        return Finding::warning("control group", fact, LARGER_CONTAINER);
    }
    Finding::fine("control group", fact).hinting(LARGER_CONTAINER)
}

fn address_space(memory: &Memory) -> Option<Finding> {
    (memory.address_space < memory.headroom.bytes).then(|| {
        let fact = format!("limited to {}, less than there is memory", size(memory.address_space));
        Finding::warning("address space", fact, "`ulimit -v unlimited` in the shell that starts the program")
    })
}

fn overcommit(memory: &Memory) -> Option<Finding> {
    let commitable = memory.commitable.filter(|&bytes| bytes < memory.headroom.bytes)?;
    let fact = format!("vm.overcommit_memory is 2, and the kernel will promise {} more only", size(commitable));
    let remedy = "as root: `sysctl -w vm.overcommit_memory=0`, or a higher vm.overcommit_ratio";
    Some(Finding::warning("overcommit", fact, remedy))
}

fn mappings(mappings: &Mappings) -> Finding {
    let fact = format!("{} in use of {} (vm.max_map_count)", mappings.used, mappings.limit);
    if mappings.used > mappings.limit / 2 {
        let more = mappings.limit.saturating_mul(4).max(PLENTY_OF_MAPPINGS);
        return Finding::warning("mappings", fact, format!("as root: `sysctl -w vm.max_map_count={more}`"));
    }
    Finding::fine("mappings", fact)
}

/// What the limits come to. Each of them has its own finding, with the remedy.
fn default_pool(memory: &Memory) -> Finding {
    let budget = memory.budget;
    Finding::fine("default pool", format!("takes up to {} ({})", size(budget.bytes), budget.source.text()))
}

// Pages

fn pages(pages: &Pages) -> Vec<Finding> {
    let base = Finding::fine("base page", size(pages.base));
    [base, transparent(pages)].into_iter().chain(pages.pools.iter().map(huge_pool)).collect()
}

fn transparent(pages: &Pages) -> Finding {
    const TOPIC: &str = "transparent huge";
    let fact = format!("{}, defrag {}", pages.transparent, pages.defrag);
    if pages.transparent == "never" {
        let remedy = "as root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`";
        return Finding::warning(TOPIC, format!("{fact}: memory is made of base pages, which takes longer"), remedy);
    }
    if pages.off_here {
        let fact = format!("{fact}, but switched off for this process (prctl PR_SET_THP_DISABLE)");
        return Finding::warning(TOPIC, fact, "start the program by something that does not switch them off");
    }
    Finding::fine(TOPIC, fact)
}

fn huge_pool(pool: &HugePool) -> Finding {
    let topic = format!("huge pages {}", pool.name);
    let file = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", pool.page / 1024);
    let remedy = |used: usize| {
        let used = if used == 0 { String::new() } else { format!("{used} + ") };
        let boot = if pool.page < GIB { "" } else { ", or hugepagesz=1G hugepages=N on the kernel's command line" };
        format!("for pages=\"{}\", as root: `echo N > {file}` (N: {used}bytes / {}){boot}", pool.name, pool.page)
    };
    match pool.total {
        None => Finding::fine(&topic, "this kernel has none of this size"),
        Some(0) => Finding::fine(&topic, "none set aside").hinting(remedy(0)),
        Some(total) if pool.free == 0 => {
            Finding::warning(&topic, format!("all {total} of them are in use"), remedy(total))
        }
        Some(total) => Finding::fine(&topic, format!("{} free of {total}", pool.free)),
    }
}

// NUMA

fn numa(numa: &Numa) -> Vec<Finding> {
    let node = |node: &super::facts::Node| {
        Finding::fine(&format!("node {}", node.id), format!("{}, {} free", size(node.total), size(node.free)))
    };
    let allowed = Finding::fine("allowed", format!("this process may have memory of node {}", numa.allowed));
    numa.nodes.iter().map(node).chain([allowed]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::super::facts::{Hardware, Node};
    use super::*;
    use crate::limits::Budget;

    const MIB: usize = 1 << 20;

    fn fine_machine() -> Facts {
        let memory = Budget { bytes: 64 * GIB, source: Source::Machine };
        Facts {
            kernel: Kernel {
                name: "6.14.0".to_owned(),
                release: (6, 14),
                version: "Linux version 6.14.0".to_owned(),
                io_uring_disabled: Some(0),
                has_seccomp_filter: false,
            },
            memlock: Memlock {
                soft: usize::MAX,
                hard: usize::MAX,
                locked: 3 * MIB,
                has_capability: false,
                in_user_namespace: false,
            },
            memory: Memory {
                total: 128 * GIB,
                available: 64 * GIB,
                headroom: memory,
                budget: memory,
                address_space: usize::MAX,
                commitable: None,
            },
            mappings: Mappings { used: 100, limit: 65_530 },
            pages: Pages {
                base: 4096,
                transparent: "madvise".to_owned(),
                defrag: "defer".to_owned(),
                off_here: false,
                pools: vec![HugePool { name: "2m", page: 2 * MIB, free: 0, total: Some(0) }],
            },
            numa: Numa { nodes: vec![Node { id: 1, total: 64 * GIB, free: 32 * GIB }], allowed: "0-1".to_owned() },
            hardware: Hardware::default(),
        }
    }

    /// The one finding on a topic, of a machine that differs from a fine one.
    fn finding(topic: &str, change: impl FnOnce(&mut Facts)) -> Finding {
        let mut facts = fine_machine();
        change(&mut facts);
        let findings: Vec<Finding> = sections(&facts).into_iter().flat_map(|section| section.findings).collect();
        let bad = |finding: &&Finding| finding.severity > Severity::Ok && finding.topic != topic;
        assert_eq!(findings.iter().find(bad), None, "only {topic} is to be bad");
        findings.into_iter().find(|finding| finding.topic == topic).expect("there is such a finding")
    }

    #[track_caller]
    fn assert_bad(finding: &Finding, severity: Severity, fact: &str, remedy: &str) {
        assert_eq!(finding.severity, severity, "{finding:?}");
        assert!(finding.fact.contains(fact), "{fact} is missing in {finding:?}");
        assert!(
            finding.remedy.as_ref().is_some_and(|text| text.contains(remedy)),
            "{remedy} is missing in {finding:?}"
        );
    }

    #[test]
    fn a_fine_machine_is_told_all_and_warned_of_nothing() {
        let findings: Vec<Finding> = sections(&fine_machine()).into_iter().flat_map(|part| part.findings).collect();
        assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:?}");
        let text = format!("{findings:?}");
        for part in [
            "no limit; 3 MiB locked now",
            "64 GiB available of 128 GiB",
            "takes up to 64 GiB",
            "4 KiB",
            "madvise, defrag defer",
            "none set aside",
            "64 GiB, 32 GiB free",
            "node 0-1",
            "100 in use of 65530",
        ] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
    }

    #[test]
    fn a_memlock_limit_below_the_memory_is_a_warning_and_next_to_none_a_failure() {
        let limited = |soft, hard| finding("memlock", |facts| (facts.memlock.soft, facts.memlock.hard) = (soft, hard));
        assert_bad(&limited(8 * MIB, 8 * MIB), Severity::Warning, "limit 8 MiB, hard limit 8 MiB", "limits.conf");
        assert_bad(&limited(8 * MIB, GIB), Severity::Warning, "hard limit 1 GiB", "`ulimit -l 1048576`");
        assert_bad(&limited(8 * MIB, usize::MAX), Severity::Warning, "no CAP_IPC_LOCK", "`ulimit -l unlimited`");
        assert_bad(&limited(6 * MIB, 6 * MIB), Severity::Failure, "3 MiB locked", "--ulimit memlock=-1:-1");
        assert_bad(&limited(0, 0), Severity::Failure, "limit 0 bytes", "--cap-add IPC_LOCK");
        assert_eq!(limited(100 * GIB, 100 * GIB).severity, Severity::Ok);
    }

    #[test]
    fn the_capability_lifts_the_limit_outside_of_user_namespaces() {
        let capable = |inside| {
            finding("memlock", |facts| {
                facts.memlock.soft = 8 * MIB;
                (facts.memlock.has_capability, facts.memlock.in_user_namespace) = (true, inside);
            })
        };
        assert_eq!(capable(false).severity, Severity::Ok);
        assert_bad(&capable(true), Severity::Warning, "rootless container", "memlock=-1:-1");
        assert!(!capable(true).remedy.expect("as above").contains("CAP_IPC_LOCK"));
    }

    #[test]
    fn little_memory_is_a_warning() {
        let low = finding("memory", |facts| facts.memory.available = 10 * MIB);
        assert_bad(&low, Severity::Warning, "10 MiB available", "end what uses it");
        let group = |bytes| {
            let headroom = Budget { bytes, source: Source::ControlGroup };
            finding("control group", |facts| facts.memory.headroom = headroom)
        };
        assert_bad(&group(100 * MIB), Severity::Warning, "leaves 100 MiB", "docker run --memory");
        assert_eq!(group(2 * GIB).severity, Severity::Ok);
    }

    #[test]
    fn the_other_limits_have_their_remedies() {
        let space = finding("address space", |facts| facts.memory.address_space = GIB);
        assert_bad(&space, Severity::Warning, "limited to 1 GiB", "ulimit -v unlimited");
        let strict = finding("overcommit", |facts| facts.memory.commitable = Some(GIB));
        assert_bad(&strict, Severity::Warning, "1 GiB more only", "vm.overcommit_memory=0");
        let many = finding("mappings", |facts| facts.mappings.used = 40_000);
        assert_bad(&many, Severity::Warning, "40000 in use of 65530", "vm.max_map_count=262144");
    }

    #[test]
    fn some_kernels_are_warned_of() {
        let kernel = |release| finding("kernel", |facts| facts.kernel.release = release);
        for minor in 11..=13 {
            assert_bad(&kernel((6, minor)), Severity::Warning, "more than 2 GiB", "6.14");
        }
        assert_bad(&kernel((5, 8)), Severity::Warning, "fork", "spawn");
        for release in [(5, 9), (5, 14), (6, 10), (6, 14), (7, 11), (0, 0)] {
            assert_eq!(kernel(release).severity, Severity::Ok);
        }
    }

    #[test]
    fn wsl_is_recognized() {
        let version = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x)";
        let wsl = finding("WSL", |facts| version.clone_into(&mut facts.kernel.version));
        assert_bad(&wsl, Severity::Warning, "Windows", ".wslconfig");
    }

    #[test]
    fn io_uring_is_told_of_and_never_bad() {
        let fact = |change: fn(&mut Kernel)| finding("io_uring", |facts| change(&mut facts.kernel)).fact;
        assert!(fact(|kernel| kernel.io_uring_disabled = Some(2)).contains("off for everybody"));
        assert!(fact(|kernel| kernel.io_uring_disabled = Some(1)).contains("io_uring_group"));
        assert!(fact(|kernel| kernel.has_seccomp_filter = true).contains("seccomp"));
        assert_eq!(fact(|kernel| kernel.io_uring_disabled = None), "not switched off");
    }

    #[test]
    fn huge_pages_have_their_remedies() {
        let never = finding("transparent huge", |facts| facts.pages.transparent = "never".to_owned());
        assert_bad(&never, Severity::Warning, "never", "echo madvise >");
        let off = finding("transparent huge", |facts| facts.pages.off_here = true);
        assert_bad(&off, Severity::Warning, "prctl", "switch them off");
        let pool = |total| finding("huge pages 2m", |facts| facts.pages.pools[0].total = total);
        let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
        assert_bad(&pool(Some(7)), Severity::Warning, "all 7", &format!("`echo N > {file}` (N: 7 + bytes / 2097152)"));
        assert_bad(&pool(Some(0)), Severity::Ok, "none set aside", file);
        assert_eq!(pool(None).remedy, None);
    }

    #[test]
    fn a_trial_that_fails_says_why_and_what_helps() {
        let mut facts = fine_machine();
        let refusal = Error::MemlockLimit { wanted: TRIAL, locked: 0, soft: 0, hard: 0 };
        assert_bad(&trial(&facts, Some(&Err(refusal))), Severity::Failure, "RLIMIT_MEMLOCK", "limits.conf");
        let refused = || Error::Os { call: "mlock", bytes: TRIAL, source: std::io::ErrorKind::PermissionDenied.into() };
        assert_bad(&trial(&facts, Some(&Err(refused()))), Severity::Failure, "mlock of", "ulimit -v");
        facts.kernel.has_seccomp_filter = true;
        assert_bad(&trial(&facts, Some(&Err(refused()))), Severity::Failure, "mlock of", "seccomp=FILE");
        facts.memory.headroom = Budget { bytes: MIB, source: Source::ControlGroup };
        assert_bad(&trial(&facts, None), Severity::Failure, "leaves 1 MiB only", "docker run --memory");
        assert_eq!(trial(&facts, Some(&Ok(()))).severity, Severity::Ok);
    }
}
