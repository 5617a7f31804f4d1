//! What a verb ends with when it fails, and how it reads: `error:` what failed, `caused by:` why, `help:` what to do.

use std::fmt::Write as _;
use std::process::ExitCode;

use highwater::error::Error;

/// Exit code of a failed cell or tool.
pub(crate) const FAILED: u8 = 1;
/// Exit code of a command line that can never work.
const USAGE: u8 = 2;

/// Exit code of a speed regression.
pub(crate) const SLOWER: u8 = 3;
/// Exit code of a regression of memory or of the OOM frontier.
pub(crate) const MORE_MEMORY: u8 = 4;
/// Exit code, where it is asked for, of what could not be decided or was measured under other conditions.
pub(crate) const UNDECIDED: u8 = 5;

/// A failed verb.
#[derive(Debug)]
pub(crate) struct Failure {
    error: anyhow::Error,
    help: Option<String>,
    /// The exit code, where the error does not decide it.
    code: Option<u8>,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Failure {
        let error = error.into();
        let help = error.chain().find_map(|cause| advice(cause.downcast_ref::<Error>()?)).map(str::to_owned);
        Failure { error, help, code: None }
    }
}

impl Failure {
    /// A mistake of the command line that was found after it was read.
    pub(crate) fn usage(error: &anyhow::Error) -> Failure {
        Error::Request { param: "--axis", what: format!("{error:#}") }.into()
    }

    /// A verb that did its work and ends with `code` for what it found.
    pub(crate) fn found(code: u8, what: String) -> Failure {
        Failure { error: anyhow::Error::msg(what), help: None, code: Some(code) }
    }

    /// The same where the reader has been told all of it.
    pub(crate) fn said(code: u8) -> Failure {
        Failure::found(code, String::new())
    }

    /// The same with what to do about it.
    pub(crate) fn with_help(self, help: &str) -> Failure {
        Failure { help: Some(help.to_owned()), ..self }
    }

    /// A flag, or a pair of them, that can never work.
    pub(crate) fn request(param: &'static str, error: &anyhow::Error) -> Failure {
        Error::Request { param, what: format!("{error:#}") }.into()
    }

    /// What was found decides; else 2 where the request itself is wrong, else 1.
    pub(crate) fn exit_code(&self) -> ExitCode {
        if let Some(code) = self.code {
            return ExitCode::from(code);
        }
        let usage = self.error.chain().any(|cause| matches!(cause.downcast_ref(), Some(Error::Request { .. })));
        ExitCode::from(if usage { USAGE } else { FAILED })
    }

    /// The message, lines ended. A cause that its error already quotes is not repeated.
    pub(crate) fn render(&self) -> String {
        let mut shown = self.error.to_string();
        if shown.is_empty() {
            return shown;
        }
        let mut text = format!("error: {shown}\n");
        for cause in self.error.chain().skip(1) {
            let cause = cause.to_string();
            if !shown.contains(&cause) {
                let _ = writeln!(text, "caused by: {cause}");
                shown = cause;
            }
        }
        if let Some(help) = &self.help {
            let _ = writeln!(text, "help: {help}");
        }
        text
    }
}

/// What to do about an error whose own text does not say so.
fn advice(error: &Error) -> Option<&'static str> {
    match error {
        Error::OutOfMemory(_) => Some(
            "lower --chunk or --kv-tokens, or raise --vram; `highwater frontier MODEL` prints the largest chunk that fits",
        ),
        Error::Budget(_)
        | Error::KvPool(_)
        | Error::NoData { .. }
        | Error::Shape { .. }
        | Error::Config { .. }
        | Error::Checkpoint { .. }
        | Error::Unsupported { .. }
        | Error::Request { .. }
        | Error::NotFinite { .. }
        | Error::Leak { .. }
        | Error::Device { .. }
        | Error::Io { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    fn io() -> Error {
        Error::io(std::path::Path::new("model/config.json"))(std::io::ErrorKind::NotFound.into())
    }

    #[test]
    fn the_chain_is_printed_without_repeats() {
        let failure = Failure::from(Err::<(), _>(io()).context("cannot load the model").unwrap_err());
        assert_eq!(failure.render(), "error: cannot load the model\ncaused by: model/config.json: entity not found\n");
    }

    #[test]
    fn help_comes_last_and_out_of_memory_has_its_own() {
        let oom =
            highwater::error::OutOfMemory { tag: "logits".into(), requested: 2, free: 1, slab: 3, owners: vec![] };
        let text = Failure::from(Error::from(oom)).render();
        assert!(text.starts_with("error: out of memory: logits needs 2 B"), "{text}");
        assert!(text.lines().last().unwrap().starts_with("help: lower --chunk"), "{text}");
    }

    #[test]
    fn a_request_that_can_never_work_is_a_usage_error() {
        let request = Error::Request { param: "--top-p", what: "2 is outside (0, 1]".into() };
        let code = |error: Error| format!("{:?}", Failure::from(error).exit_code());
        assert_eq!(code(request), format!("{:?}", ExitCode::from(2)));
        assert_eq!(code(io()), format!("{:?}", ExitCode::from(1)));
    }
}
