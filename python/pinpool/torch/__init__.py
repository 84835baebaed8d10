"""Pinned memory as torch tensors. Only this folder, the demo and `pinpool.deepspeed` import torch."""

from pinpool._default import default_pool
from pinpool.torch._copies import copy_, to_device
from pinpool.torch._fsdp import fsdp2_offload
from pinpool.torch._loader import PoolBatch, PoolCollate
from pinpool.torch._saved import save_in_pool
from pinpool.torch._tensors import current_device as current_device
from pinpool.torch._tensors import empty, is_pinned, pin, register, unpin
from pinpool.torch._tensors import extent as extent
from pinpool.torch._tensors import xpu_uuid as xpu_uuid

__all__ = [
    "PoolBatch",
    "PoolCollate",
    "copy_",
    "default_pool",
    "empty",
    "fsdp2_offload",
    "is_pinned",
    "pin",
    "register",
    "save_in_pool",
    "to_device",
    "unpin",
]
