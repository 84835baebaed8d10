//! Tests in a process of their own, forked children, and processes that may do less.

use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

/// Names the test whose body a process is to run.
const ROLE: &str = "PINPOOL_TEST_ALONE";
/// A process that takes longer hangs. It ends a test that has failed anyway, and decides nothing else.
const SECONDS_TO_HANG: u32 = 300;

/// Runs the body of this test in a process of its own, where nobody else maps, locks, registers or counts.
///
/// `test` is the name of the calling test function. The process ends with the body, without destructors: filters on
/// its thread may refuse what these need.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    let done = format!("alone: {test} is done");
    if std::env::var_os(ROLE).is_some_and(|role| role == test) {
        // SAFETY: takes a number only.
        unsafe { libc::alarm(SECONDS_TO_HANG) };
        body();
        let mut stdout = std::io::stdout();
        writeln!(stdout, "{done}").and_then(|()| stdout.flush()).expect("the other end listens");
        // SAFETY: ends the process.
        unsafe { libc::_exit(0) };
    }
    let program = std::env::current_exe().expect("the test's own program");
    let arguments = [test, "--exact", "--nocapture", "--test-threads=1"];
    let output = Command::new(program).args(arguments).env(ROLE, test).output().expect("it starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let passed = output.status.success() && stdout.contains(&done);
    assert!(passed, "{test}, in a process of its own: {}\n{stdout}\n{stderr}", output.status);
}

/// Forks, runs `body` in the child, and fails where the child panics, hangs or dies.
pub(crate) fn in_forked_child(body: impl FnOnce()) {
    // SAFETY: the child runs the body and ends; what it may use there is what these tests are about.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: takes a number only.
        unsafe { libc::alarm(SECONDS_TO_HANG / 10) };
        let result = catch_unwind(AssertUnwindSafe(body));
        // SAFETY: ends the child without the parent's destructors.
        unsafe { libc::_exit(i32::from(result.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the kernel fills the number.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child, "waitpid: {}", std::io::Error::last_os_error());
    let hung = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM;
    assert!(!hung, "the forked child hangs");
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the forked child failed: status {status:#x}");
}

/// Bytes that this process may lock; `None` where nothing limits it.
pub(crate) fn memlock_limit() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the struct.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (limit.rlim_cur != libc::RLIM_INFINITY && !may_ignore_limit()).then_some(limit.rlim_cur as usize)
}

/// Whether this process holds the capability that lifts the limit.
fn may_ignore_limit() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("a line of its own").trim();
    u64::from_str_radix(capabilities, 16).expect("hexadecimal") >> CAP_IPC_LOCK & 1 == 1
}

/// Lets this process lock no more than so many bytes, as far as it heeds limits.
pub(crate) fn limit_memlock(bytes: usize) {
    let limit = libc::rlimit { rlim_cur: bytes as libc::rlim_t, rlim_max: bytes as libc::rlim_t };
    // SAFETY: the kernel reads the struct.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) };
    assert_eq!(result, 0, "RLIMIT_MEMLOCK cannot be {bytes} bytes here: {}", std::io::Error::last_os_error());
}

/// Gives up whatever lets this process ignore limits, and lets it lock no more than so many bytes.
pub(crate) fn become_nobody(memlock: usize) {
    const NOBODY: libc::uid_t = 65534;
    limit_memlock(memlock);
    // SAFETY: takes nothing.
    if unsafe { libc::geteuid() } == 0 {
        // SAFETY: the list of groups is empty.
        assert_eq!(unsafe { libc::setgroups(0, std::ptr::null()) }, 0);
        // SAFETY: takes numbers only; libc does it for all threads.
        assert_eq!(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) }, 0);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
        // SAFETY: takes numbers only. Without it the process could not read all of its own files in /proc.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) }, 0);
    }
    assert_eq!(memlock_limit(), Some(memlock), "something still lifts the memlock limit of this process");
}

/// Moves this process, which must have one thread, into a user namespace: there it holds every capability, and none
/// that counts for the memlock limit.
pub(crate) fn enter_user_namespace() {
    // SAFETY: takes a number only.
    let result = unsafe { libc::unshare(libc::CLONE_NEWUSER) };
    assert_eq!(result, 0, "this test needs user namespaces: {}", std::io::Error::last_os_error());
}
