"""At the end of the interpreter nothing crashes, whatever is still alive and in whatever order it goes."""

import subprocess
import sys

import pytest

POOL = "import pinpool, numpy\npool = pinpool.PinnedPool(max_bytes=8 * MIB)\n"
TORCH = POOL + "import torch, pinpool.torch\n"

# What is alive at the end; the last line is the last thing that happens.
ENDINGS = {
    "arrays in the module": POOL + "arrays = [pool.zeros(n) for n in (5, 5000, 3 * MIB)]",
    "numpy views in the module": POOL + "views = [numpy.asarray(pool.zeros(5)), memoryview(pool.zeros(5))]",
    "an unconsumed capsule": POOL
    + "capsules = [pool.empty(5).__dlpack__(), pool.empty(5).__dlpack__(max_version=(1, 0))]",
    "arrays in a cycle": POOL + "cycle = [pool.zeros(5000)]\ncycle.append(cycle)\ndel cycle",
    "arrays in another module": POOL + "sys.kept = pool.zeros(5000)\nnumpy.kept = pool.zeros(3 * MIB)",
    "arrays without their pool": POOL + "array = pool.zeros(5000)\ndel pool",
    "a pool without its module": POOL + "array = pool.zeros(5000)\ndel pinpool\nsys.modules.clear()",
    "no modules at all": TORCH + "tensor = pinpool.torch.empty(pool, 5, torch.uint8)\nsys.modules.clear()",
    "a registration": POOL + "registration = pinpool.register(bytearray(50_000))",
    "a registration of an array": POOL + "registration = pinpool.register(numpy.zeros(5000))",
    "a registration in a cycle": POOL
    + "class Buffer(bytearray): pass\nbuffer = Buffer(50_000)\nbuffer.registration = pinpool.register(buffer)",
    "a registration of a tensor": TORCH + "registration = pinpool.torch.register(torch.zeros(5000))",
    "tensors of every making": TORCH
    + """
made = [pinpool.torch.empty(pool, n, torch.uint8) for n in (5, 5000, 3 * MIB)]
made += [pinpool.torch.pin(torch.ones(3)), torch.from_dlpack(pool.zeros(5))]
made += [torch.from_numpy(numpy.asarray(pool.zeros(5)))]
made += [made[0].numpy(), made[1].view(10, 500), memoryview(made[2].numpy())]
""",
    "tensors whose storage python knows": TORCH
    + "tensor = pinpool.torch.empty(pool, 5, torch.uint8)\nstorage = tensor.untyped_storage()\ntensor.is_shared()",
    "tensors without their pool": TORCH
    + """
tensor = pinpool.torch.empty(pool, 5, torch.uint8)
other = pinpool.PinnedPool("host", max_bytes=MIB)
tensors = [tensor, pinpool.torch.empty(other, 5, torch.uint8)]
pool.close()
del tensor, pool, other
""",
    "tensors in an autograd graph": TORCH
    + "weight = torch.nn.Parameter(pinpool.torch.empty(pool, 5, torch.float32))\nloss = (weight * weight).sum()",
    "a daemon thread with an array": POOL
    + """
ready = threading.Event()
def work():
    array = pool.zeros(5000)
    ready.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
ready.wait()
""",
    "a daemon thread that takes and drops": POOL
    + """
ready = threading.Event()
def work():
    while True:
        numpy.asarray(pool.empty(5000))[:] = 1
        ready.set()
threading.Thread(target=work, daemon=True).start()
ready.wait()
""",
    "a daemon thread that waits for memory": POOL
    + """
array = pool.empty(8 * MIB)
go = threading.Event()
sys.setswitchinterval(0.5)
threading.Thread(target=lambda: (go.set(), pool.empty(8 * MIB, timeout=None)), daemon=True).start()
go.wait()
""",
    "a callback at exit that uses the pool": POOL
    + """
import atexit
def at_exit():
    block = pool.zeros(3 * MIB)
    assert pool.is_pinned(block) and bytes(block) == bytes(3 * MIB)
    pool.close()
atexit.register(at_exit)
""",
    "a finalizer that uses the pool": POOL
    + """
import weakref
class Thing: pass
thing = Thing()
weakref.finalize(thing, lambda pool: pool.empty(5000).release(), pool)
""",
    "an object whose end uses the pool": POOL
    + """
class Thing:
    def __init__(self):
        self.pool, self.array = pool, pool.zeros(5000)
    def __del__(self):
        self.pool.empty(5000)
        self.array.release()
        self.pool.trim()
thing = Thing()
""",
    "sys.exit with the array in a frame": POOL + "def end():\n    array = pool.zeros(5000)\n    sys.exit(0)\nend()",
    "os._exit": TORCH + "tensor = pinpool.torch.empty(pool, 5, torch.uint8)\nos._exit(0)",
    "a generator that holds an array": POOL
    + "def hold():\n    array = pool.zeros(5000)\n    yield array\ngenerator = hold()\nnext(generator)",
}


@pytest.mark.parametrize("alive", ENDINGS)
def test_the_interpreter_ends_well_with(run, alive):
    assert run(ENDINGS[alive]) == ""


def test_an_unhandled_exception_is_all_that_is_told():
    script = "import pinpool\ndef end():\n    array = pinpool.PinnedPool(None).zeros(5000)\n    1 / 0\nend()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.stderr.count("Traceback") == 1


def test_importing_neither_makes_system_calls_for_memory_nor_imports_frameworks(run):
    run("""
        import pinpool

        assert not {"torch", "numpy", "ml_dtypes", "tqdm"} & set(sys.modules)
        pool = pinpool.PinnedPool("host", max_bytes=MIB)
        assert (pool.stats()["os_calls"], status("VmLck")) == (0, 0)
    """)
