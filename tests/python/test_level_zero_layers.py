"""The loader's validation and tracing layers, and two drivers behind one loader: Intel's and our fake."""

import pytest

INTEL = "libze_intel_gpu.so.1"
VALIDATED = {"ZE_ENABLE_VALIDATION_LAYER": 1, "ZE_ENABLE_PARAMETER_VALIDATION": 1}

# Under the loader's layers


def test_the_validation_layer_finds_nothing_wrong_but_the_flag(run_with_driver, simulated):
    run_with_driver("""
        text = refusal(PinnedPool, "xpu:0")
        assert "0x7800000c" in text and "turn the layer off" in text and 'register="try"' in text, text
        pool = PinnedPool("xpu:0", max_bytes=16 * MIB, register="try")
        array, memory = pool.empty(MIB), mmap(-1, 3 * PAGE)
        assert pool.stats()["registered_bytes"] == {"xpu:0": MIB} and pool.stats()["unregistered"] is None
        assert is_registered(array, "xpu:0") and is_registered(array, "xpu:1")  # an import serves all devices
        with pool.register(memory) as registration:
            assert registration.unregistered is None and is_registered(memory, "xpu:1")
        text = refusal(PinnedPool("xpu:1", max_bytes=MIB, register="try").register, (array.ptr + PAGE, PAGE))
        assert text.startswith("ValueError"), text
        del array
        assert pool.trim() == MIB and pool.stats()["registered_bytes"] == {}
    """, **(simulated | VALIDATED))  # fmt: skip


def test_every_call_that_the_validation_layer_lets_through_is_as_before(run_with_driver, fake_level_zero):
    run_with_driver("""
        pool = PinnedPool("xpu:1", max_bytes=16 * MIB)
        array = pool.empty(MIB)
        assert driver.copy(1, array.ptr, MIB) == 0
        with pool.register(memoryview(mmap(-1, 3 * PAGE))[5:]):
            assert driver.live() == 2
    """, f"FakeLevelZero({str(fake_level_zero)!r})", ZE_ENABLE_ALT_DRIVERS=fake_level_zero, **VALIDATED)  # fmt: skip


TRACE = """
from ctypes import CDLL, CFUNCTYPE, Structure, byref, c_int, c_uint32, c_void_p

class Description(Structure):
    _fields_ = [("kind", c_uint32), ("next", c_void_p), ("user_data", c_void_p)]

CALLS = "ContextCreateEx", "ContextDestroy", "MemAllocHost", "MemFree"
SEEN, KEPT = {name: [] for name in CALLS}, []

def trace():
    "Notes each call's answer from now on."
    loader, tracer, callback = CDLL("libze_loader.so.1"), c_void_p(), CFUNCTYPE(
        None, c_void_p, c_uint32, c_void_p, c_void_p)
    assert loader.zelTracerCreate(byref(Description(1)), byref(tracer)) == 0
    for name in CALLS:
        note = callback(lambda _arguments, answer, _user, _instance, name=name: SEEN[name].append(answer))
        KEPT.append(note)
        assert getattr(loader, f"zelTracer{name}RegisterCallback")(tracer, c_int(1), note) == 0
    assert loader.zelTracerSetEnabled(tracer, c_int(1)) == 0
"""


def test_calls_balance_under_the_tracing_layer(run_with_driver, simulated):
    run_with_driver("""
        assert len(find()) == 2
        trace()
        pools = [PinnedPool(name, max_bytes=16 * MIB) for name in ("xpu:0", "xpu:1", "xpu:0")]
        arrays = [pool.empty(MIB) for pool in pools for _ in range(2)]
        for pool in pools:
            pool.register(mmap(-1, PAGE)).close()
        count = len(SEEN["MemAllocHost"])
        assert count == 2 + 6 + 3  # a page to test each device, regions, ranges of ours
        assert len(SEEN["ContextCreateEx"]) == 2 and SEEN["ContextDestroy"] == []
        del arrays, pool
        pools.clear()
        gc.collect()
        assert SEEN["MemAllocHost"] == SEEN["MemFree"] == [0] * count
        assert SEEN["ContextCreateEx"] == SEEN["ContextDestroy"] == [0, 0]
    """, before=TRACE, ZE_ENABLE_TRACING_LAYER=1, **simulated)  # fmt: skip


# Two drivers in one process


@pytest.fixture(params=["fake first", "Intel first"])
def both(request, run_with_driver, simulated, fake_level_zero):
    """Run a script with both drivers, two devices each."""
    drivers = [fake_level_zero, INTEL] if request.param == "fake first" else [INTEL, fake_level_zero]
    environment = simulated | {"ZE_ENABLE_ALT_DRIVERS": ",".join(map(str, drivers))}
    fake = f"FakeLevelZero({str(fake_level_zero)!r})"
    return lambda script, settings="": run_with_driver(script, fake, SORT, FAKE_LEVEL_ZERO=settings, **environment)


SORT = """
def sort():
    "The devices of the fake driver, and Intel's."
    found = find()
    both = [[device for device in found if name in device["description"]] for name in ("Fake", "Intel")]
    assert [len(devices) for devices in both] == [2, 2] and [d["ordinal"] for d in found] == [0, 1, 2, 3]
    return both
"""


def test_of_two_drivers_each_has_its_own_devices_and_way(both):
    both("""
        ours, intels = sort()
        assert ours[0]["method"] != intels[0]["method"]
        assert [_pinpool.ordinal_of("xpu", None, driver.uuid(i)) for i in range(2)] == [d["ordinal"] for d in ours]
        names = [device["name"] for device in ours + intels]
        pools = {name: PinnedPool(name, max_bytes=4 * MIB) for name in names}
        arrays = {name: pool.empty(MIB) for name, pool in pools.items()}
        assert driver.live() == 2 and driver.live_bytes() == 2 * MIB
        for name, array in arrays.items():
            assert [is_registered(array, other) for other in names] == [other == name for other in names]
        assert [driver.copy(place, arrays[device["name"]].ptr, MIB) for place, device in enumerate(ours)] == [0, 0]
    """)


def test_of_two_drivers_torchs_device_is_chosen_by_its_uuid(both):
    both("""
        ours, intels = sort()
        pretend_torch(("xpu", 1), [bytes.fromhex(device["uuid"]) for device in (intels[1], ours[1])])
        pool = PinnedPool(max_bytes=MIB)
        array = pool.empty(PAGE)
        assert list(pool.stats()["registered_bytes"]) == [ours[1]["name"]]
        assert driver.copy(1, array.ptr, PAGE) == 0 and driver.live() == 1
        assert is_registered(array, "xpu:1") and not is_registered(array, "xpu:0")  # torch's numbers
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        assert list((pool.empty(PAGE), pool.stats()["registered_bytes"])[1]) == [intels[1]["name"]]
        assert driver.live() == 1
    """)


def test_an_import_reaches_the_driver_itself_behind_the_loaders_handles(both):
    both("""
        ours, _ = sort()
        pool = PinnedPool(ours[0]["name"], max_bytes=4 * MIB, register="try")
        array = pool.empty(MIB)
        assert driver.calls("zexDriverImportExternalPointer") == 1 and pool.stats()["unregistered"] is None
        assert [device["name"] for device in find() if is_registered(array, device["name"])] == [
            device["name"] for device in ours]
    """, "extension=0,host_pointer=0")  # fmt: skip
