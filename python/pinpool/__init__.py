"""Page-locked host memory for offload loops: exact sizes, instant reuse, DLPack to torch."""

from pinpool._pinpool import (
    MemlockLimitError,
    OutOfPinnedMemoryError,
    PinnedArray,
    PinnedPool,
    PinpoolError,
    Registration,
    __version__,
    is_pinned,
    register,
)
from pinpool._types import Stats

__all__ = [
    "MemlockLimitError",
    "OutOfPinnedMemoryError",
    "PinnedArray",
    "PinnedPool",
    "PinpoolError",
    "Registration",
    "Stats",
    "__version__",
    "is_pinned",
    "register",
]
