//! Four threads do everything at once, a hundred thousand times, and in the end every counter is zero.

mod common;

use std::sync::{Mutex, PoisonError};
use std::thread;

use common::maps::locked_bytes;
use common::process::{alone, memlock_limit};
use common::{KIB, MIB, Random, is_pinned, page, pinned_ranges, pool, unlocked_pool};
use pinpool::pool::unpin;
use pinpool::{Block, Error, Pool};

const THREADS: usize = 4;
const OPERATIONS: usize = 25_000;
const MOST_HELD: usize = 12;

/// A block with marks of its own on every page. Two blocks that overlap cannot both find theirs again.
struct Marked {
    block: Block,
    mark: u64,
    is_unpinned: bool,
}

impl Marked {
    fn new(mut block: Block, mark: u64) -> Self {
        for (number, bytes) in block.as_mut_slice().chunks_mut(page()).enumerate() {
            let word = (mark + number as u64).to_le_bytes();
            let len = bytes.len().min(word.len());
            bytes[..len].copy_from_slice(&word[..len]);
            let end = bytes.len();
            bytes[end - len..].copy_from_slice(&word[..len]);
        }
        Self { block, mark, is_unpinned: false }
    }

    fn check(&self) {
        for (number, bytes) in self.block.as_slice().chunks(page()).enumerate() {
            let word = (self.mark + number as u64).to_le_bytes();
            let len = bytes.len().min(word.len());
            assert!(bytes.len() < 2 * len || bytes[..len] == word[..len], "page {number} was written by somebody else");
            assert_eq!(bytes[bytes.len() - len..], word[..len], "page {number} was written by somebody else");
        }
        assert!(self.block.is_empty() || self.is_unpinned != is_pinned(&self.block));
    }
}

/// Sizes of all magnitudes up to 4 MiB, the large ones seldom.
fn size(random: &mut Random) -> usize {
    match random.below(100) {
        0..50 => random.below(16 * KIB + 1),
        50..90 => page() * (1 + random.below(32)),
        90..98 => random.below(MIB),
        _ => random.below(4 * MIB + 1),
    }
}

/// Blocks on their way to a thread.
type Mailbox = Mutex<Vec<Marked>>;

fn open(mailbox: &Mailbox) -> std::sync::MutexGuard<'_, Vec<Marked>> {
    mailbox.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does one thread's share, and answers how many blocks it was given.
fn work(pool: &Pool, seed: usize, mailboxes: &[Mailbox; THREADS]) -> usize {
    let (inbox, outbox) = (&mailboxes[seed % THREADS], &mailboxes[(seed + 1) % THREADS]);
    let (mut random, mut held, mut taken) = (Random::new(seed as u64), Vec::<Marked>::new(), 0);
    for operation in 0..OPERATIONS {
        match random.below(100) {
            0..50 if held.len() < MOST_HELD => {
                let len = size(&mut random);
                match pool.take(len) {
                    Ok(block) => {
                        assert!(block.len() == len && (len == 0 || is_pinned(&block)));
                        held.push(Marked::new(block, ((seed * OPERATIONS + operation) << 16) as u64));
                        taken += usize::from(len > 0);
                    }
                    Err(Error::OutOfPinnedMemory { .. } | Error::MemlockLimit { .. }) => held.truncate(MOST_HELD / 2),
                    Err(error) => panic!("{error}"),
                }
            }
            50..60 if !held.is_empty() => {
                let passed = held.swap_remove(random.below(held.len()));
                open(outbox).push(passed);
            }
            60..70 => held.append(&mut open(inbox)),
            70 if operation % 10 == 0 => {
                let _ = pool.trim().expect("the kernel takes it");
            }
            71 if !held.is_empty() => {
                let which = random.below(held.len());
                let marked = &mut held[which];
                let was_pinned = unpin(marked.block.as_ptr() as usize).expect("the kernel takes it");
                assert!(was_pinned != marked.is_unpinned || marked.block.is_empty());
                marked.is_unpinned |= was_pinned;
            }
            72 => check_books(pool),
            _ if !held.is_empty() => held.swap_remove(random.below(held.len())).check(),
            _ => {}
        }
    }
    held.iter().for_each(Marked::check);
    taken
}

fn check_books(pool: &Pool) {
    let now = pool.stats().expect("the pool is ours");
    assert!(now.requested_bytes <= now.allocated_bytes && now.allocated_bytes <= now.reserved_bytes, "{now:?}");
    assert!(now.reserved_bytes <= now.max_bytes && now.peak_reserved_bytes <= now.max_bytes, "{now:?}");
    assert_eq!(now.leaked_bytes, 0);
}

#[test]
fn a_hundred_thousand_operations_on_four_threads_leave_every_counter_at_zero() {
    alone("a_hundred_thousand_operations_on_four_threads_leave_every_counter_at_zero", || {
        let pool = pool(memlock_limit().map_or(64 * MIB, |limit| limit.min(64 * MIB)));
        let mailboxes = [(); THREADS].map(|()| Mailbox::default());
        let taken: usize = thread::scope(|scope| {
            let threads = [1, 2, 3, 4].map(|seed| {
                scope.spawn({
                    let (pool, mailboxes) = (&pool, &mailboxes);
                    move || work(pool, seed, mailboxes)
                })
            });
            threads.into_iter().map(|thread| thread.join().expect("no check fails")).sum()
        });
        assert!(taken > OPERATIONS, "most requests are served: {taken}");
        mailboxes
            .iter()
            .flat_map(|mailbox| open(mailbox).drain(..).collect::<Vec<_>>())
            .for_each(|passed| passed.check());
        let now = pool.stats().expect("the pool is ours");
        assert_eq!((now.requested_bytes, now.allocated_bytes, now.blocks), (0, 0, 0));
        assert_eq!(now.cached_bytes + now.pending_bytes, now.reserved_bytes);
        assert!(now.hits > 0 && now.misses > 0);
        assert_eq!(now.hits + now.misses, taken, "each block is one or the other");
        pool.close().expect("the kernel takes it");
        let now = pool.stats().expect("the pool is ours");
        assert_eq!((now.reserved_bytes, now.cached_bytes, now.pending_bytes, now.regions), (0, 0, 0, 0));
        assert_eq!((now.locked_bytes, now.leaked_bytes), (0, 0));
        assert_eq!((locked_bytes(), pinned_ranges(), pinpool::pinned::leaked_bytes()), (0, 0, 0));
    });
}

/// Two threads that never hold more than the budget between them are never refused, whatever they gave back before.
#[test]
fn two_threads_within_the_budget_are_never_refused() {
    let pool = unlocked_pool(4 * MIB);
    let refusals: usize = thread::scope(|scope| {
        let laps = |seed| {
            let (mut random, pool) = (Random::new(seed), &pool);
            // Sizes that differ by more than the slack, so that idle blocks have to make way all the time.
            let take = move |_| usize::from(pool.take(2 * MIB - page() * random.below(200)).is_err());
            (0..30_000).map(take).sum::<usize>()
        };
        let threads = [1, 2].map(|seed| scope.spawn(move || laps(seed)));
        threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(refusals, 0, "either thread holds half of the budget at most");
}
