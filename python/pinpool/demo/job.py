"""The job itself: load, run the laps, run the plain model, compare, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from pinpool import PinnedPool
from pinpool.demo.checkpoint import Checkpoint
from pinpool.demo.models import Batch, PlainModel, StreamedModel, same_bits
from pinpool.demo.progress import progress
from pinpool.demo.report import Report
from pinpool.demo.stream import Streamer, choose_device

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pinpool import Stats

# The first two say the same in other words; the third has nothing to do with them.
SENTENCES = (
    "A man is eating a piece of bread in the kitchen.",
    "In the kitchen, somebody is eating some bread.",
    "The spacecraft entered orbit around Mars after a journey of seven months.",
    "Page-locked memory lets a device copy data without waiting for the processor.",
    "She didn't expect the concert to be cancelled, but the orchestra was on strike.",
    "Fresh snow had covered the path, so they turned back before noon.",
    "How much does it cost to send a parcel of 5 kg to Reykjavík?",
    "The committee published its report on water quality on 3 March 2021.",
)


@dataclass(frozen=True)
class _Laps:
    """The laps: how many differed, the seconds of each, the pool's numbers after the first and the last."""

    different: int
    streamed: list[float]
    plain: list[float]
    first: Stats
    last: Stats
    vectors: Tensor


def run(weights: Path, laps: int, *, host_only: bool = False) -> Report:
    """Stream the model in `weights` through a pool `laps` times and compare every lap with the plain model.

    Args:
        weights: a safetensors file with a BERT-style model, config.json and vocab.txt next to it.
        laps: how often to run the model, at least 2.
        host_only: stay in host memory even where torch has an accelerator.

    Raises:
        DemoError: a file is damaged, or is no BERT model.
        PinpoolError: the memory cannot be locked.
        OSError: a file cannot be read.

    """
    with Checkpoint(weights) as checkpoint, PinnedPool() as pool, torch.inference_mode():
        device = choose_device(pool, host_only=host_only)
        batch = _tokenize(checkpoint, device.device)
        with Streamer(device, pool) as streamer:
            model = StreamedModel(checkpoint, pool, streamer, device)
            with progress(checkpoint.nbytes, "reading", "B") as advance:
                model.load(advance)
            plain = PlainModel(checkpoint, device.device)
            done = _run_laps(model, plain, batch, pool, laps)
        return _report(checkpoint, device.label, streamer, done)


def _tokenize(checkpoint: Checkpoint, device: torch.device) -> Batch:
    ids, mask = checkpoint.tokenizer.encode_batch(SENTENCES, checkpoint.config.max_position_embeddings)
    return Batch(torch.tensor(ids), torch.tensor(mask, device=device))


def _run_laps(model: StreamedModel, plain: PlainModel, batch: Batch, pool: PinnedPool, laps: int) -> _Laps:
    different = 0
    seconds = []
    after = []
    with progress(laps, "running", " laps") as advance:
        for _ in range(laps):
            # In turns, so that a machine that is busy for a while slows both down.
            streamed, vectors = _timed(model, batch)
            after.append(pool.stats())
            unstreamed, expected = _timed(plain, batch)
            seconds.append((streamed, unstreamed))
            different += not same_bits(vectors, expected)
            del vectors
            advance(1)
    streamed_seconds, plain_seconds = map(list, zip(*seconds, strict=True))
    return _Laps(different, streamed_seconds, plain_seconds, after[0], after[-1], expected)


def _timed(model: StreamedModel | PlainModel, batch: Batch) -> tuple[float, Tensor]:
    start = time.perf_counter()
    vectors = model.embed(batch)
    return time.perf_counter() - start, vectors


def _report(checkpoint: Checkpoint, device: str, streamer: Streamer, laps: _Laps) -> Report:
    similar, unrelated = (float(laps.vectors[0] @ laps.vectors[other]) for other in (1, 2))
    return Report(
        weights=checkpoint.file.path,
        device=device,
        laps=len(laps.streamed),
        different_laps=laps.different,
        tensors=len(checkpoint.tensors),
        weight_bytes=checkpoint.nbytes,
        device_bytes=streamer.peak_bytes,
        locked_bytes=laps.last["locked_bytes"],
        reserved_bytes=laps.last["reserved_bytes"],
        requested_bytes=streamer.peak_requested_bytes,
        first_os_calls=laps.first["os_calls"],
        later_os_calls=laps.last["os_calls"] - laps.first["os_calls"],
        later_hits=laps.last["hits"] - laps.first["hits"],
        later_misses=laps.last["misses"] - laps.first["misses"],
        streamed_seconds=median(laps.streamed[1:]),
        plain_seconds=median(laps.plain[1:]),
        similar=similar,
        unrelated=unrelated,
    )
