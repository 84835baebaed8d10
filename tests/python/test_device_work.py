"""Blocks that device work may still use: `defer` with events of the test's own, and what a stream may look like."""

import ctypes
import gc
import itertools
import queue
import signal
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import pinpool
import pinpool.torch
from pinpool import OutOfPinnedMemoryError, PinnedPool, _pinpool

PAGE, MIB = 4096, 1 << 20
PARTS = ("allocated", "cached", "pending", "quarantined", "leaked")


class Work:
    """An event that is done when the test says so."""

    def __init__(self, done=False, meanwhile=None):
        self.done, self.asked, self.meanwhile = done, [], meanwhile

    def query(self):
        self.asked.append(threading.get_ident())
        if self.meanwhile is not None:
            self.meanwhile()
        return self.done


class Failing:
    """An event that nobody will ever know the end of."""

    def query(self):
        raise RuntimeError("the device fell off the bus")


def sizes(pool):
    """Tell the bytes in each state, which make up all that is reserved."""
    stats = pool.stats()
    parts = {part: stats[f"{part}_bytes"] for part in PARTS}
    assert stats["reserved_bytes"] == sum(parts.values()), stats
    return parts


def pending(pool):
    return sizes(pool)["pending"]


def put_in_flight(pool, event, nbytes=MIB):
    """Release a block under an event, and tell where it is."""
    array = pool.empty(nbytes)
    pool.defer(array, event)
    return array.ptr


def look(pool, unseen=itertools.count(7)):  # noqa: B008
    """Have the pool ask its events, and keep what is idle: it is asked for a size that it has not had."""
    pool.empty(next(unseen) * PAGE)


# What is resolved to a block

ALIASES = {
    "the array": lambda array: array,
    "an array of numpy": np.asarray,
    "a slice": lambda array: np.asarray(array)[100:200],
    "a slice backwards": lambda array: np.asarray(array)[::-3],
    "another dtype": lambda array: np.asarray(array)[8:].view(np.int64),
    "a memoryview": memoryview,
    "a slice of a memoryview": lambda array: memoryview(array)[4990:],
    "a tensor": torch.from_dlpack,
    "a view of a tensor": lambda array: torch.from_dlpack(array).view(10, 500)[3:, ::7],
    "numpy of a tensor": lambda array: torch.from_dlpack(array).view(torch.float32).numpy(),
    "a parameter": lambda array: torch.nn.Parameter(torch.from_dlpack(array).view(torch.float32)),
    "the whole extent": lambda array: (array.ptr, 5000),
    "the last byte": lambda array: (array.ptr + 4999, 1),
    "the padding": lambda array: (array.ptr + 5000, 2 * PAGE - 5000),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("defer", [lambda _pool, *given: pinpool.defer(*given), PinnedPool.defer], ids=["all", "one"])
def test_whatever_lies_in_a_block_defers_the_block(pool, alias, defer):
    array, work = pool.empty(5000), Work()
    defer(pool, ALIASES[alias](array), work)
    del array
    assert (pending(pool), sizes(pool)["allocated"]) == (2 * PAGE, 0)
    work.done = True
    look(pool)
    assert pending(pool) == 0


@pytest.mark.parametrize("alias", ALIASES)
def test_a_stream_is_of_no_concern_to_memory_without_a_device(pool, alias):
    array = pool.empty(5000)
    pinpool.record_stream(ALIASES[alias](array), 0)
    pool.record_stream(ALIASES[alias](array), 0)
    del array
    assert pending(pool) == 0


def outside(array):
    return {
        "bytes": bytes(100),
        "a tensor of torch's": torch.zeros(5),
        "an array of numpy's": np.zeros(5),
        "no memory at all": (PAGE, 5),
        "one byte before": (array.ptr - 1, 2),
        "one byte after": (array.ptr + PAGE - 1, 2),
        "two blocks": (array.ptr, 2 * PAGE),
        "all memory": (1, sys.maxsize),
    }


@pytest.mark.parametrize("what", outside(types.SimpleNamespace(ptr=1)))
@pytest.mark.parametrize("of", [pinpool, PinnedPool("host", max_bytes=MIB)], ids=["all", "one"])
def test_what_is_in_no_live_block_is_refused(pool, what, of):
    arrays = [pool.empty(PAGE) for _ in range(3)]
    first = min(arrays, key=lambda array: array.ptr)
    for call in (of.defer, of.record_stream):
        with pytest.raises(ValueError, match=r"in no live block of a pool|a block of another pool"):
            call(outside(first)[what], Work() if call == of.defer else 0)
    del arrays, first
    assert pending(pool) == 0


@pytest.mark.parametrize("state", ["idle", "pending", "given back"])
def test_a_block_without_an_owner_is_refused(pool, state):
    address = put_in_flight(pool, Work(done=state != "pending"))
    if state == "idle":
        look(pool)
    if state == "given back":
        pool.trim()
    for defer in (pinpool.defer, pool.defer):
        with pytest.raises(ValueError, match="no live block"):
            defer((address, 1), Work())


def test_an_array_that_was_released_is_refused_though_a_view_lives(pool):
    array = pool.empty(PAGE)
    view = np.asarray(array)
    array.release()
    with pytest.raises(ValueError, match=r"released|no live block"):
        pinpool.defer(array, Work())
    with pytest.raises(ValueError, match=r"released|no live block"):
        pinpool.record_stream(array, 0)
    pinpool.defer(view, Work())


def test_a_block_of_another_pool_is_refused_by_a_pool_and_not_by_the_module(pool):
    other, work = PinnedPool("host", max_bytes=MIB), Work()
    array = other.empty(PAGE)
    for call, what in ((pool.defer, work), (pool.record_stream, 0)):
        with pytest.raises(ValueError, match="a block of another pool; ask that pool, or pinpool itself"):
            call(array, what)
    pinpool.defer(array, work)
    del array
    assert (pending(pool), pending(other)) == (0, PAGE)


@pytest.mark.parametrize(
    "make", [lambda pool: pool.empty(0), lambda _: torch.empty(0), lambda _: (5, 0), lambda _: b""]
)
def test_what_has_no_bytes_is_left_alone(pool, make):
    empty, work = make(pool), Work()
    for of in (pool, pinpool):
        of.defer(empty, work)
        of.record_stream(empty, 0)
    assert (sizes(pool), sys.getrefcount(work)) == (dict.fromkeys(PARTS, 0), 2)


class OnDevice:
    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **_):
        raise AssertionError("it was exported")


def fake_tensor():
    with FakeTensorMode():
        return torch.empty(5)


@pytest.mark.parametrize("make", [OnDevice, lambda: torch.empty(5, device="meta"), fake_tensor])
def test_memory_elsewhere_is_refused_in_words(pool, make):
    for call, what in ((pinpool.defer, Work()), (pool.defer, Work()), (pinpool.record_stream, 0)):
        with pytest.raises(ValueError, match="invalid memory: it is not in host memory; pass the tensor on the host"):
            call(make(), what)


@pytest.mark.parametrize("thing", [None, 5, "text", object()])
def test_what_is_no_memory_is_refused(pool, thing):
    with pytest.raises(TypeError, match="is no memory"):
        pinpool.defer(thing, Work())


def test_pool_memory_is_what_lies_in_a_live_block(pool):
    array = pool.empty(5000)
    things = [make(array) for make in ALIASES.values()]
    assert all(_pinpool.is_pool_memory(thing) for thing in things)
    foreign = [bytes(100), torch.zeros(5), (PAGE, 5), (array.ptr - 1, 2), (array.ptr + 8191, 2), pool.empty(0)]
    assert not any(_pinpool.is_pool_memory(thing) for thing in foreign)
    pool.defer(array, Work())
    extent = (array.ptr, 5000)
    del array, things
    assert (pending(pool), _pinpool.is_pool_memory(extent)) == (2 * PAGE, False)


# When a block is reused


@pytest.mark.parametrize("done_at", range(4))
def test_a_block_is_reused_when_its_work_is_done_and_not_before(done_at):
    pool, work = PinnedPool("host", max_bytes=MIB), Work()
    address = put_in_flight(pool, work)
    for _ in range(done_at):
        with pytest.raises(OutOfPinnedMemoryError):
            pool.empty(MIB)
        assert (sizes(pool)["pending"], pinpool.is_pinned((address, MIB))) == (MIB, True)
    work.done = True
    array = pool.empty(MIB)
    assert (array.ptr, pending(pool), len(work.asked) > done_at) == (address, 0, True)


def test_what_is_deferred_is_used_by_its_owner_as_before(pool):
    array, work = pool.zeros(PAGE), Work()
    pool.defer(array, work)
    np.asarray(array)[:] = 7
    assert (bytes(array), pool.is_pinned(array), pending(pool)) == (b"\7" * PAGE, True, 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_events_of_a_block_must_be_done(order):
    pool, works = PinnedPool("host", max_bytes=MIB), [Work() for _ in range(3)]
    array = pool.empty(MIB)
    for work in works:
        pinpool.defer(array, work)
    array.release()
    for number in order:
        with pytest.raises(OutOfPinnedMemoryError):
            pool.empty(MIB)
        works[number].done = True
    assert pool.empty(MIB).nbytes == MIB


def test_one_event_holds_several_blocks():
    pool, work = PinnedPool("host", max_bytes=3 * MIB), Work()
    for array in [pool.empty(MIB) for _ in range(3)]:
        pool.defer(array, work)
    del array
    assert pending(pool) == 3 * MIB
    work.done = True
    assert len({array.ptr for array in [pool.empty(MIB) for _ in range(3)]}) == 3


@pytest.mark.parametrize("stuck", range(4))
def test_a_block_that_is_stuck_holds_up_no_other_of_its_size(stuck):
    pool, works = PinnedPool("host", max_bytes=4 * MIB), [Work(done=number != stuck) for number in range(4)]
    arrays = [pool.empty(MIB) for _ in range(4)]
    addresses = [array.ptr for array in arrays]
    for array, work in zip(arrays, works, strict=True):
        pool.defer(array, work)
    del array
    arrays.clear()
    arrays = [pool.empty(MIB) for _ in range(3)]
    assert {array.ptr for array in arrays} == set(addresses) - {addresses[stuck]}
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(MIB)
    assert pending(pool) == MIB


def test_a_block_released_twice_is_pending_once(pool):
    array, work = pool.empty(MIB), Work()
    alias = torch.from_dlpack(array)
    pool.defer(array, work)
    array.release()
    array.release()
    assert pending(pool) == 0
    del alias
    array.release()
    assert (pending(pool), pool.stats()["blocks"]) == (MIB, 0)
    work.done = True
    assert (pool.empty(MIB).nbytes, pending(pool)) == (MIB, 0)


def test_an_event_before_a_release_does_not_hold_the_next_owner(pool):
    put_in_flight(pool, Work(done=True))
    del (_ := [pool.empty(MIB)])[:]
    assert (pending(pool), sizes(pool)["cached"]) == (0, MIB)


def test_idle_memory_is_given_up_before_what_is_in_flight():
    pool, work = PinnedPool("host", max_bytes=2 * MIB), Work()
    arrays = [pool.empty(MIB), pool.empty(MIB)]
    pool.defer(arrays[0], work)
    address = arrays[0].ptr
    arrays.clear()
    array = pool.empty(MIB // 2)
    assert (pending(pool), pool.is_pinned((address, MIB)), pool.is_pinned(array)) == (MIB, True, True)


def test_a_block_whose_work_is_done_serves_before_the_pool_grows(pool):
    address = put_in_flight(pool, Work(done=True))
    calls = pool.stats()["os_calls"]
    array = pool.empty(MIB)
    assert (array.ptr, pool.stats()["os_calls"]) == (address, calls)


def test_blocks_of_other_sizes_whose_work_is_done_make_room():
    pool = PinnedPool("host", max_bytes=4 * MIB)
    for array in [pool.empty(MIB) for _ in range(4)]:
        pool.defer(array, Work(done=True))
    del array
    assert pending(pool) == 4 * MIB
    assert pool.empty(4 * MIB).nbytes == 4 * MIB


@pytest.mark.parametrize("nbytes", [PAGE, MIB])
def test_trimming_keeps_what_is_in_flight(nbytes):
    pool, work = PinnedPool("host", max_bytes=8 * MIB), Work()
    address = put_in_flight(pool, work, nbytes)
    pool.trim()
    assert (pending(pool), pool.is_pinned((address, nbytes))) == (nbytes, True)
    work.done = True
    assert pool.trim() >= nbytes
    assert (sizes(pool), pool.is_pinned((address, 1))) == (dict.fromkeys(PARTS, 0), False)


def test_a_block_in_flight_is_not_unpinned(pool):
    array, work = pool.empty(MIB), Work()
    pool.defer(array, work)
    with pytest.raises(ValueError, match="device work that was recorded on it is not done"):
        _pinpool.unpin(array)
    assert pool.is_pinned(array)
    work.done = True
    assert _pinpool.unpin(array)


def test_a_full_pool_tells_what_is_pending_and_for_how_long():
    pool = PinnedPool("host", max_bytes=3 * MIB)
    with pytest.raises(OutOfPinnedMemoryError) as without:
        pool.empty(4 * MIB)
    assert (without.value.pending, without.value.oldest) == (0, None)
    live = pool.empty(MIB)
    put_in_flight(pool, Work(), 2 * MIB)
    with pytest.raises(OutOfPinnedMemoryError) as caught:
        pool.empty(MIB)
    error = caught.value
    assert (error.wanted, error.limit, error.allocated, error.pending) == (MIB, 3 * MIB, live.nbytes, 2 * MIB)
    assert (error.cached, type(error.oldest), error.oldest >= 0) == (0, float, True)
    assert f"pending {2 * MIB} (device work or transfers, the oldest " in str(error)


# What an event is, and how it is asked


@pytest.mark.parametrize("answer", [0, 1, "", "yes", None, [], [0], 0.0, np.True_, np.False_, torch.tensor(True)])
def test_an_answer_is_taken_for_its_truth(answer):
    pool = PinnedPool("host", max_bytes=MIB)
    put_in_flight(pool, Work(done=answer))
    assert pool.trim() == (MIB if answer else 0)
    assert sizes(pool)["quarantined"] == 0


class Undecided:
    def __bool__(self):
        raise ZeroDivisionError("neither yes nor no")


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Failing(), "Failing failed: RuntimeError: the device fell off the bus"),
        (Work(done=Undecided()), "Work failed: ZeroDivisionError: neither yes nor no"),
        (Work(done=np.zeros(2)), "Work failed: ValueError: The truth value"),
    ],
)
def test_a_block_whose_event_fails_is_never_reused(event, reason):
    pool = PinnedPool("host", max_bytes=2 * MIB)
    assert (pool.stats()["quarantined_bytes"], pool.stats()["quarantine_reason"]) == (0, None)
    address = put_in_flight(pool, event)
    array = pool.empty(MIB)
    assert array.ptr != address
    assert (pending(pool), sizes(pool)["quarantined"]) == (0, MIB)
    assert pool.stats()["quarantine_reason"].startswith(f"the query() of {__name__}.{reason}")
    del array
    assert pool.trim() == MIB
    with pytest.raises(OutOfPinnedMemoryError, match="pending 0"):
        pool.empty(2 * MIB)
    pool.close()
    assert (pool.is_pinned((address, MIB)), sizes(pool)["quarantined"]) == (True, MIB)


def test_a_failed_event_does_not_end_the_wait_for_the_others():
    pool, work = PinnedPool("host", max_bytes=8 * MIB), Work()
    array = pool.empty(MIB)
    pool.defer(array, Failing())
    pool.defer(array, work)
    del array
    look(pool)
    assert (pending(pool), sizes(pool)["quarantined"]) == (MIB, 0)
    work.done = True
    look(pool)
    assert (pending(pool), sizes(pool)["quarantined"]) == (0, MIB)


def test_a_failed_event_is_not_asked_again_and_holds_up_no_other_block(pool):
    put_in_flight(pool, Failing())
    address = put_in_flight(pool, Work(done=True), 2 * MIB)
    assert pool.empty(2 * MIB).ptr == address


class NoEvent:
    query = 5


@pytest.mark.parametrize("event", [None, 5, "text", object(), NoEvent(), threading.Event()])
def test_what_is_no_event_is_refused_and_nothing_is_deferred(pool, event):
    array = pool.empty(PAGE)
    for of in (pinpool, pool):
        with pytest.raises(TypeError, match=r"is no event: it has no query\(\) that tells whether it is done"):
            of.defer(array, event)
    del array
    assert pending(pool) == 0


def test_an_event_that_does_not_show_its_query_tells_why(pool):
    class Broken:
        @property
        def query(self):
            raise KeyError("gone")

    array = pool.empty(PAGE)
    with pytest.raises(KeyError, match="gone"):
        pool.defer(array, Broken())
    del array
    assert pending(pool) == 0


def test_a_deleter_asks_no_event(pool):
    work, arrays = Work(), [pool.empty(size) for size in (5, PAGE, MIB)]
    aliases = [torch.from_dlpack(arrays[0]), np.asarray(arrays[1]), memoryview(arrays[2]), arrays[2].__dlpack__()]
    for array in arrays:
        pool.defer(array, work)
    arrays[0].release()
    del array
    arrays.clear()
    thread = threading.Thread(target=aliases.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert (pending(pool), pool.stats()["blocks"], work.asked) == (MIB + 2 * PAGE, 0, [])
    pool.empty(2 * MIB)
    assert set(work.asked) == {threading.get_ident()}


def test_an_event_is_asked_on_the_thread_that_wants_memory(pool):
    work = Work()
    put_in_flight(pool, work)
    thread = threading.Thread(target=pool.empty, args=(MIB,))
    thread.start()
    thread.join()
    assert work.asked == [thread.ident]


USES = {
    "tells what it holds": lambda pool, _: pool.stats(),
    "takes memory": lambda pool, _: pool.empty(3 * PAGE),
    "takes as much as is wanted": lambda pool, _: pool.empty(MIB),
    "trims": lambda pool, _: pool.trim(),
    "reserves": lambda pool, _: pool.reserve(PAGE),
    "drops other blocks": lambda _, others: others.clear(),
    "follows other work": lambda pool, _: pool.defer(pool.empty(5), Work(done=True)),
    "makes another pool": lambda _, __: PinnedPool("host", max_bytes=MIB).empty(5),
    "collects garbage": lambda _, __: gc.collect(),
}


@pytest.mark.parametrize("use", USES)
def test_an_event_may_use_the_pool_while_it_is_asked(pool, use):
    others = [pool.empty(size) for size in (5, 5 * PAGE, 2 * MIB)]
    for other in others[1:]:
        pool.defer(other, Work(done=True))
    del other
    work = Work(done=True, meanwhile=lambda: USES[use](pool, others))
    put_in_flight(pool, work)
    put_in_flight(pool, Work(done=True, meanwhile=work.meanwhile))
    assert (pool.empty(MIB).nbytes, len(work.asked) > 0) == (MIB, True)
    assert (pool.stats()["quarantine_reason"], sizes(pool)["quarantined"]) == (None, 0)


def test_an_event_may_close_the_pool_while_it_is_asked(pool):
    put_in_flight(pool, Work(done=True, meanwhile=pool.close))
    with pytest.raises(ValueError, match="closed"):
        pool.empty(MIB)
    PinnedPool("host", max_bytes=MIB).empty(5)
    assert sizes(pool) == dict.fromkeys(PARTS, 0)


def test_an_event_of_a_closed_pool_may_use_another_one(pool):
    closed = PinnedPool("host", max_bytes=MIB)
    work = Work(done=True, meanwhile=lambda: pool.empty(3 * PAGE))
    put_in_flight(closed, work)
    work.done = False
    closed.close()
    work.done = True
    pool.trim()
    assert sizes(closed) == dict.fromkeys(PARTS, 0)


@pytest.mark.parametrize("call", ["trim()", "close()", "empty(MIB)"])
def test_an_event_may_ask_for_more_than_there_is(run, call):
    run(f"""
        from pinpool import OutOfPinnedMemoryError, PinnedPool

        class Work:
            asked = 0
            def query(self):
                self.asked += 1
                try:
                    return self.asked > 1 or pool.empty(2 * MIB)
                except (OutOfPinnedMemoryError, ValueError):
                    return True

        signal.alarm(10)
        pool, work = PinnedPool("host", max_bytes=2 * MIB), Work()
        live, array = pool.empty(MIB), pool.empty(MIB)
        pool.defer(array, work)
        del array
        pool.{call}
        assert pool.stats()["quarantined_bytes"] == 0 and work.asked > 0
    """)


def test_a_block_whose_work_is_done_serves_others_while_a_slow_event_is_asked():
    pool, served = PinnedPool("host", max_bytes=2 * MIB), []
    first, second = sorted((pool.empty(MIB), pool.empty(MIB)), key=lambda array: array.ptr)

    def serve_another_thread():
        slow.meanwhile = None
        thread = threading.Thread(target=lambda: served.append(pool.empty(MIB)))
        thread.start()
        thread.join()

    slow = Work(meanwhile=serve_another_thread)
    pool.defer(first, Work(done=True))
    pool.defer(second, slow)
    del first, second
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(MIB)
    assert len(served) == 1


@pytest.mark.parametrize("live", [True, False])
def test_an_event_is_kept_until_it_is_done_and_no_longer(pool, live):
    done, array = [], pool.empty(MIB)

    class Listed:
        def query(self):
            return done

    event = Listed()
    known = weakref.ref(event)
    pool.defer(array, event)
    del event
    if not live:
        array.release()
    pool.trim()
    gc.collect()
    assert known() is not None
    done.append(True)
    (_pinpool.unpin if live else PinnedPool.trim)(array if live else pool)
    assert known() is None


def test_events_that_are_done_do_not_gather_on_a_block_that_lives(pool):
    array, alive = pool.empty(MIB), weakref.WeakSet()
    for _ in range(2000):
        work = Work(done=True)
        alive.add(work)
        pool.defer(array, work)
    del work
    assert len(alive) < 100


def test_a_block_that_lives_asks_of_its_unfinished_events_rarely(pool):
    array, works = pool.empty(MIB), [Work() for _ in range(1000)]
    for work in works:
        pool.defer(array, work)
    assert sum(len(work.asked) for work in works) < 5000


def test_the_last_reference_to_an_event_may_go_on_any_thread(pool):
    ended = []

    class Ending(Work):
        def __del__(self):
            ended.append(threading.get_ident())
            pool.empty(5)

    put_in_flight(pool, Ending(done=True))
    thread = threading.Thread(target=pool.trim)
    thread.start()
    thread.join()
    assert ended == [thread.ident]


# Waiting


def do_while_waiting(action):
    """Do it as soon as this thread lets go of the interpreter (with `hand_over`), on another."""
    go = threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), action()))
    thread.start()
    go.set()
    return thread


@pytest.mark.parametrize("timeout", [None, 1000])
@pytest.mark.parametrize("nbytes", [MIB, MIB // 2])
def test_a_waiting_request_is_served_when_the_work_is_done(hand_over, timeout, nbytes):
    pool, work = PinnedPool("host", max_bytes=MIB), Work()
    put_in_flight(pool, work)
    thread = do_while_waiting(lambda: setattr(work, "done", True))
    assert pool.empty(nbytes, timeout=timeout).nbytes == nbytes
    thread.join()


def test_other_threads_run_while_a_request_waits_for_work(turns):
    pool, work = PinnedPool("host", max_bytes=MIB), Work()
    put_in_flight(pool, work)
    before = turns()
    work.meanwhile = lambda: setattr(work, "done", turns() > before + 5)
    assert pool.empty(MIB, timeout=None).nbytes == MIB


@pytest.mark.timeout(20)
@pytest.mark.parametrize("timeout", [0, 0.001, 0.05])
def test_a_request_that_waits_in_vain_tells_so(timeout):
    pool, work = PinnedPool("host", max_bytes=MIB), Work()
    put_in_flight(pool, work)
    with pytest.raises(OutOfPinnedMemoryError) as caught:
        pool.empty(MIB, timeout=timeout)
    assert (caught.value.pending, caught.value.oldest >= timeout, len(work.asked) > 0) == (MIB, True, True)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("timeout", [None, 0, 60])
def test_a_request_that_nothing_can_serve_any_more_fails_at_once(timeout):
    pool = PinnedPool("host", max_bytes=MIB)
    put_in_flight(pool, Failing())
    with pytest.raises(OutOfPinnedMemoryError, match=r"lost 1048576; .*quarantine_reason") as caught:
        pool.empty(PAGE, timeout=timeout)
    assert (caught.value.lost, caught.value.pending, caught.value.cached) == (MIB, 0, 0)
    with pytest.raises(OutOfPinnedMemoryError, match="more than the pool may ever hold: raise max_bytes"):
        PinnedPool("host", max_bytes=MIB).empty(2 * MIB, timeout=timeout)


def test_a_waiting_request_gets_what_comes_back_beside_a_block_whose_event_failed():
    pool, work = PinnedPool("host", max_bytes=2 * MIB), Work()
    put_in_flight(pool, Failing())
    put_in_flight(pool, work)
    work.meanwhile = lambda: setattr(work, "done", len(work.asked) > 3)
    assert pool.empty(MIB, timeout=None).nbytes == MIB


def test_a_waiting_request_gets_the_lockable_memory_of_a_closed_pool(run):
    run("""
        from pinpool import PinnedPool

        class Work:
            asked = 0
            def query(self):
                self.asked += 1
                return self.asked > 3

        become_unprivileged(6 * MIB)
        closed, pool = (PinnedPool("host", max_bytes=6 * MIB) for _ in range(2))
        array = closed.empty(4 * MIB)
        closed.defer(array, Work())
        del array
        closed.close()
        assert pool.empty(4 * MIB, timeout=3).nbytes == 4 * MIB
    """)


PENDING = """\
import pinpool

class Work:
    def __init__(self):
        self.done, self.pids = False, []
    def query(self):
        self.pids.append(os.getpid())
        return self.done

pool, work = pinpool.PinnedPool("host", max_bytes=MIB), Work()
array = pool.empty(MIB)
pool.defer(array, work)
"""


def test_ctrl_c_ends_the_wait_for_work_and_the_pool_is_usable(run):
    run(f"""{PENDING}
del array
go = threading.Event()
thread = threading.Thread(target=lambda: go.wait() and signal.raise_signal(signal.SIGINT))
sys.setswitchinterval(3600)  # the thread runs when this one lets go of the interpreter
thread.start()
go.set()
try:
    pool.empty(MIB, timeout=None)
    raise SystemExit("it was served")
except KeyboardInterrupt:
    pass
thread.join()
assert pool.stats()["pending_bytes"] == MIB
work.done = True
assert pool.empty(MIB, timeout=None).nbytes == MIB
""")


@pytest.mark.parametrize("timeout", ["None", "0.0"])
def test_ctrl_c_inside_an_event_is_no_failure_of_the_event(run, timeout):
    run(f"""{PENDING}
del array
def query(ask=work.query):
    if not work.done:
        raise KeyboardInterrupt
    return True
work.query = query
try:
    try:
        pool.empty(MIB, timeout={timeout})
    finally:
        [None for _ in range(5)]  # the interpreter looks at its signals
    raise SystemExit("it was served")
except KeyboardInterrupt:
    pass
assert (pool.stats()["pending_bytes"], pool.stats()["quarantined_bytes"]) == (MIB, 0)
work.done = True
assert pool.empty(MIB).nbytes == MIB
""")


# The end of a pool


@pytest.mark.parametrize("nbytes", [PAGE, MIB])
@pytest.mark.parametrize(
    ("end", "use"),
    [
        ("pool.close()", "reserve(4096)"),
        ("pool.close()", "reserve(5)"),
        ("del pool", "trim()"),
        ("with pool: pass", "close()"),
        ("del pool", "__init__"),
    ],
)
def test_a_closed_pool_keeps_what_is_in_flight_until_some_pool_is_used(run, nbytes, end, use):
    # A request may get the address that the closed pool gives up.
    gone = 'pool.stats()["reserved_bytes"] == 0' if end == "pool.close()" else "not pinpool.is_pinned((address, 1))"
    run(f"""
        import pinpool
        from pinpool import PinnedPool

        class Work:
            done = False
            def query(self):
                return self.done

        work, before = Work(), status("VmLck")
        pool, other = PinnedPool("host", max_bytes=8 * MIB), PinnedPool("host", max_bytes=8 * MIB)
        array = pool.zeros({nbytes})
        address = array.ptr
        pool.defer(array, work)
        del array
        {end}
        PinnedPool("host", max_bytes=MIB).trim()
        assert pinpool.is_pinned((address, {nbytes})) and status("VmLck") - before >= {nbytes}
        work.done = True
        assert pinpool.is_pinned((address, {nbytes}))
        {'PinnedPool("host")' if use == "__init__" else f"other.{use}"}
        assert {gone}
        other.trim()
        assert status("VmLck") == before
    """)


def test_a_block_that_outlives_its_pool_waits_for_its_work(locked):
    before, work, pool = locked(), Work(), PinnedPool("host", max_bytes=MIB)
    array = pool.zeros(MIB)
    pool.close()
    pinpool.defer(array, work)
    del array
    other = PinnedPool("host", max_bytes=MIB)
    assert (pending(pool), locked() - before) == (MIB, MIB)
    work.done = True
    other.trim()
    assert (sizes(pool), locked() - before) == (dict.fromkeys(PARTS, 0), 0)


def test_a_pool_that_is_gone_lets_go_of_its_events():
    pool, work = PinnedPool("host", max_bytes=MIB), Work()
    put_in_flight(pool, work)
    del pool
    assert sys.getrefcount(work) == 3
    work.done = True
    PinnedPool("host", max_bytes=MIB).trim()
    assert sys.getrefcount(work) == 2


# Forks and exits


@pytest.mark.parametrize(
    "child",
    [
        "pass",
        "del globals()['array'], globals()['pool']; gc.collect()",
        "array.release(); pool.close()",
        "work.done = True; pinpool.PinnedPool('host', max_bytes=MIB).empty(5)",
        "del globals()['work']; gc.collect()",
    ],
)
@pytest.mark.parametrize("state", ["live", "pending"])
def test_a_forked_child_leaves_alone_what_is_in_flight(run, child, state):
    run(f"""{PENDING}
if {state == "pending"}:
    array.release()
locked, stats = status("VmLck"), pool.stats()

def child():
    {child}

in_child(child)
assert (status("VmLck"), pool.stats(), work.pids) == (locked, stats, [])
array.release()
try:
    pool.empty(MIB)
    raise SystemExit("it was served")
except pinpool.OutOfPinnedMemoryError:
    work.done = True
assert pool.empty(MIB).nbytes == MIB and set(work.pids) == {{os.getpid()}}
""")


def test_a_forked_child_cannot_defer_and_asks_nothing(run):
    run(f"""{PENDING}
def child():
    for call, error in ((pool.defer, pinpool.PinpoolError), (pinpool.defer, ValueError)):
        try:
            call(array, work)
            raise SystemExit("it was deferred")
        except error:
            pass
    try:
        pool.empty(MIB)
        raise SystemExit("it was served")
    except pinpool.PinpoolError as error:
        assert "parent" in str(error)
    array.release()
    assert work.pids == []

in_child(child)
""")


def test_a_child_that_exits_as_python_does_leaves_the_parents_work_pending(run):
    run(f"""{PENDING}
del array
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert pool.stats()["pending_bytes"] == MIB and work.pids == []
""")


ENDINGS = {
    "pending blocks": ("del array", 0),
    "a live block": ("", 0),
    "a closed pool": ("del array\npool.close()", 0),
    "no pool": ("del array, pool", 0),
    "no event": ("del array, work", 0),
    "no modules": ("del array\nsys.modules.clear()", 0),
    "an event that fails": ("work.query = lambda: 1 / 0\ndel array", 0),
    "an event that knows the pool": ("work.pool = pool\ndel array, work, pool", 0),
    "an event that knows its block": ("work.array = array\ndel array, work, pool", 0),
    "an event with an end of its own": ("Work.__del__ = lambda self: pool.trim()\ndel array, work", 0),
    "an event that is done": ("del array\nwork.done = True", 0),
    "a request at exit": ("import atexit\natexit.register(pool.trim)\ndel array", 0),
    "sys.exit": ("del array\nsys.exit(3)", 3),
    "sys.exit on a thread": ("del array\nthread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()", 0),
    "os._exit": ("del array\nos._exit(7)", 7),
    "a thread that waits for work": (
        "del array\ngo = threading.Event()\n"
        "threading.Thread(target=lambda: (go.set(), pool.empty(MIB, timeout=None)), daemon=True).start()\ngo.wait()",
        0,
    ),
}


def end_of(script):
    script = "import os, signal, sys, threading\nMIB = 1 << 20\n" + script
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends_well_with(ending):
    script, code = ENDINGS[ending]
    done = end_of(PENDING + script)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_ctrl_c_while_waiting_for_work_ends_python_as_it_always_does():
    ctrl_c = "def query():\n    signal.raise_signal(signal.SIGINT)\nwork.query = query\n"
    done = end_of(f"{PENDING}del array\n{ctrl_c}pool.empty(MIB, timeout=None)")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert done.stderr.count("Traceback") == 1


# Streams, as far as that needs no driver


class Stream:
    """What some library calls a stream."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


CUDA, XPU = types.SimpleNamespace(type="cuda", index=0), types.SimpleNamespace(type="xpu", index=0)
STREAMS = {
    "the default stream": 0,
    "a handle": 0x7F00_1234_5678,
    "the last handle": (1 << 64) - 1,
    "the protocol": Stream(__cuda_stream__=lambda: (0, 0x7F00)),
    "an older torch.cuda.Stream": Stream(cuda_stream=0x7F00, device=CUDA),
    "a torch.Stream": Stream(native_handle=0x7F00, device=CUDA),
    "a stream of CuPy": Stream(ptr=0x7F00, device_id=0),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_has_many_forms(pool, stream):
    array = pool.empty(5)
    pinpool.record_stream(array, STREAMS[stream])
    pool.record_stream(array, STREAMS[stream])


NO_STREAMS = {
    "text": ("0", TypeError, "str is no CUDA stream"),
    "a fraction": (1.0, TypeError, "float is no CUDA stream"),
    "an object": (object(), TypeError, "object is no CUDA stream"),
    "a truth": (True, TypeError, "bool is no CUDA stream"),
    "a negative number": (-1, ValueError, "invalid stream: -1 is no handle of a CUDA stream"),
    "a number of 65 bits": (1 << 64, ValueError, "is no handle of a CUDA stream"),
    "an XPU stream": (Stream(device=XPU, sycl_queue=5), TypeError, r"pass an event to defer\(obj, event\)"),
    "a torch.Stream of an XPU": (Stream(device=XPU, native_handle=5), TypeError, r"pass an event to defer\(obj, ev"),
    "a protocol that answers None": (Stream(__cuda_stream__=lambda: None), TypeError, None),
    "a protocol with a negative handle": (Stream(__cuda_stream__=lambda: (0, -1)), ValueError, "invalid stream"),
    "an attribute that is no handle": (Stream(ptr="5"), TypeError, None),
}


@pytest.mark.parametrize("stream", NO_STREAMS)
def test_what_is_no_stream_is_refused(pool, stream):
    given, error, text = NO_STREAMS[stream]
    array = pool.empty(5)
    for of in (pinpool, pool):
        with pytest.raises(error, match=text):
            of.record_stream(array, given)


def test_memory_that_no_device_knows_needs_no_stream_and_no_torch(run):
    run("""
        import pinpool

        pinpool.record_stream(pinpool.PinnedPool("host", max_bytes=MIB).empty(5))
        assert "torch" not in sys.modules
    """)


def test_torch_without_work_on_a_device_has_no_stream(pool):
    if torch.cuda.is_initialized():
        pytest.skip("torch uses CUDA")
    array = pool.empty(5)
    pinpool.record_stream(array)
    pool.record_stream(array, stream=None)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("is_used", [True, False])
def test_a_pool_of_a_driver_without_such_streams_follows_torchs_current_work(run_with_driver, fake_level_zero, is_used):
    run_with_driver(
        f"""
        class Work:
            done = False
            query = lambda self: self.done

        work, asked = Work(), []
        streams = types.ModuleType("pinpool.torch._streams")
        streams.is_used = lambda kind: {is_used}
        streams.current_event = lambda kind: asked.append(kind) or work
        stub = types.ModuleType("pinpool.torch")
        stub._streams, stub.current_device, stub.extent = streams, lambda: None, lambda tensor: None
        framework = types.ModuleType("torch")
        framework.Tensor = type("Tensor", (), {{}})

        pool = PinnedPool("xpu:0", max_bytes=MIB)
        array = pool.empty(MIB)
        sys.modules.update({{"torch": framework, "pinpool.torch": stub, "pinpool.torch._streams": streams}})
        pool.record_stream(array)
        array.release()
        assert pool.stats()["pending_bytes"] == (MIB if {is_used} else 0) and asked == ["xpu"] * {is_used}
        work.done = True
        assert pool.empty(MIB).nbytes == MIB
        """,
        f"FakeLevelZero({str(fake_level_zero)!r})",
        before="import types\n",
        ZE_ENABLE_ALT_DRIVERS=fake_level_zero,
        FAKE_LEVEL_ZERO="devices=1",
    )


def test_a_pool_whose_driver_has_no_such_streams_says_what_to_do_instead(run_with_driver, fake_level_zero):
    run_with_driver(
        """
        class Work:
            done = False
            query = lambda self: self.done

        pool, work = PinnedPool("xpu:0", max_bytes=MIB), Work()
        array = pool.empty(MIB)
        text = refusal(pool.record_stream, array, 0)
        assert text.startswith("PinpoolError: ") and "pass an event to defer(obj, event) instead" in text, text
        pool.defer(array, work)
        del array
        assert refusal(pool.empty, MIB).startswith("OutOfPinnedMemoryError")
        work.done = True
        assert pool.empty(MIB).nbytes == MIB
        """,
        f"FakeLevelZero({str(fake_level_zero)!r})",
        ZE_ENABLE_ALT_DRIVERS=fake_level_zero,
        FAKE_LEVEL_ZERO="devices=1",
    )


# Threads


def test_a_device_never_sees_the_bytes_of_another_block():
    pool, device, laps = PinnedPool("host", max_bytes=8 * MIB), queue.Queue(), 200
    wrong = []

    def copy():
        while (job := device.get()) is not None:
            address, nbytes, number, work = job
            if ctypes.string_at(address, nbytes) != bytes([number]) * nbytes:
                wrong.append(number)
            work.done = True

    def offload(number):
        for lap in range(laps):
            nbytes = (PAGE, 5000, 300_000, MIB)[lap % 4]
            array, work = pool.empty(nbytes, timeout=None), Work()
            np.asarray(array)[:] = number
            pool.defer(np.asarray(array)[nbytes // 2 :], work)
            device.put((array.ptr, nbytes, number, work))
            del array

    copying = [threading.Thread(target=copy) for _ in range(2)]
    threads = [threading.Thread(target=offload, args=(number,)) for number in range(1, 7)]
    for thread in copying + threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in copying:
        device.put(None)
    for thread in copying:
        thread.join()
    assert wrong == []
    pool.trim()
    assert sizes(pool) == dict.fromkeys(PARTS, 0)


def test_a_block_is_not_taken_for_the_one_that_was_at_its_address_before(pool):
    first, second, *_live = sorted((pool.empty(PAGE) for _ in range(8)), key=lambda array: array.ptr)
    address, later = second.ptr, Work()

    def renew():
        pool.trim()  # the second block goes back to the arena
        array = pool.empty(PAGE)
        assert array.ptr == address
        pool.defer(array, later)

    def renew_once():
        slow.meanwhile = None
        thread = threading.Thread(target=renew)
        thread.start()
        thread.join()

    slow = Work(meanwhile=renew_once)
    pool.defer(first, slow)
    pool.defer(second, Work(done=True))
    del first, second
    look(pool)  # lists both blocks, and asks the first one's event
    assert pending(pool) == 2 * PAGE
    assert address not in [array.ptr for array in [pool.empty(PAGE) for _ in range(10)]]
    later.done = slow.done = True
    pool.trim()
    assert pending(pool) == 0


def test_threads_defer_and_drop_while_others_trim(pool):
    stop = threading.Event()

    def trim():
        while not stop.is_set():
            pool.trim()

    def work():
        for lap in range(300):
            array = pool.empty((PAGE, MIB)[lap % 2])
            events = [Work(), Work()]
            for event in events:
                pool.defer(array, event)
            del array
            for event in events:
                event.done = True

    trimming = threading.Thread(target=trim)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in [trimming, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    trimming.join()
    pool.trim()
    assert sizes(pool) == dict.fromkeys(PARTS, 0)


def test_closing_while_events_are_asked_leaves_nothing():
    for _ in range(20):
        pool, work = PinnedPool("host", max_bytes=2 * MIB), Work(done=True)
        for array in [pool.empty(PAGE) for _ in range(20)]:
            pool.defer(array, work)
        del array
        threads = [threading.Thread(target=call) for call in (pool.trim, pool.close, pool.close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        PinnedPool("host", max_bytes=MIB).trim()
        assert sizes(pool) == dict.fromkeys(PARTS, 0)
