"""A reader of safetensors files that fills buffers of the caller's choice, such as pool blocks."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeGuard

from pinpool.demo import DemoError

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

LENGTH_BYTES = 8
# The limit of the format's own library: a longer header is a damaged length, and would be read into memory.
MAX_HEADER_BYTES = 100_000_000

# The format's name of each dtype: pinpool's name and the bytes of one element.
DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: its dtype (pinpool's name), its shape, and the bytes `start` to `end` of the data part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.end - self.start


class SafetensorsFile:
    """An open safetensors file whose header was checked: every entry lies in the file and has the size of its shape.

    Args:
        path: the file.

    Raises:
        DemoError: the file is truncated or its header is damaged.
        OSError: the file cannot be opened or read.

    Example:
        with SafetensorsFile(path) as file:
            for entry in file.entries.values():
                block = pool.empty(entry.shape, entry.dtype)
                file.read_into(entry.name, block)

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._data_start, header = self._read_header()
            self.entries = self._parse_entries(header)
            self._check_layout()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the entries stay readable."""
        self._file.close()

    def read_into(self, name: str, buffer: Buffer) -> None:
        """Fill `buffer`, which has exactly the tensor's size, with the bytes of the tensor `name`.

        Raises:
            DemoError: the file got shorter since it was opened, or the buffer has another size.

        """
        entry = self.entries[name]
        self._file.seek(self._data_start + entry.start)
        count = self._file.readinto(buffer)
        if count != entry.nbytes:
            self._refuse(f"tensor {name!r} has {entry.nbytes} bytes, and {count} of them could be read")

    def _refuse(self, reason: str) -> NoReturn:
        raise DemoError(f"{self.path} is not a usable safetensors file: {reason}")

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        prefix = self._file.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            self._refuse(f"it has {len(prefix)} bytes and must start with a header length of {LENGTH_BYTES}")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            self._refuse(f"its header length is {length} bytes and the format allows {MAX_HEADER_BYTES}")
        text = self._file.read(length)
        if len(text) < length:
            self._refuse(f"its header should have {length} bytes and the file ends after {len(text)}")
        return LENGTH_BYTES + length, self._parse_json(text)

    def _parse_json(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            self._refuse(f"its header is not valid JSON ({error})")
        if not isinstance(header, dict):
            self._refuse("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header

    def _parse_entries(self, header: dict[str, Any]) -> dict[str, TensorEntry]:
        return {name: self._parse_entry(name, fields) for name, fields in header.items()}

    def _parse_entry(self, name: str, fields: object) -> TensorEntry:
        if not isinstance(fields, dict):
            self._refuse(f"the header entry of tensor {name!r} is not a JSON object")
        dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self._refuse(f"tensor {name!r} has the dtype {dtype!r}, and known are {', '.join(DTYPES)}")
        if not _is_list_of_sizes(shape):
            self._refuse(f"tensor {name!r} has the shape {shape!r}, which is not a list of sizes")
        if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._refuse(f"tensor {name!r} has the offsets {offsets!r}, which are not a start and an end")
        pinpool_dtype, itemsize = DTYPES[dtype]
        entry = TensorEntry(name, pinpool_dtype, tuple(shape), *offsets)
        if math.prod(entry.shape) * itemsize != entry.nbytes:
            self._refuse(f"tensor {name!r}, {dtype} of shape {shape}, cannot have the {entry.nbytes} bytes it is given")
        return entry

    def _check_layout(self) -> None:
        """Refuse gaps, overlaps and data that the file does not have, as the format's own library does."""
        covered = 0
        available = os.fstat(self._file.fileno()).st_size - self._data_start
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.end)):
            if entry.end > available:
                self._refuse(f"tensor {entry.name!r} ends at byte {entry.end} of the data and there are {available}")
            if entry.start != covered:
                self._refuse(f"tensor {entry.name!r} starts at byte {entry.start} of the data instead of {covered}")
            covered = entry.end
        if covered != available:
            self._refuse(f"its tensors cover {covered} bytes of data and there are {available}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name is there twice")
    return names


def _is_list_of_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
