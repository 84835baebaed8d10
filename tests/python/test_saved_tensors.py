"""pinpool.torch.save_in_pool: activations in pool memory, and gradients as without it."""

import gc
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import pinpool.torch
from pinpool import OutOfPinnedMemoryError, PinnedPool, _pinpool
from pinpool.torch import _saved
from pinpool.torch._saved import save_in_pool

CUDA = torch.device("cuda:1")


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Layers that save inputs, outputs, weights, masks, statistics and indices."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.attend, self.layer_norm = nn.MultiheadAttention(16, 4, batch_first=True), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = functional.avg_pool2d(self.norm(self.conv(x)).relu(), 2).sort().values
        x = x.flatten(2)
        x = self.layer_norm(x + self.attend(x, x, x)[0])
        x = x + self.down(functional.dropout(functional.gelu(self.up(x)), 0.3))
        return (x.exp() * x.sigmoid()).logsumexp(-1).mean()


def net(device="cpu"):
    torch.manual_seed(0)
    return Net().to(device), torch.randn(4, 3, 8, 8, device=device).to(memory_format=torch.channels_last)


def gradients(model, x, context=None, call=None):
    torch.manual_seed(1)
    with context or torch.enable_grad():
        loss = call(model, x) if call else model(x)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def requested(pool):
    return pool.stats()["requested_bytes"]


# Gradients


@pytest.mark.parametrize("options", [{}, {"min_bytes": 0}, {"min_bytes": 1 << 40}])
def test_gradients_are_the_same_bits(pool, options):
    ours = gradients(*net(), save_in_pool(pool, **options))
    assert same(ours, gradients(*net()))
    assert (pool.stats()["misses"] > 0) == (options.get("min_bytes", 0) == 0)
    assert requested(pool) == 0


def test_autocast_changes_nothing(pool):
    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    assert same(gradients(*net(), save_in_pool(pool, min_bytes=0), call), gradients(*net(), None, call))
    assert requested(pool) == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_in_the_context_keep_their_inputs_in_the_pool(pool, use_reentrant):
    def call(model, x):
        return checkpoint(model, x.requires_grad_() * 1, use_reentrant=use_reentrant)

    (model, x), seen = net(), []
    model.eval()  # statistics of a batch are updated once more when it is computed again
    ours = gradients(
        model, x, save_in_pool(pool, min_bytes=0), lambda *args: (call(*args), seen.append(requested(pool)))[0]
    )
    model, x = net()
    assert same(ours, gradients(model.eval(), x, None, call))
    assert seen == [x.nbytes]
    assert requested(pool) == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_context_can_be_in_a_checkpoint(pool, use_reentrant):
    def offloaded(model, x):
        with save_in_pool(pool, min_bytes=0):
            return model(x)

    def call(function):
        return lambda model, x: checkpoint(function, model, x.requires_grad_() * 1, use_reentrant=use_reentrant)

    ours = gradients(*net(), None, call(offloaded))
    assert same(ours, gradients(*net(), None, call(lambda model, x: model(x))))
    assert requested(pool) == 0


def test_backward_may_run_several_times(pool):
    model, x = net()
    with save_in_pool(pool, min_bytes=0):
        loss = model(x)
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        first = [parameter.grad for parameter in model.parameters()]
        assert requested(pool) > 0
    torch.manual_seed(1)
    model.zero_grad()
    loss.backward()
    assert same([parameter.grad for parameter in model.parameters()], first)
    assert requested(pool) == 0


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_gradients_are_the_same_bits(pool, inside):
    def second(context):
        x = torch.linspace(0.1, 1, 5000, requires_grad=True)
        with context:
            loss = (x * 1).sin().exp().mul(x * 2).sum()
            if inside:
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        if not inside:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        return [loss.detach(), gradient.detach(), x.grad]

    assert same(second(save_in_pool(pool)), second(torch.enable_grad()))
    assert requested(pool) == 0


def test_a_gradient_that_is_a_saved_tensor_does_not_share_its_memory(pool):
    class Echo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward(factor)
            return (x * factor).sum()

        @staticmethod
        def backward(ctx, _gradient):
            return ctx.saved_tensors[0], None

    x = torch.ones(5000, requires_grad=True)
    with save_in_pool(pool):
        loss = Echo.apply(x, torch.full((5000,), 3.0))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(x.grad, torch.full((5000,), 9.0))
    assert requested(pool) == 0


def test_a_compiled_model_is_the_same_bits(pool):
    def call(model, x):
        return torch.compile(model, backend="aot_eager")(x)

    assert same(gradients(*net(), save_in_pool(pool, min_bytes=0), call), gradients(*net(), None, call))
    assert requested(pool) == 0


def test_wrappers_keep_their_gradients(pool):
    x = TwoTensor(torch.ones(5000), torch.ones(5000)).requires_grad_()
    with save_in_pool(pool):
        loss = (x * 2).exp().square().sum()
    loss.backward()
    assert torch.equal(x.grad.a, 4 * torch.full((5000,), 2.0).exp().square())
    assert pool.stats()["misses"] == 0


# What is moved, and what stays


def packed(pool, tensor, min_bytes=0):
    return _saved._pack(pool, min_bytes, 0, tensor)


def stays(pool, tensor, **options):
    kept = packed(pool, tensor, **options)
    assert isinstance(kept, _saved._Kept) == (requested(pool) == 0)
    return isinstance(kept, _saved._Kept)


WEIGHT = nn.Parameter(torch.ones(50, 60))
FROZEN = nn.Parameter(torch.ones(50, 60), requires_grad=False)
LEAF = torch.ones(50, 60, requires_grad=True)

KEPT = {
    "a parameter": lambda: WEIGHT,
    "a view of a parameter": lambda: WEIGHT.t()[3:],
    "a frozen parameter": lambda: FROZEN,
    "a view of a frozen parameter": lambda: FROZEN.t(),
    "a leaf": lambda: LEAF,
    "a view of a leaf": lambda: LEAF.view(-1),
    "a sparse tensor": lambda: torch.eye(50).to_sparse(),
    "a compressed sparse tensor": lambda: torch.eye(50).to_sparse_csr(),
    "a wrapper": lambda: TwoTensor(torch.ones(50), torch.ones(50)),
    "a meta tensor": lambda: torch.ones(50, device="meta"),
    "nothing": lambda: torch.ones(0, 5),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_what_stays_is_not_copied(pool, make):
    tensor = make()
    assert stays(pool, tensor)
    restored = packed(pool, tensor).restore()
    assert restored.shape == tensor.shape
    assert restored is tensor or not tensor.is_leaf


def test_fake_tensors_stay(pool):
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(5000, requires_grad=True)
        with save_in_pool(pool):
            loss = (x * 2).exp().sum()
        loss.backward()
        assert x.grad.shape == x.shape
    assert pool.stats()["misses"] == 0


def test_pool_memory_stays(pool):
    x = pinpool.torch.empty(pool, 5000, torch.float32).fill_(2)
    misses = pool.stats()["misses"]
    weight = torch.ones(5000, requires_grad=True)
    with save_in_pool(pool):
        loss = (x * weight).sum()
    assert pool.stats()["misses"] + pool.stats()["hits"] == misses
    loss.backward()
    assert torch.equal(weight.grad, x)


def test_small_tensors_stay(pool):
    assert stays(pool, torch.ones(1023), min_bytes=4096)
    assert not stays(pool, torch.ones(1024), min_bytes=4096)


def test_an_activation_is_moved_though_its_weight_stays(pool):
    x, linear = torch.ones(30, 50), nn.Linear(50, 60)
    with save_in_pool(pool, min_bytes=0):
        loss = linear(x).sum()
    assert requested(pool) == x.nbytes
    del loss
    assert requested(pool) == 0


LAYOUTS = {
    "rows": lambda: torch.randn(30, 40),
    "transposed": lambda: torch.randn(30, 40).t(),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(30, 1, 40).expand(2, 30, 8, 40),
    "conjugated": lambda: torch.randn(30, 40, dtype=torch.complex64).conj(),
    "bytes": lambda: torch.randn(30, 40).to(torch.float8_e4m3fn),
    "one": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
def test_what_comes_back_has_the_same_values_and_strides(pool, make):
    tensor = make()
    moved = packed(pool, tensor)
    assert requested(pool) == tensor.untyped_storage().nbytes()
    restored = moved.restore()
    assert (restored.dtype, restored.shape, restored.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(restored.to(torch.complex64), tensor.to(torch.complex64))
    assert not _pinpool.is_pool_memory(restored)


def test_gaps_are_not_moved(pool):
    tensor = torch.randn(30, 40)[::3, :8]
    moved = packed(pool, tensor)
    assert requested(pool) == tensor.nbytes
    assert torch.equal(moved.restore(), tensor)


# Semantics


def test_a_kept_tensor_must_not_be_changed(pool):
    weight, x = nn.Parameter(torch.ones(5000)), torch.ones(5000, requires_grad=True)
    with save_in_pool(pool):
        loss = (weight * (x * 1)).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[5000\]\] is at vers"
    ):
        loss.backward()


def test_an_output_that_stays_must_not_be_changed(pool):
    out = torch.ones(3, requires_grad=True).exp()
    with save_in_pool(pool):
        out = out.exp()
    out.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_moved_tensor_may_be_changed(pool):
    x = torch.ones(5000, requires_grad=True)
    with save_in_pool(pool):
        square = (hidden := x * 3).square()
    hidden.detach().zero_()
    square.sum().backward()
    assert torch.equal(x.grad, torch.full((5000,), 18.0))


def test_a_parameter_whose_memory_is_taken_away_gets_it_back(pool):
    weight, x = nn.Parameter(torch.ones(5000)), torch.ones(5000, requires_grad=True)
    with save_in_pool(pool):
        loss = (weight * (x * 1)).sum()
    values = weakref.ref(weight.data.untyped_storage())
    weight.data = torch.empty(0)
    assert values() is None
    weight.data = torch.full((5000,), 2.0)
    loss.backward()
    assert torch.equal(x.grad, torch.full((5000,), 2.0))


def test_nothing_is_a_cycle(pool):
    gc.disable()
    try:
        context = save_in_pool(pool, min_bytes=8)
        with context:
            small, large = (torch.ones(count, requires_grad=True).exp() for count in (1, 5000))
        alive = [weakref.ref(thing) for thing in (context, small, large)]
        del context, small, large
        assert [ref() for ref in alive] == [None] * 3
        assert pool.stats()["requested_bytes"] == 0
    finally:
        gc.enable()


def test_a_full_pool_fails_the_operation_that_saves():
    with PinnedPool("host", max_bytes=16 << 10) as pool:
        x = torch.ones(4096, requires_grad=True)
        with save_in_pool(pool):
            first = (x * 2).exp()
            with pytest.raises(OutOfPinnedMemoryError, match="wanted 16384 bytes"):
                first.exp()
        first.sum().backward()
        assert requested(pool) == 0


def test_the_pool_is_asked_with_the_timeout(pool, monkeypatch):
    waits = []
    original = _saved.empty_as
    monkeypatch.setattr(_saved, "empty_as", lambda *args, timeout: waits.append(timeout) or original(*args))
    x = torch.ones(5000, requires_grad=True)
    for options in ({}, {"timeout": 3}, {"timeout": None}):
        with save_in_pool(pool, **options):
            (x * 1).exp()
    assert waits == [0, 3, None]


def test_the_default_pool_is_the_default():
    x = torch.ones(5000, requires_grad=True)
    before = pinpool.torch.default_pool().stats()["requested_bytes"]
    with save_in_pool():
        loss = (x * 2).exp().sum()
    assert pinpool.torch.default_pool().stats()["requested_bytes"] == before + 20000
    loss.backward()


# Streams


def test_the_way_back_waits_for_the_way_there(pool, monkeypatch):
    order = []

    class Event:
        def wait(self, stream):
            order.append(f"wait on {stream}")

    def move(tensor, device):
        order.append(f"move to {device}")
        return tensor.clone()

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(_saved, "to_device", move)
    host = pinpool.torch.empty(pool, 3, torch.float32).fill_(5)
    moved = _saved._Moved(host, CUDA, torch.Size((2, 3)), Event())
    assert moved.restore().tolist() == [[5] * 3] * 2
    assert order == ["wait on current of cuda:1", "move to cuda:1"]


def test_the_event_of_the_way_there_is_behind_the_copy(monkeypatch):
    order = []
    monkeypatch.setattr(_saved, "empty_as", lambda *_, **__: "host")
    monkeypatch.setattr(_saved, "copy_", lambda dst, _: order.append("copy") or dst)
    monkeypatch.setattr(_saved, "recorded_event", lambda device: order.append(f"record on {device}") or "event")
    moved = _saved._move("pool", 0, types.SimpleNamespace(device=CUDA), torch.Size())
    assert (moved.host, moved.device, moved.event) == ("host", CUDA, "event")
    assert order == ["copy", "record on cuda:1"]


# On a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.filterwarnings("ignore:.*determin")
def test_gradients_on_a_gpu_are_the_same_bits(deterministic, side):
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with PinnedPool(max_bytes=64 << 20) as pool, torch.cuda.stream(stream):
        theirs = gradients(*net("cuda"))
        for _ in range(5):
            assert same(gradients(*net("cuda"), save_in_pool(pool, min_bytes=0)), theirs)
        torch.cuda.synchronize()
        assert requested(pool) == 0


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_backward_on_another_stream_waits_for_the_values():
    with PinnedPool(max_bytes=512 << 20) as pool:
        x = torch.full((16 << 20,), 2.0, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(1 << 30)
            moved = packed(pool, x)
        assert torch.equal(moved.restore(), x)
        torch.cuda.synchronize()
