"""What the tests share: a pool, scripts in a process of their own, and threads that wait for each other."""

import importlib
import os
import re
import resource
import select
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest

from pinpool import PinnedPool

CAP_IPC_LOCK = 14
HERE = Path(__file__).resolve().parent

# What every script of `run` can use.
PRELUDE = """\
import faulthandler, gc, os, re, signal, sys, threading, traceback
from pathlib import Path

MIB = 1 << 20
faulthandler.register(signal.SIGALRM, chain=True)  # a hang says where, and ends
signal.alarm(100)

def status(name):
    "A field of /proc/self/status in bytes: VmLck, VmRSS."
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def in_child(work):
    "Forks, and fails unless `work()` ends well in the child."
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # the parent's is not inherited
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

def become_unprivileged(memlock):
    "From now on the process may lock that many bytes and no more."
    import resource
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
"""


def pytest_configure(config):
    config.addinivalue_line("markers", "locks(nbytes): locks so much memory; skipped where the kernel allows less")


def pytest_runtest_setup(item):
    mark = item.get_closest_marker("locks")
    if mark and mark.args[0] > lockable_bytes():
        pytest.skip(f"locks {mark.args[0] >> 20} MiB, and `ulimit -l` allows {lockable_bytes() >> 20}")


def lockable_bytes():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = re.search(r"CapEff:\s+(\w+)", Path("/proc/self/status").read_text())[1]
    unlimited = soft == resource.RLIM_INFINITY or int(capabilities, 16) >> CAP_IPC_LOCK & 1
    return sys.maxsize if unlimited else soft


@pytest.fixture
def pool():
    with PinnedPool("host", max_bytes=64 << 20) as pool:
        yield pool


@pytest.fixture
def run():
    """Run a script, behind `PRELUDE`, in a Python of its own. It must end with exit code 0, and nothing on stderr."""

    def run(script, **environment):
        command = [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(script)]
        environment = os.environ | {name: str(value) for name, value in environment.items()}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


@pytest.fixture
def run_with_driver(run):
    """Run a script that looks into a driver's books with `drivers.py`, as a function: its variables are gone after it.

    It may return what the driver is to hold after that, as a dict; otherwise that is nothing.
    """

    def run_with_driver(script, fake=None, before="", **environment):
        head = f"sys.path.insert(0, {str(HERE)!r})\nfrom drivers import *\ndriver = {fake}\n" + before
        body = textwrap.indent(textwrap.dedent(script), "    ")
        tail = "\nleft = body() or {}\ngc.collect()\nif driver: driver.expect_left(**left)\n"
        return run(head + "\ndef body():\n" + body + tail, **environment)

    return run_with_driver


@pytest.fixture(scope="session")
def require_deepspeed():
    """Import DeepSpeed, for the CPU. Without it, tests are skipped; they fail where PINPOOL_REQUIRE_DEEPSPEED=1."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("PINPOOL_REQUIRE_DEEPSPEED") != "1":
        pytest.importorskip("deepspeed")
    importlib.import_module("pinpool.deepspeed")
    importlib.import_module("deepspeed")


def build_driver(tmp_path_factory, source, name):
    path = tmp_path_factory.mktemp("drivers") / name
    options = ["--crate-type", "cdylib", "-O", "--edition", "2024", "--cap-lints", "allow"]
    subprocess.run(["rustc", *options, "-o", path, HERE.parent / "drivers" / source], check=True)
    return path


@pytest.fixture(scope="session")
def fake_level_zero(tmp_path_factory):
    """Tell the path of a Level Zero driver without devices of its own. See tests/drivers/fake_level_zero.rs."""
    return build_driver(tmp_path_factory, "fake_level_zero.rs", "libfake_level_zero.so")


@pytest.fixture
def simulated():
    """Tell the environment in which Intel's Level Zero driver has two simulated devices, with memory of their own."""
    return {
        "NEOReadDebugKeys": 1,
        "SetCommandStreamReceiver": 1,
        "AUBDumpCaptureFileName": "/dev/null",
        "ProductFamilyOverride": "pvc",
        "CreateMultipleRootDevices": 2,
    }


@pytest.fixture(scope="session")
def fake_libcuda(tmp_path_factory):
    """Tell the path of a CUDA driver without devices of its own. See tests/drivers/fake_cuda.rs."""
    return build_driver(tmp_path_factory, "fake_cuda.rs", "libcuda.so.1")


@pytest.fixture(scope="session")
def gpu():
    """Skip without a CUDA device; where PINPOOL_REQUIRE_GPU=1, fail."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of drivers that it cannot use
        available = torch.cuda.is_available()
    reason = f"torch {torch.__version__} finds no CUDA device"
    if not available and os.environ.get("PINPOOL_REQUIRE_GPU") == "1":
        pytest.fail(f"PINPOOL_REQUIRE_GPU=1, and {reason}")
    if not available:
        pytest.skip(reason)


@pytest.fixture
def locked():
    """Tell how many bytes the kernel says that this process has locked."""
    return lambda: int(re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


@pytest.fixture
def hand_over():
    """Threads switch only where the running one lets go of the interpreter by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def turns(hand_over):
    """Tell how often another thread has had the interpreter: it wants it all the time."""
    count, stop = [0], threading.Event()

    def take_turns():
        while not stop.is_set():
            select.select([], [], [], 0)  # lets go of the interpreter
            count[0] += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    yield lambda: count[0]
    stop.set()
    thread.join()
