"""Level Zero through the real loader, with a driver of our own behind it: tests/drivers/fake_level_zero.rs.

Every script ends with the driver's books: nothing live, no context, no wrong call, unless the script says what is left.
"""

import pytest


@pytest.fixture
def script(run_with_driver, fake_level_zero):
    def script(script, settings="", drivers=fake_level_zero):
        fake = f"FakeLevelZero({str(fake_level_zero)!r})"
        return run_with_driver(script, fake, ZE_ENABLE_ALT_DRIVERS=drivers, FAKE_LEVEL_ZERO=settings)

    return script


# Discovery


def test_devices_are_found_with_their_uuids(script):
    script("""
        found = find()
        assert [device["name"] for device in found] == ["xpu:0", "xpu:1", "xpu:2"]
        assert [bytes.fromhex(device["uuid"]) for device in found] == [driver.uuid(index) for index in range(3)]
        assert [device["description"] for device in found] == [f"Fake Level Zero device {i}" for i in range(3)]
        assert {device["method"] for device in found} == {"zeMemAllocHost with external memory"}
        assert [_pinpool.ordinal_of("xpu", None, driver.uuid(index)) for index in range(3)] == [0, 1, 2]
        assert driver.calls("zeContextCreateEx") == driver.calls("zeContextCreate") == 0
    """, "devices=3")  # fmt: skip


def test_importing_pinpool_and_locking_memory_load_no_driver(run):
    run("""
        import pinpool
        pinpool.PinnedPool("host", max_bytes=MIB).empty(5)
        pinpool.register(bytearray(5)).close()
        assert not re.search("libze|libcuda", Path("/proc/self/maps").read_text())
    """)


def test_an_npu_has_no_ordinal(script):
    script("""
        assert [bytes.fromhex(device["uuid"]) for device in find()] == [driver.uuid(1), driver.uuid(3)]
        pool = PinnedPool("xpu:1", max_bytes=MIB)
        array = pool.empty(PAGE)
        assert driver.copy(3, array.ptr, PAGE) == 0
        assert driver.copy(1, array.ptr, PAGE) == 0x70000003
        assert "no xpu:2; the drivers have 2 GPUs" in refusal(PinnedPool, "xpu:2")
    """, "devices=4,npu=5")  # fmt: skip


@pytest.mark.parametrize("settings", ["devices=0", "zeInit=0x78000001", "devices=2,npu=3"])
def test_without_a_gpu_auto_only_locks(script, settings):
    script("""
        pool = PinnedPool(max_bytes=MIB)
        array = pool.empty(PAGE)
        assert pool.is_pinned(array)
        assert pool.stats()["registered_bytes"] == {} and pool.stats()["unregistered"] is None
        assert refusal(PinnedPool, "xpu:0").startswith("DriverUnavailableError: Level Zero cannot be used")
    """, settings)  # fmt: skip


def test_a_driver_that_does_not_start_is_told_with_its_answer(script):
    script("""
        text = refusal(find)
        assert "no driver starts" in text and "zeInit answered" in text and "/dev/dri/renderD" in text, text
        assert refusal(PinnedPool, "xpu:0") == text
        assert PinnedPool("xpu:0", register="try").stats()["unregistered"] in text
    """, "zeInit=0x78000001")  # fmt: skip


def test_a_driver_that_is_there_and_broken_is_no_reason_to_go_on_without(script):
    script("""
        text = refusal(PinnedPool)
        assert "DriverUnavailableError" in text and "ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE, 0x70020000" in text, text
    """, "zeInit=0x70020000")  # fmt: skip


# One device a pool


def test_a_pool_registers_its_regions_with_its_device_alone(script):
    script("""
        pool = PinnedPool("xpu:1", max_bytes=16 * MIB)
        array, small = pool.empty(3 * MIB), pool.empty(100)
        stats = pool.stats()
        assert stats["registered_bytes"] == {"xpu:1": stats["reserved_bytes"]}
        assert driver.live_bytes() == stats["reserved_bytes"] and driver.contexts() == 1
        for block in array, small:
            assert pool.is_registered(block, "xpu:1") and is_registered(block, "xpu:1")
            assert not is_registered(block, "xpu:0") and not is_registered(block, "cuda:0")
            assert driver.is_live(block.ptr, block.nbytes) == 1
            assert [driver.copy(device, block.ptr, block.nbytes) for device in range(2)] == [0x70000003, 0]
        calls = driver.calls("zeMemAllocHost")
        del array, block
        again = pool.empty(3 * MIB)
        assert driver.calls("zeMemAllocHost") == calls  # a region is registered once
    """)


def test_one_pool_for_two_devices_is_refused_by_their_names(script):
    script("""
        text = refusal(PinnedPool, ["xpu:0", "xpu:1"])
        assert "PinpoolError: one pool for xpu:0 and xpu:1 cannot be had" in text, text
        assert "one pool a device" in text
        pools = [PinnedPool(f"xpu:{ordinal}", max_bytes=MIB) for ordinal in range(2)]
        arrays = [pool.empty(PAGE) for pool in pools]
        assert [driver.copy(device, arrays[device].ptr, PAGE) for device in range(2)] == [0, 0]
        assert driver.contexts() == 2
    """)


def test_two_pools_of_one_device_share_a_context(script):
    script("""
        pools = [PinnedPool("xpu:0", max_bytes=MIB) for _ in range(2)]
        arrays = [pool.empty(PAGE) for pool in pools]
        assert driver.contexts() == driver.calls("zeContextCreateEx") == 1
        assert driver.live() == 2
    """)


def test_auto_takes_the_first_device_or_that_of_the_rank(script):
    script("""
        pool = PinnedPool(max_bytes=MIB)
        assert is_registered(pool.empty(1), "xpu:0")
        os.environ["LOCAL_RANK"] = "1"
        pool = PinnedPool(max_bytes=MIB)
        assert is_registered(pool.empty(1), "xpu:1")
    """)


def test_torchs_device_is_found_by_its_uuid(script):
    script("""
        pretend_torch(("xpu", 0), [driver.uuid(1), driver.uuid(0)])
        pool = PinnedPool(max_bytes=MIB)
        array = pool.empty(PAGE)
        assert driver.copy(1, array.ptr, PAGE) == 0
        assert is_registered(array, "xpu:0") and not is_registered(array, "xpu:1")  # torch's numbers
        pretend_torch(("xpu", 0), [bytes(16)])
        assert "no device has the UUID" in refusal(PinnedPool, "xpu:0")
    """)


def test_a_uuid_that_two_devices_have_is_refused(script):
    script("""
        pretend_torch(("xpu", 1), [driver.uuid(0), driver.uuid(1)])
        for devices in "xpu:0", "xpu", "auto":
            text = refusal(PinnedPool, devices)
            assert "DriverUnavailableError" in text and "have one UUID" in text, text
            assert "xpu:0" in text and "xpu:1" in text
    """, "same_uuid=1")  # fmt: skip


# Adopted memory


def test_adopted_memory_is_registered_in_whole_pages(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        memory = mmap(-1, 10 * PAGE)
        view = memoryview(memory)[PAGE + 5 : 3 * PAGE + 7]
        with pool.register(view) as registration:
            assert registration.unregistered is None
            assert driver.live_bytes() == 3 * PAGE
            assert driver.is_live(registration.ptr - 5, 3 * PAGE) == 1
            assert is_registered(view, "xpu:0") and not is_registered(view, "xpu:1")
            assert driver.copy(0, registration.ptr, registration.nbytes) == 0
        assert driver.live() == 0 and not is_registered(view, "xpu:0")
    """)


def test_two_ranges_on_one_page_are_not_both_registered(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=MIB)
        memory = mmap(-1, 2 * PAGE)
        first, second = memoryview(memory)[:100], memoryview(memory)[200:300]
        with pool.register(first):
            text = refusal(pool.register, second)
            assert text.startswith("ValueError") and "as host memory already" in text, text
            assert not pool.is_pinned(second)
        pool.register(second).close()
    """)


def test_read_only_memory_is_registered_where_the_driver_can(script):
    script("""
        memory = mmap(-1, PAGE, access=1)
        with PinnedPool("xpu:0", max_bytes=MIB).register(memory):
            assert driver.live() == 1
        driver.set("extension", 0)
        text = refusal(PinnedPool("xpu:1", max_bytes=MIB).register, memory)
        assert "takes no read-only memory" in text, text
    """)


def test_memory_larger_than_the_device_allows_is_registered_in_pieces(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=64 * MIB)
        memory = mmap(-1, 20 * MIB)
        with pool.register(memory):
            assert driver.live() == 3 and driver.live_bytes() == 20 * MIB
            assert is_registered(memory, "xpu:0")
        assert "more than the 8388608 that can be registered with xpu:0 at once" in refusal(pool.empty, 9 * MIB)
        assert is_registered(pool.empty(8 * MIB), "xpu:0")
    """, f"max_alloc={8 << 20}")  # fmt: skip


# Processes and threads


def test_a_forked_child_leaves_the_driver_alone(script):
    script("""
        def make():
            pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
            array, memory = pool.empty(MIB), mmap(-1, PAGE)
            return {"array": array, "registration": pool.register(memory), "memory": memory, "pool": pool}
        held = make()
        address = held["array"].ptr
        def child():
            assert "PinpoolError" in refusal(held["pool"].empty, 1)
            assert "forked after it was initialized" in refusal(find)
            assert "forked" in refusal(PinnedPool, "xpu:0")
            PinnedPool("host", max_bytes=MIB).empty(1)
            held["registration"].close()
            while held:
                held.popitem()
            gc.collect()
            assert driver.wrong() == 0  # calls, in a child
        in_child(child)
        assert driver.live() == 2 and driver.copy(0, address, MIB) == 0
        held["registration"].close()
    """)


def test_threads_register_and_release_at_once(script):
    script("""
        pool = PinnedPool("xpu:0", max_bytes=64 * MIB)
        failures = []
        def work():
            try:
                memory = mmap(-1, 4 * PAGE)
                for _ in range(200):
                    with pool.register(memory):
                        assert is_registered(memory, "xpu:0")
                    array = pool.empty(3 * PAGE)
                    assert is_registered(array, "xpu:0")
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert failures == []
    """, "check_maps=0")  # fmt: skip


@pytest.mark.parametrize("kept", ["pool", "array", "registration", "(registration, array, pool)"])
@pytest.mark.parametrize("settings", ["", "reuse=1", "zeMemFree=0x78000001", "zeMemFree=0x70000001"])
def test_a_process_ends_whatever_is_still_alive(run_with_driver, fake_level_zero, kept, settings):
    script = f"""
        pool = PinnedPool("xpu:0", max_bytes=4 * MIB)
        array, registration = pool.empty(PAGE), pool.register(mmap(-1, PAGE))
        sys.modules["__main__"].kept = {kept}
    """
    run_with_driver(script, ZE_ENABLE_ALT_DRIVERS=fake_level_zero, FAKE_LEVEL_ZERO=settings)
