"""Swap stores on bad ground: no room, limits, damage, no permission, no io_uring, and processes that are killed."""

import errno
import os

import numpy as np
import pytest

from pinpool import StoreDamagedError, Swapper

PAGE, MIB = 4096, 1 << 20
HEAD = """\
import ctypes, errno, resource
import numpy, pinpool
from pinpool import PinnedPool, PinpoolError, Swapper

def open_after_a_kill(*args, **options):
    "The kernel may take a while to end the ring of a process, and keeps the lock as long."
    while True:
        try:
            return Swapper(*args, **options)
        except BlockingIOError:
            os.sched_yield()

def refused(call, kind):
    try:
        call()
    except kind as error:
        return error
    raise SystemExit("it was served")
"""


def filled(pool, number, nbytes):
    array = pool.empty(nbytes)
    np.asarray(array)[:] = number
    return array


@pytest.fixture
def stored(tmp_path, pool):
    """Make a store with one entry, closed."""
    with Swapper(tmp_path, pool=pool) as swapper:
        swapper.write("the key", filled(pool, 1, 3 * PAGE + 5))
    return tmp_path


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_max_bytes_is_the_most_and_a_refused_write_changes_nothing(tmp_path, pool, engine):
    with Swapper(tmp_path, pool=pool, engine=engine, max_bytes=3 * PAGE) as swapper:
        swapper.write("key", filled(pool, 1, 2 * PAGE)).wait()
        with pytest.raises(OSError, match=r"max_bytes.*delete entries") as full:
            swapper.write("key", filled(pool, 2, 2 * PAGE))
        assert full.value.errno == errno.ENOSPC
        assert bytes(swapper.read("key").wait()) == b"\1" * 2 * PAGE
        swapper.write("small", filled(pool, 3, PAGE)).wait()
        swapper.delete("key")
        swapper.write("other", filled(pool, 4, 2 * PAGE)).wait()
        assert swapper.stats()["file_bytes"] <= 3 * PAGE
    with pytest.raises(ValueError, match="max_bytes"):
        Swapper(tmp_path, pool=pool, max_bytes=PAGE)


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_flipped_data_is_an_error_that_says_where_and_other_entries_are_fine(stored, pool, engine):
    with Swapper(stored, pool=pool) as swapper:
        swapper.write("other", filled(pool, 2, 5)).wait()
    flip(stored / "data", 2 * PAGE + 7)
    with Swapper(stored, pool=pool, engine=engine) as swapper:
        ticket = swapper.read("the key")
        for _ in range(2):
            with pytest.raises(StoreDamagedError, match=r"'the key'|\"the key\"") as damage:
                ticket.wait()
        assert (os.fspath(damage.value.file), damage.value.offset) == (str(stored / "data"), 0)
        assert damage.value.nbytes == 3 * PAGE + 5
        assert bytes(swapper.read("other").wait()) == b"\2" * 5
        assert swapper.stats()["bytes_read"] == 5
        swapper.write("the key", filled(pool, 3, 5))
        assert bytes(swapper.read("the key").wait()) == b"\3" * 5


@pytest.mark.parametrize("left", [0, PAGE, 3 * PAGE])
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_data_that_was_cut_off_is_an_error_that_says_where(stored, pool, engine, left):
    os.truncate(stored / "data", left)
    with Swapper(stored, pool=pool, engine=engine) as swapper:
        with pytest.raises(StoreDamagedError, match="the key") as damage:
            swapper.read("the key").wait()
        assert os.fspath(damage.value.file) == str(stored / "data")
        assert 0 <= damage.value.offset <= left
        assert damage.value.nbytes > 0


def test_any_flipped_byte_of_an_index_is_an_error(stored, pool):
    size = (stored / "index").stat().st_size
    for at in range(0, size, 7):
        flip(stored / "index", at)
        with pytest.raises(StoreDamagedError) as damage:
            Swapper(stored, pool=pool)
        assert os.fspath(damage.value.file) == str(stored / "index")
        assert 0 <= damage.value.offset < size
        flip(stored / "index", at)
    with Swapper(stored, pool=pool) as swapper:
        assert "the key" in swapper


def test_an_index_that_was_cut_off_is_an_error(stored, pool):
    size = (stored / "index").stat().st_size
    os.truncate(stored / "index", size - 1)
    with pytest.raises(StoreDamagedError):
        Swapper(stored, pool=pool)


def test_without_permission_a_store_is_not_opened(run, stored):
    for path in (stored, stored / "data", stored / "index"):
        path.chmod(0o700 if path == stored else 0o600)
    run(
        HEAD
        + f"""
os.chdir("/")
if os.geteuid() == 0:
    os.chmod({str(stored)!r}, 0o755)
    become_unprivileged(8 * MIB)
else:
    os.chmod({str(stored / "data")!r}, 0o400)
error = refused(lambda: Swapper({str(stored)!r}), PermissionError)
assert "permission to read and write" in str(error)
"""
    )


def test_a_file_system_without_room_is_an_error_and_the_old_value_stays(run, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small tmpfs")
    told = run(
        HEAD
        + f"""
libc = ctypes.CDLL(None, use_errno=True)
path = {str(tmp_path)!r}.encode()
private = libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 0x44000, None) == 0
if not private or libc.mount(b"tmpfs", path, b"tmpfs", 0, b"size=1m"):
    print("no tmpfs")
    sys.exit(0)
pool = PinnedPool("host", max_bytes=8 * MIB)
for engine in ("auto", "threads"):
    with Swapper(path.decode(), pool=pool, engine=engine) as swapper:
        swapper.write("key", pool.zeros(MIB // 2)).wait()
        error = refused(lambda: swapper.write("key", pool.zeros(MIB)).wait(), OSError)
        assert error.errno == errno.ENOSPC and "make room" in str(error), error
        assert bytes(swapper.read("key").wait()) == bytes(MIB // 2)
        swapper.delete("key")
        swapper.trim()
"""
    )
    if told:
        pytest.skip("the kernel refuses a mount in a namespace of its own")


def test_a_limit_on_the_size_of_files_is_an_error_and_no_signal(run, tmp_path):
    run(
        HEAD
        + f"""
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
pool = PinnedPool("host", max_bytes=8 * MIB)
for engine in ("auto", "threads"):
    with Swapper({str(tmp_path)!r}, pool=pool, engine=engine) as swapper:
        swapper.write("key", pool.zeros(MIB // 4)).wait()
        error = refused(lambda: swapper.write("key", pool.zeros(2 * MIB)).wait(), OSError)
        assert error.errno == errno.EFBIG and "ulimit -f" in str(error), error
        assert bytes(swapper.read("key").wait()) == bytes(MIB // 4)
"""
    )


def test_without_io_uring_threads_do_the_work_and_say_why(run, tmp_path):
    run(
        HEAD
        + f"""
import platform, struct
if platform.machine() not in ("x86_64", "aarch64"):
    sys.exit(0)
# io_uring_setup is call 425 everywhere: EPERM; all else is allowed.
filters = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in filters))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(filters), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
pool = PinnedPool("host", max_bytes=8 * MIB)
with Swapper({str(tmp_path)!r}, pool=pool) as swapper:
    stats = swapper.stats()
    assert stats["engine"] == "threads" and "seccomp" in stats["engine_reason"], stats
    swapper.write("key", pool.zeros(MIB))
    assert bytes(swapper.read("key").wait()) == bytes(MIB)
error = refused(lambda: Swapper({str(tmp_path)!r}, engine="io_uring"), PinpoolError)
assert "io_uring" in str(error) and "threads" in str(error)
"""
    )


def test_without_memlock_for_fixed_buffers_everything_works_and_stats_say_why(run, tmp_path):
    tmp_path.chmod(0o777)
    run(
        HEAD
        + f"""
store = Path({str(tmp_path)!r})
os.chdir(store)
become_unprivileged(4 * MIB)
pool = PinnedPool("host", max_bytes=3 * MIB)
with Swapper(".", pool=pool) as swapper:
    if swapper.stats()["engine"] == "io_uring":
        array = pool.zeros(3 * MIB)
        swapper.write("key", array).wait()
        del array
        assert bytes(swapper.read("key").wait()) == bytes(3 * MIB)
        stats = swapper.stats()
        assert stats["fixed_bytes"] > 0 or "ulimit -l" in stats["fixed_reason"], stats
        assert stats["bounces"] == 0
"""
    )


@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_after_a_kill_every_entry_is_whole_or_absent_and_what_was_done_is_there(run, tmp_path, engine):
    run(
        HEAD
        + f"""
import random
rounds, chance, done = 100, random.Random(7), {{}}

def write_for_ever(pipe, first):
    pool = PinnedPool("host", max_bytes=8 * MIB)
    swapper = open_after_a_kill({str(tmp_path)!r}, pool=pool, engine={engine!r}, block_bytes=4096)
    for version in range(first, first + 10_000):
        key = version % 5
        array = pool.empty(20_000 + key)
        numpy.asarray(array)[:] = (key * 50 + version) % 251
        memoryview(array._bytes())[:8] = version.to_bytes(8, "little")
        ticket = swapper.write(str(key), array)
        if version % 3 == 0:
            ticket.wait()
            os.write(pipe, version.to_bytes(8, "little"))

version = 0
for lap in range(rounds):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            write_for_ever(theirs, version)
        finally:
            os._exit(1)
    os.close(theirs)
    for _ in range(chance.randrange(1, 30)):
        seen = int.from_bytes(os.read(ours, 8), "little")
        done[seen % 5], version = seen, seen + 1
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    while told := os.read(ours, 8):
        seen = int.from_bytes(told, "little")
        done[seen % 5], version = seen, seen + 1
    os.close(ours)
    version += 100

    def look():
        pool = PinnedPool("host", max_bytes=8 * MIB)
        with open_after_a_kill({str(tmp_path)!r}, pool=pool, engine={engine!r}) as swapper:
            assert set(swapper.keys()) >= {{str(key) for key in done}}
            for name in swapper.keys():
                found, key = bytes(swapper.read(name).wait()), int(name)
                stamp = int.from_bytes(found[:8], "little")
                assert stamp % 5 == key and stamp >= done.get(key, 0)
                assert found[8:] == bytes([(key * 50 + stamp) % 251]) * (20_000 + key - 8)
    in_child(look)  # this process stays without threads, as a fork wants it
"""
    )
