"""The numpy side of `PinnedArray.__array__`; the only file that imports numpy."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pinpool._pinpool import PinnedArray


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
