"""What host memory does for an offload loop, and what it costs to have it: one table, and a picture of it.

    python benches/offload.py [--quick] [--device cuda:0] [--plot FILE.png]

Four kinds of memory take turns in every row: locked (the kernel keeps the pages, no driver knows them), registered
(pinpool's, as a pool hands it out), torch's own pinned memory, and pageable memory. A cell has the median, and how many
times as fast as pageable memory that was: the median of each round's own ratio.

The last rows are a lap of ZeRO-3 with everything offloaded: the weights go to the device partition by partition, the
gradients come back, and Adam takes a step on the host. Without a device the copies go from host to host, the lap is its
step alone, and what is left out is said. torch works with one thread: two of them wait for each other on a machine that
has other work. This is no test: whatever it finds, the exit code is 0.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from compare import TRACES, machine
from measure import in_turns, ratio_text, size_text, time_text, waste_text
from peers import PAGE

import pinpool.torch
from pinpool import PinnedPool, PinpoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measure import Sample

MIB, GIB = 1 << 20, 1 << 30
SIZES = (4 * MIB, 64 * MIB, 256 * MIB, GIB)
ROUNDS = 9
QUICK_SIZES = (4 * MIB, 64 * MIB)
QUICK_ROUNDS = 3
# A sample moves so many bytes at least: one small copy is shorter than what surrounds it.
SAMPLE_BYTES = 256 * MIB
# The partitions of one layer that one of eight ranks offloads, in bytes of bfloat16: a model of 7 billion parameters.
LAYER = (*4 * (4 * MIB,), *3 * (10 * MIB + 768 * 1024,))
LAYERS = 4
NO_DEVICE = (
    "left out, as torch finds no device: registered and torch-pinned memory, copies to a device and back (H2D, D2H),\n"
    "and the lap of H2D, D2H and step as a whole"
)
NO_MATPLOTLIB = "--plot needs matplotlib: pip install matplotlib"
# What the length of a bar says.
SPEED, WASTE, LOCKED = "times as fast as pageable memory", "reserved / requested", "locked, MiB"


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
        torch.accelerator.synchronize()
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        else:
            torch._C._host_emptyCache()

    def reserved(self) -> int | None:
        statistics_of = getattr(torch.get_device_module(), "host_memory_stats", None)  # CUDA, since torch 2.8
        return None if statistics_of is None else statistics_of().get("allocated_bytes.current")

    def locked(self) -> int | None:
        return self.reserved()


class Pageable:
    name = "pageable"

    def used(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def forget(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)

    def reserved(self) -> int | None:
        return None

    def locked(self) -> int | None:
        return 0


@dataclass(frozen=True)
class Setting:
    """What is measured with, and how much of it: sizes of blocks, layers of the lap, an extra divisor of the traces."""

    device: torch.device | None
    kinds: list[Memory]
    sizes: tuple[int, ...]
    rounds: int
    layers: int
    divisor: int

    def compared(self, what: str, samples: dict[str, Sample], text: Callable[[float], str] = time_text) -> Line:
        """Let the kinds take turns."""
        times = in_turns(samples, self.rounds)
        pageable = times[Pageable.name]
        speeds = {
            name: statistics.median(theirs / own for theirs, own in zip(pageable, times[name], strict=True))
            for name in times
        }
        cells = {name: f"{text(statistics.median(times[name]))} {ratio_text(speeds[name]):>6}" for name in times}
        return Line(what, cells, SPEED, speeds)


@dataclass(frozen=True)
class Line:
    """A row of the table: one cell for each kind of memory. In the picture, bars; `axis` says what their length is."""

    what: str
    cells: dict[str, str]
    axis: str
    bars: dict[str, float]


def rates(setting: Setting) -> Iterator[Line]:
    """GB/s of copies."""
    directions = {"H2D": False, "D2H": True} if setting.device else {"host to host": False}
    for size in setting.sizes:
        for direction, back in directions.items():
            blocks = {kind.name: touched(kind.used(size)) for kind in setting.kinds}
            other = torch.zeros(size, dtype=torch.uint8, device=setting.device or "cpu")
            samples = {name: copying(other, block, back, setting.device) for name, block in blocks.items()}
            yield setting.compared(f"{direction}, {size_text(size)}", samples, partial(rate_text, size))
            del blocks, samples
            forget_all(setting)


def rate_text(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.1f} GB/s"


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
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / laps

    return by_clock if device is None else by_events


def touched(tensor: torch.Tensor) -> torch.Tensor:
    """Write to every page."""
    tensor[::PAGE].fill_(1)
    return tensor


def costs(setting: Setting) -> Iterator[Line]:
    """What a block costs the first time, its pages touched, and when it was there before."""
    for size in setting.sizes:
        fresh = {kind.name: first_lap(kind, [size]) for kind in setting.kinds}
        yield setting.compared(f"allocate and touch, {size_text(size)}", fresh)
        yield setting.compared(f"reuse, {size_text(size)}", {kind.name: taking(kind, size) for kind in setting.kinds})
        forget_all(setting)


def first_lap(kind: Memory, requests: list[int]) -> Sample:
    def sample() -> float:
        kind.forget()
        spent = time_of(lambda: take(kind, requests))
        kind.forget()
        return spent

    return sample


def second_lap(kind: Memory, requests: list[int]) -> Sample:
    def sample() -> float:
        take(kind, requests)
        return time_of(lambda: take(kind, requests))

    return sample


def take(kind: Memory, requests: list[int]) -> None:
    """Have blocks and write to each of their pages. None goes back before the last is there."""
    [touched(kind.used(nbytes)) for nbytes in requests]


def time_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def taking(kind: Memory, size: int, laps: int = 20) -> Sample:
    def sample() -> float:
        kind.used(size)
        start = time.perf_counter()
        for _ in range(laps):
            kind.used(size)
        return (time.perf_counter() - start) / laps

    return sample


def partitions(setting: Setting) -> Iterator[Line]:
    """What the buffers of a ZeRO run cost, how much is held for them, and how much of it the kernel keeps."""
    for name, (trace_part, sizes) in TRACES.items():
        part = trace_part * setting.divisor
        requests = [int(mib * MIB) // part for count, mib in sizes for _ in range(count)]
        what = f"{name}, 1/{part} of it"
        for lap, sample in {"first lap": first_lap, "second lap": second_lap}.items():
            samples = {kind.name: sample(kind, requests) for kind in setting.kinds}
            yield setting.compared(f"allocate and touch, {lap}, {what}", samples)
        numbers = {kind.name: held(kind, requests) for kind in setting.kinds}
        waste = {name: reserved / sum(requests) for name, (reserved, _) in numbers.items() if reserved is not None}
        yield Line(f"reserved / requested, {what}", texts(waste, waste_text), WASTE, waste)
        locked = {name: locked / MIB for name, (_, locked) in numbers.items() if locked is not None}
        yield Line(f"locked, {what}", texts(locked, "{:,.0f} MiB".format), LOCKED, locked)


def held(kind: Memory, requests: list[int]) -> tuple[int | None, int | None]:
    kind.forget()
    blocks = [kind.used(nbytes) for nbytes in requests]
    numbers = kind.reserved(), kind.locked()
    del blocks
    kind.forget()
    return numbers


def texts(values: dict[str, float], text: Callable[[float], str]) -> dict[str, str]:
    return {name: text(value) for name, value in values.items()}


class Rank:
    """What one rank offloads of a model to one kind of host memory, as ZeRO-3 does, and its partitions on a device."""

    def __init__(self, kind: Memory, sizes: list[int], device: torch.device | None) -> None:
        total = sum(sizes)
        self.weights, self.gradients = (kind.used(total).view(torch.bfloat16).fill_(1e-3) for _ in range(2))
        self.master, self.gradient, *moments = (kind.used(2 * total).view(torch.float32).zero_() for _ in range(4))
        self.master.grad = self.gradient
        self.optimizer = torch.optim.AdamW([self.master], fused=True)
        self.optimizer.state[self.master] = {
            "step": torch.tensor(0.0),
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }
        self.device = device
        self._cuts = [size // self.weights.element_size() for size in sizes]
        self._on_device = torch.empty_like(self.weights, device=device) if device else self.weights

    def to_device(self) -> None:
        """Copy the weights to the device."""
        self._copy_parts(self._on_device, self.weights)

    def to_host(self) -> None:
        """Copy the gradients to the host. What the device has stands for them."""
        self._copy_parts(self.gradients, self._on_device)

    def step(self) -> None:
        """Let Adam take a step on the host."""
        self.gradient.copy_(self.gradients)
        self.optimizer.step()
        self.weights.copy_(self.master)

    def lap(self) -> None:
        """Do all of it."""
        self.to_device()
        self.to_host()
        self.wait()
        self.step()

    def timing(self, work: Callable[[Rank], None]) -> Sample:
        def done() -> None:
            work(self)
            self.wait()

        done()
        return lambda: time_of(done)

    def wait(self) -> None:
        if self.device:
            torch.accelerator.synchronize(self.device)

    def _copy_parts(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for to, part in zip(target.split(self._cuts), source.split(self._cuts), strict=True):
            to.copy_(part, non_blocking=True)


def laps(setting: Setting) -> Iterator[Line]:
    """What a lap of ZeRO-3 costs, and each part of it."""
    sizes = [*LAYER] * setting.layers
    ranks = {kind.name: Rank(kind, sizes, setting.device) for kind in setting.kinds}
    works = {"step on the host": Rank.step}
    if setting.device:
        works = {"H2D": Rank.to_device, "D2H": Rank.to_host, **works, "lap": Rank.lap}
    for what, work in works.items():
        samples = {name: rank.timing(work) for name, rank in ranks.items()}
        yield setting.compared(f"{what}, {len(sizes)} partitions, {size_text(sum(sizes))}", samples)
    del ranks, samples
    forget_all(setting)


def forget_all(setting: Setting) -> None:
    for kind in setting.kinds:
        kind.forget()


def table(setting: Setting, lines: list[Line]) -> str:
    names = [kind.name for kind in setting.kinds]
    cells = [["what", *names], *([line.what, *(line.cells.get(name, "") for name in names)] for line in lines)]
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in rows)


def draw(path: str, setting: Setting, lines: list[Line], title: str) -> None:
    """Make a picture of the table, with one panel for each kind of bar."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Line]] = {}
    for line in lines:
        panels.setdefault(line.axis, []).append(line)
    heights = [len(panel) + 1 for panel in panels.values()]
    figure = Figure(figsize=(11, 0.4 * sum(heights) + 1), layout="constrained")
    figure.suptitle(title, fontsize="small", wrap=True)
    every_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    thickness = 0.8 / len(setting.kinds)
    for axes, (axis, panel) in zip(every_axes, panels.items(), strict=True):
        for turn, kind in enumerate(setting.kinds):
            bars = {place: line.bars[kind.name] for place, line in enumerate(panel) if kind.name in line.bars}
            places = [place + thickness * (turn - (len(setting.kinds) - 1) / 2) for place in bars]
            axes.barh(places, list(bars.values()), thickness, label=kind.name)
        axes.set_yticks(range(len(panel)), [line.what for line in panel])
        axes.invert_yaxis()
        axes.set_xlabel(axis)
        if axis == SPEED:
            axes.set_xscale("log")
    every_axes[0].legend()
    figure.savefig(path)


def find_device(name: str | None) -> torch.device | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of drivers that it cannot use
        found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    device = torch.device(name or found)
    torch.accelerator.set_device_index(device.index or 0)
    return torch.device(device.type, torch.accelerator.current_device_index())


def make_setting(options: argparse.Namespace) -> Setting:
    device = find_device(options.device)
    kinds: list[Memory] = [Pooled("host")]
    if device is not None:
        kinds += [Pooled(str(device)), TorchPinned()]
    kinds.append(Pageable())
    if options.quick:
        return Setting(device, kinds, QUICK_SIZES, QUICK_ROUNDS, layers=1, divisor=8)
    return Setting(device, kinds, SIZES, ROUNDS, LAYERS, divisor=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less memory and fewer rounds: under half a minute")
    parser.add_argument("--device", help="which device, as cuda:0 (torch's current one)")
    parser.add_argument("--plot", metavar="FILE", help="also draw the table: .png, .svg or .pdf (needs matplotlib)")
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error(NO_MATPLOTLIB)
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    setting = make_setting(options)
    lines: list[Line] = []
    for group in (rates, costs, partitions, laps):
        print(f"measuring: {group.__name__}", file=sys.stderr)
        try:
            lines.extend(group(setting))
        except (PinpoolError, OSError, RuntimeError) as error:
            print(f"left out: the rest of {group.__name__}: {error}")
    where = torch.get_device_module().get_device_name(setting.device) if setting.device else "no device"
    title = f"{machine()}, {where}"
    print(f"\n{title}\n\n{table(setting, lines)}")
    if setting.device is None:
        print(f"\n{NO_DEVICE}")
    if options.plot:
        draw(options.plot, setting, lines, title)


if __name__ == "__main__":
    main()
