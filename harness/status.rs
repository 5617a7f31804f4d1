//! How a cell ended: the words in the rows, and which of them are answers.

use serde::{Deserialize, Serialize};

/// How a cell ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// It ran, and every number below is its own.
    Ok,
    /// An allocation did not fit while it ran (on the plan device: while it was planned).
    Oom,
    /// The budget does not fit, so nothing was run.
    OomPredicted,
    /// A cell with no larger chunk, batch or depth did not fit, so this one was not tried.
    OomSkippedDominated,
    /// The cell asks for something this build or this model does not do.
    Unsupported,
    /// It failed for any other reason.
    Error,
    /// It ran past its time.
    Timeout,
    /// It was planned and never answered.
    #[default]
    Lost,
}

impl Status {
    /// Every status.
    #[cfg(test)]
    pub(crate) const ALL: [Status; 8] = [
        Status::Ok,
        Status::Oom,
        Status::OomPredicted,
        Status::OomSkippedDominated,
        Status::Unsupported,
        Status::Error,
        Status::Timeout,
        Status::Lost,
    ];

    /// The word in the rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Oom => "oom",
            Status::OomPredicted => "oom_predicted",
            Status::OomSkippedDominated => "oom_skipped_dominated",
            Status::Unsupported => "unsupported",
            Status::Error => "error",
            Status::Timeout => "timeout",
            Status::Lost => "lost",
        }
    }

    /// Whether the cell failed, as opposed to having an answer that is data.
    pub(crate) fn is_failure(self) -> bool {
        matches!(self, Status::Error | Status::Timeout | Status::Lost)
    }

    /// Whether the answer is that memory does not suffice.
    pub(crate) fn is_oom(self) -> bool {
        matches!(self, Status::Oom | Status::OomPredicted | Status::OomSkippedDominated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_names_are_what_serde_writes() {
        for status in Status::ALL {
            assert_eq!(serde_json::to_value(status).unwrap(), status.name());
            assert_eq!(serde_json::from_value::<Status>(status.name().into()).unwrap(), status);
        }
        assert!(serde_json::from_str::<Status>("\"fine\"").is_err());
    }

    #[test]
    fn a_cell_that_never_answered_is_lost_and_a_failure() {
        assert_eq!(Status::default(), Status::Lost);
        assert_eq!(Status::ALL.iter().filter(|s| s.is_failure()).count(), 3);
        assert_eq!(Status::ALL.iter().filter(|s| s.is_oom()).count(), 3);
    }
}
