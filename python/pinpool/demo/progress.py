"""A progress bar where somebody can see it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(total: int, label: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Give a function that is told how much got done, in `unit`s; it draws if tqdm is there and stderr is a terminal.

    Example:
        with progress(len(files), "reading", "files") as advance:
            for file in files:
                advance(1)

    """
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda _done: None
        return
    tqdm = importlib.import_module("tqdm").tqdm
    with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", unit_divisor=1024, leave=False) as bar:
        yield bar.update
