//! Placeholder while the driver is being written.
use super::Vendor;
use super::load::absent;
pub(super) static VENDOR: Vendor = Vendor {
    kind: "xpu",
    title: "Level Zero",
    library: "libze_loader.so.1",
    find: |_| Err(absent("Level Zero", "not yet")),
    open: |_, _| Err(absent("Level Zero", "not yet")),
    current: |_| Ok(None),
};
