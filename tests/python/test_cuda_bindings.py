"""NVIDIA's own Python binding as a second client of the CUDA driver that pinpool registers with, here a fake one.

cuda-bindings finds it as `libcuda.so.1` on the library path, and pinpool by PINPOOL_CUDA_LIBRARY: the same file.
"""

import pytest

BINDINGS = """
from cuda.bindings import driver as cuda

def call(function, *arguments):
    code, *answers = function(*arguments)
    assert code == cuda.CUresult.CUDA_SUCCESS, (function, code)
    return answers[0] if len(answers) == 1 else answers

def code_of(function, *arguments):
    "Tells a code by the end of its name."
    return function(*arguments)[0].name.removeprefix("CUDA_").removeprefix("ERROR_")

def is_host(address):
    code, kind = cuda.cuPointerGetAttribute(cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if code == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:
        return False  # memory that the driver does not know
    assert (code, kind) == (cuda.CUresult.CUDA_SUCCESS, cuda.CUmemorytype.CU_MEMORYTYPE_HOST)
    return True

def start():
    "Makes the first device's context current, as torch does."
    call(cuda.cuInit, 0)
    device = call(cuda.cuDeviceGet, 0)
    call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, device))
    return device

def stop(device):
    call(cuda.cuCtxSetCurrent, cuda.CUcontext(0))
    call(cuda.cuDevicePrimaryCtxRelease, device)

LEGACY, BLOCKING, NON_BLOCKING = cuda.CUstream(0), 0, 1
DISABLE_TIMING = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
GLOBAL, THREAD_LOCAL, RELAXED = map(cuda.CUstreamCaptureMode, range(3))

def is_capturing(stream):
    return call(cuda.cuStreamIsCapturing, stream).name.removeprefix("CU_STREAM_CAPTURE_STATUS_")

def exchange_mode(mode):
    return call(cuda.cuThreadExchangeStreamCaptureMode, mode)
"""


@pytest.fixture
def script(run_with_driver, fake_libcuda):
    def script(script, settings=""):
        environment = {"LD_LIBRARY_PATH": fake_libcuda.parent, "PINPOOL_CUDA_LIBRARY": fake_libcuda}
        fake = f"FakeCuda({str(fake_libcuda)!r})"
        return run_with_driver(script, fake, BINDINGS, FAKE_CUDA=settings, **environment)

    return script


def test_both_clients_see_the_same_devices(script):
    script("""
        device = start()
        assert call(cuda.cuDeviceGetCount) == len(find("cuda")) == 2
        uuids = [bytes(call(cuda.cuDeviceGetUuid, call(cuda.cuDeviceGet, index)).bytes).hex() for index in range(2)]
        assert [found["uuid"] for found in find("cuda")] == uuids
        stop(device)
    """, "devices=2")  # fmt: skip


def test_what_a_pool_registers_is_host_memory_until_it_is_released(script):
    script("""
        device = start()
        pool = PinnedPool("cuda:0", max_bytes=8 * MIB)
        array = pool.empty(MIB)
        address = array.ptr
        assert is_registered(array, "cuda:0") and pool.stats()["registered_bytes"] == {"cuda:0": MIB}
        assert [is_host(at) for at in (address, address + MIB // 2, address + MIB - 1)] == [True] * 3
        assert not is_host(address - 1) and not is_host(address + MIB)
        del array
        assert is_host(address)  # it is kept for reuse
        assert pool.trim() == MIB
        assert not is_host(address)
        stop(device)
    """)


def test_what_is_registered_in_place_is_host_memory_until_it_is_closed(script):
    script("""
        device = start()
        memory = mmap(-1, 3 * PAGE)
        registration = PinnedPool("cuda:0", max_bytes=MIB).register(memory)
        assert is_host(registration.ptr) and is_host(registration.ptr + registration.nbytes - 1)
        registration.close()
        assert not is_host(registration.ptr)
        stop(device)
    """)


def test_what_the_other_client_registered_is_refused(script):
    script("""
        import ctypes
        device = start()
        memory = mmap(-1, 3 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        call(cuda.cuMemHostRegister, address, 3 * PAGE, 0)
        pool = PinnedPool("cuda:0", max_bytes=MIB)
        text = refusal(pool.register, memory)
        assert text.startswith("DriverError: CUDA: cuMemHostRegister on cuda:0 of 12288 bytes answered 712"), text
        assert "somebody else registered a part of this range; unregister it there first" in text, text
        assert is_host(address) and not pool.is_pinned(memory)
        call(cuda.cuMemHostUnregister, address)
        with pool.register(memory):
            code, = cuda.cuMemHostRegister(address, PAGE, 0)
            assert code == cuda.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        stop(device)
        return {"wrongs": ["cuMemHostRegister_v2: a part is registered already"] * 2}
    """)


def test_auto_takes_the_device_of_the_other_clients_context_and_leaves_it_current(script):
    script("""
        call(cuda.cuInit, 0)
        device = call(cuda.cuDeviceGet, 1)
        context = call(cuda.cuDevicePrimaryCtxRetain, device)
        call(cuda.cuCtxSetCurrent, context)
        pool = PinnedPool(max_bytes=MIB)
        array = pool.empty(PAGE)
        assert pool.stats()["registered_bytes"] == {"cuda:1": pool.stats()["reserved_bytes"]}
        assert int(call(cuda.cuCtxGetCurrent)) == int(context)
        assert driver.contexts_made(0) == 0
        stop(device)
    """, "devices=2")  # fmt: skip


def test_a_stream_tells_its_context_and_a_default_stream_the_current_one(script):
    script("""
        device = start()
        first = call(cuda.cuCtxGetCurrent)
        stream = call(cuda.cuStreamCreate, NON_BLOCKING)
        other_device = call(cuda.cuDeviceGet, 1)
        second = call(cuda.cuDevicePrimaryCtxRetain, other_device)
        call(cuda.cuCtxSetCurrent, second)
        assert int(call(cuda.cuStreamGetCtx, stream)) == int(first)
        for default in range(3):
            assert int(call(cuda.cuStreamGetCtx, cuda.CUstream(default))) == int(second)
        stop(other_device)
        assert int(call(cuda.cuStreamGetCtx, stream)) == int(first)  # with no context at all
        assert code_of(cuda.cuStreamGetCtx, LEGACY) == "INVALID_CONTEXT"
        call(cuda.cuStreamDestroy, stream)
        assert code_of(cuda.cuStreamGetCtx, stream) == "INVALID_HANDLE"
        stop(device)
        return {"wrongs": ["cuStreamGetCtx: no context is current", "cuStreamGetCtx: no such stream"]}
    """, "devices=2")  # fmt: skip


def test_an_event_is_done_when_the_stream_has_done_what_it_was_given_before(script):
    script("""
        import ctypes
        device = start()
        stream = call(cuda.cuStreamCreate, NON_BLOCKING)
        event = call(cuda.cuEventCreate, DISABLE_TIMING)
        call(cuda.cuEventQuery, event)  # it was never recorded
        source, target = ctypes.create_string_buffer(b"work"), ctypes.create_string_buffer(5)
        addresses = ctypes.addressof(target), ctypes.addressof(source)
        assert driver.copy_async(int(stream), *addresses, 5) == 0
        call(cuda.cuEventRecord, event, stream)
        assert driver.pending_work() == 2 and code_of(cuda.cuEventQuery, event) == "NOT_READY"
        assert driver.advance(int(stream), 1) == 1
        assert target.value == b"work" and code_of(cuda.cuEventQuery, event) == "NOT_READY"
        call(cuda.cuStreamDestroy, stream)
        assert driver.live_streams() == 0 and driver.pending_work() == 1  # what is queued is still done
        call(cuda.cuCtxSetCurrent, cuda.CUcontext(0))
        assert driver.advance_all() == 1
        call(cuda.cuEventQuery, event)
        call(cuda.cuEventDestroy, event)
        stop(device)
    """)


def test_an_event_that_was_destroyed_is_unknown(script):
    script("""
        device = start()
        event = call(cuda.cuEventCreate, DISABLE_TIMING)
        call(cuda.cuEventRecord, event, LEGACY)
        call(cuda.cuEventDestroy, event)
        assert driver.live_events() == 0 and driver.advance_all() == 1
        calls = {cuda.cuEventQuery: [], cuda.cuEventRecord: [LEGACY], cuda.cuEventDestroy: []}
        assert [code_of(function, event, *more) for function, more in calls.items()] == ["INVALID_HANDLE"] * 3
        stop(device)
        return {"wrongs": [f"{call}: no such event" for call in ("cuEventQuery", "cuEventRecord", "cuEventDestroy_v2")]}
    """)


def test_an_event_and_its_stream_are_of_one_context(script):
    script("""
        device = start()
        stream = call(cuda.cuStreamCreate, NON_BLOCKING)
        other_device = call(cuda.cuDeviceGet, 1)
        call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, other_device))
        event = call(cuda.cuEventCreate, DISABLE_TIMING)
        assert code_of(cuda.cuEventRecord, event, stream) == "INVALID_HANDLE"
        call(cuda.cuEventDestroy, event)
        stop(other_device)
        stop(device)
        return {"wrongs": ["cuEventRecord: the event and the stream are of two contexts"]}
    """, "devices=2")  # fmt: skip


def test_an_event_recorded_while_its_stream_is_captured_is_a_part_of_the_graph(script):
    script("""
        device = start()
        stream = call(cuda.cuStreamCreate, NON_BLOCKING)
        event = call(cuda.cuEventCreate, DISABLE_TIMING)
        assert driver.begin_capture(int(stream)) == 0
        call(cuda.cuEventRecord, event, stream)
        assert is_capturing(stream) == "ACTIVE" and driver.pending_work() == 0
        mode = exchange_mode(RELAXED)
        assert code_of(cuda.cuEventQuery, event) == "CAPTURED_EVENT"
        exchange_mode(mode)
        assert is_capturing(stream) == "INVALIDATED"
        assert code_of(cuda.cuEventRecord, event, stream) == "STREAM_CAPTURE_INVALIDATED"
        assert driver.end_capture(int(stream)) == 901 and is_capturing(stream) == "NONE"
        assert code_of(cuda.cuEventQuery, event) == "CAPTURED_EVENT"
        call(cuda.cuEventRecord, event, stream)
        assert code_of(cuda.cuEventQuery, event) == "NOT_READY"
        call(cuda.cuEventDestroy, event)
        stop(device)
        return {"wrongs": ["cuEventQuery: the event is a part of a graph"] * 2}
    """)


def test_a_capture_of_this_thread_is_broken_by_a_query_in_all_modes_but_the_relaxed_one(script):
    script("""
        device = start()
        stream = call(cuda.cuStreamCreate, NON_BLOCKING)
        event = call(cuda.cuEventCreate, DISABLE_TIMING)
        for mode, end in ((GLOBAL, 901), (THREAD_LOCAL, 901), (RELAXED, 0)):
            assert driver.begin_capture(int(stream)) == 0
            assert exchange_mode(mode) == GLOBAL
            assert code_of(cuda.cuEventQuery, event) == ("STREAM_CAPTURE_UNSUPPORTED" if end else "SUCCESS")
            assert exchange_mode(GLOBAL) == mode
            assert driver.end_capture(int(stream)) == end
        call(cuda.cuEventDestroy, event)
        stop(device)
        return {"wrongs": ["cuEventQuery: a call that breaks a capture"] * 2}
    """)


def test_the_legacy_default_stream_cannot_be_used_while_a_blocking_stream_is_captured(script):
    script("""
        device = start()
        event = call(cuda.cuEventCreate, DISABLE_TIMING)
        exchange_mode(RELAXED)  # which does not help
        assert driver.begin_capture(0) == 900
        for flags in (NON_BLOCKING, BLOCKING):
            stream = call(cuda.cuStreamCreate, flags)
            assert driver.begin_capture(int(stream)) == 0
            if flags == BLOCKING:
                assert code_of(cuda.cuStreamIsCapturing, LEGACY) == "STREAM_CAPTURE_IMPLICIT"
                assert is_capturing(stream) == "ACTIVE"  # to ask breaks nothing
                assert code_of(cuda.cuEventRecord, event, LEGACY) == "STREAM_CAPTURE_IMPLICIT"
                assert is_capturing(stream) == "INVALIDATED"
            else:
                assert is_capturing(LEGACY) == "NONE"
                call(cuda.cuEventRecord, event, LEGACY)
            assert driver.end_capture(int(stream)) == (901 if flags == BLOCKING else 0)
        call(cuda.cuEventRecord, event, LEGACY)
        call(cuda.cuEventDestroy, event)
        stop(device)
        return {"wrongs": ["cuEventRecord: the legacy default stream, while a blocking stream is captured"]}
    """)


def test_a_capture_ends_with_its_stream(script):
    script("""
        device = start()
        destroyed, reset = (call(cuda.cuStreamCreate, BLOCKING) for _ in range(2))
        assert driver.begin_capture(int(destroyed)) == 0
        call(cuda.cuStreamDestroy, destroyed)
        assert is_capturing(LEGACY) == "NONE"
        assert driver.begin_capture(int(reset)) == 0
        driver.reset_context(0)
        other_device = call(cuda.cuDeviceGet, 1)
        call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, other_device))
        call(cuda.cuMemFreeHost, call(cuda.cuMemHostAlloc, PAGE, 0))  # which would break it
        stop(other_device)
        stop(device)
    """, "devices=2")  # fmt: skip


def test_after_a_fault_of_the_device_its_context_answers_with_nothing_else(script):
    script("""
        import ctypes
        device = start()
        memory = mmap(-1, PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        call(cuda.cuMemHostRegister, address, PAGE, 0)
        stream, event = call(cuda.cuStreamCreate, NON_BLOCKING), call(cuda.cuEventCreate, DISABLE_TIMING)
        call(cuda.cuEventRecord, event, stream)
        of_the_driver = call(cuda.cuMemHostAlloc, PAGE, 0)
        driver.break_context(0, 719)
        assert driver.pending_work() == 0 and driver.copy_async(int(stream), address, address, 1) == 719
        calls = [
            (cuda.cuEventQuery, event),
            (cuda.cuEventRecord, event, stream),
            (cuda.cuEventCreate, DISABLE_TIMING),
            (cuda.cuMemHostUnregister, address),
            (cuda.cuMemFreeHost, of_the_driver),
            (cuda.cuEventDestroy, event),
            (cuda.cuStreamDestroy, stream),
        ]
        assert [code_of(*call) for call in calls] == ["LAUNCH_FAILED"] * len(calls)
        assert (driver.live(), driver.live_events(), driver.live_streams()) == (1, 0, 0)
        driver.reset_context(0)
        stop(device)
    """)
