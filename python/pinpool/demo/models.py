"""The same model twice: streamed out of pool blocks, and plain, with all weights as ordinary tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation gives it
from torch.utils.dlpack import from_dlpack

from pinpool.demo.bert import mean_of_tokens, stages
from pinpool.demo.checkpoint import WORD_TABLE
from pinpool.torch import empty

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pinpool import PinnedPool
    from pinpool.demo.bert import Weights
    from pinpool.demo.checkpoint import Checkpoint
    from pinpool.demo.stream import Device, Streamer

    Advance = Callable[[int], object]


@dataclass(frozen=True)
class Batch:
    """Sentences for the model: token ids in host memory and their mask on the device, both (sentences, tokens)."""

    ids: Tensor
    mask: Tensor


class StreamedModel:
    """All weights are in pool blocks, and visit the device two stages at a time."""

    def __init__(self, checkpoint: Checkpoint, pool: PinnedPool, streamer: Streamer, device: Device) -> None:
        self._pool = pool
        self._streamer = streamer
        self._device = device
        self._checkpoint = checkpoint
        self._weights: Weights = {}

    def load(self, advance: Advance) -> None:
        """Read all weights from the file straight into pool blocks. `advance` is told the bytes of each."""
        for name, entry in self._checkpoint.tensors.items():
            block = self._pool.empty(entry.shape, entry.dtype)
            self._checkpoint.file.read_into(entry.name, block)
            self._weights[name] = from_dlpack(block)
            advance(entry.nbytes)
        self._stages = stages(self._checkpoint.config, self._weights)

    def embed(self, batch: Batch) -> Tensor:
        """Return one unit vector a sentence, (sentences, hidden), in a pool block."""
        words = self._look_up(batch.ids)
        hidden = self._streamer.run(self._stages, words.to(self._device.device, non_blocking=True), batch.mask)
        vectors = mean_of_tokens(hidden, batch.mask)
        # The one copy that blocks: when it is done, so is every copy that reads `words` or a weight.
        return empty(self._pool, vectors.shape, vectors.dtype).copy_(vectors)

    def _look_up(self, ids: Tensor) -> Tensor:
        table = self._weights[WORD_TABLE]
        rows = empty(self._pool, (ids.numel(), table.shape[1]), table.dtype)
        torch.index_select(table, 0, ids.flatten(), out=rows)
        return rows.view(*ids.shape, -1)


class PlainModel:
    """All weights are ordinary tensors on the device, read from the file once more: pinpool has no part in it."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._device = device
        weights = {name: self._read(checkpoint, name).to(device) for name in checkpoint.tensors}
        self._table = weights[WORD_TABLE]
        self._stages = stages(checkpoint.config, weights)

    def embed(self, batch: Batch) -> Tensor:
        """Return one unit vector a sentence, (sentences, hidden), in host memory."""
        hidden = F.embedding(batch.ids.to(self._device), self._table)
        for stage in self._stages:
            hidden = stage.step(stage.weights, hidden, batch.mask)
        return mean_of_tokens(hidden, batch.mask).cpu()

    @staticmethod
    def _read(checkpoint: Checkpoint, name: str) -> Tensor:
        entry = checkpoint.tensors[name]
        content = bytearray(entry.nbytes)
        checkpoint.file.read_into(entry.name, content)
        # Cloned, because a bytearray is not aligned as torch's own memory is, and kernels may then round otherwise.
        return torch.frombuffer(content, dtype=getattr(torch, entry.dtype)).reshape(entry.shape).clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors hold the same bits: unlike `==`, this tells 0.0 from -0.0 and accepts NaN."""
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
