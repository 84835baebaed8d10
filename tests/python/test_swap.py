"""Swapper: what comes back is what was written, whatever kind of value it is, and what is not fit is refused."""

import asyncio
import itertools
import os
import tempfile
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import pinpool
import pinpool.torch
from pinpool import PinnedArray, PinnedPool, PinpoolError, Swapper, SwapStats

PAGE, MIB = 4096, 1 << 20
TORCH_DTYPES = [
    "bfloat16",
    "bool",
    "complex128",
    "complex32",
    "complex64",
    "float16",
    "float32",
    "float4_e2m1fn_x2",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
]
NUMPY_DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (4095,), (4097,), (7, 11, 13)]


@pytest.fixture(params=["io_uring", "threads"])
def engine(request):
    if request.param == "io_uring":
        with tempfile.TemporaryDirectory() as path, Swapper(path) as swapper:
            if swapper.stats()["engine"] != "io_uring":
                pytest.skip(f"the kernel refuses io_uring: {swapper.stats()['engine_reason']}")
    return request.param


@pytest.fixture(params=[None, False], ids=["direct", "buffered"])
def direct(request):
    return request.param


@pytest.fixture
def reopen(tmp_path, pool, engine, direct):
    """Open the same store, over and over."""
    return lambda: Swapper(tmp_path, pool=pool, engine=engine, direct=direct)


@pytest.fixture
def swapper(tmp_path, pool):
    with Swapper(tmp_path, pool=pool) as swapper:
        yield swapper


def noise(pool, nbytes, seed=0):
    array = np.asarray(pool.empty(nbytes))
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return array


def no_bounces(swapper):
    stats = swapper.stats()
    return (stats["bounces"], stats["bounced_bytes"]) == (0, 0)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


# What comes back


def test_every_dtype_and_shape_of_torch_comes_back_bit_by_bit(reopen, pool):
    written = {}
    with reopen() as swapper:
        for dtype, shape in itertools.product(TORCH_DTYPES, SHAPES):
            tensor = pinpool.torch.empty(pool, shape, getattr(torch, dtype))
            if tensor.numel():  # NaNs of every kind among them
                raw = torch.from_numpy(noise(pool, tensor.numel() * tensor.element_size()))
                tensor.view(-1).view(torch.uint8).copy_(raw & 1 if dtype == "bool" else raw)
            written[f"{dtype} {shape}"] = tensor
        tickets = [swapper.write(key, tensor) for key, tensor in written.items()]
        assert [ticket.wait() for ticket in tickets] == [None] * len(written)
        check_tensors(swapper, pool, written)
    with reopen() as again:
        check_tensors(again, pool, written)


def check_tensors(swapper, pool, written):
    assert sorted(swapper.keys()) == sorted(written)
    for key, tensor in written.items():
        found = swapper.read(key).wait()
        assert (type(found), found.dtype, found.shape) == (torch.Tensor, tensor.dtype, tensor.shape), key
        assert bits(found) == bits(tensor), key
        assert pool.is_pinned(found) or not found.numel()
    assert no_bounces(swapper)


def test_every_dtype_and_shape_of_numpy_comes_back_bit_by_bit(reopen, pool):
    with reopen() as swapper:
        for name, shape in itertools.product(NUMPY_DTYPES, SHAPES):
            array = np.asarray(pool.zeros(shape, name))
            raw = noise(pool, array.nbytes)
            array.reshape(-1).view(np.uint8)[:] = raw & 1 if name == "bool" else raw
            swapper.write(f"{name} {shape}", array)
            found = swapper.read(f"{name} {shape}").wait()
            assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, shape)
            assert found.tobytes() == array.tobytes()
            assert pool.is_pinned(found) or not found.size
        assert no_bounces(swapper)
        assert swapper.read("bfloat16 (1,)").wait().dtype == np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("view", [lambda array: array, memoryview], ids=["array", "memoryview"])
def test_a_pinned_array_or_a_memoryview_of_one_comes_back_as_a_pinned_array(reopen, pool, view):
    array = pool.zeros((5, 7), "uint8")
    memoryview(array._bytes())[:] = bytes(range(35))
    with reopen() as swapper:
        swapper.write("key", view(array))
        found = swapper.read("key").wait()
        assert isinstance(found, PinnedArray)
        assert found.dtype == "uint8"
        assert bytes(found) == bytes(range(35))
        assert pool.is_pinned(found)
        assert no_bounces(swapper)


def test_a_parameter_comes_back_as_a_plain_tensor(swapper, pool):
    parameter = torch.nn.Parameter(pinpool.torch.pin(torch.randn(5, 3), pool=pool))
    swapper.write("parameter", parameter)
    swapper.write("leaf", pinpool.torch.pin(torch.ones(3), pool=pool).requires_grad_())
    for key in ("parameter", "leaf"):
        found = swapper.read(key).wait()
        assert (type(found), found.requires_grad) == (torch.Tensor, False)
    assert torch.equal(swapper.read("parameter").wait(), parameter)
    target = torch.nn.Parameter(pinpool.torch.empty(pool, (5, 3), torch.float32))
    assert swapper.read("parameter", into=target).wait() is target
    assert torch.equal(target, parameter)
    assert no_bounces(swapper)


def test_another_process_reads_the_same_by_the_default_pool(run, tmp_path, pool):
    tensor, array = pinpool.torch.pin(torch.arange(999.0), pool=pool), pool.zeros(5)
    with Swapper(tmp_path, pool=pool) as swapper:
        swapper.write("tensor", tensor)
        swapper.write("array", array)
    run(f"""
        import pinpool
        with pinpool.Swapper({str(tmp_path)!r}) as swapper:
            assert bytes(swapper.read("array").wait()) == bytes(5)
            assert "torch" not in sys.modules
            tensor = swapper.read("tensor").wait()
        import torch
        assert torch.equal(tensor, torch.arange(999.0)) and pinpool.is_pinned(tensor)
    """)


def test_hundreds_of_entries_of_all_sizes_come_back(reopen, pool):
    arrays = {f"entry {number}": noise(pool, number * 41, number) for number in range(400)}
    with reopen() as swapper:
        for key, array in arrays.items():
            swapper.write(key, array)
        assert len(swapper.keys()) <= 400
    with reopen() as again:
        assert len(again.keys()) == 400
        for key, array in arrays.items():
            assert again.read(key).wait().tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "key",
    ["", "a", "ключ/\N{SNOWMAN}\0\n", "../x", "k" * 65536],
    ids=["none", "a letter", "others", "a path", "the longest"],
)
def test_any_text_is_a_key(tmp_path, pool, key):
    with Swapper(tmp_path, pool=pool) as swapper:
        assert swapper.write(key, pool.zeros(5)).key == key
    with Swapper(tmp_path, pool=pool) as again:
        assert (key in again, again.keys()) == (True, [key])
        assert bytes(again.read(key).wait()) == bytes(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "index"]


@pytest.mark.parametrize("key", ["k" * 65537, "\N{SNOWMAN}" * 30000, "\ud800"], ids=["long", "snow", "surrogate"])
def test_a_key_that_cannot_be_kept_is_refused(swapper, pool, key):
    with pytest.raises(ValueError, match=r"key|surrogate"):
        swapper.write(key, pool.zeros(5))
    assert (swapper.keys(), swapper.stats()["stored_bytes"]) == ([], 0)


def test_a_key_is_text(swapper, pool):
    with pytest.raises(TypeError):
        swapper.write(3, pool.zeros(5))
    assert 3 not in swapper


UNREADABLE = {
    "a structure": lambda pool: np.asarray(pool.zeros(16)).view([("a", "f4"), ("b", "i4")]),
    "times": lambda pool: np.asarray(pool.zeros(16)).view("datetime64[ns]"),
    "text": lambda pool: np.asarray(pool.zeros(16)).view("U1"),
    "bits": lambda pool: torch.from_dlpack(pool.zeros(16)).view(torch.bits8),
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("copy", [False, True])
def test_a_dtype_that_the_pool_cannot_make_is_refused_when_it_is_written(swapper, pool, what, copy):
    with pytest.raises((ValueError, TypeError), match="dtype"):
        swapper.write("key", UNREADABLE[what](pool), copy=copy)
    assert "key" not in swapper


# Views, and what is no pool memory


def test_a_view_that_starts_at_a_page_is_written_and_read_without_a_copy(reopen, pool):
    whole = torch.from_numpy(noise(pool, 5 * PAGE))
    with reopen() as swapper:
        swapper.write("view", whole[PAGE : 3 * PAGE + 7])
        assert torch.equal(swapper.read("view").wait(), whole[PAGE : 3 * PAGE + 7])
        target = torch.from_numpy(noise(pool, 5 * PAGE + 9, 1))
        before = target.clone()
        swapper.write("tail", whole[: PAGE + 9]).wait()
        swapper.read("tail", into=target[4 * PAGE :]).wait()
        assert torch.equal(target[4 * PAGE :], whole[: PAGE + 9])
        assert torch.equal(target[: 4 * PAGE], before[: 4 * PAGE])
        assert no_bounces(swapper)


def floats(pool, *shape):
    tensor = pinpool.torch.empty(pool, shape, torch.float32)
    return tensor.copy_(torch.arange(tensor.numel()).view(shape))


REGISTERED = np.arange(5000, dtype=np.uint8)
UNFIT = {
    "starts at an odd place": (lambda pool: noise(pool, 3 * PAGE)[1:], "does not start at a multiple of 4096"),
    "has gaps": (lambda pool: floats(pool, 64, 64)[:, ::2], "row-major"),
    "is transposed": (lambda pool: floats(pool, 32, 64).t(), "row-major"),
    "is a transposed array": (lambda pool: np.asarray(pool.zeros((32, 64), "float32")).T, "row-major"),
    "is backwards": (lambda pool: noise(pool, PAGE)[::-1], "row-major"),
    "is a memoryview with gaps": (lambda pool: memoryview(noise(pool, PAGE))[::2], "row-major"),
    "is expanded": (lambda pool: floats(pool, 1, 5).expand(4, 5), "row-major"),
    "is conjugated": (lambda pool: pinpool.torch.pin(torch.tensor([1 + 2j, 3j]), pool=pool).conj(), "conjugates"),
    "is negative": (lambda pool: pinpool.torch.pin(torch.tensor([1 + 2j]), pool=pool).conj().imag, "negatives"),
    "is of foreign order": (
        lambda pool: np.asarray(pool.zeros(9, "int32")).view(np.dtype("int32").newbyteorder()),
        "foreign byte order",
    ),
    "is torch's": (lambda _: torch.arange(5.0), "in no pool.*copy=True"),
    "is numpy's": (lambda _: np.arange(5), "in no pool.*copy=True"),
    "is a bytearray": (lambda _: bytearray(b"abcde"), "in no pool.*copy=True"),
    "is bytes": (lambda _: b"abcde", "in no pool.*copy=True"),
    "is registered": (lambda _: REGISTERED, "Registration.*copy=True"),
}


def same(found, value):
    if isinstance(value, torch.Tensor):
        return torch.equal(found, value)
    if isinstance(value, np.ndarray):
        return np.array_equal(found, value) and found.dtype.isnative
    return bytes(found) == bytes(value)


@pytest.mark.parametrize("what", UNFIT)
def test_memory_is_refused_by_name_and_copied_only_where_that_is_allowed_if_it(swapper, pool, what):
    make, reason = UNFIT[what]
    value = make(pool)
    with pinpool.register(REGISTERED):
        with pytest.raises(ValueError, match=reason) as refused:
            swapper.write("the key", value)
        assert "'the key'" in str(refused.value)
        assert (swapper.keys(), no_bounces(swapper)) == ([], True)
        swapper.write("the key", value, copy=True).wait()
    found = swapper.read("the key").wait()
    assert same(found, value)
    nbytes = found.nbytes
    assert (swapper.stats()["bounces"], swapper.stats()["bounced_bytes"]) == (1, nbytes)


def test_a_copy_that_is_allowed_and_not_needed_is_not_made(swapper, pool):
    swapper.write("key", pool.zeros(5), copy=True)
    swapper.read("key", into=pool.empty(5), copy=True).wait()
    assert no_bounces(swapper)


def test_a_value_that_is_copied_may_be_changed_at_once(swapper):
    value = bytearray(3 * MIB)
    ticket = swapper.write("key", value, copy=True)
    value[:] = b"x" * len(value)
    ticket.wait()
    assert bytes(swapper.read("key").wait()) == bytes(3 * MIB)


def fake():
    with FakeTensorMode():
        return torch.empty(5)


ODD = {
    "meta": lambda: torch.empty(5, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "fake": fake,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "text": lambda: "text",
    "nothing": lambda: None,
    "a list": lambda: [1, 2],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("copy", [False, True])
def test_what_has_no_bytes_of_its_own_is_refused(swapper, what, copy):
    with pytest.raises(TypeError):
        swapper.write("key", ODD[what](), copy=copy)
    assert (swapper.keys(), no_bounces(swapper)) == ([], True)


# Reading into memory that is there


def test_a_read_fills_what_it_is_given_and_returns_that(reopen, pool):
    with reopen() as swapper:
        swapper.write("key", floats(pool, 50, 30))
        target = floats(pool, 50, 30).zero_()
        assert swapper.read("key", into=target).wait() is target
        assert torch.equal(target, floats(pool, 50, 30))
        for raw in (np.asarray(pool.zeros(6000)), pool.zeros(6000), memoryview(pool.zeros(6000))):
            assert swapper.read("key", into=raw).wait() is raw
            assert bytes(raw) == floats(pool, 50, 30).numpy().tobytes()
        assert no_bounces(swapper)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((30, 50), "float32"), ((50, 30), "int32"), ((1500,), "float32"), ((5999,), "uint8")]
)
@pytest.mark.parametrize("copy", [False, True])
def test_another_dtype_shape_or_size_is_refused_and_both_are_named(swapper, pool, shape, dtype, copy):
    swapper.write("key", floats(pool, 50, 30)).wait()
    target = pinpool.torch.empty(pool, shape, getattr(torch, dtype)).zero_()
    with pytest.raises(ValueError, match="float32") as refused:
        swapper.read("key", into=target, copy=copy)
    assert all(text in str(refused.value) for text in ("'key'", "(50, 30)", str(shape), dtype))
    assert not target.any()


def test_a_view_whose_end_is_not_its_own_is_refused_and_its_neighbours_are_untouched(swapper, pool):
    swapper.write("key", noise(pool, 100)).wait()
    target = noise(pool, 2 * PAGE, 5)
    before = target.copy()
    with pytest.raises(ValueError, match="would overwrite what lies behind"):
        swapper.read("key", into=target[PAGE : PAGE + 100])
    assert np.array_equal(target, before)
    swapper.read("key", into=target[PAGE : PAGE + 100], copy=True).wait()
    assert np.array_equal(target[PAGE : PAGE + 100], noise(pool, 100))
    before[PAGE : PAGE + 100] = target[PAGE : PAGE + 100]
    assert np.array_equal(target, before)
    assert (swapper.stats()["bounces"], swapper.stats()["bounced_bytes"]) == (1, 100)


TARGETS = {
    "a tensor": lambda: torch.zeros(100, dtype=torch.uint8),
    "a tensor with gaps": lambda: torch.zeros(100, 2, dtype=torch.uint8)[:, 0],
    "an array": lambda: np.zeros(100, np.uint8),
    "an array with gaps": lambda: np.zeros(200, np.uint8)[::2],
    "a bytearray": lambda: bytearray(100),
}


@pytest.mark.parametrize("what", TARGETS)
def test_foreign_memory_is_read_into_by_one_copy_that_wait_makes_once(swapper, pool, what):
    swapper.write("key", noise(pool, 100)).wait()
    target = TARGETS[what]()
    with pytest.raises(ValueError, match="'key' into this memory"):
        swapper.read("key", into=target)
    ticket = swapper.read("key", into=target, copy=True)
    assert not any(bytes(target))
    together, found = threading.Barrier(2), []

    def wait():
        together.wait()
        found.append(ticket.wait())

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [value is target for value in found] == [True] * 2
    assert bytes(target) == noise(pool, 100).tobytes()
    target[0] ^= 1
    changed = bytes(target)
    ticket.wait()
    assert bytes(target) == changed
    assert (swapper.stats()["bounces"], swapper.stats()["bounced_bytes"]) == (1, 100)


def test_a_copied_read_of_no_bytes_works(swapper, pool):
    swapper.write("key", pool.zeros(0))
    for target in (bytearray(), np.zeros(0, np.uint8), torch.zeros(0, dtype=torch.uint8), memoryview(bytearray())):
        assert swapper.read("key", into=target, copy=True).wait() is target


def test_a_copied_read_whose_ticket_is_dropped_changes_nothing(swapper, pool):
    swapper.write("key", noise(pool, 100)).wait()
    target = bytearray(100)
    swapper.read("key", into=target, copy=True)
    swapper.close()
    assert target == bytes(100)
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("copy", [False, True])
def test_a_memoryview_with_gaps_is_not_read_into(swapper, pool, copy):
    swapper.write("key", noise(pool, 100)).wait()
    with pytest.raises(ValueError, match="row-major"):
        swapper.read("key", into=memoryview(bytearray(200))[::2], copy=copy).wait()


def read_only(array):
    array.flags.writeable = False
    return array


READ_ONLY = {
    "a memoryview": lambda pool: memoryview(np.asarray(pool.zeros(100))).toreadonly(),
    "an array": lambda pool: read_only(np.asarray(pool.zeros(100))),
    "bytes": lambda _: bytes(100),
}


@pytest.mark.parametrize("what", READ_ONLY)
@pytest.mark.parametrize("copy", [False, True])
def test_memory_that_is_read_only_is_not_read_into(swapper, pool, what, copy):
    swapper.write("key", noise(pool, 100)).wait()
    target = READ_ONLY[what](pool)
    with pytest.raises((ValueError, TypeError)):
        swapper.read("key", into=target, copy=copy).wait()
    assert bytes(target) == bytes(100)


# Keys


def test_operations_on_one_key_take_effect_in_the_order_of_their_calls(reopen, pool):
    with reopen() as swapper:
        reads = []
        for number in range(50):
            swapper.write("key", noise(pool, 1000 * number, number))
            reads.append(swapper.read("key"))
            if number % 7 == 3:
                swapper.delete("key")
                assert "key" not in swapper
        for number, read in enumerate(reads):
            assert read.wait().tobytes() == noise(pool, 1000 * number, number).tobytes()


def test_a_deleted_or_unknown_key_is_a_key_error_that_names_it_and_the_store(swapper, pool, tmp_path):
    swapper.write("key", pool.zeros(5))
    swapper.delete("key")
    assert ("key" in swapper, swapper.keys(), swapper.stats()["stored_bytes"]) == (False, [], 0)
    for call in (swapper.read, swapper.delete):
        with pytest.raises(KeyError, match="key") as unknown:
            call("key")
        assert str(tmp_path) in str(unknown.value)


def test_a_closed_swapper_refuses_everything_but_questions(tmp_path, pool):
    swapper = Swapper(tmp_path, pool=pool)
    write = swapper.write("key", pool.zeros(5))
    read = swapper.read("key")
    assert not swapper.closed
    swapper.close()
    swapper.close()
    assert swapper.closed
    assert (write.done(), bytes(read.wait())) == (True, bytes(5))
    calls = [
        lambda: swapper.write("key", pool.zeros(5)),
        lambda: swapper.read("key"),
        lambda: swapper.delete("key"),
        lambda: list(swapper.prefetch(["key"])),
        swapper.flush,
        swapper.trim,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    assert swapper.stats()["bytes_written"] == 5


def test_the_context_manager_closes_on_an_error_too(tmp_path, pool):
    with pytest.raises(ZeroDivisionError), Swapper(tmp_path, pool=pool) as swapper:
        assert 1 / (swapper.closed)
    assert swapper.closed


def test_a_second_swapper_of_one_directory_is_refused_and_the_first_named(tmp_path, pool):
    with Swapper(tmp_path, pool=pool) as swapper:
        with pytest.raises(BlockingIOError, match=rf"process {os.getpid()} "):
            Swapper(tmp_path, pool=pool)
        swapper.write("key", pool.zeros(5)).wait()
    Swapper(tmp_path, pool=pool).close()


def test_a_dropped_swapper_lets_go_of_its_store_by_itself(reopen, pool):
    swapper = reopen()
    ticket = swapper.write("key", noise(pool, 3 * MIB))
    del swapper
    ticket.wait()
    while True:  # its thread is about to let go
        try:
            again = reopen()
            break
        except BlockingIOError:
            pass
    with again:
        assert again.read("key").wait().tobytes() == noise(pool, 3 * MIB).tobytes()


# Reading ahead


def fill(swapper, pool, count, nbytes=PAGE):
    for number in range(count):
        swapper.write(f"{number}", noise(pool, nbytes, number)).wait()
    return [f"{number}" for number in range(count)]


@pytest.mark.parametrize("ahead", [1, 2, 3, 20])
@pytest.mark.parametrize("many", [list, iter, lambda keys: (key for key in keys)])
def test_values_are_prefetched_in_the_order_of_their_keys(swapper, pool, ahead, many):
    keys = fill(swapper, pool, 9)
    found = [value.tobytes() for value in swapper.prefetch(many(keys), ahead=ahead)]
    assert found == [noise(pool, PAGE, number).tobytes() for number in range(9)]
    assert list(swapper.prefetch([])) == []


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_first_reads_begin_at_the_call_and_no_more_than_ahead_are_in_memory(swapper, pool, ahead):
    keys, asked, most = fill(swapper, pool, 9), [], 0
    blocks = pool.stats()["blocks"]
    values = swapper.prefetch((asked.append(key) or key for key in keys), ahead=ahead)
    assert asked == keys[:ahead]
    assert pool.stats()["blocks"] == blocks + ahead
    for value in values:
        most = max(most, pool.stats()["blocks"] - blocks)
        del value
    assert (most, asked) == (ahead + 1, keys)


def test_a_plain_loop_takes_room_for_two_values_more_than_are_read_ahead(tmp_path, pool):
    with Swapper(tmp_path, pool=pool) as swapper:
        keys = fill(swapper, pool, 9, 2 * MIB)
    small = PinnedPool("host", max_bytes=4 * 2 * MIB)
    with Swapper(tmp_path, pool=small) as swapper:
        assert len([value.nbytes for value in swapper.prefetch(keys, ahead=2)]) == 9


def test_a_prefetch_that_is_dropped_half_way_frees_its_memory(swapper, pool):
    values = swapper.prefetch(fill(swapper, pool, 9), ahead=3)
    next(values)
    del values
    swapper.close()
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_values_before_an_unknown_key_are_given_out(swapper, pool, ahead):
    keys, found = fill(swapper, pool, 4), []
    with pytest.raises(KeyError, match="unknown"):  # noqa: PT012
        for value in swapper.prefetch([*keys, "unknown"], ahead=ahead):
            found.append(value.nbytes)  # noqa: PERF401
    assert found == [PAGE] * 4


@pytest.mark.parametrize("ahead", [0, -1])
def test_at_least_one_value_is_prefetched(swapper, ahead):
    with pytest.raises(ValueError, match=f"ahead: {ahead}"):
        swapper.prefetch([], ahead=ahead)


# Tickets


def test_a_ticket_that_is_waited_for_again_gives_the_same_value(swapper, pool):
    swapper.write("key", pool.zeros(5))
    ticket = swapper.read("key")
    assert ticket.wait() is ticket.wait(0) is ticket.wait(timeout=5)
    assert ticket.done()
    assert repr(ticket) == "Ticket('key', done)"


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_makes_no_sense_is_refused(swapper, pool, timeout):
    with pytest.raises(ValueError, match="timeout"):
        swapper.write("key", pool.zeros(5)).wait(timeout)


def test_tickets_can_be_awaited_many_at_a_time_and_more_than_once(reopen, pool):
    async def work(swapper):
        writes = [swapper.write(f"{number}", noise(pool, 1000 * number, number)) for number in range(50)]
        assert await asyncio.gather(*writes) == [None] * 50
        reads = [swapper.read(f"{number}") for number in range(50)]
        values = await asyncio.gather(*reads)
        assert [await read for read in reads] == values
        return values

    with reopen() as swapper:
        values = asyncio.run(work(swapper))
    assert [value.tobytes() for value in values] == [noise(pool, 1000 * n, n).tobytes() for n in range(50)]


# Device work


class Work:
    """An event that is done when it was asked so often."""

    def __init__(self, often):
        self.left = often

    def query(self):
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("verb", ["write", "read"])
def test_device_work_on_a_block_is_waited_for_first(swapper, pool, verb):
    array, work = pool.zeros(5), Work(3)
    swapper.write("key", pool.zeros(5)).wait()
    pool.defer(array, work)
    ticket = swapper.write("key", array) if verb == "write" else swapper.read("key", into=array)
    assert work.left <= 0
    ticket.wait()


@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_block_that_device_work_may_use_for_ever_is_refused(swapper, pool, verb):
    class Failing:
        def query(self):
            raise RuntimeError("the device fell off the bus")

    array = pool.zeros(5)
    swapper.write("key", pool.zeros(5)).wait()
    pool.defer(array, Failing())
    with pytest.raises(ValueError, match="fell off the bus"):
        swapper.write("key", array) if verb == "write" else swapper.read("key", into=array)
    assert bytes(swapper.read("key").wait()) == bytes(5)


# Numbers


def test_stats_has_the_documented_keys_and_the_numbers_are_exact(reopen, pool):
    with reopen() as swapper:
        stats = swapper.stats()
        assert set(stats) == set(SwapStats.__annotations__)
        assert (stats["write_gb_per_s"], stats["read_gb_per_s"], stats["write_seconds"]) == (0, 0, 0)
        swapper.write("a", noise(pool, 5000)).wait()
        swapper.write("a", noise(pool, 9000)).wait()
        swapper.write("b", bytearray(77), copy=True).wait()
        swapper.write("c", pool.zeros(0)).wait()
        for _ in range(3):
            swapper.read("a").wait()
        swapper.read("b", into=bytearray(77), copy=True).wait()
        swapper.delete("c")
        swapper.flush()
        stats = swapper.stats()
        names = ("bytes_written", "bytes_read", "bounces", "bounced_bytes", "entries", "stored_bytes")
        assert [stats[name] for name in names] == [14077, 27077, 2, 154, 2, 16384]
        assert stats["file_bytes"] >= 16384
        assert (stats["block_bytes"], stats["max_bytes"]) == (MIB, None)
        for verb in ("write", "read"):
            assert stats[f"{verb}_seconds"] > 0
            rate = stats["bytes_written" if verb == "write" else "bytes_read"] / stats[f"{verb}_seconds"] / 1e9
            assert stats[f"{verb}_gb_per_s"] == pytest.approx(rate)
        kinds = {int: "int", str: "str", bool: "bool", float: "float", type(None): "None"}
        for name, annotation in SwapStats.__annotations__.items():
            told = getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", str(annotation))
            assert kinds[type(stats[name])] in told, name


def test_trim_gives_unused_room_back(swapper, pool):
    swapper.write("large", pool.zeros(4 * MIB)).wait()
    swapper.write("small", pool.zeros(5)).wait()
    swapper.delete("large")
    assert swapper.trim() >= 4 * MIB
    assert swapper.trim() == 0
    assert bytes(swapper.read("small").wait()) == bytes(5)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"block_bytes": 0}, ValueError),
        ({"block_bytes": 5000}, ValueError),
        ({"block_bytes": -4096}, ValueError),
        ({"block_bytes": 2 << 30}, ValueError),
        ({"block_bytes": 4096.0}, TypeError),
        ({"queue_depth": 0}, ValueError),
        ({"queue_depth": 4097}, ValueError),
        ({"queue_depth": "1"}, TypeError),
        ({"max_bytes": 4095}, ValueError),
        ({"engine": "iouring"}, ValueError),
    ],
    ids=str,
)
def test_an_option_that_makes_no_sense_is_refused_by_name(tmp_path, option, error):
    with pytest.raises(error, match="integer" if error is TypeError else next(iter(option))):
        Swapper(tmp_path / "store", **option)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("option", [{"block_bytes": 4096}, {"queue_depth": 1}, {"fixed_buffers": False}], ids=str)
def test_every_option_gives_the_same_data(tmp_path, pool, engine, option):
    with Swapper(tmp_path, pool=pool, engine=engine, **option) as swapper:
        swapper.write("key", noise(pool, 3 * MIB + 5))
        assert swapper.read("key").wait().tobytes() == noise(pool, 3 * MIB + 5).tobytes()
        stats = swapper.stats()
    if "fixed_buffers" in option:
        assert stats["fixed_bytes"] == 0
    else:
        assert option.items() <= stats.items()


def test_threads_may_share_a_swapper(reopen, pool):
    failures = []

    def work(number):
        try:
            for lap in range(30):
                swapper.write(f"{number}", noise(pool, 5000 + lap, lap))
                swapper.write("shared", noise(pool, 7000, 3))
                assert swapper.read(f"{number}").wait().tobytes() == noise(pool, 5000 + lap, lap).tobytes()
                assert swapper.read("shared").wait().tobytes() == noise(pool, 7000, 3).tobytes()
        except (AssertionError, OSError, KeyError, ValueError, PinpoolError) as error:
            failures.append(error)

    with reopen() as swapper:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (failures, len(swapper.keys())) == ([], 9)


def test_an_array_with_a_mask_is_refused(swapper, pool):
    masked = np.ma.masked_array(np.asarray(pool.zeros(4)), mask=[0, 1, 0, 1])
    with pytest.raises(TypeError, match="mask"):
        swapper.write("key", masked, copy=True)


@pytest.mark.parametrize("copy", [False, True])
def test_an_array_that_was_released_is_refused(swapper, pool, copy):
    array = pool.zeros(10)
    swapper.write("key", array).wait()
    array.release()
    with pytest.raises(ValueError, match="released"):
        swapper.write("key", array, copy=copy)
    with pytest.raises(ValueError, match="released"):
        swapper.read("key", into=array, copy=copy)
    assert swapper.read("key").wait().nbytes == 10


def test_what_is_no_value_is_named(swapper, pool):
    with pytest.raises(TypeError, match="cannot swap a list"):
        swapper.write("key", [1, 2], copy=True)
    with pytest.raises(TypeError, match="not one key"):
        swapper.prefetch("key")


def test_a_swapper_is_true_and_names_its_directory(reopen, tmp_path):
    with reopen() as swapper:
        assert swapper
        assert str(tmp_path) in repr(swapper)
    assert "closed" in repr(swapper)


def test_parts_of_one_tensor_are_written_and_read_side_by_side(swapper, pool):
    whole = pinpool.torch.empty(pool, (8, PAGE), torch.uint8)
    for number in range(8):
        whole[number] = number
    expected = whole.clone()
    for ticket in [swapper.write(f"row {number}", whole[number]) for number in range(8)]:
        ticket.wait()
    whole.zero_()
    for ticket in [swapper.read(f"row {number}", into=whole[number]) for number in range(8)]:
        ticket.wait()
    assert torch.equal(whole, expected)
    assert swapper.stats()["bounces"] == 0
