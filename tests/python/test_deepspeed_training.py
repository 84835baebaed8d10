"""Training with DeepSpeed on the CPU, with pinpool.deepspeed enabled: two ranks under torchrun, and one alone.

33.6 million parameters; some 20 seconds a stage on two free cores. Adam is torch's and nothing is compiled.
"""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.usefixtures("require_deepspeed")

PRELUDE = """\
import gc, os, re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
import pinpool.deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.pin_memory import get_active_native_pinned_memory

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled; gloo does without
deepspeed.init_distributed("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
BATCH = 2


def locked():
    return int(re.search(r"VmLck:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def use(backend):
    os.environ["DS_PIN_MEMORY_BACKEND"] = backend


def ranges():
    return get_active_native_pinned_memory()._ranges


class Net(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x).float(), y.float())


def initialize(stage, width, layers, *offload):
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage} | {part: {"device": "cpu", "pin_memory": True} for part in offload},
        "steps_per_print": 1000,
    }
    model = Net(width, layers)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine, steps, width):
    "Tells the losses, to the bit."
    generator = torch.Generator().manual_seed(RANK)
    x, y = torch.randn(2, BATCH, width, generator=generator).bfloat16()
    losses = []
    for _ in range(steps):
        loss = engine(x, y)
        losses.append(loss.item().hex())
        engine.backward(loss)
        engine.step()
    return losses
"""


@pytest.fixture
def torchrun(tmp_path):
    """Run a script, behind `PRELUDE`, on so many ranks. It must end well on all, and compile nothing."""

    def torchrun(script, ranks=1):
        path, extensions = tmp_path / "script.py", tmp_path / "extensions"
        path.write_text(PRELUDE + textwrap.dedent(script) + "\ndist.destroy_process_group()\n")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", path]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
        environment = os.environ | environment | {"TORCH_EXTENSIONS_DIR": str(extensions)}
        done = subprocess.run(launch, capture_output=True, text=True, timeout=250, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(extensions.rglob("*.so")) == []

    return torchrun


@pytest.mark.locks(170 << 20)
@pytest.mark.parametrize(
    ("stage", "offload", "bytes_of_a_parameter", "more"),
    [
        # A partition in bf16, its gradients in bf16 and in fp32. DeepSpeed's own op keeps a second partition locked,
        # even when the engine is gone: 160.2 MiB of this model in each rank, instead of 128.1.
        (3, ("offload_optimizer", "offload_param"), 2 + 2 + 4, 0),
        # The optimizer's partition in fp32, its gradients in fp32, a copy in bf16, room for the largest parameter.
        (2, ("offload_optimizer",), 4 + 4 + 2, 2 * 1024 * 1024),
    ],
    ids=["ZeRO-3, parameters and optimizer", "ZeRO-2, optimizer"],
)
def test_training_gives_the_same_bits_and_locks_what_it_uses(torchrun, stage, offload, bytes_of_a_parameter, more):
    torchrun(f"""
        STEPS, WIDTH, LAYERS = 3, 1024, 32
        part = LAYERS * (WIDTH + 1) * WIDTH // RANKS

        use("torch")
        engine = initialize({stage}, WIDTH, LAYERS, *{offload})
        expected = train(engine, STEPS, WIDTH)
        engine.destroy()
        assert len(set(expected)) == STEPS
        assert locked() == 0
        del engine
        gc.collect()

        use("native")
        pinpool.deepspeed.enable()
        engine = initialize({stage}, WIDTH, LAYERS, *{offload})
        used = part * {bytes_of_a_parameter} + {more}
        assert used == sum(end - base for base, end in ranges().items())
        assert used <= locked() <= used + 4096 * len(ranges()), (used, locked())
        assert train(engine, STEPS, WIDTH) == expected
        assert locked() <= used + 4096 * len(ranges()), (used, locked())
        engine.destroy()
        assert ranges() == {{}} and locked() == 0, (ranges(), locked())
        del engine
        gc.collect()
        assert locked() == 0
    """, ranks=2)  # fmt: skip


def test_destroying_an_engine_unpins(torchrun):
    torchrun("""
        pinpool.deepspeed.enable()
        for backend in ("native", "torch"):
            use(backend)
            for stage, *offload in [(2, "offload_optimizer"), (3, "offload_optimizer"),
                                    (3, "offload_optimizer", "offload_param")]:
                engine = initialize(stage, 16, 2, *offload)
                train(engine, 1, 16)
                before = len(ranges()) if backend == "native" else 0
                engine.destroy()
                assert backend == "torch" or before > 0 == len(ranges())
                engine.destroy()
        assert get_active_native_pinned_memory() is None
        assert locked() <= 2 << 20  # small buffers share a region, and DeepSpeed still has tensors in it, unpinned
    """)


def test_states_that_were_offloaded_are_unpinned_after_the_device_is_done(torchrun):
    torchrun("""
        pinpool.deepspeed.enable()
        use("native")
        accelerator, calls = get_accelerator(), []
        synchronize, unpin = accelerator.synchronize, accelerator.unpin_memory
        accelerator.synchronize = lambda *args: calls.append(("synchronize", len(ranges()))) or synchronize(*args)
        accelerator.unpin_memory = lambda tensor: calls.append(("unpin", unpin(tensor)))
        engine = initialize(2, 16, 2)
        expected = train(engine, 1, 16)
        engine.offload_states(pin_memory=True)
        offloaded = len(ranges())
        assert offloaded > 0

        # What a copy may still read is pinned until the device is done.
        calls.clear()
        engine.reload_states(non_blocking=True)
        assert ("synchronize", offloaded) in calls

        train(engine, 1, 16)
        engine.offload_states(pin_memory=True)
        before = len(ranges())
        calls.clear()
        engine.destroy()
        names = [name for name, _ in calls]
        assert len(ranges()) <= before and "unpin" in names
        assert "synchronize" in names[: names.index("unpin")]
        assert ("unpin", True) in calls
        engine.destroy()
    """)
