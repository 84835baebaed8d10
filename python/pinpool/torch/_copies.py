"""Copies between a device and pool memory, recorded so that the memory is not reused before they are done."""

from __future__ import annotations

import torch

from pinpool import _pinpool


def copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = True) -> torch.Tensor:
    """Copy `src` into `dst` and return `dst`, as `dst.copy_(src)` does; pool memory may be dropped right after.

    Whichever of the two is pool memory is not reused before the copy is done, on any kind of device. What
    `pinpool.record_stream` raises reaches the caller after the copy was issued; the memory is then kept from reuse.

    >>> import torch, pinpool.torch
    >>> weights = pinpool.torch.empty(pinpool.PinnedPool(), 3, torch.float32)
    >>> copy_(weights, torch.arange(3)).tolist()
    [0.0, 1.0, 2.0]
    """
    dst.copy_(src, non_blocking=non_blocking)
    if non_blocking:
        _protect(dst, src)
    return dst


def to_device(tensor: torch.Tensor, device: torch.device | str | int, non_blocking: bool = True) -> torch.Tensor:
    """Copy a tensor to a device, as `tensor.to(device)` does; if it is pool memory it may be dropped right after.

    To bring a tensor back, `copy_` it into one from `empty`: for `tensor.to("cpu")` torch makes memory of its own.

    >>> import torch
    >>> to_device(torch.ones(3), "meta").device
    device(type='meta')
    """
    moved = tensor.to(device, non_blocking=non_blocking)
    if non_blocking:
        _protect(tensor, moved)
    return moved


def _protect(one: torch.Tensor, other: torch.Tensor) -> None:
    """Keep pool memory at either end of a copy, which was issued just now, from reuse until the copy is done."""
    ends = {one.device.type: one, other.device.type: other}
    host = ends.pop("cpu", None)
    if host is None or not ends:
        return
    ((kind, device_end),) = ends.items()
    if kind == "meta" or not _pinpool.is_pool_memory(host):
        return
    if kind == "cuda":
        _pinpool.record_stream(host, torch.cuda.current_stream(device_end.device))
    else:
        event = torch.Event(device=device_end.device)
        event.record(torch.accelerator.current_stream(device_end.device))
        _pinpool.defer(host, event)
