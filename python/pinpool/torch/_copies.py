"""Copies between pool memory and devices, after which the memory is not reused before they are done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pinpool import _pinpool
from pinpool.torch._streams import recorded_event
from pinpool.torch._tensors import empty, is_odd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pinpool._pinpool import PinnedPool


def copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = True) -> torch.Tensor:
    """Copy `src` into `dst` as `dst.copy_(src)` does, and return `dst`.

    A copy between a device and pool memory may still run when this returns. The memory is not reused before it is done,
    whatever becomes of the tensor meanwhile; torch does that for its own pinned memory only. Reading or changing it is
    the caller's to order, as always with `non_blocking=True`. The copy runs on the current stream of the device.

    Beside what `Tensor.copy_` raises: what `pinpool.record_stream` raises. The copy is on its way then.

    >>> import torch
    >>> from pinpool import PinnedPool
    >>> weights = empty(PinnedPool(), 3, torch.float32)
    >>> copy_(weights, torch.arange(3))
    tensor([0., 1., 2.])
    """
    if not non_blocking or _is_on_host(dst) == _is_on_host(src):
        return dst.copy_(src, non_blocking=non_blocking)
    host, other = (dst, src) if _is_on_host(dst) else (src, dst)
    followed = _can_be_followed(host)
    dst.copy_(src, non_blocking=followed)
    if followed:
        _protect_from_copy(host, other)
    return dst


def to_device(tensor: torch.Tensor, device: torch.device | str | int, non_blocking: bool = True) -> torch.Tensor:
    """Move a tensor as `tensor.to(device)` does: the tensor itself where it is there already, else a copy.

    The memory is kept from reuse as by `copy_`, so the tensor may be dropped at once. What is moved to the host is in
    memory of torch; for pool memory, make the tensor first and use `copy_`.

    >>> import torch
    >>> from pinpool import PinnedPool
    >>> weights = empty(PinnedPool(), 3, torch.float32)
    >>> to_device(weights, "cpu") is weights
    True
    """
    if not non_blocking or not _is_on_host(tensor):
        return tensor.to(device, non_blocking=non_blocking)
    followed = _can_be_followed(tensor)
    moved = tensor.to(device, non_blocking=followed)
    if followed:
        _protect_from_copy(tensor, moved)
    return moved


def protect(host: torch.Tensor, device: torch.device) -> None:
    """Keep pool memory from reuse until the work is done that is queued now on the current stream of a device.

    Other memory is left alone: torch follows its own, and its caller whatever else there is.
    """
    if device.type in ("cpu", "meta"):
        return
    for part in _parts(host):
        if _pinpool.is_pool_memory(part):
            _follow(part, device)


def _protect_from_copy(host: torch.Tensor, other: torch.Tensor) -> None:
    if not isinstance(other, FakeTensor):
        protect(host, other.device)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _can_be_followed(host: torch.Tensor) -> bool:
    """Tell whether it is known what memory a tensor on the host lies in. The copy of any other must block."""
    return not any(map(is_odd, _parts(host)))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """List the tensors that a wrapper (a DTensor, say) is made of; of any other tensor, that is itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _follow(part: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        _pinpool.record_stream(part, torch.cuda.current_stream(device))
        return
    try:
        event = recorded_event(device)
    except BaseException as error:
        _pinpool.defer(part, _Lost(str(error)))
        raise
    _pinpool.defer(part, event)


class _Lost:
    """The event of a copy that nobody will ever know the end of: asking it fails, so its block is never reused."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def query(self) -> bool:
        raise RuntimeError(f"a copy is not followed: {self.reason}")


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is nothing but its elements in memory of its device, so that a plain copy stands for it."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta and not is_odd(tensor)


def empty_as(pool: PinnedPool, tensor: torch.Tensor, *, timeout: float | None = 0) -> torch.Tensor:
    """Make a tensor in pool memory with the shape, the dtype and, where they leave no gaps, the strides of another."""
    if tensor.is_contiguous():
        return empty(pool, tuple(tensor.shape), tensor.dtype, timeout=timeout)
    strides = torch.empty_like(tensor, device="meta").stride()
    return empty(pool, tensor.numel(), tensor.dtype, timeout=timeout).as_strided(tensor.shape, strides)
