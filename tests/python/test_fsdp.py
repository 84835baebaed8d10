"""pinpool.torch.fsdp2_offload: two ranks under torchrun on the CPU, and what one process can tell."""

import os
import subprocess
import sys
import textwrap

import pytest

# What every script can use. The sizes of the model are such that two ranks get even, uneven and empty shards.
PRELUDE = """\
import gc, os, warnings, weakref
from math import ceil

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import pinpool
import pinpool.torch
from pinpool.torch._fsdp import fsdp2_offload

warnings.simplefilter("error")
torch.set_num_threads(1)
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STORE = {} if RANKS > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **STORE)
MESH = dist.init_device_mesh("cpu", (RANKS,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 7), nn.Linear(7, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(6, 4), Block(), nn.Linear(4, 6, bias=False)
        self.scale, self.nothing = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.ones(0, 3))
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)) * self.scale)


def padded_bytes(model):
    "What FSDP needs of each parameter: as many rows as the rank has that has most."
    return sum(ceil(p.shape[0] / RANKS) * p.shape[1:].numel() * p.element_size() for p in model.parameters())


def new_pool():
    return pinpool.PinnedPool("host", max_bytes=4 << 20)


def sharded(device="cpu", tied_group=False, **options):
    "A model of the same values at every call, one module in it and the whole of it sharded."
    options = {"mesh": MESH, "offload_policy": CPUOffloadPolicy(pin_memory=False)} | options
    torch.manual_seed(0)
    with torch.device(device):
        model = Net()
    fully_shard(model.block, **options)
    if tied_group:
        fully_shard([model.embed, model.head], **options)
    return fully_shard(model, **options)


def shards(model):
    return {name: param.to_local().detach() for name, param in model.named_parameters()}


def bits(model):
    return {name: shard.clone().view(torch.uint8) for name, shard in shards(model).items()}


def same(one, other):
    assert one.keys() == other.keys() and len(one) >= 8
    return all(torch.equal(one[name], other[name]) for name in one)


def gradients(model):
    grads = {name: param.grad for name, param in model.named_parameters() if name != "nothing"}
    return {name: grad.to_local().clone().view(torch.uint8) for name, grad in grads.items()}


def train(model, optimizer, steps=3):
    "Accumulates the gradients of two batches, which differ from rank to rank, in each step."
    generator = torch.Generator().manual_seed(RANK)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for batch in range(2):
            tokens = torch.randint(6, (3, 5), generator=generator)
            model(tokens).float().logsumexp(-1).sum().backward()
        optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def assert_in(pool, model):
    "All memory of the pool, and no other, is that of the shards."
    model.reshard()
    gc.collect()  # models are full of cycles
    assert pool.stats()["requested_bytes"] == padded_bytes(model)
    assert pool.stats()["blocks"] == len([p for p in model.parameters() if p.numel()])
    for name, shard in shards(model).items():
        assert shard.numel() == 0 or pinpool.torch.is_pinned(shard), name
    for module in (model, model.block):
        for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
            data = param._sharded_param_data
            assert data.numel() == param.padded_sharded_param_size.numel()
            assert data.numel() == 0 or pinpool.torch.is_pinned(data)
            shard = param._sharded_local_tensor
            assert data.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            assert not data[shard.numel() :].any()


def assert_returned(pool):
    gc.collect()
    assert (pool.stats()["blocks"], pool.stats()["requested_bytes"]) == (0, 0)


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")
"""
EPILOGUE = """
gc.collect()
dist.destroy_process_group()
"""


@pytest.fixture
def torchrun(tmp_path):
    """Run a script, behind `PRELUDE`, on two ranks. It must end well on both."""

    def torchrun(script):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(script) + EPILOGUE)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(launch, capture_output=True, text=True, timeout=100, check=False, env=environment)
        assert done.returncode == 0, done.stderr

    return torchrun


@pytest.fixture
def run_alone(run):
    """Run a script, behind `PRELUDE`, on the only rank that there is."""
    return lambda script: run(PRELUDE + textwrap.dedent(script) + EPILOGUE, OMP_NUM_THREADS=1)


# training


def test_training_gives_the_bits_that_it_gives_without_a_pool(torchrun):
    torchrun("""
        def trained(pool, when, **options):
            model = sharded(**options)
            if when == "before the optimizer":
                assert fsdp2_offload(model, pool) == padded_bytes(model)
            optimizer = adamw(model)
            if when == "after the optimizer":
                assert fsdp2_offload(model, pool) == padded_bytes(model)
            train(model, optimizer)
            model.reshard()
            if when != "never":
                assert_in(pool, model)
            return bits(model), gradients(model)

        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for options in ({}, {"reshard_after_forward": False}, {"mp_policy": half}):
            pool = new_pool()
            weights, grads = trained(pool, "never", **options)
            assert not same(weights, bits(sharded(**options)))
            for when in ("before the optimizer", "after the optimizer"):
                pooled_weights, pooled_grads = trained(pool, when, **options)
                assert same(pooled_weights, weights) and same(pooled_grads, grads), (when, options)
                assert_returned(pool)

        sizes = {name: tuple(shard.shape) for name, shard in shards(sharded()).items()}
        assert sizes["scale"] == ((1, 4), (0, 4))[RANK] and sizes["block.up.weight"] == ((4, 4), (3, 4))[RANK]
        assert sizes["embed.weight"] == (3, 4) and sizes["nothing"] == (0, 3)
    """)


def test_shards_move_at_any_time_and_however_they_are_cut(torchrun):
    torchrun("""
        def trained(move, **options):
            model = sharded(**options)
            optimizer = adamw(model)
            loss = model(torch.tensor([[RANK, 1, 2]])).logsumexp(-1).sum()
            move(model)  # the root is still gathered
            loss.backward()
            optimizer.step()
            train(model, optimizer, 1)
            model.to(torch.float64).to(torch.float32)  # out of the pool, the gradients too
            with torch.inference_mode():
                move(nn.Sequential(model))  # what is around a sharded module does not matter
            train(model, optimizer, 1)
            model.reshard()
            return model

        for options in (
            {},
            {"tied_group": True},
            {"shard_placement_fn": lambda param: Shard(param.ndim - 1) if param.shape[-1] % 2 == 0 else Shard(0)},
            {"mesh": dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))},
        ):
            pool = new_pool()
            plain = trained(lambda model: None, **options)
            pooled = trained(lambda model: fsdp2_offload(model, pool), **options)
            assert same(bits(pooled), bits(plain)) and same(gradients(pooled), gradients(plain)), options
            gc.collect()
            held = [shard for shard in shards(pooled).values() if shard.untyped_storage().nbytes()]
            assert all(shard.numel() == 0 or pinpool.torch.is_pinned(shard) for shard in held)
            assert not any(shard.is_inference() for shard in held)
            assert pool.stats()["requested_bytes"] == sum(shard.untyped_storage().nbytes() for shard in held)
            assert pool.stats()["blocks"] == len(held)
            del pooled, held
            assert_returned(pool)
    """)


def test_what_fsdp_pins_stays_in_the_pool_once_torch_takes_it_for_pinned(torchrun):
    torchrun("""
        # What torch says and does with a driver that knows the memory of the pool; no such driver is here.
        def is_pinned(tensor):
            return pinpool.is_pinned((tensor.untyped_storage().data_ptr(), 1))

        def pin_memory(tensor):
            assert tensor.untyped_storage().nbytes() == 0, "FSDP gives up the memory of the pool"
            return tensor.clone()

        emptied = []
        torch.accelerator.empty_host_cache = lambda: emptied.append(True)
        plain, pinned = sharded(), sharded()
        meta = sharded("meta", offload_policy=CPUOffloadPolicy(pin_memory=True))
        for module in (pinned, pinned.block):
            for param in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
                param.pin_memory = True
        torch.Tensor.is_pinned, torch.Tensor.pin_memory = is_pinned, pin_memory
        for model, emptied_so_far in ((meta, 0), (pinned, 1)):
            pool = new_pool()
            fsdp2_offload(model, pool)
            assert len(emptied) == emptied_so_far
            model.load_state_dict(plain.state_dict())
            model.unshard()  # the first time, FSDP looks at the memory again
            assert torch.equal(model.scale, torch.ones(1, 4))
            assert_in(pool, model)
            assert same(bits(model), bits(plain))
    """)


# loading


def test_what_is_loaded_is_in_the_pool(torchrun):
    torchrun("""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

        pool = new_pool()
        source = sharded()
        train(source, adamw(source), 1)
        source.reshard()
        trained = bits(source)

        # In place: the memory stays.
        model = sharded()
        fsdp2_offload(model, pool)
        before = {name: shard.data_ptr() for name, shard in shards(model).items()}
        model.load_state_dict(source.state_dict())
        assert before == {name: shard.data_ptr() for name, shard in shards(model).items()}
        assert same(bits(model), trained)
        assert_in(pool, model)

        # Assigned: the memory is that of the state dict until the next call.
        copied = {name: value.clone() for name, value in source.state_dict().items()}
        model.load_state_dict(copied, assign=True)
        model.head.weight = model.embed.weight  # torch has untied them
        del copied
        assert_returned(pool)
        assert fsdp2_offload(model, pool) == padded_bytes(model)
        assert fsdp2_offload(model, pool) == 0
        assert_in(pool, model)
        assert same(bits(model), trained)

        # Assigned from a block of the pool that is larger: exact again after the next call.
        large = pinpool.torch.empty(pool, 1000, torch.float32)
        state = model.state_dict()
        for name, value in state.items():
            local = large[: value.to_local().numel()].view(value.to_local().shape).zero_()
            state[name] = DTensor.from_local(local, MESH, value.placements, shape=value.shape, stride=value.stride())
        model.load_state_dict(state, assign=True)
        model.head.weight = model.embed.weight
        del large, local, state, value
        fsdp2_offload(model, pool)
        assert_in(pool, model)

        # Converted: likewise.
        model.to(torch.bfloat16)
        assert_returned(pool)
        assert fsdp2_offload(model, pool) == padded_bytes(model)
        assert_in(pool, model)
        train(model, adamw(model), 1)
        assert_in(pool, model)
        del model
        assert_returned(pool)

        # From the meta device: no memory but the pool's, and the optimizer has the parameters.
        model = sharded(device="meta")
        model.scale.mark = "an attribute"
        optimizer = adamw(model)
        parameters = list(model.parameters())
        assert fsdp2_offload(model, pool) == padded_bytes(model)
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        assert all(param.device.type == "cpu" and param.requires_grad for param in parameters)
        assert model.scale.mark == "an attribute" and model.head.weight is model.embed.weight
        assert_in(pool, model)
        whole = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
        assert_in(pool, model)
        assert same(bits(model), trained)
        train(model, optimizer)
        train(source, adamw(source))
        source.reshard()
        assert_in(pool, model)
        assert same(bits(model), bits(source))
        del model, optimizer, parameters, source
        assert_returned(pool)
    """)


# memory


def test_the_old_memory_is_dropped_shard_by_shard(run_alone):
    run_alone("""
        def old_storages(model):
            return {name: weakref.ref(shard.untyped_storage()) for name, shard in shards(model).items()}

        pool, model = new_pool(), sharded()
        old = old_storages(model)
        assert all(storage() is not None for storage in old.values())
        gc.disable()
        fsdp2_offload(model, pool)
        assert [name for name, storage in old.items() if storage() is not None and name != "nothing"] == []
        gc.enable()
        assert_in(pool, model)
        train(model, adamw(model))
        assert_in(pool, model)

        # Of a model that does not fit, a part is moved; it is whole all the same, and another call moves the rest.
        model = sharded()
        before = bits(model)
        small = pinpool.PinnedPool("host", max_bytes=16 << 10)
        assert error_of(fsdp2_offload, model, small).startswith("OutOfPinnedMemoryError: ")
        assert 0 < small.stats()["requested_bytes"] < padded_bytes(model)
        moved = small.stats()["requested_bytes"]
        assert fsdp2_offload(model, pool) == padded_bytes(model) - moved
        assert same(bits(model), before)
        train(model, adamw(model))
        del model
        assert_returned(pool)
        assert_returned(small)
    """)


# refusals


def test_what_cannot_be_moved_is_refused_before_anything_is(run_alone):
    run_alone("""
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
        from torch.testing._internal.two_tensor import TwoTensor

        pool = new_pool()
        assert "takes a torch.nn.Module, not dict" in error_of(fsdp2_offload, {}, pool)
        error = error_of(fsdp2_offload, Net(), pool)
        assert error.startswith("TypeError: this Net is not sharded by FSDP2: call torch.distributed.fsdp.fully_shard(")
        error = error_of(fsdp2_offload, fully_shard(Net(), mesh=MESH), pool)
        assert error.startswith("ValueError: no shard of this FSDPNet is offloaded to the CPU: give fully_shard an ")

        # Shards without the policy stay where they are.
        model = Net()
        fully_shard(model.block, mesh=MESH, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=MESH)
        assert fsdp2_offload(model, pool) == padded_bytes(model.block)
        assert not pinpool.torch.is_pinned(model.scale.to_local())
        del model
        assert fsdp2_offload(fully_shard(nn.ReLU(), mesh=MESH), pool) == 0
        assert_returned(pool)

        # FSDP would replace memory that is not registered, and train what it does not gather.
        model = sharded(device="meta", offload_policy=CPUOffloadPolicy(pin_memory=True))
        error = error_of(fsdp2_offload, model, pool)
        assert error.startswith("ValueError: CPUOffloadPolicy(pin_memory=True) needs memory that is registered"), error
        assert all(param.is_meta for param in model.parameters())

        model = sharded()
        model.scale._local_tensor = TwoTensor(torch.ones(1, 4), torch.ones(1, 4))
        error = error_of(fsdp2_offload, model, pool)
        assert error.startswith("TypeError: the shard of 'scale' is a TwoTensor: only plain tensors"), error
        assert_returned(pool)

        model = sharded()
        known = FSDPParam._sharded_local_tensor
        del FSDPParam._sharded_local_tensor
        error = error_of(fsdp2_offload, model, pool)
        FSDPParam._sharded_local_tensor = known
        assert error == (f"RuntimeError: fsdp2_offload does not know the FSDP2 of torch {torch.__version__}: "
                         "its FSDPParam has no _sharded_local_tensor")
        assert "PinnedPool" in error_of(fsdp2_offload, model, "a pool")
    """)
