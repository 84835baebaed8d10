"""FSDP2: the shards that torch offloads to the CPU live in pool memory, at their exact size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pinpool.torch._tensors import empty, is_pinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    from pinpool._pinpool import PinnedPool


def fsdp2_offload(model: torch.nn.Module, pool: PinnedPool) -> int:
    """Move the CPU-offloaded shards of an FSDP2 model into a pool, and tell how many bytes were moved.

    `model`: a module with `fully_shard(..., offload_policy=CPUOffloadPolicy(...))` on it or on modules inside; shards
    without that policy stay where they are. Every shard gets one block, of the size that FSDP pads it to. The
    parameters remain the same objects, so an optimizer may be made before or after. Tensors that were taken from them
    before (`to_local()`, `state_dict()`) keep the old memory. One shard is moved at a time, its old memory dropped at
    once.

    Shards on the meta device get memory whose values are undefined, as by `to_empty`: load or initialize them next.
    Training and `load_state_dict` keep the memory. What gives a parameter other memory, such as
    `load_state_dict(assign=True)` and `model.to(dtype)`, takes it out of the pool; call `fsdp2_offload` again, it moves
    only what pinpool has not pinned. Gradients are FSDP's: they are not in the pool.

    `CPUOffloadPolicy(pin_memory=True)` needs a pool whose memory is registered with the device. As FSDP then pins
    shards itself first, shard on the meta device to never hold two pinned copies. `pin_memory=False` works with any
    pool: copies from a registered one are asynchronous all the same, and only those of the gradients are not. The pool
    does not know of FSDP's copies: wait for the device before you drop, assign to or convert a model that has just run.

    Raises TypeError for a model without FSDP2, and for shards that are not plain tensors; ValueError for one without
    the policy, and for a pool whose memory is not registered where FSDP is to pin; and what `PinnedPool.empty` raises.
    After an error in the middle the model is whole: the shards moved so far are in the pool, another call moves the
    rest.

        model = fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fsdp2_offload(model, pool)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    shards = [shard for shard in _offloaded_shards(model) if not shard.is_in_a_pool]
    if any(shard.pinned_by_fsdp for shard in shards):
        _check_torch_takes_for_pinned(pool)
    pinned_by_torch = any(shard.pinned_by_fsdp and not shard.local.is_meta for shard in shards)
    # What is made in inference mode cannot be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        moved = sum(_move(shard, pool) for shard in shards)
    if pinned_by_torch:
        _empty_host_cache_of_torch()
    return moved


def _offloaded_shards(model: torch.nn.Module) -> list[_Shard]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"fsdp2_offload takes a torch.nn.Module, not {type(model).__name__}")
    states = _fsdp_states(model)
    if not states:
        raise TypeError(
            f"this {type(model).__name__} is not sharded by FSDP2: call torch.distributed.fsdp.fully_shard(module, "
            "offload_policy=CPUOffloadPolicy()) first; FullyShardedDataParallel (FSDP1) is not supported"
        )
    shards = [_Shard(param) for state in states for param in _fsdp_params(state)]
    offloaded = [shard for shard in shards if shard.offloaded]
    if shards and not offloaded:
        raise ValueError(
            f"no shard of this {type(model).__name__} is offloaded to the CPU: give fully_shard an "
            "offload_policy=torch.distributed.fsdp.CPUOffloadPolicy()"
        )
    for shard in offloaded:
        shard.require_plain()
    return offloaded


def _check_torch_takes_for_pinned(pool: PinnedPool) -> None:
    # FSDP asks torch at the first forward, and copies shards that are not pinned to memory of torch's own.
    if not empty(pool, 1, torch.uint8).is_pinned():
        raise ValueError(
            "CPUOffloadPolicy(pin_memory=True) needs memory that is registered with the device, and torch does not "
            "know that of this pool: make the pool for the device, or give fully_shard "
            "CPUOffloadPolicy(pin_memory=False)"
        )


def _move(shard: _Shard, pool: PinnedPool) -> int:
    local = shard.local
    padded = empty(pool, shard.padded_size, local.dtype)
    rows = local.size(0)  # less than those of `padded` only where FSDP shards the first dimension unevenly
    padded[rows:].zero_()
    if not local.is_meta:
        padded[:rows].copy_(local)
    shard.put_into(padded)
    return padded.nbytes


def _empty_host_cache_of_torch() -> None:
    """Give back the pinned memory of the old shards, which torch would keep; releases without this call do keep it."""
    empty_cache = getattr(torch.accelerator, "empty_host_cache", None)
    if empty_cache is not None:
        empty_cache()


# What follows knows the private parts of FSDP2.


class _Shard:
    """The part of one parameter that this rank owns."""

    def __init__(self, fsdp_param: FSDPParam) -> None:
        _require(fsdp_param, *_PARAM_ATTRIBUTES)
        self._fsdp_param = fsdp_param

    @property
    def offloaded(self) -> bool:
        return self._fsdp_param.offload_to_cpu

    @property
    def pinned_by_fsdp(self) -> bool:
        return self._fsdp_param.pin_memory

    @property
    def padded_size(self) -> torch.Size:
        return self._fsdp_param.padded_sharded_param_size

    @property
    def local(self) -> torch.Tensor:
        return self._fsdp_param._sharded_local_tensor

    @property
    def is_in_a_pool(self) -> bool:
        """Tell whether pinpool has pinned the padded shard, and the shard alone."""
        padded, local = self._fsdp_param._sharded_param_data, self.local.untyped_storage()
        exact = local.data_ptr() == padded.data_ptr() and local.nbytes() == padded.nbytes
        return exact and is_pinned(padded)

    def require_plain(self) -> None:
        if type(self.local) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"the shard of {self._fsdp_param._module_info.param_name!r} is a {type(self.local).__name__}: "
                "only plain tensors can be moved into a pool"
            )

    def put_into(self, padded: torch.Tensor) -> None:
        """Make `padded`, which has the values already, the memory of the shard."""
        param: Any = self._fsdp_param.sharded_param
        local = padded.narrow(0, 0, self.local.size(0))
        if self.local.is_cpu:
            param._local_tensor = local
        else:  # the device of a DTensor is that of its first local tensor for good
            _swap_keeping_attributes(param, self._fsdp_param.to_sharded_dtensor(local))
        self._fsdp_param._sharded_param_data = padded.view(-1)


_PARAM_ATTRIBUTES = (
    *("offload_to_cpu", "pin_memory", "padded_sharded_param_size", "sharded_param"),
    *("to_sharded_dtensor", "_module_info", "_sharded_local_tensor", "_sharded_param_data"),
)


def _swap_keeping_attributes(param: torch.nn.Parameter, replacement: torch.Tensor) -> None:
    """Make a parameter another tensor in place, as `to_empty` does; optimizers go on with the same object."""
    other = torch.nn.Parameter(replacement, requires_grad=param.requires_grad)
    vars(other).update(vars(param))
    swap_tensors: Any = torch.utils.swap_tensors  # has no types
    swap_tensors(param, other)


def _fsdp_states(model: torch.nn.Module) -> list[FSDPState]:
    """List the states of FSDP2 on a model, each once: modules that were sharded together share one."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed import fsdp  # takes a second, which users of other parts need not pay

    _require(fsdp, "FSDPModule")
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    for module in sharded:
        _require(module, "_get_fsdp_state")
    return list(dict.fromkeys(module._get_fsdp_state() for module in sharded))


def _fsdp_params(state: FSDPState) -> Iterator[FSDPParam]:
    if hasattr(state, "_fsdp_param_groups"):
        groups = state._fsdp_param_groups
    else:  # this torch has no more than one
        _require(state, "_fsdp_param_group")
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    for group in groups:
        _require(group, "fsdp_params")
        yield from group.fsdp_params


def _require(part: object, *names: str) -> None:
    missing = [name for name in names if not hasattr(part, name)]
    if missing:
        raise RuntimeError(
            f"fsdp2_offload does not know the FSDP2 of torch {torch.__version__}: its "
            f"{getattr(part, '__name__', type(part).__name__)} has no {', '.join(missing)}"
        )
