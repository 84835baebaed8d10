"""Page-locked host memory, in Rust. Import these names from `pinpool`."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Protocol, Self, SupportsIndex, TypeAlias, TypedDict, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, CapsuleType

__version__: str

Shape: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | list[int]
Pages: TypeAlias = Literal["auto", "4k", "thp", "2m", "1g"]
Progress: TypeAlias = Callable[[int, int], object]

class PinpoolError(RuntimeError):
    """Base of pinpool's own errors."""

class MemlockLimitError(PinpoolError):
    """The kernel refuses to lock more memory (`ulimit -l`). All sizes are in bytes."""

    wanted: int
    locked: int
    soft_limit: int
    hard_limit: int

class OutOfPinnedMemoryError(PinpoolError):
    """The pool's budget is used up. All sizes are in bytes."""

    wanted: int
    limit: int
    allocated: int
    cached: int
    pending: int

class Stats(TypedDict):
    """What a pool holds now. Sizes are in bytes."""

    requested_bytes: int
    allocated_bytes: int
    cached_bytes: int
    pending_bytes: int
    reserved_bytes: int
    locked_bytes: int
    leaked_bytes: int
    max_bytes: int
    peak_reserved_bytes: int
    registered_bytes: dict[str, int]
    hits: int
    misses: int
    blocks: int
    regions: int
    pages: str
    os_calls: int

class PinnedPool:
    """..."""

    def __new__(
        cls,
        devices: None | str | list[str] = "auto",
        *,
        max_bytes: int | None = None,
        pages: Pages = "auto",
        numa: int | None = None,
        threads: int | None = None,
    ) -> Self: ...
    def empty(self, shape: Shape, dtype: object = "uint8", *, timeout: float | None = 0) -> PinnedArray: ...
    def zeros(self, shape: Shape, dtype: object = "uint8", *, timeout: float | None = 0) -> PinnedArray: ...
    def empty_like(self, obj: object, *, timeout: float | None = 0) -> PinnedArray: ...
    def register(self, obj: object) -> Registration: ...
    def is_pinned(self, obj: object) -> bool: ...
    def reserve(self, nbytes: int, *, progress: Progress | bool | None = None) -> None: ...
    def trim(self) -> int: ...
    def stats(self) -> Stats: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class PinnedArray:
    """..."""

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> npt.NDArray[Any]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ptr(self) -> int: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None: ...

@final
class Registration:
    """Memory that its caller owns, pinned in place."""

    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

def is_pinned(obj: object) -> bool: ...
def register(obj: object) -> Registration: ...
