"""Tells where in the caller's code something happens, for debug mode."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = str(Path(__file__).parent) + os.sep
_DEPTH = 3
"""So many calls are told: the last alone is often a helper."""


def origin() -> str:
    """Tell the innermost calls outside this package, the last first: "file:line in function < ..."."""
    frame: FrameType | None = sys._getframe()
    calls: list[str] = []
    while frame is not None and len(calls) < _DEPTH:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            calls.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return " < ".join(calls) or "no Python code"
