//! What the doctor looks at, as `/proc`, `/sys` and the limits say. No judgement here; what cannot be read is missing
//! or zero.

use std::fs;
use std::path::Path;

use super::MIB;
use crate::limits::{self, Budget};
use crate::os;

/// All that is read. Sizes are in bytes.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) kernel: Kernel,
    pub(super) memlock: Memlock,
    pub(super) memory: Memory,
    pub(super) mappings: Mappings,
    pub(super) pages: Pages,
    pub(super) numa: Numa,
    pub(super) hardware: Hardware,
}

#[derive(Clone, Debug)]
pub(super) struct Kernel {
    /// "6.18.44-generic".
    pub(super) name: String,
    /// Its first two numbers; zeros where they cannot be read.
    pub(super) release: (u32, u32),
    /// `/proc/version`.
    pub(super) version: String,
    /// The sysctl `kernel.io_uring_disabled` (Linux 6.6 and later).
    pub(super) io_uring_disabled: Option<u32>,
    /// A seccomp filter answers some of this process's system calls, nobody can tell which.
    pub(super) has_seccomp_filter: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Memlock {
    pub(super) soft: usize,
    pub(super) hard: usize,
    pub(super) locked: usize,
    pub(super) has_capability: bool,
    /// In a user namespace of its own, a process has capabilities that the kernel does not count for locking.
    pub(super) in_user_namespace: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Memory {
    pub(super) total: usize,
    pub(super) available: usize,
    /// The least of what the machine and the control groups leave.
    pub(super) headroom: Budget,
    /// What a pool without `max_bytes` would take.
    pub(super) budget: Budget,
    /// `RLIMIT_AS`.
    pub(super) address_space: usize,
    /// What may still be promised, where the kernel keeps to what it promises (`vm.overcommit_memory` is 2).
    pub(super) commitable: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Mappings {
    pub(super) used: usize,
    pub(super) limit: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Pages {
    pub(super) base: usize,
    /// The kernel's words for its settings.
    pub(super) transparent: String,
    pub(super) defrag: String,
    /// Transparent huge pages are switched off for this process (`prctl`).
    pub(super) off_here: bool,
    pub(super) pools: Vec<HugePool>,
}

/// The kernel's own pool of huge pages of one size.
#[derive(Clone, Debug)]
pub(super) struct HugePool {
    /// The name that `pages=` has for them.
    pub(super) name: &'static str,
    pub(super) page: usize,
    pub(super) free: usize,
    /// `None`: this kernel has no pages of this size.
    pub(super) total: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Numa {
    /// Nodes that have memory.
    pub(super) nodes: Vec<Node>,
    /// The nodes whose memory this process may have, as the kernel lists them.
    pub(super) allowed: String,
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) id: u32,
    pub(super) total: usize,
    pub(super) free: usize,
}

/// Signs of accelerators that need no driver library.
#[derive(Clone, Debug, Default)]
pub(super) struct Hardware {
    /// Display and compute controllers on the PCI bus: vendor and address.
    pub(super) controllers: Vec<(u32, String)>,
    /// The first line of `/proc/driver/nvidia/version`.
    pub(super) nvidia_module: Option<String>,
}

impl Facts {
    pub(super) fn read() -> Self {
        let status = text("/proc/self/status");
        Self {
            kernel: Kernel::read(&status),
            memlock: Memlock::read(),
            memory: Memory::read(),
            mappings: Mappings::read(),
            pages: Pages::read(&status),
            numa: Numa::read(&status),
            hardware: Hardware::read(Path::new("/sys/bus/pci/devices")),
        }
    }
}

impl Kernel {
    fn read(status: &str) -> Self {
        Self {
            name: text("/proc/sys/kernel/osrelease").trim().to_owned(),
            release: limits::kernel_release(),
            version: text("/proc/version"),
            io_uring_disabled: number("/proc/sys/kernel/io_uring_disabled"),
            has_seccomp_filter: field(status, "Seccomp:") == Some("2"),
        }
    }
}

impl Memlock {
    fn read() -> Self {
        let (soft, hard) = os::memlock_limit();
        Self {
            soft,
            hard,
            locked: limits::locked_bytes(),
            has_capability: limits::has_lock_capability(),
            in_user_namespace: limits::in_user_namespace(),
        }
    }
}

impl Memory {
    fn read() -> Self {
        let table = text("/proc/meminfo");
        let strict = number::<u32>("/proc/sys/vm/overcommit_memory") == Some(2);
        let committed = bytes_of(&table, "Committed_AS:").unwrap_or(0);
        let commitable = bytes_of(&table, "CommitLimit:").map(|limit| limit.saturating_sub(committed));
        Self {
            total: bytes_of(&table, "MemTotal:").unwrap_or(0),
            available: bytes_of(&table, "MemAvailable:").unwrap_or(0),
            headroom: limits::memory_headroom(),
            budget: limits::default_budget(),
            address_space: soft_limit(&text("/proc/self/limits"), "Max address space"),
            commitable: commitable.filter(|_| strict),
        }
    }
}

/// A soft limit as `/proc/self/limits` lists it; "unlimited" is the largest number.
fn soft_limit(table: &str, name: &str) -> usize {
    field(table, name).and_then(|soft| soft.parse().ok()).unwrap_or(usize::MAX)
}

impl Mappings {
    fn read() -> Self {
        let limit = number("/proc/sys/vm/max_map_count").unwrap_or(usize::MAX);
        Self { used: text("/proc/self/maps").lines().count(), limit }
    }
}

impl Pages {
    fn read(status: &str) -> Self {
        Self {
            base: os::page_size(),
            transparent: limits::transparent_huge_pages().1,
            defrag: chosen(&text("/sys/kernel/mm/transparent_hugepage/defrag")).to_owned(),
            off_here: field(status, "THP_enabled:") == Some("0"),
            pools: [("2m", 2 * MIB), ("1g", 1024 * MIB)].map(|(name, page)| HugePool::read(name, page)).into(),
        }
    }
}

/// The word in brackets, as the kernel marks the one choice of several.
fn chosen(text: &str) -> &str {
    text.split(['[', ']']).nth(1).unwrap_or("unknown")
}

impl HugePool {
    fn read(name: &'static str, page: usize) -> Self {
        let total = number(&format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", page / 1024));
        Self { name, page, free: limits::free_huge_pages(page), total }
    }
}

impl Numa {
    fn read(status: &str) -> Self {
        let nodes = node_ids(&limits::memory_nodes()).into_iter().map(Node::read).collect();
        Self { nodes, allowed: field(status, "Mems_allowed_list:").unwrap_or("all").to_owned() }
    }
}

/// The numbers of a kernel list like "0-2,5".
fn node_ids(list: &str) -> Vec<u32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

impl Node {
    fn read(id: u32) -> Self {
        let table = text(&format!("/sys/devices/system/node/node{id}/meminfo"));
        let bytes = |name: &str| bytes_of(&table, &format!("Node {id} {name}")).unwrap_or(0);
        Self { id, total: bytes("MemTotal:"), free: bytes("MemFree:") }
    }
}

impl Hardware {
    fn read(bus: &Path) -> Self {
        let entries = fs::read_dir(bus).into_iter().flatten().flatten();
        let mut controllers: Vec<_> = entries.filter_map(|entry| controller(&entry.path())).collect();
        controllers.sort();
        let module = fs::read_to_string("/proc/driver/nvidia/version").ok();
        Self { controllers, nvidia_module: module.and_then(|text| text.lines().next().map(str::to_owned)) }
    }
}

/// Vendor and address of a PCI device, if it is a display controller or an accelerator.
fn controller(device: &Path) -> Option<(u32, String)> {
    const DISPLAY: u32 = 0x03;
    const ACCELERATOR: u32 = 0x12;
    let hex = |name: &str| {
        let text = fs::read_to_string(device.join(name)).ok()?;
        u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
    };
    let class = hex("class")? >> 16;
    (class == DISPLAY || class == ACCELERATOR).then_some(())?;
    Some((hex("vendor")?, device.file_name()?.to_string_lossy().into_owned()))
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn number<T: std::str::FromStr>(path: &str) -> Option<T> {
    text(path).trim().parse().ok()
}

/// The first word behind a name at a line's start.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()
}

/// A field in bytes, where the file says kB.
fn bytes_of(table: &str, name: &str) -> Option<usize> {
    field(table, name)?.parse::<usize>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_and_choices_are_read() {
        assert_eq!(node_ids("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(node_ids(""), Vec::<u32>::new());
        assert_eq!(chosen("always defer [madvise] never\n"), "madvise");
        assert_eq!(chosen(""), "unknown");
    }

    #[test]
    fn tables_are_read() {
        assert_eq!(bytes_of("Node 0 MemTotal:       32 kB\nNode 0 MemFree: 3 kB\n", "Node 0 MemFree:"), Some(3072));
        let table = "Max stack size            8388608              unlimited            bytes\n\
                     Max address space         unlimited            unlimited            bytes\n";
        assert_eq!(soft_limit(table, "Max address space"), usize::MAX);
        assert_eq!(soft_limit(table, "Max stack size"), 8 << 20);
    }

    #[test]
    fn display_controllers_and_accelerators_are_found_on_the_bus() {
        let bus = std::env::temp_dir().join(format!("pinpool-{}-pci", std::process::id()));
        for (address, class, vendor) in [
            ("0000:17:00.0", "0x030200", "0x10de"),
            ("0000:00:02.0", "0x030000", "0x8086"),
            ("a", "0x020000", "0x8086"),
        ] {
            fs::create_dir_all(bus.join(address)).expect("mkdir");
            fs::write(bus.join(address).join("class"), format!("{class}\n")).expect("write");
            fs::write(bus.join(address).join("vendor"), format!("{vendor}\n")).expect("write");
        }
        let found = Hardware::read(&bus).controllers;
        assert_eq!(found, [(0x10de, "0000:17:00.0".to_owned()), (0x8086, "0000:00:02.0".to_owned())]);
        fs::remove_dir_all(bus).expect("cleanup");
    }

    #[test]
    fn this_machine_has_facts() {
        let facts = Facts::read();
        assert!(facts.memory.total >= facts.memory.available && facts.memory.available > 0);
        assert!(facts.mappings.used > 0 && facts.mappings.used < facts.mappings.limit);
        assert!(facts.numa.nodes.iter().any(|node| node.total > 0) || facts.numa.nodes.is_empty());
        assert!(facts.pages.base.is_power_of_two() && !facts.kernel.name.is_empty());
    }
}
