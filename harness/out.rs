//! Writing to stdout. A reader that went away (`| head`) is no error.

use std::fs::File;
use std::io::{ErrorKind, IsTerminal as _, Write};
use std::os::fd::AsFd as _;

use anyhow::{Context, Result};

/// Writes `text` to stdout as it is.
pub(crate) fn print(text: &str) -> Result<()> {
    print_while_read(text).map(|_| ())
}

/// As [`print`]; false once the reader went away, and more need not be made.
pub(crate) fn print_while_read(text: &str) -> Result<bool> {
    print_to(&mut std::io::stdout().lock(), text)
}

/// Whether stdout is a terminal or a file, whose reader has all that was printed to the end. A pipe's may have it or not.
pub(crate) fn is_kept() -> bool {
    let out = std::io::stdout();
    let file = || out.as_fd().try_clone_to_owned().ok().and_then(|fd| File::from(fd).metadata().ok());
    out.is_terminal() || file().is_some_and(|about| about.is_file())
}

/// A line on stderr, for people. Nothing can be done where it cannot be written.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn print_to(out: &mut dyn Write, text: &str) -> Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.context("cannot write to stdout").map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Closed(ErrorKind);

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_left_is_no_error_and_a_full_disk_is() {
        assert!(!print_to(&mut Closed(ErrorKind::BrokenPipe), "x").unwrap());
        assert!(print_to(&mut Closed(ErrorKind::StorageFull), "x").is_err());
        let mut out = Vec::new();
        assert!(print_to(&mut out, "a\nb").unwrap());
        assert_eq!(out, b"a\nb");
    }
}
