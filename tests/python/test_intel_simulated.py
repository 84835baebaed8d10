"""Intel's own Level Zero driver on simulated devices: Debian's intel-opencl-icd, behind Debian's loader, libze1.

It is of release 22.43: it has no extension for memory that is there already, ignores its descriptor, and has the
host-pointer flag and the import functions. What shows there is asked of our fake, set up alike, by the same scripts.
"""

import pytest


@pytest.fixture(params=["pvc", "adlp", "fake"])
def script(request, run_with_driver, simulated, fake_level_zero):
    """Run a script with a driver as Intel's 22.43."""
    if request.param != "fake":
        count = 2 if request.param == "pvc" else 1  # of integrated devices there is one
        environment = simulated | {"ProductFamilyOverride": request.param, "CreateMultipleRootDevices": count}
        return lambda script, before="": run_with_driver(script, None, before, **environment)
    environment = {"ZE_ENABLE_ALT_DRIVERS": fake_level_zero, "FAKE_LEVEL_ZERO": "extension=0,devices=2"}
    fake = f"FakeLevelZero({str(fake_level_zero)!r})"
    return lambda script, before="": run_with_driver(script, fake, before, **environment)


@pytest.fixture
def pvc(run_with_driver, simulated):
    """Run a script with two simulated devices of their own memory, and what else the environment says."""
    return lambda script, **environment: run_with_driver(script, **(simulated | environment))


def test_devices_are_found_with_their_uuids(pvc):
    pvc("""
        found = find()
        assert [device["name"] for device in found] == ["xpu:0", "xpu:1"]
        assert [device["uuid"] for device in found] == [f"86800000d50b0000{n}00000000000000" for n in ("00", "01")]
        assert {device["method"] for device in found} == {"zeMemAllocHost with the experimental host-pointer flag"}
        assert {device["description"] for device in found} == {"Intel(R) Graphics [0x0bd5]"}
        assert [_pinpool.ordinal_of("xpu", None, bytes.fromhex(device["uuid"])) for device in found] == [0, 1]
    """)


def test_the_affinity_mask_hides_devices(pvc):
    pvc("""
        assert len(find()) == 1
        assert "no xpu:1; the drivers have 1 GPUs (ZE_AFFINITY_MASK?)" in refusal(PinnedPool, "xpu:1")
    """, ZE_AFFINITY_MASK=1)  # fmt: skip


def test_without_a_device_auto_only_locks(run_with_driver):
    run_with_driver("""
        pool = PinnedPool(max_bytes=MIB)
        assert pool.is_pinned(pool.empty(1)) and pool.stats()["registered_bytes"] == {}
        assert "no driver starts" in refusal(find)
    """)


def test_each_device_has_a_pool_of_its_own(pvc):
    pvc("""
        assert "one pool for xpu:0 and xpu:1 cannot be had" in refusal(PinnedPool, ["xpu:0", "xpu:1"])
        pools = [PinnedPool(name, max_bytes=4 * MIB) for name in ("xpu:0", "xpu:1")]
        arrays = [pool.empty(MIB) for pool in pools]
        assert [pool.stats()["registered_bytes"] for pool in pools] == [{"xpu:0": MIB}, {"xpu:1": MIB}]
        assert [[is_registered(array, name) for name in ("xpu:0", "xpu:1")] for array in arrays] == [
            [True, False], [False, True]]
        assert refusal(pools[1].register, (arrays[0].ptr, PAGE)).startswith("ValueError")
        pools[0].close()
        assert is_registered(arrays[0], "xpu:0")
    """)


def test_a_pool_goes_through_its_whole_life(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=16 * MIB)
        array, small = pool.zeros(3 * MIB), pool.empty(100)
        stats = pool.stats()
        assert stats["registered_bytes"] == {"xpu:0": stats["reserved_bytes"]} and stats["unregistered"] is None
        assert is_registered(array, "xpu:0") and is_registered(small, "xpu:0")
        view = memoryview(array)
        view[::4096] = bytes(range(256)) * 3
        memory = mmap(-1, 5 * PAGE)
        memory[:] = b"x" * 5 * PAGE
        with pool.register(memoryview(memory)[10:-10]) as registration:
            assert registration.unregistered is None
            assert is_registered((registration.ptr, registration.nbytes), "xpu:0")
        assert memory[:] == b"x" * 5 * PAGE and bytes(view[::4096]) == bytes(range(256)) * 3
        view.release()
        del array, small, view
        assert pool.trim() == stats["reserved_bytes"]
        stats = pool.stats()
        assert stats["registered_bytes"] == {} and stats["reserved_bytes"] == stats["process_leaked_bytes"] == 0
        assert status("VmLck") == 0
    """)


def test_the_same_memory_is_registered_again_and_again(script):
    script("""
        pool, memory = PinnedPool("xpu:0", max_bytes=MIB), mmap(-1, PAGE)
        for _ in range(100):
            with pool.register(memory):
                assert is_registered(memory, "xpu:0")
    """)


def test_read_only_memory_is_refused_by_the_host_pointer_flag(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        assert "takes no read-only memory" in refusal(pool.register, mmap(-1, PAGE, access=1))
        assert status("VmLck") == 0
    """)


def test_eight_threads_register_and_release_at_once(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=64 * MIB)
        failures = []
        def work():
            try:
                memory = mmap(-1, 4 * PAGE)
                for _ in range(200):
                    with pool.register(memory):
                        assert is_registered(memory, "xpu:0")
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert failures == []
    """)


def test_a_forked_child_leaves_the_driver_alone(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        array = pool.empty(PAGE)
        def child():
            assert "forked after it was initialized" in refusal(find)
            assert "PinpoolError" in refusal(pool.empty, 1)
            assert "forked" in refusal(PinnedPool, "xpu:0")
        in_child(child)
        del array
        assert pool.trim() == pool.stats()["peak_reserved_bytes"]
    """)


@pytest.mark.parametrize("kept", ["pool", "array", "registration", "(registration, array, pool)"])
def test_a_process_ends_whatever_is_still_alive(pvc, kept):
    pvc(f"""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        array, registration = pool.empty(PAGE), pool.register(mmap(-1, PAGE))
        sys.modules["__main__"].kept = {kept}
    """)


# Beside another client

CLIENT = """
from ctypes import CDLL, Structure, byref, c_size_t, c_uint32, c_uint64, c_void_p

class Description(Structure):
    _fields_ = [("kind", c_uint32), ("next", c_void_p), ("flags", c_uint32)]

class Properties(Structure):
    _fields_ = [("kind", c_uint32), ("next", c_void_p), ("memory", c_uint32), ("id", c_uint64), ("page", c_uint64)]

class Client:
    "Uses the same driver through the same loader, as torch does."
    UNKNOWN, HOST = 0, 1

    def __init__(self):
        self.ze, driver, count, self.context = CDLL("libze_loader.so.1"), c_void_p(), c_uint32(1), c_void_p()
        self.call("zeInit", 0)
        self.call("zeDriverGet", byref(count), byref(driver))
        self.call("zeContextCreate", driver, byref(Description(0xD)), byref(self.context))

    def call(self, name, *arguments):
        assert getattr(self.ze, name)(*arguments) == 0, name

    def memory_at(self, address):
        found, device = Properties(0x17), c_void_p()
        self.call("zeMemGetAllocProperties", self.context, c_void_p(address), byref(found), byref(device))
        return found.memory

    def allocate(self, nbytes):
        out = c_void_p()
        self.call("zeMemAllocHost", self.context, byref(Description(0x16)), c_size_t(nbytes), c_size_t(0), byref(out))
        return out.value

    def free(self, address):
        self.call("zeMemFree", self.context, c_void_p(address))

    def close(self):
        self.call("zeContextDestroy", self.context)
"""


def test_another_client_sees_host_memory_until_it_is_released(script):
    script("""
        client, pool, memory = Client(), PinnedPool("xpu:0", max_bytes=16 * MIB), mmap(-1, 3 * PAGE)
        array = pool.empty(3 * MIB)
        address = array.ptr
        assert [client.memory_at(at) for at in (address, address + 3 * MIB - 1)] == [client.HOST] * 2
        del array
        pool.trim()
        assert client.memory_at(address) == client.UNKNOWN
        with pool.register(memory) as registration:
            assert client.memory_at(registration.ptr + 2 * PAGE) == client.HOST
        assert client.memory_at(registration.ptr) == client.UNKNOWN
        client.close()
    """, CLIENT)  # fmt: skip


def test_memory_of_another_client_is_refused_and_stays_as_it_is(script):
    script("""
        client, pool = Client(), PinnedPool("xpu:0", max_bytes=MIB)
        theirs = client.allocate(4 * PAGE)
        for address in theirs, theirs + PAGE:
            text = refusal(pool.register, (address, PAGE))
            assert text.startswith("ValueError") and "as host memory already" in text, text
            assert f"{theirs:#x}+{4 * PAGE}" in text, text
        assert client.memory_at(theirs) == client.HOST and status("VmLck") == 0
        client.free(theirs)
        client.close()
    """, CLIENT)  # fmt: skip


def test_pages_that_a_driver_gives_to_another_client_stay_where_they_are(run_with_driver, fake_level_zero):
    environment = {"ZE_ENABLE_ALT_DRIVERS": fake_level_zero, "FAKE_LEVEL_ZERO": "reuse=1,devices=1"}
    run_with_driver("""
        import ctypes
        client, pool = Client(), PinnedPool("xpu:0", max_bytes=16 * MIB)
        array = pool.empty(3 * MIB)
        ours = array.ptr
        del array
        assert pool.trim() == 0
        theirs = client.allocate(2 * MIB)
        assert theirs == ours  # this is what real drivers do
        again = pool.empty(3 * MIB)
        assert again.ptr != ours and pool.trim() == 0 and pool.stats()["pending_bytes"] == 3 * MIB
        ctypes.memset(theirs, 7, 2 * MIB)
        del again
        client.free(theirs)
        driver.forget()
        assert pool.trim() == 3 * MIB and pool.trim() == 0  # the second region has just been freed, and is kept
        driver.forget()
        assert pool.trim() == 3 * MIB and pool.stats()["reserved_bytes"] == 0
        client.close()
    """, f"FakeLevelZero({str(fake_level_zero)!r})", CLIENT, **environment)  # fmt: skip
