"""The budget of a pool: what is refused, what may wait, what the kernel allows, and what it gets back."""

import mmap
import threading

import pytest

from pinpool import OutOfPinnedMemoryError, PinnedPool

KIB, MIB = 1 << 10, 1 << 20


def test_over_the_budget_the_error_has_all_numbers_and_nothing_leaks(locked):
    pool = PinnedPool("host", max_bytes=MIB)
    pool.reserve(512 * KIB)
    array = pool.empty(64 * KIB)
    before, locked_before = pool.stats(), locked()
    with pytest.raises(OutOfPinnedMemoryError) as refusal:
        pool.empty(768 * KIB)
    error = refusal.value
    numbers = (error.wanted, error.limit, error.allocated, error.cached, error.pending)
    assert numbers == (768 * KIB, MIB, 64 * KIB, 448 * KIB, 0)
    assert all(str(number) in str(error) for number in numbers)
    assert "max_bytes" in str(error)
    kept = ("requested_bytes", "allocated_bytes", "cached_bytes", "reserved_bytes", "locked_bytes", "blocks", "regions")
    assert [pool.stats()[key] for key in kept] == [before[key] for key in kept]
    assert (locked(), array.nbytes) == (locked_before, 64 * KIB)


def test_a_smaller_request_works_after_a_refused_one():
    pool = PinnedPool("host", max_bytes=MIB)
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(MIB + 1)
    assert pool.zeros(MIB).nbytes == MIB


def test_the_budget_can_be_used_to_the_last_page():
    pool = PinnedPool("host", max_bytes=MIB)
    arrays = [pool.empty(mmap.PAGESIZE) for _ in range(MIB // mmap.PAGESIZE)]
    assert pool.stats()["allocated_bytes"] == MIB
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(1)
    arrays.pop()
    assert pool.empty(1).nbytes == 1


def test_idle_memory_makes_room_before_a_request_is_refused():
    pool = PinnedPool("host", max_bytes=4 * MIB)
    arrays = [pool.empty(MIB) for _ in range(4)]
    arrays.clear()
    assert pool.empty(4 * MIB).nbytes == 4 * MIB


@pytest.mark.parametrize("shape", [2**62, (2**20, 2**25), 2**46])
def test_more_than_the_machine_has_is_an_error_and_nothing_is_mapped(shape):
    pool = PinnedPool("host")
    before = pool.stats()
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(shape)
    assert (pool.stats()["reserved_bytes"], pool.stats()["os_calls"]) == (0, before["os_calls"])


# Waiting


@pytest.fixture
def full():
    """A pool whose budget is one block, and that block in a list."""
    pool = PinnedPool("host", max_bytes=MIB)
    return pool, [pool.empty(MIB)]


def do_while_waiting(work):
    """Run `work` in a thread once the caller lets go of the interpreter, as a waiting request does."""
    go = threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and work())
    thread.start()
    go.set()
    return thread


@pytest.mark.timeout(20)
@pytest.mark.parametrize("timeout", [0, 0.0, 0.001, 0.2])
def test_a_full_pool_refuses_when_the_time_is_up(full, timeout):
    pool, _ = full
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(MIB, timeout=timeout)
    assert pool.stats()["blocks"] == 1


@pytest.mark.parametrize("timeout", [None, 1000])
def test_a_waiting_request_gets_what_another_thread_releases(full, hand_over, timeout):
    pool, blocks = full
    thread = do_while_waiting(blocks.clear)
    array = pool.zeros(MIB, timeout=timeout)
    thread.join()
    assert (pool.is_pinned(array), pool.stats()["blocks"]) == (True, 1)


def test_every_waiting_request_is_served(full):
    pool, blocks = full
    served = []
    threads = [threading.Thread(target=lambda: served.append(pool.empty(MIB, timeout=None).nbytes)) for _ in range(8)]
    for thread in threads:
        thread.start()
    blocks.clear()
    for thread in threads:
        thread.join()
    assert (served, pool.stats()["peak_reserved_bytes"]) == ([MIB] * 8, MIB)


def test_a_waiting_request_ends_when_the_pool_is_closed(full, hand_over):
    pool, _blocks = full
    thread = do_while_waiting(pool.close)
    with pytest.raises(ValueError, match="closed"):
        pool.empty(MIB, timeout=None)
    thread.join()


@pytest.mark.timeout(20)
def test_a_request_that_can_never_be_served_does_not_wait():
    pool = PinnedPool("host", max_bytes=MIB)
    with pytest.raises(OutOfPinnedMemoryError):
        pool.empty(MIB + 1, timeout=None)


@pytest.mark.parametrize("interrupt", ["signal.raise_signal(signal.SIGINT)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_ctrl_c_ends_a_waiting_request_and_the_pool_is_usable(run, interrupt):
    run(f"""
        from pinpool import PinnedPool

        pool = PinnedPool("host", max_bytes=MIB)
        array = pool.empty(MIB)
        go = threading.Event()
        thread = threading.Thread(target=lambda: go.wait() and {interrupt})
        sys.setswitchinterval(3600)  # the thread runs when this one lets go of the interpreter
        thread.start()
        go.set()
        try:
            pool.empty(MIB, timeout=None)
            raise SystemExit("it was served")
        except KeyboardInterrupt:
            pass
        thread.join()
        assert pool.stats()["blocks"] == 1
        del array
        assert pool.zeros(MIB, timeout=None).nbytes == MIB
    """)


@pytest.mark.locks(1024 * MIB)
def test_ctrl_c_while_memory_is_made_undoes_everything(run):
    run("""
        from pinpool import PinnedPool

        pool = PinnedPool("host", max_bytes=1024 * MIB)
        before = status("VmLck")
        go = threading.Event()
        thread = threading.Thread(target=lambda: go.wait() and signal.raise_signal(signal.SIGINT))
        sys.setswitchinterval(3600)
        thread.start()
        go.set()
        try:
            pool.empty(1024 * MIB)
            raise SystemExit("it was served")
        except KeyboardInterrupt:
            pass
        thread.join()
        assert (pool.stats()["reserved_bytes"], status("VmLck")) == (0, before)
        assert pool.zeros(MIB).nbytes == MIB
    """)


@pytest.mark.locks(1024 * MIB)
def test_ctrl_c_while_memory_is_registered_undoes_everything(run):
    run("""
        from pinpool import is_pinned, register

        register(bytearray(5)).close()  # what a first call does is done
        buffer, before = bytearray(1024 * MIB), status("VmLck")
        go = threading.Event()
        thread = threading.Thread(target=lambda: go.wait() and signal.raise_signal(signal.SIGINT))
        sys.setswitchinterval(3600)
        thread.start()
        go.set()
        try:
            register(buffer)
            raise SystemExit("it was registered")
        except KeyboardInterrupt:
            pass
        thread.join()
        assert (is_pinned(buffer), status("VmLck")) == (False, before)
        buffer.append(1)  # nobody holds it
    """)


# What the kernel allows


def test_over_the_memlock_limit_the_error_has_the_numbers_and_the_remedies(run):
    run("""
        import mmap
        from pinpool import MemlockLimitError, PinnedPool, register

        become_unprivileged(memlock=8 * MIB)
        buffer = mmap.mmap(-1, 16 * MIB)
        for ask in (PinnedPool("host").empty, PinnedPool("host", max_bytes=64 * MIB).empty, lambda n: register(buffer)):
            try:
                ask(16 * MIB)
                raise SystemExit("it was served")
            except MemlockLimitError as error:
                numbers = (error.wanted, error.locked, error.soft_limit, error.hard_limit)
                assert numbers == (16 * MIB, 0, 8 * MIB, 8 * MIB), numbers
                assert "`ulimit -l" in str(error) and "docker" in str(error), error
                assert all(str(number) in str(error) for number in numbers), error
        assert status("VmLck") == 0
    """)


def test_under_the_memlock_limit_an_unprivileged_process_works(run):
    run("""
        from pinpool import MemlockLimitError, PinnedPool

        become_unprivileged(memlock=8 * MIB)
        pool = PinnedPool("host")
        assert pool.stats()["max_bytes"] == 8 * MIB
        try:
            pool.empty(16 * MIB)
        except MemlockLimitError:
            pass
        array = pool.zeros(4 * MIB)
        assert (pool.is_pinned(array), status("VmLck")) == (True, 4 * MIB)
        rest = [pool.empty(4096) for _ in range(1024)]
        assert status("VmLck") == 8 * MIB
    """)


@pytest.mark.parametrize("memlock", [0, 4])
def test_a_process_that_may_lock_nothing_more_is_told_the_memlock_limit(run, memlock):
    run(f"""
        from pinpool import MemlockLimitError, PinnedPool

        become_unprivileged(memlock={memlock} * MIB)
        used = PinnedPool("host", max_bytes=4 * MIB).empty({memlock} * MIB)
        try:
            PinnedPool("host").empty(MIB)
            raise SystemExit("it was served")
        except MemlockLimitError as error:
            assert "`ulimit -l" in str(error)
            assert (error.locked, error.soft_limit) == ({memlock} * MIB, {memlock} * MIB)
    """)


def test_the_memlock_limit_counts_whole_pages_of_a_registration(run):
    run("""
        import ctypes, mmap
        from pinpool import MemlockLimitError, register

        become_unprivileged(memlock=8 * MIB)
        memory = mmap.mmap(-1, 16 * MIB)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        register((address, 8 * MIB)).close()
        try:
            register((address + 1, 8 * MIB))  # a page more
            raise SystemExit("it was served")
        except MemlockLimitError:
            pass
        assert status("VmLck") == 0
    """)


@pytest.mark.locks(1024 * MIB)
def test_memory_that_is_dropped_and_trimmed_leaves_the_process(run):
    run("""
        from pinpool import PinnedPool

        pool = PinnedPool("host", max_bytes=1024 * MIB)
        resident, locked = status("VmRSS"), status("VmLck")
        arrays = [pool.empty(256 * MIB) for _ in range(4)]
        assert status("VmLck") - locked == 1024 * MIB
        assert status("VmRSS") - resident >= 1024 * MIB
        arrays.clear()
        assert pool.trim() == 1024 * MIB
        assert status("VmLck") == locked
        assert status("VmRSS") - resident < 8 * MIB
    """)
