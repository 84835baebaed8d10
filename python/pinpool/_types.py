"""Types that the signatures of pinpool use."""

from collections.abc import Callable, Sequence
from typing import SupportsIndex, TypeAlias, TypedDict

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
