//! A sweep over many machines: which cells are whose. The split depends on the cells alone, so machines need not talk.

use std::fmt;
use std::str::FromStr;

/// Most parts of a sweep.
const MOST_SHARDS: usize = 10_000;

/// Part `index` (from 1) of `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shard {
    /// Which part, from 1.
    pub(crate) index: usize,
    /// Of how many.
    pub(crate) count: usize,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Shard, String> {
        let parts = text.split_once('/').and_then(|(i, n)| Some((i.trim().parse().ok()?, n.trim().parse().ok()?)));
        let (index, count) =
            parts.ok_or_else(|| format!("`{text}` is not I/N, e.g. 1/4 for the first of four parts"))?;
        if !(1..=MOST_SHARDS).contains(&count) || !(1..=count).contains(&index) {
            return Err(format!("{index}/{count}: parts go from 1/N to N/N, and N from 1 to {MOST_SHARDS}"));
        }
        Ok(Shard { index, count })
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

/// The part (from 1) of `count` that each cell belongs to, for groups of as many cells as `groups` says, in order.
///
/// Parts are runs of neighbours of about equal length, so that a part loads as few models as it can. Where the end of a
/// group is within a quarter of a part from where two parts would meet, they meet there.
pub(crate) fn split(groups: &[usize], count: usize) -> Vec<usize> {
    let cells: usize = groups.iter().sum();
    let ends: Vec<usize> = groups
        .iter()
        .scan(0, |end, cells| {
            *end += cells;
            Some(*end)
        })
        .collect();
    let near = cells / count / 4;
    let meet = |part: usize| {
        let even = (part * cells).div_ceil(count);
        let nearest = ends.iter().copied().min_by_key(|end| end.abs_diff(even));
        nearest.filter(|end| end.abs_diff(even) <= near).unwrap_or(even)
    };
    let mut parts = Vec::with_capacity(cells);
    for part in 1..=count {
        parts.resize(if part == count { cells } else { meet(part).max(parts.len()) }, part);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_is_in_one_part_and_parts_are_even_runs() {
        for groups in [vec![12], vec![5, 7], vec![1, 1, 1], vec![40, 3, 17, 40], vec![]] {
            let cells: usize = groups.iter().sum();
            for count in 1..=15 {
                let parts = split(&groups, count);
                assert_eq!(parts.len(), cells);
                assert!(parts.is_sorted() && parts.iter().all(|part| (1..=count).contains(part)));
                let most = (1..=count).map(|p| parts.iter().filter(|of| **of == p).count()).max().unwrap();
                let even = cells.div_ceil(count);
                assert!(most <= even + 2 * (cells / count / 4), "{groups:?} in {count}: {parts:?}");
                if cells >= count {
                    assert!((1..=count).all(|part| parts.contains(&part)), "{groups:?} in {count}: {parts:?}");
                }
                assert_eq!(parts, split(&groups, count));
            }
        }
    }

    #[test]
    fn a_group_near_a_part_s_size_stays_whole() {
        assert_eq!(split(&[9, 11], 2), [vec![1; 9], vec![2; 11]].concat());
        assert_eq!(split(&[10, 11, 9], 3), [vec![1; 10], vec![2; 11], vec![3; 9]].concat());
        // One group over two parts.
        assert_eq!(split(&[4], 2), [1, 1, 2, 2]);
    }

    #[test]
    fn what_is_no_part_is_refused() {
        assert_eq!("2/3".parse(), Ok(Shard { index: 2, count: 3 }));
        assert_eq!(Shard { index: 2, count: 3 }.to_string(), "2/3");
        for text in ["", "1", "0/3", "4/3", "1/0", "-1/3", "1/3/3", "a/b", "1/99999999999999999999", "1/10001"] {
            assert!(text.parse::<Shard>().is_err(), "{text}");
        }
    }
}
