//! A fake of NVIDIA's driver library `libcuda.so.1` that keeps the real one's rules about host memory, without a GPU.
//!
//! One file, no crates: `rustc --crate-type cdylib -O --edition 2024 fake_cuda.rs` makes a library to `dlopen` by path
//! (without a SONAME, so that it stands in nobody's way). A test opens the same path once more, and keeps it open, for
//! the `fake_*` functions at the end of this file: they set the scene, make calls fail, and show what the driver holds.
//! From outside, `FAKE_CUDA=devices=2,confidential=1` sets options, until a test resets them.
//!
//! What only a faulty client does is answered as the real driver answers it, and written down besides: [`fake_wrong`].
//! What this file does not know (an attribute, an option) ends the process with a line on stderr.
//!
//! Old drivers lack symbols: `--cfg without_register`, `without_uuid_v2`, `without_context_stack`, `without_events`,
//! `without_stream_id` and `without_capture_mode` leave theirs out.
//!
//! Simplified: contexts are primary ones; a default stream is one queue a context and waits for no other stream; what
//! is queued is done when a test says so.
#![allow(non_snake_case)] // the names are NVIDIA's
#![allow(dead_code)] // what serves only symbols that were left out

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{CStr, c_char, c_void};
use std::io::{BufRead, BufReader};
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::{fs, process, ptr};

/// `CUresult`.
type Code = u32;
/// What a call comes to: a code where it is not success.
type Answer<T = ()> = Result<T, Code>;
/// A context, stream or event: a number that no other one ever had, and no address.
type Handle = usize;

/// What [`fake_set`] can set, and what holds until then.
const OPTIONS: &[(&str, u64)] = &[
    ("devices", 1),
    ("driver_version", 13_000),
    ("init_code", 0),               // what cuInit answers: 34 stub, 100 no device, 803 mismatch, 999
    ("budget_bytes", u64::MAX),     // of all host memory together, as on WSL
    ("max_bytes", (512 << 30) - 1), // of one registration
    ("check_maps", 1),              // ask the kernel whether memory is mapped; 0 where time is measured
    ("destroyed_code", 709),        // to unregister what a context took with it
    // Of each device, or of one: "ats@1".
    ("total_memory", 141 << 30),
    ("register_supported", 1),
    ("read_only_supported", 1),
    ("confidential", 0), // confidential computing: nothing is registered
    ("can_map", 1),
    ("can_use_host_pointer", 1),
    ("pageable_access", 0),
    ("ats", 0), // the device reads the host's page tables, as in a GH200
    ("compute_prohibited", 0),
    ("integrated", 0),
    ("numa_node", 0),
];

// Flags of a registration.
const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
const IO_MEMORY: u32 = 4;
const READ_ONLY: u32 = 8;

/// Codes, and a table of them with name and text for C.
macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        $(const $name: Code = $code;)*
        const CODES: &[(Code, &str, &str)] = &[
            (0, "CUDA_SUCCESS\0", "no error\0"),
            $(($code, concat!("CUDA_ERROR_", stringify!($name), "\0"), concat!($text, "\0")),)*
        ];
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    STUB_LIBRARY = 34, "CUDA driver is a stub library";
    DEVICE_UNAVAILABLE = 46, "CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_CONTEXT = 201, "invalid device context";
    MAP_FAILED = 205, "mapping of buffer object failed";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    PRIMARY_CONTEXT_ACTIVE = 708, "cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    SYSTEM_NOT_READY = 802, "system not yet initialized";
    SYSTEM_DRIVER_MISMATCH = 803, "system has unsupported display driver / cuda driver combination";
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804, "forward compatibility was attempted on non supported HW";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    UNKNOWN = 999, "unknown error";
}

// --- the exported driver API ---

/// When a call is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Even when the driver is gone: a look into a table.
    Always,
    /// Before `cuInit` too.
    Early,
    /// Between `cuInit` and the end.
    Ready,
}

/// An exported call, as `cuGetProcAddress` knows it.
struct Entry {
    name: &'static str,
    since: i32,
    symbol: &'static str,
    address: fn() -> usize,
}

macro_rules! driver_api {
    ($($(#[$attribute:meta])* $name:literal $since:literal $when:ident
       $symbol:ident($($argument:ident: $type:ty),*) = $body:expr;)*) => {
        $(
            $(#[$attribute])*
            #[unsafe(no_mangle)]
            pub extern "C" fn $symbol($($argument: $type),*) -> Code {
                call(stringify!($symbol), When::$when, $body)
            }
        )*
        static API: &[Entry] = &[$(
            $(#[$attribute])*
            Entry {
                name: $name,
                since: $since,
                symbol: stringify!($symbol),
                address: || $symbol as *const () as usize,
            },
        )*];
    };
}

// Each call: its name and first version for cuGetProcAddress, when it is answered, symbol, arguments, and what it does.
driver_api! {
    "cuInit" 2000 Early cuInit(flags: u32) = |driver| driver.init(flags);
    "cuDriverGetVersion" 2020 Early cuDriverGetVersion(out: *mut i32) =
        |driver| give(out, driver.option("driver_version") as i32);
    "cuGetErrorName" 6000 Always cuGetErrorName(code: Code, out: *mut *const c_char) =
        |_| give_entry(out, CODES.iter().find(|entry| entry.0 == code).map(|entry| entry.1));
    "cuGetErrorString" 6000 Always cuGetErrorString(code: Code, out: *mut *const c_char) =
        |_| give_entry(out, CODES.iter().find(|entry| entry.0 == code).map(|entry| entry.2));
    "cuGetProcAddress" 12000 Always cuGetProcAddress_v2(name: *const c_char, out: *mut usize, version: i32, _flags: u64,
        status: *mut u32) = |driver| driver.proc_address(&text(name), out, version, status);

    "cuDeviceGetCount" 2000 Ready cuDeviceGetCount(out: *mut i32) = |driver| give(out, driver.option("devices") as i32);
    "cuDeviceGet" 2000 Ready cuDeviceGet(out: *mut i32, ordinal: i32) = |driver| give(out, driver.device(ordinal)?);
    "cuDeviceGetName" 2000 Ready cuDeviceGetName(out: *mut c_char, capacity: i32, device: i32) =
        |driver| give_text(out, capacity.max(0) as usize, &format!("Fake GPU {}", driver.device(device)?));
    // The last byte of a UUID is the ordinal. The second form names the MIG instance where there is one, so it differs.
    "cuDeviceGetUuid" 9020 Ready cuDeviceGetUuid(out: *mut [u8; 16], device: i32) =
        |driver| give(out, uuid(*b"fake GPU UUID #\0", driver.device(device)?));
    #[cfg(not(without_uuid_v2))]
    "cuDeviceGetUuid" 11040 Ready cuDeviceGetUuid_v2(out: *mut [u8; 16], device: i32) =
        |driver| give(out, uuid(*b"fake MIG UUID #\0", driver.device(device)?));
    "cuDeviceGetAttribute" 2000 Ready cuDeviceGetAttribute(out: *mut i32, attribute: i32, device: i32) =
        |driver| give(out, driver.attribute(attribute, driver.device(device)?));
    "cuDeviceTotalMem" 3020 Ready cuDeviceTotalMem_v2(out: *mut usize, device: i32) =
        |driver| give(out, driver.option_of(driver.device(device)?, "total_memory") as usize);

    "cuDevicePrimaryCtxRetain" 7000 Ready cuDevicePrimaryCtxRetain(out: *mut Handle, device: i32) =
        |driver| driver.retain(out, device);
    "cuDevicePrimaryCtxRelease" 11000 Ready cuDevicePrimaryCtxRelease_v2(device: i32) = |driver| driver.release(device);
    "cuDevicePrimaryCtxGetState" 7000 Ready cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) =
        |driver| {
            let device = driver.device(device)?;
            give(flags, 0)?;
            give(active, i32::from(driver.primary(device).context.is_some()))
        };
    "cuCtxGetCurrent" 4000 Ready cuCtxGetCurrent(out: *mut Handle) = |driver| give(out, driver.top());
    "cuCtxSetCurrent" 4000 Ready cuCtxSetCurrent(context: Handle) = |driver| driver.set_current(context);
    #[cfg(not(without_context_stack))]
    "cuCtxPushCurrent" 4000 Ready cuCtxPushCurrent_v2(context: Handle) = |driver| {
        driver.rule(driver.contexts.contains_key(&context), INVALID_CONTEXT, "no such context")?;
        driver.thread().stack.push(context);
        Ok(())
    };
    #[cfg(not(without_context_stack))]
    "cuCtxPopCurrent" 4000 Ready cuCtxPopCurrent_v2(out: *mut Handle) = |driver| {
        let top = driver.top();
        driver.rule(top != 0, INVALID_CONTEXT, "popped more often than pushed")?;
        give(out, top)?;
        driver.set_current(0)
    };
    "cuCtxGetId" 12000 Ready cuCtxGetId(context: Handle, out: *mut u64) = |driver| {
        driver.rule(driver.contexts.contains_key(&context), INVALID_CONTEXT, "no such context")?;
        give(out, context as u64)
    };
    "cuCtxGetDevice" 2000 Ready cuCtxGetDevice(out: *mut i32) = |driver| {
        let top = driver.top();
        give(out, driver.contexts.get(&top).ok_or(INVALID_CONTEXT)?.device)
    };

    #[cfg(not(without_register))]
    "cuMemHostRegister" 6050 Ready cuMemHostRegister_v2(start: usize, bytes: usize, flags: u32) =
        |driver| driver.register(start, bytes, flags);
    "cuMemHostUnregister" 4000 Ready cuMemHostUnregister(start: usize) = |driver| driver.unregister(start);
    "cuMemHostAlloc" 2020 Ready cuMemHostAlloc(out: *mut usize, bytes: usize, flags: u32) =
        |driver| driver.allocate(out, bytes, flags);
    "cuMemFreeHost" 2000 Ready cuMemFreeHost(start: usize) = |driver| {
        let own = driver.ranges.get(&start).is_some_and(|known| known.memory.is_some());
        driver.rule(own, INVALID_VALUE, "not memory of the driver's")?;
        driver.check_capture()?;
        driver.check_faults(driver.ranges[&start].context)?;
        driver.ranges.remove(&start);
        Ok(())
    };
    "cuMemHostGetDevicePointer" 3020 Ready cuMemHostGetDevicePointer_v2(out: *mut usize, pointer: usize, _flags: u32) =
        |driver| give(out, driver.device_pointer(pointer)?);
    "cuPointerGetAttribute" 4000 Ready cuPointerGetAttribute(out: *mut c_void, attribute: i32, pointer: usize) =
        |driver| driver.pointer_attribute(out, attribute, pointer);

    "cuStreamCreate" 2000 Ready cuStreamCreate(out: *mut Handle, flags: u32) = |driver| {
        let (stream, context) = (new_handle(), driver.current()?);
        driver.rule(flags <= NON_BLOCKING, INVALID_VALUE, "unknown flags")?;
        give(out, stream)?;
        driver.streams.insert((stream, context), Stream { blocking: flags != NON_BLOCKING, ..Stream::default() });
        Ok(())
    };
    "cuStreamDestroy" 4000 Ready cuStreamDestroy_v2(stream: Handle) = |driver| {
        driver.rule(stream > LAST_DEFAULT_STREAM, INVALID_HANDLE, "a default stream stays")?;
        let key = driver.stream(stream)?;
        driver.streams.entry(key).or_default().destroyed = true;
        driver.captures.remove(&key);
        driver.advance(key, 0);
        driver.check_faults(key.1)
    };
    // Of a default stream: the context that is current.
    #[cfg(not(without_events))]
    "cuStreamGetCtx" 9020 Ready cuStreamGetCtx(stream: Handle, out: *mut Handle) =
        |driver| give(out, driver.stream(stream)?.1);
    // No other stream of the context ever has it. (One per-thread default stream a context: simplified.)
    #[cfg(not(without_stream_id))]
    "cuStreamGetId" 12000 Ready cuStreamGetId(stream: Handle, out: *mut u64) =
        |driver| give(out, driver.stream(stream)?.0 as u64 + 1);
    // 0 no, 1 yes, 2 yes but a call has broken it. That the legacy default stream cannot be used breaks nothing here.
    "cuStreamIsCapturing" 10000 Ready cuStreamIsCapturing(stream: Handle, out: *mut u32) = |driver| {
        let key = driver.stream(stream)?;
        ensure(driver.captures_ahead_of(key).next().is_none(), STREAM_CAPTURE_IMPLICIT)?;
        give(out, driver.captures.get(&key).map_or(0, |capture| 1 + u32::from(capture.broken)))
    };
    #[cfg(not(without_capture_mode))]
    "cuThreadExchangeStreamCaptureMode" 10010 Ready cuThreadExchangeStreamCaptureMode(mode: *mut CaptureMode) =
        |driver| driver.exchange_capture_mode(mode);
    #[cfg(not(without_events))]
    "cuEventCreate" 2000 Ready cuEventCreate(out: *mut Handle, flags: u32) = |driver| {
        let (event, context) = (new_handle(), driver.current()?);
        driver.rule(flags <= 7, INVALID_VALUE, "unknown flags")?;
        give(out, event)?;
        driver.events.insert(event, Event { context, state: State::Done });
        Ok(())
    };
    #[cfg(not(without_events))]
    "cuEventRecord" 2000 Ready cuEventRecord(event: Handle, stream: Handle) = |driver| driver.record(event, stream);
    #[cfg(not(without_events))]
    "cuEventQuery" 2000 Ready cuEventQuery(event: Handle) = |driver| driver.query(event);
    // In any context or none. What is queued goes on.
    #[cfg(not(without_events))]
    "cuEventDestroy" 4000 Ready cuEventDestroy_v2(event: Handle) = |driver| {
        let (state, context) = (driver.event(event)?.state, driver.event(event)?.context);
        driver.events.remove(&event);
        ensure(state != State::Lost, CONTEXT_IS_DESTROYED)?;
        driver.check_faults(context)
    };
}

static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(Driver::fresh()));
/// Told when calls are no longer held back.
static LET_GO: Condvar = Condvar::new();
/// The process that `cuInit` succeeded in. Not in the mutex, which may be locked for ever in a forked child.
static OWNER: AtomicU32 = AtomicU32::new(0);

fn lock() -> MutexGuard<'static, Driver> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What every call goes through.
fn call(symbol: &'static str, when: When, body: impl FnOnce(&mut Driver) -> Answer) -> Code {
    if ![0, process::id()].contains(&OWNER.load(Relaxed)) {
        if let Ok(mut driver) = DRIVER.try_lock() {
            driver.count(symbol);
            driver.note("called in a forked child");
        }
        return NOT_INITIALIZED;
    }
    let mut driver = lock();
    driver.waiting += 1;
    driver = LET_GO.wait_while(driver, |driver| driver.held.contains(symbol)).unwrap_or_else(PoisonError::into_inner);
    driver.waiting -= 1;
    code_of(driver.admit(symbol, when).and_then(|()| body(&mut driver)))
}

fn code_of(answer: Answer) -> Code {
    answer.err().unwrap_or(0)
}

fn ensure(fine: bool, code: Code) -> Answer {
    if fine { Ok(()) } else { Err(code) }
}

/// A number for the calling thread. Nothing to drop, so it is there in destructors too.
fn this_thread() -> usize {
    thread_local!(static THREAD: Cell<usize> = const { Cell::new(0) });
    if THREAD.get() == 0 {
        THREAD.set(new_handle());
    }
    THREAD.get()
}

fn new_handle() -> Handle {
    static HANDLES: AtomicUsize = AtomicUsize::new(0xC0DA_0000);
    HANDLES.fetch_add(16, Relaxed)
}

/// Ends the process, for what this file does not know.
fn abort(what: &str) -> ! {
    eprintln!("fake_cuda: {what}");
    process::abort()
}

fn give<T>(out: *mut T, value: T) -> Answer {
    ensure(!out.is_null(), INVALID_VALUE)?;
    // SAFETY: the API's contract: a place of the caller's for a T.
    unsafe { out.write(value) };
    Ok(())
}

/// A text that ends with a zero; null where there is none.
fn give_entry(out: *mut *const c_char, text: Option<&'static str>) -> Answer {
    give(out, text.map_or(ptr::null(), |text| text.as_ptr().cast()))?;
    ensure(text.is_some(), INVALID_VALUE)
}

/// A text into a buffer, cut to fit.
fn give_text(out: *mut c_char, capacity: usize, text: &str) -> Answer {
    ensure(!out.is_null() && capacity > 0, INVALID_VALUE)?;
    let bytes = text.len().min(capacity - 1);
    // SAFETY: the caller's buffer has that capacity.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), out, bytes);
        out.add(bytes).write(0);
    }
    Ok(())
}

/// Text from C; empty for null.
fn text(pointer: *const c_char) -> String {
    // SAFETY: not null, and a string that ends.
    let text = (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) });
    text.map_or_else(String::new, |text| text.to_string_lossy().into_owned())
}

fn uuid(mut uuid: [u8; 16], device: i32) -> [u8; 16] {
    uuid[15] = device as u8;
    uuid
}

// --- what the driver remembers ---

#[derive(Default)]
struct Driver {
    options: BTreeMap<String, u64>,
    initialised: bool,
    torn_down: bool,
    primaries: BTreeMap<i32, Primary>,
    contexts: BTreeMap<Handle, Context>,
    threads: BTreeMap<usize, Thread>,
    /// Host memory that the driver knows, by its first byte. Nothing overlaps.
    ranges: BTreeMap<usize, Known>,
    /// First bytes of what a context took with it.
    lost: BTreeSet<usize>,
    streams: BTreeMap<StreamKey, Stream>,
    captures: BTreeMap<StreamKey, Capture>,
    events: BTreeMap<Handle, Event>,

    calling: &'static str,
    calls: BTreeMap<&'static str, u64>,
    failures: Vec<Failure>,
    wrong: Vec<String>,
    hidden: BTreeSet<&'static str>,
    held: BTreeSet<&'static str>,
    waiting: u64,
}

/// The primary context of a device.
#[derive(Default)]
struct Primary {
    retained: u64,
    made: u64,
    context: Option<Handle>,
}

struct Context {
    device: i32,
    life: Life,
    /// What it answers since a fault of the device; 0 before.
    fault: Code,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Alive,
    /// Its last user released it.
    Released,
    /// Somebody destroyed it under its users.
    Reset,
}

#[derive(Default)]
struct Thread {
    stack: Vec<Handle>,
    capture_mode: CaptureMode,
}

/// What captures of streams forbid a thread: all of them (0), its own ones (1), or none.
type CaptureMode = u32;
const THREAD_LOCAL: CaptureMode = 1;
const RELAXED: CaptureMode = 2;

/// A range that is registered, or the driver's own.
struct Known {
    end: usize,
    flags: u32,
    context: Handle,
    id: usize,
    memory: Option<Vec<u8>>,
}

/// A stream and its context: default streams are called the same in each.
type StreamKey = (Handle, Handle);
/// The legacy default stream is 0 and 1, the one per thread is 2.
const LEGACY_STREAM: Handle = 0;
const LAST_DEFAULT_STREAM: Handle = 2;
/// Flag of a stream.
const NON_BLOCKING: u32 = 1;

struct Stream {
    work: VecDeque<Work>,
    /// The legacy default stream waits for it.
    blocking: bool,
    /// Takes no more work; what is queued is still done.
    destroyed: bool,
}

impl Default for Stream {
    fn default() -> Self {
        Self { work: VecDeque::new(), blocking: true, destroyed: false }
    }
}

/// A copy knows the first byte and the id of the ranges that it touches.
enum Work {
    Mark { event: Handle, ticket: usize },
    Copy { target: usize, source: usize, bytes: usize, ranges: [Option<(usize, usize)>; 2] },
}

/// Work of a stream goes into a graph, not to the device.
struct Capture {
    id: usize,
    thread: usize,
    broken: bool,
}

struct Event {
    context: Handle,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Done,
    /// The number tells this recording from an earlier one.
    Waiting(usize),
    /// The capture that it was recorded in.
    Captured(usize),
    /// Its context is gone.
    Lost,
}

/// A failure to order: of the call that finds the count at 1, or of all calls at 0.
struct Failure {
    call: &'static str,
    count: u32,
    code: Code,
}

// --- what holds for every call ---

impl Driver {
    fn fresh() -> Self {
        let mut driver = Self::default();
        let settings = std::env::var("FAKE_CUDA").unwrap_or_default();
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            match setting.split_once('=').map(|(name, value)| (name, value.parse())) {
                Some((name, Ok(value))) => driver.set(name, value),
                _ => abort(&format!("{setting} in FAKE_CUDA is not NAME=NUMBER")),
            }
        }
        driver
    }

    fn set(&mut self, name: &str, value: u64) {
        default_of(name.split('@').next().unwrap_or(name));
        self.options.insert(name.to_owned(), value);
    }

    fn option(&self, name: &str) -> u64 {
        self.options.get(name).copied().unwrap_or_else(|| default_of(name))
    }

    fn option_of(&self, device: i32, name: &str) -> u64 {
        self.options.get(&format!("{name}@{device}")).copied().unwrap_or_else(|| self.option(name))
    }

    fn count(&mut self, symbol: &'static str) {
        self.calling = symbol;
        *self.calls.entry(symbol).or_default() += 1;
    }

    fn admit(&mut self, symbol: &'static str, when: When) -> Answer {
        self.count(symbol);
        ensure(!self.torn_down || when == When::Always, DEINITIALIZED)?;
        self.rule(self.initialised || when != When::Ready, NOT_INITIALIZED, "cuInit has not succeeded")?;
        self.injected(symbol)
    }

    fn injected(&mut self, symbol: &str) -> Answer {
        let due = |failure: &Failure| failure.call == symbol && failure.count <= 1;
        let code = self.failures.iter().find(|failure| due(failure)).map(|failure| failure.code);
        self.failures.retain(|failure| !due(failure) || failure.count == 0);
        for failure in self.failures.iter_mut().filter(|failure| failure.call == symbol) {
            failure.count = failure.count.saturating_sub(1);
        }
        code.map_or(Ok(()), Err)
    }

    /// Writes down what a correct client does not do.
    fn note(&mut self, what: &str) {
        self.wrong.push(format!("{}: {what}", self.calling));
    }

    /// A rule that a correct client keeps.
    fn rule(&mut self, kept: bool, code: Code, what: &str) -> Answer {
        if !kept {
            self.note(what);
        }
        ensure(kept, code)
    }
}

fn default_of(name: &str) -> u64 {
    let known = OPTIONS.iter().find(|option| option.0 == name);
    known.unwrap_or_else(|| abort(&format!("there is no option {name}"))).1
}

// --- start, tables, devices ---

impl Driver {
    fn init(&mut self, flags: u32) -> Answer {
        self.rule(flags == 0, INVALID_VALUE, "flags that are not 0")?;
        ensure(self.option("init_code") == 0, self.option("init_code") as Code)?;
        ensure(self.option("devices") > 0, NO_DEVICE)?;
        self.initialised = true;
        OWNER.store(process::id(), Relaxed);
        Ok(())
    }

    /// The newest form of a call that a client of that version knows. To have none is no error.
    fn proc_address(&mut self, name: &str, out: *mut usize, version: i32, status: *mut u32) -> Answer {
        ensure(!name.is_empty() && version <= self.option("driver_version") as i32, INVALID_VALUE)?;
        let forms: Vec<&Entry> =
            API.iter().filter(|entry| entry.name == name && !self.hidden.contains(entry.symbol)).collect();
        let form = forms.iter().filter(|entry| entry.since <= version).max_by_key(|entry| entry.since);
        give(out, form.map_or(0, |entry| (entry.address)()))?;
        let (found, not_found, too_new) = (0, 1, 2);
        let missing = if forms.is_empty() { not_found } else { too_new };
        // The caller may not want to know.
        let _ = give(status, if form.is_some() { found } else { missing });
        Ok(())
    }

    fn device(&self, device: i32) -> Answer<i32> {
        let known = u64::try_from(device).is_ok_and(|device| device < self.option("devices"));
        ensure(known, INVALID_DEVICE).map(|()| device)
    }

    fn attribute(&self, attribute: i32, device: i32) -> i32 {
        let option = |name| self.option_of(device, name) as i32;
        match attribute {
            18 => option("integrated"),
            19 => option("can_map"),
            20 => 2 * option("compute_prohibited"),
            33 => device + 1,  // PCI bus
            34 | 50 => 0,      // PCI device and domain
            41 | 83 | 89 => 1, // one address space, managed memory, and on both sides at once
            75 => 9,           // compute capability
            88 => option("pageable_access"),
            91 => option("can_use_host_pointer"),
            99 => option("register_supported"),
            100 => option("ats"),
            113 => option("read_only_supported"),
            134 => option("numa_node"),
            unknown => abort(&format!("there is no device attribute {unknown}")),
        }
    }
}

// --- contexts ---

impl Driver {
    fn primary(&mut self, device: i32) -> &mut Primary {
        self.primaries.entry(device).or_default()
    }

    fn thread(&mut self) -> &mut Thread {
        self.threads.entry(this_thread()).or_default()
    }

    /// The context that is current on this thread; 0 for none.
    fn top(&mut self) -> Handle {
        self.thread().stack.last().copied().unwrap_or(0)
    }

    /// The context that a call works in.
    fn current(&mut self) -> Answer<Handle> {
        let top = self.top();
        let life = self.contexts.get(&top).map(|context| context.life);
        self.rule(life.is_some(), INVALID_CONTEXT, "no context is current")?;
        self.rule(life != Some(Life::Released), CONTEXT_IS_DESTROYED, "the current context was released")?;
        ensure(life != Some(Life::Reset), CONTEXT_IS_DESTROYED)?;
        self.check_faults(top).map(|()| top)
    }

    /// After a fault, whatever works in the context answers with it.
    fn check_faults(&self, context: Handle) -> Answer {
        let fault = self.contexts.get(&context).map_or(0, |context| context.fault);
        ensure(fault == 0, fault)
    }

    /// A fault of the device: what is queued is never done.
    fn break_context(&mut self, device: i32, fault: Code) {
        let Some(broken) = self.primary(device).context else { abort("there is no context to break") };
        self.contexts.insert(broken, Context { device, life: Life::Alive, fault });
        for (_, stream) in self.streams.iter_mut().filter(|(key, _)| key.1 == broken) {
            stream.work.clear();
        }
    }

    /// Makes the context where nobody holds it yet, and leaves the stack alone.
    fn retain(&mut self, out: *mut Handle, device: i32) -> Answer {
        let device = self.device(device)?;
        let prohibited = self.option_of(device, "compute_prohibited") != 0;
        let primary = self.primary(device);
        ensure(primary.context.is_some() || !prohibited, UNKNOWN)?;
        give(out, 0)?;
        primary.made += u64::from(primary.context.is_none());
        primary.retained += 1;
        let context = *primary.context.get_or_insert_with(new_handle);
        self.contexts.entry(context).or_insert(Context { device, life: Life::Alive, fault: 0 });
        give(out, context)
    }

    fn release(&mut self, device: i32) -> Answer {
        let device = self.device(device)?;
        let retained = self.primary(device).retained;
        self.rule(retained > 0, INVALID_CONTEXT, "released more often than retained")?;
        self.primary(device).retained -= 1;
        if retained == 1 {
            self.end_context(device, Life::Released);
        }
        Ok(())
    }

    /// The context takes with it what it held. It stays on the stacks where it is.
    fn end_context(&mut self, device: i32, life: Life) {
        let Some(gone) = self.primary(device).context.take() else { return };
        self.contexts.insert(gone, Context { device, life, fault: 0 });
        let taken: Vec<usize> =
            self.ranges.iter().filter(|(_, known)| known.context == gone).map(|(start, _)| *start).collect();
        if life == Life::Released && !taken.is_empty() {
            self.note("the context was released before its host memory");
        }
        self.ranges.retain(|_, known| known.context != gone);
        self.lost.extend(taken);
        self.streams.retain(|key, _| key.1 != gone);
        self.captures.retain(|key, _| key.1 != gone);
        for event in self.events.values_mut().filter(|event| event.context == gone) {
            event.state = State::Lost;
        }
    }

    /// Replaces the top of the stack; null takes it off.
    fn set_current(&mut self, context: Handle) -> Answer {
        self.rule(context == 0 || self.contexts.contains_key(&context), INVALID_CONTEXT, "no such context")?;
        let stack = &mut self.thread().stack;
        stack.pop();
        stack.extend((context != 0).then_some(context));
        Ok(())
    }
}

// --- host memory ---

impl Driver {
    fn register(&mut self, start: usize, bytes: usize, flags: u32) -> Answer {
        let context = self.current()?;
        self.check_capture()?;
        self.check_flags(context, flags)?;
        self.rule(start != 0 && bytes != 0, INVALID_VALUE, "null, or no bytes")?;
        let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
        if !start.is_multiple_of(page()) || !bytes.is_multiple_of(page()) {
            self.note("not whole pages, which the driver allows");
        }
        let other = self.ranges.range(..end).next_back().filter(|(_, known)| known.end > start);
        let own = other.map(|(_, known)| known.memory.is_some());
        self.rule(own != Some(true), INVALID_VALUE, "memory of the driver's")?;
        self.rule(own.is_none(), HOST_MEMORY_ALREADY_REGISTERED, "a part is registered already")?;
        self.check_room(bytes)?;
        let written = flags & READ_ONLY == 0 && !self.can(context, "ats");
        ensure(self.option("check_maps") == 0 || is_mapped(&(start..end), written), INVALID_VALUE)?;
        self.lost.retain(|lost| !(start..end).contains(lost));
        self.ranges.insert(start, Known { end, flags, context, id: new_handle(), memory: None });
        Ok(())
    }

    fn can(&self, context: Handle, option: &str) -> bool {
        self.option_of(self.contexts[&context].device, option) != 0
    }

    fn check_flags(&mut self, context: Handle, flags: u32) -> Answer {
        ensure(self.can(context, "register_supported") && !self.can(context, "confidential"), NOT_SUPPORTED)?;
        ensure(flags & READ_ONLY == 0 || self.can(context, "read_only_supported"), NOT_SUPPORTED)?;
        self.rule(flags & IO_MEMORY == 0, OPERATING_SYSTEM, "ordinary memory is not I/O memory")?;
        self.rule(flags & !(PORTABLE | DEVICE_MAP | READ_ONLY) == 0, INVALID_VALUE, "unknown flags")
    }

    fn check_room(&self, bytes: usize) -> Answer {
        let used: usize = self.ranges.iter().map(|(start, known)| known.end - start).sum();
        let most = (self.option("budget_bytes") as usize).saturating_sub(used).min(self.option("max_bytes") as usize);
        ensure(bytes <= most, OUT_OF_MEMORY)
    }

    /// In any context or none, and by the first byte only.
    fn unregister(&mut self, start: usize) -> Answer {
        self.check_capture()?;
        ensure(!self.lost.contains(&start), self.option("destroyed_code") as Code)?;
        self.rule(start != 0, INVALID_VALUE, "null")?;
        let found = self.find(start).map(|(first, known)| (first, known.memory.is_some()));
        self.rule(found.is_some(), HOST_MEMORY_NOT_REGISTERED, "nothing is registered there")?;
        self.rule(found == Some((start, false)), INVALID_VALUE, "not the first byte, or memory of the driver's")?;
        self.check_faults(self.ranges[&start].context)?;
        self.ranges.remove(&start);
        Ok(())
    }

    /// Memory of the driver's own.
    fn allocate(&mut self, out: *mut usize, bytes: usize, flags: u32) -> Answer {
        let context = self.current()?;
        self.check_capture()?;
        self.rule(bytes != 0, INVALID_VALUE, "no bytes")?;
        self.check_room(bytes)?;
        let memory = vec![0; bytes + page()];
        let start = (memory.as_ptr() as usize).next_multiple_of(page());
        give(out, start)?;
        let known = Known { end: start + bytes, flags, context, id: new_handle(), memory: Some(memory) };
        self.ranges.insert(start, known);
        Ok(())
    }

    /// The range that holds this address, and its first byte.
    fn find(&self, address: usize) -> Option<(usize, &Known)> {
        let (start, known) = self.ranges.range(..=address).next_back()?;
        (address < known.end).then_some((*start, known))
    }

    /// The same for a client, whose current context does not see what others keep to themselves.
    fn find_visible(&mut self, address: usize) -> Answer<(usize, &Known)> {
        let top = self.top();
        let found = self.find(address).filter(|(_, known)| known.flags & PORTABLE != 0 || known.context == top);
        found.ok_or(INVALID_VALUE)
    }

    /// What this address is to a kernel in the current context.
    fn device_pointer(&mut self, address: usize) -> Answer<usize> {
        const ELSEWHERE: usize = 1 << 46;
        let context = self.current()?;
        let (_, known) = self.find_visible(address)?;
        let (own, wanted) = (known.memory.is_some(), known.flags & DEVICE_MAP != 0);
        ensure(own || wanted && self.can(context, "can_map"), INVALID_VALUE)?;
        Ok(if own || self.can(context, "can_use_host_pointer") { address } else { address + ELSEWHERE })
    }

    fn pointer_attribute(&mut self, out: *mut c_void, attribute: i32, pointer: usize) -> Answer {
        const HOST: u32 = 1;
        if ![1, 2, 3, 4, 7, 9, 11, 12].contains(&attribute) {
            abort(&format!("there is no pointer attribute {attribute}"));
        }
        let (start, known) = self.find_visible(pointer)?;
        let (end, context, id) = (known.end, known.context, known.id);
        match attribute {
            1 => give(out.cast(), context),
            2 => give(out.cast(), HOST),
            3 => give(out.cast(), self.device_pointer(pointer)?),
            4 => give(out.cast(), pointer),
            7 => give(out.cast(), id),
            9 => give(out.cast(), self.contexts[&context].device),
            11 => give(out.cast(), start),
            _ => give(out.cast(), end - start),
        }
    }
}

fn page() -> usize {
    const SC_PAGESIZE: i32 = 30;
    unsafe extern "C" {
        safe fn sysconf(name: i32) -> i64;
    }
    sysconf(SC_PAGESIZE) as usize
}

/// Whether each byte is mapped and can be read, and written where that is asked for.
fn is_mapped(range: &Range<usize>, written: bool) -> bool {
    let maps = fs::File::open("/proc/self/maps").expect("procfs");
    let mut next = range.start;
    for line in BufReader::new(maps).lines() {
        let line = line.expect("procfs");
        let (area, access) = area_of(&line).expect("bounds and access");
        if area.contains(&next) && access.starts_with('r') && (access[1..].starts_with('w') || !written) {
            next = area.end;
        }
        if next >= range.end {
            return true;
        }
    }
    false
}

/// Where a mapping lies, and what follows in its line.
fn area_of(line: &str) -> Option<(Range<usize>, &str)> {
    let (bounds, rest) = line.split_once(' ')?;
    let (start, end) = bounds.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?, rest))
}

// --- streams and events ---

impl Driver {
    /// The stream of this name; a default stream is the current context's.
    fn stream(&mut self, handle: Handle) -> Answer<StreamKey> {
        if handle <= LAST_DEFAULT_STREAM {
            let key = (handle & LAST_DEFAULT_STREAM, self.current()?);
            self.streams.entry(key).or_default();
            return Ok(key);
        }
        let named = self.streams.range((handle, 0)..=(handle, Handle::MAX)).next();
        let key = named.filter(|(_, stream)| !stream.destroyed).map(|(key, _)| *key);
        self.rule(key.is_some(), INVALID_HANDLE, "no such stream")?;
        key.ok_or(INVALID_HANDLE)
    }

    /// Does so much of a stream's work, in its order. A destroyed stream ends with the last of it.
    fn advance(&mut self, key: StreamKey, limit: usize) -> u64 {
        let count = self.streams.get(&key).map_or(0, |stream| stream.work.len().min(limit));
        for _ in 0..count {
            if let Some(work) = self.streams.get_mut(&key).and_then(|stream| stream.work.pop_front()) {
                self.perform(work);
            }
        }
        if self.streams.get(&key).is_some_and(|stream| stream.destroyed && stream.work.is_empty()) {
            self.streams.remove(&key);
        }
        count as u64
    }

    fn perform(&mut self, work: Work) {
        match work {
            Work::Mark { event, ticket } => {
                if let Some(event) = self.events.get_mut(&event).filter(|event| event.state == State::Waiting(ticket)) {
                    event.state = State::Done;
                }
            }
            Work::Copy { target, source, bytes, ranges } => {
                let is_there = |(start, id)| self.ranges.get(&start).is_some_and(|known| known.id == id);
                if !ranges.into_iter().flatten().all(is_there) {
                    return self.note("memory was unregistered before its copy was done");
                }
                // SAFETY: the test that queued it vouches for both ends, and what was registered still is.
                unsafe { ptr::copy(source as *const u8, target as *mut u8, bytes) };
            }
        }
    }

    fn queue_copy(&mut self, handle: Handle, target: usize, source: usize, bytes: usize) -> Answer {
        let key = self.stream(handle)?;
        let ranges = [target, source].map(|end| self.find(end).map(|(start, known)| (start, known.id)));
        self.queue(key, Work::Copy { target, source, bytes, ranges }).map(drop)
    }

    /// Gives work to a stream, or to the capture that it tells.
    fn queue(&mut self, key: StreamKey, work: Work) -> Answer<Option<usize>> {
        self.check_faults(key.1)?;
        let broken = self.captures_ahead_of(key).map(|capture| capture.broken = true).count();
        let what = "the legacy default stream, while a blocking stream is captured";
        self.rule(broken == 0, STREAM_CAPTURE_IMPLICIT, what)?;
        if let Some(capture) = self.captures.get(&key) {
            ensure(!capture.broken, STREAM_CAPTURE_INVALIDATED)?;
            return Ok(Some(capture.id));
        }
        self.streams.entry(key).or_default().work.push_back(work);
        Ok(None)
    }

    /// Captures of other streams that this one waits for, whatever their mode: only the legacy default stream does.
    fn captures_ahead_of(&mut self, key: StreamKey) -> impl Iterator<Item = &mut Capture> {
        let streams = &self.streams;
        let ahead = move |other: &StreamKey| key.0 == LEGACY_STREAM && other.1 == key.1 && streams[other].blocking;
        self.captures.iter_mut().filter(move |(other, _)| ahead(other)).map(|(_, capture)| capture)
    }

    fn event(&mut self, handle: Handle) -> Answer<&mut Event> {
        self.rule(self.events.contains_key(&handle), INVALID_HANDLE, "no such event")?;
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    fn record(&mut self, handle: Handle, stream: Handle) -> Answer {
        self.current()?;
        let (context, key) = (self.event(handle)?.context, self.stream(stream)?);
        self.rule(context == key.1, INVALID_HANDLE, "the event and the stream are of two contexts")?;
        let ticket = new_handle();
        let capture = self.queue(key, Work::Mark { event: handle, ticket })?;
        self.event(handle)?.state = capture.map_or(State::Waiting(ticket), State::Captured);
        Ok(())
    }

    /// In any context or none.
    fn query(&mut self, handle: Handle) -> Answer {
        let (state, context) = (self.event(handle)?.state, self.event(handle)?.context);
        if let State::Captured(id) = state {
            self.captures.values_mut().filter(|capture| capture.id == id).for_each(|capture| capture.broken = true);
            self.note("the event is a part of a graph");
            return Err(CAPTURED_EVENT); // in any mode
        }
        ensure(state != State::Lost, CONTEXT_IS_DESTROYED)?;
        self.check_faults(context)?;
        self.check_capture()?;
        ensure(state == State::Done, NOT_READY)
    }

    fn exchange_capture_mode(&mut self, mode: *mut CaptureMode) -> Answer {
        // SAFETY: the API's contract: null, or a mode of the caller's.
        let mode = unsafe { mode.as_mut() }.ok_or(INVALID_VALUE)?;
        self.rule(*mode <= RELAXED, INVALID_VALUE, "unknown mode")?;
        std::mem::swap(mode, &mut self.thread().capture_mode);
        Ok(())
    }

    /// A call that no graph can hold breaks the captures that forbid it to this thread. All captures are global ones.
    fn check_capture(&mut self) -> Answer {
        let (thread, mode) = (this_thread(), self.thread().capture_mode);
        let forbid = |capture: &&mut Capture| mode < THREAD_LOCAL || mode < RELAXED && capture.thread == thread;
        let broken = self.captures.values_mut().filter(forbid).map(|capture| capture.broken = true).count();
        self.rule(broken == 0, STREAM_CAPTURE_UNSUPPORTED, "a call that breaks a capture")
    }
}

// --- for tests: the scene, failures, and what the driver holds ---

macro_rules! controls {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $body:expr;)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> $result {
            control(stringify!($name), $body)
        }
    )*};
}

fn control<T>(name: &'static str, body: impl FnOnce(&mut Driver) -> T) -> T {
    let mut driver = lock();
    driver.calling = name;
    body(&mut driver)
}

controls! {
    /// A driver that nobody has called yet, with so many devices. Options, failures and counts are as at the start.
    fake_reset(devices: u32) -> () = |driver| {
        OWNER.store(0, Relaxed);
        *driver = Driver { waiting: driver.waiting, ..Driver::default() };
        driver.set("devices", devices.into());
        LET_GO.notify_all();
    };
    /// Sets one of [`OPTIONS`].
    fake_set(option: *const c_char, value: u64) -> () = |driver| driver.set(&text(option), value);
    /// Lets the nth call from here on fail once, without effect (1: the next one); 0: all of them, until code 0 is set.
    fake_fail(call: *const c_char, nth: u32, code: Code) -> () = |driver| match code {
        0 => driver.failures.retain(|failure| failure.call != symbol(call)),
        _ => driver.failures.push(Failure { call: symbol(call), count: nth, code }),
    };
    /// Hides a symbol from cuGetProcAddress. What `dlsym` finds, the compiler's flags decide.
    fake_hide(call: *const c_char) -> () = |driver| driver.hidden.extend([symbol(call)]);
    /// Holds calls of this name back, as a driver that takes its time (1), or lets them go (0).
    fake_hold(call: *const c_char, hold: i32) -> () = |driver| {
        let _ = if hold == 0 { driver.held.remove(symbol(call)) } else { driver.held.insert(symbol(call)) };
        LET_GO.notify_all();
    };
    /// Threads that are held back.
    fake_held() -> u64 = |driver| driver.waiting;
    /// The driver is gone from here on, as in a process that ends.
    fake_teardown() -> () = |driver| driver.torn_down = true;
    /// Somebody destroys the primary context under those who retain it.
    fake_reset_context(device: i32) -> () = |driver| driver.end_context(device, Life::Reset);
    /// A kernel's fault, or a device that fell off the bus, breaks the primary context: what works in it answers this
    /// code (700, 719, 999) from here on, and what is queued in it is never done.
    fake_break_context(device: i32, code: Code) -> () = |driver| driver.break_context(device, code);

    /// Calls of this name so far, failed ones too; of all names for null.
    fake_calls(call: *const c_char) -> u64 = |driver| {
        let wanted = |name: &str| call.is_null() || name == symbol(call);
        driver.calls.iter().filter(|(name, _)| wanted(name)).map(|(_, count)| count).sum()
    };
    /// Ranges that are registered.
    fake_live() -> u64 = |driver| driver.registered().count() as u64;
    /// Bytes in them.
    fake_live_bytes() -> u64 = |driver| driver.registered().map(|range| range.len() as u64).sum();
    /// One of them, in the order of addresses; -1 past the last.
    fake_live_range(index: u64, start: *mut usize, bytes: *mut usize) -> i32 = |driver| {
        let range = driver.registered().nth(index as usize).ok_or(INVALID_VALUE);
        let given = range.and_then(|range| give(start, range.start).and_then(|()| give(bytes, range.len())));
        -i32::from(given.is_err())
    };
    /// 1 where one registered range holds all these bytes.
    fake_is_live(start: usize, bytes: usize) -> i32 = |driver| {
        driver.registered().any(|range| range.contains(&start) && bytes <= range.end - start).into()
    };
    /// Events that exist.
    fake_live_events() -> u64 = |driver| driver.events.len() as u64;
    /// Streams that were created and not destroyed.
    fake_live_streams() -> u64 = |driver| {
        driver.streams.iter().filter(|(key, stream)| key.0 > LAST_DEFAULT_STREAM && !stream.destroyed).count() as u64
    };
    /// Copies and events that streams have yet to do.
    fake_pending_work() -> u64 = |driver| driver.streams.values().map(|stream| stream.work.len() as u64).sum();
    /// How often the primary context is retained.
    fake_retained(device: i32) -> u64 = |driver| driver.primary(device).retained;
    /// Primary contexts that were made for the device so far.
    fake_contexts_made(device: i32) -> u64 = |driver| driver.primary(device).made;
    /// The context that is current on this thread; null for none.
    fake_current() -> Handle = Driver::top;
    /// Contexts on this thread's stack, and on those of all threads that ever called.
    fake_depth() -> u64 = |driver| driver.thread().stack.len() as u64;
    fake_depth_of_all() -> u64 = |driver| driver.threads.values().map(|thread| thread.stack.len() as u64).sum();
    /// What a correct client does not do and this one did; failures that were ordered do not count.
    fake_wrong() -> u64 = |driver| driver.wrong.len() as u64;
    /// One of them, in words; -1 past the last.
    fake_wrong_text(index: u64, buffer: *mut c_char, capacity: u64) -> i32 = |driver| {
        let what = driver.wrong.get(index as usize).ok_or(INVALID_VALUE);
        -i32::from(what.and_then(|what| give_text(buffer, capacity as usize, what)).is_err())
    };

    /// Queues a copy, as cuMemcpyHtoDAsync and its like do.
    fake_copy_async(stream: Handle, target: usize, source: usize, bytes: usize) -> Code =
        |driver| code_of(driver.queue_copy(stream, target, source, bytes));
    /// Lets a stream do so many of its copies and events, and says how many there were; a default one in each context.
    fake_advance(stream: Handle, steps: u32) -> u64 = |driver| driver.advance_named(stream..=stream, steps as usize);
    /// Lets all streams do all of their work.
    fake_advance_all() -> u64 = |driver| driver.advance_named(0..=Handle::MAX, usize::MAX);
    /// This thread begins to capture the stream's work into a graph.
    fake_begin_capture(stream: Handle) -> Code = |driver| code_of(driver.stream(stream).and_then(|key| {
        ensure(key.0 != LEGACY_STREAM, STREAM_CAPTURE_UNSUPPORTED)?;
        driver.captures.insert(key, Capture { id: new_handle(), thread: this_thread(), broken: false });
        Ok(())
    }));
    /// Ends that; 901 where a call has broken it.
    fake_end_capture(stream: Handle) -> Code = |driver| code_of(driver.stream(stream).and_then(|key| {
        let capture = driver.captures.remove(&key).ok_or(INVALID_VALUE)?;
        ensure(!capture.broken, STREAM_CAPTURE_INVALIDATED)
    }));
}

/// The exported call of this name.
fn symbol(name: *const c_char) -> &'static str {
    let name = text(name);
    let known = API.iter().find(|entry| entry.symbol == name);
    known.unwrap_or_else(|| abort(&format!("there is no call {name}"))).symbol
}

impl Driver {
    fn registered(&self) -> impl Iterator<Item = Range<usize>> {
        let registered = self.ranges.iter().filter(|(_, known)| known.memory.is_none());
        registered.map(|(start, known)| *start..known.end)
    }

    fn advance_named(&mut self, names: RangeInclusive<Handle>, limit: usize) -> u64 {
        let named = self.streams.range((*names.start(), 0)..=(*names.end(), Handle::MAX));
        let keys: Vec<StreamKey> = named.map(|(key, _)| *key).collect();
        keys.into_iter().map(|key| self.advance(key, limit)).sum()
    }
}
