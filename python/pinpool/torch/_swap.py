"""How the swap store sees torch's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pinpool._pinpool import is_element_type
from pinpool._values import NOT_ROW_MAJOR
from pinpool.torch._tensors import empty, extent, is_odd

if TYPE_CHECKING:
    from pinpool._pinpool import PinnedPool


class _Tensors:
    name = "torch"

    def layout(self, obj: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        if obj.is_meta or is_odd(obj):
            raise TypeError(f"cannot swap {extent(obj)}")
        name = str(obj.dtype).removeprefix("torch.")
        if not is_element_type(name):
            raise TypeError(f"cannot swap a tensor of dtype {obj.dtype}: a pool has no such tensors")
        return name, tuple(obj.shape)

    def misfit(self, obj: torch.Tensor) -> str | None:
        if obj.device.type != "cpu":
            return f"it is on {obj.device}"
        if obj.is_conj() or obj.is_neg():
            return "its values are the conjugates, or negatives, of what lies in memory"
        return None if obj.is_contiguous() else NOT_ROW_MAJOR

    def check_target(self, into: torch.Tensor) -> None:
        """Any tensor may be written to."""

    def empty(self, pool: PinnedPool, shape: tuple[int, ...], dtype: str, timeout: float | None) -> torch.Tensor:
        return empty(pool, shape, getattr(torch, dtype), timeout=timeout)

    def copy(self, into: torch.Tensor, obj: torch.Tensor) -> None:
        with torch.no_grad():
            into.copy_(obj)


TENSORS = _Tensors()
