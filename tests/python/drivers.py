"""What the scripts of `run_with_driver` use: pinpool, and the books of the fake drivers in tests/drivers."""

import ctypes
import sys
import types
from mmap import mmap

from pinpool import DriverError, DriverUnavailableError, PinnedPool, PinpoolError, _pinpool, is_registered, register

__all__ = [
    "MIB",
    "PAGE",
    "DriverError",
    "DriverUnavailableError",
    "FakeCuda",
    "FakeLevelZero",
    "PinnedPool",
    "PinpoolError",
    "_pinpool",
    "find",
    "is_registered",
    "mmap",
    "pretend_torch",
    "refusal",
    "register",
]

PAGE, MIB = 4096, 1 << 20


class _Fake:
    """Books of a fake driver: what is asked for by name is a function `<prefix>_<name>` that answers with a number."""

    prefix = ""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)

    def __getattr__(self, name):
        function = getattr(self.library, f"{self.prefix}_{name}")
        function.restype = ctypes.c_uint64
        return lambda *arguments: function(*map(self._converted, arguments))

    @staticmethod
    def _converted(argument):
        return argument.encode() if isinstance(argument, str) else ctypes.c_uint64(argument)

    def wrongs(self):
        """Tell what pinpool did wrong, by the driver's rules."""
        return [self._wrong(index) for index in range(self.wrong())]

    def _wrong(self, index):
        text = ctypes.create_string_buffer(500)
        getattr(self.library, f"{self.prefix}_wrong_text")(ctypes.c_uint64(index), text, ctypes.c_uint64(500))
        return text.value.decode()


class FakeLevelZero(_Fake):
    prefix = "fake_ze"

    def uuid(self, device):
        uuid = ctypes.create_string_buffer(16)
        self.library.fake_ze_device_uuid(device, uuid)
        return uuid.raw

    def expect_left(self, live=0, cached=0, contexts=0):
        assert self.wrongs() == [], self.wrongs()
        left = self.live(), self.cached(), self.contexts()
        assert left == (live, cached, contexts), left


class FakeCuda(_Fake):
    """Books and controls of tests/drivers/fake_cuda.rs, at the end of that file.

    A stream is a number, as is an address: `driver.begin_capture(int(stream))`. What a stream is given is done when a
    test says so: `driver.copy_async(stream, target, source, nbytes)`, then `driver.advance(stream, steps)` or
    `driver.advance_all()`. What begins with `copy`, `begin` or `end` answers with the driver's code, 0 for success.
    """

    prefix = "fake"

    def expect_left(self, wrongs=()):
        assert self.wrongs() == list(wrongs), self.wrongs()
        left = self.live(), self.live_events(), self.retained(0), self.depth_of_all()
        assert left == (0, 0, 0, 0), left


def find(kind="xpu"):
    """List the devices of a kind, with the usual library."""
    return _pinpool.find_devices(kind, None)


def refusal(call, *arguments, **options):
    """Tell in words how a call fails. It must."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


def pretend_torch(current, uuids):
    """Let pinpool see a torch whose XPU devices have these UUIDs."""
    stub = types.ModuleType("pinpool.torch")
    stub.current_device, stub.xpu_uuid = lambda: current, lambda index: uuids[index]
    sys.modules.update({"torch": types.ModuleType("torch"), "pinpool.torch": stub})
