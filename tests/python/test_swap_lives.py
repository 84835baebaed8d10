"""Swap operations under way: who may wait, who may go, and what a fork, an exit or a signal does to them."""

from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# A store with one entry, whose engine can be held still.
HEAD = f"""\
sys.path.insert(0, {str(HERE)!r})
import asyncio, warnings
from holds import Held
import numpy, pinpool
from pinpool import PinnedPool, PinpoolError, Swapper

warnings.filterwarnings("ignore", ".*multi-threaded.*", DeprecationWarning)
engine = os.environ["ENGINE"]
pool = PinnedPool("host", max_bytes=64 * MIB)

def filled(number, nbytes=MIB):
    array = pool.empty(nbytes)
    numpy.asarray(array)[:] = number
    return array

def open_store():
    return Swapper(os.environ["STORE"], pool=pool, engine=engine, queue_depth=1)

def check(swapper, number, key="key", nbytes=MIB):
    assert bytes(swapper.read(key).wait()) == bytes([number]) * nbytes

def interrupt_when_waiting():
    "Ctrl-C, when this thread lets go of the interpreter."
    go = threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and signal.raise_signal(signal.SIGINT))
    sys.setswitchinterval(3600)
    thread.start()
    go.set()
    return thread

swapper = open_store()
swapper.write("key", filled(1)).wait()
gc.collect()
"""


@pytest.fixture(params=["auto", "threads"])
def held(run, request, tmp_path):
    """Run a script behind `HEAD`, with io_uring where it can be had, and with threads."""
    return lambda script: run(HEAD + script, ENGINE=request.param, STORE=tmp_path)


def test_a_wait_that_takes_too_long_ends_and_the_operation_goes_on(held):
    held("""
with Held():
    ticket = swapper.write("key", filled(2))
    for timeout in (0, 0.01):
        try:
            ticket.wait(timeout)
            raise SystemExit("it is done")
        except TimeoutError as error:
            assert "'key'" in str(error) and str(timeout) in str(error)
    assert not ticket.done() and "under way" in repr(ticket)
    assert swapper.stats()["unfinished"] >= 1
ticket.wait()
check(swapper, 2)
""")


@pytest.mark.parametrize(
    "wait",
    ["ticket.wait()", "swapper.close()", "swapper.delete('key')", "swapper.read('key', into=array)"],
)
def test_ctrl_c_ends_a_wait_and_what_was_begun_goes_on(held, wait):
    held(f"""
array = filled(2)
with Held():
    ticket = swapper.write("key", array)
    thread = interrupt_when_waiting()
    try:
        {wait}
        raise SystemExit("it did not wait")
    except KeyboardInterrupt:
        pass
    thread.join()
    assert not ticket.done()
ticket.wait()
swapper.close()
with open_store() as again:
    assert {"'delete' in " + repr(wait)} or bytes(again.read("key").wait()) == bytes([2]) * MIB
""")


@pytest.mark.parametrize("call", ["swapper.write('key', array)", "swapper.read('key', into=array)"])
def test_ctrl_c_ends_the_wait_for_device_work_and_nothing_is_begun(held, call):
    held(f"""
class Work:
    done = False
    def query(self):
        return self.done

array, work = filled(2), Work()
pool.defer(array, work)
thread = interrupt_when_waiting()
try:
    {call}
    raise SystemExit("it did not wait")
except KeyboardInterrupt:
    pass
thread.join()
check(swapper, 1)
work.done = True
({call}).wait()
""")


def test_a_cancelled_await_leaves_no_descriptor_and_the_operation_goes_on(held):
    held("""
def descriptors():
    return len(os.listdir("/proc/self/fd"))

async def wait_for(ticket):
    return await ticket

async def work():
    tickets = [swapper.write(f"{number}", filled(number)) for number in range(9)]
    before = descriptors()
    tasks = [asyncio.ensure_future(wait_for(ticket)) for ticket in tickets]
    await asyncio.sleep(0)
    assert descriptors() == before + 9
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended)
    return tickets, before

async def main():
    hold = Held()
    hold.__enter__()
    tickets, before = await work()
    hold.__exit__()
    await asyncio.gather(*tickets)
    while descriptors() != before:  # the engine lets go of the last one when it has told of the end
        os.sched_yield()
    for number, ticket in enumerate(tickets):
        await ticket
        check(swapper, number, f"{number}")

asyncio.run(main())
""")


def test_a_cancelled_await_closes_its_descriptor_at_once(held):
    held("""
async def wait_for(ticket):
    return await ticket

async def main():
    ticket = swapper.write("key", filled(2))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(9):
        task = asyncio.ensure_future(wait_for(ticket))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    gc.collect()
    after = len(os.listdir("/proc/self/fd"))
    assert after == before, (before, after)

async def held():
    with Held():
        await main()

asyncio.run(held())
""")


def test_memory_of_a_dropped_value_is_not_used_again_before_it_is_written(held):
    held("""
with Held():
    ticket = swapper.write("key", filled(2))
    gc.collect()
    others = [filled(3) for _ in range(20)]
    del others
    [filled(4) for _ in range(20)]
ticket.wait()
check(swapper, 2)
""")


def test_memory_of_a_dropped_read_is_not_used_again_before_its_end(held):
    held("""
with Held():
    swapper.read("key")
    gc.collect()
    others = [filled(number) for number in range(20)]
swapper.close()
assert all(bytes(other) == bytes([number]) * MIB for number, other in enumerate(others))
""")


@pytest.mark.parametrize(
    "order", ["array ticket swapper pool", "pool swapper ticket array", "swapper array pool ticket"]
)
def test_dropping_everything_in_whatever_order_loses_nothing(held, order):
    drops = "\n    ".join(f"del {name}\n    gc.collect()" for name in order.split())
    held(f"""
array = filled(2)
with Held():
    ticket = swapper.write("key", array)
    {drops}
pool = PinnedPool("host", max_bytes=64 * MIB)
while True:
    try:
        swapper = open_store()
        break
    except BlockingIOError:
        os.sched_yield()
check(swapper, 2)
""")


def test_a_pool_may_be_closed_while_a_write_is_under_way(held):
    held("""
with Held():
    ticket = swapper.write("key", filled(2))
    pool.close()
ticket.wait()
pool = PinnedPool("host", max_bytes=64 * MIB)
with swapper:
    pass
swapper = open_store()
check(swapper, 2)
""")


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "del swapper, ticket, pool", "sys.modules.clear()"])
def test_the_interpreter_ends_well_with_operations_under_way(held, end):
    assert (
        held(f"""
hold = Held()
hold.__enter__()
ticket, read = swapper.write("key", filled(2)), swapper.read("key")
{end}
""")
        == ""
    )


def test_a_process_that_is_killed_in_a_write_leaves_what_was_there(held):
    held("""
swapper.close()
child = os.fork()
if child == 0:
    pool = PinnedPool("host", max_bytes=64 * MIB)
    swapper = open_store()
    with Held():
        swapper.write("key", filled(2))
        swapper.write("new", filled(2))
        os.kill(os.getpid(), signal.SIGKILL)
assert os.waitpid(child, 0)[1] == signal.SIGKILL
while True:  # the kernel may take a while to end a ring, and keeps the lock as long
    try:
        swapper = open_store()
        break
    except BlockingIOError:
        os.sched_yield()
check(swapper, 1)
assert swapper.keys() == ["key"]
""")


def test_a_forked_child_is_refused_and_does_its_parents_store_no_harm(held):
    held("""
def child():
    array = PinnedPool("host", max_bytes=MIB).zeros(5)
    calls = [
        ticket.wait,
        lambda: swapper.write("key", array),
        lambda: swapper.read("key"),
        lambda: swapper.delete("key"),
        *(swapper.keys, swapper.stats, swapper.flush, swapper.trim),
    ]
    for call in calls:
        try:
            call()
        except PinpoolError as error:
            assert "parent" in str(error), error
        else:
            raise SystemExit("it was served")
    swapper.close()
    repr(ticket)

def exits():
    global swapper, ticket
    swapper.close()
    del swapper, ticket
    gc.collect()

with Held():
    ticket = swapper.write("key", filled(2))
    in_child(child)
    in_child(exits)
    python = os.fork()
    if python == 0:
        sys.exit(0)
    assert os.waitpid(python, 0)[1] == 0
    try:
        open_store()
        raise SystemExit("the lock is gone")
    except BlockingIOError:
        pass
ticket.wait()
check(swapper, 2)
swapper.close()
check(open_store(), 2)
""")
