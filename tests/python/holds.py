"""Keeps the threads of swap stores from their work, so that what was begun is under way for as long as a test wants."""

import ctypes
import os
import re
import signal
from pathlib import Path

TASKS = Path("/proc/self/task")


def engine_threads():
    """Tell the threads that make transfers."""
    return [int(task.name) for task in TASKS.iterdir() if (task / "comm").read_text() == "pinpool-swap\n"]


class Held:
    """While in this context, the threads that make transfers are in a signal handler.

    It is Python's own, and writes to a full pipe. Only for programs that use no signals. `count`: of such threads.
    """

    def __init__(self, count=1):
        self._count = count

    def __enter__(self):
        while len(threads := engine_threads()) != self._count:
            os.sched_yield()  # a thread that has just been started has no name
        self._pipe = os.pipe()
        full = self._pipe[1]
        os.set_blocking(full, False)
        try:
            while True:
                os.write(full, bytes(4096))
        except BlockingIOError:
            pass
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.set_wakeup_fd(full, warn_on_full_buffer=False)
        os.set_blocking(full, True)
        for thread in threads:
            assert ctypes.CDLL(None).tgkill(os.getpid(), thread, signal.SIGUSR1) == 0
        while any(_has_not_seen_the_signal(thread) for thread in threads):
            os.sched_yield()
        while any(_runs(thread) for thread in threads):
            os.sched_yield()  # not yet in the write
        signal.set_wakeup_fd(-1)
        return self

    def __exit__(self, *_):
        os.read(self._pipe[0], 1 << 20)  # now there is room; nothing is closed, for they may not have written yet


def _has_not_seen_the_signal(thread):
    pending = re.search(r"SigPnd:\s+(\w+)", (TASKS / str(thread) / "status").read_text())[1]
    return int(pending, 16) >> (signal.SIGUSR1 - 1) & 1


def _runs(thread):
    return "State:\tS" not in (TASKS / str(thread) / "status").read_text()
