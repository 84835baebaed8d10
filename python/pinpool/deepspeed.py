"""DeepSpeed's native pinning without its compiled op: its accelerator dispatch gets memory of a pinpool pool.

    import pinpool.deepspeed
    pinpool.deepspeed.enable()  # and DS_PIN_MEMORY_BACKEND=native in the environment

What DeepSpeed reads from the environment holds here too. `DS_PIN_MEMORY_BACKEND`: only with `native` does its
accelerator come to pinpool, call by call. `DS_PIN_MEMORY_REGISTER_DEVICE` (1, true, yes, on, or 0, false, no, off;
1 by default): whether new buffers are registered with the device.

A buffer is registered by itself, at its exact size, where DeepSpeed's accelerator knows how (CUDA, NPU, SUPA). Where
it does not (XPU), it comes from a pool that is registered with the device as a whole. Where neither can be had, it is
locked only, and DeepSpeed's log says why, once.

The memory of a buffer lives until the last tensor that shares it is gone, whatever became of the tensor that was
handed out. `unpin_memory` unlocks it at once all the same.

DeepSpeed's file engine (AIO) does not ask the accelerator what is pinned: to it, this memory is pinned only where torch
says so, which is with CUDA registration.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.utils.dlpack
from torch._subclasses.fake_tensor import FakeTensor

from pinpool import _devices, _pinpool
from pinpool._pinpool import PinnedPool, PinpoolError
from pinpool.torch import extent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from pinpool._pinpool import PinnedArray

__all__ = ["disable", "enable"]

KNOWN_VERSIONS: Final = "0.19.6 to 0.19.8"


def enable(pool: PinnedPool | None = None) -> None:
    """Let DeepSpeed's native pinning use pinpool from now on, in this process.

    `pool`: where all buffers come from. A pool with devices registers its memory itself, so DeepSpeed's accelerator
    does not, and `DS_PIN_MEMORY_REGISTER_DEVICE=0` is an error with it. By default a pool of pinpool's own is made at
    the first use, and gives memory back to the system that DeepSpeed does not use again.

    Enabling again with the same pool (or again with none) does nothing, and one `disable()` undoes it. All or nothing:
    after an error DeepSpeed is as it was. Threads may call it.

    TypeError: `pool` is none. ValueError: it is closed. RuntimeError: this version of DeepSpeed is not known, buffers
    of DeepSpeed's own op are still alive, or another pool is enabled.
    """
    if pool is not None and not isinstance(pool, PinnedPool):
        raise TypeError(f"enable takes a pinpool.PinnedPool, not {type(pool).__name__}")
    if pool is not None and pool.closed:
        raise ValueError("the pool is closed")
    with _patch_lock:
        if _patch.active is not None:
            _require_same_pool(_patch.active, pool)
            return
        module = _pin_memory_module()
        _require_known(module)
        _require_unused(module)
        _patch.put_on(module, _Backend(pool))


def disable() -> None:
    """Give DeepSpeed its own pinning back, exactly as it was. Without `enable()` before, it does nothing.

    Buffers that are alive stay pinned and registered until the last tensor that shares them is gone, but DeepSpeed
    cannot unpin them any more, until pinpool is enabled again.

    RuntimeError: something else has taken pinpool's place since; nothing is changed.
    """
    with _patch_lock:
        _patch.take_off()


def _require_same_pool(active: _Backend, pool: PinnedPool | None) -> None:
    if active.given_pool is not pool:
        raise RuntimeError("pinpool is enabled with another pool: call pinpool.deepspeed.disable() first")


# What follows knows DeepSpeed. It makes one manager, at the first use of the native backend, from a class that it
# looks up in its own module; the accelerators ask it for everything. So the class and the manager are all there is to
# replace.


_CLASS: Final = "NativePinnedMemory"
_MANAGER: Final = "_shared_native_pins"


def _pin_memory_module() -> ModuleType:
    try:
        return importlib.import_module("deepspeed.utils.pin_memory")
    except ModuleNotFoundError as error:
        raise _unknown("it has no native pinning (deepspeed.utils.pin_memory)") from error


def _require_known(module: ModuleType) -> None:
    """Refuse a DeepSpeed whose parts do not fit together as they do in the versions that are known."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    manager = _part(module, _CLASS)
    _part(module, _MANAGER)
    _require_uses(_part(module, "get_native_pinned_memory"), _CLASS, _MANAGER)
    _require_uses(_part(module, "get_active_native_pinned_memory"), "get_native_pinned_memory")
    for name in ("pin_memory", "is_pinned", "unpin_memory"):
        _require_uses(_part(DeepSpeedAccelerator, name), "get_active_native_pinned_memory")
    if hasattr(DeepSpeedAccelerator, "_pin_fresh"):
        _require_uses(_part(DeepSpeedAccelerator, "_pin_fresh"), "get_active_native_pinned_memory")
    for name, method in inspect.getmembers(manager, callable):
        if not name.startswith("_"):
            _require_same_arguments(name, method)


def _part(owner: object, name: str) -> object:
    try:
        return inspect.getattr_static(owner, name)
    except AttributeError:
        raise _unknown(f"{getattr(owner, '__name__', owner)} has no {name}") from None


def _require_uses(function: object, *names: str) -> None:
    code = getattr(function, "__code__", None)
    unused = [name for name in names if code is None or name not in code.co_names + code.co_varnames]
    if unused:
        raise _unknown(f"{getattr(function, '__qualname__', function)} does not use {', '.join(unused)}")


def _require_same_arguments(name: str, theirs: Callable[..., object]) -> None:
    ours = getattr(_Backend, name, None)
    if ours is None:
        raise _unknown(f"its manager has a method {name}")
    if list(inspect.signature(ours).parameters) != list(inspect.signature(theirs).parameters):
        raise _unknown(f"the arguments of its manager's {name} are {inspect.signature(theirs)}")


def _unknown(what: str) -> RuntimeError:
    import deepspeed

    return RuntimeError(
        f"pinpool.deepspeed does not know DeepSpeed {deepspeed.__version__}: {what}. It knows {KNOWN_VERSIONS}; "
        "nothing was changed"
    )


def _require_unused(module: ModuleType) -> None:
    live = getattr(getattr(module, _MANAGER), "_ranges", None)
    if live:
        raise RuntimeError(
            f"{len(live)} buffers of DeepSpeed's own pinning are alive, and could not be unpinned any more: call "
            "pinpool.deepspeed.enable() before the first of them is made"
        )


class _Patch:
    """What was replaced in DeepSpeed, and by what."""

    def __init__(self) -> None:
        self.active: _Backend | None = None
        self._module: ModuleType | None = None
        self._was: dict[str, Any] = {}
        self._class: Any = None

    def put_on(self, module: ModuleType, backend: _Backend) -> None:
        def native_pinned_memory() -> _Backend:
            """Stand in for the class: whoever makes a manager gets the one there is."""
            return backend

        self._was = {name: getattr(module, name) for name in (_CLASS, _MANAGER)}
        self._module, self._class, self.active = module, native_pinned_memory, backend
        # With no manager, DeepSpeed makes one when it wants it, as ever. The class goes first, for threads that do now.
        setattr(module, _CLASS, native_pinned_memory)
        setattr(module, _MANAGER, None)

    def take_off(self) -> None:
        backend, module = self.active, self._module
        if backend is None or module is None:
            return
        manager = getattr(module, _MANAGER)
        if getattr(module, _CLASS) is not self._class or manager not in (None, backend):
            raise RuntimeError("deepspeed.utils.pin_memory was patched again since enable(): undo that first")
        for name, value in self._was.items():
            setattr(module, name, value)
        self.active = self._module = self._class = None
        self._was = {}
        backend.close()


_patch: Final = _Patch()
_patch_lock = threading.RLock()  # a finalizer that disables may run while it is held


class _Backend:
    """What DeepSpeed takes for its native manager; methods, `_ranges` and `_device_registered` have its names."""

    _handle = None
    """That of the compiled op, which DeepSpeed's own tests replace. There is none here, and nothing reads it."""

    def __init__(self, pool: PinnedPool | None) -> None:
        self.given_pool = pool
        self._sources = _Sources(pool)

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Copy a tensor into new pinned memory, contiguous and detached from autograd."""
        _require_dense(tensor)
        pinned = self._new(tensor, tuple(tensor.shape) if match_shape else (tensor.numel(),))
        if make_copy:
            with torch.no_grad():
                pinned.view(tensor.shape).copy_(tensor)
        return pinned

    def pin_empty(self, example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Take pinned memory of that shape, and of the dtype of `example`, with whatever it held before."""
        _require_dense(example)
        return self._new(example, tuple(shape))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether all bytes of a tensor are pinned."""
        return _pinpool.is_pinned(tensor)

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Unregister and unlock a buffer now. False: it is none, or was unpinned before.

        What the accelerator or the system refuses is raised, and the buffer is still pinned.
        """
        buffer = _books.find(tensor)
        if buffer is None or not buffer.let_go():
            return False
        if hasattr(tensor, "ds_pinned"):
            tensor.ds_pinned = False
        buffer.source.wind_down()
        return True

    @property
    def _ranges(self) -> dict[int, int]:
        return {buffer.base: buffer.base + buffer.nbytes for buffer in _books.all()}

    @property
    def _device_registered(self) -> set[int]:
        return {buffer.base for buffer in _books.all() if buffer.registrar is not None}

    def close(self) -> None:
        self._sources.close()

    def forget_parent(self) -> None:
        """Own nothing of the parent's, in a forked child: it makes pools anew."""
        self._sources = _Sources(self.given_pool)

    def _new(self, example: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        wants_device = _wants_device()  # an error before anything is locked
        if example.is_meta or isinstance(example, FakeTensor):
            return example.new_empty(shape)
        accelerator = _accelerator()
        source = self._sources.choose(accelerator, wants_device)
        array, tensor = source.take(shape, example.dtype)
        if array.nbytes == 0:
            return tensor
        buffer = _Buffer(source, array, tensor)
        is_registered = source.has_registered(buffer)
        if is_registered and not wants_device:
            raise ValueError(f"{_REGISTER} is off, but the pool given to enable() registers what it hands out")
        _books.enter(buffer)
        if wants_device and not is_registered:
            answered_no = not buffer.register_with(accelerator)
            if answered_no and self._sources.turn_to_device_of(accelerator):
                del array, tensor, buffer
                source.wind_down()
                return self._new(example, shape)
        tensor.ds_pinned = True  # type: ignore[attr-defined]
        tensor.ds_pin_base = buffer.base  # type: ignore[attr-defined]
        return tensor


def _require_dense(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"only tensors are pinned, not {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError("sparse, quantized and nested tensors have no dense memory of their own; pin their parts")


_REGISTER: Final = "DS_PIN_MEMORY_REGISTER_DEVICE"


def _wants_device() -> bool:
    value = os.environ.get(_REGISTER, "1").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{_REGISTER} must be one of 1, true, yes, on, 0, false, no, off; it is {value!r}")


class _Accelerator(Protocol):
    """What is asked of DeepSpeed's accelerators; some have less."""

    def device_name(self) -> str: ...
    def current_device(self) -> int: ...
    def register_host_memory(self, address: int, num_bytes: int) -> object: ...
    def unregister_host_memory(self, address: int) -> object: ...
    def pin_memory_alignment(self) -> int: ...


def _accelerator() -> _Accelerator:
    from deepspeed import accelerator

    current: _Accelerator = accelerator.get_accelerator()
    return current


def _registers(accelerator: _Accelerator) -> bool:
    """Tell whether an accelerator has a way of its own to register memory; the base class's only says no."""
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    method = getattr(accelerator, "register_host_memory", None)
    inherited = getattr(DeepSpeedAccelerator, "register_host_memory", None)
    return method is not None and getattr(method, "__func__", method) is not inherited


def _kind_of(accelerator: _Accelerator) -> str | None:
    """Tell the kind of an accelerator's devices; None for one that pinpool has no driver for."""
    kind = accelerator.device_name() if hasattr(accelerator, "device_name") else None
    return kind if kind in _devices.KINDS else None


def _device_of(accelerator: _Accelerator) -> str | None:
    """Tell the device that an accelerator works on, by pinpool's name for it; None as for its kind."""
    kind = _kind_of(accelerator)
    return None if kind is None else f"{kind}:{accelerator.current_device()}"


def _warn_once(text: str) -> None:
    from deepspeed.utils import logger

    logger.warning_once(text)


class _Sources:
    """The pools that buffers come from: the one that was given, or one of our own for each way to register."""

    def __init__(self, given: PinnedPool | None) -> None:
        self._given = None if given is None else _Source(given, is_own=False)
        self._own: dict[str, _Source] = {}
        self._refused: set[str] = set()  # kinds of devices whose accelerator has said no
        self._lock = threading.RLock()  # a finalizer that pins may run while a pool is made

    def choose(self, accelerator: _Accelerator, wants_device: bool) -> _Source:
        if self._given is not None:
            return self._given
        if not wants_device or (_registers(accelerator) and _kind_of(accelerator) not in self._refused):
            return self._own_source("host")
        return self._own_source(_device_of(accelerator) or "host")

    def turn_to_device_of(self, accelerator: _Accelerator) -> bool:
        """Take buffers from a pool of the accelerator's device from now on. False: there is none, or it did already."""
        kind = _kind_of(accelerator)
        if self._given is not None or kind is None or kind in self._refused:
            return False
        self._refused.add(kind)
        return True

    def _own_source(self, device: str) -> _Source:
        with self._lock:
            if device not in self._own:
                self._own.setdefault(device, _Source(PinnedPool(device, register="try"), is_own=True))
            return self._own[device]

    def close(self) -> None:
        with self._lock:
            sources, self._own = self._own, {}
        for source in sources.values():
            source.pool.close()


class _Source:
    """A pool, and whether it is ours to trim."""

    def __init__(self, pool: PinnedPool, *, is_own: bool) -> None:
        self.pool = pool
        self._is_own = is_own
        self._reserved = 0
        self._winds_down = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[PinnedArray, torch.Tensor]:
        """Take a block, as an array and as a tensor that is no view: a view's base would keep the memory too long."""
        array = self.pool.empty(shape, dtype)
        self._winds_down = False
        if self._is_own and self.pool.stats()["reserved_bytes"] > self._reserved:
            self._trim()  # What is idle did not serve: DeepSpeed's start-up drops much that it never asks for again.
        return array, torch.utils.dlpack.from_dlpack(array)

    def has_registered(self, buffer: _Buffer) -> bool:
        """Tell whether the pool itself has registered the memory of a buffer."""
        span = buffer.base, buffer.nbytes
        return any(_pinpool.is_registered(span, device) for device in self.pool.stats()["registered_bytes"])

    def wind_down(self) -> None:
        """Keep nothing idle locked until the next request, unless the pool is somebody else's.

        DeepSpeed unpins when it is done with an engine. Other buffers of the engine are dropped right after that.
        """
        if self._is_own:
            self._winds_down = True
            self._trim()

    def unlock_if_winding_down(self, buffer: _Buffer) -> None:
        """Unlock a buffer that is being dropped, which the pool would keep locked; it cannot be trimmed yet."""
        if self._winds_down and not self.has_registered(buffer):
            with suppress(OSError, PinpoolError, ValueError):  # then it stays locked, and serves the next request
                _pinpool.unpin((buffer.base, buffer.nbytes))

    def _trim(self) -> None:
        with suppress(OSError):  # what the system does not take is in the pool's `leaked_bytes`
            self.pool.trim()
        self._reserved = self.pool.stats()["reserved_bytes"]


class _Buffer:
    """The memory of one tensor that DeepSpeed was given.

    It keeps the memory from everybody else until it was unregistered and unlocked, or the last tensor is gone, whatever
    memory the tensors were given meanwhile. torch lets go of their storage, which is what the weak reference is for,
    before it lets go of the memory.
    """

    def __init__(self, source: _Source, array: PinnedArray, tensor: torch.Tensor) -> None:
        self.base, self.nbytes, self.source = array.ptr, array.nbytes, source
        self.registrar: _Accelerator | None = None
        self.handed_out = weakref.ref(tensor)
        self._storage = weakref.ref(tensor.untyped_storage(), self._end_with_storage)
        self._keeper: PinnedArray | None = array
        self._ended = False
        self._claim = threading.Lock()  # to end it, once; nobody waits for it

    def register_with(self, accelerator: _Accelerator) -> bool:
        """Let an accelerator register the buffer. False: it says that it cannot. Its errors go to the log."""
        if not _registers(accelerator):
            self._warn_if_on_a_device(accelerator)
            return False
        try:
            _require_alignment(self.base, accelerator)
            self.registrar = accelerator  # from here on: an interrupt may come when the device has the memory already
            if accelerator.register_host_memory(self.base, self.nbytes):
                return True
        except Exception as error:
            self.registrar = None
            _warn_once(f"pinpool: the accelerator did not register pinned memory, it is only locked: {error}")
            return True
        self.registrar = None
        return False

    def _warn_if_on_a_device(self, accelerator: _Accelerator) -> None:
        device = _device_of(accelerator)
        if device is not None:
            why = self.source.pool.stats()["unregistered"] or "the pool given to enable() is not made for it"
            _warn_once(f"pinpool: pinned memory is not registered with {device}, it is only locked: {why}")

    def let_go(self) -> bool:
        """Unregister and unlock the memory. False: that was done before, or somebody is at it."""
        storage = self._storage()  # its end comes after this
        if not self._claim.acquire(blocking=False):
            return False
        try:
            if self._ended:
                return False
            self._unregister()
            _pinpool.unpin((self.base, self.nbytes))
            self._end()
        finally:
            self._claim.release()
            del storage
        return True

    def _end_with_storage(self, _: object) -> None:
        """Do what is left to do when the last tensor is gone; on any thread, in the middle of anything."""
        if sys.is_finalizing() or not self._claim.acquire(blocking=False):
            return  # the process ends, or `let_go` is at it
        try:
            if not self._ended:
                self._unregister()
                self.source.unlock_if_winding_down(self)
            self._end()
        except Exception as error:
            _warn_once(f"pinpool: the accelerator did not unregister pinned memory, which is kept: {error}")
        finally:
            self._claim.release()

    def disown(self) -> None:
        """Do nothing more: in a forked child, the memory and its registration are the parent's."""
        self._ended, self.registrar = True, None

    def _unregister(self) -> None:
        if self.registrar is not None:
            self.registrar.unregister_host_memory(self.base)
            self.registrar = None

    def _end(self) -> None:
        self._ended = True
        _books.leave(self)
        self._keeper = None


def _require_alignment(base: int, accelerator: _Accelerator) -> None:
    # DeepSpeed rounds down, and registers bytes of somebody else's.
    alignment = accelerator.pin_memory_alignment() if hasattr(accelerator, "pin_memory_alignment") else 1
    if alignment > 1 and base % alignment:
        raise RuntimeError(f"it wants memory at multiples of {alignment} bytes, and a pool has multiples of a page")


class _Books:
    """The buffers of this process that DeepSpeed knows, by address."""

    def __init__(self) -> None:
        self._live: dict[int, _Buffer] = {}

    def enter(self, buffer: _Buffer) -> None:
        self._live[buffer.base] = buffer

    def leave(self, buffer: _Buffer) -> None:
        if self._live.get(buffer.base) is buffer:
            self._live.pop(buffer.base, None)

    def all(self) -> list[_Buffer]:
        return list(self._live.values())

    def find(self, tensor: torch.Tensor) -> _Buffer | None:
        """Find the buffer that was handed out as this tensor, whatever memory it has now, or that begins with it."""
        buffer = self._live.get(getattr(tensor, "ds_pin_base", 0))
        if buffer is not None and buffer.handed_out() is tensor:
            return buffer
        found = extent(tensor)
        return None if isinstance(found, str) else self._live.get(found[0])

    def forget_parent(self) -> None:
        for buffer in self.all():
            buffer.disown()
        self._live = {}


_books: Final = _Books()


def _own_nothing_in_child() -> None:
    global _patch_lock
    _patch_lock = threading.RLock()
    _books.forget_parent()
    if _patch.active is not None:
        _patch.active.forget_parent()


os.register_at_fork(after_in_child=_own_nothing_in_child)
