"""DLPack: the capsules, what consumers see through them, and what becomes of the memory."""

import ctypes
import gc
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    py_object,
    pythonapi,
)

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

CPU, PINNED_BY_CUDA, CUDA = (1, 0), (3, 0), (2, 0)

# Each element type of a pool: (DLPack's code, bits, lanes), and whether numpy has it.
ELEMENT_TYPES = {
    "bool": ((6, 8, 1), True),
    "int8": ((0, 8, 1), True),
    "int16": ((0, 16, 1), True),
    "int32": ((0, 32, 1), True),
    "int64": ((0, 64, 1), True),
    "uint8": ((1, 8, 1), True),
    "uint16": ((1, 16, 1), True),
    "uint32": ((1, 32, 1), True),
    "uint64": ((1, 64, 1), True),
    "float16": ((2, 16, 1), True),
    "float32": ((2, 32, 1), True),
    "float64": ((2, 64, 1), True),
    "complex64": ((5, 64, 1), True),
    "complex128": ((5, 128, 1), True),
    "complex32": ((5, 32, 1), False),
    "bfloat16": ((4, 16, 1), False),
    "float8_e4m3fn": ((10, 8, 1), False),
    "float8_e4m3fnuz": ((11, 8, 1), False),
    "float8_e5m2": ((12, 8, 1), False),
    "float8_e5m2fnuz": ((13, 8, 1), False),
    "float8_e8m0fnu": ((14, 8, 1), False),
    "float4_e2m1fn_x2": ((17, 4, 2), False),
}
IN_NUMPY = [name for name, (_, in_numpy) in ELEMENT_TYPES.items() if in_numpy]
NOT_IN_NUMPY = [name for name, (_, in_numpy) in ELEMENT_TYPES.items() if not in_numpy]


class Tensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", c_int32 * 2),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class Legacy(Structure):
    _fields_ = (("tensor", Tensor), ("context", c_void_p), ("deleter", c_void_p))


class Versioned(Structure):
    _fields_ = (
        ("version", c_uint32 * 2),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    )


# How a deleter is called: without the interpreter, or with it.
DETACHED, ATTACHED = CFUNCTYPE(None, c_void_p), PYFUNCTYPE(None, c_void_p)

FORMS = {b"dltensor": Legacy, b"dltensor_versioned": Versioned}
name_of = PYFUNCTYPE(c_char_p, py_object)(("PyCapsule_GetName", pythonapi))
pointer_of = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))
rename = PYFUNCTYPE(c_int, py_object, c_char_p)(("PyCapsule_SetName", pythonapi))
USED = {name: b"used_" + name for name in FORMS}  # a capsule keeps no copy of its name


def look(capsule):
    """What a capsule of either form holds."""
    name = name_of(capsule)
    return FORMS[name].from_address(pointer_of(capsule, name))


def consume(capsule):
    """Take over what a capsule holds, as a consumer does."""
    managed = look(capsule)
    rename(capsule, USED[name_of(capsule)])
    return managed


def delete(managed, prototype=DETACHED):
    prototype(managed.deleter)(ctypes.addressof(managed))


@pytest.fixture(params=[None, (1, 0)], ids=["legacy", "versioned"])
def max_version(request):
    return request.param


# The capsule


@pytest.mark.parametrize(
    ("max_version", "name"),
    [
        (None, b"dltensor"),
        ((0, 8), b"dltensor"),
        ((0, 9), b"dltensor"),
        ((1, 0), b"dltensor_versioned"),
        ((1, 3), b"dltensor_versioned"),
        ((2, 0), b"dltensor_versioned"),
    ],
)
def test_the_form_follows_the_version_that_the_consumer_knows(pool, max_version, name):
    capsule = pool.empty(5).__dlpack__(max_version=max_version)
    assert name_of(capsule) == name


def test_without_arguments_the_capsule_is_of_the_old_form(pool):
    assert name_of(pool.empty(5).__dlpack__()) == b"dltensor"


def test_the_versioned_form_is_of_major_version_one_and_has_no_flags(pool):
    capsule = pool.empty(5).__dlpack__(max_version=(1, 0))
    managed = look(capsule)
    assert (managed.version[0], managed.flags) == (1, 0)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_a_capsule_describes_the_array(pool, max_version, dtype):
    array = pool.empty((2, 3, 4), dtype)
    capsule = array.__dlpack__(max_version=max_version)
    tensor = look(capsule).tensor
    assert (tensor.code, tensor.bits, tensor.lanes) == ELEMENT_TYPES[dtype][0]
    assert (tensor.data, tensor.byte_offset, tuple(tensor.device)) == (array.ptr, 0, CPU)
    assert (tensor.ndim, tensor.shape[:3], tensor.strides[:3]) == (3, [2, 3, 4], [12, 4, 1])


@pytest.mark.parametrize(
    ("shape", "strides"), [((4, 0, 3), [3, 3, 1]), ((0,), [1]), ((0, 0), [1, 1]), ((3, 2, 0), [2, 1, 1]), ((), [])]
)
def test_strides_are_always_filled(pool, max_version, shape, strides):
    capsule = pool.empty(shape, "float32").__dlpack__(max_version=max_version)
    tensor = look(capsule).tensor
    assert (tensor.shape[: len(shape)], tensor.strides[: len(shape)]) == (list(shape), strides)
    assert (tensor.data is None) == (0 in shape)


def test_it_is_on_the_cpu(pool):
    assert pool.empty(5).__dlpack_device__() == CPU


@pytest.mark.parametrize("dl_device", [None, CPU])
@pytest.mark.parametrize("copy", [None, False])
def test_the_cpu_without_a_copy_is_what_it_gives(pool, max_version, dl_device, copy):
    array = pool.empty(5)
    capsule = array.__dlpack__(stream=None, max_version=max_version, dl_device=dl_device, copy=copy)
    assert look(capsule).tensor.data == array.ptr


@pytest.mark.parametrize(
    "wish", [{"dl_device": CUDA}, {"dl_device": PINNED_BY_CUDA}, {"dl_device": (1, 1)}, {"copy": True}, {"stream": 1}]
)
def test_what_cannot_be_exported_is_a_buffer_error(pool, max_version, wish):
    array = pool.empty(5)
    with pytest.raises(BufferError):
        array.__dlpack__(max_version=max_version, **wish)
    del array
    assert pool.stats()["blocks"] == 0


# What becomes of the memory


def test_a_capsule_that_nobody_consumes_frees_the_memory(pool, max_version):
    capsule = pool.empty(5).__dlpack__(max_version=max_version)
    assert pool.stats()["blocks"] == 1
    del capsule
    assert pool.stats()["blocks"] == 0


def test_a_consumer_frees_it_with_the_deleter(pool, max_version):
    capsule = pool.empty(5).__dlpack__(max_version=max_version)
    managed = consume(capsule)
    del capsule
    assert pool.stats()["blocks"] == 1
    delete(managed)
    assert pool.stats()["blocks"] == 0


def test_the_deleter_may_be_called_with_the_interpreter_held(pool, max_version):
    managed = consume(pool.empty(5).__dlpack__(max_version=max_version))
    delete(managed, ATTACHED)
    assert pool.stats()["blocks"] == 0


def test_the_deleter_may_be_called_on_another_thread(pool, max_version):
    managed = consume(pool.empty(5).__dlpack__(max_version=max_version))
    thread = threading.Thread(target=delete, args=(managed,))
    thread.start()
    thread.join()
    assert pool.stats()["blocks"] == 0


def test_the_deleter_may_be_called_on_a_thread_that_python_does_not_know(pool, max_version):
    managed = consume(pool.empty(5).__dlpack__(max_version=max_version))
    libc, thread = ctypes.CDLL(None), c_size_t()
    deleter, argument = c_void_p(managed.deleter), c_void_p(ctypes.addressof(managed))
    assert libc.pthread_create(ctypes.byref(thread), None, deleter, argument) == 0
    assert libc.pthread_join(thread, None) == 0
    assert pool.stats()["blocks"] == 0


def test_a_capsule_is_consumed_once(pool, max_version):
    capsule = pool.empty(5).__dlpack__(max_version=max_version)
    tensor = from_dlpack(capsule)
    with pytest.raises(RuntimeError, match="consumed"):
        from_dlpack(capsule)
    assert pool.stats()["blocks"] == 1
    del tensor
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("dtype", NOT_IN_NUMPY)
def test_a_consumer_that_fails_leaves_nothing_behind(pool, dtype):
    array = pool.empty(5, dtype)
    with pytest.raises(RuntimeError, match="Unsupported"):  # set while the capsule is being destroyed
        np.from_dlpack(array)
    gc.collect()
    assert pool.stats()["blocks"] == 1
    del array
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("consumer", [torch.from_dlpack, np.from_dlpack])
def test_a_consumer_that_insists_on_a_copy_leaves_nothing_behind(pool, consumer):
    array = pool.empty(5)
    with pytest.raises(BufferError, match="copy"):
        consumer(array, copy=True)
    del array
    assert pool.stats()["blocks"] == 0


def test_many_capsules_of_one_array_are_independent(pool):
    array = pool.empty(5)
    capsules = [array.__dlpack__(max_version=version) for version in (None, (1, 0)) * 5]
    first = consume(capsules[0])
    del array, capsules
    assert pool.stats()["blocks"] == 1
    delete(first)
    assert pool.stats()["blocks"] == 0


# What consumers see


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_torch_sees_every_element_type(pool, dtype):
    array = pool.empty((2, 3), dtype)
    tensor = torch.from_dlpack(array)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (getattr(torch, dtype), (2, 3), array.ptr)
    assert tensor.untyped_storage().nbytes() == array.nbytes
    assert array.nbytes == 6 * tensor.element_size()
    assert tensor._base is None


@pytest.mark.parametrize("dtype", IN_NUMPY)
def test_numpy_sees_the_element_types_that_it_has(pool, dtype):
    array = pool.empty((2, 3), dtype)
    view = np.from_dlpack(array)
    assert (view.dtype, view.shape, view.ctypes.data) == (np.dtype(dtype), (2, 3), array.ptr)
    assert (view.nbytes, view.flags.writeable) == (array.nbytes, True)


@pytest.mark.parametrize("dtype", IN_NUMPY)
def test_what_torch_writes_numpy_reads_and_the_other_way_round(pool, dtype):
    array = pool.empty((2, 3), dtype)
    tensor, view = torch.from_dlpack(array), np.from_dlpack(array)
    tensor.copy_(torch.tensor([[0, 1, 0], [1, 1, 0]]))
    assert view.tolist() == [[0, 1, 0], [1, 1, 0]]
    view[:] = np.logical_not(view)
    assert tensor.tolist() == [[1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("dtype", NOT_IN_NUMPY)
def test_bits_of_a_type_that_numpy_lacks_survive_torch(pool, dtype):
    array = pool.empty(64, dtype)
    tensor = torch.from_dlpack(array)
    tensor.view(torch.uint8).copy_(torch.arange(array.nbytes, dtype=torch.uint8))
    assert ctypes.string_at(array.ptr, array.nbytes) == bytes(range(array.nbytes))


@pytest.mark.parametrize("shape", [0, (0, 3), (3, 0, 2), (0,) * 20, (5, 1, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_array_without_elements_costs_nothing_and_keeps_its_shape(pool, shape, dtype):
    before = pool.stats()["os_calls"]
    array = pool.empty(shape, dtype)
    expected = (shape,) if isinstance(shape, int) else shape
    assert (array.nbytes, array.ptr, array.shape) == (0, 0, expected)
    assert torch.from_dlpack(array).shape == np.asarray(array).shape == expected
    assert not pool.is_pinned(array)
    stats = pool.stats()
    assert (stats["blocks"], stats["reserved_bytes"], stats["os_calls"]) == (0, 0, before)


@pytest.mark.parametrize("shape", [(), (1,), (1,) * 64, (2, 1, 3)])
def test_any_rank_goes_through(pool, shape):
    array = pool.zeros(shape, "int16")
    assert torch.from_dlpack(array).shape == np.from_dlpack(array).shape == shape


def test_consumers_see_exactly_the_bytes_that_were_asked_for(pool):
    array = pool.empty(8_000_000)
    seen = [
        array.nbytes,
        memoryview(array).nbytes,
        np.asarray(array).nbytes,
        np.from_dlpack(array).nbytes,
        torch.from_dlpack(array).untyped_storage().nbytes(),
        torch.frombuffer(array, dtype=torch.uint8).nbytes,
    ]
    assert seen == [8_000_000] * len(seen)
