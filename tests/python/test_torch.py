"""pinpool.torch: tensors in pool memory, copies of tensors, and tensors that have no host memory."""

import gc
import threading
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader

import pinpool.torch
from pinpool import OutOfPinnedMemoryError, PinnedPool

MIB = 1 << 20
DTYPES = [
    *[torch.bool, torch.int8, torch.int16, torch.int32, torch.int64],
    *[torch.uint8, torch.uint16, torch.uint32, torch.uint64],
    *[torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128],
    *[torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
]

# empty


@pytest.fixture(params=["exchange API", "capsule"])
def empty(request):
    return pinpool.torch.empty if request.param == "exchange API" else pinpool.torch._tensors._empty_by_capsule


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex32, torch.float4_e2m1fn_x2])
def test_a_tensor_is_an_ordinary_one_in_pool_memory(pool, empty, dtype):
    tensor = empty(pool, (2, 3), dtype)
    assert type(tensor) is torch.Tensor
    assert (tensor.dtype, tensor.shape, tensor.device.type) == (dtype, (2, 3), "cpu")
    assert (tensor.stride(), tensor.storage_offset(), tensor.requires_grad) == ((3, 1), 0, False)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == pool.stats()["requested_bytes"]
    assert pinpool.torch.is_pinned(tensor)


def test_a_tensor_is_a_root_and_not_a_view(pool, empty):
    tensor = empty(pool, 5, torch.float32)
    assert tensor._base is None
    assert not tensor._is_view()
    assert tensor.is_leaf


@pytest.mark.parametrize("shape", [5, [2, 3], torch.Size((4,)), (), (1,) * 70, np.int64(5)])
def test_a_tensor_takes_any_shape(pool, empty, shape):
    expected = tuple(shape) if hasattr(shape, "__len__") else (int(shape),)
    assert empty(pool, shape, torch.int16).shape == expected


@pytest.mark.parametrize("shape", [0, (0, 3), (3, 0, 2), (0,) * 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_without_elements_costs_nothing(pool, empty, shape, dtype):
    tensor = empty(pool, shape, dtype)
    assert (tensor.numel(), tensor.sum().item(), (tensor + 1).shape) == (0, 0, tensor.shape)
    assert (pool.stats()["blocks"], pool.stats()["reserved_bytes"]) == (0, 0)
    assert not pinpool.torch.is_pinned(tensor)


@pytest.mark.parametrize("shape", [-1, (2, -3), 2**63, (2**40, 2**40), (0, 2**62, 2**62)])
def test_a_bad_shape_is_a_value_error_and_nothing_is_mapped(pool, empty, shape):
    before = pool.stats()
    with pytest.raises(ValueError, match="invalid shape"):
        empty(pool, shape, torch.float32)
    assert pool.stats() == before


@pytest.mark.parametrize("dtype", [torch.qint8, torch.bits8, "float7"])
def test_an_element_type_that_the_pool_lacks_is_a_value_error(pool, empty, dtype):
    with pytest.raises(ValueError, match="is unknown; known are"):
        empty(pool, 5, dtype)


def test_a_tensor_over_the_budget_is_refused_and_nothing_leaks(empty):
    pool = PinnedPool("host", max_bytes=MIB)
    with pytest.raises(OutOfPinnedMemoryError):
        empty(pool, MIB + 1, torch.uint8, timeout=0.001)
    assert pool.stats()["reserved_bytes"] == 0
    assert empty(pool, MIB, torch.uint8).nbytes == MIB


def test_a_tensor_can_be_computed_with(pool, empty):
    a, b = (empty(pool, (3, 3), torch.float32).copy_(torch.arange(9.0).view(3, 3)) for _ in range(2))
    assert torch.equal(a @ b, torch.arange(9.0).view(3, 3) @ torch.arange(9.0).view(3, 3))


def test_a_parameter_in_pool_memory_can_be_trained(pool, empty):
    parameter = torch.nn.Parameter(empty(pool, 4, torch.float32).fill_(8))
    address = parameter.data_ptr()
    for _ in range(3):
        (parameter**2).sum().backward()
        with torch.no_grad():
            parameter -= parameter.grad / 4
        parameter.grad = None
    assert (parameter.data_ptr(), parameter.tolist()) == (address, [1] * 4)


def test_a_tensor_of_inference_mode_is_an_inference_tensor(pool, empty):
    with torch.inference_mode():
        assert empty(pool, 5, torch.float32).is_inference()


def test_no_torch_setting_moves_a_tensor_out_of_the_pool(pool, empty):
    with torch.device("meta"), FakeTensorMode():
        tensor = empty(pool, 5, torch.float32)
    assert not isinstance(tensor, FakeTensor)
    assert pinpool.torch.is_pinned(tensor)


@pytest.mark.parametrize("setting", [lambda: torch.device("meta"), FakeTensorMode, torch.inference_mode])
def test_no_torch_setting_keeps_a_tensor_from_being_registered(setting):
    tensor = torch.ones(1000)
    with setting():
        registration = pinpool.torch.register(tensor)
        assert pinpool.torch.is_pinned(tensor)
    registration.close()


def test_a_tensor_cannot_grow_out_of_its_block(pool, empty):
    tensor = empty(pool, 5, torch.float32)
    with pytest.raises(RuntimeError):
        tensor.resize_(1 << 20)  # torch has changed its shape all the same: it must not be touched any more


def test_a_batch_with_a_pin_memory_method_is_pinned_by_a_data_loader(pool):
    class Batch(list):
        def pin_memory(self):
            return [pinpool.torch.pin(tensor, pool=pool) for tensor in self]

    batches = list(DataLoader([torch.ones(3), torch.zeros(3)], batch_size=2, collate_fn=Batch))
    pinned = batches[0].pin_memory()
    assert [pinpool.is_pinned(tensor) for tensor in pinned] == [True, True]


# pin


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pinned_copy_has_the_same_bits(pool, dtype):
    source = torch.arange(64, dtype=torch.uint8)
    source = source % 2 if dtype == torch.bool else source
    source = source.view(dtype).view(2, -1)
    pinned = pinpool.torch.pin(source, pool=pool)
    assert (pinned.dtype, pinned.shape) == (dtype, source.shape)
    assert torch.equal(pinned.view(torch.uint8), source.view(torch.uint8))
    assert pinpool.torch.is_pinned(pinned)


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(6).view(2, 3).t(),
        torch.arange(100).view(10, 10)[::3, 2:5],
        torch.arange(3).expand(4, 3),
        torch.tensor(5),
        torch.empty(0, 3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_a_pinned_copy_is_contiguous_and_detached(pool, source):
    pinned = pinpool.torch.pin(source, pool=pool)
    assert type(pinned) is torch.Tensor
    assert (pinned.is_contiguous(), pinned.requires_grad, pinned.is_conj(), pinned.is_neg()) == (True, *[False] * 3)
    assert torch.equal(pinned, source.detach().resolve_conj().resolve_neg())
    flat = pinpool.torch.pin(source, match_shape=False, pool=pool)
    assert (flat.shape, flat.tolist()) == ((source.numel(),), pinned.flatten().tolist())


def test_without_a_copy_only_the_shape_is_taken(pool):
    source = torch.ones(2, 3)
    assert pinpool.torch.pin(source, make_copy=False, pool=pool).shape == (2, 3)
    assert pinpool.torch.pin(source, False, False, pool=pool).shape == (6,)


def test_the_default_pool_is_one_for_all_threads():
    pools = []
    threads = [threading.Thread(target=lambda: pools.append(pinpool.torch.default_pool())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pools == [pinpool.torch.default_pool()] * 8
    before = pools[0].stats()["blocks"]
    pinned = pinpool.torch.pin(torch.ones(3))
    assert (pools[0].stats()["blocks"], pinned.tolist()) == (before + 1, [1, 1, 1])


@pytest.mark.parametrize("thing", [np.ones(3), [1, 2], None])
def test_only_tensors_are_pinned_by_copy(pool, thing):
    with pytest.raises(TypeError, match="tensor"):
        pinpool.torch.pin(thing, pool=pool)


def test_the_copy_of_a_meta_tensor_is_one(pool):
    source = torch.empty(2, 3, dtype=torch.int16, device="meta")
    pinned = pinpool.torch.pin(source, match_shape=False, pool=pool)
    assert (pinned.is_meta, pinned.shape, pinned.dtype) == (True, (6,), torch.int16)


def test_the_copy_of_a_fake_tensor_is_one(pool):
    mode = FakeTensorMode()
    with mode:
        source = torch.empty(2, 3, dtype=torch.int16)
        inside = pinpool.torch.pin(source, pool=pool)
    outside = pinpool.torch.pin(source, pool=pool)
    for pinned in (inside, outside):
        assert isinstance(pinned, FakeTensor)
        assert (pinned.shape, pinned.dtype) == ((2, 3), torch.int16)
    assert pool.stats()["blocks"] == 0


# Tensors without host memory of their own


class Wrapper(torch.Tensor):
    """A subclass without memory, of the kind that tells nobody what it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(3)


def nested_tensor(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


# How each is made, and the word that an error has to say.
WITHOUT_MEMORY = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta"),
    "meta parameter": (lambda: torch.nn.Parameter(torch.empty(3, device="meta")), "meta"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "compressed sparse": (lambda: quietly(torch.eye(3).to_sparse_csr), "sparse_csr"),
    "quantized": (lambda: quietly(lambda: torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8)), "quantized"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "mkldnn"),
    "fake": (fake_tensor, "fake"),
    "wrapper subclass": (lambda: TwoTensor(torch.ones(3), torch.ones(3)), "TwoTensor"),
    "opaque wrapper subclass": (lambda: Wrapper(torch.ones(3)), "Wrapper"),
    "nested": (lambda: nested_tensor(torch.strided), "nested"),
    "jagged": (lambda: nested_tensor(torch.jagged), "jagged"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "memory"),
    "zero": (lambda: torch._efficientzerotensor(3), "memory"),
    "lazy parameter": (torch.nn.parameter.UninitializedParameter, "Uninitialized"),
}
COPYABLE = ("meta", "meta parameter", "fake", "zero")


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_host_memory_is_not_pinned(kind):
    make, _ = WITHOUT_MEMORY[kind]
    assert not pinpool.torch.is_pinned(make())


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_registering_a_tensor_without_host_memory_is_a_type_error_that_names_its_kind(kind):
    make, word = WITHOUT_MEMORY[kind]
    with pytest.raises(TypeError, match=word):
        pinpool.torch.register(make())


@pytest.mark.parametrize("kind", [kind for kind in WITHOUT_MEMORY if kind not in COPYABLE])
def test_copying_a_tensor_without_dense_elements_is_a_type_error_that_names_its_kind(pool, kind):
    make, word = WITHOUT_MEMORY[kind]
    with pytest.raises(TypeError, match=word):
        pinpool.torch.pin(make(), pool=pool)
    gc.collect()
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_inside_a_function_transform_nothing_is_pinned(transform):
    answers = []

    def function(tensor):
        answers.append(pinpool.torch.is_pinned(tensor))
        return tensor.sum()

    transform(function)(torch.ones(3))
    assert answers == [False]
