"""Bad arguments are refused, by name, before anything is mapped."""

import numpy as np
import pytest
import torch

from pinpool import DriverUnavailableError, PinnedArray, PinnedPool, PinpoolError, Registration

MIB = 1 << 20


@pytest.mark.parametrize("method", ["empty", "zeros"])
@pytest.mark.parametrize(
    "shape", [-1, (2, -3), (0, -1), 2**63 - 1, 2**63, 2**70, (1, 2**70), (2**40, 2**40), (0, 2**62, 2**62)]
)
def test_a_negative_or_overflowing_shape_is_a_value_error_and_nothing_is_mapped(pool, method, shape):
    before = pool.stats()
    with pytest.raises(ValueError, match=r"invalid (shape|nbytes)"):
        getattr(pool, method)(shape)
    assert pool.stats() == before


@pytest.mark.parametrize("shape", [2.5, (2.5,), (3, None), None, "abc", [[1]], object()])
def test_a_shape_that_is_no_integers_is_a_type_error_and_nothing_is_mapped(pool, shape):
    before = pool.stats()
    with pytest.raises(TypeError, match="integer"):
        pool.empty(shape)
    assert pool.stats() == before


@pytest.mark.parametrize("shape", [6, np.int64(6), torch.tensor(6), np.array(6)])
def test_an_integer_is_a_shape_of_one_dimension(pool, shape):
    assert pool.empty(shape).shape == (6,)


@pytest.mark.parametrize("shape", [(2, 3), [2, 3], torch.Size((2, 3)), np.array((2, 3)), iter((2, 3)), (2, np.int8(3))])
def test_any_sequence_of_integers_is_a_shape(pool, shape):
    assert pool.empty(shape).shape == (2, 3)


@pytest.mark.parametrize("dtype", ["int16", np.dtype("int16"), np.int16, torch.int16, torch.short])
def test_a_dtype_is_a_name_or_a_dtype_of_numpy_or_torch(pool, dtype):
    array = pool.empty(5, dtype)
    assert (array.dtype, array.nbytes) == ("int16", 10)


def test_without_a_dtype_it_is_bytes(pool):
    assert pool.empty(5).dtype == "uint8"


@pytest.mark.parametrize("dtype", ["float7", "", "f4", np.dtype("S5"), np.dtype([("a", "f4")]), torch.qint8, 3, []])
def test_an_unknown_dtype_is_a_value_error_that_names_the_known_ones(pool, dtype):
    before = pool.stats()
    with pytest.raises(ValueError, match=r"is unknown; known are .*bfloat16.*float4_e2m1fn_x2"):
        pool.empty(5, dtype)
    assert pool.stats() == before


def test_a_dtype_of_foreign_byte_order_is_a_value_error(pool):
    foreign = np.dtype(np.float32).newbyteorder()
    with pytest.raises(ValueError, match="byte order"):
        pool.empty(5, foreign)
    with pytest.raises(ValueError, match="byte order"):
        pool.empty_like(np.ones(5, foreign))


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf")])
def test_a_timeout_is_not_negative(pool, timeout):
    with pytest.raises(ValueError, match="invalid timeout"):
        pool.empty(5, timeout=timeout)


def test_a_timeout_is_a_number(pool):
    with pytest.raises(TypeError):
        pool.empty(5, timeout="soon")


@pytest.mark.parametrize("timeout", [None, 0, 3, 1e300, float("inf")])
def test_a_request_that_fits_does_not_care_about_its_timeout(pool, timeout):
    assert pool.empty(5, timeout=timeout).nbytes == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_bytes", value) for value in (0, -1, 2**63, 2**70)],
        *[("threads", value) for value in (0, -1, 2**40, 2**70)],
        *[("numa", value) for value in (-1, 2**40, 2**70)],
        *[(name, value) for name in ("pages", "register") for value in ("", "3k", "2M")],
    ],
)
def test_a_wrong_value_for_a_pool_is_a_value_error_that_names_the_argument(name, value):
    with pytest.raises(ValueError, match=f"invalid {name}"):
        PinnedPool(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_bytes", 2.5), ("max_bytes", "1g"), ("threads", 1.5), ("numa", "0"), ("pages", None), ("register", None)],
)
def test_a_wrong_type_for_a_pool_is_a_type_error(name, value):
    with pytest.raises(TypeError):
        PinnedPool(**{name: value})


@pytest.mark.parametrize("devices", [None, "host", [], ()])
def test_without_devices_memory_is_only_locked(devices):
    pool = PinnedPool(devices, max_bytes=MIB)
    array = pool.empty(5)
    assert pool.is_pinned(array)
    assert pool.stats()["registered_bytes"] == {}


@pytest.mark.parametrize("pool", [PinnedPool, lambda: PinnedPool("auto")])
def test_auto_takes_the_devices_that_there_are(pool):
    assert pool().zeros(5).nbytes == 5


def test_a_device_that_cannot_be_had_is_an_error_that_names_it():
    with pytest.raises(DriverUnavailableError, match="CUDA"):
        PinnedPool("cuda:4095")


@pytest.mark.parametrize("devices", ["tpu:0", "cuda:one", "cuda:-1", "", ["host"]])
def test_a_device_that_is_none_is_a_value_error(devices):
    with pytest.raises(ValueError, match="invalid devices"):
        PinnedPool(devices)


@pytest.mark.parametrize("devices", [3, 1.5, b"cuda", object()])
def test_a_device_that_is_neither_a_name_nor_like_torchs_is_a_type_error(devices):
    with pytest.raises(TypeError, match="invalid devices"):
        PinnedPool(devices)


def test_without_registering_no_device_is_needed():
    assert PinnedPool("cuda:4095", register="off", max_bytes=MIB).zeros(5).nbytes == 5
    pool = PinnedPool("cuda:4095", register="try", max_bytes=MIB)
    assert "CUDA" in pool.stats()["unregistered"]


def test_huge_pages_that_cannot_be_had_are_an_error_that_says_how_to_reserve_them():
    pool = PinnedPool("host", pages="1g", max_bytes=1 << 46)
    with pytest.raises(PinpoolError, match=r'pages="1g".*nr_hugepages'):
        pool.empty(1 << 45)
    assert (pool.stats()["reserved_bytes"], pool.stats()["blocks"]) == (0, 0)


def test_a_numa_node_that_is_not_there_is_an_error_that_names_it():
    with pytest.raises(PinpoolError, match="NUMA node 1000"):
        PinnedPool("host", numa=1000)


def test_all_memory_may_be_asked_to_lie_on_one_node():
    assert PinnedPool("host", numa=0, max_bytes=MIB).zeros(5).nbytes == 5


def test_what_the_pages_are_is_told():
    pool = PinnedPool("host", pages="4k", max_bytes=4 * MIB)
    assert pool.empty(3 * MIB).nbytes == 3 * MIB
    assert pool.stats()["pages"] == "4k"


@pytest.mark.parametrize("kind", [PinnedArray, Registration])
def test_arrays_and_registrations_are_not_made_by_hand(kind):
    with pytest.raises(TypeError):
        kind()
