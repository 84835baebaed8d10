"""What the swap store must know of the kinds of values that it stores."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pinpool._pinpool import PinnedArray

if TYPE_CHECKING:
    from pinpool._pinpool import PinnedPool

Value: TypeAlias = Any
"""A torch tensor, a numpy array, a `PinnedArray`, or an object with the buffer protocol."""

NOT_ROW_MAJOR = "its elements do not lie in row-major order; use a contiguous one, or say copy=True"


class Kind(Protocol):
    """What the store must know of a kind of value: torch's tensors, numpy's arrays, and plain memory."""

    name: str

    def layout(self, obj: Value) -> tuple[str, tuple[int, ...]]:
        """Tell dtype and shape of a value."""

    def misfit(self, obj: Value) -> str | None:
        """Tell why the bytes of a value, in their order, are not its elements in row-major order; None: they are."""

    def check_target(self, into: Value) -> None:
        """Raise ValueError for what nobody may write to."""

    def empty(self, pool: PinnedPool, shape: tuple[int, ...], dtype: str, timeout: float | None) -> Value:
        """Make a value in pool memory."""

    def copy(self, into: Value, obj: Value) -> None:
        """Copy the elements of a value into another."""


class _Memory:
    """Pinned arrays, and whatever has the buffer protocol: as bytes."""

    name = "array"

    def layout(self, obj: Value) -> tuple[str, tuple[int, ...]]:
        if isinstance(obj, PinnedArray):
            return obj.dtype, obj.shape
        try:
            return "uint8", (memoryview(obj).nbytes,)
        except TypeError:
            kind = type(obj).__name__
            raise TypeError(f"cannot swap a {kind}: it is no tensor, no array, and has no buffer protocol") from None

    def misfit(self, obj: Value) -> str | None:
        contiguous = isinstance(obj, PinnedArray) or memoryview(obj).c_contiguous
        return None if contiguous else NOT_ROW_MAJOR

    def check_target(self, into: Value) -> None:
        if isinstance(into, PinnedArray):
            return
        view = memoryview(into)
        if view.readonly:
            raise ValueError("cannot read into this memory: it is read-only")
        if not view.c_contiguous:
            raise ValueError("cannot read into this memory: its elements do not lie in row-major order")

    def empty(self, pool: PinnedPool, shape: tuple[int, ...], dtype: str, timeout: float | None) -> Value:
        return pool.empty(shape, dtype, timeout=timeout)

    def copy(self, into: Value, obj: Value) -> None:
        _bytes_of(into)[:] = _bytes_of(obj)


def _bytes_of(obj: Value) -> memoryview:
    view = memoryview(obj._bytes() if isinstance(obj, PinnedArray) else obj)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


MEMORY: Kind = _Memory()


def kind_of(obj: object) -> Kind:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(obj, torch.Tensor):
        return kind_named("torch")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        return kind_named("numpy")
    return MEMORY


def kind_named(name: str) -> Kind:
    if name == "torch":
        from pinpool.torch._swap import TENSORS

        return TENSORS
    if name == "numpy":
        from pinpool._numpy import ARRAYS

        return ARRAYS
    return MEMORY
