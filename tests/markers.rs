//! Every public type may be sent to and shared with other threads. That it compiles is the test.

use pinpool::pinned::{Adopted, Pinned};
use pinpool::region::Region;
use pinpool::registry::shared::SharedRegistry;
use pinpool::registry::{Adoption, Key, Registry};
use pinpool::{Block, Error, Pages, Pool, PoolOptions, RegionOptions, Stats, dlpack};

fn for_all_threads<T: Send + Sync + 'static>() {}

#[test]
fn public_types_are_for_all_threads() {
    for_all_threads::<Pool>();
    for_all_threads::<Block>();
    for_all_threads::<Stats>();
    for_all_threads::<PoolOptions>();
    for_all_threads::<Region>();
    for_all_threads::<RegionOptions>();
    for_all_threads::<Pages>();
    for_all_threads::<Pinned>();
    for_all_threads::<Adopted>();
    for_all_threads::<Registry<()>>();
    for_all_threads::<SharedRegistry>();
    for_all_threads::<Key>();
    for_all_threads::<Adoption>();
    for_all_threads::<Error>();
    for_all_threads::<dlpack::Device>();
    for_all_threads::<dlpack::DataType>();
    for_all_threads::<dlpack::ElementType>();
}

#[test]
fn an_error_can_be_boxed_and_handed_on() {
    let boxed: Box<dyn std::error::Error + Send + Sync> = Box::new(Error::Closed);
    assert!(boxed.downcast::<Error>().is_ok_and(|error| matches!(*error, Error::Closed)));
}
