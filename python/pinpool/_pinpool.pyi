"""Page-locked host memory, in Rust. Import these names from `pinpool`."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsIndex, final

import numpy.typing as npt
import torch
from typing_extensions import CapsuleType

from pinpool._doctor import Report
from pinpool._types import Event, LiveBlock, Progress, Shape, Stats

__version__: str

class PinpoolError(RuntimeError):
    """Base of pinpool's own errors."""

class MemlockLimitError(PinpoolError):
    """The kernel refuses to lock more memory (`ulimit -l`). All sizes are in bytes."""

    wanted: int
    locked: int
    soft_limit: int
    hard_limit: int

class DriverUnavailableError(PinpoolError):
    """A driver, or the device that was asked for, cannot be used. `absent`: there is none at all."""

    absent: bool

class DriverError(PinpoolError):
    """A driver refused a call."""

    driver: str
    call: str
    code: int
    code_name: str
    device: str | None
    bytes: int

class OutOfPinnedMemoryError(PinpoolError):
    """The pool's budget is used up. All sizes are in bytes.

    `oldest`: how many seconds ago the oldest event was recorded that pending memory waits for. `lost`: in quarantine
    or leaked, never to be used again.
    """

    wanted: int
    limit: int
    allocated: int
    cached: int
    pending: int
    lost: int
    oldest: float | None

class WrittenAfterReleaseError(PinpoolError):
    """Debug mode: a block was written to after its release. It is not handed out again."""

    address: int
    nbytes: int
    offset: int
    generation: int
    origin: str | None

class StoreDamagedError(PinpoolError):
    """A file of a swap store does not hold what was written to it."""

    file: Path
    offset: int
    nbytes: int

@final
class PinnedPool:
    """A pool of pinned host memory: exact sizes, instant reuse, a hard budget.

    `devices`: what the memory is registered with. "auto": the one device that this process works on (torch's current
    accelerator; else the device of this thread's CUDA context; else the one of LOCAL_RANK, or the first), or none where
    there is none. None or "host": it is only locked. Or "cuda:0", "xpu:1", an object with `.type` and `.index`, or a
    list. CUDA registrations serve every CUDA device; Level Zero maps memory for one device only.
    `register`: "require" (a device that refuses is an error), "try" (go on with locked memory, and say why in
    `stats()["unregistered"]`) or "off".
    `max_bytes`: the most the pool ever holds; unset, 90 % of the memory that the machine and the control group have
    left, or what RLIMIT_MEMLOCK leaves, whichever is less. `pages`: "auto" (transparent huge pages where they come
    cheap), "4k", "thp", "2m" or "1g"; a kind that cannot be had is an error. `numa`: the node that all memory lies on.
    `threads`: how many prefault, by default one a core. `debug`: fill released memory with NaN, and raise
    WrittenAfterReleaseError when it has been written to before it is used again; slow.

    Threads may share a pool. In a forked child, a pool of the parent refuses every request. Also a context manager.

    >>> from pinpool import PinnedPool
    >>> with PinnedPool(max_bytes=1 << 20) as pool:
    ...     array = pool.zeros((2, 3), "float32")
    ...     bytes(array) == bytes(24), pool.is_pinned(array)
    (True, True)
    """

    def __new__(
        cls,
        devices: object = "auto",
        *,
        max_bytes: SupportsIndex | None = None,
        register: str = "require",
        pages: str = "auto",
        numa: int | None = None,
        threads: int | None = None,
        debug: bool = False,
    ) -> Self: ...
    def empty(self, shape: Shape, dtype: object = None, *, timeout: float | None = 0.0) -> PinnedArray:
        """Take an array that holds whatever its memory held before.

        `shape`: lengths in elements. `dtype`: a name ("bfloat16"), a numpy or a torch dtype; by default uint8.
        `timeout`: seconds to wait for memory to come back when the budget is used up; 0: fail at once, None: wait.

        ValueError: bad shape or dtype, or the pool is closed. OutOfPinnedMemoryError, MemlockLimitError: over the
        budget. PinpoolError: the pool is of the parent process, or its page kind cannot be had. OSError: the system
        refused.

        >>> from pinpool import PinnedPool
        >>> PinnedPool().empty((3, 5), "bfloat16").nbytes
        30
        """

    def zeros(self, shape: Shape, dtype: object = None, *, timeout: float | None = 0.0) -> PinnedArray:
        """Take an array and fill it with zeros. Otherwise as `empty`.

        >>> from pinpool import PinnedPool
        >>> bytes(PinnedPool().zeros(4)) == bytes(4)
        True
        """

    def empty_like(self, obj: object, *, timeout: float | None = 0.0) -> PinnedArray:
        """Take an array of the `shape` and `dtype` of a tensor or an array. Otherwise as `empty`.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> pool.empty_like(pool.empty((2, 2), "int16")).shape
        (2, 2)
        """

    def register(self, obj: object) -> Registration:
        """Pin memory that its caller owns, in place, and register it with the pool's devices.

        `obj`: a torch tensor, a numpy array, anything on the CPU with the buffer protocol or DLPack, or an
        `(address, nbytes)` pair. The very same range may be registered again, and stays pinned until every
        registration of it is closed. Read-only memory is fine.

        TypeError: no dense host memory. ValueError: overlaps another pinned range, or has no bytes.
        MemlockLimitError, OSError: the system refused.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> buffer = bytearray(10_000)
        >>> with pool.register(buffer):
        ...     pool.is_pinned(memoryview(buffer)[100:200])
        True
        """

    def is_registered(self, obj: object, device: object) -> bool:
        """Tell whether all bytes of an object are registered with a device. See `pinpool.is_registered`."""

    def is_pinned(self, obj: object) -> bool:
        """Tell whether all bytes of an object are pinned, by whatever pool or registration of this process.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> pool.is_pinned(pool.empty(100)), pool.is_pinned(bytes(100))
        (True, False)
        """

    def record_stream(self, obj: object, stream: object = None) -> None:
        """Keep a block of this pool from reuse until the work is done that was queued on a CUDA stream before.

        See `pinpool.record_stream`, which does the same for whatever pool; this one raises ValueError for a block of
        another.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool("host")
        >>> pool.record_stream(pool.empty(100), 0)
        """

    def defer(self, obj: object, event: Event) -> None:
        """Keep a block of this pool from reuse until an event is done: anything with `query()`.

        See `pinpool.defer`, which does the same for whatever pool; this one raises ValueError for a block of another.
        """

    def live_blocks(self) -> list[LiveBlock]:
        """List the blocks that have an owner: address, nbytes, generation and origin of each. For debug=True only.

        Bytes are in whole pages. The generation counts how often a block at that address was handed out; the origin is
        where in Python that was.
        ValueError: without debug=True nothing is kept of them.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool("host", debug=True)
        >>> array = pool.empty(100)
        >>> [(block["nbytes"], block["generation"]) for block in pool.live_blocks()]
        [(4096, 1)]
        """

    def reserve(self, nbytes: SupportsIndex, *, progress: Progress | bool | None = None) -> None:
        """Grow the pool by `nbytes` ahead of use, all or nothing.

        `progress`: a callable of (bytes done, bytes in all), or True for a tqdm bar when tqdm is installed. Ctrl-C and
        an exception of the callable end it and undo everything. Errors as of `empty`.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> pool.reserve(8 << 20)
        >>> pool.stats()["cached_bytes"] == 8 << 20
        True
        """

    def trim(self) -> int:
        """Give all idle memory back to the system, and return how many bytes that were.

        OSError where the system refuses some; the rest is given back all the same.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> del (_ := [pool.empty(5 << 20)])[:]
        >>> pool.trim() == 5 << 20
        True
        """

    def stats(self) -> Stats:
        """Tell what the pool holds now, in bytes and counts.

        Reserved is allocated + cached + pending + quarantined + leaked; reserved / requested is the waste. Pending
        memory waits for device work or a driver; memory in quarantine is never used again, because an event of it
        failed, and `quarantine_reason` says how. `os_calls` counts the memory system calls that pinpool has made in
        this process.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> array = pool.empty(5000)
        >>> (pool.stats()["requested_bytes"], pool.stats()["blocks"])
        (5000, 1)
        """

    def close(self) -> None:
        """Refuse further requests and give idle memory back. Live arrays stay valid. A second call does nothing.

        >>> from pinpool import PinnedPool
        >>> pool = PinnedPool()
        >>> pool.close()
        >>> pool.closed
        True
        """

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None = None,
        _value: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None: ...

@final
class PinnedArray:
    """Pinned memory with a shape and a dtype. Row-major, starting on a page.

    Hand it to `torch.from_dlpack`, `numpy.asarray` or `file.readinto`. The memory goes back to its pool when the array
    and everything that was made from it are gone, in any order, on any thread.
    """

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Export the memory as a DLPack capsule: the versioned form where `max_version` is (1, 0) or later.

        The device is the CPU, (1, 0), and the memory is shared. BufferError: another device, a stream, or a copy.
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """Tell the DLPack device: the CPU, (1, 0)."""

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> npt.NDArray[Any]:
        """Share the memory as a numpy array. TypeError for element types that numpy lacks (see ml_dtypes)."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions, in elements."""

    @property
    def dtype(self) -> str:
        """Name of the element type, as torch and numpy spell it."""

    @property
    def nbytes(self) -> int:
        """Bytes that were asked for."""

    @property
    def ptr(self) -> int:
        """Address of the first byte; 0 for an array without one. ValueError once released."""

    @property
    def released(self) -> bool:
        """Whether `release` was called."""

    def _bytes(self) -> PinnedArray: ...
    def release(self) -> None:
        """Let go of the memory now. It returns to the pool with the last tensor or view made from it.

        A second call does nothing.
        """

@final
class Registration:
    """Memory that its caller owns, pinned in place until `close()`. It keeps the object alive.

    Also a context manager.
    """

    @property
    def ptr(self) -> int:
        """Address of the first byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""

    @property
    def closed(self) -> bool:
        """Whether the pinning has ended. In a forked child it always has."""

    @property
    def unregistered(self) -> str | None:
        """Why the memory is not registered with the pool's devices, where register="try" let that pass."""

    def close(self) -> None:
        """Unpin the memory now, and let go of the object. A second call does nothing.

        OSError or DriverError where that is refused: the memory is still pinned then, and `close()` may be called
        again. Some Level Zero drivers keep such memory for some seconds, and hand it to others: `close()` waits for its
        end, up to 20 seconds. PinpoolError after that, or what a signal handler raises: the memory is not to be used
        then, its object is kept, and `close()` may be called again. In a forked child it lets go of the object only.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        _kind: type[BaseException] | None = None,
        _value: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None: ...

def record_stream(obj: object, stream: object = None) -> None:
    """Keep a block from reuse until the work is done that was queued on a CUDA stream before this call.

    Call it behind every copy to or from pool memory that may still run when the tensor goes: registered memory is
    copied without the host, and torch follows only blocks of its own. `obj`: anything in the block, a view or a slice
    will do, of whatever pool. `stream`: a torch.cuda.Stream, an object with `__cuda_stream__()`, a handle (an integer),
    or None for torch's current stream. Costs one event; nothing waits. For memory without a device it does nothing: its
    copies are done when they return. (Kernels that read host memory by themselves, as on Grace, need `defer`.)
    `PinnedPool.record_stream` also checks that the block is of that pool.

    ValueError: `obj` is in no live block. TypeError: no stream. DriverError: the stream is none of the driver's.
    PinpoolError: a graph is being captured from the stream. After the last two the block is not reused at all, unless a
    later call succeeds; never after a capture, since a graph may be launched at any time.

    >>> import pinpool
    >>> pool = pinpool.PinnedPool("host")
    >>> pinpool.record_stream(pool.empty(100), 0)
    """

def defer(obj: object, event: Event) -> None:
    """Keep a block from reuse until an event is done.

    `obj`: anything in the block, of whatever pool. `event`: anything with `query()` that tells whether it is done:
    torch.cuda.Event, torch.xpu.Event, or your own. It is asked when memory is wanted, on the thread that wants it, and
    never when a tensor goes; if it raises, the block is never reused, and `stats()` says why. It must not keep `obj`
    or the pool alive. `PinnedPool.defer` also checks that the block is of that pool.

    ValueError: `obj` is in no live block. TypeError: no event.

    >>> import threading, pinpool
    >>> class Copied(threading.Event):
    ...     query = threading.Event.is_set
    >>> pool, copied = pinpool.PinnedPool("host"), Copied()
    >>> array = pool.empty(100)
    >>> pinpool.defer(array, copied)
    >>> array.release()
    >>> pool.stats()["pending_bytes"]
    4096
    >>> copied.set()
    >>> del (_ := [pool.empty(100)])[:]
    >>> pool.stats()["pending_bytes"]
    0
    """

def is_pool_memory(obj: object) -> bool:
    """Tell whether all bytes of an object lie in one live block of a pool."""

def is_pinned(obj: object) -> bool:
    """Tell whether all bytes of a tensor, an array, a buffer or an (address, nbytes) pair lie in one pinned range.

    Asks neither a driver nor torch. A strided view is asked about from its first to its last byte. An object without
    bytes is not pinned, nor is a tensor that has no host memory.

    >>> import pinpool
    >>> array = pinpool.PinnedPool().empty(100)
    >>> pinpool.is_pinned((array.ptr + 99, 1)), pinpool.is_pinned((array.ptr, 1 << 40))
    (True, False)
    """

def is_registered(obj: object, device: object) -> bool:
    """Tell whether all bytes of an object are registered with a device, or with one whose registrations serve it.

    `device`: "cuda:0", "xpu:1", or an object with `.type` and `.index`. Asks no driver.

    >>> import pinpool
    >>> pinpool.is_registered(pinpool.PinnedPool("host").empty(100), "cuda:0")
    False
    """

def register(obj: object) -> Registration:
    """Pin memory that its caller owns, in place. See `PinnedPool.register`.

    >>> import pinpool
    >>> registration = pinpool.register(bytearray(5000))
    >>> registration.nbytes
    5000
    >>> registration.close()
    """

def torch_empty(pool: PinnedPool, shape: Shape, dtype: object, *, timeout: float | None = 0.0) -> torch.Tensor:
    """Make an uninitialized tensor in pool memory.

    The memory goes back to the pool with the last tensor that shares it. `shape` is in elements, `timeout` in seconds;
    both, and the errors, are those of `PinnedPool.empty`.

    >>> import torch, pinpool, pinpool.torch
    >>> pinpool.torch.empty(pinpool.PinnedPool(), (2, 3), torch.bfloat16).shape
    torch.Size([2, 3])
    """

def unpin(obj: object) -> bool:
    """Unlock the pool block that holds an object now; its memory stays valid until the last alias is gone.

    A block with a region of its own is unregistered, too; drivers that keep such memory for others are waited for.
    False: no pool block, or unlocked before. ValueError for memory that a Registration pins. Other errors leave the
    block locked; after PinpoolError, a driver may hand its memory to others, and it is not to be used.
    """

def use_exchange_api(types: Sequence[type]) -> bool:
    """Use the DLPack exchange API of these tensor types, which share the first one's. False: it has none that fits."""

def find_devices(kind: str, library: str | None) -> list[dict[str, Any]]:
    """List the devices of a kind: name, ordinal, uuid, description, method (or None) and reason (or None)."""

def current_device(kind: str, library: str | None) -> int | None:
    """Tell the ordinal of the device that the calling thread works on, where its driver knows such a thing."""

def ordinal_of(kind: str, library: str | None, uuid: bytes) -> int:
    """Tell the ordinal of the one device of a kind with this UUID. DriverUnavailableError: none, or several."""

def doctor(cuda_library: str | None, level_zero_library: str | None) -> Report:
    """Examine what stands in the way of a large pin: limits, memory, pages, drivers. Makes no context on a device.

    The libraries are loaded instead of the usual ones. A dict with the keys `verdict` (0: all is fine, 1: pinning
    works, with warnings, 2: nothing can be pinned) and `sections`: dicts with `title` and `findings`, which are dicts
    with `topic`, `fact`, `severity` ("ok", "warning", "failure") and `remedy` (or None).

    >>> from pinpool._pinpool import doctor
    >>> [section["title"] for section in doctor(None, None)["sections"]]
    ['system', 'limits', 'pages', 'NUMA', 'trial', 'CUDA', 'Level Zero']
    """

@final
class SwapStore:
    """A swap store. See `pinpool.Swapper`, which is made of it."""

    def __new__(
        cls,
        path: str | os.PathLike[str],
        *,
        block_bytes: SupportsIndex | None,
        queue_depth: SupportsIndex | None,
        engine: str,
        max_bytes: SupportsIndex | None,
        direct: bool | None,
        fixed_buffers: bool,
    ) -> Self: ...
    def write(self, key: str, label: str, obj: object) -> SwapOperation:
        """Begin to store the bytes of an object, with a label."""

    def read(self, key: str, label: str, obj: object) -> SwapOperation:
        """Begin to read an entry of this label into the bytes of an object."""

    def delete(self, key: str) -> SwapOperation:
        """Begin to delete an entry."""

    def describe(self, key: str) -> tuple[str, int]:
        """Tell the label and the number of bytes of what `read` would read."""

    def keys(self) -> list[str]:
        """List the keys of all entries, in no order."""

    def flush(self) -> None:
        """Make everything that is done survive a loss of power."""

    def trim(self) -> int:
        """Give free room back to the file system, and return how many bytes that were."""

    def close(self) -> None:
        """Wait for everything that was begun, and close the store."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    def count_bounce(self, nbytes: int) -> None:
        """Count a copy that was made because memory could not be transferred as it is."""

    def stats(self) -> dict[str, object]:
        """Tell what was done, and what is stored."""

@final
class SwapOperation:
    """One write, read or deletion under way. See `pinpool.Ticket`, which is made of it."""

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end. False: the time is up."""

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""

    def watch(self) -> SwapWatch:
        """Make a file descriptor that is readable from the end on."""

@final
class SwapWatch:
    """A file descriptor that is readable from the end of an operation on. It is closed with this object."""

    def fileno(self) -> int:
        """Tell its number."""

def is_element_type(name: str) -> bool:
    """Tell whether a pool makes arrays of a dtype of this name."""

def swap_misfit(obj: object, target: bool) -> str | None:
    """Tell why the bytes of an object cannot be transferred as they are; None: they can. `target`: to be read into."""
