"""The buffer protocol and `__array__`: what memoryview, numpy, files and C extensions see."""

import ctypes
import io
import os

import ml_dtypes
import numpy as np
import pytest

FORMATS = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
    "complex64": "Zf",
    "complex128": "Zd",
}
WITHOUT_FORMAT = ("bfloat16", "float8_e4m3fn", "complex32", "float4_e2m1fn_x2")

# What C code asks for.
SIMPLE, WRITABLE, FORMAT, ND, STRIDES, FULL = 0, 1, 4, 8, 0x18, 0x11D
C_CONTIGUOUS, F_CONTIGUOUS, ANY_CONTIGUOUS = 0x38, 0x58, 0x98


class Buffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Buffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(Buffer))(("PyBuffer_Release", ctypes.pythonapi))


@pytest.fixture
def ask():
    """Ask for a buffer as C code does; it is released at the end."""
    views = []

    def ask(obj, flags):
        view = Buffer()
        get_buffer(obj, view, flags)
        views.append(view)
        return view

    yield ask
    for view in views:
        release_buffer(view)


# memoryview


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_memoryview_describes_the_array(pool, dtype):
    array = pool.empty((2, 3, 4), dtype)
    view, size = memoryview(array), np.dtype(dtype).itemsize
    assert (view.format, view.itemsize, view.nbytes) == (FORMATS[dtype], size, 24 * size)
    assert (view.shape, view.strides) == ((2, 3, 4), (12 * size, 4 * size, size))
    assert (view.readonly, view.c_contiguous, view.obj) == (False, True, array)


@pytest.mark.parametrize("shape", [0, (0, 3), (3, 0, 2), (), (1,) * 64])
def test_a_memoryview_takes_any_shape(pool, shape):
    expected = np.empty(shape, "int32")
    view = memoryview(pool.empty(shape, "int32"))
    assert (view.shape, view.ndim, view.nbytes) == (expected.shape, expected.ndim, expected.nbytes)


def test_a_memoryview_reads_and_writes(pool):
    array = pool.zeros((2, 3), "int32")
    view = memoryview(array)
    view[1, 2] = 7
    assert view.tolist() == [[0, 0, 0], [0, 0, 7]]
    assert np.asarray(array).tolist() == view.tolist()


@pytest.mark.parametrize("dtype", WITHOUT_FORMAT)
def test_without_a_format_there_is_no_memoryview(pool, dtype):
    array = pool.empty(5, dtype)
    with pytest.raises(BufferError, match=dtype):
        memoryview(array)
    del array
    assert pool.stats()["blocks"] == 0


@pytest.mark.parametrize("dtype", ["uint8", "float32", *WITHOUT_FORMAT])
def test_a_file_reads_into_every_element_type(pool, dtype, tmp_path):
    array = pool.empty((16, 4), dtype)
    content = os.urandom(array.nbytes)
    path = tmp_path / "weights"
    path.write_bytes(content)
    with path.open("rb", buffering=0) as file:
        assert file.readinto(array) == array.nbytes
    assert ctypes.string_at(array.ptr, array.nbytes) == content
    copy = io.BytesIO()
    assert copy.write(array) == array.nbytes
    assert copy.getvalue() == content


# Requests of C code


@pytest.mark.parametrize(
    ("flags", "described"),
    [
        (SIMPLE, (1, False, False, False)),
        (WRITABLE, (1, False, False, False)),
        (FORMAT, (1, True, False, False)),
        (ND, (2, False, True, False)),
        (STRIDES, (2, False, True, True)),
        (C_CONTIGUOUS, (2, False, True, True)),
        (ANY_CONTIGUOUS, (2, False, True, True)),
        (FULL, (2, True, True, True)),
    ],
)
def test_a_buffer_has_what_was_asked_for_and_no_more(pool, ask, flags, described):
    array = pool.empty((2, 3), "int32")
    view = ask(array, flags)
    assert (view.ndim, view.format is not None, bool(view.shape), bool(view.strides)) == described
    assert (view.buf, view.len, view.itemsize, view.readonly) == (array.ptr, 24, 4, 0)
    assert view.suboffsets is None


@pytest.mark.parametrize("flags", [ND, STRIDES, C_CONTIGUOUS, F_CONTIGUOUS, FULL])
def test_a_buffer_without_dimensions_has_neither_shape_nor_strides(pool, ask, flags):
    view = ask(pool.empty((), "int32"), flags)
    assert (view.ndim, view.len, bool(view.shape), bool(view.strides)) == (0, 4, False, False)


def test_a_column_major_buffer_is_refused_for_a_matrix(pool, ask):
    with pytest.raises(BufferError, match="row-major"):
        ask(pool.empty((2, 3)), F_CONTIGUOUS)
    assert ask(pool.empty(5), F_CONTIGUOUS).len == 5


def test_a_refused_buffer_has_no_owner(pool):
    view = Buffer(obj=1)
    with pytest.raises(BufferError):
        get_buffer(pool.empty((2, 3)), view, F_CONTIGUOUS)
    assert view.obj is None


# numpy


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("copy", [None, False])
def test_numpy_shares_the_memory(pool, dtype, copy):
    array = pool.empty((2, 3), dtype)
    view = np.asarray(array, copy=copy)
    assert (view.dtype, view.shape, view.ctypes.data) == (np.dtype(dtype), (2, 3), array.ptr)
    assert view.flags.writeable


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
@pytest.mark.parametrize("copy", [None, False])
def test_numpy_shares_the_memory_of_types_that_ml_dtypes_adds(pool, dtype, copy):
    array = pool.empty((2, 3), dtype)
    view = np.asarray(array, copy=copy)
    assert (view.dtype, view.shape, view.ctypes.data) == (np.dtype(getattr(ml_dtypes, dtype)), (2, 3), array.ptr)
    assert view.flags.writeable


def test_without_ml_dtypes_the_error_says_what_to_install(run):
    run("""
        sys.modules["ml_dtypes"] = None
        import numpy, pinpool

        try:
            numpy.asarray(pinpool.PinnedPool("host", max_bytes=MIB).empty(5, "bfloat16"))
            raise SystemExit("it was converted")
        except TypeError as error:
            assert "ml_dtypes" in str(error)
    """)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_numpy_copy_is_a_copy(pool, dtype):
    array = pool.zeros(5, dtype)
    copies = [np.array(array), np.asarray(array, copy=True), array.__array__(copy=True)]
    np.asarray(array)[:] = 1
    assert [copy.tolist() for copy in copies] == [[0] * 5] * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_is_a_conversion(pool, dtype):
    array = pool.zeros(3, dtype)
    np.asarray(array)[:] = [1, 2, 3]
    converted = np.asarray(array, "int64")
    assert (converted.dtype, converted.tolist()) == (np.int64, [1, 2, 3])
    assert array.__array__("int64").tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_without_a_copy_is_a_value_error(pool, dtype):
    array = pool.zeros(3, dtype)
    with pytest.raises(ValueError, match="copy"):
        np.asarray(array, "int64", copy=False)
    with pytest.raises(ValueError, match="copy"):
        array.__array__("int64", copy=False)


@pytest.mark.parametrize("copy", [None, False])
def test_the_same_dtype_is_no_copy(pool, copy):
    array = pool.empty(3, "float32")
    assert array.__array__("float32", copy=copy).ctypes.data == array.ptr


def test_numpy_computes_with_an_array(pool):
    array = pool.zeros((2, 3), "float32")
    assert np.add(array, 1).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert np.stack([array, array]).shape == (2, 2, 3)
