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
    from collections.abc import Callable
    from pathlib import Path

    from pinpool._pinpool import Stats
    from torch import Tensor

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
    """The streamed laps: how many differed, how long each took, the pool's numbers after the first and the last."""

    different: int
    seconds: list[float]
    first: Stats
    last: Stats


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
        with Streamer(device, pool) as streamer:
            model = StreamedModel(checkpoint, pool, streamer, device)
            with progress(checkpoint.nbytes, "reading", "B") as advance:
                model.load(advance)
            batch = _tokenize(checkpoint, device.device)
            plain = PlainModel(checkpoint, device.device)
            expected = plain.embed(batch)
            with progress(2 * laps, "running", " laps") as advance:
                done = _run_laps(lambda: model.embed(batch), expected, pool, laps, advance)
                plain_seconds = [_timed(lambda: plain.embed(batch), advance)[0] for _ in range(laps)]
        return _report(checkpoint, device.label, streamer, done, plain_seconds, expected)


def _tokenize(checkpoint: Checkpoint, device: torch.device) -> Batch:
    ids, mask = checkpoint.tokenizer.encode_batch(SENTENCES, checkpoint.config.max_position_embeddings)
    return Batch(torch.tensor(ids), torch.tensor(mask, device=device))


def _timed(work: Callable[[], Tensor], advance: Callable[[int], object]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    advance(1)
    return seconds, result


def _run_laps(
    lap: Callable[[], Tensor], expected: Tensor, pool: PinnedPool, laps: int, advance: Callable[[int], object]
) -> _Laps:
    different = 0
    seconds = []
    first = pool.stats()
    for index in range(laps):
        spent, vectors = _timed(lap, advance)
        different += not same_bits(vectors, expected)
        del vectors
        seconds.append(spent)
        if index == 0:
            first = pool.stats()
    return _Laps(different, seconds, first, pool.stats())


def _report(
    checkpoint: Checkpoint, device: str, streamer: Streamer, laps: _Laps, plain_seconds: list[float], vectors: Tensor
) -> Report:
    similar, unrelated = (float(vectors[0] @ vectors[other]) for other in (1, 2))
    return Report(
        weights=checkpoint.file.path,
        device=device,
        laps=len(laps.seconds),
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
        streamed_seconds=median(laps.seconds[1:]),
        plain_seconds=median(plain_seconds),
        similar=similar,
        unrelated=unrelated,
    )
