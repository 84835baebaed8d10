"""NVIDIA's own Python binding as a second client of the CUDA driver that pinpool registers with, here a fake one.

cuda-bindings finds it as `libcuda.so.1` on the library path, and pinpool by PINPOOL_CUDA_LIBRARY: the same file.
"""

import pytest

BINDINGS = """
from cuda.bindings import driver as cuda

def call(function, *arguments):
    code, *answers = function(*arguments)
    assert code == cuda.CUresult.CUDA_SUCCESS, (function, code)
    return answers[0] if len(answers) == 1 else answers

def is_host(address):
    code, kind = cuda.cuPointerGetAttribute(cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if code == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:
        return False  # memory that the driver does not know
    assert (code, kind) == (cuda.CUresult.CUDA_SUCCESS, cuda.CUmemorytype.CU_MEMORYTYPE_HOST)
    return True

def start():
    "Makes the first device's context current, as torch does."
    call(cuda.cuInit, 0)
    device = call(cuda.cuDeviceGet, 0)
    call(cuda.cuCtxSetCurrent, call(cuda.cuDevicePrimaryCtxRetain, device))
    return device

def stop(device):
    call(cuda.cuCtxSetCurrent, cuda.CUcontext(0))
    call(cuda.cuDevicePrimaryCtxRelease, device)
"""


@pytest.fixture
def script(run_with_driver, fake_libcuda):
    def script(script, settings=""):
        environment = {"LD_LIBRARY_PATH": fake_libcuda.parent, "PINPOOL_CUDA_LIBRARY": fake_libcuda}
        fake = f"FakeCuda({str(fake_libcuda)!r})"
        return run_with_driver(script, fake, BINDINGS, FAKE_CUDA=settings, **environment)

    return script


def test_both_clients_see_the_same_devices(script):
    script("""
        device = start()
        assert call(cuda.cuDeviceGetCount) == len(find("cuda")) == 2
        uuids = [bytes(call(cuda.cuDeviceGetUuid, call(cuda.cuDeviceGet, index)).bytes).hex() for index in range(2)]
        assert [found["uuid"] for found in find("cuda")] == uuids
        stop(device)
    """, "devices=2")  # fmt: skip


def test_what_a_pool_registers_is_host_memory_until_it_is_released(script):
    script("""
        device = start()
        pool = PinnedPool("cuda:0", max_bytes=8 * MIB)
        array = pool.empty(MIB)
        address = array.ptr
        assert is_registered(array, "cuda:0") and pool.stats()["registered_bytes"] == {"cuda:0": MIB}
        assert [is_host(at) for at in (address, address + MIB // 2, address + MIB - 1)] == [True] * 3
        assert not is_host(address - 1) and not is_host(address + MIB)
        del array
        assert is_host(address)  # it is kept for reuse
        assert pool.trim() == MIB
        assert not is_host(address)
        stop(device)
    """)


def test_what_is_registered_in_place_is_host_memory_until_it_is_closed(script):
    script("""
        device = start()
        memory = mmap(-1, 3 * PAGE)
        registration = PinnedPool("cuda:0", max_bytes=MIB).register(memory)
        assert is_host(registration.ptr) and is_host(registration.ptr + registration.nbytes - 1)
        registration.close()
        assert not is_host(registration.ptr)
        stop(device)
    """)


def test_what_the_other_client_registered_is_refused(script):
    script("""
        import ctypes
        device = start()
        memory = mmap(-1, 3 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        call(cuda.cuMemHostRegister, address, 3 * PAGE, 0)
        pool = PinnedPool("cuda:0", max_bytes=MIB)
        text = refusal(pool.register, memory)
        assert text.startswith("DriverError: CUDA: cuMemHostRegister on cuda:0 of 12288 bytes answered 712"), text
        assert "somebody else registered a part of this range; unregister it there first" in text, text
        assert is_host(address) and not pool.is_pinned(memory)
        call(cuda.cuMemHostUnregister, address)
        with pool.register(memory):
            code, = cuda.cuMemHostRegister(address, PAGE, 0)
            assert code == cuda.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        stop(device)
        return {"wrongs": ["cuMemHostRegister_v2: a part is registered already"] * 2}
    """)


def test_auto_takes_the_device_of_the_other_clients_context_and_leaves_it_current(script):
    script("""
        call(cuda.cuInit, 0)
        device = call(cuda.cuDeviceGet, 1)
        context = call(cuda.cuDevicePrimaryCtxRetain, device)
        call(cuda.cuCtxSetCurrent, context)
        pool = PinnedPool(max_bytes=MIB)
        array = pool.empty(PAGE)
        assert pool.stats()["registered_bytes"] == {"cuda:1": pool.stats()["reserved_bytes"]}
        assert int(call(cuda.cuCtxGetCurrent)) == int(context)
        assert driver.contexts_made(0) == 0
        stop(device)
    """, "devices=2")  # fmt: skip
