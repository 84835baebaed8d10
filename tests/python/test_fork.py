"""A forked child owns nothing: it reads what it inherits, and can do no harm to its parent."""

import textwrap

import pytest

# A parent with an array, a tensor and a registration, and what must still be true of them after a child.
PARENT = """\
import numpy, pinpool

pool = pinpool.PinnedPool(max_bytes=8 * MIB)
array = pool.empty(3 * MIB)
view = numpy.asarray(array)
view[:] = 7
buffer = bytearray(b"8" * 50_000)
registration = pinpool.register(buffer)
locked, stats = status("VmLck"), pool.stats()

def check_parent():
    assert (status("VmLck"), pool.stats()) == (locked, stats)
    assert pool.is_pinned(array) and pool.is_pinned(buffer)
    assert (view == 7).all() and buffer == b"8" * 50_000
"""
TORCH = """\
import torch, pinpool.torch
tensor = pinpool.torch.empty(pool, 1000, torch.float32).fill_(5)
locked, stats = status("VmLck"), pool.stats()
"""


@pytest.fixture
def fork(run):
    """Run the body of a child, given as text, in a fork of `PARENT`; then the parent must be as it was."""

    def fork(child, before=""):
        body = textwrap.indent(textwrap.dedent(child), "    ")
        run(f"{PARENT}{before}\ndef child():\n{body}\nin_child(child)\ncheck_parent()\n")

    return fork


def test_a_child_reads_what_it_inherits(fork):
    fork("assert (view == 7).all() and buffer == b'8' * 50_000")


def test_what_a_child_writes_stays_in_the_child(fork):
    fork("""
        view[:] = 1
        assert (view == 1).all()
        memoryview(buffer)[:3] = b"abc"
    """)


def test_nothing_inherited_is_pinned_in_a_child(fork):
    fork("""
        assert status("VmLck") == 0
        assert not pool.is_pinned(array) and not pinpool.is_pinned(view) and not pinpool.is_pinned(buffer)
        assert not pinpool.is_pinned((array.ptr, 1)) and not pinpool.is_pinned((registration.ptr, 1))
    """)


@pytest.mark.parametrize("call", ["empty(5)", "empty(0)", "zeros(5)", "reserve(5)", "trim()", "stats()"])
def test_the_pool_of_the_parent_refuses_a_child(fork, call):
    fork(f"""
        try:
            pool.{call}
            raise SystemExit("it was served")
        except pinpool.PinpoolError as error:
            assert "parent" in str(error) and "new PinnedPool" in str(error)
    """)


def test_closing_what_is_inherited_does_nothing_to_the_parent(fork):
    fork("""
        registration.close()
        assert registration.closed
        pool.close()
        array.release()
        assert "parent" in repr(pool)
    """)


def test_dropping_what_is_inherited_does_nothing_to_the_parent(fork):
    fork("""
        global array, view, pool, registration
        del array, view, pool, registration
        gc.collect()
    """)


def test_dropping_inherited_tensors_does_nothing_to_the_parent(fork):
    fork(
        """
        global tensor
        assert (tensor == 5).all() and not pinpool.torch.is_pinned(tensor)
        alias = tensor.view(10, 100)
        del tensor
        gc.collect()
        assert (alias == 5).all()
        del alias
        """,
        before=TORCH,
    )


def test_unpinning_in_a_child_does_nothing_to_the_parent(fork):
    fork("assert not pinpool._pinpool.unpin(array)")


def test_a_child_that_exits_as_python_does_does_nothing_to_the_parent(run):
    run(
        PARENT
        + """
child = os.fork()
if child == 0:
    sys.exit(0)  # with everything alive
assert os.waitpid(child, 0)[1] == 0
check_parent()
"""
    )


def test_a_new_pool_works_in_a_child(fork):
    fork("""
        mine = pinpool.PinnedPool("host", max_bytes=4 * MIB)
        block = mine.zeros(2 * MIB)
        assert mine.is_pinned(block) and status("VmLck") == 2 * MIB
        del block
        assert mine.trim() == 2 * MIB and status("VmLck") == 0
    """)


def test_a_child_finds_no_fewer_devices_than_its_parent_had(fork):
    fork("""
        try:
            assert pinpool.PinnedPool(max_bytes=4 * MIB).zeros(5).nbytes == 5
        except pinpool.DriverUnavailableError:
            assert stats["registered_bytes"]  # the driver of a device does not survive a fork
    """)


def test_the_default_pool_of_a_child_is_its_own(fork):
    fork(
        """
        try:
            copy = pinpool.torch.pin(torch.ones(3))
            assert copy.tolist() == [1, 1, 1] and pinpool.torch.is_pinned(copy)
        except pinpool.DriverUnavailableError:
            assert stats["registered_bytes"]
        """,
        before=TORCH + "kept = pinpool.torch.pin(torch.ones(3))\nlocked, stats = status('VmLck'), pool.stats()",
    )


def test_inherited_memory_can_be_registered_by_the_child(fork):
    fork("""
        with pinpool.register(buffer):
            assert pinpool.is_pinned(buffer) and status("VmLck") > 0
        assert status("VmLck") == 0
        registration.close()
    """)


def test_a_grandchild_owns_nothing_either(fork):
    fork("""
        mine = pinpool.PinnedPool("host", max_bytes=4 * MIB)
        block = mine.zeros(2 * MIB)
        in_child(lambda: (array.release(), block.release(), mine.close(), registration.close()))
        assert mine.is_pinned(block) and status("VmLck") == 2 * MIB
        assert mine.stats()["blocks"] == 1
    """)


def test_a_request_that_waits_is_not_disturbed_by_a_fork(run):
    run("""
        import pinpool

        pool = pinpool.PinnedPool("host", max_bytes=MIB)
        held = [pool.empty(MIB)]
        served = []
        waiting = threading.Thread(target=lambda: served.append(pool.empty(MIB, timeout=None)))
        waiting.start()
        for _ in range(5):
            in_child(lambda: (held.clear(), gc.collect()))
        held.clear()
        waiting.join()
        assert len(served) == 1
    """)


# Forking while other threads are in the middle of something. Python 3.12 warns about it, with reason.
HAMMERED = """\
import warnings
import numpy, pinpool

warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
pool = pinpool.PinnedPool("host", max_bytes=64 * MIB)
array = pool.zeros(5000)
pinpool.register(bytearray(5000)).close()  # what a first call does is done
stop = threading.Event()

def hammer(work):
    while not stop.is_set():
        work()

def work_for_all():
    blocks = [pool.empty(size) for size in (5000, 5000, 70_000, MIB)]
    numpy.asarray(blocks[0])[:] = 1
    blocks.pop()
    pool.trim()

def run_beside(works, forks, child):
    threads = [threading.Thread(target=hammer, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        for _ in range(forks):
            in_child(child)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    gc.collect()
"""


def test_no_call_imports_a_module(run):
    # A fork while another thread imports one leaves its lock behind, and the child's first call waits for it for ever.
    run("""
        import pinpool

        before = set(sys.modules)
        pool = pinpool.PinnedPool("host", max_bytes=4 * MIB)
        array, buffer = pool.zeros(5), bytearray(5000)
        with pool.register(buffer):
            assert pool.is_pinned(array) and pool.is_pinned(buffer)
        pool.is_registered(array, "cuda:0")
        pool.reserve(MIB)
        pinpool._pinpool.unpin(array)
        pool.close()
        assert set(sys.modules) == before, set(sys.modules) - before
    """)


def test_a_child_of_a_busy_pool_collects_and_exits(run):
    run(
        HAMMERED
        + """
def child():
    global array
    assert bytes(array) == bytes(5000) and not pool.is_pinned(array)
    del array
    gc.collect()

run_beside([work_for_all] * 4, 30, child)
assert bytes(array) == bytes(5000)
assert (pool.stats()["blocks"], pool.is_pinned(array)) == (1, True)
"""
    )


def test_a_child_forked_while_pools_and_registrations_come_and_go_works(run):
    run(
        HAMMERED
        + """
many = [pinpool.PinnedPool("host", max_bytes=MIB) for _ in range(1000)]
buffers = [bytearray(50_000) for _ in range(4)]

def child():
    mine = pinpool.PinnedPool("host", max_bytes=4 * MIB)
    block = mine.zeros(5000)
    with pinpool.register(buffers[0]):
        assert mine.is_pinned(block) and mine.is_pinned(buffers[0])

works = [
    lambda: pinpool.PinnedPool("host", max_bytes=MIB),
    lambda: pinpool.register(buffers[1]).close(),
    lambda: pinpool._pinpool.unpin((array.ptr + (1 << 40), 1)),
    lambda: pool.is_pinned(array),
]
run_beside(works, 20, child)
"""
    )


def test_a_child_may_ask_a_registration_that_another_thread_is_closing(run_with_driver, fake_libcuda):
    script = """
        pool, memory = PinnedPool("cuda:0", max_bytes=MIB), mmap(-1, PAGE)
        kept = weakref.ref(memory)
        registrations = [pool.register(memory)]
        del memory
        driver.hold("cuMemHostUnregister", 1)
        closing = threading.Thread(target=registrations[0].close)
        closing.start()
        while not driver.held():
            pass
        assert not registrations[0].closed

        def child():
            assert registrations[0].closed and "closed" in repr(registrations[0])
            registrations[0].close()
            assert kept() is None
            with register(bytearray(5)) as registration:
                assert not registration.closed
            gc.collect()

        in_child(child)
        driver.hold("cuMemHostUnregister", 0)
        closing.join()
        assert registrations[0].closed and kept() is None
        pool.close()
    """
    before = 'import warnings, weakref\nwarnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)\n'
    run_with_driver(script, f"FakeCuda({str(fake_libcuda)!r})", before, PINPOOL_CUDA_LIBRARY=fake_libcuda)


def test_a_multiprocessing_worker_reads_what_its_parent_pinned(run):
    run(
        PARENT
        + """
import multiprocessing

def work(results):
    import pinpool
    mine = pinpool.PinnedPool("host", max_bytes=MIB)
    results.put((int(view[0]), pool.is_pinned(array), mine.is_pinned(mine.empty(5))))

context = multiprocessing.get_context("fork")
results = context.Queue()
workers = [context.Process(target=work, args=(results,)) for _ in range(3)]
for worker in workers:
    worker.start()
assert [results.get(timeout=30) for _ in workers] == [(7, False, True)] * 3
for worker in workers:
    worker.join()
    assert worker.exitcode == 0
check_parent()
"""
    )


def test_tensors_in_a_data_loaders_workers_do_nothing_to_the_parent(run):
    run(
        PARENT
        + TORCH
        + """
from torch.utils.data import DataLoader

loader = DataLoader([tensor[:3], tensor[3:6]], batch_size=1, num_workers=2, multiprocessing_context="fork")
assert [batch.tolist() for batch in loader] == [[[5, 5, 5]]] * 2
check_parent()
"""
    )
