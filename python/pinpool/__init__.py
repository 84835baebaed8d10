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

__all__ = [
    "MemlockLimitError",
    "OutOfPinnedMemoryError",
    "PinnedArray",
    "PinnedPool",
    "PinpoolError",
    "Registration",
    "__version__",
    "is_pinned",
    "register",
]
