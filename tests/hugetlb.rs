//! Pages of the kernel's own pool of huge pages: the machine's, so one test tries what it has and what it has not.
#![allow(clippy::print_stderr, reason = "says what could not be tried")]

mod common;

use std::fs;
use std::path::PathBuf;

use common::maps::{has_flag, resident_pages};
use common::process::alone;
use common::{KIB, MIB, address, go_on, is_pinned, page, pool_of, region_of};
use pinpool::region::Region;
use pinpool::{Error, Pages};

fn pool_file(pages: Pages, name: &str) -> PathBuf {
    format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", pages.granularity() / KIB).into()
}

fn pool_size(pages: Pages, name: &str) -> usize {
    let text = fs::read_to_string(pool_file(pages, name)).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Adds pages to the kernel's pool, and takes them out again when dropped.
struct MorePages {
    before: usize,
}

impl MorePages {
    /// `None`, with the reason, where this process may not or the machine has no memory in one piece.
    fn add(count: usize) -> Result<Self, String> {
        let (file, before) = (pool_file(Pages::Huge2M, "nr_hugepages"), pool_size(Pages::Huge2M, "nr_hugepages"));
        fs::write(&file, (before + count).to_string()).map_err(|error| format!("{}: {error}", file.display()))?;
        let more = Self { before };
        if pool_size(Pages::Huge2M, "free_hugepages") >= count {
            return Ok(more);
        }
        Err(format!("{}: the kernel found no {count} huge pages", file.display()))
    }
}

impl Drop for MorePages {
    fn drop(&mut self) {
        let _ = fs::write(pool_file(Pages::Huge2M, "nr_hugepages"), self.before.to_string());
    }
}

#[test]
fn more_huge_pages_than_the_kernel_has_are_refused_with_the_remedy() {
    alone("more_huge_pages_than_the_kernel_has_are_refused_with_the_remedy", || {
        for (pages, name) in [(Pages::Huge2M, "2m"), (Pages::Huge1G, "1g")] {
            let there = pool_size(pages, "free_hugepages") + pool_size(pages, "nr_overcommit_hugepages");
            let wanted = there + 8;
            let refusal =
                Region::map(wanted * pages.granularity(), &region_of(pages), &mut go_on).expect_err("too many");
            assert!(matches!(refusal, Error::Unsupported { .. }), "{refusal:?}");
            let text = refusal.to_string();
            let remedy = format!("`echo {wanted} > {}`", pool_file(pages, "nr_hugepages").display());
            assert!(text.contains(&remedy) && text.contains(&format!("pages=\"{name}\"")), "{text}");

            let pool = pool_of(usize::MAX, region_of(pages));
            let refusal = pool.take((there + 8) * pages.granularity()).expect_err("too many");
            assert!(matches!(refusal, Error::Unsupported { .. }), "{refusal:?}");
            assert_eq!(pool.stats().expect("ours").reserved_bytes, 0);
        }
    });
}

#[test]
fn huge_pages_of_the_kernels_pool_are_used_to_the_last() {
    alone("huge_pages_of_the_kernels_pool_are_used_to_the_last", || {
        let more = match MorePages::add(4) {
            Ok(more) => more,
            Err(reason) => return eprintln!("huge pages of the kernel's pool are not tried: {reason}"),
        };
        let free = pool_size(Pages::Huge2M, "free_hugepages");
        let region = Region::map(3 * MIB, &region_of(Pages::Huge2M), &mut go_on).expect("two huge pages");
        let range = region.address()..region.address() + region.len();
        assert_eq!((region.len(), region.pages(), region.address() % (2 * MIB)), (4 * MIB, Pages::Huge2M, 0));
        assert!(has_flag(&range, "ht") && resident_pages(&range) * page() == 4 * MIB);
        assert_eq!(pool_size(Pages::Huge2M, "free_hugepages"), free - 2);
        drop(region);

        let pool = pool_of(8 * MIB, region_of(Pages::Huge2M));
        let blocks = [pool.take(6 * MIB).expect("three pages"), pool.take(page()).expect("a part of the fourth")];
        assert!(blocks.iter().all(is_pinned));
        assert_eq!(address(&blocks[0]) % (2 * MIB), 0);
        let stats = pool.stats().expect("ours");
        assert_eq!((stats.reserved_bytes, stats.regions, stats.pages), (8 * MIB, 2, Pages::Huge2M));
        drop(blocks);
        assert_eq!(pool.trim().expect("all idle"), 8 * MIB);
        assert_eq!(pool_size(Pages::Huge2M, "free_hugepages"), free);
        drop(more);
    });
}
