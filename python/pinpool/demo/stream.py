"""Streaming: the weights of a stage reach the device while the stage before it computes, and leave when it is done."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, Self

import torch

from pinpool.torch import empty

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from pinpool import PinnedPool
    from pinpool.demo.bert import Stage, Weights


class Device(Protocol):
    """Where the model computes, and how weights get there."""

    device: torch.device
    label: str

    def copy_in(self, weights: Weights) -> Weights:
        """Start copying `weights` to the device and return the copies. Called in the thread that prefetches."""

    def await_copies(self) -> None:
        """Let the work that is submitted from here on see the copies that were started so far."""

    def await_compute(self) -> None:
        """Let the copies that are started from here on come after the work that was submitted so far."""


class HostDevice:
    """The stand-in where there is no accelerator: copies go to other blocks of the pool, and are done at once."""

    label = "host memory, other blocks of the same pool"

    def __init__(self, pool: PinnedPool) -> None:
        self.device = torch.device("cpu")
        self._pool = pool

    def copy_in(self, weights: Weights) -> Weights:
        """Copy `weights` to fresh blocks of the pool."""
        return {name: empty(self._pool, tensor.shape, tensor.dtype).copy_(tensor) for name, tensor in weights.items()}

    def await_copies(self) -> None:
        """Do nothing: a copy is done when `copy_in` returns."""

    def await_compute(self) -> None:
        """Do nothing: a step is done when it returns."""


class Accelerator:
    """Torch's current accelerator, with a stream for copies next to the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.label = str(device)
        self._copies = torch.Stream(device)

    def copy_in(self, weights: Weights) -> Weights:
        """Queue the copies. The sources must live until a step that came after `await_copies` is done."""
        # The copy stream owns the memory too. Weights that left were freed after `await_compute`, so torch may give
        # their memory to these at once, and the device never holds more than two stages.
        with _on_stream(self._copies):
            return {name: tensor.to(self.device, non_blocking=True) for name, tensor in weights.items()}

    def await_copies(self) -> None:
        """Queue, on the stream that computes, a wait for all copies."""
        torch.accelerator.current_stream(self.device).wait_stream(self._copies)

    def await_compute(self) -> None:
        """Queue, on the stream that copies, a wait for all steps."""
        self._copies.wait_stream(torch.accelerator.current_stream(self.device))


def choose_device(pool: PinnedPool, *, host_only: bool) -> Device:
    """Return torch's current accelerator; the host if there is none, or if `host_only` is true."""
    # Releases of torch before 2.6 have no torch.accelerator.
    accelerator = getattr(torch, "accelerator", None)
    if host_only or accelerator is None or not accelerator.is_available():
        return HostDevice(pool)
    return Accelerator(accelerator.current_stream().device)


class Streamer:
    """Runs stages in order, with the weights of at most two of them on the device. Close it by `with`.

    `peak_bytes` is the most weights that were on the device at a time, and `peak_requested_bytes` the most that `pool`
    had handed out at such a moment; both in bytes.
    """

    def __init__(self, device: Device, pool: PinnedPool) -> None:
        self.peak_bytes = 0
        self.peak_requested_bytes = 0
        self._device = device
        self._pool = pool
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pinpool-prefetch")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def run(self, stages: Sequence[Stage], hidden: Tensor, mask: Tensor) -> Tensor:
        """Pass `hidden` through all stages and return what comes out; all tensors are on the device."""
        weights = self._prefetch(stages[0]).result()
        for stage, following in zip_longest(stages, stages[1:]):
            self._device.await_copies()
            arriving = self._prefetch(following) if following else None
            hidden = stage.step(weights, hidden, mask)
            arrived = arriving.result() if arriving else {}
            self._note_peak(weights, arrived)
            self._evict(weights)
            weights = arrived
        return hidden

    def _prefetch(self, stage: Stage) -> Future[Weights]:
        return self._thread.submit(self._device.copy_in, stage.weights)

    def _note_peak(self, *resident: Weights) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(tensor.nbytes for part in resident for tensor in part.values()))
        self.peak_requested_bytes = max(self.peak_requested_bytes, self._pool.stats()["requested_bytes"])

    def _evict(self, weights: Weights) -> None:
        self._device.await_compute()
        # Emptied and not just dropped: the future that brought the dict still holds it.
        weights.clear()


@contextmanager
def _on_stream(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
