"""Which devices a caller means: names, framework objects, and "auto". Reads pinpool's environment variables."""

import os
import sys
from types import ModuleType

from pinpool import _pinpool

KINDS = ("cuda", "xpu")
"""Kinds of devices, in the order in which "auto" asks their drivers."""

_LIBRARIES = {
    "cuda": os.environ.get("PINPOOL_CUDA_LIBRARY"),
    "xpu": os.environ.get("PINPOOL_LEVEL_ZERO_LIBRARY"),
}

Resolved = tuple[str, str | None, int]


def library(kind: str) -> str | None:
    """Tell which library to load for a kind of device instead of the usual one."""
    return _LIBRARIES[kind]


def resolve(devices: object) -> list[Resolved]:
    """Turn what `PinnedPool(devices=...)` was given into kinds, libraries and ordinals of the drivers."""
    if devices is None or devices == "host":
        return []
    if isinstance(devices, str) and devices == "auto":
        return _auto()
    wanted = devices if isinstance(devices, list | tuple) else [devices]
    resolved = [_resolve_one(device) for device in wanted]
    return list(dict.fromkeys(resolved))


def name(device: object) -> tuple[str, int]:
    """Turn a device's name or object into its kind and the driver's ordinal."""
    kind, _, ordinal = _resolve_one(device)
    return kind, ordinal


def _resolve_one(device: object) -> Resolved:
    kind, index = _parse(device)
    if kind not in KINDS:
        known = ", ".join(f'"{kind}:0"' for kind in KINDS)
        raise ValueError(f'invalid devices: {device!r} is none of {known}, "host" and "auto"')
    if index is None:
        current = _torch_device()
        index = current[1] if current is not None and current[0] == kind else _local_rank(kind)
    return kind, library(kind), _driver_ordinal(kind, index)


def _parse(device: object) -> tuple[str, int | None]:
    if isinstance(device, str):
        kind, _, index = device.partition(":")
        if index and not index.isdecimal():
            raise ValueError(f'invalid devices: {device!r} is not of the form "cuda:0"')
        return kind, int(index) if index else None
    kind_of, index_of = getattr(device, "type", None), getattr(device, "index", None)
    if isinstance(kind_of, str) and (index_of is None or isinstance(index_of, int)):
        return kind_of, index_of
    raise TypeError(f"invalid devices: {device!r} is neither a name nor an object with .type and .index")


def _auto() -> list[Resolved]:
    current = _torch_device()
    if current is not None:
        kind, index = current
        return [(kind, library(kind), _driver_ordinal(kind, index))]
    for kind in KINDS:
        try:
            found = _pinpool.find_devices(kind, library(kind))
            if not found:
                continue
            ordinal = _pinpool.current_device(kind, library(kind))
        except _pinpool.DriverUnavailableError as error:
            if not error.absent:
                raise
        else:
            return [(kind, library(kind), _local_rank(kind, len(found)) if ordinal is None else ordinal)]
    return []


def _local_rank(kind: str, count: int | None = None) -> int:
    """Tell which device this process works on when nobody says: each of several ranks its own."""
    rank = os.environ.get("LOCAL_RANK", "0")
    ordinal = int(rank) if rank.isdecimal() else 0
    if count is None:
        count = len(_pinpool.find_devices(kind, library(kind)))
    if ordinal >= count > 1:
        raise ValueError(f"LOCAL_RANK is {ordinal}, but this process sees {count} {kind} devices; name one in devices=")
    return ordinal if ordinal < count else 0  # a rank that sees one device works on it, whatever its rank


def _torch_device() -> tuple[str, int] | None:
    """Tell torch's current accelerator, when torch is loaded and has one that pinpool knows."""
    if "torch" not in sys.modules:
        return None
    from pinpool.torch import current_device

    current = current_device()
    return current if current is not None and current[0] in KINDS else None


def _driver_ordinal(kind: str, index: int) -> int:
    """Turn torch's index of a device into the driver's ordinal, by UUID where their orders may differ."""
    if kind != "xpu" or "torch" not in sys.modules:
        return index
    from pinpool.torch import xpu_uuid

    uuid = xpu_uuid(index)
    if uuid is None:
        return index
    return _pinpool.ordinal_of(kind, library(kind), uuid)


def torch_streams() -> ModuleType:
    """Tell who knows torch's streams; without torch, nobody says which stream is the current one."""
    if "torch" not in sys.modules:
        raise ValueError("stream=None means torch's current stream, and torch is not imported; pass a stream")
    from pinpool.torch import _streams

    return _streams
