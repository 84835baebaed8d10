//! DLPack 1.3: its C structs, element types, and managed tensors whose deleter gives a block back.
//!
//! The deleter is pure Rust. It runs on any thread, without the interpreter, with an exception pending, in a forked
//! child or after the interpreter is gone. Everything that a consumer might trip over is checked before the export:
//! torch up to 2.13 aborts the process on an overflowing size.
#![allow(unsafe_code)] // hands owned memory across the C boundary

use std::cell::Cell;
use std::ffi::{CStr, c_void};

use crate::error::{Error, Result};

/// `DLDevice`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Kind of device, `kDLCPU` and so on.
    pub kind: i32,
    /// Ordinal; zero for host memory.
    pub ordinal: i32,
}

/// Ordinary host memory. torch accepts no other kind for host memory, not even `kDLCUDAHost`.
pub const CPU: Device = Device { kind: 1, ordinal: 0 };

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    /// Class of the type, `kDLInt` and so on.
    pub code: u8,
    /// Bits of one lane.
    pub bits: u8,
    /// Lanes of one element.
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct Tensor {
    /// First byte; NULL where there is none.
    pub data: *mut c_void,
    /// Where the data lies.
    pub device: Device,
    /// Number of dimensions.
    pub ndim: i32,
    /// Element type.
    pub dtype: DataType,
    /// `ndim` lengths, in elements.
    pub shape: *mut i64,
    /// `ndim` steps, in elements. Never NULL for `ndim > 0`.
    pub strides: *mut i64,
    /// Always zero here.
    pub byte_offset: u64,
}

/// `DLManagedTensor`, the form before version 1.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedTensor {
    /// The tensor.
    pub tensor: Tensor,
    /// What the deleter frees.
    pub context: *mut c_void,
    /// Called once by the consumer.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedTensorVersioned {
    /// Major and minor.
    pub version: [u32; 2],
    /// What the deleter frees.
    pub context: *mut c_void,
    /// Called once by the consumer.
    pub deleter: Option<unsafe extern "C" fn(*mut Self)>,
    /// Bit 0: read-only, bit 1: copied, bit 2: sub-byte elements padded.
    pub flags: u64,
    /// The tensor.
    pub tensor: Tensor,
}

const VERSION: [u32; 2] = [1, 3];

/// An element type by its name.
#[derive(Debug, PartialEq, Eq)]
pub struct ElementType {
    /// The name that torch and numpy use.
    pub name: &'static str,
    /// In DLPack's terms.
    pub data_type: DataType,
    /// Bytes of one element.
    pub bytes: usize,
    /// The buffer protocol's format, where it has one.
    pub format: Option<&'static CStr>,
}

const fn element(name: &'static str, code: u8, bits: u8, format: Option<&'static CStr>) -> ElementType {
    ElementType { name, data_type: DataType { code, bits, lanes: 1 }, bytes: bits as usize / 8, format }
}

/// Every element type that the pool hands out. `float4_e2m1fn_x2` packs two values into each byte.
pub const ELEMENT_TYPES: &[ElementType] = &[
    element("uint8", 1, 8, Some(c"B")),
    element("float32", 2, 32, Some(c"f")),
    element("bfloat16", 4, 16, None),
    element("float16", 2, 16, Some(c"e")),
    element("int8", 0, 8, Some(c"b")),
    element("int16", 0, 16, Some(c"h")),
    element("int32", 0, 32, Some(c"i")),
    element("int64", 0, 64, Some(c"q")),
    element("uint16", 1, 16, Some(c"H")),
    element("uint32", 1, 32, Some(c"I")),
    element("uint64", 1, 64, Some(c"Q")),
    element("float64", 2, 64, Some(c"d")),
    element("bool", 6, 8, Some(c"?")),
    element("complex32", 5, 32, None),
    element("complex64", 5, 64, Some(c"Zf")),
    element("complex128", 5, 128, Some(c"Zd")),
    element("float8_e4m3fn", 10, 8, None),
    element("float8_e4m3fnuz", 11, 8, None),
    element("float8_e5m2", 12, 8, None),
    element("float8_e5m2fnuz", 13, 8, None),
    element("float8_e8m0fnu", 14, 8, None),
    ElementType {
        name: "float4_e2m1fn_x2",
        data_type: DataType { code: 17, bits: 4, lanes: 2 },
        bytes: 1,
        format: None,
    },
];

impl ElementType {
    /// The type of that name.
    ///
    /// # Errors
    /// `Invalid` names them all.
    pub fn from_name(name: &str) -> Result<&'static Self> {
        ELEMENT_TYPES.iter().find(|element| element.name == name).ok_or_else(|| {
            let known: Vec<&str> = ELEMENT_TYPES.iter().map(|element| element.name).collect();
            Error::invalid("dtype", format!("{name:?} is unknown; known are {}", known.join(", ")))
        })
    }
}

/// Bytes of a contiguous array.
///
/// # Errors
/// `Invalid` for a negative dimension, or a size that consumers could not count in 63 bits.
pub fn checked_bytes(shape: &[i64], element: &ElementType) -> Result<usize> {
    if let Some(dimension) = shape.iter().find(|&&dimension| dimension < 0) {
        return Err(Error::invalid("shape", format!("{shape:?} has the negative dimension {dimension}")));
    }
    // Consumers multiply the dimensions that are not zero, too, for the strides: so the product without them counts.
    let count = shape.iter().filter(|&&d| d > 0).try_fold(element.bytes as i64, |bytes, &d| bytes.checked_mul(d));
    let Some(bytes) = count else {
        let reason = format!("{shape:?} of {} is more than 2^63 - 1 bytes", element.name);
        return Err(Error::invalid("shape", reason));
    };
    Ok(if shape.contains(&0) { 0 } else { bytes as usize })
}

thread_local! {
    /// Address of the tensor that this thread's last deleter call freed.
    static LAST_DELETED: Cell<usize> = const { Cell::new(0) };
}

/// Whether the last deleter call of this thread was for that tensor. A consumer that refuses a tensor may have deleted
/// it or not (torch does either), and nothing else tells.
pub fn was_just_deleted<M>(tensor: *const M) -> bool {
    LAST_DELETED.get() == tensor as usize
}

/// A managed tensor together with all that it points to.
struct Owned<M, O> {
    managed: M,
    /// Lengths, then strides: twice the rank.
    dimensions: *mut i64,
    rank: usize,
    _owner: O,
}

impl<M, O> Owned<M, O> {
    /// Moves everything to the heap; the consumer's deleter call brings it back.
    fn leak(
        owner: O,
        data: *mut u8,
        shape: &[i64],
        element: &ElementType,
        make: impl FnOnce(Tensor) -> M,
    ) -> *mut Self {
        LAST_DELETED.set(0); // the heap may give out the address of a tensor that was deleted before
        let dimensions = Box::into_raw(with_strides(shape)).cast::<i64>();
        let is_empty = shape.contains(&0);
        let managed = make(Tensor {
            data: if is_empty { std::ptr::null_mut() } else { data.cast() },
            device: CPU,
            ndim: shape.len() as i32,
            dtype: element.data_type,
            shape: dimensions,
            strides: dimensions.wrapping_add(shape.len()),
            byte_offset: 0,
        });
        Box::into_raw(Box::new(Self { managed, dimensions, rank: shape.len(), _owner: owner }))
    }

    /// Frees what [`leak`](Self::leak) leaked.
    ///
    /// # Safety
    /// `context` is what `leak` returned, and this is the only call for it.
    unsafe fn delete(context: *mut c_void, tensor: *const M) {
        // SAFETY: the caller's promise.
        let owned = unsafe { Box::from_raw(context.cast::<Self>()) };
        let dimensions = std::ptr::slice_from_raw_parts_mut(owned.dimensions, 2 * owned.rank);
        // SAFETY: leaked from a box of this length.
        drop(unsafe { Box::from_raw(dimensions) });
        LAST_DELETED.set(tensor as usize);
    }
}

/// The shape, and behind it the strides of a row-major array of that shape.
fn with_strides(shape: &[i64]) -> Box<[i64]> {
    let rank = shape.len();
    let mut dimensions = vec![1; 2 * rank].into_boxed_slice();
    dimensions[..rank].copy_from_slice(shape);
    for axis in (0..rank.saturating_sub(1)).rev() {
        dimensions[rank + axis] = dimensions[rank + axis + 1] * shape[axis + 1].max(1);
    }
    dimensions
}

/// Makes a tensor of the versioned form. Its deleter drops the owner, which must keep `data` alive.
///
/// `shape` must have passed [`checked_bytes`], and the memory hold that many bytes.
pub fn export_versioned<O: Send + 'static>(
    owner: O,
    data: *mut u8,
    shape: &[i64],
    element: &ElementType,
) -> *mut ManagedTensorVersioned {
    unsafe extern "C" fn delete<O>(tensor: *mut ManagedTensorVersioned) {
        // SAFETY: the consumer calls once, with the pointer that it was given.
        unsafe { Owned::<ManagedTensorVersioned, O>::delete((*tensor).context, tensor) };
    }
    let owned = Owned::leak(owner, data, shape, element, |tensor| ManagedTensorVersioned {
        version: VERSION,
        context: std::ptr::null_mut(),
        deleter: Some(delete::<O>),
        flags: 0,
        tensor,
    });
    // SAFETY: leaked just now, and nobody else knows it yet.
    unsafe { (*owned).managed.context = owned.cast() };
    // SAFETY: as above.
    unsafe { &raw mut (*owned).managed }
}

/// Deletes a tensor that no consumer took.
///
/// # Safety
/// The tensor is whole, and nobody uses it any more.
pub unsafe fn discard_versioned(tensor: *mut ManagedTensorVersioned) {
    // SAFETY: the caller's promise.
    if let Some(delete) = unsafe { (*tensor).deleter } {
        // SAFETY: the only call.
        unsafe { delete(tensor) };
    }
}

/// As [`discard_versioned`], for the form before version 1.
///
/// # Safety
/// The tensor is whole, and nobody uses it any more.
pub unsafe fn discard_legacy(tensor: *mut ManagedTensor) {
    // SAFETY: the caller's promise.
    if let Some(delete) = unsafe { (*tensor).deleter } {
        // SAFETY: the only call.
        unsafe { delete(tensor) };
    }
}

/// Makes a tensor of the form before version 1; otherwise as [`export_versioned`].
pub fn export_legacy<O: Send + 'static>(
    owner: O,
    data: *mut u8,
    shape: &[i64],
    element: &ElementType,
) -> *mut ManagedTensor {
    unsafe extern "C" fn delete<O>(tensor: *mut ManagedTensor) {
        // SAFETY: the consumer calls once, with the pointer that it was given.
        unsafe { Owned::<ManagedTensor, O>::delete((*tensor).context, tensor) };
    }
    let owned = Owned::leak(owner, data, shape, element, |tensor| ManagedTensor {
        tensor,
        context: std::ptr::null_mut(),
        deleter: Some(delete::<O>),
    });
    // SAFETY: leaked just now, and nobody else knows it yet.
    unsafe { (*owned).managed.context = owned.cast() };
    // SAFETY: as above.
    unsafe { &raw mut (*owned).managed }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn layouts_are_those_of_dlpack_h() {
        assert_eq!(
            (size_of::<Tensor>(), size_of::<ManagedTensor>(), size_of::<ManagedTensorVersioned>()),
            (48, 64, 80)
        );
        assert_eq!((offset_of!(Tensor, ndim), offset_of!(Tensor, dtype), offset_of!(Tensor, shape)), (16, 20, 24));
        assert_eq!((offset_of!(Tensor, strides), offset_of!(Tensor, byte_offset)), (32, 40));
        assert_eq!((offset_of!(ManagedTensor, context), offset_of!(ManagedTensor, deleter)), (48, 56));
        let offsets = (offset_of!(ManagedTensorVersioned, context), offset_of!(ManagedTensorVersioned, deleter));
        assert_eq!(offsets, (8, 16));
        let offsets = (offset_of!(ManagedTensorVersioned, flags), offset_of!(ManagedTensorVersioned, tensor));
        assert_eq!(offsets, (24, 32));
    }

    struct CountDrops(Arc<AtomicUsize>);

    impl Drop for CountDrops {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_deleter_drops_the_owner_once() {
        let drops = Arc::new(AtomicUsize::new(0));
        let element = ElementType::from_name("float32").expect("known");
        let mut byte = 0_u8;
        let versioned = export_versioned(CountDrops(Arc::clone(&drops)), &raw mut byte, &[2, 3, 4], element);
        let legacy = export_legacy(CountDrops(Arc::clone(&drops)), &raw mut byte, &[], element);
        // SAFETY: exported just now, and read only until deleted.
        let (tensor, flags) = unsafe { (&(*versioned).tensor, (*versioned).flags) };
        // SAFETY: the shape and the strides have three entries each.
        let strides = unsafe { std::slice::from_raw_parts(tensor.strides, 3) };
        assert_eq!((strides, flags), ([12, 4, 1].as_slice(), 0));
        assert_eq!(drops.load(Ordering::Relaxed), 0);
        // SAFETY: what a consumer does, once for each.
        unsafe { (*versioned).deleter.expect("set")(versioned) };
        // SAFETY: as above.
        unsafe { (*legacy).deleter.expect("set")(legacy) };
        assert_eq!(drops.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn sizes_are_checked_before_anything_is_made() {
        let float = ElementType::from_name("float32").expect("known");
        assert_eq!(checked_bytes(&[], float).expect("a scalar"), 4);
        assert_eq!(checked_bytes(&[3, 0, 5], float).expect("empty"), 0);
        assert!(checked_bytes(&[2, -1], float).expect_err("negative").to_string().contains("-1"));
        assert!(checked_bytes(&[1 << 61], float).is_err());
        assert!(checked_bytes(&[0, 1 << 40, 1 << 40], float).is_err(), "its strides overflow");
    }

    #[test]
    fn an_empty_tensor_has_strides_and_no_data() {
        let element = ElementType::from_name("bfloat16").expect("known");
        let mut byte = 0_u8;
        let exported = export_versioned((), &raw mut byte, &[4, 0, 3], element);
        // SAFETY: exported just now.
        let tensor = unsafe { &(*exported).tensor };
        // SAFETY: three strides.
        let strides = unsafe { std::slice::from_raw_parts(tensor.strides, 3) };
        assert!(tensor.data.is_null() && strides == [3, 3, 1]);
        // SAFETY: the only deletion.
        unsafe { (*exported).deleter.expect("set")(exported) };
    }

    #[test]
    fn names_are_unique_and_an_unknown_one_lists_them() {
        for element in ELEMENT_TYPES {
            assert_eq!(ElementType::from_name(element.name).expect("known"), element);
        }
        assert!(ElementType::from_name("float7").expect_err("unknown").to_string().contains("bfloat16"));
    }
}
