"""pinpool.torch: copies after which pool memory is not reused before they are done."""

import gc

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import pinpool.torch
from pinpool import _pinpool
from pinpool.torch import _copies
from pinpool.torch._copies import copy_, empty_as, protect, to_device

PAGE, MIB = 4096, 1 << 20
CUDA, XPU = torch.device("cuda:1"), torch.device("xpu:1")


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, which this torch need not know."""

    @staticmethod
    def __new__(cls, values, device):
        tensor = values.as_subclass(cls)
        tensor.says, tensor.non_blocking = device, None
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return args[0].says
        if func == torch.Tensor.copy_:
            for tensor in args:
                tensor.non_blocking = kwargs["non_blocking"]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class Opaque(OnDevice):
    """A tensor that does not tell what it is made of."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs or {})


class Work:
    """What torch.Event is elsewhere, done when the test says so."""

    def __init__(self, device):
        self.device, self.stream, self.done = device, None, False

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.done


@pytest.fixture
def records(monkeypatch):
    """The calls of `record_stream`. The current stream of a CUDA device is the text `current of <device>`."""
    calls = []
    monkeypatch.setattr(_pinpool, "record_stream", lambda obj, stream: calls.append((obj, stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    return calls


@pytest.fixture
def events(monkeypatch):
    """The events of accelerators that are not CUDA's."""
    made = []

    def make(device):
        made.append(Work(device))
        return made[-1]

    monkeypatch.setattr(torch, "Event", make)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")
    return made


def in_pool(pool, *shape, dtype=torch.float32):
    return pinpool.torch.empty(pool, shape, dtype).zero_()


# copy_ is Tensor.copy_

KINDS = {
    "whole": lambda t: t,
    "a slice": lambda t: t[1:3],
    "columns": lambda t: t[:, 1:4:2],
    "transposed": lambda t: t.t(),
    "one element": lambda t: t[2, 3],
    "no elements": lambda t: t[:0],
}


@pytest.mark.parametrize("view", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_is_that_of_torch(pool, view, dtype, non_blocking):
    ours, theirs = in_pool(pool, 4, 5, dtype=dtype), torch.zeros(4, 5, dtype=dtype)
    source = view(torch.arange(20.0).view(4, 5) / 2)
    target = view(ours)
    assert copy_(target, source, non_blocking) is target
    view(theirs).copy_(source)
    assert torch.equal(ours, theirs)


def test_a_copy_broadcasts(pool):
    target = in_pool(pool, 3, 4)
    copy_(target, torch.arange(4))
    assert torch.equal(target, torch.arange(4.0).expand(3, 4))
    with pytest.raises(RuntimeError, match="must match"):
        copy_(target, torch.zeros(5))


def test_a_copy_is_differentiable(pool):
    source, scale = torch.ones(4, requires_grad=True), torch.arange(4.0)
    copy_(in_pool(pool, 2, 4), source).mul(scale).sum().backward()
    assert torch.equal(source.grad, 2 * scale)
    leaf = in_pool(pool, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        copy_(leaf, source)


def test_moving_is_differentiable(pool):
    weights = in_pool(pool, 3).requires_grad_()
    to_device(weights, "cpu").mul(2).sum().backward()
    assert weights.grad.tolist() == [2, 2, 2]


@pytest.mark.usefixtures("records")
def test_meta_and_fake_tensors_can_be_copied_and_moved(pool, records):
    real = in_pool(pool, 3)
    assert copy_(torch.empty(3, device="meta"), real).is_meta
    assert to_device(real, "meta").is_meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(3, device="cuda")
        assert copy_(fake, torch.empty(3)) is fake
        assert copy_(torch.empty(3), fake).device.type == "cpu"
        assert copy_(fake, real) is fake
        assert to_device(torch.empty(3), "cuda").device.type == "cuda"
    assert records == []


# What is recorded


def test_a_copy_to_a_device_is_recorded_on_the_current_stream_of_that_device(pool, records):
    host, device = in_pool(pool, 4, 5), OnDevice(torch.zeros(5), CUDA)
    row = host[2].fill_(7)
    copy_(device, row)
    assert device.non_blocking is True
    ((recorded, stream),) = records
    assert recorded is row
    assert stream == "current of cuda:1"


def test_a_copy_from_a_device_is_recorded_once_it_is_on_its_way(pool, monkeypatch):
    host, device, seen = in_pool(pool, 5), OnDevice(torch.ones(5), CUDA), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(_pinpool, "record_stream", lambda obj, _: seen.append(obj.tolist()))
    copy_(host, device)
    assert seen == [[1] * 5]


def test_moving_to_a_device_is_recorded(pool, records, monkeypatch):
    host = in_pool(pool, 5)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, **_: OnDevice(tensor.clone(), device))
    assert to_device(host, CUDA).device == CUDA
    assert [(obj is host, stream) for obj, stream in records] == [(True, "current of cuda:1")]


def test_moving_from_a_device_records_no_memory_of_torch(records):
    assert to_device(OnDevice(torch.ones(5), CUDA), "cpu").tolist() == [1] * 5
    assert records == []


def test_nothing_is_recorded_of_a_copy_that_is_done(pool, records):
    host, device = in_pool(pool, 5), OnDevice(torch.zeros(5), CUDA)
    copy_(device, host, non_blocking=False)
    copy_(host, device, non_blocking=False)
    copy_(host, in_pool(pool, 5))
    copy_(device, OnDevice(torch.ones(5), CUDA))
    assert records == []


def test_foreign_memory_is_not_recorded(pool, records):
    foreign = torch.zeros(5000)
    with pool.register(foreign):
        copy_(OnDevice(torch.zeros(5000), CUDA), foreign)
        copy_(foreign, OnDevice(torch.zeros(5000), CUDA))
    assert records == []


def test_tensors_without_elements_are_not_recorded(pool, records):
    copy_(OnDevice(torch.zeros(0), CUDA), in_pool(pool, 0))
    assert records == []


def test_a_record_that_fails_reaches_the_caller(pool, records, monkeypatch):
    def fail(obj, stream):
        raise pinpool.PinpoolError("the stream is capturing")

    monkeypatch.setattr(_pinpool, "record_stream", fail)
    host = in_pool(pool, 5)
    with pytest.raises(pinpool.PinpoolError, match="capturing"):
        copy_(host, OnDevice(torch.ones(5), CUDA))
    assert host.tolist() == [1] * 5


def test_the_parts_of_a_wrapper_are_recorded(pool, records):
    one, other = in_pool(pool, 5), in_pool(pool, 5)
    protect(TwoTensor(one, other), CUDA)
    protect(TwoTensor(torch.ones(5), other), CUDA)
    assert [obj.data_ptr() for obj, _ in records] == [one.data_ptr(), other.data_ptr(), other.data_ptr()]


def test_the_copy_of_what_cannot_be_looked_into_blocks(records):
    host, device = Opaque(torch.ones(3), torch.device("cpu")), OnDevice(torch.zeros(3), CUDA)
    copy_(device, host)
    assert (device.tolist(), device.non_blocking) == ([1] * 3, False)
    assert records == []
    assert not _copies._can_be_followed(torch.eye(3).to_sparse())
    assert not _copies._can_be_followed(TwoTensor(host, host))
    assert _copies._can_be_followed(TwoTensor(torch.ones(3), torch.ones(3)))


# Other accelerators


def test_a_block_waits_for_the_event_of_another_accelerator(pool, events):
    host = in_pool(pool, MIB // 4)
    copy_(torch.zeros(5), OnDevice(torch.ones(5), XPU))
    assert events == []
    copy_(OnDevice(torch.ones(MIB // 4), XPU), host)
    (event,) = events
    assert (event.device, event.stream) == (XPU, "current of xpu:1")
    del host
    assert pool.stats()["pending_bytes"] == MIB
    event.done = True
    pool.empty(3 * PAGE)
    assert pool.stats()["pending_bytes"] == 0


def test_a_block_whose_event_cannot_be_made_is_never_reused(pool, monkeypatch):
    def fail(device):
        raise RuntimeError("no event today")

    monkeypatch.setattr(torch, "Event", fail)
    host = in_pool(pool, MIB // 4)
    with pytest.raises(RuntimeError, match="no event today"):
        copy_(host, OnDevice(torch.ones(MIB // 4), XPU))
    del host
    gc.collect()  # the traceback's frames
    pool.empty(3 * PAGE)
    assert pool.stats()["quarantined_bytes"] == MIB
    assert "no event today" in pool.stats()["quarantine_reason"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_is_nothing_to_protect_from_a_device_without_streams(pool, records, events, device):
    protect(in_pool(pool, 5), torch.device(device))
    assert records == events == []


# Tensors like others

LIKE = {
    "rows": lambda: torch.zeros(3, 4),
    "transposed": lambda: torch.zeros(3, 4).t(),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a scalar": lambda: torch.zeros(()),
    "nothing": lambda: torch.zeros(0, 3),
    "gaps": lambda: torch.zeros(6, 8)[::2, 1:5].t(),
    "complex": lambda: torch.zeros(3, 4, dtype=torch.complex64).t(),
}


@pytest.mark.parametrize("like", LIKE.values(), ids=LIKE)
def test_a_tensor_like_another_has_its_strides(pool, like):
    other = like()
    ours = empty_as(pool, other)
    assert ours.dtype == other.dtype
    assert (ours.shape, ours.stride()) == (other.shape, torch.empty_like(other).stride())
    assert _pinpool.is_pool_memory(ours) == (other.numel() > 0)


# On a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_blocks_are_not_reused_while_a_gpu_copies():
    with pinpool.PinnedPool(max_bytes=512 * MIB) as pool:
        expected = torch.arange(16 * MIB, dtype=torch.int32)
        source = in_pool(pool, 16 * MIB, dtype=torch.int32).copy_(expected)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1 << 30)
            moved = to_device(source, "cuda")
            del source
            in_pool(pool, 16 * MIB, dtype=torch.int32).fill_(-1)
            assert torch.equal(moved.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_the_stream_is_that_of_the_tensors_device():
    with pinpool.PinnedPool(max_bytes=512 * MIB) as pool:
        target = in_pool(pool, MIB)
        device = torch.device("cuda", torch.cuda.device_count() - 1)
        copy_(target, torch.ones(MIB, device=device))
        torch.cuda.synchronize(device)
        assert torch.equal(target, torch.ones(MIB))
