"""PinnedPool: what it hands out, what it counts, and its end."""

import mmap
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from tqdm import tqdm

from pinpool import PinnedPool, PinpoolError, Stats

KIB, MIB = 1 << 10, 1 << 20
PAGE = mmap.PAGESIZE

# What it hands out


def test_a_block_starts_on_a_page_and_no_two_share_one(pool):
    arrays = [pool.empty(size) for size in (1, 5000, 1, PAGE, 3 * MIB, 77)]
    pages = Counter(page for a in arrays for page in range(a.ptr // PAGE, (a.ptr + a.nbytes - 1) // PAGE + 1))
    assert all(array.ptr % PAGE == 0 for array in arrays)
    assert set(pages.values()) == {1}


def test_zeros_are_zeros_in_used_memory_too(pool):
    used = pool.empty(5000)
    address = used.ptr
    np.asarray(used)[:] = 7
    del used
    array = pool.zeros(5000)
    assert array.ptr == address
    assert bytes(array) == bytes(5000)


@pytest.mark.parametrize("like", [np.ones((2, 3), np.int16), torch.ones((2, 3), dtype=torch.int16)])
def test_empty_like_takes_shape_and_dtype(pool, like):
    array = pool.empty_like(like)
    assert (array.shape, array.dtype) == ((2, 3), "int16")
    assert pool.empty_like(array).shape == (2, 3)


def test_the_second_lap_of_a_loop_makes_no_system_call(pool):
    def lap():
        return [pool.empty(size) for size in (5000, 5000, 100 * KIB, 3 * MIB, 2 * MIB + 1)]

    lap()
    before = pool.stats()
    lap()
    after = pool.stats()
    assert (after["os_calls"], after["misses"]) == (before["os_calls"], before["misses"])
    assert after["hits"] == before["hits"] + 5


def test_the_newest_block_of_a_size_is_the_next_one(pool):
    address = pool.empty(5000).ptr
    assert pool.empty(5000).ptr == address


def test_threads_may_be_told_how_many_prefault():
    pool = PinnedPool("host", threads=3, max_bytes=4 * MIB)
    assert bytes(pool.empty(3 * MIB)) == bytes(3 * MIB)


# What it counts

# What torch's users reported, scaled down: (dtype, shapes).
REPORTED = {
    "pytorch#150517": ("float16", [(18944, 3584 // 64), (14336, 4096 // 64)]),
    "pytorch#95823": ("float16", [4347592704 // 256]),
    "vllm#53042": ("int8", [(2053, 1089536 // 64 // 24)] * 24),
    "cupy#3625": ("uint8", [8_000_000]),
    "pytorch#192722": ("uint8", [150 * MIB // 64, 200 * MIB // 64]),
}


@pytest.mark.locks(64 * MIB)
@pytest.mark.parametrize("report", REPORTED)
def test_reported_sizes_waste_at_most_three_percent(pool, report):
    dtype, shapes = REPORTED[report]
    arrays = [pool.empty(shape, dtype) for shape in shapes]
    stats = pool.stats()
    assert stats["requested_bytes"] == sum(array.nbytes for array in arrays)
    assert stats["reserved_bytes"] <= 1.03 * stats["requested_bytes"]


def test_a_larger_block_of_the_same_power_of_two_never_comes_out_smaller(pool):
    small = pool.empty(3 * MIB)
    address = small.ptr
    del small
    large = pool.zeros(4 * MIB - 1)
    assert large.ptr != address
    assert len(bytes(large)) == 4 * MIB - 1


def test_stats_has_the_documented_keys_and_adds_up(pool):
    arrays = [pool.empty(5000), pool.empty(3 * MIB)]
    del arrays[0]
    stats = pool.stats()
    assert set(stats) == set(Stats.__annotations__)
    assert (stats["blocks"], stats["requested_bytes"], stats["allocated_bytes"]) == (1, 3 * MIB, 3 * MIB)
    assert stats["allocated_bytes"] + stats["cached_bytes"] == stats["reserved_bytes"] == stats["locked_bytes"]
    assert (stats["pending_bytes"], stats["leaked_bytes"], stats["max_bytes"]) == (0, 0, 64 * MIB)


def test_the_peak_stays_when_memory_goes(pool):
    pool.empty(3 * MIB)
    pool.trim()
    stats = pool.stats()
    assert (stats["reserved_bytes"], stats["peak_reserved_bytes"]) == (0, 3 * MIB)


def test_what_is_locked_is_what_the_kernel_says(pool, locked):
    before = locked()
    array = pool.empty(3 * MIB)
    assert locked() - before == pool.stats()["locked_bytes"] == 3 * MIB
    del array
    assert (pool.trim(), locked()) == (3 * MIB, before)


def test_a_repr_tells_what_it_holds(pool):
    array = pool.empty((2, 3), "int16")
    assert repr(array) == 'PinnedArray(shape=[2, 3], dtype="int16", nbytes=12)'
    assert "blocks=1" in repr(pool)
    array.release()
    assert "released" in repr(array)
    pool.close()
    assert "closed" in repr(pool)


# Growing ahead of use


def test_reserved_memory_serves_requests_without_system_calls(pool):
    pool.reserve(4 * MIB)
    before = pool.stats()["os_calls"]
    arrays = [pool.empty(2 * MIB), pool.empty(5000)]
    assert pool.stats()["os_calls"] == before
    assert (pool.stats()["reserved_bytes"], len(arrays)) == (4 * MIB, 2)


@pytest.mark.locks(40 * MIB)
def test_progress_goes_from_some_to_all(pool):
    seen = []
    pool.reserve(40 * MIB, progress=lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {40 * MIB}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (40 * MIB, 40 * MIB)


def test_progress_may_use_the_pool(pool):
    pool.reserve(4 * MIB, progress=lambda _done, _total: pool.empty(5000))
    assert pool.stats()["blocks"] == 0


def test_an_exception_of_progress_undoes_everything(pool, locked):
    before = locked()

    def refuse(_done, _total):
        raise KeyError("no")

    with pytest.raises(KeyError):
        pool.reserve(4 * MIB, progress=refuse)
    assert (pool.stats()["reserved_bytes"], locked()) == (0, before)


def test_progress_true_is_a_bar_that_ends(pool, capsys):
    pool.reserve(4 * MIB, progress=True)
    assert "100%" in capsys.readouterr().err
    assert not tqdm._instances


def test_a_bar_ends_when_memory_cannot_be_had_too(pool, capsys):
    with pytest.raises(PinpoolError):
        pool.reserve(1 << 40, progress=True)
    assert not tqdm._instances


def test_without_tqdm_there_is_no_bar(pool, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    pool.reserve(4 * MIB, progress=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("progress", [None, False])
def test_no_progress_is_no_bar(pool, capsys, progress):
    pool.reserve(4 * MIB, progress=progress)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("nbytes", "error"), [(-1, ValueError), (2**70, ValueError), (1.5, TypeError)])
def test_reserve_takes_a_number_of_bytes(pool, nbytes, error):
    with pytest.raises(error):
        pool.reserve(nbytes)


def test_reserve_takes_a_callable(pool):
    with pytest.raises(TypeError, match="progress"):
        pool.reserve(4 * MIB, progress=3)
    assert pool.stats()["reserved_bytes"] == 0


# The end


def test_trim_gives_back_what_is_idle_and_nothing_else(pool):
    kept, idle = pool.zeros(3 * MIB), pool.empty(2 * MIB)
    del idle
    assert pool.trim() == 2 * MIB
    assert pool.trim() == 0
    assert (pool.stats()["reserved_bytes"], bytes(kept)) == (3 * MIB, bytes(3 * MIB))


@pytest.mark.parametrize(
    ("method", "argument"), [("empty", 5), ("empty", 0), ("zeros", 5), ("empty_like", np.ones(5)), ("reserve", PAGE)]
)
def test_a_closed_pool_refuses_requests(pool, method, argument):
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        getattr(pool, method)(argument)


def test_a_closed_pool_still_answers(pool):
    array = pool.empty(5000)
    assert not pool.closed
    pool.close()
    pool.close()
    assert pool.closed
    assert (pool.trim(), pool.stats()["blocks"], pool.is_pinned(array)) == (0, 1, True)


def test_arrays_outlive_their_pool_and_then_leave_nothing(locked):
    before = locked()
    with PinnedPool("host", max_bytes=4 * MIB) as pool:
        small, large = pool.zeros(5000), pool.zeros(3 * MIB)
    assert (bytes(small), bytes(large)) == (bytes(5000), bytes(3 * MIB))
    del small
    assert pool.stats()["reserved_bytes"] == 3 * MIB
    del large
    assert (pool.stats()["reserved_bytes"], locked()) == (0, before)


def test_a_pool_that_nobody_refers_to_is_closed(locked):
    before = locked()
    array = PinnedPool("host", max_bytes=4 * MIB).zeros(3 * MIB)
    assert bytes(array) == bytes(3 * MIB)
    del array
    assert locked() == before


def test_the_context_manager_closes_on_an_error_too():
    pool = PinnedPool("host", max_bytes=MIB)
    with pytest.raises(ZeroDivisionError), pool as same:
        assert 1 / (same is not pool)
    assert pool.closed


def test_released_memory_is_the_next_to_be_taken_and_a_second_release_does_nothing(pool):
    array = pool.empty(5000)
    address = array.ptr
    array.release()
    other = pool.empty(5000)
    array.release()
    assert array.released
    assert (other.ptr, pool.stats()["blocks"]) == (address, 1)
