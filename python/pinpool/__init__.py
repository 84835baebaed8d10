"""Page-locked host memory for offload loops: exact sizes, instant reuse, DLPack to torch."""

from pinpool._pinpool import (
    DriverError,
    DriverUnavailableError,
    MemlockLimitError,
    OutOfPinnedMemoryError,
    PinnedArray,
    PinnedPool,
    PinpoolError,
    Registration,
    __version__,
    is_pinned,
    is_registered,
    register,
)
from pinpool._types import Stats

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
    "__version__",
    "is_pinned",
    "is_registered",
    "register",
]
