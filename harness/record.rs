//! The row of a sweep cell: one flat struct, the same columns in the same order in every run.
//!
//! What may live here: the columns, what a status means, and the checks that a row does not contradict itself.
//! Writing and reading files is `journal`'s; what the columns mean to a reader is `definitions`'.
//! A null is an empty field in CSV and `null` in JSON. An empty text is a null in CSV.

use highwater::error::{BudgetError, Error, KvPoolError, OutOfMemory};
use serde::{Deserialize, Serialize};

use crate::owners::{Owner, owners_of_either_format};
use crate::status::Status;

/// Version of the columns: names, order, units.
pub(crate) const SCHEMA: u32 = 4;
/// The oldest version that is still read: its missing columns are nulls.
pub(crate) const OLDEST_SCHEMA: u32 = 2;
/// Version of the way numbers are measured. Rows of two methods are never compared.
pub(crate) const METHOD: u32 = 2;
/// Memory outside the slab that may move without anybody's doing, and that no part of it need account for: what a driver
/// takes by itself, in bytes.
pub(crate) const DRIVERS_OWN_BYTES: u64 = 16 << 20;

/// The largest step of one stage of a workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stage {
    /// What the stage is, as `prompt 6144`.
    pub(crate) name: String,
    /// Its largest transient peak, in bytes.
    pub(crate) transient_peak_bytes: u64,
    /// Holes at that instant, in bytes.
    pub(crate) fragmentation_bytes: u64,
}

/// One cell of a sweep. Sizes are bytes, times milliseconds, lengths tokens; `None` is a null.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Row {
    /// [`SCHEMA`] of the writer.
    pub(crate) schema: u32,
    /// [`METHOD`] of the writer.
    pub(crate) method: u32,
    /// When the cell ended, RFC 3339 in UTC.
    pub(crate) time: String,
    /// The run all rows of one file share.
    pub(crate) run: String,
    /// Content hash of what the cell is: model and weights, binary, place, types of values, workload and axes.
    pub(crate) cell: Option<String>,
    /// Which part of a sweep over many machines the row is of, as `1/4`.
    pub(crate) shard: Option<String>,
    /// Whether the row was taken over from an earlier run by `--resume`.
    pub(crate) cached: Option<bool>,
    /// Worker processes that were replaced while the cell ran or right after it.
    pub(crate) workers_replaced: Option<u64>,
    /// Why the last of them was.
    pub(crate) worker_note: Option<String>,

    /// Folder name of the checkpoint, or the built-in geometry.
    pub(crate) model: String,
    /// Layers, where the geometry was cut or stretched with `:layers=N`; else the model's own number.
    pub(crate) layers: Option<u64>,
    /// Quantisation recipe.
    pub(crate) recipe: String,
    /// Where the weights come from: a hash of the checkpoint's headers, or `seed:N`.
    pub(crate) weights_source: Option<String>,

    /// `cuda`, `cpu`, `emulated` or `plan`.
    pub(crate) device: String,
    /// The card whose tactics and sizes were taken.
    pub(crate) card: String,
    /// The card's architecture.
    pub(crate) arch: Option<String>,
    /// Memory budget: `--vram`, or what the card's driver reports.
    pub(crate) vram_bytes: Option<u64>,
    /// The slab: the budget less the overhead outside it.
    pub(crate) slab_bytes: Option<u64>,
    /// Memory outside the slab: context, modules, libraries.
    pub(crate) overhead_bytes: Option<u64>,
    /// `measured` or `assumed`.
    pub(crate) overhead_kind: Option<String>,

    /// Type of activations and matrix arithmetic.
    pub(crate) dtype: String,
    /// Type of the logits.
    pub(crate) logits_dtype: String,
    /// Type of the recurrent state.
    pub(crate) state_dtype: String,
    /// Type of the KV cache.
    pub(crate) kv_dtype: String,
    /// Whether activations are quantised: `checkpoint` or `off`.
    pub(crate) act_quant: Option<String>,

    /// Whether a card took one order of sums at any number of rows.
    pub(crate) batch_invariant: Option<bool>,

    /// What the sequences do: `fixed`, `ladder`, `many-short`, `concurrent-prefill`, `mixed`, or
    /// `trace:FILE@HASH`, with a hash of the file.
    pub(crate) workload: Option<String>,
    /// Prefill token budget of a step.
    pub(crate) chunk: u64,
    /// Sequences.
    pub(crate) batch: u64,
    /// Tokens of each sequence already in the cache when the cell starts.
    pub(crate) depth: u64,
    /// Whether those tokens were primed with seeded state instead of being prefilled.
    pub(crate) depth_primed: Option<bool>,
    /// Prompt tokens of each sequence, after the depth.
    pub(crate) prompt: Option<u64>,
    /// Tokens each sequence generates.
    pub(crate) output: Option<u64>,
    /// depth + prompt + output.
    pub(crate) context: Option<u64>,
    /// Tokens the KV pool holds.
    pub(crate) kv_tokens: Option<u64>,

    /// How the cell ended.
    pub(crate) status: Status,
    /// In words, for every status but `ok`.
    pub(crate) detail: Option<String>,

    /// Weights.
    pub(crate) weights_bytes: Option<u64>,
    /// Time from the open device to parameters and pools in place; null where an earlier cell's stood.
    pub(crate) load_ms: Option<f64>,
    /// KV pages.
    pub(crate) kv_bytes: Option<u64>,
    /// Recurrent and convolution state.
    pub(crate) state_bytes: Option<u64>,
    /// Persistent step buffers.
    pub(crate) inputs_bytes: Option<u64>,
    /// The extent of the persistent end.
    pub(crate) resident_bytes: Option<u64>,
    /// The largest extent of the step arena in any step of the cell.
    pub(crate) transient_peak_bytes: Option<u64>,
    /// The same over steps that held prompt tokens.
    pub(crate) prefill_transient_bytes: Option<u64>,
    /// The same over steps that held none.
    pub(crate) decode_transient_bytes: Option<u64>,
    /// The slab less resident less transient peak.
    pub(crate) free_bytes: Option<u64>,
    /// Holes inside the arena's extent at the peak.
    pub(crate) fragmentation_bytes: Option<u64>,
    /// The largest block of the arena at the peak.
    pub(crate) largest_block_bytes: Option<u64>,
    /// Its tag.
    pub(crate) largest_block_tag: Option<String>,
    /// Live bytes of the arena at the peak by tag, largest first; of both ends for an OOM.
    #[serde(deserialize_with = "owners_of_either_format")]
    pub(crate) owners: Vec<Owner>,
    /// The same at the peak of the phase, prefill or decode, whose peak is the lower one; in JSONL only.
    pub(crate) lesser_owners: Vec<Owner>,
    /// Memory of the card that its context took.
    pub(crate) context_bytes: Option<u64>,
    /// Memory that loaded kernels took.
    pub(crate) modules_bytes: Option<u64>,
    /// Memory that cuBLASLt took: its kernels and its workspace.
    pub(crate) blas_bytes: Option<u64>,
    /// Memory that captured graphs took.
    pub(crate) graphs_bytes: Option<u64>,
    /// Memory in use on the card that is neither the slab nor any of these.
    pub(crate) unattributed_bytes: Option<i64>,
    /// What did not fit.
    pub(crate) oom_tag: Option<String>,
    /// Its size.
    pub(crate) oom_requested_bytes: Option<u64>,
    /// What was free.
    pub(crate) oom_free_bytes: Option<u64>,
    /// The difference.
    pub(crate) oom_short_bytes: Option<u64>,

    /// Prompt tokens per second.
    pub(crate) prefill_tok_s: Option<f64>,
    /// Wall time of the prefill.
    pub(crate) prefill_ms: Option<f64>,
    /// Its first quartile over repetitions.
    pub(crate) prefill_q1_ms: Option<f64>,
    /// Its third quartile.
    pub(crate) prefill_q3_ms: Option<f64>,
    /// Lower end of the bootstrap interval of its median.
    pub(crate) prefill_low_ms: Option<f64>,
    /// Upper end.
    pub(crate) prefill_high_ms: Option<f64>,
    /// Repetitions in the sample.
    pub(crate) prefill_count: Option<u64>,
    /// Median time per output token.
    pub(crate) tpot_ms: Option<f64>,
    /// Its first quartile.
    pub(crate) tpot_q1_ms: Option<f64>,
    /// Its third quartile.
    pub(crate) tpot_q3_ms: Option<f64>,
    /// Lower end of the bootstrap interval of its median, over repetitions.
    pub(crate) tpot_low_ms: Option<f64>,
    /// Upper end.
    pub(crate) tpot_high_ms: Option<f64>,
    /// Decode steps in the sample.
    pub(crate) tpot_count: Option<u64>,
    /// Median time to first token.
    pub(crate) ttft_ms: Option<f64>,
    /// Median time between tokens of running sequences, over steps that also held another's prompt tokens.
    pub(crate) itl_stalled_ms: Option<f64>,
    /// Gaps in that sample.
    pub(crate) itl_stalled_count: Option<u64>,
    /// The same over steps that held none.
    pub(crate) itl_steady_ms: Option<f64>,
    /// Gaps in that sample.
    pub(crate) itl_steady_count: Option<u64>,
    /// What ended the repetitions: `interval` (narrow enough), `time` (the cap), or `count`.
    pub(crate) stopped_by: Option<String>,
    /// Passes thrown away before the first repetition.
    pub(crate) warm_up: Option<u64>,
    /// Repetitions thrown away because something disturbed the card while they ran.
    pub(crate) dirty_samples: Option<u64>,
    /// What disturbed the rest, where not enough clean ones could be had; null where nothing did.
    pub(crate) dirty: Option<String>,
    /// Median clock of the multiprocessors over the repetitions, MHz.
    pub(crate) sm_clock_mhz: Option<f64>,
    /// Thousands of cycles of that clock in the median prefill.
    pub(crate) prefill_kcycles: Option<f64>,
    /// The same in the median time per output token.
    pub(crate) tpot_kcycles: Option<f64>,
    /// Their lowest clock in any of them, MHz.
    pub(crate) sm_clock_least_mhz: Option<f64>,
    /// Median clock of the memory, MHz.
    pub(crate) memory_clock_mhz: Option<f64>,
    /// Highest temperature, degrees Celsius.
    pub(crate) temperature_c: Option<f64>,
    /// Median power, watts.
    pub(crate) power_w: Option<f64>,
    /// What held the clocks down in any repetition, joined by `, `; empty where nothing did.
    pub(crate) throttled: Option<String>,
    /// Most other processes seen on the card.
    pub(crate) foreign_processes: Option<u64>,
    /// Steps that held prompt tokens.
    pub(crate) prefill_steps: Option<u64>,
    /// Steps that held none.
    pub(crate) decode_steps: Option<u64>,
    /// Sequences put back to wait because the KV pool ran out, in one pass over the cell.
    pub(crate) preempted: Option<u64>,
    /// Distinct experts a decode step chose, averaged over MoE layers and steps; the ids fed were random.
    pub(crate) experts_per_layer: Option<f64>,
    /// The fewest of any layer and step.
    pub(crate) experts_least: Option<u64>,
    /// The most of any layer and step.
    pub(crate) experts_most: Option<u64>,
    /// Wall time of each repetition's prefill; in JSONL only.
    pub(crate) prefill_samples_ms: Vec<f64>,
    /// Wall time of each decode step in the sample; in JSONL only.
    pub(crate) tpot_samples_ms: Vec<f64>,
    /// Median time per output token of each repetition; in JSONL only.
    pub(crate) tpot_passes_ms: Vec<f64>,
    /// The largest step of each stage of a workload that has stages (a ladder's prompts); in JSONL only.
    pub(crate) stages: Vec<Stage>,
    /// Most prompt tokens per second the card's bandwidth and arithmetic allow.
    pub(crate) floor_prefill_tok_s: Option<f64>,
    /// Least time per output token they allow.
    pub(crate) floor_tpot_ms: Option<f64>,

    /// The seeded fault the run was made with. Such a row never becomes a baseline.
    pub(crate) fault: Option<String>,
    /// Whether all repetitions generated the same tokens; null where there was one.
    pub(crate) checked: Option<bool>,
    /// Hash of the tokens the cell generated, sequences in order.
    pub(crate) output_hash: Option<String>,

    /// Version of this program.
    pub(crate) version: String,
    /// Commit of the source tree it was built from, where that tree is still there.
    pub(crate) git_sha: Option<String>,
    /// Whether tracked files of that tree differ from the commit.
    pub(crate) git_dirty: Option<bool>,
    /// Hash of the program's own file.
    pub(crate) binary_hash: Option<String>,
    /// The command line, quoted for a shell.
    pub(crate) argv: String,
    /// The CPU.
    pub(crate) cpu: Option<String>,
    /// Threads this process may run at once.
    pub(crate) cores: Option<u64>,
    /// Memory this process may use.
    pub(crate) ram_bytes: Option<u64>,
    /// The card's driver.
    pub(crate) driver: Option<String>,
    /// The version of CUDA the driver has, as 13.0.
    pub(crate) cuda: Option<String>,
    /// The card's own name.
    pub(crate) gpu: Option<String>,
    /// Its own number.
    pub(crate) gpu_uuid: Option<String>,
    /// Where it is on the PCI bus, as domain:bus:device.function.
    pub(crate) gpu_pci: Option<String>,
    /// Whether its memory corrects errors.
    pub(crate) gpu_ecc: Option<bool>,
    /// Its power limit, watts.
    pub(crate) gpu_power_limit_w: Option<f64>,
    /// Operating system and kernel.
    pub(crate) os: Option<String>,
    /// `release` or `debug`.
    pub(crate) profile: String,
    /// The compiler that built this program.
    pub(crate) rustc: Option<String>,
    /// What cargo built it with, as a command line says it.
    pub(crate) cargo_flags: Option<String>,
    /// The version of NVRTC, which compiled the kernels; null where no card's were.
    pub(crate) nvrtc: Option<String>,
    /// The options it compiled every kernel with.
    pub(crate) nvrtc_options: Option<String>,
}

/// Columns that JSONL holds and CSV does not: lists of samples.
pub(crate) const JSONL_ONLY: [&str; 5] =
    ["lesser_owners", "prefill_samples_ms", "tpot_samples_ms", "tpot_passes_ms", "stages"];

impl Row {
    /// Marks the row as not fitting, with what did not fit and who held the rest.
    pub(crate) fn set_oom(&mut self, oom: &OutOfMemory) {
        self.status = Status::Oom;
        self.detail = Some(oom.to_string());
        self.owners = oom.owners.iter().map(|(tag, bytes)| Owner { tag: tag.clone(), bytes: *bytes }).collect();
        self.set_shortage(&oom.tag, oom.requested, oom.free);
        self.slab_bytes = Some(oom.slab);
    }

    /// Marks the row as refused by the plan: the first allocation past the end of the slab, or, where none was found, the
    /// first term past it.
    pub(crate) fn set_budget(&mut self, budget: &BudgetError) {
        self.status = Status::OomPredicted;
        self.detail = Some(budget.to_string());
        self.owners = budget.terms.iter().map(|(tag, bytes)| Owner { tag: tag.clone(), bytes: *bytes }).collect();
        self.owners.sort_by_key(|owner| std::cmp::Reverse(owner.bytes));
        self.slab_bytes = Some(budget.slab);
        if let Some(first) = &budget.first {
            self.owners = first.owners.iter().map(|(tag, bytes)| Owner { tag: tag.clone(), bytes: *bytes }).collect();
            self.set_shortage(&first.tag, first.requested, first.free);
            return;
        }
        let mut free = budget.slab;
        for (term, bytes) in &budget.terms {
            if *bytes > free {
                self.set_shortage(term, *bytes, free);
                return;
            }
            free -= bytes;
        }
        self.set_shortage("budget", 0, free);
    }

    /// Marks the row as refused because the KV pool cannot hold its batch at once.
    pub(crate) fn set_pool(&mut self, short: &KvPoolError) {
        self.set_status(Status::OomPredicted, &short.to_string());
        self.kv_tokens = Some(short.pool_tokens);
        self.set_shortage("cache.kv", short.requested(), short.free());
    }

    /// Marks the row with what `error` means for a cell: OOM and unsupported are data, the rest is a failure.
    pub(crate) fn set_error(&mut self, error: &Error) {
        match error {
            Error::OutOfMemory(oom) => self.set_oom(oom),
            Error::Budget(budget) => self.set_budget(budget),
            Error::KvPool(short) => self.set_pool(short),
            Error::Unsupported { .. } => self.set_status(Status::Unsupported, &error.to_string()),
            _ => self.set_status(Status::Error, &chain(error)),
        }
    }

    /// Sets the status and its detail.
    pub(crate) fn set_status(&mut self, status: Status, detail: &str) {
        self.status = status;
        self.detail = Some(detail.to_owned());
    }

    /// Counts one more worker process that was replaced, and says why.
    pub(crate) fn replaced(&mut self, why: &str) {
        self.workers_replaced = Some(self.workers_replaced.unwrap_or(0) + 1);
        self.worker_note = Some(why.to_owned());
    }

    /// Marks a row that [`Row::verify`] refused. Samples that are not finite go: JSON has no word for them, and a list with
    /// nulls could not be read back.
    pub(crate) fn set_contradiction(&mut self, what: &str) {
        self.set_status(Status::Error, &format!("the row contradicts itself: {what}"));
        self.prefill_samples_ms.retain(|ms| ms.is_finite());
        self.tpot_samples_ms.retain(|ms| ms.is_finite());
        self.tpot_passes_ms.retain(|ms| ms.is_finite());
    }

    fn set_shortage(&mut self, tag: &str, requested: u64, free: u64) {
        self.oom_tag = Some(tag.to_owned());
        self.oom_requested_bytes = Some(requested);
        self.oom_free_bytes = Some(free);
        self.oom_short_bytes = Some(requested.saturating_sub(free));
    }

    /// What the row says against itself, if anything. A contradicting row must not be written as `ok`.
    pub(crate) fn verify(&self) -> Result<(), String> {
        for (name, value) in self.speeds() {
            if let Some(value) = value.filter(|value| !value.is_finite() || *value < 0.0) {
                return Err(format!("{name} is {value}, and must be finite and not negative"));
            }
            if self.device == "plan" && value.is_some() && !name.starts_with("floor") {
                return Err(format!("{name} is set on the plan device, which measures nothing"));
            }
        }
        if self
            .prefill_samples_ms
            .iter()
            .chain(&self.tpot_samples_ms)
            .chain(&self.tpot_passes_ms)
            .any(|ms| !ms.is_finite() || *ms < 0.0)
        {
            return Err("a time sample is negative or not finite".into());
        }
        if self.tpot_count.is_some_and(|n| n != self.tpot_samples_ms.len() as u64 && !self.tpot_samples_ms.is_empty()) {
            return Err(format!("tpot_count is {:?} of {} samples", self.tpot_count, self.tpot_samples_ms.len()));
        }
        match self.status {
            Status::Ok => self.verify_bytes(),
            _ if self.detail.as_ref().is_none_or(String::is_empty) => {
                Err(format!("status {} has no detail", self.status.name()))
            }
            Status::Oom | Status::OomPredicted => {
                let (Some(requested), Some(free), Some(_)) =
                    (self.oom_requested_bytes, self.oom_free_bytes, self.oom_tag.as_ref())
                else {
                    return Err(format!("status {} does not say what did not fit", self.status.name()));
                };
                if self.oom_short_bytes != Some(requested.saturating_sub(free)) {
                    let short = self.oom_short_bytes;
                    return Err(format!("{requested} B asked of {free} B free is not {short:?} B short"));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The ledger of an `ok` row: the ends and the gap are the slab, and the owners are the peak.
    fn verify_bytes(&self) -> Result<(), String> {
        let (Some(slab), Some(resident), Some(transient), Some(free)) =
            (self.slab_bytes, self.resident_bytes, self.transient_peak_bytes, self.free_bytes)
        else {
            return Err("status ok without slab, resident, transient peak and free bytes".into());
        };
        let sum = [resident, transient, free].iter().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes));
        if sum != Some(slab) {
            return Err(format!(
                "resident {resident} + transient peak {transient} + free {free} B is not the slab's {slab} B"
            ));
        }
        let parts = [self.weights_bytes, self.kv_bytes, self.state_bytes, self.inputs_bytes];
        let parts: u128 = parts.iter().flatten().map(|bytes| u128::from(*bytes)).sum();
        if parts > u128::from(resident) {
            return Err(format!("weights, KV, state and inputs are {parts} B, more than the resident {resident} B"));
        }
        let owned: u128 = self.owners.iter().map(|owner| u128::from(owner.bytes)).sum();
        if owned != u128::from(transient) {
            return Err(format!("the owners hold {owned} B of a transient peak of {transient} B"));
        }
        Ok(())
    }

    fn speeds(&self) -> [(&'static str, Option<f64>); 16] {
        [
            ("prefill_tok_s", self.prefill_tok_s),
            ("prefill_ms", self.prefill_ms),
            ("prefill_q1_ms", self.prefill_q1_ms),
            ("prefill_q3_ms", self.prefill_q3_ms),
            ("prefill_low_ms", self.prefill_low_ms),
            ("prefill_high_ms", self.prefill_high_ms),
            ("tpot_low_ms", self.tpot_low_ms),
            ("tpot_high_ms", self.tpot_high_ms),
            ("itl_stalled_ms", self.itl_stalled_ms),
            ("itl_steady_ms", self.itl_steady_ms),
            ("tpot_ms", self.tpot_ms),
            ("tpot_q1_ms", self.tpot_q1_ms),
            ("tpot_q3_ms", self.tpot_q3_ms),
            ("ttft_ms", self.ttft_ms),
            ("floor_prefill_tok_s", self.floor_prefill_tok_s),
            ("floor_tpot_ms", self.floor_tpot_ms),
        ]
    }
}

/// An error and its causes, joined with `: `.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A row of an `ok` cell with every kind of column set.
    pub(crate) fn ok_row(chunk: u64, batch: u64, transient: u64) -> Row {
        Row {
            schema: SCHEMA,
            method: METHOD,
            time: "2026-11-30T12:00:00Z".into(),
            run: "20261130T120000Z-00000001".into(),
            model: "tiny, \"quoted\"".into(),
            layers: Some(4),
            recipe: "bf16".into(),
            device: "cpu".into(),
            card: "host".into(),
            vram_bytes: Some(u64::MAX),
            slab_bytes: Some(1000 + transient + 5),
            chunk,
            batch,
            depth_primed: Some(false),
            status: Status::Ok,
            weights_bytes: Some(900),
            kv_bytes: Some(50),
            resident_bytes: Some(1000),
            transient_peak_bytes: Some(transient),
            free_bytes: Some(5),
            owners: vec![Owner { tag: "gdn.h".into(), bytes: transient }],
            prefill_tok_s: Some(1536.0 * chunk as f64),
            tpot_ms: Some(0.125),
            tpot_q1_ms: Some(0.0625),
            tpot_q3_ms: Some(0.5),
            tpot_count: Some(3),
            tpot_samples_ms: vec![0.0625, 0.125, 0.5],
            argv: "highwater sweep 'a b'\nsecond line".into(),
            ..Row::default()
        }
    }

    fn oom() -> OutOfMemory {
        OutOfMemory {
            tag: "logits".into(),
            requested: 4_068_474_880,
            free: 1_000_000_000,
            slab: 24_000_000_000,
            owners: vec![("weights".into(), 17_000_000_000), ("kv".into(), 6_000_000_000)],
        }
    }

    #[test]
    fn an_out_of_memory_row_says_what_did_not_fit_and_who_held_the_most() {
        let mut row = Row::default();
        row.set_error(&oom().into());
        assert_eq!(row.status, Status::Oom);
        assert_eq!(row.oom_tag.as_deref(), Some("logits"));
        assert_eq!(row.oom_short_bytes, Some(3_068_474_880));
        assert_eq!(row.owners[0], Owner { tag: "weights".into(), bytes: 17_000_000_000 });
        assert!(row.detail.as_ref().unwrap().contains("weights holds the most"));
        row.verify().unwrap();
    }

    #[test]
    fn a_refused_budget_names_the_first_term_past_the_slab() {
        let budget = BudgetError {
            slab: 100,
            terms: vec![("weights".into(), 60), ("state".into(), 30), ("logits".into(), 30), ("kv".into(), 10)],
            first: None,
            nearest: None,
        };
        let mut row = Row::default();
        row.set_error(&budget.into());
        assert_eq!((row.status, row.oom_tag.as_deref()), (Status::OomPredicted, Some("logits")));
        assert_eq!((row.oom_requested_bytes, row.oom_free_bytes, row.oom_short_bytes), (Some(30), Some(10), Some(20)));
        row.verify().unwrap();
    }

    #[test]
    fn unsupported_is_data_and_any_other_error_a_failure() {
        let mut row = Row::default();
        row.set_error(&Error::Unsupported { what: "fp8".into(), supported: "take bf16".into() });
        assert_eq!(row.status, Status::Unsupported);
        row.set_error(&Error::shape("linear", "[1, 2] x [3, 4]"));
        assert_eq!((row.status, row.detail.as_deref()), (Status::Error, Some("linear: [1, 2] x [3, 4]")));
    }

    #[test]
    fn a_ledger_that_does_not_add_up_is_found() {
        ok_row(512, 1, 64).verify().unwrap();
        let broken = |change: fn(&mut Row)| {
            let mut row = ok_row(512, 1, 64);
            change(&mut row);
            row.verify().unwrap_err()
        };
        assert!(broken(|r| r.free_bytes = Some(6)).contains("is not the slab's"));
        assert!(broken(|r| r.free_bytes = None).contains("without"));
        assert!(broken(|r| r.resident_bytes = Some(u64::MAX)).contains("is not the slab's"));
        assert!(broken(|r| r.weights_bytes = Some(951)).contains("more than the resident"));
        assert!(broken(|r| r.owners[0].bytes = 63).contains("owners hold 63 B"));
        assert!(broken(|r| r.tpot_ms = Some(f64::NAN)).contains("tpot_ms"));
        assert!(broken(|r| r.ttft_ms = Some(-1.0)).contains("ttft_ms"));
        assert!(broken(|r| r.tpot_samples_ms[0] = f64::INFINITY).contains("sample"));
        assert!(broken(|r| r.tpot_count = Some(2)).contains("of 3 samples"));
        assert!(broken(|r| r.device = "plan".into()).contains("plan device"));
        assert!(broken(|r| r.status = Status::Error).contains("no detail"));
        assert!(broken(|r| r.set_status(Status::Oom, "x")).contains("what did not fit"));
    }
}
