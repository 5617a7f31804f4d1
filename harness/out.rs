//! Writing to stdout. A reader that went away (`| head`) is no error.

use std::io::{ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes `text` to stdout as it is.
pub(crate) fn print(text: &str) -> Result<()> {
    print_to(&mut std::io::stdout().lock(), text)
}

fn print_to(out: &mut dyn Write, text: &str) -> Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
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
        assert!(print_to(&mut Closed(ErrorKind::BrokenPipe), "x").is_ok());
        assert!(print_to(&mut Closed(ErrorKind::StorageFull), "x").is_err());
        let mut out = Vec::new();
        print_to(&mut out, "a\nb").unwrap();
        assert_eq!(out, b"a\nb");
    }
}
