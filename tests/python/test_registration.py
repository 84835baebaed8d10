"""Registration and unpinning: memory that the caller owns, pinned in place; pool memory unlocked early."""

import array
import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest
import torch

import pinpool.torch
from pinpool import is_pinned, register

PAGE = mmap.PAGESIZE


@pytest.fixture
def pages():
    """Ten whole pages of memory, as a numpy array; nothing else is on them."""
    return np.frombuffer(mmap.mmap(-1, 10 * PAGE), np.uint8)


@pytest.fixture(params=["numpy", "torch"])
def memory(request, pages):
    return pages if request.param == "numpy" else torch.from_numpy(pages)


# What can be registered


class Exporter:
    """Memory that only DLPack gets at."""

    def __init__(self, device=(1, 0)):
        self.array, self.device = np.zeros(1000, np.float32), device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_options):
        return self.array.__dlpack__()


REGISTERED = {
    "bytearray": lambda: bytearray(4000),
    "bytes": lambda: bytes(4000),
    "memoryview": lambda: memoryview(bytearray(4000)),
    "slice of a memoryview": lambda: memoryview(bytearray(5000))[500:4500],
    "array": lambda: array.array("i", range(1000)),
    "ctypes": lambda: (ctypes.c_int * 1000)(),
    "mmap": lambda: mmap.mmap(-1, 4000),
    "DLPack": Exporter,
    "numpy": lambda: np.zeros(1000, np.float32),
    "numpy scalar array": lambda: np.zeros((), "S4000"),
    "numpy transposed": lambda: np.zeros((10, 100), np.float32).T,
    "numpy reversed": lambda: np.zeros(1000, np.float32)[::-1],
    "numpy read-only": lambda: np.frombuffer(bytes(4000), np.float32),
    "numpy dates": lambda: np.zeros(500, "M8[s]"),
    "numpy structure": lambda: np.zeros(500, [("a", "f4"), ("b", "f4")]),
    "torch": lambda: torch.zeros(1000),
    "torch bfloat16": lambda: torch.zeros(2000, dtype=torch.bfloat16),
    "torch transposed": lambda: torch.zeros(10, 100).t(),
    "torch permuted": lambda: torch.zeros(5, 10, 20).permute(2, 0, 1),
    "torch view": lambda: torch.zeros(3000)[1000:2000],
    "torch conjugate": lambda: torch.zeros(500, dtype=torch.complex64).conj(),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(1000)),
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_dense_host_memory_can_be_registered(kind):
    obj = REGISTERED[kind]()
    assert not is_pinned(obj)
    with register(obj) as registration:
        assert is_pinned(obj)
        assert is_pinned((registration.ptr, registration.nbytes))
        assert not is_pinned((registration.ptr, registration.nbytes + 1))
        assert not is_pinned((registration.ptr - 1, 1))
        assert registration.nbytes in (4000, 2000 * 2, 500 * 8)
    assert not is_pinned(obj)


def test_the_address_is_that_of_the_lowest_byte():
    forwards = np.zeros(1000)
    with register(forwards[::-1]) as registration:
        assert registration.ptr == forwards.ctypes.data


@pytest.mark.parametrize(
    "obj",
    [
        np.zeros(1000)[::2],
        np.zeros((10, 10))[:, 1:5],
        np.zeros(10, [("a", "f4"), ("b", "f8")])["a"],
        np.broadcast_to(np.zeros(3), (4, 3)),
        memoryview(bytearray(1000))[::3],
        torch.zeros(1000)[::2],
        torch.zeros(10, 10)[:, 1:5],
        torch.zeros(1, 10).expand(10, 10),
        torch.nn.Parameter(torch.zeros(10, 10))[2:5, 3:4],
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_a_view_with_gaps_is_a_type_error(obj):
    with pytest.raises(TypeError, match="non-contiguous"):
        register(obj)
    assert not is_pinned(obj)


@pytest.mark.parametrize("obj", [None, 5, "text", [1, 2], {}, (1,), (1, 2, 3), ("a", 5), (1.5, 5), object()])
def test_what_is_no_memory_is_a_type_error(obj):
    with pytest.raises(TypeError):
        register(obj)
    with pytest.raises(TypeError):
        is_pinned(obj)


@pytest.mark.parametrize("obj", [bytearray(), np.zeros(0), np.zeros((3, 0)), torch.zeros(0, 3), (4096, 0)])
def test_memory_without_bytes_is_a_value_error_and_not_pinned(obj):
    with pytest.raises(ValueError, match="at least one byte"):
        register(obj)
    assert not is_pinned(obj)


@pytest.mark.parametrize("pair", [(-1, 5), (4096, -1), (2**64, 1), (4096, 2**70)])
def test_a_pair_is_an_address_and_a_size(pair):
    with pytest.raises(ValueError, match=r"invalid (address|nbytes)"):
        register(pair)


def test_memory_that_is_not_mapped_cannot_be_locked():
    with pytest.raises(OSError, match="mlock"):
        register((PAGE, 10))
    assert not is_pinned((PAGE, 10))


def test_memory_of_a_device_is_a_type_error_and_not_pinned():
    on_cuda = Exporter(device=(2, 0))
    with pytest.raises(TypeError, match="not in host memory"):
        register(on_cuda)
    assert not is_pinned(on_cuda)


# What it does


def test_registered_pages_are_locked_and_hold_what_they_held(pages, locked):
    pages[:] = 7
    before = locked()
    with register(pages):
        assert locked() == before + 10 * PAGE
        pages[5] = 8
    assert locked() == before
    assert (pages[5], int(pages.sum())) == (8, 7 * 10 * PAGE + 1)


@pytest.mark.parametrize("part", [slice(3, 77), slice(0, 1), slice(PAGE, None), slice(-1, None)])
def test_a_view_is_asked_about_from_its_first_to_its_last_byte(memory, part):
    with register(memory[PAGE : 3 * PAGE]):
        assert is_pinned(memory[PAGE : 3 * PAGE][part])
        assert is_pinned(memory[PAGE : 3 * PAGE][::7])
        for outside in (slice(0, PAGE), slice(PAGE - 1, 2 * PAGE), slice(2 * PAGE, 3 * PAGE + 1), slice(None)):
            assert not is_pinned(memory[outside])


def test_closing_twice_does_nothing(memory):
    registration = register(memory)
    other = register(memory)
    registration.close()
    registration.close()
    assert registration.closed
    assert is_pinned(memory)
    other.close()
    assert not is_pinned(memory)


def test_identical_ranges_are_counted(memory, locked):
    before = locked()
    registrations = [register(memory) for _ in range(3)]
    while registrations:
        assert is_pinned(memory)
        registrations.pop().close()
    assert (is_pinned(memory), locked()) == (False, before)


@pytest.mark.parametrize("part", [slice(1, None), slice(None, -1), slice(5, 9), slice(2 * PAGE, None)])
def test_overlapping_ranges_are_refused_by_name(memory, part):
    with register(memory) as registration:
        with pytest.raises(ValueError, match=f"{registration.ptr:#x}"):
            register(memory[part])
        assert is_pinned(memory)
    register(memory[part]).close()


def test_pool_memory_is_pinned_already(pool):
    for obj in (pool.empty(PAGE), pinpool.torch.empty(pool, PAGE, torch.uint8)):
        with pytest.raises(ValueError, match="pinned already"):
            register(obj)
        assert is_pinned(obj)


def test_neighbours_on_one_page_do_not_unlock_each_other(pages, locked):
    before = locked()
    left, right = register(pages[: PAGE // 2]), register(pages[PAGE // 2 : PAGE])
    assert locked() == before + PAGE
    left.close()
    assert (locked(), is_pinned(pages[PAGE // 2 : PAGE])) == (before + PAGE, True)
    right.close()
    assert locked() == before


# What it keeps


def test_it_keeps_a_bytearray_alive_and_where_it_is():
    buffer = bytearray(5000)
    with register(buffer):
        with pytest.raises(BufferError):
            buffer.extend(bytes(1 << 20))
        assert is_pinned(buffer)
    buffer.extend(b"fits again")


def test_it_keeps_its_object_alive_until_it_is_closed():
    buffer = np.zeros(1000)
    watch = weakref.ref(buffer)
    registration = register(buffer)
    del buffer
    gc.collect()
    assert watch() is not None
    registration.close()
    assert watch() is None


def test_dropping_it_unpins(memory, locked):
    before = locked()
    registration = register(memory)
    assert is_pinned(memory)
    del registration
    assert (is_pinned(memory), locked()) == (False, before)


def replace_data(tensor):
    tensor.data = torch.zeros(1)


def replace_storage(tensor):
    tensor.set_(torch.zeros(1))


def swap(tensor):
    torch.utils.swap_tensors(tensor, torch.zeros(1))


@pytest.mark.parametrize("replace", [replace_data, replace_storage, swap])
@pytest.mark.parametrize("wrap", [torch.Tensor.detach, torch.nn.Parameter])
def test_it_keeps_the_memory_when_the_tensor_gets_other_memory(replace, wrap):
    buffer = np.zeros(1000, np.float32)
    watch = weakref.ref(buffer)
    tensor = wrap(torch.from_numpy(buffer)).requires_grad_(False)
    registration = register(tensor)
    del buffer
    replace(tensor)
    assert watch() is not None
    assert is_pinned((registration.ptr, registration.nbytes))
    registration.close()
    assert watch() is None


def test_it_is_collected_with_an_object_that_refers_to_it():
    class Buffer(bytearray):
        pass

    buffer = Buffer(5000)
    buffer.registration = register(buffer)
    extent, watch = (buffer.registration.ptr, 5000), weakref.ref(buffer)
    del buffer
    assert is_pinned(extent)
    gc.collect()
    assert watch() is None
    assert not is_pinned(extent)


def test_it_can_be_asked_while_it_is_collected(run):
    run("""
        import weakref
        import numpy, pinpool

        signal.alarm(10)

        class Cycle:
            def __init__(self, registration):
                self.myself, self.registration = self, registration

            def __del__(self):
                global registration
                registration = weakref.ref(self.registration)

        array, answers = numpy.zeros(1000), []
        watch = weakref.ref(array, lambda _: answers.append(registration().closed))
        gc.collect()
        Cycle(pinpool.register(array))
        del array
        gc.collect()
        assert answers == [True]
    """)


# unpin


def test_unpinning_unlocks_the_block_and_leaves_the_memory(pool, locked):
    before = locked()
    tensor = pinpool.torch.empty(pool, 3 << 20, torch.uint8).fill_(7)
    assert pinpool.torch.unpin(tensor)
    assert (is_pinned(tensor), locked(), pool.stats()["locked_bytes"]) == (False, before, 0)
    assert int(tensor.sum()) == 7 * (3 << 20)
    assert not pinpool.torch.unpin(tensor)


def test_unpinning_a_view_unlocks_its_whole_block_and_no_other(pool):
    block, neighbour = (pinpool.torch.empty(pool, 3 * PAGE, torch.uint8) for _ in range(2))
    assert pinpool.torch.unpin(block[2 * PAGE : 2 * PAGE + 5])
    assert not is_pinned(block[:5])
    assert is_pinned(neighbour)


@pytest.mark.parametrize("nbytes", [5000, 3 << 20])
def test_an_unpinned_block_is_locked_again_before_it_is_reused(pool, nbytes):
    for _ in range(20):
        tensor = pinpool.torch.empty(pool, nbytes, torch.uint8)
        assert is_pinned(tensor)
        assert pinpool.torch.unpin(tensor)
        del tensor
    stats = pool.stats()
    assert (stats["blocks"], stats["regions"]) == (0, 1)
    assert pool.trim() == stats["reserved_bytes"]
    assert pool.stats()["reserved_bytes"] == 0


@pytest.mark.parametrize("obj", [torch.ones(3), torch.ones(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
def test_what_is_in_no_pool_cannot_be_unpinned(obj):
    assert not pinpool.torch.unpin(obj)


def test_a_registration_is_closed_and_not_unpinned(memory):
    with register(memory):
        with pytest.raises(ValueError, match="close"):
            pinpool.torch.unpin(memory)
        assert is_pinned(memory)
