"""The numpy side of `PinnedArray.__array__` and of the swap store; the only file that imports numpy."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pinpool._pinpool import PinnedArray, PinnedPool, is_element_type
from pinpool._values import NOT_ROW_MAJOR


def as_array(array: PinnedArray, dtype: npt.DTypeLike | None, copy: bool | None) -> npt.NDArray[Any]:
    """Share the memory as a numpy array, unless a copy or another dtype is asked for."""
    own = _numpy_dtype(array.dtype)
    shared = _view(array, own)
    if dtype is None or np.dtype(dtype) == own:
        return shared.copy() if copy else shared
    if copy is False:
        raise ValueError(f"a {own} array cannot be seen as {np.dtype(dtype)} without a copy")
    return shared.astype(dtype)


def _view(array: PinnedArray, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    flat = np.asarray(memoryview(array._bytes()))  # not every dtype has a buffer format
    return flat.view(dtype).reshape(array.shape)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    except (ImportError, AttributeError):
        raise TypeError(f"numpy has no {name}; install ml_dtypes, or use torch.from_dlpack") from None


class _Arrays:
    """How the swap store sees numpy's arrays."""

    name = "numpy"

    def layout(self, obj: npt.NDArray[Any]) -> tuple[str, tuple[int, ...]]:
        if isinstance(obj, np.ma.MaskedArray):
            raise TypeError("cannot swap a masked array: its mask would be lost; swap its data and its mask")
        name = obj.dtype.name
        if not is_element_type(name) or obj.dtype.newbyteorder("=") != _numpy_dtype(name):
            raise TypeError(f"cannot swap an array of dtype {obj.dtype}: a pool has no such arrays")
        return name, obj.shape

    def misfit(self, obj: npt.NDArray[Any]) -> str | None:
        if not obj.dtype.isnative:
            return "its dtype is of foreign byte order"
        return None if obj.flags.c_contiguous else NOT_ROW_MAJOR

    def check_target(self, into: npt.NDArray[Any]) -> None:
        if not into.flags.writeable:
            raise ValueError("cannot read into this array: it is read-only")

    def empty(self, pool: PinnedPool, shape: tuple[int, ...], dtype: str, timeout: float | None) -> npt.NDArray[Any]:
        return np.asarray(pool.empty(shape, dtype, timeout=timeout))

    def copy(self, into: npt.NDArray[Any], obj: npt.NDArray[Any]) -> None:
        into[...] = obj


ARRAYS = _Arrays()
