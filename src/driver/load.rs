//! Loading a driver's library: what is missing becomes a reason in words.
#![allow(unsafe_code)] // runs the initializers of somebody else's library

use std::ffi::CStr;

use libloading::Library;

use crate::error::{Error, Result};

/// Loads a library by its soname or path.
pub(super) fn library(driver: &'static str, path: &str) -> Result<Library> {
    // SAFETY: a driver library's initializers are made to be run by whoever loads it.
    unsafe { Library::new(path) }.map_err(|error| {
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        absent(driver, &format!("cannot load {path}: {reason}"))
    })
}

/// Looks a function up under the first of its names that there is.
///
/// # Safety
/// `T` is the function's signature, and the pointer is not used after the library is gone.
pub(super) unsafe fn symbol<T: Copy>(driver: &'static str, library: &Library, names: &[&CStr]) -> Result<T> {
    // SAFETY: the caller's promise.
    let found = names.iter().find_map(|name| unsafe { optional_symbol(library, name) });
    found.ok_or_else(|| {
        let name = names[0].to_string_lossy();
        unavailable(driver, &format!("its library has no {name}: the driver is too old, or the library is no driver"))
    })
}

/// Looks up a function that the driver may lack.
///
/// # Safety
/// As for [`symbol`].
pub(super) unsafe fn optional_symbol<T: Copy>(library: &Library, name: &CStr) -> Option<T> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<T>(name) }.ok().map(|symbol| *symbol)
}

/// The driver is there, and cannot be used.
pub(super) fn unavailable(driver: &'static str, reason: &str) -> Error {
    Error::DriverUnavailable { driver, reason: reason.to_owned(), absent: false }
}

/// There is no such driver, or no device.
pub(super) fn absent(driver: &'static str, reason: &str) -> Error {
    Error::DriverUnavailable { driver, reason: reason.to_owned(), absent: true }
}
