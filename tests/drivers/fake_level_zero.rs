//! A Level Zero driver without a device: it keeps the books that a real one keeps, and says what a client did wrong.
//!
//!     rustc --crate-type cdylib -O --edition 2024 fake_level_zero.rs
//!     ZE_ENABLE_ALT_DRIVERS=/path/to/libfake_level_zero.so program
//!
//! The real loader (`libze_loader.so.1`) finds it by that variable, alone or in a comma list. A test steers it through
//! the `fake_ze_` functions at the bottom, after a `dlopen` of the same path; hold that handle, because the loader
//! closes a driver that does not start. What the loader must find at its start comes from the environment:
//! `FAKE_LEVEL_ZERO="devices=3,npu=0x4,zeMemFree=0x70000001"`, options or calls and the code that they answer with.
//!
//! - What a driver may *refuse* (no room, too large, read-only memory) is no fault of the client.
//! - What is *wrong*, by the rules, is answered as drivers answer it, success included, and kept in a list. Where they
//!   crash, on null pointers and on handles that are gone, the answer is an error.
//! - What is unknown (a chained structure, an option, a call) ends the process with a line on stderr. Functions that
//!   are not here are null in the tables, and the loader says so.
//!
//! After a fork the child gets "uninitialized" from everything, and each of its calls counts as wrong there.

#![allow(non_snake_case)] // functions have the names by which clients know them

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::Arguments;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

// --- what can be set ---

macro_rules! options {
    ($($(#[doc = $text:literal])* $name:ident = $default:expr;)*) => {
        struct Options { $($(#[doc = $text])* $name: u64,)* }

        impl Default for Options {
            fn default() -> Self {
                Self { $($name: $default,)* }
            }
        }

        impl Options {
            fn find(&mut self, name: &str) -> Option<&mut u64> {
                match name { $(stringify!($name) => Some(&mut self.$name),)* _ => None }
            }
        }
    };
}

options! {
    /// How many devices there are, up to 255.
    devices = 2;
    /// Bit mask of the devices that are NPUs (type VPU). The others are GPUs.
    npu = 0;
    /// 1: all devices have the UUID of the first.
    same_uuid = 0;
    /// The flags of every device: 1 integrated, 2 sub-device, 4 ECC, 8 on-demand paging.
    device_flags = 0;
    /// `maxMemAllocSize`.
    max_alloc = 32 << 30;
    /// The external-memory descriptor: 0 not listed and ignored, 1 listed and honoured, 2 honoured though not listed,
    /// 3 not listed and refused.
    extension = 1;
    /// The experimental flag that maps the client's memory: 0 refused, 1 honoured, 2 ignored.
    host_pointer = 1;
    /// 0: the three functions that import host memory cannot be found.
    import = 1;
    /// 0: mapping the client's memory succeeds with other memory at another address.
    identity = 1;
    /// The type of memory that is mapped by descriptor from now on: 1 host, 4 host imported.
    memory_type = 1;
    /// 1: mapping beyond or around a mapping ends the process. 0: it succeeds, and freeing one tears the other.
    overlap_aborts = 0;
    /// Bytes that fit into all allocations, mappings and imports together.
    memory = u64::MAX;
    /// 1: freed memory of up to 256 MiB, the client's too, stays with the driver until `fake_ze_forget`, and plain
    /// allocations get it. Real drivers do this for about ten seconds where they see one device.
    reuse = 0;
    /// 0: there is no `zeInitDrivers`, as in old drivers. Read when the loader loads the driver.
    init_drivers = 1;
    /// 0: any range counts as mapped and writable. For measurements: looking it up costs more than all the rest.
    check_maps = 1;
}

// --- the C interface ---

const SUCCESS: u32 = 0;
const OUT_OF_HOST_MEMORY: u32 = 0x7000_0002;
const OUT_OF_DEVICE_MEMORY: u32 = 0x7000_0003;
const UNINITIALIZED: u32 = 0x7800_0001;
const UNSUPPORTED_VERSION: u32 = 0x7800_0002;
const INVALID_ARGUMENT: u32 = 0x7800_0004;
const INVALID_NULL_HANDLE: u32 = 0x7800_0005;
const OBJECT_IN_USE: u32 = 0x7800_0006;
const INVALID_NULL_POINTER: u32 = 0x7800_0007;
const INVALID_SIZE: u32 = 0x7800_0008;
const UNSUPPORTED_SIZE: u32 = 0x7800_0009;
const INVALID_ENUMERATION: u32 = 0x7800_000c;
const UNSUPPORTED_ENUMERATION: u32 = 0x7800_000d;
const UNKNOWN: u32 = 0x7fff_fffe;

// Structures start with their type; the next one of the chain is at 8, and the first member of their own at 16.
const NEXT: usize = 8;
const BODY: usize = 16;
const DRIVER_PROPERTIES: u32 = 0x1;
const DEVICE_PROPERTIES: u32 = 0x3;
const CONTEXT_DESC: u32 = 0xd;
const HOST_MEM_ALLOC_DESC: u32 = 0x16;
const MEMORY_ALLOCATION_PROPERTIES: u32 = 0x17;
const INIT_DRIVER_TYPE_DESC: u32 = 0x2_0021;
const EXTERNAL_MEMMAP_SYSMEM_EXT_DESC: u32 = 0x2_0037;

const API_VERSION: u32 = 0x1_0010;
const VERSION_WITH_INIT_DRIVERS: u32 = 0x1_000b;
const GPUS: u32 = 1;
const NPUS: u32 = 2;
const DEVICE_TYPE_GPU: u32 = 1;
const DEVICE_TYPE_VPU: u32 = 5;
const MEMORY_TYPE_UNKNOWN: u32 = 0;
const MEMORY_TYPE_HOST: u32 = 1;
const FLAG_READ_ONLY: u32 = 1 << 4;
const FLAG_USE_HOST_POINTER: u32 = 1 << 30;
const KNOWN_FLAGS: u32 = 0x1f | FLAG_USE_HOST_POINTER;

/// An extension, as the interface lists them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Extension {
    _name: [u8; 256],
    _version: u32,
}

/// The code of a failed call.
type Answer<T = ()> = Result<T, u32>;

fn ensure(is_so: bool, otherwise: u32) -> Answer {
    if is_so { Ok(()) } else { Err(otherwise) }
}

fn get<T: Copy>(pointer: usize) -> Answer<T> {
    ensure(pointer != 0, INVALID_NULL_POINTER)?;
    // SAFETY: not null, so it is a pointer of the client's to a `T`, as the C interface demands.
    Ok(unsafe { (pointer as *const T).read_unaligned() })
}

fn set<T: Copy>(pointer: usize, value: T) -> Answer {
    ensure(pointer != 0, INVALID_NULL_POINTER)?;
    // SAFETY: as for `get`, and the client wants a `T` written there.
    unsafe { (pointer as *mut T).write_unaligned(value) };
    Ok(())
}

fn text(pointer: *const c_char) -> String {
    // SAFETY: a C string, as the interface demands; null is none.
    let text = (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) });
    text.unwrap_or_default().to_string_lossy().into_owned()
}

/// A text as the interface keeps it: in an array, with zeros behind.
fn fixed<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

fn set_all<T: Copy>(array: usize, items: &[T]) -> Answer {
    items.iter().enumerate().try_for_each(|(at, &item)| set(array + at * size_of::<T>(), item))
}

/// The protocol of all lists: with no room the count is answered, with room the count says how much was written.
fn list<T: Copy>(count: usize, array: usize, items: &[T]) -> Answer {
    let room = get::<u32>(count)? as usize;
    if room == 0 || array == 0 {
        return set(count, items.len() as u32);
    }
    let len = room.min(items.len());
    set_all(array, &items[..len])?;
    set(count, len as u32)
}

/// Nothing that may be chained here is known.
fn expect_end(next: usize) {
    if let Ok(unknown) = get::<u32>(next) {
        stop(&format!("structure type {unknown:#x} in a chain is unknown"));
    }
}

/// Ends the process: the client, or the test, wants what is not here.
fn stop(why: &str) -> ! {
    eprintln!("fake_level_zero: {why}");
    std::process::abort()
}

// --- what the driver knows ---

// Handles are no addresses, so nobody gets far with following one, and a context's is never used again.
const DRIVER: usize = 0x0fa4_d000_0000_0000;
const FIRST_DEVICE: usize = 0x0fa4_de00_0000_0000;
const FIRST_CONTEXT: usize = 0x0fa4_c000_0000_0000;
const PAGE: usize = 4096;
const REUSE_LIMIT: usize = 256 << 20;

#[derive(Clone, Copy)]
struct Context {
    handle: usize,
    first_device: Option<usize>,
}

struct Allocation {
    range: Range<usize>,
    /// The client's memory is mapped for this device alone. `None`: the driver's own memory, for all.
    device: Option<usize>,
    /// The driver's own memory, which lives as long as this, or nothing.
    _memory: Vec<u8>,
    memory_type: u32,
    context: usize,
    id: u64,
    /// What the device has lost, because an overlapping mapping was freed.
    torn: Vec<Range<usize>>,
    /// Freed, and kept for reuse.
    cached: bool,
}

impl Allocation {
    fn is_whole(&self, range: &Range<usize>) -> bool {
        !self.torn.iter().any(|torn| overlap(torn, range))
    }

    fn serves(&self, device: usize, range: &Range<usize>) -> bool {
        self.device.is_none_or(|its| its == device) && contains(&self.range, range) && self.is_whole(range)
    }
}

/// A call that is to fail: the `nth` from now, 1 being the next, or with 0 all.
struct Failure {
    call: &'static str,
    nth: u64,
    code: u32,
}

#[derive(Default)]
struct Driver {
    options: Options,
    is_initialized: bool,
    /// The call that runs.
    call: &'static str,
    calls: BTreeMap<&'static str, u64>,
    failures: Vec<Failure>,
    wrongs: Vec<String>,
    contexts: Vec<Context>,
    contexts_made: usize,
    /// Oldest first: where two hold one address, the older one is found.
    allocations: Vec<Allocation>,
    allocations_made: u64,
    imports: Vec<Range<usize>>,
}

/// The process that initialised the driver; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);
static CALLS_OF_CHILD: AtomicU64 = AtomicU64::new(0);

/// The one driver; nothing in a forked child, where the lock may be held for good.
fn driver() -> Option<MutexGuard<'static, Driver>> {
    static THE: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(Driver::from_environment()));
    let owner = OWNER.load(Ordering::Relaxed);
    let is_ours = owner == 0 || owner == std::process::id();
    is_ours.then(|| THE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs one call of the driver and answers with its code.
fn call(name: &'static str, body: impl FnOnce(&mut Driver) -> Answer) -> u32 {
    let Some(mut driver) = driver() else {
        CALLS_OF_CHILD.fetch_add(1, Ordering::Relaxed);
        return UNINITIALIZED;
    };
    driver.call = name;
    *driver.calls.entry(name).or_default() += 1;
    if let Some(code) = driver.due_failure() {
        return code;
    }
    let has_started = driver.is_initialized || name.starts_with("zeInit");
    let answer = driver
        .demand(has_started, UNINITIALIZED, format_args!("the driver was not initialised"))
        .and_then(|()| body(&mut driver));
    driver.rule(answer != Err(INVALID_NULL_POINTER), format_args!("null pointer"));
    answer.err().unwrap_or(SUCCESS)
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

fn contains(outer: &Range<usize>, inner: &Range<usize>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end
}

fn known_call(name: &str) -> &'static str {
    let known = CALLS.iter().find(|&&call| call == name);
    known.unwrap_or_else(|| stop(&format!("{name:?} is no option and no call")))
}

fn number(text: &str) -> Option<u64> {
    let hexadecimal = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    hexadecimal.unwrap_or_else(|| text.parse()).ok()
}

impl Driver {
    fn from_environment() -> Self {
        let mut driver = Self::default();
        let settings = std::env::var("FAKE_LEVEL_ZERO").unwrap_or_default();
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let parts = setting.split_once('=').and_then(|(name, value)| Some((name, number(value)?)));
            let Some((name, value)) = parts else { stop(&format!("FAKE_LEVEL_ZERO: {setting:?} is no setting")) };
            driver.set(name, value);
        }
        driver
    }

    fn set(&mut self, name: &str, value: u64) {
        match self.options.find(name) {
            Some(option) => *option = value,
            None => self.fail(name, 0, value as u32),
        }
    }

    fn fail(&mut self, call: &str, nth: u64, code: u32) {
        let call = known_call(call);
        if code == SUCCESS {
            self.failures.retain(|failure| failure.call != call);
        } else {
            self.failures.push(Failure { call, nth, code });
        }
    }

    fn due_failure(&mut self) -> Option<u32> {
        let (call, mut due) = (self.call, None);
        self.failures.retain_mut(|failure| match failure.nth {
            _ if failure.call != call => true,
            0 | 1 => {
                due = Some(failure.code);
                failure.nth == 0
            }
            _ => {
                failure.nth -= 1;
                true
            }
        });
        due
    }

    /// Keeps what the client did wrong, if the rule does not hold.
    fn rule(&mut self, holds: bool, otherwise: Arguments) {
        if !holds {
            self.wrongs.push(format!("{}: {otherwise}", self.call));
        }
    }

    /// As `rule`, where drivers answer with an error, or crash.
    fn demand(&mut self, holds: bool, code: u32, otherwise: Arguments) -> Answer {
        self.expect(holds.then_some(()), code, otherwise)
    }

    /// As `demand`, for what must be there.
    fn expect<T>(&mut self, found: Option<T>, code: u32, otherwise: Arguments) -> Answer<T> {
        self.rule(found.is_some(), otherwise);
        found.ok_or(code)
    }

    fn expect_structure(&mut self, structure: usize, kind: u32) -> Answer {
        let found: u32 = get(structure)?;
        self.demand(found == kind, INVALID_ARGUMENT, format_args!("structure type {found:#x} instead of {kind:#x}"))
    }
}

// --- driver, devices, contexts ---

impl Driver {
    fn devices(&self) -> Range<usize> {
        0..self.options.devices as usize
    }

    fn is_npu(&self, device: usize) -> bool {
        device < 64 && self.options.npu >> device & 1 == 1
    }

    /// Starts the driver if it has a device of a wanted type, or no device at all.
    fn initialize(&mut self, types: u32) -> Answer {
        let is_wanted = |device| types & if self.is_npu(device) { NPUS } else { GPUS } != 0;
        ensure(self.devices().is_empty() || self.devices().any(is_wanted), UNINITIALIZED)?;
        self.is_initialized = true;
        let _ = OWNER.compare_exchange(0, std::process::id(), Ordering::Relaxed, Ordering::Relaxed);
        Ok(())
    }

    fn expect_driver(&mut self, handle: usize) -> Answer {
        self.demand(handle == DRIVER, INVALID_NULL_HANDLE, format_args!("{handle:#x} is no driver of ours"))
    }

    fn device(&mut self, handle: usize) -> Answer<usize> {
        let device = handle.wrapping_sub(FIRST_DEVICE);
        let is_ours = self.devices().contains(&device);
        self.demand(is_ours, INVALID_NULL_HANDLE, format_args!("{handle:#x} is no device of ours"))?;
        Ok(device)
    }

    /// As Intel's drivers make it: vendor, device, revision, PCI address.
    fn uuid(&self, device: usize) -> [u8; 16] {
        let bus = if self.options.same_uuid == 1 { 1 } else { device as u8 + 1 };
        [0x86, 0x80, 0x4e, 0xfa, 1, 0, 0, 0, bus, 0, 0, 0, 0, 0, 0, 0]
    }

    fn write_device(&self, device: usize, properties: usize) -> Answer {
        let device_type = if self.is_npu(device) { DEVICE_TYPE_VPU } else { DEVICE_TYPE_GPU };
        let (vendor, model, subdevice, clock) = (0x8086, 0xfa4e, 0, 1000);
        set(properties + BODY, [device_type, vendor, model, self.options.device_flags as u32, subdevice, clock])?;
        set(properties + 40, self.options.max_alloc)?;
        set(properties + 96, self.uuid(device))?;
        set(properties + 112, fixed::<256>(&format!("Fake Level Zero device {device}")))
    }

    fn extensions(&self) -> Vec<Extension> {
        let all = [
            ("ZE_extension_float_atomics", true),
            ("ZE_extension_external_memmap_sysmem", self.options.extension == 1),
            ("ZEX_driver_import_host_pointer", self.options.import == 1),
        ];
        let listed = all.into_iter().filter(|(_, is_listed)| *is_listed);
        listed.map(|(name, _)| Extension { _name: fixed(name), _version: 0x1_0000 }).collect()
    }

    fn extension_function(&self, name: &str) -> Answer<Slot> {
        ensure(self.options.import == 1, INVALID_ARGUMENT)?;
        match name {
            "zexDriverImportExternalPointer" => Ok(zexDriverImportExternalPointer as Slot),
            "zexDriverReleaseImportedPointer" => Ok(zexDriverReleaseImportedPointer as Slot),
            "zexDriverGetHostPointerBaseAddress" => Ok(zexDriverGetHostPointerBaseAddress as Slot),
            _ => Err(INVALID_ARGUMENT),
        }
    }

    fn context(&mut self, handle: usize) -> Answer<Context> {
        let found = self.contexts.iter().find(|context| context.handle == handle).copied();
        let was_ours = handle.wrapping_sub(FIRST_CONTEXT) < self.contexts_made;
        let what = if was_ours { "a destroyed context" } else { "no context of ours" };
        self.expect(found, INVALID_NULL_HANDLE, format_args!("{handle:#x} is {what}"))
    }

    /// Of the devices only the first one matters later; without a list it is the driver's first.
    fn create_context(&mut self, driver: usize, desc: usize, devices: &[usize], out: usize) -> Answer {
        self.expect_driver(driver)?;
        self.expect_structure(desc, CONTEXT_DESC)?;
        expect_end(get(desc + NEXT)?);
        let indices: Vec<_> = devices.iter().map(|&handle| self.device(handle)).collect::<Answer<_>>()?;
        let first_device = indices.first().copied().or(self.devices().next());
        let handle = FIRST_CONTEXT + self.contexts_made;
        set(out, handle)?;
        self.contexts_made += 1;
        self.contexts.push(Context { handle, first_device });
        Ok(())
    }

    /// Live memory outlives its context.
    fn destroy_context(&mut self, handle: usize) -> Answer {
        self.context(handle)?;
        let is_used = self.allocations.iter().any(|allocation| allocation.context == handle && !allocation.cached);
        self.rule(!is_used, format_args!("the context has live memory"));
        self.contexts.retain(|context| context.handle != handle);
        Ok(())
    }
}

// --- host memory ---

impl Driver {
    /// `zeMemAllocHost`. With the flag for host pointers, the out pointer goes in as well.
    fn allocate_host(&mut self, context: usize, desc: usize, len: usize, align: usize, out: usize) -> Answer<usize> {
        let context = self.context(context)?;
        self.expect_structure(desc, HOST_MEM_ALLOC_DESC)?;
        let (flags, given): (u32, usize) = (get(desc + BODY)?, get(out)?);
        self.demand(flags & !KNOWN_FLAGS == 0, INVALID_ENUMERATION, format_args!("unknown flag in {flags:#x}"))?;
        self.demand(len > 0, UNSUPPORTED_SIZE, format_args!("size 0"))?;
        ensure(len as u64 <= self.options.max_alloc, UNSUPPORTED_SIZE)?;
        if let Some([address, len]) = self.external_memory(get(desc + NEXT)?, len)? {
            return self.map(context, address, len, flags, self.options.memory_type as u32);
        }
        if flags & FLAG_USE_HOST_POINTER != 0 && given != 0 && self.options.host_pointer != 2 {
            ensure(self.options.host_pointer == 1, INVALID_ENUMERATION)?;
            return self.map(context, given, len, flags, MEMORY_TYPE_HOST);
        }
        self.allocate(context, len, align)
    }

    /// Address and length in the external-memory descriptor, if one is chained and honoured.
    fn external_memory(&mut self, chain: usize, len: usize) -> Answer<Option<[usize; 2]>> {
        if get::<u32>(chain) != Ok(EXTERNAL_MEMMAP_SYSMEM_EXT_DESC) {
            expect_end(chain);
            return Ok(None);
        }
        expect_end(get(chain + NEXT)?);
        let [address, its_len] = get(chain + BODY)?;
        let extension = self.options.extension;
        self.rule(extension == 1, format_args!("a descriptor of the external-memory extension, which is not listed"));
        self.rule(address != 0, format_args!("an external-memory descriptor without memory"));
        self.rule(its_len == len, format_args!("size {len}, but {its_len} in the descriptor, which counts"));
        ensure(extension != 3, UNSUPPORTED_ENUMERATION)?;
        Ok((extension != 0 && address != 0).then_some([address, its_len]))
    }

    /// Plain memory: what is kept for reuse, or new.
    fn allocate(&mut self, context: Context, len: usize, align: usize) -> Answer<usize> {
        self.rule(align == 0 || align.is_power_of_two(), format_args!("alignment {align} is no power of two"));
        if let Some(old) = self.allocations.iter_mut().find(|old| old.cached && old.range.len() >= len) {
            (old.cached, old.context) = (false, context.handle);
            return Ok(old.range.start);
        }
        self.expect_room(len)?;
        let (mut memory, align) = (Vec::<u8>::new(), align.next_power_of_two().max(PAGE));
        memory.try_reserve_exact(len.saturating_add(align)).map_err(|_| OUT_OF_HOST_MEMORY)?;
        let start = memory.as_ptr().addr().next_multiple_of(align);
        Ok(self.insert(start..start + len, context, None, memory, MEMORY_TYPE_HOST))
    }

    /// Maps the client's memory for the first device of the context. A start inside a page fails; a length that is no
    /// multiple of the page passes.
    fn map(&mut self, context: Context, address: usize, len: usize, flags: u32, memory_type: u32) -> Answer<usize> {
        let range = address..address.saturating_add(len);
        let are_pages = address.is_multiple_of(PAGE) && len > 0 && range.len() == len;
        self.demand(are_pages, OUT_OF_HOST_MEMORY, format_args!("{len} bytes at {address:#x} are no pages"))?;
        self.rule(len.is_multiple_of(PAGE), format_args!("{len} bytes are no whole pages"));
        let mapped = self.mapped(&range);
        let is_writable = self.expect(mapped, OUT_OF_HOST_MEMORY, format_args!("not all of {range:#x?} is mapped"))?;
        ensure(is_writable || flags & FLAG_READ_ONLY != 0, INVALID_ARGUMENT)?;
        if self.options.identity == 0 {
            return self.allocate(context, len, PAGE);
        }
        self.expect_room(len)?;
        self.expect_apart(&range);
        let device = context.first_device.ok_or(INVALID_ARGUMENT)?;
        Ok(self.insert(range, context, Some(device), Vec::new(), memory_type))
    }

    fn insert(
        &mut self,
        range: Range<usize>,
        context: Context,
        device: Option<usize>,
        memory: Vec<u8>,
        memory_type: u32,
    ) -> usize {
        let (address, context, id) = (range.start, context.handle, self.allocations_made);
        let (torn, cached) = (Vec::new(), false);
        self.allocations_made += 1;
        self.allocations.push(Allocation { range, device, _memory: memory, memory_type, context, id, torn, cached });
        address
    }

    fn expect_room(&self, len: usize) -> Answer {
        let bytes = self.live_bytes().saturating_add(len as u64);
        ensure(bytes <= self.options.memory, OUT_OF_HOST_MEMORY)
    }

    /// An overlap is wrong, and mostly succeeds.
    fn expect_apart(&mut self, range: &Range<usize>) {
        let mut known = self.allocations.iter().map(|allocation| &allocation.range).chain(&self.imports);
        let Some(other) = known.find(|known| overlap(known, range)).cloned() else { return };
        let what = format!("{range:#x?} overlaps {other:#x?}, which the driver has");
        if self.options.overlap_aborts == 1 && !contains(&other, range) {
            stop(&what);
        }
        self.rule(false, format_args!("{what}"));
    }

    /// Whether this process has mapped all of the range for reading, and if so, whether for writing.
    fn mapped(&self, range: &Range<usize>) -> Option<bool> {
        if self.options.check_maps == 0 {
            return Some(true);
        }
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let (mut reached, mut is_writable) = (range.start, true);
        for (area, protection) in maps.lines().filter_map(area) {
            if reached < range.end && area.contains(&reached) && protection.starts_with('r') {
                is_writable &= protection.starts_with("rw");
                reached = area.end;
            }
        }
        (reached >= range.end).then_some(is_writable)
    }

    fn expect_mapped(&mut self, range: &Range<usize>, otherwise: &str) {
        let is_mapped = self.mapped(range).is_some();
        self.rule(is_mapped, format_args!("{range:#x?} {otherwise}"));
    }

    /// To a driver an address inside is as good as the start.
    fn expect_start(&mut self, range: &Range<usize>, address: usize) {
        self.rule(address == range.start, format_args!("{address:#x} is inside {range:#x?}, all of which goes"));
    }

    /// The allocation that holds an address.
    fn find(&self, address: usize) -> Option<usize> {
        self.allocations.iter().position(|allocation| allocation.range.contains(&address))
    }

    fn free(&mut self, context: Context, address: usize) -> Answer {
        let index = self.expect(self.find(address), INVALID_ARGUMENT, format_args!("{address:#x} is not live"))?;
        let Allocation { ref range, context: maker, cached, .. } = self.allocations[index];
        let range = range.clone();
        self.rule(!cached, format_args!("{address:#x} was freed before"));
        if cached {
            return Ok(());
        }
        self.rule(maker == context.handle, format_args!("{address:#x} was made in another context"));
        self.expect_start(&range, address);
        self.expect_mapped(&range, "was unmapped before it was freed");
        if self.options.reuse == 1 && range.len() <= REUSE_LIMIT {
            self.allocations[index].cached = true;
        } else {
            self.remove(index);
        }
        Ok(())
    }

    /// Ends an allocation. What other mappings for its device share with it is lost to the device.
    fn remove(&mut self, index: usize) {
        let gone = self.allocations.remove(index);
        let others = self.allocations.iter_mut().filter(|other| gone.device.is_some() && other.device == gone.device);
        others.filter(|other| overlap(&other.range, &gone.range)).for_each(|other| other.torn.push(gone.range.clone()));
    }

    fn forget(&mut self) {
        self.call = "fake_ze_forget";
        while let Some(index) = self.allocations.iter().position(|allocation| allocation.cached) {
            let range = self.allocations[index].range.clone();
            self.expect_mapped(&range, "was unmapped while the driver kept it for reuse");
            self.remove(index);
        }
    }

    /// Copies as a device would. Memory that is unknown goes through a staging buffer; of any other, one allocation
    /// must hold all, for this device.
    fn copy(&self, device: usize, range: &Range<usize>) -> Answer {
        let known = self.allocations.iter().find(|allocation| overlap(&allocation.range, range));
        ensure(known.is_none_or(|allocation| allocation.serves(device, range)), OUT_OF_DEVICE_MEMORY)
    }

    fn live(&self) -> impl Iterator<Item = &Range<usize>> {
        let allocations = self.allocations.iter().filter(|allocation| !allocation.cached);
        allocations.map(|allocation| &allocation.range).chain(&self.imports)
    }

    fn live_bytes(&self) -> u64 {
        self.live().map(|range| range.len() as u64).sum()
    }

    /// Whether devices reach every byte of the client's memory, by one mapping or import or by several.
    fn is_reached(&self, range: &Range<usize>) -> bool {
        let mappings = self.allocations.iter().filter(|mapping| mapping.device.is_some() && mapping.is_whole(range));
        let mut parts: Vec<_> = mappings.map(|mapping| &mapping.range).chain(&self.imports).collect();
        parts.sort_by_key(|part| part.start);
        let reach = |end: usize, part: &&Range<usize>| if part.start <= end { end.max(part.end) } else { end };
        parts.iter().fold(range.start, reach) >= range.end
    }

    /// Imports host memory for all devices. A part of an import succeeds and is not counted.
    fn import(&mut self, address: usize, len: usize) -> Answer {
        let range = address..address.saturating_add(len);
        self.demand(address != 0 && len != 0, INVALID_ARGUMENT, format_args!("{len} bytes at {address:#x}"))?;
        self.expect_mapped(&range, "is not all mapped");
        self.expect_apart(&range);
        if let Some(holder) = self.imports.iter().find(|import| import.contains(&address)) {
            return ensure(contains(holder, &range), OBJECT_IN_USE);
        }
        ensure(!self.imports.iter().any(|import| import.contains(&(range.end - 1))), INVALID_SIZE)?;
        self.expect_room(len)?;
        self.imports.push(range);
        Ok(())
    }

    /// The import that holds an address, the inner one where they nest.
    fn find_import(&self, address: usize) -> Option<usize> {
        let holders = self.imports.iter().enumerate().filter(|(_, import)| import.contains(&address));
        holders.max_by_key(|(_, import)| import.start).map(|(index, _)| index)
    }

    fn release(&mut self, address: usize) -> Answer {
        let found = self.find_import(address);
        let index = self.expect(found, INVALID_ARGUMENT, format_args!("{address:#x} is not imported"))?;
        let range = self.imports.remove(index);
        self.expect_start(&range, address);
        self.expect_mapped(&range, "was unmapped before it was released");
        Ok(())
    }
}

/// One line of `/proc/self/maps`: what it spans, and its protection in letters.
fn area(line: &str) -> Option<(Range<usize>, &str)> {
    let (range, protection) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let address = |digits| usize::from_str_radix(digits, 16).ok();
    Some((address(start)?..address(end)?, protection))
}

// --- the calls, and the tables in which the loader finds them ---

macro_rules! calls {
    ($(fn $name:ident($driver:ident $(, $argument:ident: $type:ty)*) $body:block)*) => {
        /// What can be counted and made to fail.
        const CALLS: &[&str] = &[$(stringify!($name)),*];

        $(extern "C" fn $name($($argument: $type),*) -> u32 {
            call(stringify!($name), |$driver| $body)
        })*
    };
}

calls! {
    fn zeInit(driver, flags: u32) { driver.initialize(if flags == 0 { GPUS | NPUS } else { flags }) }

    fn zeInitDrivers(driver, count: usize, drivers: usize, desc: usize) {
        driver.expect_structure(desc, INIT_DRIVER_TYPE_DESC)?;
        driver.initialize(get(desc + BODY)?)?;
        list(count, drivers, &[DRIVER])
    }

    fn zeDriverGet(_driver, count: usize, drivers: usize) { list(count, drivers, &[DRIVER]) }

    fn zeDriverGetApiVersion(driver, handle: usize, version: usize) {
        driver.expect_driver(handle)?;
        set(version, API_VERSION)
    }

    fn zeDriverGetProperties(driver, handle: usize, properties: usize) {
        driver.expect_driver(handle)?;
        driver.expect_structure(properties, DRIVER_PROPERTIES)?;
        let (uuid, version) = (fixed::<16>("fake_level_zero"), 1_u32);
        set(properties + BODY, uuid)?;
        set(properties + BODY + uuid.len(), version)
    }

    fn zeDriverGetExtensionProperties(driver, handle: usize, count: usize, array: usize) {
        driver.expect_driver(handle)?;
        list(count, array, &driver.extensions())
    }

    fn zeDriverGetExtensionFunctionAddress(driver, handle: usize, name: *const c_char, out: usize) {
        driver.expect_driver(handle)?;
        set(out, driver.extension_function(&text(name))?)
    }

    fn zeDeviceGet(driver, handle: usize, count: usize, array: usize) {
        driver.expect_driver(handle)?;
        let handles: Vec<_> = driver.devices().map(|device| FIRST_DEVICE + device).collect();
        list(count, array, &handles)
    }

    fn zeDeviceGetSubDevices(driver, handle: usize, count: usize, array: usize) {
        driver.device(handle)?;
        list::<usize>(count, array, &[])
    }

    fn zeDeviceGetProperties(driver, handle: usize, properties: usize) {
        let device = driver.device(handle)?;
        driver.expect_structure(properties, DEVICE_PROPERTIES)?;
        driver.write_device(device, properties)
    }

    fn zeContextCreate(driver, handle: usize, desc: usize, out: usize) { driver.create_context(handle, desc, &[], out) }

    fn zeContextCreateEx(driver, handle: usize, desc: usize, count: u32, array: usize, out: usize) {
        ensure(count == 0 || array != 0, INVALID_NULL_POINTER)?;
        let devices: Answer<Vec<_>> = (0..count as usize).map(|at| get(array + at * size_of::<usize>())).collect();
        driver.create_context(handle, desc, &devices?, out)
    }

    fn zeContextDestroy(driver, handle: usize) { driver.destroy_context(handle) }

    fn zeMemAllocHost(driver, context: usize, desc: usize, len: usize, align: usize, out: usize) {
        set(out, driver.allocate_host(context, desc, len, align, out)?)
    }

    fn zeMemFree(driver, context: usize, address: usize) {
        let context = driver.context(context)?;
        ensure(address != 0, INVALID_NULL_POINTER)?;
        driver.free(context, address)
    }

    fn zeMemGetAllocProperties(driver, context: usize, address: usize, properties: usize, device: usize) {
        driver.context(context)?;
        driver.expect_structure(properties, MEMORY_ALLOCATION_PROPERTIES)?;
        // Nothing else is written where memory is unknown, and the device stays what it was.
        let Some(index) = driver.find(address) else { return set(properties + BODY, MEMORY_TYPE_UNKNOWN) };
        let _ = set(device, 0_usize); // optional, and host memory has none
        let found = &driver.allocations[index];
        set(properties + BODY, found.memory_type)?;
        set(properties + 24, [found.id, PAGE as u64])
    }

    fn zeMemGetAddressRange(driver, context: usize, address: usize, base: usize, len: usize) {
        driver.context(context)?;
        let range = &driver.allocations[driver.find(address).ok_or(UNKNOWN)?].range;
        let _both_are_optional = (set(base, range.start), set(len, range.len()));
        Ok(())
    }

    fn zexDriverImportExternalPointer(driver, handle: usize, address: usize, len: usize) {
        driver.expect_driver(handle)?;
        driver.import(address, len)
    }

    fn zexDriverReleaseImportedPointer(driver, handle: usize, address: usize) {
        driver.expect_driver(handle)?;
        driver.release(address)
    }

    fn zexDriverGetHostPointerBaseAddress(driver, handle: usize, address: usize, base: usize) {
        driver.expect_driver(handle)?;
        let start = driver.imports[driver.find_import(address).ok_or(INVALID_ARGUMENT)?].start;
        let _is_optional = set(base, start);
        Ok(())
    }
}

/// An address in a table of functions.
type Slot = *const c_void;
const ABSENT: Slot = std::ptr::null();

/// Writes the leading slots of a table. The loader's may be shorter than today's, so the rest is left alone.
fn fill(version: u32, table: usize, functions: &[Slot]) -> u32 {
    let answer = ensure(version >> 16 == 1, UNSUPPORTED_VERSION).and_then(|()| set_all(table, functions));
    answer.err().unwrap_or(SUCCESS)
}

#[unsafe(no_mangle)]
extern "C" fn zeGetGlobalProcAddrTable(version: u32, table: usize) -> u32 {
    let has_init_drivers = driver().is_some_and(|driver| driver.options.init_drivers == 1);
    let both = [zeInit as Slot, zeInitDrivers as Slot];
    fill(version, table, if has_init_drivers && version >= VERSION_WITH_INIT_DRIVERS { &both } else { &both[..1] })
}

macro_rules! tables {
    ($($name:ident [$($function:expr),*])*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(version: u32, table: usize) -> u32 {
            fill(version, table, &[$($function as Slot),*])
        }
    )*};
}

tables! {
    zeGetDriverProcAddrTable [
        zeDriverGet, zeDriverGetApiVersion, zeDriverGetProperties, ABSENT, zeDriverGetExtensionProperties,
        zeDriverGetExtensionFunctionAddress
    ]
    zeGetDeviceProcAddrTable [zeDeviceGet, zeDeviceGetSubDevices, zeDeviceGetProperties]
    zeGetContextProcAddrTable [
        zeContextCreate, zeContextDestroy, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT, zeContextCreateEx
    ]
    zeGetMemProcAddrTable [ABSENT, ABSENT, zeMemAllocHost, zeMemFree, zeMemGetAllocProperties, zeMemGetAddressRange]
}

macro_rules! empty_tables {
    ($($name:ident)*) => { tables! { $($name [])* } };
}

// Loaders as old as 1.8 turn a driver away that lacks one of these.
empty_tables! {
    zeGetCommandListProcAddrTable zeGetCommandQueueProcAddrTable zeGetEventPoolProcAddrTable
    zeGetEventProcAddrTable zeGetFenceProcAddrTable zeGetImageProcAddrTable zeGetKernelProcAddrTable
    zeGetModuleBuildLogProcAddrTable zeGetModuleProcAddrTable zeGetPhysicalMemProcAddrTable
    zeGetSamplerProcAddrTable zeGetVirtualMemProcAddrTable

    zesGetDeviceProcAddrTable zesGetDiagnosticsProcAddrTable zesGetDriverProcAddrTable zesGetEngineProcAddrTable
    zesGetFabricPortProcAddrTable zesGetFanProcAddrTable zesGetFirmwareProcAddrTable zesGetFrequencyProcAddrTable
    zesGetLedProcAddrTable zesGetMemoryProcAddrTable zesGetPerformanceFactorProcAddrTable zesGetPowerProcAddrTable
    zesGetPsuProcAddrTable zesGetRasProcAddrTable zesGetSchedulerProcAddrTable zesGetStandbyProcAddrTable
    zesGetTemperatureProcAddrTable

    zetGetCommandListProcAddrTable zetGetContextProcAddrTable zetGetDebugProcAddrTable zetGetDeviceProcAddrTable
    zetGetKernelProcAddrTable zetGetMetricGroupProcAddrTable zetGetMetricProcAddrTable
    zetGetMetricQueryPoolProcAddrTable zetGetMetricQueryProcAddrTable zetGetMetricStreamerProcAddrTable
    zetGetModuleProcAddrTable zetGetTracerExpProcAddrTable
}

// --- what a test says and asks ---

macro_rules! controls {
    ($(
        $(#[doc = $text:literal])*
        fn $name:ident($driver:ident $(, $argument:ident: $type:ty)*) -> $out:ty $body:block
    )*) => {$(
        $(#[doc = $text])*
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $type),*) -> $out {
            let body = |$driver: &mut Driver| -> $out { $body };
            driver().map(|mut driver| body(&mut driver)).unwrap_or_default()
        }
    )*};
}

/// How often the client broke a rule. In a forked child: how often it called.
#[unsafe(no_mangle)]
extern "C" fn fake_ze_wrong() -> u64 {
    driver().map_or_else(|| CALLS_OF_CHILD.load(Ordering::Relaxed), |driver| driver.wrongs.len() as u64)
}

// In a forked child all of these do nothing and answer 0.
controls! {
    /// Back to the defaults, with so many devices. Options, failures, counts, wrongs, contexts and memory are gone, and
    /// what a client still holds is stale. Only that the loader has initialised the driver stays.
    fn fake_ze_reset(driver, devices: u32) -> () {
        let Driver { is_initialized, contexts_made, allocations_made, .. } = *driver;
        *driver = Driver { is_initialized, contexts_made, allocations_made, ..Driver::default() };
        driver.options.devices = devices.into();
    }

    /// Sets an option, or the code that a call answers with from now on; 0 ends that.
    fn fake_ze_set(driver, name: *const c_char, value: u64) -> () { driver.set(&text(name), value) }

    /// The `nth` call from now does nothing and answers with this code: 1 is the next, 0 are all. Code 0 ends all
    /// failures of that call.
    fn fake_ze_fail(driver, call: *const c_char, nth: u64, code: u32) -> () { driver.fail(&text(call), nth, code) }

    /// How often a function was called, failures included. Loaders call some of them on their own.
    fn fake_ze_calls(driver, call: *const c_char) -> u64 {
        driver.calls.get(known_call(&text(call))).copied().unwrap_or_default()
    }

    /// Allocations, mappings and imports that were not given back.
    fn fake_ze_live(driver) -> u64 { driver.live().count() as u64 }

    /// The bytes of `fake_ze_live`.
    fn fake_ze_live_bytes(driver) -> u64 { driver.live_bytes() }

    /// What was freed and is kept for reuse.
    fn fake_ze_cached(driver) -> u64 { driver.allocations.iter().filter(|old| old.cached).count() as u64 }

    /// 1 where devices still reach every byte, through mappings (those kept for reuse included) or imports.
    fn fake_ze_is_live(driver, address: usize, len: usize) -> u32 {
        driver.is_reached(&(address..address.saturating_add(len))).into()
    }

    /// Contexts that were not destroyed.
    fn fake_ze_contexts(driver) -> u64 { driver.contexts.len() as u64 }

    /// What was wrong, as a C string, cut to the buffer. Answers its length; 0 where there is no such wrong.
    fn fake_ze_wrong_text(driver, index: usize, buffer: usize, capacity: usize) -> usize {
        let what = driver.wrongs.get(index).cloned().unwrap_or_default();
        let cut = what.bytes().take(capacity.saturating_sub(1)).chain([0]).take(capacity);
        let _ = set_all(buffer, &cut.collect::<Vec<_>>());
        what.len()
    }

    /// The driver gives up what it keeps for reuse, as real ones do after a while.
    fn fake_ze_forget(driver) -> () { driver.forget() }

    /// Writes the 16 bytes of a device's UUID.
    fn fake_ze_device_uuid(driver, index: u32, out: usize) -> () { _ = set(out, driver.uuid(index as usize)) }

    /// What a device's copy of host memory answers: 0, or 0x70000003 where the memory is not mapped for this device.
    fn fake_ze_copy(driver, device: u32, address: usize, len: usize) -> u32 {
        driver.copy(device as usize, &(address..address.saturating_add(len))).err().unwrap_or(SUCCESS)
    }
}
