"""The pool of those who were given none."""

import os
import threading

from pinpool._pinpool import PinnedPool

_default: PinnedPool | None = None
_default_lock = threading.RLock()  # a finalizer that pins may run while the pool is made


def _forget_default_pool() -> None:
    """Forget the pool and the lock of the parent: a forked child owns nothing of either."""
    global _default, _default_lock
    _default, _default_lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget_default_pool)


def default_pool() -> PinnedPool:
    """Make the pool that is used where none is given, once in a process."""
    global _default
    with _default_lock:
        if _default is None or _default.closed:
            made = PinnedPool()
            _default = made if _default is None or _default.closed else _default
        return _default
