"""What Intel's SYCL runtime thinks of memory before, while and after pinpool registers it. Started by `run.sh`."""

import mmap
import sys
from dataclasses import dataclass
from typing import Any

import dpctl
import dpctl.memory
import numpy as np

import pinpool
from pinpool import PinnedPool

PAGE = mmap.PAGESIZE
LEN = 256 * PAGE
HOST, UNKNOWN = "host", "unknown"


@dataclass(frozen=True)
class Pointer:
    """One byte of memory, as dpctl asks the runtime about it."""

    address: int
    queue: Any

    @property
    def __sycl_usm_array_interface__(self):
        return {
            "data": (self.address, False), "shape": (1,), "strides": None, "typestr": "|u1", "version": 1,
            "syclobj": self.queue,
        }  # fmt: skip


def kind_of(address: int, queue: Any) -> str:
    try:
        return dpctl.memory.as_usm_memory(Pointer(address, queue)).get_usm_type()
    except ValueError:  # no pointer of the runtime's
        return UNKNOWN


class Witness:
    """Compares what the runtime says about a range, on the queue of every device, with what is expected."""

    def __init__(self) -> None:
        self.queues = [dpctl.SyclQueue(device) for device in dpctl.get_devices()]
        self.asked = self.failures = 0
        if len(self.queues) != 2:
            sys.exit(f"the SYCL runtime sees {len(self.queues)} devices instead of two: is it loaded whole?")

    def expect(self, wanted: str, moment: str, address: int) -> None:
        places = {"first byte": address, "inside": address + LEN // 2 + 1, "last byte": address + LEN - 1}
        for ordinal, queue in enumerate(self.queues):
            kinds = {place: kind_of(at, queue) for place, at in places.items()}
            self.asked += len(kinds)
            wrong = {place: kind for place, kind in kinds.items() if kind != wanted}
            self.failures += len(wrong)
            print(f"{'FAILED' if wrong else 'ok':6}  {moment}, queue of device {ordinal}: {wanted}", wrong or "")


def check_registration(witness: Witness, device: str, pool: PinnedPool) -> None:
    memory = np.frombuffer(mmap.mmap(-1, LEN), np.uint8)
    memory[:] = np.arange(LEN) % 251
    address, before = memory.ctypes.data, memory.copy()
    witness.expect(UNKNOWN, f"register, {device}, before", address)
    with pool.register(memory) as registration:
        assert registration.unregistered is None, registration.unregistered
        assert pinpool.is_registered(memory, device)
        witness.expect(HOST, f"register, {device}, registered", address)
    witness.expect(UNKNOWN, f"register, {device}, closed", address)
    assert not pinpool.is_registered(memory, device)
    assert (memory == before).all()


def check_block(witness: Witness, device: str, pool: PinnedPool) -> None:
    block = pool.empty(LEN)
    address = block.ptr
    assert pool.is_registered(block, device)
    witness.expect(HOST, f"block, {device}, taken", address)
    block.release()
    witness.expect(HOST, f"block, {device}, idle in the pool", address)
    pool.trim()
    witness.expect(UNKNOWN, f"block, {device}, trimmed", address)
    assert pool.stats()["registered_bytes"].get(device, 0) == 0


def main() -> None:
    witness = Witness()
    for device in ("xpu:0", "xpu:1"):
        with PinnedPool(device, max_bytes=64 << 20) as pool:
            check_registration(witness, device, pool)
            check_block(witness, device, pool)
        stats = pool.stats()
        assert stats["leaked_bytes"] == stats["process_leaked_bytes"] == 0, stats
    print(f"{witness.asked} answers of the SYCL runtime, {witness.failures} of them not as expected")
    sys.exit(1 if witness.failures else 0)


if __name__ == "__main__":
    main()
