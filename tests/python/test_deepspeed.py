"""pinpool.deepspeed: DeepSpeed's accelerator with its native pinning, on the CPU, and with accelerators made up here.

The tests go by what DeepSpeed's own tests and callers ask of its native pinning. What is not here:

| asked | why not |
|---|---|
| the error when DeepSpeed's op cannot be built | there is no op; a pool that cannot serve is an error all the same |
| that DeepSpeed's AIO handles know the memory | they ask their own C++ manager only, which takes no foreign range |
| odd addresses from a stand-in for the manager's handle | nothing reads the handle, and blocks start on a page |
| that the pinned source is gone after a reload | on the CPU, DeepSpeed's reload copies nothing: it is in use |
"""

import copy
import gc
import importlib
import logging
import sys
import threading
import types
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pinpool
from pinpool import PinnedPool

MIB = 1 << 20
REGISTER = "DS_PIN_MEMORY_REGISTER_DEVICE"


pytestmark = pytest.mark.usefixtures("require_deepspeed")


@pytest.fixture
def theirs(require_deepspeed):
    """Return DeepSpeed's module of native pinning."""
    return importlib.import_module("deepspeed.utils.pin_memory")


@pytest.fixture
def native(monkeypatch, theirs):
    """Enable pinpool, and return what DeepSpeed takes for its manager."""
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    monkeypatch.delenv(REGISTER, raising=False)
    pinpool.deepspeed.enable()
    yield theirs.get_active_native_pinned_memory()
    pinpool.deepspeed.disable()


@pytest.fixture
def accelerator():
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


@pytest.fixture
def hooked(monkeypatch, native):
    """Put an accelerator in place that registers memory, and keeps a list of the calls."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class Hooked(CPU_Accelerator):
        answer, fault, refuses_back, alignment = True, None, False, 1

        def __init__(self):
            super().__init__()
            self.calls = []

        def register_host_memory(self, address, num_bytes):
            self.calls.append(("register", address, num_bytes))
            if self.fault:
                raise self.fault
            return self.answer

        def unregister_host_memory(self, address):
            if self.refuses_back:
                raise RuntimeError("the device is busy")
            self.calls.append(("unregister", address))

        def pin_memory_alignment(self):
            return self.alignment

    made = Hooked()
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: made)
    return made


@pytest.fixture
def warnings_of_deepspeed():
    """Return what DeepSpeed's log warned of, as a list of texts."""
    from deepspeed.utils import logger

    class Keep(logging.Handler):
        def emit(self, record):
            texts.append(record.getMessage())

    texts, keep = [], Keep(logging.WARNING)
    logger.addHandler(keep)
    if hasattr(logger.warning_once, "cache_clear"):
        logger.warning_once.cache_clear()  # what one test has warned of, another may too
    yield texts
    logger.removeHandler(keep)


def numbers():
    return torch.arange(32, dtype=torch.float32).reshape(4, 8)


# Selection


@pytest.mark.parametrize("backend", [None, "torch", "", "nativ", "1"])
def test_another_backend_never_comes_to_pinpool(monkeypatch, native, theirs, accelerator, backend):
    theirs._shared_native_pins = None
    monkeypatch.delenv("DS_PIN_MEMORY_BACKEND")
    if backend is not None:
        monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", backend)
    tensor = numbers()
    assert accelerator.is_pinned(tensor) == tensor.is_pinned()
    assert accelerator.pin_memory(tensor) is tensor
    assert accelerator.unpin_memory(tensor) is None
    assert theirs._shared_native_pins is None


@pytest.mark.parametrize("backend", ["native", " Native ", "NATIVE"])
def test_the_native_backend_is_pinpool(monkeypatch, native, accelerator, backend):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", backend)
    assert pinpool.is_pinned(accelerator.pin_memory(numbers()))


def test_what_cannot_be_pinned_is_an_error_and_never_left_unpinned(monkeypatch, theirs, accelerator):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    pool = PinnedPool("host", max_bytes=MIB)
    pinpool.deepspeed.enable(pool)
    try:
        with pytest.raises(pinpool.OutOfPinnedMemoryError):
            accelerator.pin_memory(torch.empty(2 * MIB, dtype=torch.uint8))
        pool.close()
        for call in [lambda: accelerator.pin_memory(numbers()), lambda: accelerator.pin_empty(4, dtype=torch.int8)]:
            with pytest.raises(ValueError, match="closed"):
                call()
    finally:
        pinpool.deepspeed.disable()


@pytest.mark.parametrize("value", ["maybe", "", "2", "no!"])
def test_a_bad_setting_is_an_error_before_anything_is_locked(monkeypatch, native, accelerator, locked, value):
    monkeypatch.setenv(REGISTER, value)
    before = locked()
    for size in (MIB, 0):
        with pytest.raises(ValueError, match=REGISTER):
            accelerator.pin_memory(torch.empty(size, dtype=torch.uint8))
    with pytest.raises(ValueError, match=REGISTER):
        accelerator.pin_empty(MIB, dtype=torch.uint8)
    assert (locked(), native._ranges) == (before, {})


@pytest.mark.parametrize(
    ("value", "registers"),
    [(None, 1), ("1", 1), (" TRUE ", 1), ("Yes", 1), ("on", 1), ("0", 0), ("False", 0), ("NO ", 0), ("off", 0)],
)
def test_the_setting_is_read_for_each_buffer(monkeypatch, native, hooked, value, registers):
    if value is not None:
        monkeypatch.setenv(REGISTER, value)
    pinned = hooked.pin_memory(numbers())
    assert len(hooked.calls) == registers
    assert hooked.unpin_memory(pinned) is True
    assert len(hooked.calls) == 2 * registers


# Pinning


def test_a_copy_has_the_shape_and_the_values(native, accelerator):
    tensor = numbers()
    pinned = accelerator.pin_memory(tensor)
    assert pinned.shape == tensor.shape
    assert torch.equal(pinned, tensor)
    assert pinned.ds_pinned is True
    assert accelerator.is_pinned(pinned)
    assert native.is_pinned(pinned)


def test_views_are_pinned_and_not_marked(native, accelerator):
    pinned = accelerator.pin_memory(numbers())
    for view in (pinned.reshape(-1).narrow(0, 8, 8), pinned[1], pinned.t(), pinned.view(torch.int32)):
        assert not hasattr(view, "ds_pinned")
        assert accelerator.is_pinned(view)
    for other in (pinned.clone(), pinned.to(torch.float64), numbers()):
        assert not accelerator.is_pinned(other)


@pytest.mark.parametrize(("make_copy", "match_shape"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_flags(native, accelerator, make_copy, match_shape):
    tensor = numbers().t()
    pinned = accelerator.pin_memory(tensor, make_copy=make_copy, match_shape=match_shape)
    assert pinned.shape == (tensor.shape if match_shape else (32,))
    assert pinned.is_contiguous()
    assert accelerator.is_pinned(pinned)
    assert not make_copy or torch.equal(pinned, tensor.reshape(pinned.shape))


@pytest.mark.parametrize("asked", ["manager", "accelerator"])
def test_tensors_without_memory_are_not_pinned(native, accelerator, asked):
    is_pinned = {"manager": native, "accelerator": accelerator}[asked].is_pinned
    with FakeTensorMode() as mode:
        assert is_pinned(mode.from_tensor(numbers())) is False
    assert is_pinned(numbers().to("meta")) is False


def test_an_accelerator_that_registers_nothing_pins_all_the_same(native, accelerator, warnings_of_deepspeed):
    assert accelerator.register_host_memory(1 << 20, 4096) is False
    assert accelerator.unregister_host_memory(1 << 20) is None
    assert accelerator.is_pinned(accelerator.pin_memory(numbers()))
    assert native._device_registered == set()
    assert warnings_of_deepspeed == []


def test_scratch_is_pinned_filled_and_unpinned(native, accelerator):
    scratch = accelerator.pin_memory(numbers(), make_copy=False)
    scratch.copy_(numbers())
    assert accelerator.is_pinned(scratch)
    assert torch.equal(scratch, numbers())
    assert accelerator.unpin_memory(scratch) is True


@pytest.mark.parametrize(
    ("size", "shape"), [((3, 4), (3, 4)), (((3, 4),), (3, 4)), (([5],), (5,)), ((torch.Size([2]),), (2,)), ((), ())]
)
def test_pin_empty_takes_shapes_as_torch_does(native, accelerator, size, shape):
    pinned = accelerator.pin_empty(*size, dtype=torch.bfloat16)
    assert (pinned.shape, pinned.dtype) == (shape, torch.bfloat16)
    assert accelerator.is_pinned(pinned)


def test_pin_empty_like_takes_the_shape_and_the_dtype(native, accelerator):
    for like, dtype in ((numbers(), None), (numbers().to("meta").requires_grad_(), torch.int8)):
        if like.is_meta:  # a template that is not on the host
            like = types.SimpleNamespace(dtype=like.dtype, shape=like.shape, new_empty=numbers().new_empty)
        pinned = accelerator.pin_empty_like(like, dtype=dtype)
        assert (pinned.shape, pinned.dtype) == ((4, 8), dtype or torch.float32)
        assert accelerator.is_pinned(pinned)


@pytest.mark.parametrize("device", ["cuda", "meta", "no such device"])
def test_pin_empty_is_for_the_host(native, accelerator, device):
    for call in (lambda: accelerator.pin_empty(4, dtype=torch.int8, device=device),
                 lambda: accelerator.pin_empty_like(numbers(), device=device)):  # fmt: skip
        with pytest.raises(ValueError, match="device must be cpu"):
            call()


def test_the_example_of_pin_empty_may_be_without_elements(native):
    pinned = native.pin_empty(torch.empty(0, dtype=torch.float16), (3, 5))
    assert (pinned.shape, pinned.dtype) == ((3, 5), torch.float16)
    assert native.is_pinned(pinned)


DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int64", "uint16", "bool", "complex64", "float8_e5m2"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_is_a_root_of_its_exact_size(native, accelerator, dtype):
    tensor = torch.arange(15).reshape(3, 5).to(getattr(torch, dtype))
    pinned = accelerator.pin_memory(tensor)
    assert pinned._base is None
    assert pinned.untyped_storage().nbytes() == tensor.nbytes
    assert pinned.data_ptr() % 4096 == 0
    assert torch.equal(pinned.view(torch.uint8), tensor.view(torch.uint8))


# Releasing


def test_unpinning_ends_the_views_too_and_only_once(native, accelerator):
    pinned = accelerator.pin_memory(numbers())
    view = pinned.reshape(-1).narrow(0, 8, 8)
    assert accelerator.unpin_memory(pinned) is True
    assert not accelerator.is_pinned(pinned)
    assert not accelerator.is_pinned(view)
    assert pinned.ds_pinned is False
    assert torch.equal(view, torch.arange(8.0, 16.0))
    assert accelerator.unpin_memory(pinned) is False
    assert accelerator.unpin_memory(view) is False


def test_what_is_no_buffer_is_not_unpinned(native, accelerator):
    pinned = accelerator.pin_memory(numbers())
    for other in (numbers(), pinned[1], numbers().to("meta"), torch.empty(0)):
        assert accelerator.unpin_memory(other) is False
    assert accelerator.is_pinned(pinned)


def test_a_dropped_buffer_leaves_the_books(native, accelerator):
    pinned = accelerator.pin_memory(numbers())
    base = pinned.data_ptr()
    assert native._ranges == {base: base + 128}
    del pinned
    gc.collect()
    assert native._ranges == {}


def test_a_view_keeps_the_buffer(native, accelerator):
    pinned = accelerator.pin_memory(numbers().reshape(-1))
    base, view = pinned.data_ptr(), pinned.narrow(0, 8, 8)
    del pinned
    gc.collect()
    assert base in native._ranges
    assert accelerator.is_pinned(view)
    assert view[0].item() == 8
    del view
    gc.collect()
    assert base not in native._ranges


def test_unpinning_finds_the_memory_that_the_tensor_had(native, accelerator):
    pinned = accelerator.pin_memory(numbers())
    base, view = pinned.data_ptr(), pinned.reshape(-1).narrow(0, 0, 4)
    pinned.data = torch.zeros(32)
    assert accelerator.unpin_memory(pinned) is True
    assert base not in native._ranges
    assert not accelerator.is_pinned(view)
    assert view.tolist() == [0, 1, 2, 3]


# Registration by the accelerator


def test_each_buffer_is_registered_at_its_exact_size(native, hooked):
    pinned = hooked.pin_memory(torch.arange(32.0))
    base = pinned.data_ptr()
    assert hooked.calls == [("register", base, 128)]
    assert native._device_registered == {base}
    assert hooked.unpin_memory(pinned) is True
    assert native._device_registered == set()
    assert hooked.unpin_memory(pinned) is False
    assert hooked.calls[1:] == [("unregister", base)]


def test_a_dropped_buffer_is_unregistered_once(native, hooked):
    pinned = hooked.pin_memory(numbers())
    base, view = pinned.data_ptr(), pinned[2]
    del pinned
    gc.collect()
    assert hooked.calls[1:] == []
    del view
    gc.collect()
    assert hooked.calls[1:] == [("unregister", base)]
    assert (native._ranges, native._device_registered) == ({}, set())


def test_what_fails_to_register_is_pinned_all_the_same(native, hooked, warnings_of_deepspeed):
    hooked.fault = RuntimeError("no room on the device")
    buffers = [hooked.pin_memory(numbers()) for _ in range(2)]
    assert all(hooked.is_pinned(buffer) for buffer in buffers)
    assert native._device_registered == set()
    assert all(hooked.unpin_memory(buffer) is True for buffer in buffers)
    assert {call for call, *_ in hooked.calls} == {"register"}
    assert len(warnings_of_deepspeed) == 1
    assert "no room on the device" in warnings_of_deepspeed[0]


def test_what_fails_to_unregister_stays_pinned_until_it_works(native, hooked):
    pinned = hooked.pin_memory(numbers())
    base = pinned.data_ptr()
    hooked.refuses_back = True
    with pytest.raises(RuntimeError, match="the device is busy"):
        hooked.unpin_memory(pinned)
    assert hooked.is_pinned(pinned)
    assert base in native._ranges
    assert base in native._device_registered
    hooked.refuses_back = False
    assert hooked.unpin_memory(pinned) is True
    assert hooked.calls[1:] == [("unregister", base)]


def test_dropped_memory_that_fails_to_unregister_is_kept_from_others(native, hooked, warnings_of_deepspeed):
    pinned = hooked.pin_memory(numbers())
    base = pinned.data_ptr()
    hooked.refuses_back = True
    del pinned
    gc.collect()
    assert native._device_registered == {base}
    assert pinpool.is_pinned((base, 128))
    assert base not in [buffer.data_ptr() for buffer in [hooked.pin_memory(numbers()) for _ in range(20)]]
    assert "the device is busy" in warnings_of_deepspeed[0]
    hooked.refuses_back = False
    [buffer.let_go() for buffer in pinpool.deepspeed._books.all()]
    assert native._ranges == {}


def test_a_registered_buffer_survives_that_its_storage_is_given_other_memory(native, hooked):
    pinned = hooked.pin_memory(numbers())
    base = pinned.data_ptr()
    pinned.share_memory_()
    assert pinned.data_ptr() != base
    assert pinpool.is_pinned((base, 128))
    del pinned
    gc.collect()
    assert hooked.calls[1:] == [("unregister", base)]
    assert native._ranges == {}


def test_memory_that_a_tensor_has_left_is_not_unlocked_under_its_next_owner(native, accelerator):
    left = accelerator.pin_empty(4 * MIB, dtype=torch.uint8)
    base = left.data_ptr()
    left.share_memory_()
    others = [accelerator.pin_empty(4 * MIB, dtype=torch.uint8) for _ in range(2)]
    assert base not in {other.data_ptr() for other in others}
    assert accelerator.unpin_memory(others[0]) is True
    del left
    gc.collect()
    assert accelerator.is_pinned(others[1])
    assert list(native._ranges) == [others[1].data_ptr()]


def test_unpinning_in_the_middle_of_unpinning_does_nothing(native, hooked):
    pinned, inner = hooked.pin_memory(numbers()), []
    unregister = hooked.unregister_host_memory

    def unregister_and_unpin(address):
        inner.append(hooked.unpin_memory(pinned))
        unregister(address)

    hooked.unregister_host_memory = unregister_and_unpin
    assert hooked.unpin_memory(pinned) is True
    assert inner == [False]


def test_the_cuda_accelerator_is_asked_as_deepspeed_asks_it(monkeypatch, native):
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    calls, checked = [], []
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(args) or 0, cudaHostUnregister=lambda *args: calls.append(args) or 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", checked.append)
    cuda = CUDA_Accelerator.__new__(CUDA_Accelerator)
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: cuda)
    pinned = native.pin(numbers())
    assert native.unpin(pinned) is True
    assert calls == [(pinned.data_ptr(), 128, 0), (pinned.data_ptr(),)]
    assert checked == [0, 0]


def test_an_accelerator_of_before_the_alignment_will_do(monkeypatch, native):
    calls = []
    old = types.SimpleNamespace(
        register_host_memory=lambda *args: calls.append(args) or True, unregister_host_memory=calls.append
    )
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: old)
    pinned = native.pin(numbers())
    assert calls == [(pinned.data_ptr(), 128)]
    assert native._device_registered == {pinned.data_ptr()}


@pytest.mark.parametrize("alignment", [512, 4096, 1 << 40])
def test_nothing_in_front_of_a_buffer_is_registered(native, hooked, warnings_of_deepspeed, alignment):
    hooked.alignment = alignment
    pinned = hooked.pin_memory(numbers())
    assert hooked.is_pinned(pinned)
    if alignment <= 4096:
        assert hooked.calls == [("register", pinned.data_ptr(), 128)]
    else:
        assert hooked.calls == []
        assert str(alignment) in warnings_of_deepspeed[0]


# Registration by the pool


XPU = """
import deepspeed
import deepspeed.accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
import torch
import pinpool.deepspeed

class Xpu(CPU_Accelerator):
    def device_name(self, device_index=None): return "xpu"
    def current_device(self): return 1

os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
xpu = Xpu()
deepspeed.accelerator.get_accelerator = lambda: xpu
"""


@pytest.fixture
def on_xpu(run_with_driver, fake_level_zero):
    """Run a script with an accelerator `xpu` that registers nothing, and a Level Zero driver behind it."""

    def on_xpu(script, settings="devices=2", **environment):
        fake = f"FakeLevelZero({str(fake_level_zero)!r})"
        environment |= {"ZE_ENABLE_ALT_DRIVERS": fake_level_zero, "FAKE_LEVEL_ZERO": settings, "DS_ACCELERATOR": "cpu"}
        return run_with_driver(script, fake, XPU, **environment)

    return on_xpu


@pytest.mark.parametrize("hook", ["inherited", "says no"])
def test_level_zero_registers_where_the_accelerator_cannot(on_xpu, hook):
    on_xpu(
        """
        if HOOK == "says no":
            Xpu.register_host_memory = lambda self, address, num_bytes: False
        pinpool.deepspeed.enable()
        pinned = [xpu.pin_memory(torch.arange(32.0)) for _ in range(2)]
        view = pinned[0][3:]
        assert all(is_registered(buffer, "xpu:1") and xpu.is_pinned(buffer) for buffer in [*pinned, view])
        assert not is_registered(pinned[0], "xpu:0")
        manager = deepspeed.utils.pin_memory.get_active_native_pinned_memory()
        assert len(manager._ranges) == 2
        assert xpu.unpin_memory(pinned[0]) is True and xpu.unpin_memory(pinned[0]) is False
        assert not xpu.is_pinned(pinned[0]) and not xpu.is_pinned(view) and xpu.is_pinned(pinned[1])
        assert view[0].item() == 3
        del pinned, view
        gc.collect()
        assert manager._ranges == {}
        large = xpu.pin_empty(32 * MIB, dtype=torch.uint8)
        assert is_registered(large, "xpu:1") and xpu.unpin_memory(large) is True and not xpu.is_pinned(large)
        del large
        os.environ["DS_PIN_MEMORY_REGISTER_DEVICE"] = "off"
        locked = xpu.pin_memory(torch.arange(32.0))
        assert xpu.is_pinned(locked) and not is_registered(locked, "xpu:1")
        del locked
        pinpool.deepspeed.disable()
        assert driver.calls("zeMemFree") > 0
    """.replace("HOOK", repr(hook))
    )


@pytest.mark.parametrize("settings", ["devices=2,extension=0,host_pointer=0,import=0", "devices=2,zeInit=0x78000001"])
def test_without_registration_memory_is_locked_and_the_log_says_why(on_xpu, settings):
    out = on_xpu("""
        pinpool.deepspeed.enable()
        pinned = [xpu.pin_memory(torch.arange(32.0)) for _ in range(2)]
        assert all(xpu.is_pinned(buffer) and not is_registered(buffer, "xpu:1") for buffer in pinned)
        assert xpu.unpin_memory(pinned[0]) is True
        del pinned
        pinpool.deepspeed.disable()
    """, settings)  # fmt: skip
    assert out.count("pinned memory is not registered with xpu:1, it is only locked: ") == 1


def test_a_pool_with_devices_registers_instead_of_the_accelerator(on_xpu):
    on_xpu("""
        Xpu.register_host_memory = lambda self, address, num_bytes: 1 / 0
        pool = PinnedPool("xpu:0")
        pinpool.deepspeed.enable(pool)
        pinned = xpu.pin_memory(torch.arange(32.0))
        assert is_registered(pinned, "xpu:0")
        del pinned
        os.environ["DS_PIN_MEMORY_REGISTER_DEVICE"] = "0"
        assert "DS_PIN_MEMORY_REGISTER_DEVICE is off" in refusal(xpu.pin_memory, torch.arange(32.0))
        gc.collect()
        assert pool.stats()["blocks"] == 0
        pinpool.deepspeed.disable()
        assert not pool.closed and pool.stats()["cached_bytes"] > 0
        pool.close()
    """)


# What DeepSpeed's own op gets wrong

ALIASES = {
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "numpy": lambda t: torch.from_numpy(t.numpy()),
    "Parameter": torch.nn.Parameter,
    "view(dtype)": lambda t: t.view(torch.int32).view(torch.float32),
    "set_": lambda t: torch.empty(0).set_(t),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (4, 8)),
    "rebound": lambda t: rebound(torch.empty(4, 8), t),
    "inference mode": lambda t: viewed_in_inference_mode(t),
}


def rebound(tensor, other):
    tensor.data = other
    return tensor


def viewed_in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.view(-1).view(4, 8)


@pytest.mark.parametrize("alias", ALIASES)
def test_memory_lives_as_long_as_any_alias(native, accelerator, alias):
    tensor = torch.rand(4, 8)
    pinned = accelerator.pin_memory(tensor)
    base, other = pinned.data_ptr(), ALIASES[alias](pinned)
    del pinned
    gc.collect()
    others = [accelerator.pin_memory(torch.full((4, 8), torch.nan)) for _ in range(20)]
    assert torch.equal(other, tensor)
    assert accelerator.is_pinned(other)
    assert base not in [buffer.data_ptr() for buffer in others]
    del other
    gc.collect()
    assert base not in native._ranges


def test_memory_that_is_pinned_in_inference_mode_lives(native, accelerator):
    with torch.inference_mode():
        pinned = accelerator.pin_memory(numbers())
        others = [accelerator.pin_memory(torch.full((4, 8), torch.nan)) for _ in range(20)]
        assert torch.equal(pinned, numbers())
        assert accelerator.is_pinned(pinned)
    assert len(native._ranges) == 21
    del pinned, others
    gc.collect()
    assert native._ranges == {}


def test_a_limit_is_an_error_that_names_it(run):
    run("""
        import torch, pinpool.deepspeed
        from deepspeed.accelerator import get_accelerator
        pinpool.deepspeed.enable()
        become_unprivileged(MIB)
        before = status("VmLck")
        for _ in range(3):
            try:
                get_accelerator().pin_memory(torch.empty(32 * MIB, dtype=torch.uint8))
            except pinpool.PinpoolError as error:
                assert "ulimit -l" in str(error) or "RLIMIT_MEMLOCK" in str(error), error
            else:
                raise AssertionError("no error")
        assert status("VmLck") == before
        assert get_accelerator().is_pinned(get_accelerator().pin_memory(torch.zeros(5)))
        os._exit(0)  # DeepSpeed's handlers write to the home folder, which is root's
    """, DS_ACCELERATOR="cpu", DS_PIN_MEMORY_BACKEND="native")  # fmt: skip


@pytest.mark.parametrize("size", [4096, 65536, 4 * MIB])
def test_a_stale_handle_does_not_unpin_what_came_after_it(native, accelerator, size):
    stale = accelerator.pin_memory(torch.empty(size, dtype=torch.uint8))
    assert accelerator.unpin_memory(stale) is True
    base = stale.data_ptr()
    stale.data = torch.empty(1, dtype=torch.uint8)  # the memory is free now, the handle is still there
    others = [accelerator.pin_memory(torch.empty(size, dtype=torch.uint8)) for _ in range(8)]
    assert accelerator.unpin_memory(stale) is False
    assert all(accelerator.is_pinned(other) for other in others)
    assert stale.ds_pin_base == base


def test_a_copy_of_a_handle_is_no_handle(native, accelerator):
    pinned = accelerator.pin_memory(numbers())
    assert accelerator.unpin_memory(copy.deepcopy(pinned)) is False
    assert accelerator.is_pinned(pinned)


def test_threads_pin_ask_and_unpin_at_once(native, accelerator):
    failures = []

    def churn():
        try:
            for _ in range(300):
                pinned = accelerator.pin_memory(numbers(), make_copy=False)
                assert accelerator.is_pinned(pinned)
                assert not accelerator.is_pinned(unpinned)
                assert accelerator.unpin_memory(pinned) is True
        except BaseException as error:
            failures.append(error)

    unpinned = numbers()
    threads = [threading.Thread(target=churn) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == []
    assert native._ranges == {}


def test_of_many_threads_one_unpins(native, hooked):
    for _ in range(50):
        pinned = hooked.pin_memory(numbers())
        answers, barrier = [], threading.Barrier(4)

        def unpin(pinned=pinned, answers=answers, barrier=barrier):
            barrier.wait()
            answers.append(hooked.unpin_memory(pinned))

        threads = [threading.Thread(target=unpin) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert sorted(answers) == [False, False, False, True]
    assert len(hooked.calls) == 100


def test_a_tensor_that_runs_past_the_buffer_is_not_pinned(native, accelerator):
    pinned = accelerator.pin_memory(torch.empty(MIB, dtype=torch.uint8))
    past = torch.empty(0, dtype=torch.uint8).set_(pinned.untyped_storage(), MIB - 10, (10,))
    assert accelerator.is_pinned(past)
    beyond = pinpool.is_pinned((pinned.data_ptr() + MIB - 10, 1 << 40))
    assert beyond is False


@pytest.mark.parametrize("pool", ["None", "pinpool.PinnedPool('host', max_bytes=MIB)"])
def test_a_forked_child_owns_nothing(run, pool):
    run("""
        import torch, pinpool.deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.utils.pin_memory import get_active_native_pinned_memory
        pool, calls = POOL, []
        pinpool.deepspeed.enable(pool)
        accelerator = get_accelerator()
        accelerator.register_host_memory = lambda *args: calls.append(args) or True
        accelerator.unregister_host_memory = calls.append
        pinned, dropped = accelerator.pin_memory(torch.arange(32.0)), [accelerator.pin_memory(torch.zeros(5))]

        def child():
            assert not accelerator.is_pinned(pinned)
            assert get_active_native_pinned_memory()._ranges == {}
            assert accelerator.unpin_memory(pinned) is False
            assert pinned[31].item() == 31
            dropped.clear()
            assert len(calls) == 2
            if pool is None:
                assert accelerator.is_pinned(accelerator.pin_memory(pinned))
            else:
                try:
                    accelerator.pin_memory(pinned)
                except pinpool.PinpoolError as error:
                    assert "parent" in str(error) or "fork" in str(error), error
                else:
                    raise AssertionError("no error")

        in_child(child)
        assert len(calls) == len(dropped) + 1 == 2
        assert accelerator.is_pinned(pinned) and accelerator.unpin_memory(pinned) is True
    """.replace("POOL", pool), DS_ACCELERATOR="cpu", DS_PIN_MEMORY_BACKEND="native")  # fmt: skip


def test_buffers_that_are_alive_at_the_end_of_the_process_do_no_harm(run):
    run("""
        import torch, pinpool.deepspeed
        from deepspeed.accelerator import get_accelerator
        pinpool.deepspeed.enable()
        accelerator = get_accelerator()
        accelerator.register_host_memory = lambda *args: True
        accelerator.unregister_host_memory = lambda address: None
        pinned = [accelerator.pin_memory(torch.zeros(5)) for _ in range(3)]
        torch.keep, cycle = pinned[0], [pinned[1]]
        cycle.append(cycle)
        assert accelerator.unpin_memory(pinned[2]) is True
    """, DS_ACCELERATOR="cpu", DS_PIN_MEMORY_BACKEND="native")  # fmt: skip


@pytest.mark.locks(300 * MIB)
def test_other_threads_run_while_memory_is_locked(native, accelerator, turns):
    before = turns()
    pinned = accelerator.pin_empty(256 * MIB, dtype=torch.uint8)
    while_locking = turns()
    assert accelerator.unpin_memory(pinned) is True
    assert while_locking > before + 10


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5)])
def test_a_buffer_without_bytes_costs_nothing(native, accelerator, locked, shape):
    before = locked()
    pinned = [accelerator.pin_memory(torch.empty(shape)) for _ in range(5)]
    assert all(buffer.shape == shape for buffer in pinned)
    assert (locked(), native._ranges) == (before, {})
    assert accelerator.unpin_memory(pinned[0]) is False


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (ValueError, lambda native: native.pin_empty(torch.empty(0), (-1,))),
        (ValueError, lambda native: native.pin_empty(torch.empty(0), (1 << 62, 1 << 62))),
        (TypeError, lambda native: native.pin(torch.quantize_per_tensor(numbers(), 0.1, 0, torch.quint8))),
        (TypeError, lambda native: native.pin(numbers().to_sparse())),
        (TypeError, lambda native: native.pin([1, 2])),
    ],
    ids=["negative", "too large", "quantized", "sparse", "no tensor"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize")
def test_what_makes_no_buffer_is_an_error(native, locked, error, call):
    before = locked()
    with pytest.raises(error):
        call(native)
    assert (locked(), native._ranges) == (before, {})


@pytest.mark.parametrize("make_copy", [True, False])
def test_a_copy_is_not_recorded_by_autograd(native, accelerator, make_copy):
    for tensor in (numbers().requires_grad_(), torch.nn.Parameter(numbers())):
        pinned = accelerator.pin_memory(tensor, make_copy=make_copy)
        assert pinned.is_leaf
        assert pinned.grad_fn is None
        assert not pinned.requires_grad
        assert type(pinned) is torch.Tensor


def test_tensors_without_memory_give_their_own_kind(native, accelerator):
    pinned = native.pin(numbers().to("meta"), match_shape=False)
    assert (pinned.is_meta, pinned.shape) == (True, (32,))
    with FakeTensorMode() as mode:
        assert native.pin(mode.from_tensor(numbers())).shape == (4, 8)
    assert native._ranges == {}


# Memory


def test_what_served_is_kept_and_what_did_not_is_given_back(native, accelerator, locked):
    before = locked()
    addresses = set()
    for _ in range(10):
        addresses.add(accelerator.pin_empty(4 * MIB, dtype=torch.uint8).data_ptr())
    assert len(addresses) == 1
    larger = accelerator.pin_empty(6 * MIB, dtype=torch.uint8)
    assert locked() == before + 6 * MIB
    assert accelerator.unpin_memory(larger) is True
    assert locked() == before


@pytest.mark.locks(32 * MIB)
def test_what_is_dropped_after_an_unpin_does_not_stay_locked(native, accelerator, locked):
    before = locked()
    scratch, weights = [accelerator.pin_empty(8 * MIB, dtype=torch.uint8) for _ in range(2)]
    assert accelerator.unpin_memory(scratch) is True
    assert locked() == before + 8 * MIB
    del weights
    assert locked() == before
    again = accelerator.pin_empty(8 * MIB, dtype=torch.uint8)
    assert accelerator.is_pinned(again)
    assert locked() == before + 8 * MIB


def test_a_pool_that_is_given_is_used_and_not_trimmed(monkeypatch, accelerator):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    with PinnedPool("host", max_bytes=8 * MIB) as pool:
        pinpool.deepspeed.enable(pool)
        try:
            kept = accelerator.pin_empty(MIB, dtype=torch.uint8)
            accelerator.pin_empty(2 * MIB, dtype=torch.uint8)
            assert pool.stats()["blocks"] == 1
            assert accelerator.unpin_memory(kept) is True
            assert pool.stats()["reserved_bytes"] >= 3 * MIB
        finally:
            pinpool.deepspeed.disable()
        assert not pool.closed


# Enabling


def state(module):
    return dict(vars(module))


def test_disabling_restores_everything(theirs):
    before = state(theirs)
    pinpool.deepspeed.disable()
    pinpool.deepspeed.enable()
    assert state(theirs) != before
    pinpool.deepspeed.disable()
    assert state(theirs) == before
    pinpool.deepspeed.disable()
    assert state(theirs) == before


def test_enabling_twice_is_enabling_once(theirs, pool):
    before = state(theirs)
    pinpool.deepspeed.enable(pool)
    pinpool.deepspeed.enable(pool)
    with pytest.raises(RuntimeError, match="enabled with another pool"):
        pinpool.deepspeed.enable()
    pinpool.deepspeed.disable()
    assert state(theirs) == before


def test_buffers_outlive_disabling(native, hooked, accelerator):
    pinned = hooked.pin_memory(numbers())
    base = pinned.data_ptr()
    pinpool.deepspeed.disable()
    assert pinpool.is_pinned(pinned)
    assert torch.equal(pinned, numbers())
    pinpool.deepspeed.enable()
    assert hooked.is_pinned(pinned)
    pinpool.deepspeed.disable()
    del pinned
    gc.collect()
    assert hooked.calls[1:] == [("unregister", base)]


@pytest.mark.parametrize("pool", ["cuda:0", torch.empty(1), PinnedPool])
def test_what_is_no_pool_is_refused(theirs, pool):
    before = state(theirs)
    with pytest.raises(TypeError, match="PinnedPool"):
        pinpool.deepspeed.enable(pool)
    assert state(theirs) == before


def test_a_closed_pool_is_refused(theirs, pool):
    before = state(theirs)
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pinpool.deepspeed.enable(pool)
    assert state(theirs) == before


def test_live_buffers_of_the_op_are_an_error(monkeypatch, theirs):
    monkeypatch.setattr(theirs, "_shared_native_pins", types.SimpleNamespace(_ranges={4096: 8192}))
    before = state(theirs)
    with pytest.raises(RuntimeError, match="1 buffers of DeepSpeed's own pinning are alive"):
        pinpool.deepspeed.enable()
    assert state(theirs) == before


def more_arguments(module):
    def pin(self, tensor, make_copy, match_shape, alignment): ...

    module.NativePinnedMemory.pin = pin


def another_method(module):
    module.NativePinnedMemory.pin_in_place = module.NativePinnedMemory.pin


def another_maker(module):
    module.get_native_pinned_memory = lambda: module.NativePinnedMemory()


@pytest.mark.parametrize(
    "change",
    [
        (lambda module: delattr(module, "NativePinnedMemory"), "has no NativePinnedMemory"),
        (lambda module: delattr(module, "_shared_native_pins"), "has no _shared_native_pins"),
        (another_method, "a method pin_in_place"),
        (more_arguments, "the arguments of its manager's pin"),
        (another_maker, "does not use _shared_native_pins"),
    ],
    ids=["no class", "no manager", "another method", "more arguments", "another maker"],
)
def test_a_deepspeed_that_is_not_known_is_refused_and_left_alone(monkeypatch, theirs, change):
    alter, reason = change
    other = types.ModuleType("deepspeed.utils.pin_memory")
    vars(other).update(vars(theirs))
    other.NativePinnedMemory = type("NativePinnedMemory", (theirs.NativePinnedMemory,), {})
    alter(other)
    before = state(other)
    monkeypatch.setitem(sys.modules, "deepspeed.utils.pin_memory", other)
    with pytest.raises(RuntimeError, match=rf"does not know DeepSpeed \d+\..*{reason}"):
        pinpool.deepspeed.enable()
    assert state(other) == before
    assert pinpool.deepspeed._patch.active is None


def test_a_deepspeed_before_native_pinning_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.utils.pin_memory", None)
    with pytest.raises(RuntimeError, match="has no native pinning"):
        pinpool.deepspeed.enable()


def test_an_accelerator_that_goes_elsewhere_is_refused(monkeypatch, theirs):
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    before = state(theirs)
    monkeypatch.setattr(DeepSpeedAccelerator, "unpin_memory", lambda *_: None)
    with pytest.raises(RuntimeError, match="does not use get_active_native_pinned_memory"):
        pinpool.deepspeed.enable()
    assert state(theirs) == before


def test_what_was_patched_again_is_not_restored_over(monkeypatch, theirs):
    pinpool.deepspeed.enable()
    with monkeypatch.context() as patch:
        patch.setattr(theirs, "NativePinnedMemory", object)
        with pytest.raises(RuntimeError, match="patched again"):
            pinpool.deepspeed.disable()
        assert theirs.NativePinnedMemory is object
    pinpool.deepspeed.disable()
    assert pinpool.deepspeed._patch.active is None


def test_threads_enable_and_disable_at_once(theirs, request):
    before, failures = state(theirs), []
    interval = sys.getswitchinterval()
    request.addfinalizer(lambda: sys.setswitchinterval(interval))
    sys.setswitchinterval(1e-6)

    def flip():
        try:
            for _ in range(100):
                pinpool.deepspeed.enable()
                pinpool.deepspeed.disable()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=flip) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == []
    assert state(theirs) == before


def test_no_cycle_keeps_the_pool_of_before(theirs, monkeypatch, accelerator):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    pinpool.deepspeed.enable()
    pinned = accelerator.pin_memory(numbers())
    pinpool.deepspeed.disable()
    source = weakref.ref(pinpool.deepspeed._books.all()[0].source)
    del pinned
    gc.collect()
    assert source() is None
