"""On a machine with a GPU: the rules that the fake driver keeps, asked of the real one, and what torch makes of it."""

import ctypes
import mmap
import shutil
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import pinpool.torch
from pinpool import PinnedPool, is_registered

pytestmark = pytest.mark.gpu

PAGE, MIB = mmap.PAGESIZE, 1 << 20
PORTABLE = 1
MEMORY_TYPE, HOST = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE and CU_MEMORYTYPE_HOST
SUCCESS, INVALID_VALUE, INVALID_CONTEXT, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 201, 712, 713


@pytest.fixture(scope="module", autouse=True)
def _initialised(gpu):
    torch.cuda.init()


class Driver:
    """The functions of libcuda that the rules are about. Each answers the driver's code."""

    def __init__(self, library="libcuda.so.1"):
        self.library = ctypes.CDLL(library)
        assert self.library.cuInit(0) == SUCCESS

    def register(self, address, nbytes, flags=PORTABLE):
        return self.library.cuMemHostRegister_v2(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags)
        )

    def unregister(self, address):
        return self.library.cuMemHostUnregister(ctypes.c_void_p(address))

    def memory_type(self, address):
        """Return the code, and the type where the driver knows one."""
        kind = ctypes.c_uint(0)
        code = self.library.cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, ctypes.c_uint64(address))
        return code, kind.value

    def knows(self, address):
        code, kind = self.memory_type(address)
        assert code in (SUCCESS, INVALID_VALUE)
        return code == SUCCESS and kind == HOST

    @contextmanager
    def context(self, ordinal):
        """Make a device's primary context current on this thread."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        assert self.library.cuDeviceGet(ctypes.byref(device), ordinal) == SUCCESS
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == SUCCESS
        assert self.library.cuCtxPushCurrent_v2(context) == SUCCESS
        try:
            yield
        finally:
            assert self.library.cuCtxPopCurrent_v2(ctypes.byref(context)) == SUCCESS
            assert self.library.cuDevicePrimaryCtxRelease_v2(device) == SUCCESS


@pytest.fixture
def driver():
    driver = Driver()
    with driver.context(torch.cuda.current_device()):
        yield driver


@pytest.fixture
def pool():
    """A pool of torch's current device."""
    with PinnedPool(max_bytes=512 * MIB) as pool:
        yield pool


@pytest.fixture
def pages():
    """The address of 16 whole pages that nothing else lies on, and what keeps them."""
    memory = np.frombuffer(mmap.mmap(-1, 16 * PAGE), np.uint8)
    return memory.ctypes.data, memory


# Golden rows: what `tests/drivers/fake_cuda.rs` answers, and the real driver must, too. A row that fails here is a rule
# that the fake has wrong.


def test_no_bytes_cannot_be_registered(driver, pages):
    assert driver.register(pages[0], 0) == INVALID_VALUE


@pytest.mark.parametrize(("offset", "nbytes"), [(0, PAGE), (0, 4 * PAGE), (PAGE, PAGE), (PAGE + 64, 100)])
def test_what_starts_in_a_registered_range_is_refused(driver, pages, offset, nbytes):
    start = pages[0]
    assert driver.register(start, 4 * PAGE) == SUCCESS
    assert driver.register(start + offset, nbytes) == ALREADY_REGISTERED
    assert driver.unregister(start) == SUCCESS


def test_only_the_base_of_a_range_unregisters_it(driver, pages):
    start = pages[0]
    assert driver.register(start, 4 * PAGE) == SUCCESS
    assert driver.unregister(start + PAGE) == INVALID_VALUE
    assert driver.knows(start)
    assert driver.unregister(start) == SUCCESS
    assert not driver.knows(start)


def test_what_is_not_registered_cannot_be_unregistered(driver, pages):
    start = pages[0]
    assert driver.unregister(start) == NOT_REGISTERED
    assert driver.register(start, PAGE) == SUCCESS
    assert driver.unregister(start) == SUCCESS
    assert driver.unregister(start) == NOT_REGISTERED


def test_a_range_need_not_lie_on_pages(driver, pages):
    start = pages[0] + 64
    assert driver.register(start, PAGE + 100) == SUCCESS
    assert driver.memory_type(start) == (SUCCESS, HOST)
    assert driver.unregister(start) == SUCCESS


def test_two_ranges_may_share_a_page(driver, pages):
    first, second = pages[0], pages[0] + 1024
    assert driver.register(first, 512) == SUCCESS
    assert driver.register(second, 512) == SUCCESS
    assert driver.unregister(first) == SUCCESS
    assert driver.knows(second)
    assert driver.unregister(second) == SUCCESS


def test_a_query_tells_registered_memory_from_other_memory(driver, pages):
    start = pages[0]
    assert driver.memory_type(start)[0] == INVALID_VALUE
    assert driver.register(start, 2 * PAGE) == SUCCESS
    assert [driver.memory_type(start + offset) for offset in (0, 1, 2 * PAGE - 1)] == [(SUCCESS, HOST)] * 3
    assert driver.unregister(start) == SUCCESS
    assert driver.memory_type(start)[0] == INVALID_VALUE


def test_registering_takes_a_context_and_unregistering_does_not(driver, pages):
    start, codes = pages[0], []
    assert driver.register(start, PAGE) == SUCCESS

    def without_a_context():
        codes.extend([driver.register(start + 4 * PAGE, PAGE), driver.unregister(start)])

    thread = threading.Thread(target=without_a_context)
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT, SUCCESS]


# What torch makes of it


def test_auto_is_the_device_that_torch_works_on(pool):
    current = torch.cuda.current_device()
    array = pool.empty(MIB)
    assert pool.stats()["registered_bytes"].keys() == {f"cuda:{current}"}
    assert is_registered(array, f"cuda:{current}")
    # Registrations are portable.
    assert all(is_registered(array, f"cuda:{ordinal}") for ordinal in range(torch.cuda.device_count()))


def test_torch_calls_blocks_and_their_views_pinned(pool):
    tensor = pinpool.torch.empty(pool, (64, 1024), torch.float32)
    views = [tensor, tensor[3], tensor[:, 5:7], tensor.t(), tensor.view(torch.int32), tensor.detach()[10:]]
    assert all(view.is_pinned() for view in views)
    assert torch.from_dlpack(pool.empty(5000)).is_pinned()
    assert pinpool.torch.pin(torch.ones(1000), pool=pool).is_pinned()


def test_torch_calls_a_tensor_pinned_while_it_is_registered(pool):
    tensor = torch.zeros(MIB)
    assert not tensor.is_pinned()
    with pool.register(tensor):
        assert tensor.is_pinned()
        assert tensor[100:].is_pinned()
    assert not tensor.is_pinned()


def test_memory_that_is_only_locked_is_not_pinned_for_torch():
    with PinnedPool("host", max_bytes=MIB) as pool:
        assert not pinpool.torch.empty(pool, 5000, torch.uint8).is_pinned()


def test_the_driver_knows_nothing_once_the_pool_is_trimmed(pool, driver):
    blocks = [pool.empty(nbytes) for nbytes in (1, PAGE, 5 * MIB, 40 * MIB)]
    addresses = [block.ptr for block in blocks]
    assert all(driver.knows(address) for address in addresses)
    for block in blocks:
        block.release()
    assert all(driver.knows(address) for address in addresses)  # idle memory stays registered
    pool.trim()
    assert not any(driver.knows(address) for address in addresses)
    assert sum(pool.stats()["registered_bytes"].values()) == 0


# Copies


def random_bytes(nbytes):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE + 1, 16 * MIB + 13, 64 * MIB])
@pytest.mark.parametrize("stream", ["default", "side"])
def test_copies_there_and_back_are_exact(pool, nbytes, stream):
    source, target = (pinpool.torch.empty(pool, nbytes, torch.uint8) for _ in range(2))
    source.copy_(random_bytes(nbytes))
    target.zero_()
    with torch.cuda.stream(torch.cuda.Stream() if stream == "side" else torch.cuda.default_stream()):
        on_device = source.to("cuda", non_blocking=True)
        target.copy_(on_device, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(on_device.cpu(), random_bytes(nbytes))
    assert torch.equal(target, random_bytes(nbytes))


def test_copies_of_registered_memory_are_exact(pool):
    source, target = random_bytes(8 * MIB + 5), torch.zeros(8 * MIB + 5, dtype=torch.uint8)
    with pool.register(source), pool.register(target):
        target.copy_(source.to("cuda", non_blocking=True), non_blocking=True)
        torch.cuda.synchronize()
    assert torch.equal(source, target)


# The real driver, but for one thing: it calls more than 20 MiB too much, so that 64 MiB are registered in pieces.
STINGY = """
#include <dlfcn.h>
#include <stddef.h>

int pieces;

unsigned cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    void *driver = dlopen("%s", RTLD_NOW);
    unsigned (*real)(void *, size_t, unsigned) = (unsigned (*)(void *, size_t, unsigned))dlsym(driver,
        "cuMemHostRegister_v2");
    unsigned code = bytes > (20u << 20) ? 2 : real(start, bytes, flags);
    pieces += code == 0;
    return code;
}
"""


def stingy(folder):
    """Build a driver library that the real one stands behind: what it lacks is looked up there."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs cc, to build a driver that refuses large pieces")
    ctypes.CDLL("libcuda.so.1")
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line)
    source, library = folder / "stingy.c", folder / "stingy.so"
    source.write_text(STINGY % path)
    command = [compiler, "-shared", "-fPIC", "-o", library, source, "-Wl,--no-as-needed", path, "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


# In a process of its own: a copy that the driver refuses may leave torch's context unusable.
ACROSS_BORDERS = """
    import ctypes, os
    os.environ["PINPOOL_CUDA_LIBRARY"] = {library!r}
    import torch
    import pinpool

    def copied(tensor):
        back = torch.empty_like(tensor)
        back.copy_(tensor.to("cuda", non_blocking=True), non_blocking=True)
        torch.cuda.synchronize()
        return back

    nbytes, border = 64 * MIB, 16 * MIB
    values = torch.arange(nbytes // 8).view(torch.uint8)
    memory = values.clone()
    target = torch.zeros_like(values)
    pool = pinpool.PinnedPool("cuda:0")
    with pool.register(memory), pool.register(target):
        pieces = ctypes.c_int.in_dll(ctypes.CDLL({library!r}), "pieces").value
        assert pieces >= 8, pieces
        assert memory.is_pinned() and memory[border - 100 : border + 100].is_pinned()
        for start, stop in ((border - 5000, border + 5000), (0, nbytes), (border - 1, 3 * border + 1)):
            assert torch.equal(copied(memory[start:stop]), values[start:stop]), (start, stop)
        target.copy_(memory.to("cuda", non_blocking=True), non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(target, values)
    assert not memory.is_pinned()
"""


def test_copies_cross_the_borders_of_a_range_in_pieces(run, tmp_path):
    run(ACROSS_BORDERS.format(library=str(stingy(tmp_path))))


# Contexts

CONTEXTS = """
    import ctypes
    import pinpool
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0

    def active():
        count, flags, state = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
        found = []
        for device in range(count.value):
            assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state)) == 0
            if state.value:
                found.append(device)
        return found

"""


def test_a_context_is_made_on_no_other_device(run):
    last = torch.cuda.device_count() - 1
    run(f"""{CONTEXTS}
    assert active() == []
    pinpool.PinnedPool("host").empty(MIB)
    assert active() == []
    with pinpool.PinnedPool("cuda:{last}") as pool:
        pool.empty(MIB)
        assert active() == [{last}]
    """)


def test_auto_makes_a_context_on_torchs_device_only(run):
    last = torch.cuda.device_count() - 1
    run(f"""{CONTEXTS}
    import torch
    torch.cuda.set_device({last})
    with pinpool.PinnedPool() as pool:
        array = pool.empty(MIB)
        assert pool.stats()["registered_bytes"].keys() == {{"cuda:{last}"}}
        assert active() == [{last}]
    """)


def test_the_current_context_of_the_thread_stays(driver, pool):
    before, after = ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.library.cuCtxGetCurrent(ctypes.byref(before)) == SUCCESS
    pool.empty(MIB).release()
    pool.trim()
    assert driver.library.cuCtxGetCurrent(ctypes.byref(after)) == SUCCESS
    assert before.value == after.value is not None
