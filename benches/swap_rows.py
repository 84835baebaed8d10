"""The rows of `compare.py` about swap: values to a file and back, beside fio, dd, DeepSpeed's aio and torch.

Like with like: each contestant writes into a file that is there already, and reads past the page cache or with a cold
one. fio and DeepSpeed have buffers of the heap, so of 4 KiB pages unless THP is "always"; a pool's are huge where the
system lets them be, and a disk that takes few segments in a request cares. So fio has a row with a pool of 4 KiB pages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import Row, Target, size_text
from peers import PAGE, DeepSpeed, PeerAbsentError, Torch

from pinpool import PinnedPool, Swapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measure import Bench, Sample

    Measure = Callable[[], tuple[float, float]]  # answers what it took, in seconds, and what of the CPU, both per GiB

MIB, GIB = 1 << 20, 1 << 30
BLOCK, DEPTH = MIB, 32
FIO, DD, SAVE, LOAD = "fio", "dd, direct", "torch.save + fsync", "torch.load, cold"

# The fp32 sub-groups of one of eight ranks of 70B, in GiB, three times each: master, exp_avg, exp_avg_sq.
SUB_GROUPS = (3.747, 3.805, 3.727, 3.734, 3.805, 3.766, 3.805, 3.766, 2.700)
STATES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Effort:
    """How much is moved, how often, beside how many entries; and the part of a 70B optimizer that is made here."""

    nbytes: int
    rounds: int
    entries: int
    part: int


FULL = Effort(nbytes=256 * MIB, rounds=9, entries=100_000, part=64)
QUICK = Effort(nbytes=32 * MIB, rounds=3, entries=1000, part=1024)


class Fio:
    """fio, whose own times are taken: not its start."""

    name = FIO

    def __init__(self) -> None:
        if shutil.which("fio") is None:
            raise PeerAbsentError("fio is not installed: apt-get install fio")

    def run(self, path: Path, nbytes: int, *jobs: list[str], options: tuple[str, ...] = ()) -> tuple[float, float]:
        """Answer the seconds of the longest job, and the CPU's of all."""
        command = ["fio", "--direct=1", f"--bs={BLOCK}", f"--filename={path}", "--output-format=json", *options]
        for job in jobs:
            command += [f"--name={job[0]}", f"--rw={job[0]}", f"--size={nbytes}", *job[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path.parent)
        if done.returncode:
            raise OSError(f"fio: {done.stderr.strip()}")
        longest = cpu = 0.0
        for job, asked in zip(json.loads(done.stdout)["jobs"], jobs, strict=True):
            moved = job[asked[0]]
            longest = max(longest, moved["io_bytes"] / moved["bw_bytes"])
            cpu += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return longest, cpu


class Dd:
    """dd, one transfer at a time, from zeros or to nowhere."""

    name = DD

    def __init__(self) -> None:
        if shutil.which("dd") is None:
            raise PeerAbsentError("dd is not installed")

    def run(self, verb: str, path: Path, nbytes: int) -> float:
        ends = [f"if={path}", "of=/dev/null", "iflag=direct"]
        if verb == "write":
            ends = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
        command = ["dd", f"bs={BLOCK}", f"count={nbytes // BLOCK}", *ends]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"LC_ALL": "C"})
        return float(done.stderr.rpartition("copied, ")[2].partition(" s")[0])


class Aio:
    """DeepSpeed's aio, with buffers that its handle has pinned."""

    name = "DeepSpeed's aio"

    def __init__(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise PeerAbsentError("deepspeed is not installed: pip install --no-build-isolation deepspeed")
        DeepSpeed.prepare()
        try:
            from deepspeed.ops.op_builder import AsyncIOBuilder

            self._module = AsyncIOBuilder().load(verbose=False)
        except Exception as error:  # whatever the package, the compiler or the loader says
            raise PeerAbsentError(f"its op cannot be built here (libaio-dev?): {error}") from error
        self.handle, self.writer = self.make_handle(), self.make_handle()

    def make_handle(self) -> Any:
        """Make one as its optimizer swapper does: batches, overlapped, one thread."""
        return self._module.aio_handle(BLOCK, DEPTH, False, True, 1)

    def buffer(self, nbytes: int) -> Any:
        import torch

        return self.handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).fill_(7)


@dataclass(frozen=True)
class Place:
    """Where everything of these rows is, and how much of it."""

    directory: Path
    effort: Effort

    def store(self, name: str, pool: PinnedPool, **options: Any) -> Swapper:
        return Swapper(self.directory / name, pool=pool, **options)


def swap(bench: Bench) -> Iterator[Row]:
    """Make the rows, in a directory that is removed."""
    effort = QUICK if bench.quick else FULL
    # Beside the benchmarks, because what the system has for temporary files may be memory.
    parent = bench.swap_dir or Path(__file__).parents[1]
    with tempfile.TemporaryDirectory(dir=parent, prefix="swap-bench-") as path:
        place = Place(Path(path), effort)
        for pages in ("auto", "4k"):
            yield from large(bench, place, f"{pages} pages", pages, {})
        yield from large(bench, place, "threads", "auto", {"engine": "threads", "queue_depth": 16})
        yield from optimizer(bench, place)
        yield from operations(bench, place)


def spend(work: Callable[[], object]) -> tuple[float, float]:
    """Measure work in this process: the seconds that it took, and those of the CPU, all threads together."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    spent, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return spent, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def filled(pool: PinnedPool, nbytes: int) -> Any:
    array = pool.empty(nbytes)
    view, noise = memoryview(array).cast("B"), os.urandom(MIB)
    for start in range(0, nbytes, MIB):
        view[start : start + MIB] = noise[: nbytes - start]
    return array


def first(measure: Measure) -> Sample:
    return lambda: measure()[0]


def cpu_per_gib(measure: Measure, nbytes: int) -> Sample:
    return lambda: measure()[1] * GIB / nbytes


def large(bench: Bench, place: Place, what: str, pages: str, options: dict[str, Any]) -> Iterator[Row]:
    """One large value, written over and over, and read as often."""
    nbytes, rounds = place.effort.nbytes, place.effort.rounds
    file, threads = place.directory / "peers", options.get("engine") == "threads"
    with ExitStack() as stack:
        pool = PinnedPool("host", pages=pages)
        store = stack.enter_context(place.store(what.replace(" ", "-"), pool, **options))
        source, target = filled(pool, nbytes), pool.empty(nbytes)
        for _ in range(2):  # from here on there is room for both, and the file grows no more
            store.write("value", source).wait()
        file.write_bytes(bytes(source))
        work = {
            "write": lambda: store.write("value", source).wait(),
            "read": lambda: store.read("value", target).wait(),
        }
        for verb, ours in work.items():
            mine: Measure = partial(spend, ours)
            theirs: dict[str, Measure | None] = {FIO: fio_alone(bench, place, file, verb, threads)}
            if pages == "auto" and not threads:
                theirs |= others(bench, place, file, verb)
            named = f"swap {verb}, {size_text(nbytes)}, {what}"
            samples = {name: measure and first(measure) for name, measure in theirs.items()}
            for row in bench.contest(named, first(mine), samples, rounds=rounds):
                yield replace(row, target={FIO: Target(1.05), Aio.name: Target(1.0)}.get(row.peer))
            if pages == "auto" and not threads:
                heard = {name: measure for name, measure in theirs.items() if name in (FIO, Aio.name)}
                costs = {name: measure and cpu_per_gib(measure, nbytes) for name, measure in heard.items()}
                few = max(3, rounds // 2)
                yield from bench.contest(f"{named}, CPU of a GiB", cpu_per_gib(mine, nbytes), costs, rounds=few)
        bounced = float(store.stats()["bounced_bytes"])
        yield Row(f"bytes copied by the CPU, {what}", "", bounced, target=Target(0, own=True), text=bytes_text)


def bytes_text(nbytes: float) -> str:
    return f"{nbytes:.0f} B"


def fio_alone(bench: Bench, place: Place, file: Path, verb: str, threads: bool) -> Measure | None:
    fio, nbytes = bench.peer(Fio), place.effort.nbytes
    if fio is None:
        return None
    if not threads:
        return partial(fio.run, file, nbytes, [verb], options=("--ioengine=io_uring", f"--iodepth={DEPTH}"))
    count = 16
    part = nbytes // count
    spread = ("--ioengine=psync", "--thread", f"--numjobs={count}", f"--offset_increment={part}", "--group_reporting")
    return partial(fio.run, file, part, [verb], options=spread)


def others(bench: Bench, place: Place, file: Path, verb: str) -> dict[str, Measure | None]:
    nbytes = place.effort.nbytes
    measures: dict[str, Measure | None] = {DD: None, Aio.name: None}
    if dd := bench.peer(Dd):
        measures[DD] = lambda: (dd.run(verb, file, nbytes), 0.0)
    if aio := bench.peer(Aio):
        buffer, move = aio.buffer(nbytes), aio.handle.sync_pwrite if verb == "write" else aio.handle.sync_pread
        measures[Aio.name] = partial(spend, lambda: move(buffer, str(file)))
    name = SAVE if verb == "write" else LOAD
    measures[name] = None
    if torch := bench.peer(Torch):
        tensor, path = torch.module.ones(nbytes, dtype=torch.module.uint8), file.with_suffix(".pt")
        torch.module.save(tensor, path)

        def save() -> None:
            with path.open("r+b") as stream:
                torch.module.save(tensor, stream)
                os.fsync(stream.fileno())

        def load() -> tuple[float, float]:
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return spend(lambda: torch.module.load(path))

        measures[name] = partial(spend, save) if verb == "write" else load
    return measures


def optimizer(bench: Bench, place: Place) -> Iterator[Row]:
    """A step of an optimizer whose states are on storage: the next group is read while the last one is written."""
    sizes = [int(gib * GIB) // place.effort.part // PAGE * PAGE for gib in SUB_GROUPS]
    total, file = sum(sizes) * len(STATES), place.directory / "both"
    theirs: dict[str, Measure | None] = {FIO: None, Aio.name: None}
    with ExitStack() as stack:
        pool = PinnedPool("host")
        store = stack.enter_context(place.store("optimizer", pool))
        for group, nbytes in enumerate(sizes):
            for state in STATES:
                store.write(f"{group} {state}", filled(pool, nbytes)).wait()
        step_of_ours(store, len(sizes))
        if fio := bench.peer(Fio):
            halves = [[verb, f"--iodepth={DEPTH // 2}"] for verb in ("read", "write")]
            theirs[FIO] = partial(fio.run, file, total, *halves, options=("--ioengine=io_uring",))
            fio.run(file, total, ["write"])
        if aio := bench.peer(Aio):
            theirs[Aio.name] = partial(spend, AioStep(aio, place.directory, sizes))
        samples = {name: measure and first(measure) for name, measure in theirs.items()}
        what = f"70B optimizer, 1/{place.effort.part} of a rank, {total // MIB} MiB there and back"
        ours = lambda: spend(lambda: step_of_ours(store, len(sizes)))[0]  # noqa: E731
        for row in bench.contest(what, ours, samples, rounds=place.effort.rounds):
            yield replace(row, target={FIO: Target(1.05), Aio.name: Target(1.0)}.get(row.peer))
    shutil.rmtree(place.directory / "optimizer")
    for path in place.directory.glob("state-*"):
        path.unlink()
    file.unlink(missing_ok=True)


def step_of_ours(store: Swapper, groups: int) -> None:
    def begin(group: int) -> list[Any]:
        return [store.read(f"{group} {state}") for state in STATES] if group < groups else []

    reads = begin(0)
    writes: list[Any] = []
    for group in range(groups):
        values = [read.wait() for read in reads]
        reads = begin(group + 1)
        for write in writes:
            write.wait()
        writes = [store.write(f"{group} {state}", value) for state, value in zip(STATES, values, strict=True)]
        del values
    for write in writes:
        write.wait()


class AioStep:
    """The same with DeepSpeed's aio: a file for each state, three sets of buffers, a handle for each direction."""

    SETS = 3

    def __init__(self, aio: Aio, directory: Path, sizes: list[int]) -> None:
        self._aio, self._directory, self._sizes = aio, directory, sizes
        self._buffers = [[aio.buffer(max(sizes)) for _ in STATES] for _ in range(self.SETS)]
        for group in range(len(sizes)):
            self._begin(aio.writer.async_pwrite, group)
            aio.writer.wait()

    def __call__(self) -> None:
        reader, writer = self._aio.handle, self._aio.writer
        groups = len(self._sizes)
        self._begin(reader.async_pread, 0)
        for group in range(groups):
            reader.wait()
            if group + 1 < groups:
                self._begin(reader.async_pread, group + 1)
            if group:
                writer.wait()
            self._begin(writer.async_pwrite, group)
        writer.wait()

    def _begin(self, move: Callable[[Any, str, int], int], group: int) -> None:
        for state, buffer in zip(STATES, self._buffers[group % self.SETS], strict=True):
            move(buffer[: self._sizes[group]], str(self._directory / f"state-{group}-{state}"), 0)


def operations(bench: Bench, place: Place) -> Iterator[Row]:
    """One page at a time, beside few entries and beside many."""
    few, many = 10, place.effort.entries
    with ExitStack() as stack:
        pool = PinnedPool("host")
        page, target = pool.zeros(PAGE), pool.empty(PAGE)
        stores = {}
        for entries in (few, many):
            store = stores[entries] = stack.enter_context(place.store(f"entries-{entries}", pool))
            for ticket in [store.write(f"entry {number}", page) for number in range(entries)]:
                ticket.wait()
        laps = 64 if bench.quick else 512
        for what, work in {
            "replace": lambda store, _: store.write("entry 7", page).wait(),
            "read": lambda store, _: store.read("entry 7", target).wait(),
            "write": lambda store, lap: store.write(f"new {lap}", page).wait(),
            "delete": lambda store, lap: store.delete(f"new {lap}"),
        }.items():
            samples = {entries: lapping(store, work, what, page, laps) for entries, store in stores.items()}
            peers: dict[str, Sample | None] = {f"{few} entries": samples[few]}
            named = f"swap {what}, 4 KiB, beside {many:,} entries"
            yield from bench.contest(named, samples[many], peers, Target(1.1), rounds=place.effort.rounds)


def lapping(store: Swapper, work: Callable[[Swapper, int], object], what: str, page: Any, laps: int) -> Sample:
    def sample() -> float:
        if what == "delete":
            for ticket in [store.write(f"new {lap}", page) for lap in range(laps)]:
                ticket.wait()
        start = time.perf_counter()
        for lap in range(laps):
            work(store, lap)
        spent = (time.perf_counter() - start) / laps
        if what == "write":
            for lap in range(laps):
                store.delete(f"new {lap}")
        return spent

    return sample
