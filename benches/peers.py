"""Other ways to get memory, as they are installed. One that is not here raises `PeerAbsentError` with the reason."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

PAGE = 4096


class PeerAbsentError(Exception):
    """A peer cannot be measured here. The message says why, and what would help."""


class Locker(Protocol):
    """What makes locked memory and gives it back to the system."""

    name: str

    def make(self, nbytes: int) -> Any: ...
    def give_back(self, made: Any, nbytes: int) -> None: ...


class Torch:
    """torch's own allocator: the heap's memory, not locked."""

    name = "torch.empty"

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise PeerAbsentError("torch is not installed: pip install torch")
        import torch

        self.module = torch


class LockedHeap:
    """`posix_memalign` and `mlock`: what a program does by itself, and DeepSpeed's op inside."""

    name = "posix_memalign + mlock"

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._align = libc.posix_memalign
        self._align.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        self._lock, self._unlock, self._free = libc.mlock, libc.munlock, libc.free
        self._lock.argtypes = self._unlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._free.argtypes, self._free.restype = (ctypes.c_void_p,), None

    def make(self, nbytes: int) -> int:
        """Return the address."""
        address = ctypes.c_void_p()
        if code := self._align(ctypes.byref(address), PAGE, nbytes):
            raise OSError(code, f"posix_memalign of {nbytes} bytes: {os.strerror(code)}")
        if self._lock(address, nbytes):
            code = ctypes.get_errno()
            self._free(address)
            raise OSError(code, f"mlock of {nbytes} bytes: {os.strerror(code)}; see `ulimit -l`")
        return address.value or 0

    def give_back(self, made: int, nbytes: int) -> None:
        self._unlock(made, nbytes)
        self._free(made)


class Umf:
    """The disjoint pool of Intel's Unified Memory Framework over memory of the system, not locked.

    Its package brings a C library and no Python module, so each call also pays for ctypes.
    """

    name = "UMF disjoint pool, ctypes"
    # Above the largest size that is measured, so that it pools them all.
    LARGEST = 1 << 30
    OWN_PROVIDER = 1

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_library_of("umf", "libumf.so.1")))
        self._pool = self._make_pool()
        self.malloc = self._library.umfPoolMalloc
        self.malloc.argtypes, self.malloc.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p
        self.free = self._library.umfPoolFree
        self.free.argtypes = (ctypes.c_void_p, ctypes.c_void_p)

    @property
    def pool(self) -> int:
        return self._pool.value or 0

    def _make_pool(self) -> ctypes.c_void_p:
        system = self._made("umfOsMemoryProviderParamsCreate")
        provider = self._made("umfMemoryProviderCreate", self._operations("umfOsMemoryProviderOps"), system)
        limits = self._made("umfDisjointPoolParamsCreate")
        self._call("umfDisjointPoolParamsSetMaxPoolableSize", limits, ctypes.c_size_t(self.LARGEST))
        operations = self._operations("umfDisjointPoolOps")
        return self._made("umfPoolCreate", operations, provider, limits, ctypes.c_uint32(self.OWN_PROVIDER))

    def _operations(self, name: str) -> ctypes.c_void_p:
        function = self._library[name]
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function())

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(name, *arguments, ctypes.byref(handle))
        return handle

    def _call(self, name: str, *arguments: Any) -> None:
        if code := self._library[name](*arguments):
            raise PeerAbsentError(f"{name} answered {code}")


class DeepSpeed:
    """DeepSpeed's pin op: `posix_memalign` and `mlock`, and a list of what it pinned."""

    name = "DeepSpeed's pin op"

    def __init__(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise PeerAbsentError("deepspeed is not installed: pip install --no-build-isolation deepspeed")
        self.prepare()
        try:
            from deepspeed.ops.op_builder import PinMemoryBuilder

            self.handle = PinMemoryBuilder().load().pin_handle()
        except Exception as error:  # whatever the package, the compiler or the loader says
            raise PeerAbsentError(f"its op cannot be built here: {error}") from error

    @staticmethod
    def prepare() -> None:
        """Set what its builders look at, before it is imported."""
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # ninja is looked for on the PATH, and lies beside the interpreter.
        os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))

    def make(self, nbytes: int) -> Any:
        """Return a tensor of uint8."""
        import torch

        return self.handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))

    def give_back(self, made: Any, nbytes: int) -> None:  # noqa: ARG002 - the op knows
        self.handle.free_cpu_locked_tensor(made)


def _library_of(package: str, name: str) -> Path:
    """Find the library that a package brought, wherever pip put it."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise PeerAbsentError(f"{package} is not installed: pip install {package}") from None
    found = next((file for file in files if file.name == name), None)
    if found is None:
        raise PeerAbsentError(f"the package {package} has no {name}")
    return Path(found.locate()).resolve()
