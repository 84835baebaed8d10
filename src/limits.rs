//! How much this process may lock: the memlock limit, the control group's and the machine's memory, read from `/proc`
//! and `/sys`. Swap never counts.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::os;

/// A number of bytes and where it comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Bytes.
    pub(crate) bytes: usize,
    /// What sets it.
    pub(crate) source: Source,
}

/// What sets a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The caller's `max_bytes`.
    Caller,
    /// `RLIMIT_MEMLOCK` less what is locked already.
    Memlock,
    /// The control group's limit less what it uses, file pages not counted.
    ControlGroup,
    /// `MemAvailable`.
    Machine,
    /// What the pool's NUMA node has free.
    Node,
}

impl Source {
    /// The source in words, for an error's text.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Caller => "max_bytes",
            Self::Memlock => "RLIMIT_MEMLOCK",
            Self::ControlGroup => "memory limit of the control group",
            Self::Machine => "available memory of this machine",
            Self::Node => "free memory of the NUMA node",
        }
    }
}

/// A pool without `max_bytes` takes at most this share of the memory that is there, in percent.
const DEFAULT_SHARE: usize = 90;

/// The budget of a pool whose caller names none.
pub(crate) fn default_budget() -> Budget {
    let memory = memory_headroom();
    let memory = Budget { bytes: memory.bytes / 100 * DEFAULT_SHARE, ..memory };
    match memlock_headroom() {
        Some(bytes) if bytes < memory.bytes => Budget { bytes, source: Source::Memlock },
        _ => memory,
    }
}

/// Bytes that this process may still lock; `None` where nothing limits it.
pub(crate) fn memlock_headroom() -> Option<usize> {
    let (soft, _) = os::memlock_limit();
    (soft != usize::MAX && !may_lock_without_limit()).then(|| soft.saturating_sub(locked_bytes()))
}

/// Bytes of memory that can be had without touching swap or being killed for it.
pub(crate) fn memory_headroom() -> Budget {
    let machine = proc_field("/proc/meminfo", "MemAvailable:").unwrap_or(usize::MAX);
    let machine = Budget { bytes: machine, source: Source::Machine };
    match control_group_headroom(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")) {
        Some(bytes) if bytes < machine.bytes => Budget { bytes, source: Source::ControlGroup },
        _ => machine,
    }
}

/// The same on one NUMA node, when a pool is bound to it.
pub(crate) fn memory_headroom_on(node: Option<u32>) -> Budget {
    let anywhere = memory_headroom();
    let Some(node) = node else { return anywhere };
    let text = fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).unwrap_or_default();
    let kilobytes = |name: &str| {
        let line = text.lines().find(|line| line.contains(name))?;
        line.split_whitespace().rev().nth(1)?.parse::<usize>().ok()
    };
    match (kilobytes("MemFree:"), kilobytes("Inactive(file):")) {
        (Some(free), file) if (free + file.unwrap_or(0)) * 1024 < anywhere.bytes => {
            Budget { bytes: (free + file.unwrap_or(0)) * 1024, source: Source::Node }
        }
        _ => anywhere,
    }
}

/// The NUMA nodes that have memory, as the kernel lists them.
pub(crate) fn memory_nodes() -> String {
    let nodes = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_else(|_| "0".to_owned());
    nodes.trim().to_owned()
}

/// Refuses a NUMA node that has no memory.
pub(crate) fn check_node(node: u32) -> Result<()> {
    let nodes = memory_nodes();
    let holds = |part: &str| {
        let mut ends = part.splitn(2, '-').map(|end| end.parse::<u32>().ok());
        let first = ends.next().flatten();
        first.is_some_and(|first| (first..=ends.next().flatten().unwrap_or(first)).contains(&node))
    };
    if nodes.split(',').any(holds) {
        return Ok(());
    }
    Err(Error::unsupported(format!("memory on NUMA node {node}"), format!("the nodes with memory are {nodes}")))
}

/// Bytes that this process has locked (`VmLck`).
pub(crate) fn locked_bytes() -> usize {
    proc_field("/proc/self/status", "VmLck:").unwrap_or(0)
}

/// Whether `CAP_IPC_LOCK` lifts the memlock limit. The kernel asks for it in the initial user namespace: what a
/// rootless container calls a capability does not count.
pub(crate) fn may_lock_without_limit() -> bool {
    has_lock_capability() && !in_user_namespace()
}

/// Whether the process lives in a user namespace that is not the initial one.
pub(crate) fn in_user_namespace() -> bool {
    let ids = fs::read_to_string("/proc/self/uid_map");
    ids.is_ok_and(|ids| !ids.split_whitespace().eq(["0", "0", "4294967295"]))
}

/// Whether the process has `CAP_IPC_LOCK` in its own user namespace.
pub(crate) fn has_lock_capability() -> bool {
    const CAP_IPC_LOCK: u64 = 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let capabilities = field(&status, "CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok());
    capabilities.is_some_and(|bits| bits >> CAP_IPC_LOCK & 1 == 1)
}

/// Whether the kernel gives transparent huge pages to those who ask, and its own word for the setting.
pub(crate) fn transparent_huge_pages() -> (bool, String) {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let text = fs::read_to_string(path).unwrap_or_else(|_| "[never]".to_owned());
    let setting = text.split(['[', ']']).nth(1).unwrap_or("never").to_owned();
    (setting != "never", setting)
}

/// Free pages in the kernel's pool of huge pages of this size.
pub(crate) fn free_huge_pages(bytes: usize) -> usize {
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", bytes / 1024);
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// How often an allocation on this machine had to wait for memory compaction since it booted.
pub(crate) fn compaction_stalls() -> usize {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    field(&text, "compact_stall ").and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Bytes of a range that transparent huge pages back, as far as the mappings that hold it tell.
pub(crate) fn huge_bytes(range: &Range<usize>) -> usize {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let mut inside = false;
    let mut bytes = 0;
    for line in maps.lines() {
        if let Some(mapping) = mapping_of(line) {
            inside = mapping.start < range.end && range.start < mapping.end;
        } else if inside && let Some(kilobytes) = line.strip_prefix("AnonHugePages:") {
            bytes += kilobytes.trim_end_matches("kB").trim().parse::<usize>().unwrap_or(0) * 1024;
        }
    }
    bytes
}

/// The addresses that a header line of `/proc/self/maps` or `smaps` is about.
fn mapping_of(line: &str) -> Option<Range<usize>> {
    let (start, rest) = line.split_once('-')?;
    let end = rest.split(' ').next()?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// Whether any part of a range is mapped without the right to write.
pub(crate) fn is_read_only(range: &Range<usize>) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let overlaps = mapping_of(line).is_some_and(|mapping| mapping.start < range.end && range.start < mapping.end);
        overlaps && line.split(' ').nth(1).is_some_and(|rights| !rights.contains('w'))
    })
}

/// The kernel's version, as far as it decides what a driver can do.
pub(crate) fn kernel_release() -> (u32, u32) {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = text.split(['.', '-']).map_while(|part| part.trim().parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// The first word behind a name at a line's start.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()
}

/// A field of a `/proc` file in bytes, where the file says kB.
fn proc_field(path: &str, name: &str) -> Option<usize> {
    let kilobytes: usize = field(&fs::read_to_string(path).ok()?, name)?.parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// The smallest headroom among this process's control group and its ancestors, version 1 or 2; `None` where no group
/// has a limit.
fn control_group_headroom(membership: &Path, root: &Path) -> Option<usize> {
    let text = fs::read_to_string(membership).ok()?;
    text.lines().filter_map(|line| group_of_line(line, root)).filter_map(|group| group.headroom()).min()
}

/// A control group's folder, the mount that holds it, and the names of its version's files.
struct Group {
    mount: PathBuf,
    folder: PathBuf,
    limit: &'static str,
    usage: &'static str,
    file_pages: [&'static str; 2],
}

/// Reads a line of `/proc/self/cgroup`: `0::/path` is version 2, `N:memory:/path` version 1.
fn group_of_line(line: &str, root: &Path) -> Option<Group> {
    let mut parts = line.splitn(3, ':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?.trim_start_matches('/'));
    let group = |mount: PathBuf, limit, usage, file_pages| {
        let inside = mount.join(path);
        // In a container the path may be that of the host, which is not to be seen here: then the mount is the group.
        let folder = if inside.is_dir() { inside } else { mount.clone() };
        Some(Group { mount, folder, limit, usage, file_pages })
    };
    if controllers.is_empty() {
        return group(root.to_owned(), "memory.max", "memory.current", ["active_file ", "inactive_file "]);
    }
    if !controllers.split(',').any(|controller| controller == "memory") {
        return None;
    }
    let file_pages = ["total_active_file ", "total_inactive_file "];
    group(root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", file_pages)
}

impl Group {
    fn headroom(&self) -> Option<usize> {
        let up_to_mount = self.folder.ancestors().take_while(|folder| folder.starts_with(&self.mount));
        up_to_mount.filter_map(|folder| self.headroom_of(folder)).min()
    }

    fn headroom_of(&self, folder: &Path) -> Option<usize> {
        let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<usize>().ok();
        let limit = number(self.limit)?; // "max" is no number, and no limit
        let usage = number(self.usage)?;
        let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let file_bytes = |name: &&str| field(&stat, name).and_then(|bytes| bytes.parse().ok()).unwrap_or(0_usize);
        let reclaimable: usize = self.file_pages.iter().map(file_bytes).sum();
        Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().expect("has a folder")).expect("mkdir");
            fs::write(path, text).expect("write");
        }
    }

    fn scratch(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("pinpool-{}-{name}", std::process::id()));
        fs::create_dir_all(&root).expect("mkdir");
        root
    }

    #[test]
    fn version_two_takes_the_tightest_ancestor_and_forgives_file_pages() {
        let root = scratch("v2");
        write(
            &root,
            &[
                ("self", "0::/a/b\n"),
                ("a/memory.max", "1000\n"),
                ("a/memory.current", "700\n"),
                ("a/memory.stat", "anon 400\nactive_file 100\ninactive_file 150\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", "500\n"),
            ],
        );
        assert_eq!(control_group_headroom(&root.join("self"), &root), Some(550));
        fs::remove_dir_all(root).expect("cleanup");
    }

    #[test]
    fn version_one_and_a_path_of_the_host() {
        let root = scratch("v1");
        write(
            &root,
            &[
                ("self", "5:cpu:/x\n4:memory:/docker/123\n0::/\n"),
                ("memory/memory.limit_in_bytes", "1000"),
                ("memory/memory.usage_in_bytes", "900"),
                ("memory/memory.stat", "active_file 1\ntotal_active_file 20\ntotal_inactive_file 30\n"),
            ],
        );
        assert_eq!(control_group_headroom(&root.join("self"), &root), Some(150));
        fs::remove_dir_all(root).expect("cleanup");
    }

    #[test]
    fn no_group_no_limit() {
        let root = scratch("none");
        write(&root, &[("self", "0::/\n")]);
        assert_eq!(control_group_headroom(&root.join("self"), &root), None);
        fs::remove_dir_all(root).expect("cleanup");
    }

    #[test]
    fn this_machine_has_a_budget() {
        let budget = default_budget();
        assert!(budget.bytes > 0 && budget.bytes < usize::MAX, "{budget:?}");
    }
}
