"""The progress bar behind `progress=True`."""

from collections.abc import Callable


def bar(total: int) -> Callable[[int, int], None]:
    """Make a tqdm bar over `total` bytes that closes when all are done; without tqdm, a callable that does nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        return lambda _done, _total: None
    shown = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="pinning")

    def report(done: int, total: int) -> None:
        shown.total = total
        shown.update(done - shown.n)
        if done >= total:
            shown.close()

    return report
