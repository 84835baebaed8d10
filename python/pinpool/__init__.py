"""Page-locked host memory for offload loops: exact sizes, instant reuse, DLPack to torch."""

# Imported here and not at the first call: a fork in the middle of an import leaves its lock taken in the child.
from pinpool import _devices, _extent, _origin  # noqa: F401
from pinpool._pinpool import (
    DriverError,
    DriverUnavailableError,
    MemlockLimitError,
    OutOfPinnedMemoryError,
    PinnedArray,
    PinnedPool,
    PinpoolError,
    Registration,
    StoreDamagedError,
    WrittenAfterReleaseError,
    __version__,
    defer,
    is_pinned,
    is_registered,
    record_stream,
    register,
)
from pinpool._swap import Swapper, Ticket
from pinpool._types import Stats, SwapStats

__all__ = [
    "DriverError",
    "DriverUnavailableError",
    "MemlockLimitError",
    "OutOfPinnedMemoryError",
    "PinnedArray",
    "PinnedPool",
    "PinpoolError",
    "Registration",
    "Stats",
    "StoreDamagedError",
    "SwapStats",
    "Swapper",
    "Ticket",
    "WrittenAfterReleaseError",
    "__version__",
    "defer",
    "is_pinned",
    "is_registered",
    "record_stream",
    "register",
]
