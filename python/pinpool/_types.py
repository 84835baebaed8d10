"""Types that the signatures of pinpool use."""

from collections.abc import Callable, Sequence
from typing import Protocol, SupportsIndex, TypeAlias, TypedDict

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""Lengths in elements; one integer is a shape of one dimension."""

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes done and the bytes in all."""


class Stats(TypedDict):
    """What a pool holds now: sizes in bytes, counts, and the page kind of its newest region."""

    requested_bytes: int
    allocated_bytes: int
    cached_bytes: int
    pending_bytes: int
    reserved_bytes: int
    locked_bytes: int
    quarantined_bytes: int
    quarantine_reason: str | None
    leaked_bytes: int
    process_leaked_bytes: int
    max_bytes: int
    peak_reserved_bytes: int
    registered_bytes: dict[str, int]
    unregistered: str | None
    hits: int
    misses: int
    blocks: int
    regions: int
    pages: str
    os_calls: int


class SwapStats(TypedDict):
    """What a swapper has done, and what its store holds: bytes, counts, seconds, and how transfers are made."""

    engine: str
    engine_reason: str | None
    direct: bool
    direct_reason: str | None
    block_bytes: int
    queue_depth: int
    unfinished: int
    entries: int
    stored_bytes: int
    file_bytes: int
    max_bytes: int | None
    bytes_written: int
    bytes_read: int
    write_seconds: float
    read_seconds: float
    write_gb_per_s: float
    read_gb_per_s: float
    bounces: int
    bounced_bytes: int
    fixed_bytes: int
    fixed_reason: str | None


class Event(Protocol):
    """Anything that tells whether device work is done."""

    def query(self) -> object:
        """Tell whether it is done: a true value from then on."""


class LiveBlock(TypedDict):
    """A block that has an owner, as debug mode knows it."""

    address: int
    nbytes: int
    generation: int
    origin: str | None
