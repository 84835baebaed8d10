//! Regions: what they are made of, that they are really locked, and that nothing is left of those that were not made.
#![allow(unsafe_code)] // a region gives out addresses only

mod common;

use std::ops::{ControlFlow, Range};

use common::maps::{has_flag, is_locked, is_mapped, locked_bytes, mapped_bytes, resident_bytes, resident_pages};
use common::process::alone;
use common::seccomp::{Rule, refuse};
use common::{MIB, go_on, page, region_of};
use pinpool::region::Region;
use pinpool::{Error, Pages, RegionOptions};

const HUGE_PAGE: usize = 2 * MIB;
/// Regions are prefaulted in steps; several make five, the last a short one.
const STEP: usize = 32 * MIB;
const SEVERAL_STEPS: usize = 4 * STEP + 2 * MIB;

fn range(region: &Region) -> Range<usize> {
    region.address()..region.address() + region.len()
}

fn make(len: usize, pages: Pages) -> Region {
    Region::map(len, &region_of(pages), &mut go_on).expect("a region")
}

fn bytes(region: &Region) -> &[u8] {
    // SAFETY: the region is mapped while it is borrowed, and nobody writes to it.
    unsafe { std::slice::from_raw_parts(region.address() as *const u8, region.len()) }
}

/// Whether this kernel gives transparent huge pages to those who ask.
fn has_transparent_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    !setting.is_empty() && !setting.contains("[never]")
}

/// Lets locks succeed without locking, so that a test of large regions needs no memlock limit.
fn pretend_to_lock() {
    refuse(&[Rule::mlock(0)]);
}

#[test]
fn base_pages_are_rounded_locked_and_zeroed() {
    alone("base_pages_are_rounded_locked_and_zeroed", || {
        for (len, pages) in [(1, 1), (page(), 1), (page() + 1, 2), (10 * page() - 1, 10)] {
            let region = make(len, Pages::Base);
            assert_eq!((region.len(), region.address() % page()), (pages * page(), 0));
            assert_eq!(region.pages(), Pages::Base);
            assert!(is_locked(&range(&region)));
            assert_eq!(locked_bytes(), pages * page());
            assert!(bytes(&region).iter().all(|&byte| byte == 0));
            assert!(!has_transparent_pages() || has_flag(&range(&region), "nh"), "the kernel is told: base pages");
        }
    });
}

#[test]
fn transparent_huge_pages_start_on_their_boundary() {
    alone("transparent_huge_pages_start_on_their_boundary", || {
        for len in [HUGE_PAGE, HUGE_PAGE + 1, 2 * HUGE_PAGE - page(), 5 * MIB] {
            let made = Region::map(len, &region_of(Pages::Transparent), &mut go_on);
            if !has_transparent_pages() {
                let text = made.expect_err("the kernel has none").to_string();
                assert!(text.contains("transparent_hugepage/enabled") && text.contains("madvise"), "{text}");
                continue;
            }
            let region = match made {
                Ok(region) => region,
                Err(refusal) => {
                    let text = refusal.to_string();
                    assert!(text.contains("fragmented") && text.contains("\"auto\""), "{text}");
                    assert_eq!(locked_bytes(), 0);
                    continue;
                }
            };
            assert_eq!((region.len(), region.address() % HUGE_PAGE), (len.next_multiple_of(HUGE_PAGE), 0));
            assert_eq!(region.pages(), Pages::Transparent);
            assert!(is_locked(&range(&region)) && has_flag(&range(&region), "hg"));
            assert_eq!(locked_bytes(), region.len(), "the slack for the alignment is gone");
            assert!(bytes(&region).iter().all(|&byte| byte == 0));
        }
    });
}

#[test]
fn auto_says_what_it_chose_and_takes_base_pages_for_little() {
    alone("auto_says_what_it_chose_and_takes_base_pages_for_little", || {
        assert_eq!(make(HUGE_PAGE - page(), Pages::Auto).pages(), Pages::Base);
        let region = make(2 * HUGE_PAGE, Pages::Auto);
        let chosen = if region.pages() == Pages::Transparent { "hg" } else { "nh" };
        assert_eq!(region.address() % HUGE_PAGE, 0);
        assert!(matches!(region.pages(), Pages::Transparent | Pages::Base));
        assert!(has_flag(&range(&region), chosen) || !has_transparent_pages());
        assert!(is_locked(&range(&region)));
    });
}

#[test]
fn dropped_and_unmapped_regions_leave_nothing() {
    alone("dropped_and_unmapped_regions_leave_nothing", || {
        for pages in [Pages::Base, Pages::Auto] {
            let before = mapped_bytes();
            let holds = |bytes| locked_bytes() == bytes && mapped_bytes().abs_diff(before + bytes) < MIB / 2;
            let (dropped, unmapped) = (make(3 * MIB, pages), make(2 * MIB, pages));
            assert!(holds(5 * MIB));
            drop(dropped);
            assert!(holds(2 * MIB));
            unmapped.unmap().expect("the kernel takes it back");
            assert!(holds(0));
        }
    });
}

#[test]
fn an_unlocked_region_is_mapped_and_not_touched() {
    alone("an_unlocked_region_is_mapped_and_not_touched", || {
        let options = RegionOptions { lock: false, ..RegionOptions::default() };
        let region = Region::map(1 << 40, &options, &mut go_on).expect("address space");
        assert!(is_mapped(&range(&region)));
        assert_eq!(resident_pages(&(region.address()..region.address() + SEVERAL_STEPS)), 0);
        assert_eq!(locked_bytes(), 0);
    });
}

#[test]
fn lengths_that_make_no_sense_are_refused() {
    let most = isize::MAX as usize;
    for pages in [Pages::Auto, Pages::Base, Pages::Huge2M, Pages::Huge1G] {
        for len in [0, most + 1, usize::MAX - page(), usize::MAX] {
            let refusal = Region::map(len, &region_of(pages), &mut go_on).expect_err("no such length");
            assert!(matches!(refusal, Error::Invalid { parameter: "nbytes", .. }), "{pages:?} {len}: {refusal}");
        }
        // The largest that makes sense is more than any machine has: the kernel says so.
        let refusal = Region::map(most - (1 << 30), &region_of(pages), &mut go_on).expect_err("too much");
        assert!(matches!(refusal, Error::Os { call: "mmap", .. } | Error::Unsupported { .. }), "{refusal}");
    }
}

#[test]
fn a_node_that_is_not_there_is_refused_by_name() {
    alone("a_node_that_is_not_there_is_refused_by_name", || {
        for node in [1023, 4097, 100_000] {
            let options = RegionOptions { numa: Some(node), ..region_of(Pages::Base) };
            let text = Region::map(MIB, &options, &mut go_on).expect_err("no such node").to_string();
            assert!(text.contains(&format!("NUMA node {node} ")) && text.contains("nodes with memory: 0"), "{text}");
        }
        let before = mapped_bytes();
        for _ in 0..20 {
            let options = RegionOptions { numa: Some(1023), ..region_of(Pages::Auto) };
            assert!(Region::map(4 * MIB, &options, &mut go_on).is_err());
        }
        assert!(mapped_bytes() < before + 4 * MIB);
    });
}

#[test]
fn a_node_that_is_there_is_taken() {
    alone("a_node_that_is_there_is_taken", || {
        let options = RegionOptions { numa: Some(0), ..region_of(Pages::Base) };
        match Region::map(MIB, &options, &mut go_on) {
            Ok(region) => {
                let line = format!("{:x} bind:0 ", region.address());
                let maps = std::fs::read_to_string("/proc/self/numa_maps").expect("procfs of a kernel with nodes");
                assert!(maps.lines().any(|one| one.starts_with(&line)), "{line} is missing in:\n{maps}");
                assert!(is_locked(&range(&region)));
            }
            // No nodes in this kernel, or a container without CAP_SYS_NICE: then nobody can bind.
            Err(refusal) => {
                let nodes = std::path::Path::new("/proc/self/numa_maps").exists();
                let text = refusal.to_string();
                assert!(!nodes || text.contains("Operation not permitted"), "{text}");
            }
        }
    });
}

#[test]
fn progress_never_goes_back_and_ends_at_the_total() {
    alone("progress_never_goes_back_and_ends_at_the_total", || {
        pretend_to_lock();
        for (pages, threads) in [(Pages::Base, 1), (Pages::Auto, 1), (Pages::Auto, 2), (Pages::Base, 64)] {
            let options = RegionOptions { pages, threads: Some(threads), ..RegionOptions::default() };
            let mut reports = Vec::new();
            let region = Region::map(SEVERAL_STEPS, &options, &mut |done, total| {
                reports.push((done, total));
                ControlFlow::Continue(())
            });
            let region = region.expect("a region");
            assert!(reports.is_sorted() && reports.iter().all(|report| report.1 == region.len()), "{reports:?}");
            // Helpers may be quicker than the thread that reports.
            assert!(reports[0].0 > 0 && (threads > 1 || reports.len() > 4), "{reports:?}");
            assert_eq!(reports.last(), Some(&(region.len(), region.len())));
            assert_eq!(resident_pages(&range(&region)) * page(), region.len(), "{threads} threads touch all of it");
        }
    });
}

#[test]
fn a_break_at_any_step_undoes_everything() {
    alone("a_break_at_any_step_undoes_everything", || {
        pretend_to_lock();
        for threads in [1, 3] {
            let options = RegionOptions { threads: Some(threads), ..RegionOptions::default() };
            let attempt = |last_step: usize| {
                let mut steps = 0;
                let region = Region::map(SEVERAL_STEPS, &options, &mut |_, _| {
                    steps += 1;
                    if steps > last_step { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                });
                region.map(|_| steps)
            };
            let steps = attempt(usize::MAX).expect("nothing stops it");
            let before = resident_bytes();
            for last_step in 0..steps.min(4) {
                // With helpers the number of reports differs from run to run, and the last may come sooner.
                if let Err(refusal) = attempt(last_step) {
                    assert!(matches!(refusal, Error::Interrupted), "{refusal}");
                } else {
                    assert!(threads > 1 && last_step > 0, "step {last_step} was the last");
                }
                assert!(resident_bytes() < before + STEP / 2, "step {last_step}");
            }
        }
    });
}

#[test]
fn a_panic_in_the_progress_callback_undoes_everything() {
    alone("a_panic_in_the_progress_callback_undoes_everything", || {
        let before = mapped_bytes();
        let result = std::panic::catch_unwind(|| {
            Region::map(4 * MIB, &region_of(Pages::Auto), &mut |_, _| std::panic::resume_unwind(Box::new(())))
                .map(|_| ())
        });
        assert!(result.is_err());
        assert_eq!(locked_bytes(), 0);
        assert!(mapped_bytes() < before + 4 * MIB);
    });
}
