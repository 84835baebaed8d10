"""Blocks that the work of CUDA streams may still use, on a driver without a device (tests/drivers/fake_cuda.rs)."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# What the scripts use besides: streams of the driver, as torch and CuPy make them behind our back.
HELPERS = """
import ctypes, pinpool
from pinpool import OutOfPinnedMemoryError

class Stream:
    "What some library calls a stream."
    def __init__(self, **attributes):
        vars(self).update(attributes)

def cu(name, *arguments):
    code = getattr(driver.library, name)(*arguments)
    assert code == 0, (name, code)

def push(device):
    "Retains a device's context and makes it current."
    context = ctypes.c_size_t()
    cu("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    cu("cuCtxPushCurrent_v2", context)

def pop(device):
    cu("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_size_t()))
    cu("cuDevicePrimaryCtxRelease_v2", device)

def make_stream():
    "A stream of the current context, or else of the first device, which a pool must have open."
    stream, is_bare = ctypes.c_size_t(), driver.depth() == 0
    if is_bare:
        push(0)
    cu("cuStreamCreate", ctypes.byref(stream), 0)
    if is_bare:
        pop(0)
    return stream.value

def destroy(stream):
    cu("cuStreamDestroy_v2", ctypes.c_size_t(stream))

def put_in_flight(pool, stream, nbytes=MIB):
    "Releases a block with a recorded stream, and tells where it is."
    array = pool.empty(nbytes)
    pinpool.record_stream(array, stream)
    return array.ptr

def is_served(pool, nbytes=MIB):
    try:
        return pool.empty(nbytes) is not None
    except OutOfPinnedMemoryError:
        return False

def expect_nothing_left(driver, live=0, retained=0, events=0, wrongs=()):
    assert driver.wrongs() == list(wrongs), driver.wrongs()
    left = driver.live(), driver.retained(0), driver.depth_of_all(), driver.live_events()
    assert left == (live, retained, 0, events), left
"""


@pytest.fixture
def script(run_with_driver, fake_libcuda):
    """Run a script with a `driver`. It may return what is to be left after it, for `expect_nothing_left`."""

    def script(script, settings="devices=2"):
        end = "{'expect_left': lambda self, **left: expect_nothing_left(self, **left)}"
        fake = f"type('Fake', (FakeCuda,), {end})({str(fake_libcuda)!r})"
        return run_with_driver(script, fake, HELPERS, FAKE_CUDA=settings, PINPOOL_CUDA_LIBRARY=fake_libcuda)

    return script


POOL = """
pool = PinnedPool("cuda:0", max_bytes=MIB)
stream = make_stream()
"""


def with_pool(script):
    return POOL + textwrap.dedent(script)


# When a block is reused


def test_a_block_is_reused_when_its_copy_is_done_and_not_before(script):
    script(with_pool("""
        source = (ctypes.c_char * MIB).from_buffer_copy(bytes([7]) * MIB)
        array = pool.zeros(MIB)
        address = array.ptr
        assert driver.copy_async(stream, address, ctypes.addressof(source), MIB) == 0
        pool.record_stream(array, stream)
        del array
        assert not is_served(pool) and pool.stats()["pending_bytes"] == MIB
        assert driver.advance(stream, 1) == 1  # the copy
        assert not is_served(pool)
        assert driver.advance(stream, 1) == 1  # the event
        array = pool.empty(MIB)
        assert (array.ptr, bytes(array)) == (address, bytes(source))
    """))  # fmt: skip


def test_work_that_is_queued_after_the_call_is_not_waited_for(script):
    script(with_pool("""
        array = pool.zeros(MIB)
        pinpool.record_stream(array, stream)
        driver.copy_async(stream, array.ptr, array.ptr, 1)
        del array
        driver.advance(stream, 1)
        assert is_served(pool)
    """))  # fmt: skip


FORMS = {
    "a handle": "stream",
    "the protocol": "Stream(__cuda_stream__=lambda: (0, stream))",
    "an older torch.cuda.Stream": "Stream(cuda_stream=stream, device=Stream(type='cuda', index=0))",
    "a torch.Stream": "Stream(native_handle=stream, device=Stream(type='cuda', index=0))",
    "a stream of CuPy": "Stream(ptr=stream, device_id=0)",
    "the protocol before all else": "Stream(__cuda_stream__=lambda: (0, stream), cuda_stream=other, ptr=other)",
}


@pytest.mark.parametrize("form", FORMS)
def test_the_event_is_in_the_stream_that_is_meant(script, form):
    script(
        with_pool(f"""
        other = make_stream()
        put_in_flight(pool, {FORMS[form]})
        assert driver.advance(other, 9) == 0 and not is_served(pool)
        assert driver.advance(stream, 9) == 1 and is_served(pool)
    """)
    )


@pytest.mark.parametrize("default", [0, 1, 2])
@pytest.mark.parametrize("current", [False, True])
def test_default_streams_are_those_of_the_current_context_or_else_of_the_pools(script, default, current):
    script(
        with_pool(f"""
        if {current}:
            push(1)
        put_in_flight(pool, {default})
        assert driver.contexts_made(1) == {int(current)} and driver.depth() == {int(current)}
        assert not is_served(pool)
        assert driver.advance({default & 2}, 9) == 1 and is_served(pool)
        if {current}:
            pop(1)
    """)
    )


def test_a_stream_of_another_device_is_followed_in_its_own_context(script):
    script(with_pool("""
        push(1)
        elsewhere = make_stream()
        cu("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_size_t()))
        for _ in range(3):
            put_in_flight(pool, elsewhere)
            assert driver.current() == 0 and not is_served(pool)
            driver.advance(elsewhere, 1)
            put_in_flight(pool, stream)
            driver.advance(stream, 1)
        assert is_served(pool) and driver.calls("cuEventCreate") == 2  # one a context
        cu("cuDevicePrimaryCtxRelease_v2", 1)
    """))  # fmt: skip


@pytest.mark.parametrize("order", ["[0, 1, 2]", "[2, 1, 0]", "[1, 2, 0]"])
def test_all_streams_of_a_block_must_be_done(script, order):
    script(
        with_pool(f"""
        streams, array = [make_stream() for _ in range(3)], pool.empty(MIB)
        for one in streams:
            pool.record_stream(array, one)
        array.release()
        for number in {order}:
            assert not is_served(pool)
            driver.advance(streams[number], 1)
        assert is_served(pool)
    """)
    )


def test_a_stream_and_an_event_of_python_must_both_be_done(script):
    script(with_pool("""
        array, done = pool.empty(MIB), []
        pool.record_stream(array, stream)
        pool.defer(array, Stream(query=lambda: bool(done)))
        array.release()
        driver.advance(stream, 1)
        assert not is_served(pool)
        done.append(1)
        assert is_served(pool)
    """))  # fmt: skip


@pytest.mark.parametrize("stuck", range(3))
def test_a_stream_that_is_stuck_holds_up_no_other(script, stuck):
    script(f"""
        pool = PinnedPool("cuda:0", max_bytes=6 * MIB)
        streams = [make_stream() for _ in range(3)]
        held = [pool.empty(MIB) for _ in range(6)]
        for number, array in enumerate(held):
            pool.record_stream(array, streams[number % 3])
        del array
        held.clear()
        for number in range(3):
            if number != {stuck}:
                driver.advance(streams[number], 9)
        held = [pool.empty(MIB) for _ in range(4)]
        assert not is_served(pool) and pool.stats()["pending_bytes"] == 2 * MIB
        driver.advance_all()
        assert is_served(pool)
    """)


def test_a_look_at_many_blocks_of_one_stream_asks_the_first(script):
    script("""
        pool = PinnedPool("cuda:0", max_bytes=8 * MIB)
        stream = make_stream()
        for array in [pool.empty(PAGE) for _ in range(500)]:
            pool.record_stream(array, stream)
        del array
        assert pool.stats()["pending_bytes"] == 500 * PAGE and driver.calls("cuEventQuery") == 0
        pool.trim()
        assert driver.calls("cuEventQuery") <= 2
        driver.advance(stream, 250)
        pool.trim()
        assert pool.stats()["pending_bytes"] == 250 * PAGE and driver.calls("cuEventQuery") <= 260
        driver.advance_all()
    """)


def test_a_block_in_line_is_reused_in_the_order_of_its_stream(script):
    script("""
        pool = PinnedPool("cuda:0", max_bytes=4 * MIB)
        stream, arrays = make_stream(), [pool.empty(MIB) for _ in range(4)]
        addresses = [array.ptr for array in arrays]
        for array in arrays:
            pool.record_stream(array, stream)
        del array
        while arrays:  # the last one comes back first
            arrays.pop()
        for address in addresses:
            assert not is_served(pool)
            driver.advance(stream, 1)
            arrays.append(pool.empty(MIB))
            assert arrays[-1].ptr == address
    """)


def test_a_deleter_asks_no_driver(script):
    script(with_pool("""
        array = pool.empty(MIB)
        pool.record_stream(array, stream)
        before = driver.calls(0)
        array.release()
        pool.stats()
        assert driver.calls(0) == before
        driver.advance_all()
    """))  # fmt: skip


def test_memory_without_a_device_needs_no_event(script):
    script("""
        device, host = PinnedPool("cuda:0", max_bytes=MIB), PinnedPool("host", max_bytes=MIB)
        before = driver.calls(0)
        put_in_flight(host, 0)
        assert is_served(host) and driver.calls(0) == before
    """)


# Events


def test_events_are_used_again(script):
    script(with_pool("""
        for _ in range(1000):
            put_in_flight(pool, stream)
            driver.advance(stream, 1)
        assert driver.calls("cuEventCreate") <= 2 and driver.live_events() <= 2
        assert driver.calls("cuEventRecord") == 1000
    """))  # fmt: skip


@pytest.mark.parametrize("streams", [1, 5])
def test_events_of_streams_that_never_advance_do_not_gather_on_a_block_that_lives(script, streams):
    script(
        with_pool(f"""
        array, streams = pool.empty(MIB), [make_stream() for _ in range({streams})]
        for lap in range(3000):
            pool.record_stream(array, streams[lap % {streams}])
        assert driver.live_events() <= {streams + 1}, driver.live_events()
        array.release()
        assert not is_served(pool)
        driver.advance_all()
        assert is_served(pool)
    """)
    )


def test_events_of_default_streams_do_not_gather_on_a_block_that_lives(script):
    script(with_pool("""
        array = pool.empty(MIB)
        for lap in range(3000):
            pool.record_stream(array, lap % 3)
            if lap % 10 == 0:
                driver.advance_all()
        assert driver.live_events() < 100, driver.live_events()
        array.release()
        driver.advance_all()
        assert is_served(pool)
    """))  # fmt: skip


def test_an_event_that_cannot_be_used_again_is_replaced(script):
    script(with_pool("""
        put_in_flight(pool, stream)
        driver.advance(stream, 1)
        pool.trim()
        driver.fail("cuEventRecord", 1, 400)
        put_in_flight(pool, stream)
        assert (driver.calls("cuEventCreate"), driver.live_events()) == (2, 1)
        driver.advance(stream, 1)
        assert is_served(pool)
    """))  # fmt: skip


# What goes wrong


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ("cuStreamGetCtx", "cuStreamGetCtx"),
        ("cuCtxPushCurrent_v2", "cuCtxPushCurrent"),
        ("cuStreamIsCapturing", "cuStreamIsCapturing"),
        ("cuEventCreate", "cuEventCreate"),
        ("cuEventRecord", "cuEventRecord"),
    ],
)
def test_a_block_whose_event_could_not_be_made_is_kept_until_a_later_call_succeeds(script, call, named):
    script(
        with_pool(f"""
        array = pool.empty(MIB)
        driver.fail({call!r}, 1, 999)
        try:
            pinpool.record_stream(array, stream)
            raise SystemExit("it was recorded")
        except DriverError as error:
            assert (error.driver, error.call, error.code, error.device) == ("CUDA", {named!r}, 999, "cuda:0"), error
        assert (driver.live_events(), driver.depth()) == (0, 0)
        alias = memoryview(array)
        array.release()
        pool.record_stream(alias, stream)
        del alias
        assert not is_served(pool)
        driver.advance(stream, 1)
        assert is_served(pool)
    """)
    )


def test_a_block_of_a_destroyed_stream_is_never_reused(script):
    script(with_pool("""
        array = pool.empty(MIB)
        destroy(stream)
        text = refusal(pinpool.record_stream, array, stream)
        assert text.startswith("DriverError: CUDA: ") and "answered 400 (CUDA_ERROR_INVALID_HANDLE)" in text, text
        assert "there is no such stream (any more)" in text, text
        array.release()
        assert pool.stats()["pending_bytes"] == MIB
        assert not is_served(pool) and not is_served(pool)
        stats = pool.stats()
        assert (stats["pending_bytes"], stats["quarantined_bytes"], stats["cached_bytes"]) == (0, MIB, 0)
        assert "CUDA_ERROR_INVALID_HANDLE" in stats["quarantine_reason"]
        pool.close()
        assert driver.live_bytes() == MIB
        return {"live": 1, "retained": 1, "wrongs": driver.wrongs()}  # the driver notes the call
    """))  # fmt: skip


def test_a_later_call_with_a_live_stream_makes_good_for_a_destroyed_one(script):
    script(with_pool("""
        array, gone = pool.empty(MIB), make_stream()
        destroy(gone)
        refusal(pinpool.record_stream, array, gone)
        pinpool.record_stream(array, stream)
        array.release()
        assert not is_served(pool)
        driver.advance(stream, 1)
        assert is_served(pool)
        return {"wrongs": driver.wrongs()}
    """))  # fmt: skip


def test_a_stream_may_be_destroyed_behind_its_work(script):
    script(with_pool("""
        put_in_flight(pool, stream)
        destroy(stream)
        assert not is_served(pool)
        driver.advance(stream, 1)
        assert is_served(pool)
    """))  # fmt: skip


def test_a_block_whose_event_fails_goes_into_quarantine(script):
    script("""
        pool = PinnedPool("cuda:0", max_bytes=2 * MIB)
        stream = make_stream()
        address = put_in_flight(pool, stream)
        driver.fail("cuEventQuery", 1, 700)
        array = pool.empty(MIB)
        stats = pool.stats()
        assert array.ptr != address and (stats["pending_bytes"], stats["quarantined_bytes"]) == (0, MIB)
        reason = "CUDA: cuEventQuery on cuda:0 answered 700 (CUDA_ERROR_ILLEGAL_ADDRESS)"
        assert stats["quarantine_reason"].startswith(reason), stats
        driver.advance_all()
        assert not is_served(pool) and driver.live_events() == 0
        assert stats["reserved_bytes"] == stats["allocated_bytes"] + stats["quarantined_bytes"] == 2 * MIB
        return {"live": 1, "retained": 1}
    """)


def test_a_context_that_is_destroyed_under_its_event_puts_the_block_into_quarantine(script):
    script(with_pool("""
        push(1)
        elsewhere = make_stream()
        put_in_flight(pool, elsewhere)
        pop(1)
        assert not is_served(pool)
        assert "CUDA_ERROR_CONTEXT_IS_DESTROYED" in pool.stats()["quarantine_reason"], pool.stats()
        return {"live": 1, "retained": 1}
    """))  # fmt: skip


@pytest.mark.parametrize("code", [700, 719, 999])
def test_a_fault_of_the_device_puts_what_is_in_flight_into_quarantine_and_nothing_hangs(script, code):
    script(f"""
        pool = PinnedPool("cuda:0", max_bytes=2 * MIB)
        stream, array = make_stream(), pool.empty(MIB)
        put_in_flight(pool, stream)
        driver.break_context(0, {code})
        assert not is_served(pool)
        stats = pool.stats()
        assert (stats["allocated_bytes"], stats["quarantined_bytes"], stats["pending_bytes"]) == (MIB, MIB, 0)
        assert "cuEventQuery on cuda:0 answered {code} " in stats["quarantine_reason"], stats
        text = refusal(pool.record_stream, array, stream)
        assert text.startswith("DriverError: CUDA: ") and " answered {code} " in text, text
        array.release()
        assert not is_served(pool) and pool.stats()["quarantined_bytes"] == 2 * MIB
        return {{"live": 2, "retained": 1}}
    """)


def test_a_driver_that_is_gone_uses_nothing_any_more(script):
    script(with_pool("""
        put_in_flight(pool, stream)
        driver.teardown()
        assert is_served(pool)
        os._exit(0)  # such a driver gives nothing back
    """))  # fmt: skip


# Graphs


def test_a_block_of_a_stream_that_is_captured_is_never_reused_and_the_capture_goes_on(script):
    script(with_pool("""
        array, other = pool.empty(MIB), make_stream()
        assert driver.begin_capture(stream) == 0
        text = refusal(pinpool.record_stream, array, stream)
        assert text.startswith("PinpoolError: stream ") and "is being captured into a graph" in text, text
        assert driver.end_capture(stream) == 0
        pinpool.record_stream(array, other)
        array.release()
        driver.advance_all()
        assert not is_served(pool) and driver.live_events() <= 1
        stats = pool.stats()
        assert (stats["pending_bytes"], stats["quarantined_bytes"]) == (0, MIB)
        assert "captured into a graph" in stats["quarantine_reason"]
        return {"live": 1, "retained": 1, "events": 1}  # an idle one
    """))  # fmt: skip


@pytest.mark.parametrize("default", [0, 1])
def test_the_default_stream_counts_as_captured_while_it_must_not_be_used(script, default):
    script(
        with_pool(f"""
        array = pool.empty(MIB)
        assert driver.begin_capture(stream) == 0
        text = refusal(pinpool.record_stream, array, {default})
        assert text.startswith("PinpoolError: stream 0x{default} is being captured into a graph"), text
        assert driver.end_capture(stream) == 0
        array.release()
        assert not is_served(pool)
        return {{"live": 1, "retained": 1}}
    """)
    )


@pytest.mark.parametrize("thread", [False, True])
def test_nothing_that_a_pool_does_breaks_a_capture(script, thread):
    script(f"""
        pool = PinnedPool("cuda:0", max_bytes=8 * MIB)
        captured, stream = make_stream(), make_stream()
        put_in_flight(pool, stream)
        def use():
            held = pool.empty(2 * MIB), pool.empty(PAGE)  # registers, and asks an event
            pool.record_stream(held[0], stream)
            del held
            driver.advance(stream, 9)
            pool.trim()  # unregisters
        assert driver.begin_capture(captured) == 0
        if {thread}:
            other = threading.Thread(target=use)
            other.start()
            other.join()
        else:
            use()
        assert driver.end_capture(captured) == 0
        assert pool.stats()["pending_bytes"] == 0
    """)


# torch's current stream

TORCH = """
import types
torch = types.ModuleType("torch")
class Tensor: pass
class Device:
    def __init__(self, kind, index=None): self.type, self.index = kind, index
torch.Tensor = Tensor
stub = types.ModuleType("pinpool.torch")
stub.current_device, stub.extent = lambda: None, lambda tensor: None
streams = types.ModuleType("pinpool.torch._streams")
streams.is_used, streams.current_cuda_stream = lambda kind: initialized[0], lambda ordinal: told(ordinal)
stub._streams = streams
sys.modules.update({"torch": torch, "pinpool.torch": stub, "pinpool.torch._streams": streams})
initialized, asked = [True], []

def told(device):
    asked.append(device)
    return stream

# DLPack 1.3's exchange API as torch has it: version, previous table, four functions that are not used, current stream.
Current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t))
Import = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

class Table(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)] + [
        (name, ctypes.c_void_p) for name in ("previous", "allocate", "export")
    ] + [("import_", Import), ("look", ctypes.c_void_p), ("current_stream", Current)]

def exchange(code=0):
    def current_stream(kind, ordinal, out):
        asked.append((kind, ordinal))
        out[0] = stream
        return code
    table = Table(1, 3, None, None, None, Import(lambda *_: -1), None, Current(current_stream))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = ctypes.c_char_p(b"dlpack_exchange_api")
    Tensor.__dlpack_c_exchange_api__ = new(ctypes.addressof(table), name, None)
    Tensor.kept = table, name
    assert _pinpool.use_exchange_api([Tensor])
"""


def with_torch(script):
    script = textwrap.dedent(script)
    return f"global stream\n{TORCH}\npool = PinnedPool('cuda:0', max_bytes=MIB)\nstream = make_stream()\n{script}"


def test_without_torch_no_stream_is_refused(script):
    script(with_pool("""
        text = refusal(pool.record_stream, pool.empty(5))
        assert text.startswith("ValueError: ") and "torch is not imported; pass a stream" in text, text
        assert is_served(pool) and driver.calls("cuEventCreate") == 0
    """))  # fmt: skip


@pytest.mark.parametrize("has_table", [False, True])
def test_while_torch_does_not_use_cuda_nothing_is_recorded(script, has_table):
    script(
        with_torch(f"""
        if {has_table}:
            exchange()
        initialized[0] = False
        put_in_flight(pool, None)
        assert is_served(pool) and asked == [] and driver.calls("cuEventCreate") == 0
        initialized[0] = True
        put_in_flight(pool, None)
        assert not is_served(pool) and len(asked) == 1
        driver.advance(stream, 1)
    """)
    )


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("has_table", [False, True])
def test_the_current_stream_of_torch_is_that_of_the_device_that_the_thread_works_on(script, device, has_table):
    script(
        with_torch(f"""
        if {has_table}:
            exchange()
        push({device})
        array = pool.empty(MIB)
        pool.record_stream(array)
        pinpool.record_stream(array, stream=None)
        array.release()
        assert asked == [{(2, device) if has_table else device}] * 2, asked
        assert not is_served(pool)
        driver.advance(stream, 2)
        assert is_served(pool)
        pop({device})
    """)
    )


def test_a_table_that_refuses_is_an_error_and_nothing_is_recorded(script):
    script(with_torch("""
        exchange(code=-1)
        array = pool.empty(MIB)
        refusal(pool.record_stream, array)
        assert driver.calls("cuEventCreate") == 0
    """))  # fmt: skip


# Waiting, the end of a pool, forks and exits


def test_a_waiting_request_is_served_when_the_stream_is_done(script):
    script(with_pool("""
        address, go = put_in_flight(pool, stream), threading.Event()
        thread = threading.Thread(target=lambda: go.wait() and driver.advance(stream, 1))
        sys.setswitchinterval(3600)  # the thread runs when this one lets go of the interpreter
        thread.start()
        go.set()
        assert pool.empty(MIB, timeout=None).ptr == address
        thread.join()
    """))  # fmt: skip


@pytest.mark.parametrize("end", ["pool.close()", "del pool", "pool.close(); del pool; gc.collect()"])
@pytest.mark.parametrize("use", ["reserve(4096)", "trim()"])
def test_a_closed_pool_keeps_what_is_in_flight_registered_until_some_pool_is_used(script, end, use):
    script(
        with_pool(f"""
        other, before = PinnedPool("host", max_bytes=4 * MIB), status("VmLck")
        address = put_in_flight(pool, stream)
        {end}
        other.{use}
        other.trim()
        assert driver.is_live(address, MIB) == 1 and status("VmLck") == before + MIB
        assert driver.advance(stream, 1) == 1 and driver.live() == 1
        other.{use}
        assert driver.live() == 0 and driver.retained(0) == driver.live_events() == {int(end == "pool.close()")}
        other.trim()
        assert status("VmLck") == before
    """)
    )


FORKED = """
pool = PinnedPool("cuda:0", max_bytes=2 * MIB)
stream, array = make_stream(), pool.empty(MIB)
put_in_flight(pool, stream)
pool.record_stream(array, stream)
things = {"pool": pool, "array": array}
del pool, array
locked, calls, events = status("VmLck"), driver.calls(0), driver.live_events()

def child():
    BODY
    gc.collect()
    assert (driver.calls(0), driver.wrongs(), driver.live_events()) == (calls, [], events)

in_child(child)
pool = things["pool"]
assert (status("VmLck"), driver.calls(0)) == (locked, calls) and pool.stats()["pending_bytes"] == MIB
assert not is_served(pool)
things.clear()
driver.advance(stream, 1)
assert is_served(pool) and not is_served(pool, 2 * MIB)
driver.advance_all()
assert is_served(pool, 2 * MIB)
"""


@pytest.mark.parametrize(
    "child",
    [
        "pass",
        "things.clear()",
        "things['array'].release(); things['pool'].close()",
        "assert 'parent' in refusal(things['pool'].record_stream, things['array'], stream)",
        "assert 'no live block' in refusal(pinpool.record_stream, things['array'], stream)",
        "assert is_served(PinnedPool('host', max_bytes=MIB))",
    ],
)
def test_a_forked_child_leaves_alone_what_is_in_flight(script, child):
    script(FORKED.replace("BODY", child))


ENDINGS = {
    "pending blocks": ("", 0),
    "a live block": ("array = pool.empty(MIB)\npinpool.record_stream(array, stream)", 0),
    "blocks whose work is done": ("driver.advance_all()", 0),
    "a closed pool": ("pool.close()", 0),
    "no pool": ("del pool", 0),
    "no modules": ("sys.modules.clear()", 0),
    "a driver that is gone": ("driver.teardown()", 0),
    "a driver that goes first": ("import atexit\natexit.register(driver.teardown)", 0),
    "a request at exit": ("import atexit\natexit.register(lambda: (driver.advance_all(), pool.trim()))", 0),
    "an event that fails": ("driver.fail('cuEventQuery', 0, 700)", 0),
    "a destroyed stream": ("destroy(stream)", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "sys.exit on a thread": ("thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()", 0),
    "os._exit": ("os._exit(7)", 7),
    "a thread that waits for a stream": (
        "go, wait = threading.Event(), {'timeout': None}\n"
        "threading.Thread(target=lambda: (go.set(), pool.empty(2 * MIB, **wait)), daemon=True).start()\ngo.wait()",
        0,
    ),
}


@pytest.fixture
def end_of(fake_libcuda):
    def end_of(script):
        head = f"import os, sys, threading\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom drivers import *\n"
        scene = "pool = PinnedPool('cuda:0', max_bytes=2 * MIB)\nstream = make_stream()\nput_in_flight(pool, stream)\n"
        script = f"{head}driver = FakeCuda({str(fake_libcuda)!r})\n{HELPERS}{scene}{script}"
        environment = os.environ | {"PINPOOL_CUDA_LIBRARY": str(fake_libcuda), "FAKE_CUDA": "devices=2"}
        command = [sys.executable, "-W", "error", "-c", script]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)

    return end_of


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_well_with(end_of, ending):
    script, code = ENDINGS[ending]
    done = end_of(script)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_ctrl_c_while_waiting_for_a_stream_ends_python_as_it_always_does(end_of):
    ctrl_c = "import signal\nthreading.Thread(target=lambda: signal.raise_signal(signal.SIGINT)).start()\n"
    done = end_of(f"sys.setswitchinterval(3600)\n{ctrl_c}pool.empty(2 * MIB, timeout=None)")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert done.stderr.count("Traceback") == 1
