"""Level Zero drivers that refuse, forget nothing, or answer with something else. See test_level_zero.py."""

import pytest


@pytest.fixture
def script(run_with_driver, fake_level_zero):
    def script(script, settings="", before=""):
        fake = f"FakeLevelZero({str(fake_level_zero)!r})"
        return run_with_driver(script, fake, before, ZE_ENABLE_ALT_DRIVERS=fake_level_zero, FAKE_LEVEL_ZERO=settings)

    return script


ADDRESS = """
import ctypes

def _address(memory):
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
"""


# Drivers without the extension


def test_without_the_extension_the_host_pointer_flag_is_used(script):
    script("""
        assert {device["method"] for device in find()} == {"zeMemAllocHost with the experimental host-pointer flag"}
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        array = pool.empty(PAGE)
        assert is_registered(array, "xpu:0") and not is_registered(array, "xpu:1")
        assert [driver.copy(device, array.ptr, PAGE) for device in range(2)] == [0, 0x70000003]
    """, "extension=0")  # fmt: skip


@pytest.mark.parametrize("extension", [0, 2, 3])
def test_an_extension_that_is_not_listed_is_never_used(script, extension):
    script("""
        PinnedPool("xpu:0", max_bytes=MIB).empty(1)
        driver.set("host_pointer", 0)
        text = refusal(PinnedPool, "xpu:1")
        assert "no ZE_extension_external_memmap_sysmem" in text and "update it (to 25.44 or later)" in text, text
    """, f"extension={extension}")  # fmt: skip


@pytest.mark.parametrize("settings", ["identity=0", "extension=0,host_pointer=2", "extension=0,identity=0"])
def test_memory_at_another_address_is_refused_and_freed(script, settings):
    script("""
        def use():
            PinnedPool("xpu:0", max_bytes=MIB).empty(PAGE)
        text = refusal(use)
        assert "answered with memory at 0x" in text and "instead of 0x" in text, text
        assert driver.calls("zeMemAllocHost") == driver.calls("zeMemFree") == 1
        assert driver.live() == 0 and status("VmLck") == 0
    """, settings)  # fmt: skip


def test_memory_that_the_driver_does_not_know_after_all_is_refused_and_freed(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
        driver.fail("zeMemGetAllocProperties", 4, 0x78000004)  # three ask before, one after
        text = refusal(pool.empty, MIB)
        assert "succeeded, but then the driver did not know the range" in text, text
        assert driver.live() == 0 and pool.stats()["reserved_bytes"] == status("VmLck") == 0
        driver.fail("zeMemGetAllocProperties", 4, 0x78000004)
        driver.fail("zeMemFree", 1, 0x78000004)
        array = pool.empty(MIB)  # what it neither knows nor frees may be mapped: it counts as registered
        assert is_registered(array, "xpu:0") and driver.live() == 1
    """)


def test_importing_is_the_last_resort_and_must_be_let_pass(script):
    script("""
        assert 'register="try"' in refusal(PinnedPool, "xpu:0")
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB, register="try")
        array = pool.empty(MIB)
        assert driver.calls("zexDriverImportExternalPointer") == 1
        assert pool.stats()["registered_bytes"] == {"xpu:0": MIB} and pool.stats()["unregistered"] is None
        assert is_registered(array, "xpu:0") and is_registered(array, "xpu:1")  # an import serves all devices
        assert [driver.copy(device, array.ptr, MIB) for device in range(2)] == [0, 0]
        with pool.register(mmap(-1, PAGE)) as registration:
            assert driver.live() == 2 and registration.unregistered is None
        del array
        assert pool.trim() == MIB and driver.live() == 0
    """, "extension=0,host_pointer=0")  # fmt: skip


def test_a_driver_that_can_neither_map_nor_import_is_told_and_can_be_let_pass(script):
    script("""
        assert "ZE_extension_external_memmap_sysmem" in refusal(PinnedPool, "xpu:0")
        pool = PinnedPool("xpu:0", max_bytes=MIB, register="try")
        array = pool.empty(PAGE)
        assert pool.is_pinned(array) and not is_registered(array, "xpu:0")
        assert pool.stats()["registered_bytes"] == {} and "host-pointer flag" in pool.stats()["unregistered"]
    """, "extension=0,host_pointer=0,import=0")  # fmt: skip


def test_the_memory_type_of_newer_drivers_is_known(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
        array = pool.empty(MIB)
        assert is_registered(array, "xpu:0")
        text = refusal(PinnedPool("xpu:1", max_bytes=MIB).register, (array.ptr, PAGE))
        assert text.startswith("ValueError"), text
        del array
        assert pool.trim() == MIB and driver.live() == 0
    """, "memory_type=4")  # fmt: skip


# Refusals


def test_a_refusal_tells_all_three_meanings_of_its_code(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
        text = refusal(pool.empty, MIB)
        for part in "DriverError", "zeMemAllocHost on xpu:0", "0x70000002", "page boundary", "cannot map", "short of":
            assert part in text, text
        try:
            pool.register(mmap(-1, PAGE))
        except DriverError as error:
            known = error.driver, error.call, error.code, error.device, error.bytes
        assert known == ("Level Zero", "zeMemAllocHost", 0x70000002, "xpu:0", PAGE)
        assert pool.stats()["reserved_bytes"] == status("VmLck") == 0
    """, "memory=0")  # fmt: skip


def test_a_refusal_can_be_let_pass_and_is_told(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB, register="try")
        array = pool.empty(MIB)
        assert pool.is_pinned(array) and not pool.is_registered(array, "xpu:0")
        assert pool.stats()["registered_bytes"] == {} and "0x70000002" in pool.stats()["unregistered"]
        with pool.register(mmap(-1, PAGE)) as registration:
            assert "0x70000002" in registration.unregistered
    """, "memory=0")  # fmt: skip


def test_memory_that_the_driver_will_not_free_stays_and_is_counted(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=8 * MIB)
        array = pool.empty(MIB)
        address = array.ptr
        del array
        driver.set("zeMemFree", 0x70000001)
        text = refusal(pool.trim)
        assert "DriverError" in text and "zeMemFree" in text and "0x70000001" in text, text
        driver.set("zeMemFree", 0)
        assert pool.stats()["leaked_bytes"] == pool.stats()["process_leaked_bytes"] == MIB
        assert driver.is_live(address, MIB) == 1 and status("VmLck") == MIB
        assert pool.trim() == 0
        return {"live": 1, "contexts": 1}
    """)


def test_a_registration_that_the_driver_will_not_free_can_be_closed_again(script):
    script("""
        memory = mmap(-1, PAGE)
        registration = PinnedPool("xpu:0", max_bytes=MIB).register(memory)
        driver.fail("zeMemFree", 1, 0x70000001)
        assert "zeMemFree" in refusal(registration.close)
        assert not registration.closed and is_registered(memory, "xpu:0") and driver.live() == 1
        registration.close()
        assert registration.closed and driver.live() == 0
    """)


# Drivers that keep freed memory for reuse


def test_freed_memory_that_the_driver_keeps_stays_mapped_until_it_is_forgotten(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=8 * MIB)
        array = pool.empty(MIB)
        del array
        assert [pool.trim() for _ in range(3)] == [0, 0, 0]
        stats = pool.stats()
        assert stats["pending_bytes"] == stats["reserved_bytes"] == MIB and stats["cached_bytes"] == 0
        assert driver.cached() == 1 and driver.calls("zeMemFree") == 1  # a second call would free another's memory
        other = pool.empty(MIB)
        driver.forget()
        assert pool.trim() == MIB
        assert pool.stats()["pending_bytes"] == 0 and pool.stats()["reserved_bytes"] == MIB
        del other
        pool.close()
        driver.forget()
        pool.trim()
        assert pool.stats()["reserved_bytes"] == 0
    """, "reuse=1")  # fmt: skip


def test_adopted_memory_that_is_dropped_outlives_its_owner_until_the_driver_forgets_it(script):
    script("""
        import weakref
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        memory = mmap(-1, PAGE)
        kept = weakref.ref(memory)
        registration = pool.register(memory)
        del registration  # nothing waits
        assert "as host memory already" in refusal(pool.register, memory)
        del memory
        gc.collect()
        assert driver.cached() == 1 and kept() is not None
        driver.forget()  # it looks for the pages
        register(bytearray(1)).close()
        assert kept() is None
    """, "reuse=1")  # fmt: skip


WAITING = """
import weakref

def start(*calls):
    "Makes calls that wait for the driver, and returns when each has asked it several times."
    asked, results = driver.calls("zeMemGetAllocProperties"), []
    threads = [threading.Thread(target=lambda call=call: results.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    while not driver.cached() or driver.calls("zeMemGetAllocProperties") < asked + 5 * len(calls):
        pass
    assert results == [] and all(thread.is_alive() for thread in threads)
    return threads, results

def finish(threads, results):
    driver.forget()
    for thread in threads:
        thread.join()
    return results

def interrupted(call, *arguments):
    "Presses Ctrl-C while the call waits for the driver."
    asked = driver.calls("zeMemGetAllocProperties")
    def interrupt():
        while not driver.cached() or driver.calls("zeMemGetAllocProperties") < asked + 3:
            pass
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        call(*arguments)
    except KeyboardInterrupt:
        thread.join()
        return True
"""


@pytest.mark.parametrize("count", [1, 2])
def test_closing_waits_until_the_driver_has_forgotten_the_memory(script, count):
    script(f"""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        memory = mmap(-1, PAGE)
        kept = weakref.ref(memory)
        registration = pool.register(memory)
        del memory
        begun = start(*[registration.close] * {count})
        assert kept() is not None and not is_registered((registration.ptr, PAGE), "xpu:0")
        assert finish(*begun) == [None] * {count}
        assert registration.closed and kept() is None and driver.calls("zeMemFree") == 1
    """, "reuse=1", WAITING)  # fmt: skip


def test_closing_can_be_interrupted_while_it_waits_and_keeps_the_object(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        memory = mmap(-1, PAGE)
        kept = weakref.ref(memory)
        registrations = [pool.register(memory)]
        del memory
        assert interrupted(registrations[0].close)
        assert registrations[0].closed and kept() is not None and status("VmLck") == 0
        assert finish(*start(registrations[0].close)) == [None] and kept() is None

        memory = mmap(-1, PAGE)
        kept = weakref.ref(memory)
        registrations = [pool.register(memory)]
        del memory
        assert interrupted(registrations[0].close)
        registrations.clear()
        gc.collect()
        assert kept() is not None and driver.cached() == 1
        driver.forget()  # it looks for the pages
        register(bytearray(1)).close()
        assert kept() is None
    """, "reuse=1", WAITING)  # fmt: skip


def test_unpinning_waits_until_the_driver_has_forgotten_the_block(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=8 * MIB)
        array = pool.empty(3 * MIB)
        extent = array.ptr, 3 * MIB
        threads, results = start(lambda: _pinpool.unpin(extent))
        assert not pool.is_pinned(extent) and not is_registered(extent, "xpu:0")
        assert finish(threads, results) == [True]
        assert status("VmLck") == 0 and pool.stats()["registered_bytes"] == {} and driver.live() == 0
        assert memoryview(array)[-1] == 0 and not _pinpool.unpin(extent)
        del array
        assert pool.stats()["reserved_bytes"] == 0 and driver.calls("zeMemFree") == 1
    """, "reuse=1", WAITING)  # fmt: skip


def test_unpinning_can_be_interrupted_while_it_waits_and_the_block_is_never_reused(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=3 * MIB)
        array = pool.empty(3 * MIB)
        extent = array.ptr, 3 * MIB
        for _ in range(2):
            assert interrupted(_pinpool.unpin, extent)
            assert pool.is_pinned(extent) and not is_registered(extent, "xpu:0")
            assert status("VmLck") == 3 * MIB and pool.stats()["registered_bytes"] == {}
        del array
        assert pool.stats()["pending_bytes"] == 3 * MIB and "OutOfPinnedMemory" in refusal(pool.empty, 1)
        driver.forget()  # it looks for the pages
        array = pool.empty(3 * MIB)
        assert is_registered(array, "xpu:0") and driver.calls("zeMemFree") == 1
        del array
        pool.close()
        driver.forget()
        pool.trim()
        assert pool.stats()["reserved_bytes"] == 0
    """, "reuse=1", WAITING)  # fmt: skip


def test_a_block_that_shares_its_region_is_unpinned_without_waiting(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=8 * MIB)
        array, other = pool.empty(PAGE), pool.empty(PAGE)
        assert _pinpool.unpin(array) and not is_registered(array, "xpu:0") and is_registered(other, "xpu:0")
        assert driver.calls("zeMemFree") == 0 and status("VmLck") == pool.stats()["reserved_bytes"] - PAGE
        del array, other
        pool.close()
        driver.forget()
        pool.trim()
    """, "reuse=1")  # fmt: skip


def test_memory_that_the_driver_does_not_know_and_frees_and_keeps_stays_mapped(script):
    script("""
        def fail():
            driver.fail("zeMemGetAllocProperties", 4, 0x78000004)  # three ask before, one after
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
        fail()
        text = refusal(pool.empty, MIB)
        assert "did not know the range" in text and "driver still knows" in text and "do not use" in text, text
        assert driver.cached() == 1 and status("VmLck") == pool.stats()["leaked_bytes"] == MIB
        driver.forget()  # it looks for the pages

        memory = mmap(-1, PAGE)
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
        fail()
        assert "driver still knows" in refusal(pool.register, memory)
        assert not is_registered(memory, "xpu:0")
        del memory
        gc.collect()
        driver.forget()
        return {"contexts": 1}  # what is given up for lost keeps its device
    """, "reuse=1")  # fmt: skip


def test_a_page_that_tests_a_device_stays_mapped_while_the_driver_keeps_it(script):
    script("""
        driver.fail("zeMemGetAllocProperties", 4, 0x78000004)
        assert "driver still knows" in refusal(PinnedPool, "xpu:0")
        assert driver.cached() == 1
        driver.forget()  # it looks for the page
    """, "reuse=1,extension=0")  # fmt: skip


# Ranges on one page


def test_of_two_neighbours_on_one_page_one_is_refused_whenever_they_come(script):
    script("""
        pool, memory = PinnedPool("xpu:0", max_bytes=MIB), mmap(-1, 2 * PAGE)
        address = _address(memory)
        parts, results, barrier = [(address, PAGE + 100), (address + PAGE + 100, 100)], [], threading.Barrier(3)

        def work(part):
            for _ in range(200):
                barrier.wait()
                try:
                    results.append(pool.register(part))
                except ValueError as error:
                    assert "as host memory already" in str(error), error
                barrier.wait()

        threads = [threading.Thread(target=work, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for _ in range(200):
            barrier.wait()
            barrier.wait()
            assert len(results) == driver.live() == 1
            results.pop().close()
        for thread in threads:
            thread.join()
        assert status("VmLck") == 0
    """, "", ADDRESS)  # fmt: skip


# Drivers that are gone


def test_memory_that_a_driver_frees_while_it_shuts_down_stays_mapped(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=8 * MIB)
        array = pool.empty(MIB)
        address = array.ptr
        del array
        driver.set("zeMemFree", 0x78000001)
        assert pool.trim() == 0 and pool.stats()["pending_bytes"] == MIB
        pool.close()
        assert driver.is_live(address, MIB) == 1 and driver.calls("zeMemFree") == 1
        del pool
        gc.collect()
        assert PinnedPool("host", max_bytes=PAGE).stats()["process_leaked_bytes"] == 0, "the driver is asked again"
        assert status("VmLck") == MIB
        return {"live": 1, "contexts": 1}
    """)


# Every failure of every call


CYCLE = """
import contextlib

CALLS = "zeInit zeDriverGet zeDriverGetProperties zeDriverGetExtensionProperties zeDriverGetExtensionFunctionAddress \
zeDeviceGet zeDeviceGetProperties zeContextCreateEx zeContextDestroy zeMemAllocHost zeMemGetAllocProperties \
zeMemGetAddressRange zexDriverImportExternalPointer zexDriverGetHostPointerBaseAddress \
zexDriverReleaseImportedPointer zeMemFree".split()

def cycle(required):
    with contextlib.suppress(PinpoolError, ValueError):
        pool = PinnedPool("xpu:0", max_bytes=16 * MIB, register=required)
        arrays, memory = [pool.empty(3 * MIB), pool.empty(100)], mmap(-1, 3 * PAGE)
        with pool.register(memory):
            assert required == "try" or is_registered(memory, "xpu:0")
        arrays.clear()
        pool.trim()
        pool.close()
        return True
    return False

def calls(required):
    "Counts the calls of a cycle."
    before = [driver.calls(name) for name in CALLS]
    assert cycle(required)
    return {name: driver.calls(name) - count for name, count in zip(CALLS, before)}
"""


@pytest.mark.parametrize("code", [0x70000001, 0x70000002])
@pytest.mark.parametrize(
    ("required", "settings"),
    [
        ("require", ""),
        ("require", "devices=4,memory_type=4"),
        ("require", "devices=1,extension=0"),
        ("try", ""),
        ("try", "extension=0,host_pointer=0"),
    ],
)
def test_whatever_call_fails_all_is_as_before_or_counted(script, required, settings, code):
    script(f"""
        counts, lost = calls("{required}"), 0
        assert sum(counts.values()) > 20, counts
        for name, nth in [(name, nth) for name, count in counts.items() for nth in range(1, count + 1)]:
            driver.fail(name, nth, {code})
            cycle("{required}")
            gc.collect()
            driver.fail(name, 1, 0)
            lost += name == "zeContextDestroy"
            leaked = PinnedPool("host", max_bytes=PAGE).stats()["process_leaked_bytes"]
            assert driver.wrongs() == [], (name, nth, driver.wrongs())
            assert driver.live_bytes() == leaked, (name, nth, driver.live_bytes(), leaked)
            assert leaked - status("VmLck") in (0, PAGE), (name, nth)  # a page that tests a device is not locked
            kept = driver.contexts() - lost  # for what is still live, and for nothing else
            assert kept <= driver.live() and (kept > 0) == (leaked > 0), (name, nth, kept)
        assert cycle("{required}")
        return dict(live=driver.live(), contexts=driver.contexts())
    """, settings, CYCLE)  # fmt: skip
