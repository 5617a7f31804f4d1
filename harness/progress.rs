//! A progress bar with the time left, on stderr, and nothing at all where stderr is no terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress over a known number of steps: cells of a sweep, bytes of a load.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar over `cells` cells of a sweep.
    pub(crate) fn cells(cells: u64) -> Progress {
        Progress::new(cells, "{elapsed_precise} [{bar:32}] {pos}/{len} cells, {eta} left  {wide_msg}")
    }

    /// A bar over `kernels` compilations.
    pub(crate) fn kernels(kernels: u64) -> Progress {
        Progress::new(kernels, "{elapsed_precise} [{bar:32}] {pos}/{len} compiled, {eta} left  {wide_msg}")
    }

    /// A bar over `rows` rows of a table.
    pub(crate) fn rows(rows: u64) -> Progress {
        Progress::new(rows, "{elapsed_precise} [{bar:32}] {pos}/{len} rows, {eta} left  {wide_msg}")
    }

    /// A bar over `bytes` bytes to read or to make.
    pub(crate) fn bytes(bytes: u64) -> Progress {
        Progress::new(bytes, "{elapsed_precise} [{bar:32}] {binary_bytes}/{binary_total_bytes}, {eta} left  {wide_msg}")
    }

    fn new(length: u64, template: &str) -> Progress {
        // The terminal target hides itself where stderr is not one.
        let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template(template).expect("the template is a constant of this file");
        bar.set_style(style.progress_chars("=> "));
        Progress { bar }
    }

    /// Says what is being done, on the bar's own line.
    pub(crate) fn doing(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    /// Moves on by `steps`.
    pub(crate) fn advance(&self, steps: u64) {
        self.bar.inc(steps);
    }

    /// Sets how far it goes.
    pub(crate) fn length(&self, steps: u64) {
        self.bar.set_length(steps);
    }

    /// How far it is.
    #[cfg(test)]
    pub(crate) fn position(&self) -> u64 {
        self.bar.position()
    }

    /// Takes the bar off the screen.
    pub(crate) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_count_and_their_templates_are_valid() {
        for progress in [Progress::cells(3), Progress::kernels(3), Progress::rows(3), Progress::bytes(1 << 30)] {
            progress.doing("chunk 512 batch 1 depth 0");
            progress.advance(1);
            progress.advance(2);
            assert_eq!(progress.position(), 3);
            progress.finish();
        }
    }
}
