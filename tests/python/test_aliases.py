"""Memory stays while any alias of it lives, and is back in its pool when the last one goes."""

import ctypes
import gc
import threading

import numpy as np
import pytest
import torch
from torch.utils.dlpack import to_dlpack

import pinpool.torch

COUNT = 5000
NBYTES = 4 * COUNT
PATTERN = bytes(range(250)) * (NBYTES // 250)


def with_set(tensor):
    other = torch.empty(0)
    other.set_(tensor)
    return other


def with_data(tensor):
    other = torch.empty(7)
    other.data = tensor
    return other


def with_swap(tensor):
    other = torch.empty(7)
    torch.utils.swap_tensors(other, tensor)
    return other


def with_module(tensor):
    module = torch.nn.Module()
    module.register_buffer("weights", tensor)
    return module


def with_state_dict(tensor):
    module = torch.nn.Linear(COUNT, 1, bias=False)
    module.load_state_dict({"weight": tensor.view(1, -1)}, assign=True)
    return module.state_dict()


def with_graph(tensor):
    factor = torch.ones(COUNT, requires_grad=True)
    return (tensor * factor).sum()  # the graph saves the tensor for backward


def in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.view(50, 100)


OF_A_TENSOR = {
    "the tensor": lambda t: t,
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "view": lambda t: t.view(50, 100),
    "view as another dtype": lambda t: t.view(torch.bfloat16),
    "narrow": lambda t: t.narrow(0, 4000, 10),
    "slice of a slice": lambda t: t[10:][::7][3:5],
    "one element": lambda t: t[4999],
    "transpose": lambda t: t.view(50, 100).t(),
    "expand": lambda t: t[:1].expand(8),
    "as_strided": lambda t: t.as_strided((3, 3), (1, 2), 40),
    "chunks": lambda t: t.chunk(3)[1],
    "Parameter": torch.nn.Parameter,
    "Parameter.data": lambda t: torch.nn.Parameter(t).data,
    "Buffer": torch.nn.Buffer,
    "set_": with_set,
    "assigned to data": with_data,
    "swap_tensors": with_swap,
    "buffer of a module": with_module,
    "state_dict": with_state_dict,
    "saved for backward": with_graph,
    "inference_mode": in_inference_mode,
    "untyped_storage": lambda t: t.untyped_storage(),
    "tensor of its storage": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "torch.from_dlpack": torch.from_dlpack,
    "torch capsule": to_dlpack,
    "numpy": lambda t: t.numpy(),
    "slice of numpy": lambda t: t.numpy()[100:200:3],
    "numpy.asarray": np.asarray,
    "numpy.from_dlpack": np.from_dlpack,
    "memoryview of numpy": lambda t: memoryview(t.numpy()),
    "torch of numpy of torch": lambda t: torch.from_numpy(t.numpy()),
}

OF_AN_ARRAY = {
    "the array": lambda a: a,
    "capsule": lambda a: a.__dlpack__(),
    "versioned capsule": lambda a: a.__dlpack__(max_version=(1, 0)),
    "torch.from_dlpack": torch.from_dlpack,
    "torch of a capsule": lambda a: torch.utils.dlpack.from_dlpack(a.__dlpack__()),
    "torch.as_tensor": torch.as_tensor,
    "torch.frombuffer": lambda a: torch.frombuffer(a, dtype=torch.int16),
    "numpy.asarray": np.asarray,
    "numpy.from_dlpack": np.from_dlpack,
    "numpy.frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "slice of numpy": lambda a: np.asarray(a)[4000:][::-2],
    "numpy structure": lambda a: np.asarray(a).view([("x", "f4"), ("y", "f4")])["y"],
    "memoryview": memoryview,
    "slice of a memoryview": lambda a: memoryview(a)[17:18],
    "cast memoryview": lambda a: memoryview(a).cast("B"),
    "ctypes": lambda a: (ctypes.c_char * NBYTES).from_buffer(a),
    "torch of numpy": lambda a: torch.from_numpy(np.asarray(a)),
    "numpy of torch": lambda a: torch.from_dlpack(a).numpy(),
}


def made_by_the_exchange_api(pool):
    return pinpool.torch.empty(pool, COUNT, torch.float32)


def made_by_a_capsule(pool):
    return pinpool.torch._tensors._empty_by_capsule(pool, COUNT, torch.float32)


def made_by_the_pool(pool):
    return pool.empty(COUNT, "float32")


CASES = [
    *[pytest.param(make, OF_A_TENSOR[name], id=f"{make.__name__}: {name}")
      for make in (made_by_the_exchange_api, made_by_a_capsule) for name in OF_A_TENSOR],
    *[pytest.param(made_by_the_pool, OF_AN_ARRAY[name], id=f"made_by_the_pool: {name}") for name in OF_AN_ARRAY],
]  # fmt: skip


@pytest.mark.parametrize(("make", "alias_of"), CASES)
def test_memory_lives_as_long_as_its_last_alias_and_no_longer(pool, make, alias_of):
    owner = make(pool)
    address = owner.data_ptr() if isinstance(owner, torch.Tensor) else owner.ptr
    ctypes.memmove(address, PATTERN, NBYTES)
    alias = alias_of(owner)
    del owner
    assert pool.stats()["blocks"] == 1
    other = pool.zeros(COUNT, "float32")
    assert ctypes.string_at(address, NBYTES) == PATTERN
    assert pool.is_pinned((address, NBYTES))
    other.release()
    pool.trim()
    assert ctypes.string_at(address, NBYTES) == PATTERN
    del alias
    assert pool.stats()["blocks"] == 0
    assert pool.empty(COUNT, "float32").ptr == address


@pytest.mark.parametrize("make", [made_by_the_exchange_api, made_by_a_capsule])
def test_replacing_the_storage_of_a_tensor_gives_the_memory_back_at_once(pool, make):
    tensor = torch.nn.Parameter(make(pool))
    assert pool.stats()["blocks"] == 1
    tensor.data = torch.ones(3)
    assert pool.stats()["blocks"] == 0


def test_sharing_a_tensor_with_other_processes_moves_it_out_of_the_pool(pool):
    tensor = made_by_the_exchange_api(pool).fill_(7)
    tensor.share_memory_()
    assert pool.stats()["blocks"] == 0
    assert tensor[-1] == 7


def test_the_order_in_which_aliases_go_does_not_matter(pool):
    array = pool.empty(COUNT, "float32")
    aliases = [array, torch.from_dlpack(array), np.asarray(array), memoryview(array), array.__dlpack__()]
    del array
    for index in (3, 0, 2, 1, 0):
        assert pool.stats()["blocks"] == 1
        del aliases[index]
    assert pool.stats()["blocks"] == 0


def test_arrays_that_share_are_one_block(pool):
    array = pool.empty(COUNT, "float32")
    aliases = [torch.from_dlpack(array) for _ in range(100)]
    stats = pool.stats()
    assert (stats["blocks"], stats["requested_bytes"], len(aliases)) == (1, NBYTES, 100)


@pytest.mark.parametrize("make", [made_by_the_exchange_api, made_by_the_pool])
def test_memory_in_a_reference_cycle_comes_back_with_the_garbage(pool, make):
    cycle = [make(pool)]
    cycle.append(cycle)
    del cycle
    assert pool.stats()["blocks"] == 1
    gc.collect()
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("make", [made_by_the_exchange_api, made_by_the_pool])
def test_memory_may_be_dropped_on_another_thread(pool, make):
    held = [make(pool)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.stats()["blocks"] == 0


def test_memory_is_let_go_by_backward(pool):
    saved = made_by_the_exchange_api(pool).fill_(3)
    factor = torch.ones(COUNT, requires_grad=True)
    loss = (saved * factor).sum()
    del saved
    assert pool.stats()["blocks"] == 1
    loss.backward()
    assert pool.stats()["blocks"] == 0
    assert factor.grad.sum() == 3 * COUNT


def test_a_released_array_leaves_the_memory_to_its_aliases(pool):
    array = pool.empty(COUNT, "float32")
    view = memoryview(array).cast("B")
    view[:] = PATTERN
    array.release()
    assert pool.stats()["blocks"] == 1
    assert view == PATTERN
    del view
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("shape", [5, (0, 3)])
@pytest.mark.parametrize(
    "use", [lambda a: a.ptr, lambda a: a.__dlpack__(), torch.from_dlpack, np.asarray, np.from_dlpack, memoryview]
)
def test_a_released_array_cannot_be_used(pool, use, shape):
    array = pool.empty(shape, "float32")
    array.release()
    with pytest.raises(ValueError, match="released"):
        use(array)


@pytest.mark.parametrize("shape", [5, (0, 3)])
def test_a_released_array_of_a_type_that_numpy_lacks_cannot_be_used(pool, shape):
    array = pool.empty(shape, "bfloat16")
    array.release()
    with pytest.raises(ValueError, match="released"):
        np.asarray(array)


def test_a_released_array_is_not_pinned_and_cannot_be(pool):
    array = pool.empty(5)
    array.release()
    assert not pool.is_pinned(array)
    with pytest.raises(ValueError, match=r"released|at least one byte"):
        pool.register(array)


def test_a_released_array_still_tells_what_it_was(pool):
    array = pool.empty((2, 3), "bfloat16")
    array.release()
    assert (array.shape, array.dtype, array.nbytes, array.released) == ((2, 3), "bfloat16", 12, True)
