//! Every system call on the way to a region is refused in turn: the caller is told which, and nothing is left.

mod common;

use common::maps::{is_locked, locked_bytes, mapped_bytes, resident_bytes, resident_pages};
use common::process::alone;
use common::seccomp::{Rule, refused};
use common::{MIB, address, go_on, is_pinned, os_answer, page, pin, pinned_ranges, pool, pool_of, region_of};
use pinpool::region::Region;
use pinpool::{Error, Pages, RegionOptions};

/// So often is each failure provoked: should it leave a single page behind, that adds up.
const TIMES: usize = 500;
/// Less than that many pages, and more than a test's own bookkeeping takes.
const NOISE: usize = MIB;

/// The three ways to a region, each with its own things to undo.
type Door = (&'static str, fn(usize, &RegionOptions) -> Option<Error>);

const DOORS: [Door; 3] = [
    ("region", |len, options| Region::map(len, options, &mut go_on).err()),
    ("pinned", |len, options| pin(len, options).err()),
    ("pool", |len, options| {
        let pool = pool_of(len, options.clone());
        let before = pool.stats().expect("ours");
        let refusal = pool.take(len).err();
        let after = pool.stats().expect("ours");
        assert_eq!((before.reserved_bytes, before.locked_bytes), (after.reserved_bytes, after.locked_bytes));
        assert_eq!((after.leaked_bytes, after.regions, after.blocks), (0, 0, 0));
        refusal
    }),
];

/// Refuses a call, asks for a region at each door, and checks that all is as it was. Answers the refusals.
fn refusals(rule: &Rule, len: usize, options: &RegionOptions) -> Vec<Error> {
    let attempt = |(name, door): &Door| {
        let fail = || door(len, options).unwrap_or_else(|| panic!("{name}: {rule:?} went unnoticed"));
        let refusal = fail(); // once before: what malloc takes for it is taken now
        let (mapped, locked, ranges) = (mapped_bytes(), locked_bytes(), pinned_ranges());
        for _ in 0..TIMES {
            fail();
        }
        assert_eq!((locked_bytes(), pinned_ranges()), (locked, ranges), "{name}: {rule:?}");
        assert!(mapped_bytes() < mapped + NOISE, "{name}: {rule:?} left {} bytes", mapped_bytes() - mapped);
        refusal
    };
    refused(std::slice::from_ref(rule), || DOORS.iter().map(attempt).collect())
}

/// As [`refusals`], each of which must name the call and hand on the kernel's number.
fn expect_answer(rule: &Rule, len: usize, options: &RegionOptions, answer: (&str, i32)) {
    for refusal in refusals(rule, len, options) {
        assert_eq!(os_answer(&refusal), answer, "{refusal}");
        let text = refusal.to_string();
        assert!(matches!(refusal, Error::Os { bytes, .. } if bytes >= len) && text.contains(answer.0), "{text}");
    }
}

fn has_transparent_pages() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    !setting.is_empty() && !setting.contains("[never]")
}

#[test]
fn a_refused_mmap_leaves_nothing() {
    alone("a_refused_mmap_leaves_nothing", || {
        for errno in [libc::ENOMEM, libc::EAGAIN, libc::EPERM] {
            expect_answer(&Rule::mmap(MIB, errno), MIB, &region_of(Pages::Base), ("mmap", errno));
        }
        let len = 4 * MIB;
        let with_slack = len + 2 * MIB - page();
        let rule = Rule::mmap(with_slack, libc::ENOMEM);
        expect_answer(&rule, len, &region_of(Pages::Auto), ("mmap", libc::ENOMEM));
    });
}

#[test]
fn a_refused_mbind_leaves_nothing() {
    alone("a_refused_mbind_leaves_nothing", || {
        let options = RegionOptions { numa: Some(0), ..region_of(Pages::Auto) };
        for refusal in refusals(&Rule::mbind(libc::EPERM), 4 * MIB, &options) {
            let text = refusal.to_string();
            assert!(matches!(refusal, Error::Unsupported { .. }), "{refusal:?}");
            assert!(text.contains("NUMA node 0") && text.contains("mbind answered: Operation not permitted"), "{text}");
        }
    });
}

#[test]
fn refused_advice_leaves_nothing() {
    alone("refused_advice_leaves_nothing", || {
        if !has_transparent_pages() {
            // The kernel is not asked then, so nothing can refuse.
            let made = refused(&[Rule::madvise(libc::MADV_NOHUGEPAGE, libc::EPERM)], || {
                Region::map(MIB, &region_of(Pages::Base), &mut go_on).map(|_| ())
            });
            return made.expect("nobody asks");
        }
        let huge = Rule::madvise(libc::MADV_HUGEPAGE, libc::ENOMEM);
        expect_answer(&huge, 2 * MIB, &region_of(Pages::Transparent), ("madvise(MADV_HUGEPAGE)", libc::ENOMEM));
        let base = Rule::madvise(libc::MADV_NOHUGEPAGE, libc::EPERM);
        expect_answer(&base, MIB, &region_of(Pages::Base), ("madvise(MADV_NOHUGEPAGE)", libc::EPERM));
    });
}

#[test]
fn a_refused_prefault_leaves_nothing() {
    alone("a_refused_prefault_leaves_nothing", || {
        for (pages, errno) in [(Pages::Base, libc::ENOMEM), (Pages::Auto, libc::EFAULT), (Pages::Base, libc::EHWPOISON)]
        {
            let rule = Rule::madvise(libc::MADV_POPULATE_WRITE, errno);
            expect_answer(&rule, 2 * MIB, &region_of(pages), ("madvise(MADV_POPULATE_WRITE)", errno));
        }
    });
}

#[test]
fn one_refused_step_of_many_threads_leaves_nothing() {
    alone("one_refused_step_of_many_threads_leaves_nothing", || {
        // Three steps of 32 MiB and a short one, which alone is refused.
        let (len, last) = (100 * MIB, 4 * MIB);
        for threads in [1, 2, 8] {
            let rule = Rule::madvise(libc::MADV_POPULATE_WRITE, libc::ENOMEM).with(1, last);
            let options = RegionOptions { threads: Some(threads), ..region_of(Pages::Base) };
            let before = resident_bytes();
            let refusal = refused(&[rule], || Region::map(len, &options, &mut go_on)).expect_err("the last step");
            assert_eq!(os_answer(&refusal), ("madvise(MADV_POPULATE_WRITE)", libc::ENOMEM));
            assert!(resident_bytes() < before + len / 4, "what the other steps touched is gone");
        }
    });
}

#[test]
fn a_kernel_that_cannot_prefault_has_the_pages_touched() {
    alone("a_kernel_that_cannot_prefault_has_the_pages_touched", || {
        for pages in [Pages::Base, Pages::Auto] {
            let rules = [Rule::madvise(libc::MADV_POPULATE_WRITE, libc::EINVAL)];
            let region = refused(&rules, || Region::map(3 * MIB, &region_of(pages), &mut go_on)).expect("a region");
            let range = region.address()..region.address() + region.len();
            assert!(is_locked(&range), "{pages:?}");
            // Locking touches, too: without it, the touching shows.
            let rules = [Rule::madvise(libc::MADV_POPULATE_WRITE, libc::EINVAL), Rule::mlock(0)];
            let region = refused(&rules, || Region::map(3 * MIB, &region_of(pages), &mut go_on)).expect("a region");
            let range = region.address()..region.address() + region.len();
            assert_eq!(resident_pages(&range) * page(), 3 * MIB, "{pages:?}");
        }
    });
}

#[test]
fn a_refused_lock_leaves_nothing() {
    alone("a_refused_lock_leaves_nothing", || {
        for errno in [libc::EAGAIN, libc::ENOMEM, libc::EPERM] {
            expect_answer(&Rule::mlock(errno), MIB, &region_of(Pages::Base), ("mlock", errno));
        }
        expect_answer(&Rule::mlock(libc::EAGAIN), 2 * MIB, &region_of(Pages::Auto), ("mlock", libc::EAGAIN));
    });
}

#[test]
fn a_refused_region_takes_nothing_from_the_blocks_that_are_there() {
    alone("a_refused_region_takes_nothing_from_the_blocks_that_are_there", || {
        let pool = pool(8 * MIB);
        let mut block = pool.take(MIB).expect("room");
        block.as_mut_slice().fill(42);
        let before = pool.stats().expect("ours");
        for rule in [Rule::mmap(2 * MIB, libc::ENOMEM), Rule::mlock(libc::EAGAIN)] {
            let refusal = refused(&[rule], || pool.take(2 * MIB).map(drop)).expect_err("refused");
            assert!(matches!(refusal, Error::Os { .. }), "{refusal:?}");
            let refusal = refused(&[Rule::mlock(libc::EAGAIN)], || pool.reserve(3 * MIB, &mut go_on));
            assert_eq!(os_answer(&refusal.expect_err("refused")), ("mlock", libc::EAGAIN));
        }
        let after = pool.stats().expect("ours");
        assert_eq!((after.reserved_bytes, after.locked_bytes), (before.reserved_bytes, before.locked_bytes));
        assert_eq!((after.allocated_bytes, after.blocks, after.regions), (MIB, 1, 1));
        assert!(is_pinned(&block) && is_locked(&(address(&block)..address(&block) + MIB)));
        assert!(block.as_slice().iter().all(|&byte| byte == 42));
        let next = pool.take(7 * MIB).expect("the refused requests hold nothing of the budget");
        assert!(is_pinned(&next));
    });
}

#[test]
fn a_panic_in_the_callback_gives_the_budget_back() {
    alone("a_panic_in_the_callback_gives_the_budget_back", || {
        let pool = pool(2 * MIB);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.reserve(2 * MIB, &mut |_, _| std::panic::resume_unwind(Box::new(())))
        }));
        assert!(result.is_err());
        assert_eq!((locked_bytes(), pool.stats().expect("ours").reserved_bytes), (0, 0));
        pool.take(2 * MIB).expect("nothing of the budget is used");
    });
}
