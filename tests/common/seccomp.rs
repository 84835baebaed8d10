//! Failures on demand: a filter in the kernel that refuses chosen system calls of one thread.
//!
//! A filter holds for the thread that installs it and the threads that this one starts, and stays for their lives.
//! Rules that compare arguments leave the calls of malloc and of thread stacks alone.
//!
//! The same filter can stop a thread in the middle of a call, so that a test sees what others see meanwhile.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::mpsc;
use std::thread;

/// The word at this offset of `struct seccomp_data` is loaded next.
const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;

#[cfg(target_arch = "x86_64")]
const NATIVE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xC000_00B7;

/// Names system calls, and the error that they fail with instead of being made.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    call: libc::c_long,
    arguments: Vec<(u32, u32)>,
    errno: i32,
}

impl Rule {
    /// Every call of this number fails with `errno`; with 0 it does nothing and succeeds.
    pub(crate) fn every(call: libc::c_long, errno: i32) -> Self {
        Self { call, arguments: Vec::new(), errno }
    }

    /// Only where the lower half of this argument, counted from 0, is `value`.
    pub(crate) fn with(mut self, argument: u32, value: usize) -> Self {
        self.arguments.push((argument, value as u32));
        self
    }

    /// mmap of this many bytes, private and anonymous.
    pub(crate) fn mmap(len: usize, errno: i32) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        Self::every(libc::SYS_mmap, errno).with(1, len).with(3, flags as usize)
    }

    /// munmap of this many bytes.
    pub(crate) fn munmap(len: usize, errno: i32) -> Self {
        Self::every(libc::SYS_munmap, errno).with(1, len)
    }

    /// madvise with this advice.
    pub(crate) fn madvise(advice: libc::c_int, errno: i32) -> Self {
        Self::every(libc::SYS_madvise, errno).with(2, advice as usize)
    }

    pub(crate) fn mbind(errno: i32) -> Self {
        Self::every(libc::SYS_mbind, errno)
    }

    pub(crate) fn mlock(errno: i32) -> Self {
        Self::every(libc::SYS_mlock, errno)
    }

    pub(crate) fn munlock(errno: i32) -> Self {
        Self::every(libc::SYS_munlock, errno)
    }

    /// Falls through to the next rule where something differs.
    fn compile(&self, action: u32) -> Vec<libc::sock_filter> {
        let argument = |&(index, value): &(u32, u32)| (FIRST_ARGUMENT + 8 * index, value);
        let tests: Vec<_> =
            std::iter::once((NUMBER, self.call as u32)).chain(self.arguments.iter().map(argument)).collect();
        let len = 2 * tests.len() + 1;
        let mut program = Vec::with_capacity(len);
        for (offset, value) in tests {
            program.push(instruction(LOAD_WORD, 0, offset));
            let rest = len - program.len() - 1;
            program.push(instruction(JUMP_IF_EQUAL, rest as u8, value));
        }
        program.push(instruction(RETURN, 0, action));
        program
    }
}

fn instruction(code: u16, skip_if_different: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: skip_if_different, k }
}

/// Installs a filter on this thread, and answers what the system call does.
fn install(rules: impl Iterator<Item = Vec<libc::sock_filter>>, flags: libc::c_ulong) -> libc::c_long {
    let mut program = vec![
        instruction(LOAD_WORD, 0, ARCHITECTURE),
        libc::sock_filter { code: JUMP_IF_EQUAL, jt: 1, jf: 0, k: NATIVE },
        instruction(RETURN, 0, libc::SECCOMP_RET_KILL_PROCESS),
    ];
    program.extend(rules.flatten());
    program.push(instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes numbers only; it lets an unprivileged thread install a filter.
    let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(result, 0, "PR_SET_NO_NEW_PRIVS: {}", std::io::Error::last_os_error());
    // SAFETY: the kernel copies the program, which outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter) };
    assert!(result >= 0, "this kernel refuses seccomp filters: {}", std::io::Error::last_os_error());
    result
}

/// Refuses these calls to this thread, for good.
pub(crate) fn refuse(rules: &[Rule]) {
    install(rules.iter().map(|rule| rule.compile(libc::SECCOMP_RET_ERRNO | rule.errno as u32)), 0);
}

/// Runs `body` on a thread of its own, to which these calls are refused.
pub(crate) fn refused<T: Send>(rules: &[Rule], body: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            refuse(rules);
            body()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `body` on a thread of its own, and `meanwhile` here while the first call of `body` that the rule names is about
/// to be made. That call and all later ones are then made as if nothing had happened.
pub(crate) fn paused<T: Send, U>(rule: Rule, body: impl FnOnce() -> T + Send, meanwhile: impl FnOnce() -> U) -> (T, U) {
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let rules = std::iter::once(rule.compile(libc::SECCOMP_RET_USER_NOTIF));
            let listener = install(rules, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
            // SAFETY: a new file descriptor, nobody else's.
            sender.send(unsafe { OwnedFd::from_raw_fd(listener as i32) }).expect("the test listens");
            body()
        });
        // Where `meanwhile` panics, this is closed, and the paused call fails instead of waiting for ever.
        let listener = receiver.recv().expect("a filter");
        let call = next_call(&listener).expect("the body never makes the call");
        let seen = meanwhile();
        make_call(&listener, call);
        while let Some(call) = next_call(&listener) {
            make_call(&listener, call);
        }
        (thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), seen)
    })
}

/// Waits for a filtered call, and answers its number; `None` when all threads with the filter have ended.
fn next_call(listener: &OwnedFd) -> Option<u64> {
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which the kernel fills.
        unsafe { libc::poll(&raw mut poll, 1, -1) };
        if poll.revents & libc::POLLIN == 0 {
            return None;
        }
        // SAFETY: all-zero is a value of this struct, and the one that the kernel wants to see.
        let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel fills the struct.
        if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) } == 0 {
            return Some(call.id);
        }
    }
}

fn make_call(listener: &OwnedFd, id: u64) {
    let flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
    let mut answer = libc::seccomp_notif_resp { id, val: 0, error: 0, flags };
    // SAFETY: the kernel reads the struct. An error means that the thread is gone, which the next poll tells.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
}
