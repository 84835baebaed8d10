"""How `compare.py` measures, and the table that comes of it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from timeit import Timer
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from peers import PeerAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    Sample = Callable[[], float]  # measures once, and answers what one operation took, in seconds
    Text = Callable[[float], str]


class Peer(Protocol):
    name: str


T = TypeVar("T")
P = TypeVar("P", bound=Peer)
HEADER = ("what", "peer", "ours", "peer's", "ratio", "target", "")


def time_text(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio >= 0.1 else f"1/{1 / ratio:,.0f}"


def waste_text(ratio: float) -> str:
    return f"{ratio:.3f}x"


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes >> 10} KiB"


@dataclass(frozen=True)
class Target:
    """The largest ratio to the peer, or with `own` the largest number of ours, that the design asks for."""

    bound: float
    own: bool = False


@dataclass(frozen=True)
class Row:
    """What was measured, against whom, and what came out. `theirs` and `ratio` are None without the peer."""

    what: str
    peer: str
    ours: float
    theirs: float | None = None
    ratio: float | None = None
    target: Target | None = None
    text: Text = time_text

    def cells(self) -> tuple[str, ...]:
        theirs = "absent" if self.theirs is None else self.text(self.theirs)
        ratio = "" if self.ratio is None else ratio_text(self.ratio)
        return (self.what, self.peer, self.text(self.ours), theirs if self.peer else "", ratio, *self._verdict())

    def _verdict(self) -> tuple[str, str]:
        if self.target is None:
            return "", ""
        bound, own = self.target.bound, self.target.own
        measured = self.ours if own else self.ratio
        verdict = "" if measured is None else "met" if measured <= bound else "MISSED"
        return f"ours <= {self.text(bound)}" if own else f"<= {ratio_text(bound)}", verdict


def table(rows: Iterable[Row]) -> str:
    lines = [HEADER, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    # Names to the left, numbers to the right.
    justify = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.rjust, str.ljust)
    aligned = ((put(cell, width) for put, cell, width in zip(justify, line, widths, strict=True)) for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


@dataclass(frozen=True)
class Effort:
    """How much time goes into a row, and how much memory into those that make some."""

    rounds: int
    slow_rounds: int
    sample_seconds: float
    fresh_bytes: int
    stall_bytes: int


@dataclass
class Bench:
    """What every row needs: the effort, the peers that are here, and why the others are not."""

    effort: Effort
    quick: bool = False
    swap_dir: Path | None = None
    notes: dict[str, str] = field(default_factory=dict)
    _peers: dict[type[Peer], Any] = field(default_factory=dict)

    def leave_out(self, kind: type[Peer], reason: str) -> None:
        self._peers[kind] = None
        self.notes[kind.name] = reason

    def peer(self, kind: type[P]) -> P | None:
        if kind not in self._peers:
            try:
                self._peers[kind] = kind()
            except PeerAbsentError as error:
                self.leave_out(kind, str(error))
        found: P | None = self._peers[kind]
        return found

    def clock(self, statement: str, *, per: int = 1, **names: Any) -> Sample:
        """Time a statement that does `per` operations, as many times over as fill a sample."""
        timer = Timer(statement, globals=names)
        timer.timeit(3)  # the first lap makes what the later ones use again
        number, spent = 1, 0.0
        while spent < self.effort.sample_seconds:
            number = 2 * number if spent else 1
            spent = timer.timeit(number)
        return lambda: timer.timeit(number) / (number * per)

    def contest(
        self,
        what: str,
        ours: Sample,
        peers: Mapping[str, Sample | None],
        target: Target | None = None,
        rounds: int | None = None,
    ) -> Iterator[Row]:
        """Let ours and the peers take turns; one row for each peer, or one without."""
        here = {"": ours} | {peer: sample for peer, sample in peers.items() if sample is not None}
        times = in_turns(here, rounds or self.effort.rounds)
        our_time = statistics.median(times[""])
        for peer in peers or ("",):
            if not peer or peer not in times:
                yield Row(what, peer, our_time, target=target)
                continue
            ratio = statistics.median(mine / other for mine, other in zip(times[""], times[peer], strict=True))
            yield Row(what, peer, our_time, statistics.median(times[peer]), ratio, target)


def in_turns(samples: dict[str, Sample], rounds: int) -> dict[str, list[float]]:
    """Take one sample of each in every round; another one begins each time."""
    names = list(samples)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(samples[name]())
    return times


def making(make: Callable[[], T], give_back: Callable[[T], object]) -> Sample:
    """Time the making alone, the second time around.

    The first time goes to waste because of virtual machines: memory that has been idle for some seconds may be back
    with the host, and is then found again at many times the price of either contestant.
    """

    def sample() -> float:
        give_back(make())
        start = time.perf_counter()
        made = make()
        spent = time.perf_counter() - start
        give_back(made)
        return spent

    return sample
