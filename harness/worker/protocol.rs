//! What passes between a sweep and its workers: one JSON object a line, over a socket that is the worker's standard input.

use std::hash::{Hash as _, Hasher as _};
use std::io::{BufRead, Read as _, Write};
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use highwater::checkpoint::Source;
use highwater::num::fnv::Fnv1a;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::group::Group;
use crate::record::Row;
use crate::target::weights_source;

/// Longest line: far above any row, and a bound on what a broken peer makes us hold.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// A cell to run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Its number in the group.
    pub(crate) cell: usize,
    /// Its row, with the columns that do not depend on how it runs.
    pub(crate) row: Box<Row>,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    /// It is there, and this is the [`fingerprint`] of its group.
    Ready {
        /// The fingerprint.
        group: String,
    },
    /// It loads weights.
    Loading {
        /// Bytes loaded.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// A cell ended.
    Row {
        /// Its row.
        row: Box<Row>,
        /// Why the worker must be replaced before the next cell, if it must.
        spent: Option<String>,
    },
}

/// A hash of all that decides what a group's cells are. Sides that disagree about it must not speak of cell numbers: a
/// worker started after the card was lost, or the model's folder changed, would run something else.
pub(crate) fn fingerprint(group: &Group, source: &Source) -> String {
    let mut hash = Fnv1a::default();
    (format!("{group:?}"), weights_source(source)).hash(&mut hash);
    format!("{:016x}", hash.finish())
}

/// Writes one line, in one piece.
pub(crate) fn write_line<T: Serialize>(channel: &mut UnixStream, message: &T) -> Result<()> {
    let mut line = serde_json::to_vec(message).context("a message between processes is not JSON")?;
    line.push(b'\n');
    channel.write_all(&line).context("the other process is gone")
}

/// The next line; `None` where the other end is closed between lines.
pub(crate) fn read_line<T: DeserializeOwned>(reader: &mut impl BufRead) -> Result<Option<T>> {
    let mut line = Vec::new();
    reader.take(MAX_LINE_BYTES).read_until(b'\n', &mut line).context("the other process is gone")?;
    if line.is_empty() {
        return Ok(None);
    }
    ensure!(line.last() == Some(&b'\n'), "the other process ended, or wrote on and on, in the middle of a line");
    serde_json::from_slice(&line).map(Some).context("the other process wrote what is no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    #[test]
    fn messages_come_through_and_broken_ones_are_errors() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let row = ok_row(512, 2, 64);
        write_line(&mut ours, &FromWorker::Loading { done: 1, total: 2 }).unwrap();
        write_line(&mut ours, &FromWorker::Row { row: Box::new(row.clone()), spent: Some("leak".into()) }).unwrap();
        ours.write_all(b"rubbish\n{\"row\"").unwrap();
        drop(ours);
        let mut reader = std::io::BufReader::new(theirs);
        let next = |reader: &mut _| read_line::<FromWorker>(reader);
        assert!(matches!(next(&mut reader).unwrap(), Some(FromWorker::Loading { done: 1, total: 2 })));
        match next(&mut reader).unwrap() {
            Some(FromWorker::Row { row: read, spent }) => assert_eq!((*read, spent), (row, Some("leak".into()))),
            other => panic!("{other:?}"),
        }
        assert!(next(&mut reader).unwrap_err().to_string().contains("no message"));
        assert!(next(&mut reader).unwrap_err().to_string().contains("middle of a line"));
        assert!(next(&mut reader).unwrap().is_none());
    }
}
