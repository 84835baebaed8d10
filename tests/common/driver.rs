//! The fake of NVIDIA's driver, compiled once and opened twice: by pinpool, by its path, and here, to set the scene and
//! to see what the driver holds. The benchmarks use this file, too.
#![allow(dead_code)] // each test file uses a part of it
#![allow(unsafe_code)] // calls a library by its symbols

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use libloading::Library;
use pinpool::driver::{Device, Vendor, vendor};

/// Everything that pinpool calls to register memory, where no failure is to go unnoticed. [`EVENT_CALLS`] are others.
pub(crate) const CALLS: [&str; 15] = [
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuGetErrorName",
];

/// What pinpool calls besides to follow the work of streams. The first is made around other calls too, which can do
/// without.
pub(crate) const EVENT_CALLS: [&str; 7] = [
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
];

/// CUDA, as pinpool knows it.
pub(crate) fn cuda() -> &'static Vendor {
    vendor("cuda").expect("a kind of device")
}

/// The fake with its control functions. It stays open, and so what it remembers stays, until the process ends.
pub(crate) struct Fake {
    library: Library,
    path: String,
    queues: Queues,
}

impl Fake {
    /// A driver with so many devices, which nobody has called yet.
    pub(crate) fn new(devices: u32) -> Self {
        Self::lacking(devices, &[])
    }

    /// One that was compiled with these `--cfg`, each of which leaves symbols out.
    pub(crate) fn lacking(devices: u32, missing: &[&str]) -> Self {
        let path = compiled(missing).into_os_string().into_string().expect("UTF-8");
        // SAFETY: the fake has no initializers that do anything.
        let library = unsafe { Library::new(&path) }.expect("the fake was compiled just now");
        let queues = Queues::of(&library);
        let fake = Self { library, path, queues };
        fake.reset(devices);
        fake
    }

    /// What pinpool is to load.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn device(&self, ordinal: u32) -> Arc<dyn Device> {
        cuda().open(Some(&self.path), ordinal).expect("a device of the fake's")
    }

    pub(crate) fn devices(&self, count: u32) -> Vec<Arc<dyn Device>> {
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    fn function<T: Copy>(&self, name: &str) -> T {
        function(&self.library, name)
    }

    pub(crate) fn reset(&self, devices: u32) {
        self.function::<extern "C" fn(u32)>("fake_reset")(devices);
    }

    /// Sets an option: `budget_bytes`, or of one device `ats@1`.
    pub(crate) fn set(&self, option: &str, value: u64) {
        let option = CString::new(option).expect("a name");
        self.function::<extern "C" fn(*const c_char, u64)>("fake_set")(option.as_ptr(), value);
    }

    /// The nth call from here on fails once; 0: all of them, until code 0 is set.
    pub(crate) fn fail(&self, call: &str, nth: u32, code: u32) {
        let call = CString::new(call).expect("a name");
        self.function::<extern "C" fn(*const c_char, u32, u32)>("fake_fail")(call.as_ptr(), nth, code);
    }

    /// Holds calls of this name back, as a driver that takes its time, or lets them go.
    pub(crate) fn hold(&self, call: &str, hold: bool) {
        let call = CString::new(call).expect("a name");
        self.function::<extern "C" fn(*const c_char, c_int)>("fake_hold")(call.as_ptr(), hold.into());
    }

    /// Threads that are held back.
    pub(crate) fn held(&self) -> u64 {
        self.function::<extern "C" fn() -> u64>("fake_held")()
    }

    pub(crate) fn teardown(&self) {
        self.function::<extern "C" fn()>("fake_teardown")();
    }

    /// Somebody destroys the primary context under those who retain it.
    pub(crate) fn reset_context(&self, device: c_int) {
        self.function::<extern "C" fn(c_int)>("fake_reset_context")(device);
    }

    /// A fault of the device: what works in its primary context answers this code, and what is queued is never done.
    pub(crate) fn break_context(&self, device: c_int, code: u32) {
        self.function::<extern "C" fn(c_int, u32)>("fake_break_context")(device, code);
    }

    pub(crate) fn calls(&self, call: &str) -> u64 {
        let call = CString::new(call).expect("a name");
        self.function::<extern "C" fn(*const c_char) -> u64>("fake_calls")(call.as_ptr())
    }

    pub(crate) fn all_calls(&self) -> u64 {
        self.function::<extern "C" fn(*const c_char) -> u64>("fake_calls")(std::ptr::null())
    }

    /// What is registered, in the order of addresses.
    pub(crate) fn live(&self) -> Vec<Range<usize>> {
        let next = self.function::<extern "C" fn(u64, *mut usize, *mut usize) -> c_int>("fake_live_range");
        let range = |index| {
            let (mut start, mut bytes) = (0, 0);
            (next(index, &raw mut start, &raw mut bytes) == 0).then_some(start..start + bytes)
        };
        (0..).map_while(range).collect()
    }

    /// Whether one registered range holds all these bytes.
    pub(crate) fn is_live(&self, start: usize, bytes: usize) -> bool {
        self.function::<extern "C" fn(usize, usize) -> c_int>("fake_is_live")(start, bytes) == 1
    }

    /// Events that exist.
    pub(crate) fn live_events(&self) -> u64 {
        self.function::<extern "C" fn() -> u64>("fake_live_events")()
    }

    /// Streams that were created and not destroyed.
    pub(crate) fn live_streams(&self) -> u64 {
        self.function::<extern "C" fn() -> u64>("fake_live_streams")()
    }

    /// Copies and events that streams have yet to do.
    pub(crate) fn pending_work(&self) -> u64 {
        self.function::<extern "C" fn() -> u64>("fake_pending_work")()
    }

    pub(crate) fn retained(&self, device: c_int) -> u64 {
        self.function::<extern "C" fn(c_int) -> u64>("fake_retained")(device)
    }

    pub(crate) fn contexts_made(&self, device: c_int) -> u64 {
        self.function::<extern "C" fn(c_int) -> u64>("fake_contexts_made")(device)
    }

    /// The context that is current on this thread; 0 for none.
    pub(crate) fn current(&self) -> usize {
        self.function::<extern "C" fn() -> usize>("fake_current")()
    }

    /// Contexts on the stacks of all threads.
    pub(crate) fn depth_of_all(&self) -> u64 {
        self.function::<extern "C" fn() -> u64>("fake_depth_of_all")()
    }

    /// What pinpool, or whoever called, did wrong.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let count = self.function::<extern "C" fn() -> u64>("fake_wrong")();
        let text = self.function::<extern "C" fn(u64, *mut c_char, u64) -> c_int>("fake_wrong_text");
        let read = |index| {
            let mut buffer = [0; 256];
            text(index, buffer.as_mut_ptr(), 256);
            // SAFETY: the fake ends its text with a zero.
            unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_string_lossy().into_owned()
        };
        (0..count).map(read).collect()
    }

    /// Somebody else in this process retains a primary context, and makes it current on this thread.
    pub(crate) fn enter_context(&self, device: c_int) -> usize {
        let mut context = 0;
        let retain = self.function::<extern "C" fn(*mut usize, c_int) -> u32>("cuDevicePrimaryCtxRetain");
        assert_eq!(self.function::<extern "C" fn(u32) -> u32>("cuInit")(0), 0);
        assert_eq!(retain(&raw mut context, device), 0);
        assert_eq!(self.function::<extern "C" fn(usize) -> u32>("cuCtxSetCurrent")(context), 0);
        context
    }

    /// Undoes that.
    pub(crate) fn leave_context(&self, device: c_int) {
        assert_eq!(self.function::<extern "C" fn(usize) -> u32>("cuCtxSetCurrent")(0), 0);
        self.release_context(device);
    }

    /// Somebody lets go of a primary context.
    pub(crate) fn release_context(&self, device: c_int) {
        assert_eq!(self.function::<extern "C" fn(c_int) -> u32>("cuDevicePrimaryCtxRelease_v2")(device), 0);
    }

    /// Somebody creates a stream of this context, as torch does: one that the legacy default stream does not wait for.
    pub(crate) fn stream_create(&self, context: usize) -> usize {
        const NON_BLOCKING: u32 = 1;
        self.create_stream(context, NON_BLOCKING)
    }

    /// One that the legacy default stream waits for, so that this one cannot be used while the other is captured.
    pub(crate) fn blocking_stream_create(&self, context: usize) -> usize {
        self.create_stream(context, 0)
    }

    fn create_stream(&self, context: usize, flags: u32) -> usize {
        let (mut stream, bare) = (0, self.bare());
        let create = self.function::<extern "C" fn(*mut usize, u32) -> u32>("cuStreamCreate");
        assert_eq!((bare.push(context), create(&raw mut stream, flags), bare.pop()), (0, 0, 0));
        stream
    }

    /// Somebody destroys a stream. What is queued is still done.
    pub(crate) fn stream_destroy(&self, stream: usize) {
        assert_eq!(self.function::<extern "C" fn(usize) -> u32>("cuStreamDestroy_v2")(stream), 0);
    }

    /// Queues a copy, which is done when the stream comes to it, and answers a code. The caller vouches that both ends
    /// are memory until then; of what is registered, the fake notices when it no longer is.
    pub(crate) fn copy_async(&self, stream: usize, target: usize, source: usize, bytes: usize) -> u32 {
        (self.queues.copy)(stream, target, source, bytes)
    }

    /// Lets a stream do so many of its copies and events, and says how many there were.
    pub(crate) fn advance(&self, stream: usize, steps: u32) -> u64 {
        (self.queues.advance)(stream, steps)
    }

    /// Lets all streams do all of their work.
    pub(crate) fn advance_all(&self) -> u64 {
        (self.queues.advance_all)()
    }

    /// This thread begins to capture the stream's work into a graph.
    pub(crate) fn begin_capture(&self, stream: usize) {
        assert_eq!(self.function::<extern "C" fn(usize) -> u32>("fake_begin_capture")(stream), 0);
    }

    /// Ends that. Answers 0, or 901 where a call has broken it.
    pub(crate) fn end_capture(&self, stream: usize) -> u32 {
        self.function::<extern "C" fn(usize) -> u32>("fake_end_capture")(stream)
    }

    /// What captures forbid this thread: 0, as at the start, unless somebody forgot to put it back.
    pub(crate) fn capture_mode(&self) -> c_int {
        const RELAXED: c_int = 2;
        let exchange = self.function::<extern "C" fn(*mut c_int) -> u32>("cuThreadExchangeStreamCaptureMode");
        let swap = |mut mode: c_int| {
            assert_eq!(exchange(&raw mut mode), 0);
            mode
        };
        let found = swap(RELAXED);
        swap(found);
        found
    }

    /// The calls that somebody else in this process makes.
    pub(crate) fn bare(&self) -> Bare {
        Bare {
            push: self.function("cuCtxPushCurrent_v2"),
            pop: self.function("cuCtxPopCurrent_v2"),
            register: self.function("cuMemHostRegister_v2"),
            unregister: self.function("cuMemHostUnregister"),
        }
    }
}

/// A function of the fake's.
fn function<T: Copy>(library: &Library, name: &str) -> T {
    let name = CString::new(name).expect("a symbol");
    // SAFETY: each caller in this file names the signature that `fake_cuda.rs` gives the function.
    *unsafe { library.get::<T>(name.as_c_str()) }.expect("the fake has it")
}

/// What a test calls so often that it is looked up beforehand.
struct Queues {
    copy: extern "C" fn(usize, usize, usize, usize) -> u32,
    advance: extern "C" fn(usize, u32) -> u64,
    advance_all: extern "C" fn() -> u64,
}

impl Queues {
    fn of(library: &Library) -> Self {
        Self {
            copy: function(library, "fake_copy_async"),
            advance: function(library, "fake_advance"),
            advance_all: function(library, "fake_advance_all"),
        }
    }
}

/// The driver's calls about memory, looked up beforehand. They answer codes.
pub(crate) struct Bare {
    push: extern "C" fn(usize) -> u32,
    pop: extern "C" fn(*mut usize) -> u32,
    register: extern "C" fn(*mut c_void, usize, u32) -> u32,
    unregister: extern "C" fn(*mut c_void) -> u32,
}

impl Bare {
    /// Registers memory in the current context, for all contexts.
    pub(crate) fn register(&self, start: usize, bytes: usize) -> u32 {
        const PORTABLE: u32 = 1;
        (self.register)(start as *mut c_void, bytes, PORTABLE)
    }

    pub(crate) fn unregister(&self, start: usize) -> u32 {
        (self.unregister)(start as *mut c_void)
    }

    pub(crate) fn push(&self, context: usize) -> u32 {
        (self.push)(context)
    }

    /// Takes the current context off the thread's stack.
    pub(crate) fn pop(&self) -> u32 {
        let mut context = 0;
        (self.pop)(&raw mut context)
    }
}

/// The compiled fake. Whoever comes first compiles it, and the others wait; later runs find it there.
pub(crate) fn compiled(missing: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/drivers/fake_cuda.rs");
    let name = missing.iter().fold("fake_cuda".to_owned(), |name, missing| format!("{name}-{missing}"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (library, unfinished) = (folder.join(format!("{name}.so")), folder.join(format!("{name}.unfinished")));
    let turn = File::create(folder.join(format!("{name}.lock"))).expect("cargo has made the folder");
    turn.lock().expect("a lock of the kernel's");
    let changed = |path: &Path| fs::metadata(path).and_then(|file| file.modified());
    let compiled = changed(&library).is_ok_and(|library| library > changed(&source).expect("it is there"));
    if !compiled {
        let mut rustc = Command::new("rustc");
        rustc.args(["--crate-type", "cdylib", "-O", "--edition", "2024", "-o"]).arg(&unfinished).arg(&source);
        rustc.args(missing.iter().flat_map(|missing| ["--cfg", missing]));
        let output = rustc.output().expect("who runs cargo has rustc");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        fs::rename(&unfinished, &library).expect("rustc has written it");
    }
    library
}
