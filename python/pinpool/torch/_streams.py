"""Tells which work of a device is under way in torch."""

import torch


def is_used(kind: str) -> bool:
    """Tell whether torch has used devices of this kind: else no work of its own can be under way."""
    return bool(getattr(torch, kind).is_initialized())


def current_cuda_stream(ordinal: int) -> int:
    """Tell the handle of torch's current stream, for releases whose exchange API does not."""
    return int(torch.cuda.current_stream(ordinal).cuda_stream)


def current_event(kind: str) -> torch.Event:
    """Make an event that is done when the work is that is queued now on torch's current stream of a kind of device."""
    return recorded_event(torch.device(kind, torch.accelerator.current_device_index()))


def recorded_event(device: torch.device) -> torch.Event:
    """Make an event that is done when the work is that is queued now on the current stream of a device."""
    event = torch.Event(device=device)
    event.record(torch.accelerator.current_stream(device))
    return event
