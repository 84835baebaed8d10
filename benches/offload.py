"""What host memory does for copies to a GPU and back, and what it costs to have it: one table of medians.

    python benches/offload.py [--quick] [--device cuda:0]

Four kinds of memory take turns in every row: locked (the kernel keeps the pages, no driver knows them), registered
(pinpool's, as a pool hands it out), torch's own pinned memory, and pageable memory. Without a GPU the copies go from
host to host, and what is left out is said. torch works with one thread: two of them wait for each other on a machine
that has other work. This is no test: whatever it finds, the exit code is 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from compare import TRACES, machine
from measure import in_turns, size_text, time_text, waste_text

import pinpool.torch
from pinpool import PinnedPool, PinpoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measure import Sample

MIB, GIB = 1 << 20, 1 << 30
SIZES = (4 * MIB, 64 * MIB, 256 * MIB, GIB)
ROUNDS = 9
QUICK_SIZES = (4 * MIB, 64 * MIB)
QUICK_ROUNDS = 5
# A sample moves so many bytes at least: one small copy is shorter than what surrounds it.
SAMPLE_BYTES = 256 * MIB
NO_GPU = "left out: copies to a GPU and back, registered and torch-pinned memory (no CUDA device)"


class Memory(Protocol):
    """A kind of host memory. `used` takes a block that was there before; `fresh` one that was not."""

    name: str

    def used(self, nbytes: int) -> torch.Tensor: ...
    def forget(self) -> None:
        """Give all idle memory back to the system."""

    def reserved(self) -> int | None:
        """Return the bytes that are held; None where nobody counts them."""

    def locked(self) -> int | None:
        """Return how many of them the kernel keeps in memory."""


class Pooled:
    """Memory of a pool: registered with a device, or with none and so only locked."""

    def __init__(self, device: str) -> None:
        self.name = "locked" if device == "host" else "registered"
        self.pool = PinnedPool(device)

    def used(self, nbytes: int) -> torch.Tensor:
        return pinpool.torch.empty(self.pool, nbytes, torch.uint8)

    def forget(self) -> None:
        self.pool.trim()

    def reserved(self) -> int | None:
        return self.pool.stats()["reserved_bytes"]

    def locked(self) -> int | None:
        return self.pool.stats()["locked_bytes"]


class TorchPinned:
    name = "torch-pinned"

    def used(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def forget(self) -> None:
        torch.cuda.synchronize()
        torch._C._host_emptyCache()

    def reserved(self) -> int | None:
        statistics_of = getattr(torch.cuda, "host_memory_stats", None)  # since torch 2.8
        return None if statistics_of is None else statistics_of().get("allocated_bytes.current")

    def locked(self) -> int | None:
        return self.reserved()


class Pageable:
    name = "pageable"

    def used(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def forget(self) -> None:
        pass

    def reserved(self) -> int | None:
        return None

    def locked(self) -> int | None:
        return 0


@dataclass(frozen=True)
class Setting:
    """What is measured with, and how much of it."""

    device: torch.device | None
    kinds: list[Memory]
    sizes: tuple[int, ...]
    rounds: int

    def medians(self, samples: dict[str, Sample]) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in in_turns(samples, self.rounds).items()}


@dataclass(frozen=True)
class Line:
    """A row of the table: one cell for each kind of memory."""

    what: str
    cells: dict[str, str]


def rates(setting: Setting) -> Iterator[Line]:
    """GB/s of copies."""
    directions = {"H2D": False, "D2H": True} if setting.device else {"host to host": False}
    for size in setting.sizes:
        for direction, back in directions.items():
            blocks = {kind.name: touched(kind.used(size)) for kind in setting.kinds}
            other = torch.zeros(size, dtype=torch.uint8, device=setting.device or "cpu")
            samples = {name: copying(other, block, back, setting.device) for name, block in blocks.items()}
            medians = setting.medians(samples)
            cells = {name: f"{size / seconds / 1e9:.1f} GB/s" for name, seconds in medians.items()}
            yield Line(f"{direction}, {size_text(size)}", cells)
            del blocks, samples
            forget_all(setting)


def copying(other: torch.Tensor, block: torch.Tensor, back: bool, device: torch.device | None) -> Sample:
    """Time one of several copies in a row: from the block, or back into it."""
    target, source = (block, other) if back else (other, block)
    laps = max(1, SAMPLE_BYTES // block.numel())

    def copy() -> None:
        for _ in range(laps):
            target.copy_(source, non_blocking=True)

    def by_clock() -> float:
        start = time.perf_counter()
        copy()
        return (time.perf_counter() - start) / laps

    def by_events() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / laps

    return by_clock if device is None else by_events


def touched(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(1)


def costs(setting: Setting) -> Iterator[Line]:
    """What a block costs the first time, its pages touched, and when it was there before."""
    for size in setting.sizes:
        fresh = setting.medians({kind.name: making(kind, size) for kind in setting.kinds})
        yield Line(f"allocate and touch, {size_text(size)}", texts(fresh, time_text))
        reuse = setting.medians({kind.name: taking(kind, size) for kind in setting.kinds})
        yield Line(f"reuse, {size_text(size)}", texts(reuse, time_text))
        forget_all(setting)


def making(kind: Memory, size: int) -> Sample:
    def sample() -> float:
        kind.forget()
        start = time.perf_counter()
        block = touched(kind.used(size))
        spent = time.perf_counter() - start
        del block
        kind.forget()
        return spent

    return sample


def taking(kind: Memory, size: int, laps: int = 20) -> Sample:
    def sample() -> float:
        kind.used(size)
        start = time.perf_counter()
        for _ in range(laps):
            kind.used(size)
        return (time.perf_counter() - start) / laps

    return sample


def partitions(setting: Setting) -> Iterator[Line]:
    """What is held for the partitions of a ZeRO run, and how much of it the kernel keeps."""
    for name, (part, sizes) in TRACES.items():
        requests = [int(mib * MIB) // part for count, mib in sizes for _ in range(count)]
        reserved, locked = {}, {}
        for kind in setting.kinds:
            reserved[kind.name], locked[kind.name] = held(kind, requests)
        what = f"{name}, 1/{part} of it"
        waste = {name: None if nbytes is None else nbytes / sum(requests) for name, nbytes in reserved.items()}
        yield Line(f"reserved / requested, {what}", texts(waste, waste_text))
        yield Line(f"locked, {what}", texts(locked, lambda held: f"{held / MIB:,.0f} MiB"))


def held(kind: Memory, requests: list[int]) -> tuple[int | None, int | None]:
    kind.forget()
    blocks = [kind.used(nbytes) for nbytes in requests]
    numbers = kind.reserved(), kind.locked()
    del blocks
    kind.forget()
    return numbers


def texts(values: dict[str, Any], text: Callable[[Any], str]) -> dict[str, str]:
    return {name: "" if value is None else text(value) for name, value in values.items()}


def forget_all(setting: Setting) -> None:
    for kind in setting.kinds:
        kind.forget()


def table(setting: Setting, lines: list[Line]) -> str:
    names = [kind.name for kind in setting.kinds]
    cells = [["what", *names], *([line.what, *(line.cells.get(name, "") for name in names)] for line in lines)]
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in rows)


def find_device(name: str) -> torch.device | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of drivers that it cannot use
        available = torch.cuda.is_available()
    if not available:
        return None
    torch.cuda.set_device(name)
    return torch.device("cuda", torch.cuda.current_device())


def make_setting(options: argparse.Namespace) -> Setting:
    device = find_device(options.device)
    kinds: list[Memory] = [Pooled("host")]
    if device is not None:
        kinds += [Pooled(str(device)), TorchPinned()]
    kinds.append(Pageable())
    sizes, rounds = (QUICK_SIZES, QUICK_ROUNDS) if options.quick else (SIZES, ROUNDS)
    return Setting(device, kinds, sizes, rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two sizes and fewer rounds: under half a minute")
    parser.add_argument("--device", default="cuda:0", help="which GPU (cuda:0)")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    setting = make_setting(options)
    lines: list[Line] = []
    for group in (rates, costs, partitions):
        print(f"measuring: {group.__name__}", file=sys.stderr)
        try:
            lines.extend(group(setting))
        except (PinpoolError, OSError, RuntimeError) as error:
            print(f"left out: the rest of {group.__name__}: {error}")
    where = torch.cuda.get_device_name(setting.device) if setting.device else "no GPU"
    print(f"\n{machine()}, {where}\n\n{table(setting, lines)}")
    if setting.device is None:
        print(f"\n{NO_GPU}")


if __name__ == "__main__":
    main()
