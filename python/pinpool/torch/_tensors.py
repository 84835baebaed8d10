"""Tensors in pool memory, and tensors whose memory is pinned where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.utils.dlpack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from pinpool import _pinpool
from pinpool._default import default_pool

if TYPE_CHECKING:
    from pinpool._pinpool import PinnedPool, Registration
    from pinpool._types import Shape


def _empty_by_capsule(pool: PinnedPool, shape: Shape, dtype: torch.dtype, *, timeout: float | None = 0) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(pool.empty(shape, dtype, timeout=timeout))


# torch has an exchange API from 2.10 on; through it a tensor costs a fraction of the way through a capsule.
empty = _pinpool.torch_empty if _pinpool.use_exchange_api([torch.Tensor, torch.nn.Parameter]) else _empty_by_capsule


def pin(
    tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True, *, pool: PinnedPool | None = None
) -> torch.Tensor:
    """Copy a tensor into new pinned memory.

    The result is contiguous, detached from autograd, and of the same dtype; its shape is that of `tensor`, or
    `(numel,)` with `match_shape=False`. With `make_copy=False` its values are whatever the memory held. A meta or fake
    tensor gives one of its own kind. Raises TypeError for sparse and quantized tensors, and what `PinnedPool.empty`
    raises.

    >>> import torch
    >>> weights = pin(torch.arange(6).reshape(2, 3).t())
    >>> weights.tolist(), weights.is_contiguous(), is_pinned(weights)
    ([[0, 3], [1, 4], [2, 5]], True, True)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"pin takes a tensor, not {type(tensor).__name__}; for other memory, see pinpool.register")
    if not isinstance(tensor, FakeTensor) and is_odd(tensor):
        raise TypeError(f"cannot pin a copy of {_kind(tensor)}: it has no dense memory of its own; pin its parts")
    shape = tuple(tensor.shape) if match_shape else (tensor.numel(),)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return tensor.new_empty(shape)
    pinned = empty(pool or default_pool(), shape, tensor.dtype)
    if make_copy:
        with torch.no_grad():
            pinned.view(tensor.shape).copy_(tensor)
    return pinned


def register(tensor: torch.Tensor, *, pool: PinnedPool | None = None) -> Registration:
    """Pin the memory of a tensor in place, until the `Registration` is closed. See `PinnedPool.register`.

    >>> import torch
    >>> weights = torch.zeros(1000)
    >>> with register(weights):
    ...     is_pinned(weights[10:20])
    True
    """
    return _pinpool.register(tensor) if pool is None else pool.register(tensor)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Tell whether all bytes of a tensor are pinned by pinpool; False for tensors without host memory.

    Unlike `Tensor.is_pinned` it asks about the view itself, not about the start of its storage, and needs no driver.
    """
    return _pinpool.is_pinned(tensor)


def unpin(tensor: torch.Tensor) -> bool:
    """Unlock the memory of a tensor from `empty` or `pin` now. It stays valid until the last alias is gone.

    What has a region of its own (large tensors do) is unregistered from its devices, too. Drivers that keep such memory
    for others are waited for, up to 20 seconds.

    True: it was pinned; False: it was not. Raises ValueError for memory that a `Registration` pins, DriverError or
    OSError where that is refused, and PinpoolError where a driver keeps the memory: it is not to be used then.

    >>> import torch
    >>> scratch = pin(torch.ones(3))
    >>> unpin(scratch), unpin(scratch), scratch.sum().item()
    (True, False, 3.0)
    """
    return _pinpool.unpin(tensor)


def extent(tensor: torch.Tensor) -> tuple[int, int, bool, object] | str:
    """Tell the address of a tensor, its bytes from first to last, whether its elements fill them, and their keeper.

    The keeper is an array on the same storage: the tensor may be given other memory (`t.data = ...`), and torch does
    not resize a storage that an array looks at. A text says why there is no host memory.
    """
    try:
        return _host_extent(tensor)
    except (RuntimeError, ValueError) as error:  # a kind that is not known here, without memory
        return f"{_kind(tensor)}: it has no memory of its own ({error})"


def _host_extent(tensor: torch.Tensor) -> tuple[int, int, bool, object] | str:
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return f"{_kind(tensor)}: it has no memory of its own"
    if is_odd(tensor):
        return f"{_kind(tensor)}: it has no dense memory of its own; pin its parts"
    if tensor.device.type != "cpu":
        return f"{_kind(tensor)}: only host memory can be pinned"
    numel, element = tensor.numel(), tensor.element_size()
    if numel == 0:
        return tensor.data_ptr(), 0, True, tensor
    if tensor.data_ptr() == 0:
        return f"{_kind(tensor)}: it has no memory of its own"
    reach = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (reach + 1) * element, reach + 1 == numel, _keeper(tensor)


def is_odd(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is made of others, or of no elements that lie in memory as its shape says."""
    return (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or torch.nn.parameter.is_lazy(tensor)
        or torch._is_functional_tensor(tensor)
        or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def _keeper(tensor: torch.Tensor) -> object:
    # Modes (a fake mode, a default device) must not reach what is done here.
    with torch._C.DisableTorchFunction(), no_dispatch(), torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
        try:
            return whole.numpy()
        except RuntimeError:  # this torch works without numpy
            return whole


def _kind(tensor: torch.Tensor) -> str:
    if isinstance(tensor, FakeTensor):
        return "a fake tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_nested:
        return "a nested tensor"
    name = type(tensor).__name__
    return f"a {name} on {tensor.device}"


def current_device() -> tuple[str, int] | None:
    """Tell kind and index of the accelerator that torch works on; None when it has none."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else (device.type, torch.accelerator.current_device_index())


def xpu_uuid(index: int) -> bytes | None:
    """Tell the UUID of one of torch's XPU devices; None where this torch has no XPU or does not say."""
    if not torch.xpu.is_available():
        return None
    uuid = getattr(torch.xpu.get_device_properties(index), "uuid", None)
    return None if uuid is None else bytes(uuid.bytes)
