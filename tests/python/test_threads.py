"""Threads: a pool is shared, memory goes from one to another, and long calls let the others run."""

import contextlib
import gc
import queue
import random
import threading

import numpy as np
import pytest
import torch

import pinpool.torch
from pinpool import PinnedPool, is_pinned, register

MIB = 1 << 20
LONG = 256 * MIB  # bytes: with these a call takes long enough for others to run
SIZES = (1, 4096, 5000, 70_000, MIB, MIB + 5)


def run_threads(work, count):
    """Run `work(number)` in so many threads at once, and raise what any of them raised."""
    failures, ready = [], threading.Barrier(count)

    def guarded(number):
        ready.wait()
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


@contextlib.contextmanager
def tolerating(word):
    """Let a ValueError pass that says this word."""
    try:
        yield
    except ValueError as error:
        if word not in str(error):
            raise


def is_empty(pool):
    stats = pool.stats()
    return (stats["blocks"], stats["allocated_bytes"], stats["requested_bytes"], stats["pending_bytes"]) == (0, 0, 0, 0)


def as_array(pool, nbytes):
    return np.asarray(pool.empty(nbytes))


def as_numpy_of_torch(pool, nbytes):
    return torch.from_dlpack(pool.empty(nbytes)).numpy()


def as_exchanged(pool, nbytes):
    return pinpool.torch.empty(pool, nbytes, torch.uint8).numpy()


def as_dlpack(pool, nbytes):
    return np.from_dlpack(pool.empty(nbytes))


def test_eight_threads_never_see_each_others_bytes(pool):
    def work(number):
        choose = random.Random(number)
        held = []
        for _ in range(300):
            make = choose.choice((as_array, as_numpy_of_torch, as_exchanged, as_dlpack))
            view = make(pool, choose.choice(SIZES))
            view[:] = number
            held.append(view)
            if len(held) > 4:
                gone = held.pop(choose.randrange(5))
                assert (gone == number).all()

    run_threads(work, 8)
    gc.collect()
    assert is_empty(pool)
    assert pool.trim() > 0
    assert pool.stats()["reserved_bytes"] == 0


def test_a_small_pool_serves_threads_that_wait_for_each_other():
    pool = PinnedPool("host", max_bytes=2 * MIB)

    def work(number):
        choose = random.Random(number)
        for _ in range(200):
            view = np.asarray(pool.empty(choose.choice(SIZES), timeout=None))
            view[:] = number
            assert (view == number).all()
            del view  # nobody waits for more while holding some

    run_threads(work, 6)
    gc.collect()
    assert is_empty(pool)
    assert pool.stats()["peak_reserved_bytes"] <= 2 * MIB


def test_threads_that_keep_within_the_budget_are_never_refused():
    pool = PinnedPool("host", max_bytes=64 * MIB)

    def work(number):
        choose = random.Random(number)
        for _ in range(200):
            held = [pool.empty(choose.choice((500_000, 900_000, 1_000_000))) for _ in range(4)]
            assert len(held) == 4
            if choose.random() < 0.2:
                pool.trim()

    run_threads(work, 8)
    assert is_empty(pool)


def test_tensors_go_from_one_thread_to_another(pool):
    there, back = queue.Queue(), queue.Queue()
    laps = 500

    def work(number):
        if number == 0:
            for lap in range(laps):
                there.put(pinpool.torch.empty(pool, 5000, torch.int32).fill_(lap))
                if lap % 7 == 6:
                    assert int(back.get()[-1]) == -1
        else:
            for lap in range(laps):
                tensor = there.get()
                assert int(tensor[0]) == int(tensor[-1]) == lap
                if lap % 7 == 6:
                    back.put(tensor.fill_(-1))

    run_threads(work, 2)
    gc.collect()
    assert is_empty(pool)


def test_one_array_may_be_used_and_released_by_many_threads(pool):
    for _ in range(50):
        array = pool.zeros(5000)

        def work(number, array=array):
            with tolerating("released"):
                view = memoryview(array) if number % 2 else np.from_dlpack(array)
                assert bytes(view) == bytes(5000)
            array.release()

        run_threads(work, 4)
    gc.collect()
    assert is_empty(pool)


def test_one_buffer_may_be_registered_by_many_threads(locked):
    before, buffer = locked(), np.zeros(100_000)

    def work(number):
        for _ in range(50):
            with register(buffer):
                assert is_pinned(buffer)

    run_threads(work, 4)
    assert (is_pinned(buffer), locked()) == (False, before)


def test_blocks_may_be_unpinned_while_others_are_taken(pool):
    def work(number):
        for _ in range(100):
            tensor = pinpool.torch.empty(pool, 5000, torch.uint8)
            if number % 2:
                pinpool.torch.unpin(tensor)
            else:
                assert is_pinned(tensor)

    run_threads(work, 4)
    pool.trim()
    assert pool.stats()["reserved_bytes"] == 0


def test_a_pool_may_be_closed_while_threads_use_it(locked):
    before = locked()
    for _ in range(20):
        pool = PinnedPool("host", max_bytes=32 * MIB)

        def work(number, pool=pool):
            if number == 0:
                pool.close()
            with tolerating("closed"):
                for size in SIZES:
                    np.asarray(pool.empty(size))[:] = number

        run_threads(work, 4)
        assert pool.stats()["reserved_bytes"] == 0
    assert locked() == before


# The interpreter


def long_empty():
    pool = PinnedPool("host", max_bytes=LONG)
    return lambda: pool.empty(LONG)


def long_zeros():
    pool = reserved()
    return lambda: pool.zeros(LONG)


def long_reserve():
    pool = PinnedPool("host", max_bytes=LONG)
    return lambda: pool.reserve(LONG)


def reserved():
    pool = PinnedPool("host", max_bytes=LONG, pages="4k")
    pool.reserve(LONG)
    return pool


def long_trim():
    return reserved().trim


def long_close():
    return reserved().close


def long_drop_of_a_pool():
    return [reserved()].clear


def long_register():
    buffer = bytearray(LONG)
    return lambda: register(buffer)


def long_close_of_a_registration():
    return register(bytearray(LONG)).close


def long_drop_of_a_registration():
    return [register(bytearray(LONG))].clear


@pytest.mark.locks(2 * LONG)
@pytest.mark.parametrize(
    "prepare",
    [
        *[long_empty, long_zeros, long_reserve, long_trim, long_close, long_drop_of_a_pool],
        *[long_register, long_close_of_a_registration, long_drop_of_a_registration],
    ],
)
def test_another_thread_runs_during_a_long_call(turns, prepare):
    for _ in range(10):  # once would do, but for a machine that has no core to spare at this moment
        call = prepare()
        before = turns()
        call()
        if turns() > before:
            return
    pytest.fail("no other thread got the interpreter")
