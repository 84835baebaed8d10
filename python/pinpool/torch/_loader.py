"""Batches of a DataLoader that are pinned into a pool."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.utils.data import default_collate

from pinpool import _pinpool
from pinpool._pinpool import PinnedPool, PinpoolError
from pinpool.torch._copies import copy_, empty_as, is_plain, to_device

Change: TypeAlias = Callable[[Any], Any]

# Pools by what batches carry instead: a batch comes from another process, and a pool cannot go there.
_pools: WeakValueDictionary[str, PinnedPool] = WeakValueDictionary()


class PoolCollate:
    """A `collate_fn` whose batches a DataLoader with `pin_memory=True` pins into a pool.

    `collate_fn` makes the batch, in the worker; it is pinned in the process that made the `PoolCollate`, which keeps
    the pool. Without an accelerator torch pins nothing. Batches are `PoolBatch`es. `timeout`: seconds to wait for
    pool memory.

    >>> from pinpool import PinnedPool
    >>> from torch.utils.data import DataLoader
    >>> pool = PinnedPool()
    >>> loader = DataLoader([1, 2, 3], batch_size=3, collate_fn=PoolCollate(pool))
    >>> for batch in loader:
    ...     print(batch.to("cpu").data)
    tensor([1, 2, 3])
    """

    def __init__(self, pool: PinnedPool, collate_fn: Change = default_collate, *, timeout: float | None = 0) -> None:
        if not isinstance(pool, PinnedPool):
            raise TypeError(f"PoolCollate takes a PinnedPool, not {type(pool).__name__}")
        self.pool: PinnedPool | None = pool
        self.collate_fn = collate_fn
        self.timeout = timeout
        self._token = uuid.uuid4().hex
        _pools[self._token] = pool

    def __call__(self, samples: Any) -> PoolBatch:  # noqa: ANN401
        """Make a batch of samples."""
        return PoolBatch(self.collate_fn(samples), self._token, self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"pool": None}


class PoolBatch:
    """What a `collate_fn` made, as `data`, and how to pin it.

    Length, iteration, items and other attributes are those of `data`, pinned or not, so `for x, y in loader`,
    `batch["x"]` and `model(**batch)` work. Move it to a device with `to`: the pool reuses its memory when the batch is
    gone, and a `tensor.to(device, non_blocking=True)` of your own may still be reading it then.

    >>> from pinpool import PinnedPool
    >>> pool = PinnedPool()
    >>> batch = PoolCollate(pool)([{"x": 1.0}, {"x": 2.0}]).pin_memory()
    >>> batch["x"], pool.is_pinned(batch["x"])
    (tensor([1., 2.], dtype=torch.float64), True)
    """

    __slots__ = ("_timeout", "_token", "data")

    def __init__(self, data: Any, token: str, timeout: float | None) -> None:  # noqa: ANN401
        self.data = data
        self._token = token
        self._timeout = timeout

    def pin_memory(self) -> PoolBatch:
        """Copy the tensors of the batch into the pool. The DataLoader calls this.

        Left as they are: tensors that are pinned, on a device, or not plain memory. An object with a `pin_memory` of
        its own is asked for it. PinpoolError: this process does not have the pool, or no longer. Otherwise raises what
        `PinnedPool.empty` raises.
        """
        pool = _pools.get(self._token)
        if pool is None:
            raise PinpoolError(
                "cannot pin a batch: its pool is not in this process, or no longer; keep the PoolCollate that made it"
            )
        return self._with(_changed(self.data, lambda tensor: self._pinned(pool, tensor), _pin))

    def to(self, device: torch.device | str | int, non_blocking: bool = True) -> PoolBatch:
        """Move the tensors of the batch as `to_device` does, so that the batch may be dropped at once.

        An object with a `pin_memory` of its own is moved by its own `to`.
        """
        return self._with(
            _changed(
                self.data,
                lambda tensor: to_device(tensor, device, non_blocking),
                lambda other: other.to(device, non_blocking=non_blocking),
            )
        )

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = True) -> PoolBatch:
        """Move the tensors of the batch as `to` does; a tensor's own `cuda` would not keep the memory from reuse."""
        return self.to("cuda" if device is None else device, non_blocking)

    def xpu(self, device: torch.device | str | int | None = None, non_blocking: bool = True) -> PoolBatch:
        """Move the tensors of the batch as `to` does."""
        return self.to("xpu" if device is None else device, non_blocking)

    def _pinned(self, pool: PinnedPool, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or not is_plain(tensor) or _pinpool.is_pinned(tensor) or tensor.is_pinned():
            return tensor
        with torch.no_grad():
            pinned = copy_(empty_as(pool, tensor, timeout=self._timeout), tensor)
        return pinned.requires_grad_(tensor.requires_grad)

    def _with(self, data: Any) -> PoolBatch:  # noqa: ANN401
        return PoolBatch(data, self._token, self._timeout)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401
        return self.data[key]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):  # protocols: the batch would say of itself what is true of `data` only
            raise AttributeError(name)
        return getattr(self.data, name)

    def __reduce__(self) -> tuple[type[PoolBatch], tuple[Any, str, float | None]]:
        return PoolBatch, (self.data, self._token, self._timeout)

    def __repr__(self) -> str:
        return f"PoolBatch({self.data!r})"


def _pin(other: Any) -> Any:  # noqa: ANN401
    return other.pin_memory()


def _changed(data: Any, tensor: Change, other: Change) -> Any:  # noqa: ANN401
    """Build `data` anew with its tensors changed, and objects that pin themselves; the rules are DataLoader's own."""
    if isinstance(data, torch.Tensor):
        return tensor(data)
    if hasattr(data, "pin_memory"):
        return other(data)
    if isinstance(data, Mapping):
        return _rebuilt_mapping(data, {key: _changed(value, tensor, other) for key, value in data.items()})
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | range):
        return _rebuilt_sequence(data, [_changed(value, tensor, other) for value in data])
    return data


def _rebuilt_mapping(data: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    try:
        if not isinstance(data, MutableMapping):
            return type(data)(values)  # type: ignore[call-arg]
        clone = copy.copy(data)  # it may be more than its items
        clone.update(values)
    except TypeError:
        return values
    return clone


def _rebuilt_sequence(data: Sequence[Any], values: list[Any]) -> Sequence[Any]:
    if hasattr(data, "_fields"):
        return type(data)(*values)
    try:
        if isinstance(data, tuple):
            return type(data)(values)
        clone = copy.copy(data)
        for index, value in enumerate(values):
            clone[index] = value  # type: ignore[index]
    except TypeError:
        return values
    return clone
