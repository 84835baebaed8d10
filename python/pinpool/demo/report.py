"""What the demo found, and the table that says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run. Sizes are in bytes, times in seconds; `later_` is counted after the first lap."""

    weights: Path
    device: str
    laps: int
    different_laps: int
    tensors: int
    weight_bytes: int
    device_bytes: int
    locked_bytes: int
    reserved_bytes: int
    requested_bytes: int
    first_os_calls: int
    later_os_calls: int
    later_hits: int
    later_misses: int
    streamed_seconds: float
    plain_seconds: float
    similar: float
    unrelated: float

    @property
    def identical(self) -> bool:
        """Whether every lap gave the very bits of the plain run."""
        return self.different_laps == 0

    @property
    def passed(self) -> bool:
        """Whether the run shows what it is there to show: the same bits, and no system call after the first lap."""
        return self.identical and self.later_os_calls == 0

    @property
    def hit_rate(self) -> float:
        """The share of blocks that came from the pool's cache after the first lap."""
        return self.later_hits / max(1, self.later_hits + self.later_misses)

    def table(self) -> str:
        """Return the report as lines of a name and what it is."""
        rows = self._memory_rows() | self._run_rows()
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())

    def _memory_rows(self) -> dict[str, str]:
        ratio = self.reserved_bytes / self.requested_bytes
        return {
            "weights": str(self.weights),
            "read into pool blocks": f"{self.tensors} tensors, {_mib(self.weight_bytes)}",
            "device": self.device,
            "weights on the device": f"at most {_mib(self.device_bytes)}, two layers at a time",
            "locked": f"{_mib(self.locked_bytes)} ({self.locked_bytes:,} bytes)",
            "reserved / requested": f"{_mib(self.reserved_bytes)} / {_mib(self.requested_bytes)} = {ratio:.3f}",
        }

    def _run_rows(self) -> dict[str, str]:
        blocks = self.later_hits + self.later_misses
        streamed, plain = self.streamed_seconds * 1000, self.plain_seconds * 1000
        verdict = f"bit-identical to the plain run in all {self.laps} laps"
        if not self.identical:
            verdict = f"NOT those of the plain run in {self.different_laps} of {self.laps} laps"
        return {
            "hit rate": f"{self.hit_rate:.1%} after the first lap ({self.later_hits:,} of {blocks:,} blocks)",
            "system calls": f"{self.later_os_calls} after the first lap ({self.first_os_calls:,} up to there)",
            "time per lap": f"{streamed:.1f} ms streamed, {plain:.1f} ms plain (medians)",
            "cosine": f"{self.similar:.2f} of two similar sentences, {self.unrelated:.2f} of two unrelated ones",
            "embeddings": verdict,
        }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
