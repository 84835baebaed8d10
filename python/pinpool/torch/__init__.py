"""Pinned memory as torch tensors. Only this folder, beside the demo, imports torch."""

from pinpool.torch._tensors import current_device as current_device
from pinpool.torch._tensors import default_pool, empty, is_pinned, pin, register, unpin
from pinpool.torch._tensors import extent as extent
from pinpool.torch._tensors import xpu_uuid as xpu_uuid

__all__ = ["default_pool", "empty", "is_pinned", "pin", "register", "unpin"]
