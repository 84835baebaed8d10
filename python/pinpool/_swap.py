"""Swap: values in pool memory, to a file on local storage and back."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, cast

from pinpool._default import default_pool
from pinpool._pinpool import SwapStore, swap_misfit
from pinpool._values import kind_named, kind_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from types import TracebackType

    from pinpool._pinpool import PinnedPool, SwapOperation
    from pinpool._types import SwapStats
    from pinpool._values import Kind, Value


class Ticket:
    """A write or a read under way. It goes on when the ticket is dropped, and keeps its memory until its end.

    Made by a `Swapper`. Besides `wait`, a ticket can be awaited in an asyncio program: `value = await ticket`. The
    failure of a write that nobody has waited for is raised by the swapper's next `flush()` or `close()`.

    >>> import tempfile
    >>> from pinpool import PinnedPool, Swapper
    >>> pool = PinnedPool("host")
    >>> with tempfile.TemporaryDirectory() as path, Swapper(path, pool=pool) as swapper:
    ...     ticket = swapper.write("key", pool.zeros(10))
    ...     (ticket.wait(), ticket.done(), ticket.key)
    (None, True, 'key')
    """

    def __init__(
        self, operation: SwapOperation, key: str, value: object = None, landing: _Landing | None = None
    ) -> None:
        """For the `Swapper` only."""
        self._operation, self._value, self._landing = operation, value, landing
        self._key = key

    @property
    def key(self) -> str:
        """What the value is stored as."""
        return self._key

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._operation.done()

    def wait(self, timeout: float | None = None) -> Value:
        """Wait for the end. A read returns what was read.

        `timeout`: seconds; None: for ever. The interpreter is released, and Ctrl-C ends the wait; the operation goes
        on.

        TimeoutError: the time is up. OSError: the system refused, with its number; what was stored under the key
        before a write still is. StoreDamagedError: what is on the disk is not what was written. PinpoolError: this is a
        forked child, and the ticket its parent's.
        """
        if not self._operation.wait(timeout):
            message = f"the transfer of {self._key!r} is not done after {timeout} s; it goes on, wait() again for it"
            raise TimeoutError(message)
        if self._landing is not None:
            self._landing.finish()
        return self._value

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the end without blocking the event loop of asyncio."""
        return self._ended().__await__()

    async def _ended(self) -> Value:
        if not self.done():
            watch, loop = self._operation.watch(), asyncio.get_running_loop()
            ended = asyncio.Event()
            loop.add_reader(watch.fileno(), ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(watch.fileno())
                del watch  # closed now, even if the exception of a cancelled wait lives on
        return self.wait()

    def __repr__(self) -> str:
        return f"Ticket({self._key!r}, {'done' if self.done() else 'under way'})"


class _Landing:
    """What was read beside its place, because that is not fit for a transfer, and is to be copied there, once."""

    def __init__(self, kind: Kind, into: object, value: object) -> None:
        self._kind, self._into, self._value = kind, into, value
        self._lock = threading.Lock()

    def finish(self) -> None:
        with self._lock:
            if self._value is not None:
                self._kind.copy(self._into, self._value)
            self._value = None


class Swapper:
    """A store of values on local storage: a directory with a data file and an index, which one process has open.

    Values in pool memory are written and read without a copy: by io_uring with O_DIRECT and fixed buffers where the
    kernel and the file system let it, else by threads or through the page cache; `stats()` says which, and why. A value
    comes back as what it was, a torch tensor, a numpy array or a `PinnedArray`, in pool memory, of the same dtype and
    shape. Operations on one key take effect in the order of their calls.

    `path`: the directory, made where it is missing. `pool`: where values are read to; by default one of the process's.
    `block_bytes`: bytes of one transfer, by default 1 MiB; a multiple of 4096. `queue_depth`: how many of them the
    kernel has at a time, by default 32. `engine`: "auto", "io_uring" or "threads". `max_bytes`: the most that the data
    file may hold; a value that replaces another needs room beside it. `direct`: True insists on O_DIRECT, False goes
    through the page cache. `fixed_buffers`: make pool regions known to io_uring; a region that is known is copied by a
    fork, as memory that is registered with a device.

    What survives: an operation whose ticket is done survives the end of the process, however it ends. A loss of power
    survives what was done when `flush()` was called, and was not replaced or deleted since. What is lost or changed on
    the disk is found by a checksum, and is an error: never other data.

    OSError: the system refused; BlockingIOError: another has the store open. StoreDamagedError: the index is not what
    was written. ValueError: an argument makes no sense. PinpoolError: what was insisted on cannot be had.

    Threads may share a swapper. In a forked child, a swapper of the parent refuses every call. Also a context manager.

    >>> import tempfile, torch, pinpool.torch
    >>> from pinpool import PinnedPool, Swapper
    >>> pool = PinnedPool("host")
    >>> moments = pinpool.torch.pin(torch.arange(6.0).reshape(2, 3), pool=pool)
    >>> with tempfile.TemporaryDirectory() as path, Swapper(path, pool=pool) as swapper:
    ...     write = swapper.write("exp_avg", moments)
    ...     del moments  # its memory is used again when it is written
    ...     write.wait()
    ...     swapper.read("exp_avg").wait()
    tensor([[0., 1., 2.],
            [3., 4., 5.]])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pool: PinnedPool | None = None,
        block_bytes: int | None = None,
        queue_depth: int | None = None,
        engine: str = "auto",
        max_bytes: int | None = None,
        direct: bool | None = None,
        fixed_buffers: bool = True,
    ) -> None:
        """See the class."""
        self._path, self._pool = os.fspath(path), pool
        self._store = SwapStore(
            path,
            block_bytes=block_bytes,
            queue_depth=queue_depth,
            engine=engine,
            max_bytes=max_bytes,
            direct=direct,
            fixed_buffers=fixed_buffers,
        )

    def write(self, key: str, obj: Value, *, copy: bool = False, timeout: float | None = 0) -> Ticket:
        """Begin to store a value, in the place of what is stored under the key. Do not change it before the end.

        `obj`: a torch tensor, a numpy array, a `PinnedArray` or a memoryview of one, in memory of a `PinnedPool`:
        whole, or a view that starts at a multiple of 4096 bytes, in row-major order. It may be dropped at once. Device
        work that was recorded of its block, and reads into the same bytes, are waited for first. `copy`: copy a value
        that is not so to a block of the pool first, and count it in `stats()`; it may be changed at once then. That
        goes for tensors of any device. A value that is fit is not copied even so. `timeout`: seconds to wait for memory
        to copy to, as in `PinnedPool.empty`.

        The key is replaced whole or not at all, when the ticket is done.

        ValueError, TypeError: memory that is not fit, named with the reason; or the swapper is closed. OSError: there
        is no room (ENOSPC), or RLIMIT_FSIZE is too small for the file (EFBIG). What the disk refuses later is raised by
        `wait()` of the ticket. With `copy`, also what
        `PinnedPool.empty` raises.
        """
        kind = kind_of(obj)
        dtype, shape = kind.layout(obj)
        reason = kind.misfit(obj) or swap_misfit(obj, False)
        if reason is not None:
            if not copy:
                raise ValueError(f"cannot write {key!r} from this memory: {reason}")
            obj = self._copied(kind, obj, dtype, shape, timeout)
        label = json.dumps([kind.name, dtype, shape], separators=(",", ":"))
        return Ticket(self._store.write(key, label, obj), key)

    def _copied(self, kind: Kind, obj: Value, dtype: str, shape: tuple[int, ...], timeout: float | None) -> Value:
        copied = kind.empty(self._read_pool(), shape, dtype, timeout)
        kind.copy(copied, obj)
        self._store.count_bounce(copied.nbytes)
        return copied

    def read(self, key: str, into: Value = None, *, copy: bool = False, timeout: float | None = 0) -> Ticket:
        """Begin to read a value. `wait()` of the ticket returns it.

        `into`: memory of a `PinnedPool` to read into, which is then what is returned: of the value's dtype and shape,
        or as many bytes of uint8. It must be fit as in `write`, and end at a multiple of 4096 bytes or where its block
        ends. Do not use it before the end. None: a new tensor or array of the pool; `timeout` is that of
        `PinnedPool.empty`. `copy`: read to a block of the pool, and copy that into memory that is not fit, when the
        ticket is waited for.

        KeyError: nothing is stored under the key. ValueError, TypeError: as in `write`, or another dtype, shape or
        size. OutOfPinnedMemoryError, MemlockLimitError: there is no memory to read into.
        """
        label, nbytes = self._store.describe(key)
        name, dtype, dimensions = json.loads(label)
        kind, shape = kind_named(name), tuple(dimensions)
        if into is None:
            value = kind.empty(self._read_pool(), shape, dtype, timeout)
            try:
                return Ticket(self._store.read(key, label, value), key, value)
            except ValueError:
                if self._store.describe(key) == (label, nbytes):
                    raise
                return self.read(key, timeout=timeout)  # another value has taken its place just now
        into_kind = kind_of(into)
        into_kind.check_target(into)
        if into_kind.layout(into) not in ((dtype, shape), ("uint8", (nbytes,))):
            found = " of shape ".join(map(str, into_kind.layout(into)))
            raise ValueError(f"{key!r} is {dtype} of shape {shape}, and cannot be read into {found}")
        reason = into_kind.misfit(into) or swap_misfit(into, True)
        if reason is None:
            return Ticket(self._store.read(key, label, into), key, into)
        if not copy:
            raise ValueError(f"cannot read {key!r} into this memory: {reason}")
        beside = into_kind.empty(self._read_pool(), into_kind.layout(into)[1], into_kind.layout(into)[0], timeout)
        operation = self._store.read(key, label, beside)
        self._store.count_bounce(nbytes)
        return Ticket(operation, key, into, _Landing(into_kind, into, beside))

    def _read_pool(self) -> PinnedPool:
        return self._pool if self._pool is not None else default_pool()

    def prefetch(self, keys: Iterable[str], *, ahead: int = 2, timeout: float | None = 0) -> Iterator[Any]:
        """Read values in the order of their keys, some ahead of the one that is used.

        `ahead`: how many reads are under way, or done and not used, at a time; as many values are in memory, and the
        one in use, and the one before where a loop's variable still has it. The first reads begin at once, at the call.
        `timeout`: seconds to wait for memory, as in `read`; the pool needs room for those `ahead + 2` values, or the
        wait is in vain. What `read` and `wait` raise is raised in its turn.

        >>> import tempfile
        >>> from pinpool import PinnedPool, Swapper
        >>> pool = PinnedPool("host")
        >>> with tempfile.TemporaryDirectory() as path, Swapper(path, pool=pool) as swapper:
        ...     for number in range(4):
        ...         ticket = swapper.write(f"layer {number}", pool.zeros(number))
        ...     [layer.nbytes for layer in swapper.prefetch(f"layer {number}" for number in range(4))]
        [0, 1, 2, 3]
        """
        if isinstance(keys, str):
            raise TypeError(f"prefetch takes keys, not one key: use read({keys!r})")
        if ahead < 1:
            raise ValueError(f"invalid ahead: {ahead}; at least one read is under way at a time")
        rest = iter(keys)
        tickets = deque(self._begun(key, timeout) for key in islice(rest, ahead))
        return self._prefetched(rest, tickets, timeout)

    def _next_begun(self, rest: Iterator[str], timeout: float | None) -> list[Ticket | Exception]:
        try:
            return [self._begun(key, timeout) for key in islice(rest, 1)]
        except Exception as refusal:  # of the caller's iterator
            return [refusal]

    def _begun(self, key: str, timeout: float | None) -> Ticket | Exception:
        try:
            return self.read(key, timeout=timeout)
        except Exception as refusal:  # raised in its turn, behind the values before it
            return refusal

    def _prefetched(
        self, rest: Iterator[str], tickets: deque[Ticket | Exception], timeout: float | None
    ) -> Iterator[Any]:
        while tickets:
            ticket = tickets.popleft()
            if isinstance(ticket, Exception):
                raise ticket
            value = ticket.wait()
            del ticket
            tickets.extend(self._next_begun(rest, timeout))
            yield value
            del value  # or its memory would be kept while the next one is waited for

    def delete(self, key: str) -> None:
        """Delete a value, once what was begun before on its key is done. Reads that are under way are not disturbed.

        KeyError: nothing is stored under the key. OSError: the system refused, and the value is still there.
        """
        self._store.delete(key).wait(None)

    def keys(self) -> list[str]:
        """List the keys that `read` would find, in no order."""
        return self._store.keys()

    def __contains__(self, key: object) -> bool:
        """Tell whether `read` would find the key: it is stored, or is being written."""
        if not isinstance(key, str):
            return False
        try:
            self._store.describe(key)
        except KeyError:
            return False
        return True

    def flush(self) -> None:
        """Make everything that is done survive a loss of power (fdatasync of both files).

        Raises also the first failure of a write that nobody has waited for, as its `wait()` would have.
        """
        self._store.flush()

    def trim(self) -> int:
        """Give unused room of the data file back to the file system, and return how many bytes that were."""
        return self._store.trim()

    def stats(self) -> SwapStats:
        """Tell what was done, and what is stored: bytes, seconds, GB/s, and how transfers are made.

        `bounces` and `bounced_bytes` count the copies that `copy=True` has made: without it they are 0. Rates are bytes
        over the time in which at least one write (or read) was under way. `stored_bytes` are in units of 4096.
        """
        return cast("SwapStats", self._store.stats())

    def close(self) -> None:
        """Wait for everything that was begun, and let go of the store. A second call does nothing.

        Raises the first failure of a write that nobody has waited for; the store is closed all the same. Ctrl-C ends
        the wait; call it again then. A swapper that is dropped instead finishes what was begun by itself, if the
        process lives long enough.
        """
        self._store.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._store.closed

    def __repr__(self) -> str:
        return f"Swapper({self._path!r}{', closed' if self.closed else ''})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None = None,
        _value: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None:
        self.close()
