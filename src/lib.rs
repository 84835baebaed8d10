//! Page-locked host memory for offload loops: exact sizes, instant reuse, safe to share.
//!
//! Start at [`Pool`]. The map of the house, top to bottom:
//!
//! | module | owns |
//! |---|---|
//! | [`doctor`] | what stands in the way of a large pin here, and what helps |
//! | [`dlpack`] | the C structs of DLPack, and managed tensors that own a block |
//! | [`pool`], [`Block`] | reuse, budget, waiting, statistics |
//! | [`swap`] | pool blocks to local storage and back, without a copy |
//! | `arena` | free space in shared regions and in swap files; pure |
//! | [`pinned`] | memory and registry together: teardown order, leak rule |
//! | [`registry`] | the ranges that are pinned; pure |
//! | [`driver`] | CUDA and Level Zero: devices and registrations |
//! | [`region`] | one mapping: placed, prefaulted, locked |
//! | `limits` | how much may be locked |
//! | `os` | libc |
//! | [`Error`] | why something failed |

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("pinpool is for 64-bit Linux");

mod arena;
mod block;
pub mod dlpack;
pub mod doctor;
pub mod driver;
mod error;
mod fork;
mod limits;
mod os;
pub mod pinned;
pub mod pool;
#[cfg(feature = "python")]
mod python;
pub mod region;
pub mod registry;
pub mod swap;

pub use block::Block;
pub use error::{Error, Overwritten, Result};
pub use os::memory_calls;
pub use pool::{Pool, PoolOptions, Stats};
pub use region::{Pages, RegionOptions};

/// Makes what the process keeps for good. A fork in the middle of making one of these would leave it half made in the
/// child, so it is better done early.
pub fn make_statics() {
    registry::shared::global();
    pool::make_statics();
    pinned::make_statics();
    driver::make_statics();
}
