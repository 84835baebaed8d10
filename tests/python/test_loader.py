"""pinpool.torch.PoolCollate: batches of a DataLoader in pool memory."""

import copy
import gc
import pickle
from collections import OrderedDict, UserDict, deque
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory as torch_pinning

import pinpool.torch
from pinpool import OutOfPinnedMemoryError, PinnedPool, PinpoolError, _pinpool
from pinpool.torch import _loader
from pinpool.torch._loader import PoolBatch, PoolCollate

VALUES = torch.arange(6.0).view(2, 3)
SAMPLES = [{"x": torch.full((5,), float(number)), "y": number, "name": str(number)} for number in range(8)]


class Pair(NamedTuple):
    x: Any
    y: Any


class Custom:
    """A batch that pins itself, as torch's documentation shows."""

    def __init__(self, x, pinned=False, moves=()):
        self.x, self.pinned, self.moves = x, pinned, moves

    def pin_memory(self):
        return Custom(self.x, True)

    def to(self, device, non_blocking):
        return Custom(self.x, self.pinned, (*self.moves, (device, non_blocking)))


class Tagged(list):
    """A list that is more than its items."""


def collate_last(samples):
    return samples[-1]


def batch_of(pool, data):
    return PoolCollate(pool, collate_last)([data])


def pinned(pool, data):
    return batch_of(pool, data).pin_memory().data


def in_pool(tensor):
    return _pinpool.is_pool_memory(tensor)


# Structures

STRUCTURES = {
    "a tensor": (VALUES, lambda data: data),
    "a tuple": ((VALUES, 1), lambda data: data[0]),
    "a list": ([1, VALUES], lambda data: data[1]),
    "a deque": (deque([1, VALUES]), lambda data: data[1]),
    "a dict": ({"x": VALUES, "name": "a"}, lambda data: data["x"]),
    "an ordered dict": (OrderedDict(x=VALUES), lambda data: data["x"]),
    "a user's dict": (UserDict(x=VALUES), lambda data: data["x"]),
    "a mapping that cannot be changed": (MappingProxyType({"x": VALUES}), lambda data: data["x"]),
    "a named tuple": (Pair(1, VALUES), lambda data: data.y),
    "nested": ({"a": [(Pair(VALUES, None), "b")]}, lambda data: data["a"][0][0].x),
}


@pytest.mark.parametrize(("data", "find"), STRUCTURES.values(), ids=STRUCTURES)
def test_the_tensors_of_a_structure_are_pinned(pool, data, find):
    result = pinned(pool, data)
    assert type(result) is type(data)
    assert in_pool(find(result))
    assert torch.equal(find(result), VALUES)
    assert find(data) is VALUES  # what was given is as it was
    del result
    assert pool.stats()["requested_bytes"] == 0


def test_what_is_no_tensor_stays(pool):
    data = ["text", b"bytes", bytearray(3), range(3), 4, None, {1, 2}]
    result = pinned(pool, data)
    assert result == data
    assert all(one is other for one, other in zip(result, data, strict=True))


def test_a_container_keeps_its_attributes(pool):
    data = Tagged([VALUES])
    data.tag = 5
    result = pinned(pool, data)
    assert (type(result), result.tag, in_pool(result[0])) == (Tagged, 5, True)


def test_an_object_pins_and_moves_itself(pool):
    batch = batch_of(pool, [Custom(VALUES)]).pin_memory()
    assert batch[0].pinned
    assert batch.to("cpu")[0].moves == (("cpu", True),)
    assert batch.to("cpu", non_blocking=False)[0].moves == (("cpu", False),)


def test_pinned_tensors_are_not_copied(pool):
    ours, adopted = pinpool.torch.empty(pool, (4, 5), torch.float32), torch.zeros(5000)
    with pool.register(adopted):
        data = [ours, ours[1:, 2], adopted]
        assert all(one is other for one, other in zip(pinned(pool, data), data, strict=True))
    batch = batch_of(pool, VALUES).pin_memory()
    assert batch.pin_memory().data is batch.data


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_that_the_pool_cannot_hold_stay(pool):
    data = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.empty(3, device="meta")]
    assert all(one is other for one, other in zip(pinned(pool, data), data, strict=True))


def test_strides_and_requires_grad_are_kept(pool):
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    result = pinned(pool, images)
    assert torch.equal(result, images)
    assert result.stride() == images.stride()
    assert result.requires_grad
    assert result.is_leaf


# What a training loop sees is the same, pinned or not


@pytest.fixture(params=[False, True], ids=["not pinned", "pinned"])
def finish(request):
    return PoolBatch.pin_memory if request.param else lambda batch: batch


def test_a_batch_is_unpacked(pool, finish):
    batch = finish(batch_of(pool, (VALUES, 3)))
    x, y = batch
    assert (torch.equal(x, VALUES), y, len(batch), batch[1]) == (True, 3, 2, 3)
    assert torch.equal(batch.data[0], VALUES)


def test_a_batch_is_a_mapping_for_those_who_look(pool, finish):
    batch = finish(batch_of(pool, {"x": VALUES, "y": 3}))
    assert list(batch) == list(batch.keys()) == ["x", "y"]
    assert "y" in batch
    assert "z" not in batch
    assert dict(**batch).keys() == batch.data.keys()
    assert dict(batch.items())["y"] == 3


def test_a_batch_has_the_attributes_of_its_data(pool, finish):
    batch = finish(batch_of(pool, Pair(VALUES, 3)))
    assert torch.equal(batch.x, VALUES)
    assert batch.y == 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = batch.nothing
    assert not hasattr(finish(batch_of(pool, VALUES)), "__array__")


def test_a_batch_is_moved(pool, finish):
    batch = finish(batch_of(pool, {"x": VALUES, "y": 3}))
    moved = batch.to("meta")
    assert isinstance(moved, PoolBatch)
    assert moved["x"].is_meta
    assert moved["y"] == 3
    assert batch.to("cpu")["x"] is batch["x"]


def test_moving_protects_the_memory(pool, monkeypatch):
    moves = []
    monkeypatch.setattr(_loader, "to_device", lambda *call: moves.append(call) or call[0])
    batch = batch_of(pool, [VALUES]).pin_memory()
    batch.to("cuda:1")
    batch.to("cuda:1", non_blocking=False)
    assert [(tensor is batch[0], *how) for tensor, *how in moves] == [(True, "cuda:1", True), (True, "cuda:1", False)]


# Processes


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_a_batch_can_be_copied_and_pickled(pool, again):
    collate = PoolCollate(pool, collate_last)
    batch = again(collate([{"x": VALUES}]))
    assert in_pool(batch.pin_memory()["x"])


def test_a_collate_function_goes_without_its_pool(pool):
    collate = pickle.loads(pickle.dumps(PoolCollate(pool, collate_last, timeout=3)))
    assert collate.pool is None
    assert in_pool(collate([VALUES]).pin_memory().data)


def test_a_pool_that_is_gone_is_an_error():
    collate = PoolCollate(PinnedPool("host"), collate_last)
    batch = collate([VALUES])
    assert in_pool(batch.pin_memory().data)
    del collate
    gc.collect()
    with pytest.raises(PinpoolError, match="keep the PoolCollate"):
        batch.pin_memory()
    assert torch.equal(batch.data, VALUES)


def test_a_closed_pool_is_an_error(pool):
    batch = batch_of(pool, VALUES)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        batch.pin_memory()


def test_the_thread_that_pins_calls_pin_memory(pool):
    batch = torch_pinning.pin_memory(PoolCollate(pool)(SAMPLES), "cuda")
    assert in_pool(batch["x"])
    assert in_pool(batch["y"])
    assert batch["name"] == [sample["name"] for sample in SAMPLES]


def test_a_shortage_reaches_the_loop():
    with PinnedPool("host", max_bytes=4096) as pool:
        batches = [PoolCollate(pool, timeout=timeout)(SAMPLES) for timeout in (0, 0.01)]
        kept = pool.empty(1)
        for batch in batches:
            with pytest.raises(OutOfPinnedMemoryError):
                batch.pin_memory()
        assert kept.nbytes == 1


def test_the_pool_is_asked_with_the_timeout(pool, monkeypatch):
    waits, original = [], _loader.empty_as
    monkeypatch.setattr(_loader, "empty_as", lambda *args, timeout: waits.append(timeout) or original(*args))
    collates = PoolCollate(pool), PoolCollate(pool, timeout=3), PoolCollate(pool, timeout=None)
    for collate in pickle.loads(pickle.dumps(collates)):
        pickle.loads(pickle.dumps(collate([1]))).pin_memory().pin_memory()
    assert waits == [0, 3, None]


@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_batches_of_a_loader_are_pinned(pool, method):
    workers = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    loader = DataLoader(SAMPLES, batch_size=2, collate_fn=PoolCollate(pool), **workers)
    for number, batch in enumerate(loader):
        assert isinstance(batch, PoolBatch)
        batch = torch_pinning.pin_memory(batch)
        assert in_pool(batch["x"])
        assert batch["y"].tolist() == [2 * number, 2 * number + 1]
        assert torch.equal(batch["x"], torch.stack([sample["x"] for sample in SAMPLES[2 * number : 2 * number + 2]]))
    assert number == 3
    del batch
    assert pool.stats()["requested_bytes"] == 0


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_a_loader_without_an_accelerator_gives_the_same_batches(pool):
    loader = DataLoader(SAMPLES, batch_size=4, collate_fn=PoolCollate(pool), pin_memory=True)
    assert [batch["y"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_loader_with_an_accelerator_pins(pool, monkeypatch, num_workers):
    answers = {"is_available": True, "current_accelerator": torch.device("cuda"), "current_device_index": 0}
    for name, answer in (answers | {"set_device_index": None}).items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, answer=answer: answer)
    loader = DataLoader(
        SAMPLES,
        batch_size=4,
        collate_fn=PoolCollate(pool),
        pin_memory=True,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    for batch in loader:
        assert in_pool(batch["x"])
        assert in_pool(batch["y"])


def test_a_worker_does_not_pin(run):
    run(
        """
        import pinpool, torch
        from pinpool.torch._loader import PoolCollate

        pool = pinpool.PinnedPool("host")
        batch = PoolCollate(pool)([1, 2])

        def work():
            try:
                batch.pin_memory()
            except pinpool.PinpoolError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("pinned")
            assert batch.data.tolist() == [1, 2]

        in_child(work)
        """
    )


# On a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_pins_and_batches_arrive_on_the_gpu(num_workers):
    samples = [torch.full((1 << 16,), number) for number in range(64)]
    with PinnedPool(max_bytes=64 << 20) as pool:
        loader = DataLoader(
            samples, batch_size=4, collate_fn=PoolCollate(pool, timeout=60), pin_memory=True, num_workers=num_workers
        )
        for batch in loader:
            assert in_pool(batch.data)
            assert batch.data.is_pinned()
            expected = batch.data.clone()
            moved = batch.to("cuda")
            del batch
            assert torch.equal(moved.data.cpu(), expected)
