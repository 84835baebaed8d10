"""Debug mode: what a released block holds, who wrote to it after that, and which blocks have an owner."""

import ctypes
import re
import threading

import numpy as np
import pytest
import torch

import pinpool.torch
from pinpool import PinnedPool, PinpoolError, WrittenAfterReleaseError

PAGE, MIB = 4096, 1 << 20
PARTS = ("allocated", "cached", "pending", "quarantined", "leaked")


class Work:
    """An event that is done when the test says so."""

    done = False

    def query(self):
        return self.done


@pytest.fixture
def pool():
    pool = PinnedPool("host", max_bytes=16 * MIB, debug=True)
    yield pool
    pool.close()


def take_and_release(pool, nbytes):
    return pool.empty(nbytes).ptr


def bytes_at(address, nbytes):
    return ctypes.string_at(address, nbytes)


def sizes(pool):
    stats = pool.stats()
    parts = {part: stats[f"{part}_bytes"] for part in PARTS}
    assert stats["reserved_bytes"] == sum(parts.values()), stats
    return parts


@pytest.mark.parametrize("nbytes", [1, PAGE, 5000, MIB, 3 * MIB])
def test_a_released_block_is_filled_to_its_last_page(pool, nbytes):
    array = pool.zeros(nbytes)
    address, padded = array.ptr, -(-nbytes // PAGE) * PAGE
    array.release()
    assert bytes_at(address, padded) == b"\xff" * padded


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_released_numbers_are_not_a_number(pool, dtype):
    tensor = pinpool.torch.empty(pool, 1000, getattr(torch, dtype)).zero_()
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    del tensor
    stale = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=getattr(torch, dtype))
    assert stale.isnan().all()


def test_a_block_is_filled_when_its_last_alias_goes_and_not_before(pool):
    array = pool.zeros(PAGE)
    alias = np.asarray(array)
    array.release()
    assert not alias.any()
    address = alias.ctypes.data
    del alias
    assert bytes_at(address, PAGE) == b"\xff" * PAGE


def test_without_debug_nothing_is_filled_and_nothing_is_kept():
    pool = PinnedPool("host", max_bytes=MIB)
    array = pool.zeros(PAGE)
    address = array.ptr
    array.release()
    assert bytes_at(address, PAGE) == bytes(PAGE)
    ctypes.memset(address, 1, 1)
    assert pool.empty(PAGE).ptr == address
    with pytest.raises(ValueError, match="live_blocks needs a pool made with debug=True"):
        pool.live_blocks()


# Writes after the release

DETECTIONS = {
    "the next request": lambda pool, nbytes: pool.empty(nbytes),
    "zeros": lambda pool, nbytes: pool.zeros(nbytes),
    "a tensor": lambda pool, nbytes: pinpool.torch.empty(pool, nbytes, torch.uint8),
    "trim": lambda pool, _: pool.trim(),
    "close": lambda pool, _: pool.close(),
    "the end of a with block": lambda pool, _: pool.__exit__(),
}


@pytest.mark.parametrize("detection", DETECTIONS)
@pytest.mark.parametrize("nbytes", [5000, 2 * MIB])
def test_a_write_after_the_release_is_found_by(pool, detection, nbytes):
    address = take_and_release(pool, nbytes)
    ctypes.memset(address + 1234, 7, 2)
    with pytest.raises(WrittenAfterReleaseError) as caught:
        DETECTIONS[detection](pool, nbytes)
    found, padded = caught.value, -(-nbytes // PAGE) * PAGE
    assert isinstance(found, PinpoolError)
    assert (found.address, found.nbytes, found.offset, found.generation) == (address, padded, 1234, 1)
    line = take_and_release.__code__.co_firstlineno + 1
    assert found.origin.startswith(f"{__file__}:{line} in take_and_release < {__file__}:")
    text = f"block {address:#x}+{padded}, generation 1, was written to at byte 1234 after its release"
    assert text in str(found)
    assert found.origin in str(found)


@pytest.mark.parametrize("offset", [0, 1, 7, 8, 4095, 4096, 4999, 5000, 8191])
@pytest.mark.parametrize("byte", [0, 0x7F, 0xFE])
def test_any_byte_of_the_block_is_watched(pool, offset, byte):
    address = take_and_release(pool, 5000)
    ctypes.memset(address + offset, byte, 1)
    with pytest.raises(WrittenAfterReleaseError) as caught:
        pool.empty(5000)
    assert caught.value.offset == offset


@pytest.mark.parametrize("nbytes", [PAGE, 2 * MIB])
def test_a_block_that_was_written_to_is_never_used_again(pool, nbytes):
    address = take_and_release(pool, nbytes)
    ctypes.memset(address, 7, 1)
    with pytest.raises(WrittenAfterReleaseError) as caught:
        pool.empty(nbytes)
    arrays = [pool.empty(nbytes) for _ in range(3)]
    assert address not in [array.ptr for array in arrays]
    assert (sizes(pool)["quarantined"], sizes(pool)["pending"]) == (nbytes, 0)
    assert pool.stats()["quarantine_reason"] == str(caught.value)
    assert pool.stats()["blocks"] == 3
    arrays.clear()
    pool.trim()
    assert (sizes(pool)["quarantined"], sizes(pool)["cached"] < 4 * MIB) == (nbytes, True)
    assert pinpool.is_pinned((address, nbytes))


def test_a_write_is_found_when_the_memory_is_given_up_for_another_size():
    pool = PinnedPool("host", max_bytes=2 * MIB, debug=True)
    address = take_and_release(pool, MIB)
    ctypes.memset(address + 5, 7, 1)
    with pytest.raises(WrittenAfterReleaseError) as caught:
        pool.empty(2 * MIB)
    assert (caught.value.address, sizes(pool)["quarantined"]) == (address, MIB)


def test_trimming_reports_one_of_several_and_gives_the_rest_back(pool):
    arrays = [pool.empty(MIB) for _ in range(4)]
    stale = [array.ptr for array in arrays[:2]]
    arrays.clear()
    for address in stale:
        ctypes.memset(address, 7, 1)
    with pytest.raises(WrittenAfterReleaseError) as caught:
        pool.trim()
    assert caught.value.address in stale
    assert sizes(pool) == {**dict.fromkeys(PARTS, 0), "quarantined": 2 * MIB}
    assert pool.trim() == 0


def test_a_pool_that_finds_a_write_while_it_closes_is_closed_all_the_same(pool):
    stale, _ = take_and_release(pool, MIB), take_and_release(pool, 2 * MIB)
    ctypes.memset(stale, 7, 1)
    with pytest.raises(WrittenAfterReleaseError):
        pool.close()
    assert (pool.closed, sizes(pool)) == (True, {**dict.fromkeys(PARTS, 0), "quarantined": MIB})
    pool.close()


def test_dropping_a_pool_tells_nothing(run):
    run("""
        import ctypes, pinpool
        pool = pinpool.PinnedPool("host", max_bytes=MIB, debug=True)
        address = pool.empty(5).ptr
        ctypes.memset(address, 7, 1)
        del pool
        other = pinpool.PinnedPool("host", max_bytes=MIB, debug=True)
        ctypes.memset(other.empty(5).ptr, 7, 1)
    """)


def test_what_an_owner_writes_is_fine(pool):
    for lap in range(50):
        array = pool.empty(lap * 1000 + 1)
        np.asarray(array)[:] = lap
        view = np.asarray(array)
        array.release()
        view[:] = lap + 1
        del view
    pool.trim()
    assert sizes(pool) == dict.fromkeys(PARTS, 0)


# Memory whose cut changes: what nobody filled is not looked at

RESHAPINGS = {
    "a small block becomes a part of a larger one": [PAGE, 2 * PAGE],
    "a small block becomes a part of all there is": [PAGE, 60 * PAGE],
    "a large block gives way to a larger one": [MIB, 3 * MIB],
    "a large block gives way to a smaller one": [3 * MIB, MIB],
    "a large block gives way to small ones": [3 * MIB, PAGE, 5 * PAGE, PAGE],
    "small blocks give way to a large one": [PAGE, 3 * PAGE, 3 * MIB],
    "all sizes in turn": [PAGE, 2 * MIB, 7 * PAGE, 3 * MIB, MIB, 2 * PAGE, 4 * MIB - PAGE, 300 * PAGE],
}


@pytest.mark.parametrize("reshaping", RESHAPINGS)
@pytest.mark.parametrize("max_bytes", [64 * PAGE, 4 * MIB])
@pytest.mark.parametrize("trimmed", [False, True])
def test_nobody_is_accused_when_memory_is_cut_anew(reshaping, max_bytes, trimmed):
    pool = PinnedPool("host", max_bytes=max_bytes, debug=True)
    for _ in range(3):
        for nbytes in RESHAPINGS[reshaping]:
            if nbytes <= max_bytes:
                np.asarray(pool.zeros(nbytes))[:] = 5
            if trimmed:
                pool.trim()
    pool.close()
    assert sizes(pool) == dict.fromkeys(PARTS, 0)


def test_memory_that_the_system_gives_at_an_old_address_is_new():
    pool = PinnedPool("host", max_bytes=2 * MIB, debug=True)
    for nbytes in (2 * MIB, MIB, 2 * MIB - PAGE, MIB + 5 * PAGE, 2 * MIB - 40 * PAGE) * 4:
        assert pool.empty(nbytes).nbytes == nbytes


# Blocks in flight


def test_a_block_is_filled_when_its_device_work_is_done_and_not_before(pool):
    array, work = pool.zeros(MIB), Work()
    address = array.ptr
    pool.defer(array, work)
    array.release()
    pool.empty(5)
    assert bytes_at(address, MIB) == bytes(MIB)
    ctypes.memset(address, 7, MIB)  # what the device copies there
    work.done = True
    assert pool.empty(2 * MIB).nbytes == 2 * MIB
    assert bytes_at(address, MIB) == b"\xff" * MIB
    assert pool.empty(MIB).ptr == address


def test_a_write_after_the_device_work_is_found(pool):
    array, work = pool.zeros(MIB), Work()
    address, work.done = array.ptr, True
    pool.defer(array, work)
    array.release()
    pool.empty(2 * MIB)
    ctypes.memset(address + 5, 7, 1)
    with pytest.raises(WrittenAfterReleaseError) as caught:
        pool.empty(MIB)
    assert (caught.value.address, caught.value.offset) == (address, 5)


@pytest.mark.parametrize("call", ["trim", "close"])
def test_a_block_that_was_in_flight_is_given_back_without_a_word(pool, call):
    array, work = pool.zeros(MIB), Work()
    pool.defer(array, work)
    array.release()
    work.done = True
    getattr(pool, call)()
    assert sizes(pool) == dict.fromkeys(PARTS, 0)


# Blocks that live


def test_live_blocks_are_those_that_have_an_owner(pool):
    assert pool.live_blocks() == []
    array, tensor = pool.zeros(5000), pinpool.torch.empty(pool, MIB, torch.uint8)
    released, empty = pool.empty(PAGE), pool.empty(0)
    released.release()
    live = {block["address"]: block for block in pool.live_blocks()}
    assert {address: block["nbytes"] for address, block in live.items()} == {array.ptr: 8192, tensor.data_ptr(): MIB}
    assert all(set(block) == {"address", "nbytes", "generation", "origin"} for block in live.values())
    view = np.asarray(array)
    array.release()
    assert len(pool.live_blocks()) == 2
    del view, tensor, empty
    assert pool.live_blocks() == []


def test_a_block_in_flight_has_no_owner(pool):
    array = pool.empty(PAGE)
    pool.defer(array, Work())
    assert len(pool.live_blocks()) == 1
    array.release()
    assert pool.live_blocks() == []


def test_generations_count_the_owners_of_an_address(pool):
    for lap in range(1, 6):
        array = pool.empty(PAGE)
        (block,) = pool.live_blocks()
        assert (block["address"], block["generation"]) == (array.ptr, lap)
        array.release()


MAKERS = {
    "empty": lambda pool: pool.empty(5),
    "zeros": lambda pool: pool.zeros(5),
    "empty_like": lambda pool: pool.empty_like(np.zeros(5)),
    "torch.empty": lambda pool: pinpool.torch.empty(pool, 5, torch.uint8),
    "torch.pin": lambda pool: pinpool.torch.pin(torch.zeros(5), pool=pool),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_the_origin_is_the_line_of_the_caller(pool, maker):
    made = MAKERS[maker](pool)
    (block,) = pool.live_blocks()
    line = MAKERS[maker].__code__.co_firstlineno
    assert re.match(rf"{re.escape(__file__)}:{line} in <lambda> < {re.escape(__file__)}:\d+ in test_", block["origin"])
    del made


def test_a_pool_of_the_parent_tells_a_child_nothing_and_fills_nothing(run):
    run("""
        import ctypes, pinpool
        pool = pinpool.PinnedPool("host", max_bytes=MIB, debug=True)
        array = pool.zeros(5)
        def child():
            address = array.ptr
            array.release()
            assert ctypes.string_at(address, 5) == bytes(5)
            pool.close()
        in_child(child)
        assert bytes(array) == bytes(5) and len(pool.live_blocks()) == 1
    """)


def test_threads_share_a_debug_pool(pool):
    failures = []

    def work(number):
        try:
            for lap in range(150):
                array = pool.empty((5, PAGE, 5000, 100_000)[(lap + number) % 4], timeout=None)
                view = np.asarray(array)
                view[:] = number
                work = Work()
                if lap % 3 == 0:
                    pool.defer(array, work)
                assert (view == number).all()
                assert array.ptr in [block["address"] for block in pool.live_blocks()]
                del array, view
                work.done = True
                if lap % 50 == 0:
                    pool.trim()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.trim()
    assert sizes(pool) == dict.fromkeys(PARTS, 0)
