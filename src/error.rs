//! The one error type: each variant keeps what failed, with its numbers, and its text ends with what helps.

use std::path::PathBuf;
use std::time::Duration;
use std::{fmt, io};

/// Result of a pinpool call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed. Sizes are in bytes.
#[non_exhaustive]
#[derive(Debug)]
pub enum Error {
    /// The operating system refused a call.
    Os {
        /// The system call, with the option that matters.
        call: &'static str,
        /// Bytes it was asked for; zero where it is not about bytes.
        bytes: usize,
        /// The system's own answer.
        source: io::Error,
    },
    /// The kernel's limit on locked memory is too small for this request.
    MemlockLimit {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that this process has locked already.
        locked: usize,
        /// `RLIMIT_MEMLOCK`, soft.
        soft: usize,
        /// `RLIMIT_MEMLOCK`, hard.
        hard: usize,
    },
    /// The pool's budget is used up.
    OutOfPinnedMemory {
        /// Bytes asked for.
        wanted: usize,
        /// The budget.
        limit: usize,
        /// Handed out.
        allocated: usize,
        /// Idle in the pool.
        cached: usize,
        /// Waiting for device work.
        pending: usize,
        /// How long the oldest of that work has been waited for.
        oldest: Option<Duration>,
        /// Never to be used again, because an event failed, or the system or a driver did not take it back.
        lost: usize,
        /// Where the budget comes from.
        budget: &'static str,
    },
    /// The range shares bytes with one that is pinned already.
    Overlap {
        /// First byte and length asked for.
        wanted: (usize, usize),
        /// First byte and length of the range that is there.
        existing: (usize, usize),
        /// Whether that one was registered by its owner; else it is a pool's.
        adopted: bool,
    },
    /// A page kind, a node or another feature that this machine does not have.
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why it cannot be had, and what would help.
        why: String,
    },
    /// A driver, or the device that was asked for, cannot be used at all.
    DriverUnavailable {
        /// Which driver.
        driver: &'static str,
        /// What was tried, and what would help.
        reason: String,
        /// There is no such driver or device here at all, as opposed to one that fails.
        absent: bool,
    },
    /// A driver refused a call.
    Driver {
        /// Which driver.
        driver: &'static str,
        /// Its function.
        call: &'static str,
        /// Its answer.
        code: i64,
        /// The answer's name.
        code_name: Box<str>,
        /// For which device.
        device: Option<Box<str>>,
        /// Bytes of the range.
        bytes: usize,
        /// What would help.
        advice: &'static str,
    },
    /// A driver was told to give a range up, said yes, and knows it still: it may hand that memory to others.
    Lingering {
        /// For which device.
        device: Box<str>,
        /// First byte of the range.
        address: usize,
        /// Bytes of it.
        bytes: usize,
        /// What was done about it, or led to it, and what would help.
        why: String,
    },
    /// An argument makes no sense.
    Invalid {
        /// The argument's name.
        parameter: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// A stream's work goes into a graph, which may be launched at any time: no event tells when it is done for good.
    Captured {
        /// The stream.
        stream: usize,
    },
    /// Somebody wrote to a block after its last owner had let it go (found in debug mode).
    WrittenAfterRelease(Box<Overwritten>),
    /// The operating system refused a call on a file of a swap store.
    Storage {
        /// What was to be done.
        call: &'static str,
        /// The file.
        file: PathBuf,
        /// Where in it, and how many bytes from there on; nothing for what concerns the file as such.
        place: Option<(u64, usize)>,
        /// The system's error number.
        code: i32,
        /// What would help, where that is known.
        help: String,
    },
    /// A file of a swap store does not hold what was written to it.
    Damaged {
        /// The file.
        file: PathBuf,
        /// Where in it.
        offset: u64,
        /// Bytes from there on.
        bytes: usize,
        /// What is wrong, and with which entry.
        what: String,
    },
    /// A swap store holds nothing under this key.
    UnknownKey {
        /// The key.
        key: Box<str>,
        /// The store's directory.
        store: PathBuf,
    },
    /// The swapper was closed.
    SwapperClosed,
    /// The swapper belongs to the process that this one was forked from.
    SwapperForked,
    /// The pool was closed.
    Closed,
    /// The pool belongs to the process that this one was forked from.
    Forked,
    /// The caller's progress or wait callback asked to stop.
    Interrupted,
}

/// A block that was written to after its release. It is not handed out again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overwritten {
    /// First byte of the block.
    pub address: usize,
    /// Bytes of it.
    pub len: usize,
    /// First byte that was written, from the start of the block.
    pub offset: usize,
    /// How often the block had been handed out.
    pub generation: u64,
    /// Where its last owner took it, where that was noted.
    pub origin: Option<Box<str>>,
}

/// Why memory was not pinned, and whether something of it remains.
#[derive(Debug)]
pub struct NotPinned {
    /// The first refusal.
    pub error: Error,
    /// What was done could not be undone: the memory stays mapped, and must, for good.
    pub stuck: bool,
}

impl From<Error> for NotPinned {
    fn from(error: Error) -> Self {
        Self { error, stuck: false }
    }
}

const OUT_OF_MEMORY_HELP: &str = "; the machine is short of memory, the process has vm.max_map_count mappings, or \
                                  a limit like `ulimit -v` is reached";

impl Error {
    /// An `Invalid` with its reason.
    pub fn invalid(parameter: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { parameter, reason: reason.into() }
    }

    /// Whether waiting or trimming may help.
    pub(crate) fn is_shortage(&self) -> bool {
        matches!(self, Self::OutOfPinnedMemory { .. } | Self::MemlockLimit { .. })
    }

    /// An `Unsupported` with its reason.
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unsupported { what: what.into(), why: why.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os { call, bytes, source } => {
                let help = if source.kind() == io::ErrorKind::OutOfMemory { OUT_OF_MEMORY_HELP } else { "" };
                let size = if *bytes == 0 { String::new() } else { format!(" of {bytes} bytes") };
                write!(f, "{call}{size} failed: {source}{help}")
            }
            Self::MemlockLimit { wanted, locked, soft, hard } => write!(
                f,
                "cannot lock {wanted} more bytes: this process has {locked} bytes locked and RLIMIT_MEMLOCK allows {} \
                 (hard limit {}); raise it with `ulimit -l unlimited` in the shell that starts the program (as root, or \
                 `memlock` in /etc/security/limits.conf, when the hard limit is too small), with \
                 `docker run --ulimit memlock=-1:-1`, or give the process CAP_IPC_LOCK",
                Limit(*soft),
                Limit(*hard)
            ),
            Self::OutOfPinnedMemory { wanted, limit, allocated, cached, pending, oldest, lost, budget } => {
                let age = oldest
                    .map_or(String::new(), |age| format!(" (device work or transfers, the oldest {age:.1?} old)"));
                let advice = match (wanted.saturating_add(*lost) > *limit, *lost > 0) {
                    (false, _) => "release arrays, raise max_bytes, or wait with timeout=",
                    (true, false) => "that is more than the pool may ever hold: raise max_bytes",
                    (true, true) => {
                        "what is lost is not used again (see quarantine_reason in stats()): make a new pool"
                    }
                };
                write!(
                    f,
                    "out of pinned memory: wanted {wanted} bytes, limit {limit} ({budget}), allocated {allocated}, \
                     cached {cached}, pending {pending}{age}, lost {lost}; {advice}"
                )
            }
            Self::Overlap { wanted, existing, adopted } => {
                let help = if *adopted {
                    "a registration; close that one first, or register the whole buffer once"
                } else {
                    "a pool's region; pool memory is pinned already"
                };
                write!(
                    f,
                    "range {:#x}+{} overlaps the pinned range {:#x}+{}, {help}",
                    wanted.0, wanted.1, existing.0, existing.1
                )
            }
            Self::Unsupported { what, why } => write!(f, "{what} cannot be had: {why}"),
            Self::DriverUnavailable { driver, reason, .. } => write!(f, "{driver} cannot be used: {reason}"),
            Self::Driver { driver, call, code, code_name, device, bytes, advice } => {
                write!(f, "{driver}: {call}")?;
                if let Some(device) = device {
                    write!(f, " on {device}")?;
                }
                if *bytes > 0 {
                    write!(f, " of {bytes} bytes")?;
                }
                write!(f, " answered {code} ({code_name}): {advice}")
            }
            Self::Lingering { device, address, bytes, why } => write!(
                f,
                "{device}'s driver still knows {address:#x}+{bytes}, which it was told to give up, and may hand it to \
                 others: do not use this memory; {why}"
            ),
            Self::Invalid { parameter, reason } => write!(f, "invalid {parameter}: {reason}"),
            Self::Captured { stream } => write!(
                f,
                "stream {stream:#x} is being captured into a graph, which may read the memory whenever it is launched: \
                 the block is never reused; keep its tensor alive as long as the graph"
            ),
            Self::WrittenAfterRelease(found) => write!(f, "{found}"),
            Self::Storage { call, file, place, code, help } => {
                write!(f, "{call}")?;
                if let Some((offset, bytes)) = place {
                    write!(f, " of {bytes} bytes at {offset}")?;
                }
                let separator = if help.is_empty() { "" } else { "; " };
                let source = io::Error::from_raw_os_error(*code);
                write!(f, " of {} failed: {source}{separator}{help}", file.display())
            }
            Self::Damaged { file, offset, bytes, what } => {
                write!(f, "{} is damaged at {offset}+{bytes}: {what}", file.display())
            }
            Self::UnknownKey { key, store } => write!(f, "nothing is stored as {key:?} in {}", store.display()),
            Self::SwapperClosed => write!(f, "the swapper is closed; open the store again with a new Swapper"),
            Self::SwapperForked => write!(
                f,
                "this swapper belongs to the parent process, which has its store locked; open another store in the \
                 child, or start workers with the spawn method"
            ),
            Self::Closed => write!(f, "the pool is closed; make a new PinnedPool"),
            Self::Forked => write!(
                f,
                "this pool belongs to the parent process, and a forked child owns none of its memory; make a new \
                 PinnedPool in the child, or start workers with the spawn method"
            ),
            Self::Interrupted => write!(f, "interrupted"),
        }
    }
}

impl fmt::Display for Overwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, len, offset, generation, origin } = self;
        write!(
            f,
            "block {address:#x}+{len}, generation {generation}, was written to at byte {offset} after its release; it is \
             not handed out again. Its last owner took it at {}. A copy whose stream was not recorded, or a pointer that \
             outlived its tensor, does this",
            origin.as_deref().unwrap_or("an unknown place")
        )
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Os { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// A resource limit, where the largest number means that there is none.
struct Limit(usize);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            usize::MAX => write!(f, "unlimited"),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memlock_text_names_the_numbers_and_the_remedies() {
        let text = Error::MemlockLimit { wanted: 1, locked: 2, soft: 3, hard: usize::MAX }.to_string();
        for part in ["1 more", "2 bytes locked", "allows 3 bytes", "limit unlimited", "ulimit -l", "docker"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }

    #[test]
    fn budget_text_names_all_numbers() {
        let error = Error::OutOfPinnedMemory {
            wanted: 11,
            limit: 22,
            allocated: 33,
            cached: 44,
            pending: 55,
            oldest: Some(Duration::from_millis(66_600)),
            lost: 77,
            budget: "max_bytes",
        };
        let text = error.to_string();
        assert!(
            ["11", "22", "33", "44", "55", "66.6s", "lost 77"].iter().all(|number| text.contains(number)),
            "{text}"
        );
    }
}
