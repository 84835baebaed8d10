//! What the store knows of an entry, and how that is written down.

use twox_hash::XxHash3_64;

use super::space::{Claim, Extent, UNIT};

/// A value, as it lies in the data file.
#[derive(Debug)]
pub(super) struct Entry {
    /// What the caller wants to know about it when it comes back.
    pub(super) label: Box<str>,
    /// Bytes of it.
    pub(super) len: usize,
    /// It is written, read and checked in pieces of so many bytes.
    pub(super) block: usize,
    pub(super) checksum: u64,
    pub(super) claim: Claim,
}

/// A piece's contribution to the checksum.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The checksum of an entry: XXH3 of those of its pieces, so that they can be taken in any order.
pub(super) fn checksum(digests: impl IntoIterator<Item = u64>) -> u64 {
    let bytes: Vec<u8> = digests.into_iter().flat_map(u64::to_le_bytes).collect();
    digest(&bytes)
}

/// A change of the store, as the index keeps it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Record {
    Put { key: Box<str>, label: Box<str>, len: usize, block: usize, checksum: u64, extents: Vec<Extent> },
    Delete { key: Box<str> },
}

const PUT: u8 = 1;
const DELETE: u8 = 2;

/// The record of an entry that is stored.
pub(super) fn put(key: &str, entry: &Entry) -> Vec<u8> {
    let mut bytes = vec![PUT];
    write_text(&mut bytes, key);
    write_text(&mut bytes, &entry.label);
    for number in [entry.len as u64, entry.block as u64, entry.checksum] {
        write(&mut bytes, number);
    }
    for extent in entry.claim.extents() {
        write(&mut bytes, extent.offset as u64);
        write(&mut bytes, extent.len as u64);
    }
    bytes
}

/// The record of an entry that is gone.
pub(super) fn delete(key: &str) -> Vec<u8> {
    let mut bytes = vec![DELETE];
    write_text(&mut bytes, key);
    bytes
}

fn write(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn write_text(bytes: &mut Vec<u8>, text: &str) {
    write(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

impl Record {
    /// Reads a record. `None`: it makes no sense.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        match reader.take(1)? {
            [PUT] => {
                let (key, label) = (reader.text()?, reader.text()?);
                let (len, block, checksum) = (reader.size()?, reader.size()?, reader.number()?);
                let mut extents = Vec::new();
                while !reader.0.is_empty() {
                    extents.push(Extent { offset: reader.size()?, len: reader.size()? });
                }
                let room = extents.iter().try_fold(0_usize, |sum, extent| sum.checked_add(extent.len))?;
                let sound = Some(room) == len.checked_next_multiple_of(UNIT) && block > 0 && block.is_multiple_of(UNIT);
                sound.then_some(Self::Put { key, label, len, block, checksum, extents })
            }
            [DELETE] => {
                let key = reader.text()?;
                reader.0.is_empty().then_some(Self::Delete { key })
            }
            _ => None,
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        self.take(size_of::<u64>())?.try_into().ok().map(u64::from_le_bytes)
    }

    fn size(&mut self) -> Option<usize> {
        self.number()?.try_into().ok()
    }

    fn text(&mut self) -> Option<Box<str>> {
        let len = self.size()?;
        std::str::from_utf8(self.take(len)?).ok().map(Box::from)
    }
}

#[cfg(test)]
mod tests {
    use super::super::space::Space;
    use super::*;
    use proptest::prelude::*;

    fn entry(label: &str, len: usize) -> Entry {
        let space = Space::new(1 << 40);
        let claim = space.claim(len.next_multiple_of(UNIT), UNIT).expect("room");
        Entry { label: label.into(), len, block: UNIT, checksum: 7, claim }
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(key in ".*", label in ".*", len in 0..1_000_000_usize) {
            let entry = entry(&label, len);
            let expected = Record::Put {
                key: key.as_str().into(),
                label: label.into(),
                len,
                block: UNIT,
                checksum: 7,
                extents: entry.claim.extents().to_vec(),
            };
            prop_assert_eq!(Record::read(&put(&key, &entry)), Some(expected));
            prop_assert_eq!(Record::read(&delete(&key)), Some(Record::Delete { key: key.into() }));
        }

        #[test]
        fn nothing_is_read_from_noise_or_from_a_part(noise in prop::collection::vec(any::<u8>(), 0..200), cut in 1..60_usize) {
            let _ = Record::read(&noise); // whatever it is, it is no panic
            let whole = put("key", &entry("label", 5000));
            prop_assert_eq!(Record::read(&whole[..whole.len().saturating_sub(cut)]), None);
        }
    }

    #[test]
    fn sizes_that_contradict_each_other_are_refused() {
        let mut bytes = put("key", &entry("label", 5000));
        let at = bytes.len() - size_of::<u64>();
        bytes[at..].copy_from_slice(&(UNIT as u64).to_le_bytes());
        assert_eq!(Record::read(&bytes), None);
    }
}
