"""Activations that wait in pool memory for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import methodcaller

import torch
from torch.autograd.graph import saved_tensors_hooks

from pinpool import _pinpool
from pinpool._default import default_pool
from pinpool._pinpool import PinnedPool
from pinpool.torch._copies import copy_, empty_as, is_plain, to_device
from pinpool.torch._streams import recorded_event


class save_in_pool(saved_tensors_hooks):  # noqa: N801  (torch's save_on_cpu is spelled like this)
    """Context in which what the forward pass saves for backward is moved to pinned memory, and back when it is used.

    As `torch.autograd.graph.save_on_cpu(pin_memory=True)`, from a pool: blocks of the exact size that are reused from
    step to step. Copies run on the current stream without blocking, and a block is not reused before they are done.
    Tensors on the CPU are copied, too, so that code behaves the same everywhere.

    These stay where they are: parameters and other leaves that require a gradient, and views of them; tensors of less
    than `min_bytes`; what is in pool memory already; sparse, fake and other tensors that are not plain memory. Changing
    one of them in place before backward is an error, as without the context; what was moved is not affected by that.

    `pool`: default `default_pool()`. `timeout`: seconds to wait for memory. The operation that saves a tensor raises
    what `PinnedPool.empty` raises. As with all such hooks, only the innermost context counts.

    >>> import torch
    >>> from pinpool import PinnedPool
    >>> pool, x = PinnedPool(), torch.ones(5000, requires_grad=True)
    >>> with save_in_pool(pool):
    ...     loss = (x * 2).exp().sum()
    >>> pool.stats()["requested_bytes"]
    20000
    >>> loss.backward()
    >>> pool.stats()["requested_bytes"]
    0
    """

    def __init__(self, pool: PinnedPool | None = None, *, min_bytes: int = 4096, timeout: float | None = 0) -> None:
        if not isinstance(pool, PinnedPool | None):
            raise TypeError(f"save_in_pool takes a PinnedPool, not {type(pool).__name__}")
        super().__init__(partial(_pack, pool or default_pool(), min_bytes, timeout), methodcaller("restore"))


def _pack(pool: PinnedPool, min_bytes: int, timeout: float | None, tensor: torch.Tensor) -> _Kept | _Moved:
    if not is_plain(tensor) or _belongs_to_a_parameter(tensor) or _pinpool.is_pool_memory(tensor):
        return _keep(tensor)
    values = _without_repetition(tensor)
    if values.nbytes < max(min_bytes, 1):
        return _keep(tensor)
    return _move(pool, timeout, values, tensor.shape)


def _belongs_to_a_parameter(tensor: torch.Tensor) -> bool:
    owner = tensor if tensor._base is None else tensor._base
    return isinstance(owner, torch.nn.Parameter) or (owner.is_leaf and owner.requires_grad)


def _without_repetition(tensor: torch.Tensor) -> torch.Tensor:
    """Undo `expand`, which would make the copy larger than the original."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _keep(tensor: torch.Tensor) -> _Kept:
    # An output that its own node holds would be a cycle. A leaf must stay itself: `parameter.data = ...` may take its
    # memory away until backward.
    kept = tensor if tensor.is_leaf else tensor.detach()
    return _Kept(kept, kept._version)


def _move(pool: PinnedPool, timeout: float | None, values: torch.Tensor, shape: torch.Size) -> _Moved:
    host = copy_(empty_as(pool, values, timeout=timeout), values)
    event = None if values.device.type == "cpu" else recorded_event(values.device)
    return _Moved(host, values.device, shape, event)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A saved tensor that stays where it is."""

    tensor: torch.Tensor
    version: int

    def restore(self) -> torch.Tensor:
        # autograd leaves this check to hooks.
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A saved tensor in pool memory, and the event after which its values are there; None: they are."""

    host: torch.Tensor
    device: torch.device
    shape: torch.Size
    event: torch.Event | None

    def restore(self) -> torch.Tensor:
        values = self._values()
        return values if values.shape == self.shape else values.expand(self.shape)

    def _values(self) -> torch.Tensor:
        if self.event is None:
            # Not the pool's tensor itself: autograd may make a gradient of what it gets.
            return self.host.clone()
        # Backward may run on another stream than forward.
        self.event.wait(torch.accelerator.current_stream(self.device))
        return to_device(self.host, self.device)
