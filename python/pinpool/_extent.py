"""Asks a framework, when it is loaded, which bytes its tensor stands for."""

import sys


def tensor_extent(obj: object) -> tuple[int, int, bool, object] | str | None:
    """Tell the address, the bytes from first to last, whether the elements fill them, and what keeps them.

    A text says why a tensor has no host memory of its own; None is for anything that is no tensor.
    """
    framework = sys.modules.get("torch")
    if framework is None or not isinstance(obj, framework.Tensor):
        return None
    from pinpool.torch import extent

    return extent(obj)
