"""pinpool from Python, beside its peers as they are installed: one table of medians and ratios.

    python benches/compare.py [--quick] [--deepspeed] [--rows hit,torch,...]

The contestants of a row take turns, and a ratio is the median of each round's own ratio: other load on the machine
moves the times more than the ratios. This is no test: whatever it finds, the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import threading
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from measure import Bench, Effort, Row, Target, making, size_text, table, waste_text
from peers import PAGE, DeepSpeed, LockedHeap, Torch, Umf
from swap_rows import Aio, swap

import pinpool
from pinpool import PinnedPool, PinpoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measure import Sample
    from peers import Locker

MIB, GIB = 1 << 20, 1 << 30
FULL = Effort(rounds=31, slow_rounds=7, sample_seconds=0.01, fresh_bytes=2 * GIB, stall_bytes=512 * MIB)
QUICK = Effort(rounds=9, slow_rounds=3, sample_seconds=0.002, fresh_bytes=256 * MIB, stall_bytes=128 * MIB)

HIT_SIZES = (PAGE, 64 << 10, MIB, 16 * MIB, 64 * MIB)
LOCKERS: tuple[type[Locker], ...] = (LockedHeap, DeepSpeed)
RANGES = (1, 100, 10_000, 100_000)
RANGES_OF_DEEPSPEED = (1, 100, 10_000)
PROBES, PROBED_BYTES = 1000, 512

# What ZeRO pins on one of eight ranks, in MiB, as (count, size), and the part of it that is made here. A power of two
# leaves torch's rounding as it is, and makes ours, to whole pages, weigh more than in full size.
TRACES: dict[str, tuple[int, list[tuple[int, float]]]] = {
    "ZeRO-3, 7B": (8, [(128, 4), (96, 10.75), (2, 31.25), (1, 1606.7), (1, 3213.3), (1, 1606.7)]),
    "ZeRO-3, 70B": (128, [(160, 2), (160, 16), (240, 56), (2, 250.5), (1, 16824), (1, 3837), (3, 3896), (1, 3816),
                          (1, 3824), (2, 3856), (1, 2765), (1, 16824)]),
    "ZeRO-2, 70B": (128, [(1, 33638), (1, 16824), (1, 33638), (1, 2007)]),
}  # fmt: skip


def hit(bench: Bench) -> Iterator[Row]:
    """Take and return, second lap."""
    pool = PinnedPool("host")
    for size in HIT_SIZES:
        ours = bench.clock("empty(size).release()", empty=pool.empty, size=size)
        peers = {Torch.name: torch_empty(bench, size), Umf.name: None}
        if umf := bench.peer(Umf):
            names: dict[str, Any] = {"free": umf.free, "malloc": umf.malloc, "pool": umf.pool, "size": size}
            peers[Umf.name] = bench.clock("free(pool, malloc(pool, size))", **names)
        yield from bench.contest(f"empty + release, {size_text(size)}", ours, peers)


def to_torch(bench: Bench) -> Iterator[Row]:
    """From the pool to a tensor and back."""
    if not (torch := bench.peer(Torch)):
        return
    from pinpool import torch as pinned

    pool = PinnedPool("host")
    for size in HIT_SIZES:
        names = {"empty": pinned.empty, "pool": pool, "size": size, "dtype": torch.module.uint8}
        ours = bench.clock("empty(pool, size, dtype)", **names)
        target = Target(0.5) if size == PAGE else None
        peers = {Torch.name: torch_empty(bench, size)}
        yield from bench.contest(f"pinpool.torch.empty + del, {size_text(size)}", ours, peers, target)


def by_capsule(bench: Bench) -> Iterator[Row]:
    """The same through a DLPack capsule."""
    if not (torch := bench.peer(Torch)):
        return
    pool = PinnedPool("host")
    for size in HIT_SIZES:
        names = {"from_dlpack": torch.module.from_dlpack, "empty": pool.empty, "size": size}
        ours = bench.clock("from_dlpack(empty(size))", **names)
        peers = {Torch.name: torch_empty(bench, size)}
        yield from bench.contest(f"from_dlpack + del, {size_text(size)}", ours, peers)


def torch_empty(bench: Bench, size: int) -> Sample | None:
    if not (torch := bench.peer(Torch)):
        return None
    names: dict[str, Any] = {"empty": torch.module.empty, "size": size, "dtype": torch.module.uint8}
    return bench.clock("empty(size, dtype=dtype)", **names)


def pin(bench: Bench) -> Iterator[Row]:
    """Pin and unpin 16 MiB, second lap."""
    size, pool = 16 * MIB, PinnedPool("host")
    ours = bench.clock("empty(size).release()", empty=pool.empty, size=size)
    peers: dict[str, Sample | None] = {}
    for kind in LOCKERS:
        peers[kind.name] = None
        if peer := bench.peer(kind):
            names: dict[str, Any] = {"make": peer.make, "give_back": peer.give_back, "size": size}
            peers[kind.name] = bench.clock("give_back(make(size), size)", **names)
    yield from bench.contest(f"pin + unpin, {size_text(size)}", ours, peers, Target(1 / 1000))


def is_pinned(bench: Bench) -> Iterator[Row]:
    """Look up random addresses among the registered slices of one buffer."""
    import numpy as np

    for count in RANGES:
        buffer = np.zeros(count * PAGE, np.uint8)
        # Half a page each, so that there are misses between them. The kernel locks whole pages, which stay one mapping.
        starts = range(0, count * PAGE, PAGE)
        registrations = [pinpool.register(buffer[start : start + PAGE // 2]) for start in starts]
        order = random.Random(count)
        for name, offset in (("hit", PAGE // 4), ("miss", 3 * PAGE // 4)):
            probes = [order.randrange(count) * PAGE + offset for _ in range(PROBES)]
            yield from lookups(bench, f"is_pinned, {count:,} ranges, {name}", buffer, probes)
        for registration in registrations:
            registration.close()


def lookups(bench: Bench, what: str, buffer: Any, starts: list[int]) -> Iterator[Row]:
    target = Target(150e-9, own=True)
    pairs = [(buffer.ctypes.data + start, PROBED_BYTES) for start in starts]
    yield from bench.contest(f"{what}, tuple", asking(bench, pinpool.is_pinned, pairs), {}, target)
    if not (torch := bench.peer(Torch)):
        return
    whole = torch.module.from_numpy(buffer)
    tensors = [whole[start : start + PROBED_BYTES] for start in starts]
    peers = {"Tensor.is_pinned": asking(bench, torch.module.Tensor.is_pinned, tensors)}
    yield from bench.contest(f"{what}, tensor", asking(bench, pinpool.is_pinned, tensors), peers, target)


def asking(bench: Bench, ask: Callable[[Any], bool], probes: list[Any]) -> Sample:
    return bench.clock("for probe in probes: ask(probe)", per=len(probes), ask=ask, probes=probes)


def is_pinned_by_deepspeed(bench: Bench) -> Iterator[Row]:
    """The same question about as many blocks of DeepSpeed's, which it looks through one by one."""
    if not (op := bench.peer(DeepSpeed)):
        return
    for count in RANGES_OF_DEEPSPEED:
        blocks = [op.make(PAGE) for _ in range(count)]
        registrations = [pinpool.register(block) for block in blocks]
        few = random.Random(count).choices(blocks, k=10)
        ours, theirs = asking(bench, pinpool.is_pinned, few), asking(bench, op.handle.is_pinned, few)
        yield from bench.contest(f"is_pinned, {count:,} blocks of DeepSpeed", ours, {DeepSpeed.name: theirs})
        for registration, block in zip(registrations, blocks, strict=True):
            registration.close()
            op.give_back(block, PAGE)


def fresh(bench: Bench) -> Iterator[Row]:
    """Make locked memory that the process did not have."""
    size, pool = bench.effort.fresh_bytes, PinnedPool("host")
    ours, peers = makers(bench, pool, size, making)
    what = f"fresh locked memory, {size_text(size)}"
    yield from bench.contest(what, ours, peers, Target(0.5), bench.effort.slow_rounds)


def stall(bench: Bench) -> Iterator[Row]:
    """How long another Python thread stands still at most, while this one makes memory."""
    size, pool = bench.effort.stall_bytes, PinnedPool("host")
    ours, peers = makers(bench, pool, size, stalling)
    peers["nothing (sleep)"] = stalling(lambda: time.sleep(0.1), lambda _: None)
    what = f"longest stall of a thread, {size_text(size)}"
    yield from bench.contest(what, ours, peers, rounds=bench.effort.slow_rounds)


def makers(
    bench: Bench, pool: PinnedPool, size: int, sample: Callable[..., Sample]
) -> tuple[Sample, dict[str, Sample | None]]:
    """Make samples of memory from the system: ours, and the peers'."""

    def trim(array: pinpool.PinnedArray) -> None:
        array.release()
        pool.trim()

    peers: dict[str, Sample | None] = {}
    for kind in LOCKERS:
        peers[kind.name] = None
        if peer := bench.peer(kind):
            peers[kind.name] = sample(partial(peer.make, size), partial(peer.give_back, nbytes=size))
    return sample(partial(pool.empty, size), trim), peers


def stalling(make: Callable[[], Any], give_back: Callable[[Any], object]) -> Sample:
    """Take the longest stall of another thread as the time; the second time around, as in `making`."""

    def sample() -> float:
        give_back(make())
        with Watcher() as watcher:
            made = make()
        give_back(made)
        return watcher.longest

    return sample


class Watcher:
    """A thread that does nothing but look at the clock."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._started, self._done = threading.Event(), False
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._done = True
        self._thread.join()

    def _watch(self) -> None:
        self._started.set()
        last = time.perf_counter()
        while not self._done:
            now = time.perf_counter()
            self.longest = max(self.longest, now - last)
            last = now


def waste(_bench: Bench) -> Iterator[Row]:
    """What is reserved for what was asked."""
    for name, (part, sizes) in TRACES.items():
        requests = [int(mib * MIB) // part for count, mib in sizes for _ in range(count)]
        with PinnedPool("host") as pool:
            arrays = [pool.empty(nbytes) for nbytes in requests]
            stats = pool.stats()
            del arrays
        ours = stats["reserved_bytes"] / stats["requested_bytes"]
        theirs = sum(1 << (nbytes - 1).bit_length() for nbytes in requests) / sum(requests)
        what = f"reserved / requested, {name}, 1/{part} of it"
        yield Row(what, "torch's powers of two", ours, theirs, ours / theirs, Target(1.03, own=True), waste_text)


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "hit": hit,
    "torch": to_torch,
    "dlpack": by_capsule,
    "pin": pin,
    "is_pinned": is_pinned,
    "is_pinned_op": is_pinned_by_deepspeed,
    "fresh": fresh,
    "waste": waste,
    "stall": stall,
    "swap": swap,
}


def main() -> None:
    options = parse()
    bench = Bench(QUICK if options.quick else FULL, options.quick, options.swap_dir)
    if not options.deepspeed:
        for kind in (DeepSpeed, Aio):
            bench.leave_out(kind, "not asked for: --deepspeed (its op is compiled at first use, in about a minute)")
    rows: list[Row] = []
    for name in options.rows:
        print(f"measuring: {name}", file=sys.stderr)
        try:
            rows.extend(GROUPS[name](bench))
        except (PinpoolError, OSError, ImportError) as error:
            bench.notes[f"rows {name}"] = str(error)
    print(f"\n{machine()}\n\n{table(rows)}")
    for name, note in bench.notes.items():
        print(f"\nnot here: {name}: {note}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds: under a minute")
    parser.add_argument("--deepspeed", action="store_true", help="also measure DeepSpeed's op, compiled at first use")
    beside = "where the rows of swap make their files; a local disk (default: beside the benchmarks)"
    parser.add_argument("--swap-dir", type=Path, metavar="DIRECTORY", help=beside)
    parser.add_argument("--rows", type=groups, default=list(GROUPS), metavar="NAMES", help=", ".join(GROUPS))
    return parser.parse_args()


def groups(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in GROUPS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: the rows are {', '.join(GROUPS)}")
    return names


def machine() -> str:
    versions = [f"Python {platform.python_version()}"]
    for package in ("pinpool", "torch", "umf", "deepspeed"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    huge = pages.read_text().strip() if pages.exists() else "none"
    load = os.getloadavg()[0]
    return f"{', '.join(versions)}; Linux {platform.release()}, {os.cpu_count()} cores, load {load:.1f}, THP {huge}"


if __name__ == "__main__":
    main()
