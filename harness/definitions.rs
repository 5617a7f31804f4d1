//! What the numbers mean, printed wherever they are: under the table, beside the CSV, in `--help`. Others measure other
//! things under the same names, so none is left undefined.

/// One number.
#[derive(Debug)]
pub(crate) struct Definition {
    /// What people call it.
    pub(crate) term: &'static str,
    /// Its columns in the rows.
    pub(crate) columns: &'static [&'static str],
    /// What it is, with its unit.
    pub(crate) text: &'static str,
}

/// Every number of a row.
pub(crate) const DEFINITIONS: &[Definition] = &[
    Definition {
        term: "chunk",
        columns: &["chunk"],
        text: "most prompt tokens one step computes, over all sequences; decode tokens come on top, at most one per sequence",
    },
    Definition {
        term: "batch",
        columns: &["batch"],
        text: "sequences, all submitted at once; of a trace the most that run together",
    },
    Definition {
        term: "workload",
        columns: &["workload"],
        text: "what the sequences do; fixed: equal prompts at once, then decode; ladder: prompts of 2k, 6k, 12k, 24k, 2k and 12k tokens \
               (divided by --ladder-scale) one after another on one engine, the repeated ones checked to take the same memory; \
               many-short: prompts of chunk / batch tokens, at most 63; concurrent-prefill: prompts of chunk / batch tokens in one \
               step, one token each; mixed: 3 prompts that arrive while the batch decodes, in the same steps; trace: requests of a \
               file, by arrival",
    },
    Definition {
        term: "method",
        columns: &["method"],
        text: "version of the way numbers are measured; rows of two are not compared. 2: warm-up passes are thrown away, repetitions \
               go on until both medians are known to --precision, or to a time or a count; on a card disturbed repetitions are made \
               again. 1: one warm-up pass and three repetitions, whatever their spread",
    },
    Definition {
        term: "repetitions",
        columns: &["warm_up", "stopped_by"],
        text: "passes thrown away before the first repetition; what ended the repetitions: interval (half the 95 % interval of the \
               medians of prefill and TPOT within --precision, at 10 repetitions or more), time (--cell-seconds, from the last warm-up pass on), or count \
               (--repetitions, or 40, or too many disturbed ones)",
    },
    Definition {
        term: "cycles",
        columns: &["prefill_kcycles", "tpot_kcycles"],
        text: "the median prefill and TPOT in thousands of cycles of the median SM clock: what is left of a difference once the \
               clocks' is taken out",
    },
    Definition {
        term: "clocks",
        columns: &[
            "sm_clock_mhz",
            "sm_clock_least_mhz",
            "memory_clock_mhz",
            "temperature_c",
            "power_w",
            "throttled",
            "foreign_processes",
        ],
        text: "a card while its repetitions ran, looked at every 50 ms: medians of clocks and power, the lowest repetition's clock, the \
               highest temperature, all that held clocks down (the power limit is normal under load, and only counts against a \
               repetition where its clock drifts), the most other processes on the card",
    },
    Definition {
        term: "depth",
        columns: &["depth", "depth_primed"],
        text: "tokens of each sequence already in the cache when the cell starts; primed = filled with seeded values, never \
               prefilled, and counted in no speed",
    },
    Definition {
        term: "context",
        columns: &["context", "prompt", "output"],
        text: "depth + prompt + output, tokens per sequence",
    },
    Definition {
        term: "cached",
        columns: &["cached", "shard", "cell"],
        text: "the row was taken over from an earlier run by --resume; shard: which part of a sweep over many machines it is \
               of; cell: hash of what the cell is and of the binary that ran it",
    },
    Definition {
        term: "workers replaced",
        columns: &["workers_replaced", "worker_note"],
        text: "worker processes that were ended while the cell ran or right after it, and why the last was: it died, hung, \
               panicked, or an idle engine held more than its weights and pools",
    },
    Definition { term: "KV tokens", columns: &["kv_tokens"], text: "tokens the KV pool holds, over all sequences" },
    Definition {
        term: "preempted",
        columns: &["preempted"],
        text: "times a sequence gave its KV pages back and was computed anew, over one run of the cell; more than 0 puts that \
               recomputation into prefill ms",
    },
    Definition {
        term: "vram",
        columns: &["vram_bytes"],
        text: "the budget: --vram, or what the card's driver reports as total; slab + overhead never exceeds it",
    },
    Definition {
        term: "overhead",
        columns: &["overhead_bytes"],
        text: "memory of the card outside the slab (context, modules, libraries), measured or assumed for the card",
    },
    Definition {
        term: "slab",
        columns: &["slab_bytes"],
        text: "the one allocation everything lives in; slab = resident + transient + free, exactly",
    },
    Definition {
        term: "resident",
        columns: &["resident_bytes", "weights_bytes", "kv_bytes", "state_bytes", "inputs_bytes"],
        text: "bytes that outlive a step: weights, KV pages, recurrent and convolution state, persistent step inputs, padding",
    },
    Definition {
        term: "load",
        columns: &["load_ms"],
        text: "ms from the open device to all parameters in its memory and the pools beside them, of the cell that they were loaded \
               for; weights_bytes / load_ms is the rate",
    },
    Definition {
        term: "transient",
        columns: &["transient_peak_bytes", "prefill_transient_bytes", "decode_transient_bytes"],
        text: "high-water mark of the step arena over the cell's steps, holes included: bytes needed beyond resident; prefill: \
               over steps with prompt tokens; decode: over steps without",
    },
    Definition { term: "free", columns: &["free_bytes"], text: "slab - resident - transient" },
    Definition {
        term: "fragmentation",
        columns: &["fragmentation_bytes"],
        text: "holes between live blocks of the arena at the instant of its peak; part of transient",
    },
    Definition {
        term: "largest block",
        columns: &["largest_block_bytes", "largest_block_tag"],
        text: "the largest single block live in the arena at the instant of its peak",
    },
    Definition {
        term: "owners",
        columns: &["owners", "lesser_owners"],
        text: "live bytes by tag at the instant of the transient peak, holes as their own owner, so that they sum to it; of the \
               whole slab where the cell is an OOM; lesser: the same at the peak of the phase, prefill or decode, whose peak is \
               the lower one",
    },
    Definition {
        term: "outside the slab",
        columns: &["context_bytes", "modules_bytes", "blas_bytes", "graphs_bytes", "unattributed_bytes"],
        text: "memory of the card in use beside the slab, each a difference of free memory around its own event: the context, \
               loaded kernels, cuBLASLt (its workspace included), captured graphs, and what is in use and none of these",
    },
    Definition {
        term: "distinct experts",
        columns: &["experts_per_layer", "experts_least", "experts_most"],
        text: "distinct experts of an MoE layer in one decode step, averaged over layers and steps, the fewest and the most; \
               decode is fed seeded random ids",
    },
    Definition {
        term: "batch invariant",
        columns: &["batch_invariant"],
        text: "whether a card took one order of sums at any number of rows (--batch-invariant)",
    },
    Definition {
        term: "oom",
        columns: &["oom_tag", "oom_requested_bytes", "oom_free_bytes", "oom_short_bytes"],
        text: "the buffer that did not fit, its bytes, the bytes free then, and the difference; oom = while the \
               cell ran (or, on the plan device, was planned), oom_predicted = refused before it ran (cache.kv: the KV pool cannot hold the batch at once), oom_skipped_dominated = a cell no larger on any axis did not fit",
    },
    Definition {
        term: "prefill tok/s",
        columns: &[
            "prefill_tok_s",
            "prefill_ms",
            "prefill_q1_ms",
            "prefill_q3_ms",
            "prefill_low_ms",
            "prefill_high_ms",
            "prefill_count",
            "prefill_steps",
        ],
        text: "prompt tokens / wall time of the steps that hold any of them (prefill ms; of mixed the prompts that arrive, decodes \
               beside them included); sampling included, tokenisation and depth excluded; median of the repetitions, its quartiles, and the 95 % bootstrap \
               interval of the median (low, high; in tables the wider half as \u{b1}, and n= where the repetitions are fewer than the \
               ten that a verdict takes)",
    },
    Definition {
        term: "TPOT",
        columns: &["tpot_ms", "tpot_q1_ms", "tpot_q3_ms", "tpot_low_ms", "tpot_high_ms", "tpot_count", "decode_steps"],
        text: "time per output token: wall time in ms of a step without prompt tokens, in which every running sequence gets one \
               token, sampling included; median and quartiles (linear interpolation) over the cell's steps; low and high: 95 % bootstrap \
               interval of the median of the repetitions' medians",
    },
    Definition {
        term: "TTFT",
        columns: &["ttft_ms"],
        text: "time to first token: ms from submission to the end of the step that sampled a sequence's first token, median over \
               sequences; no network, no tokenisation",
    },
    Definition {
        term: "ITL",
        columns: &["itl_stalled_ms", "itl_stalled_count", "itl_steady_ms", "itl_steady_count"],
        text: "inter-token latency: ms between two tokens of one sequence, all gaps pooled, median; stalled: a step in between \
               held another sequence's prompt tokens; steady: none did",
    },
    Definition {
        term: "dirty",
        columns: &["dirty_samples", "dirty"],
        text: "repetitions thrown away because the card was disturbed while they ran (heat, the power brake or a hardware slowdown \
               held its clocks, another process was on it, or its clock was more than 5 % below the cell's median), and what \
               disturbed those that were kept where fewer than half were clean",
    },
    Definition {
        term: "floor",
        columns: &["floor_prefill_tok_s", "floor_tpot_ms"],
        text: "the best the card's datasheet allows: the larger of bytes moved / bandwidth and FLOPs / peak rate, of the same steps; \
               a bound, never a prediction",
    },
    Definition {
        term: "build",
        columns: &["rustc", "cargo_flags", "nvrtc", "nvrtc_options"],
        text: "the compiler of the program and what cargo gave it (lto and codegen-units where the environment or Cargo.toml set \
               them); on a card the compiler of its kernels and what it is given for each, beside a kernel's own -D values, and \
               --fmad=false where its results are to be the CPU arm's bits",
    },
    Definition {
        term: "checked",
        columns: &["checked", "output_hash"],
        text: "whether every repetition of the cell generated the same tokens, of which output_hash is a hash: that its results repeat, \
               not that they are right (tests hold those to the CPU arm and to other software's logits); in kernels.csv whether \
               the kernel's result agrees with the CPU arm's; empty where nothing was held to anything",
    },
    Definition {
        term: "RAM",
        columns: &["ram_bytes"],
        text: "memory this process may use: the machine's, or its control group's limit",
    },
];

/// All definitions, one a line, lines unwrapped.
pub(crate) fn text() -> String {
    lines(|definition| !definition.columns.is_empty())
}

/// The definitions of the terms named, in this file's order.
pub(crate) fn of_terms(terms: &[&str]) -> String {
    lines(|definition| terms.contains(&definition.term))
}

fn lines(wanted: impl Fn(&Definition) -> bool) -> String {
    let wanted = DEFINITIONS.iter().filter(|definition| wanted(definition));
    wanted.fold(String::new(), |lines, definition| lines + definition.term + ": " + definition.text + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_a_row_is_defined_once_and_no_other() {
        let row = serde_json::to_value(crate::record::Row::default()).unwrap();
        let columns: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
        let defined: Vec<&str> = DEFINITIONS.iter().flat_map(|d| d.columns).copied().collect();
        for column in &columns {
            let is_number = column.ends_with("_bytes") || column.ends_with("_tok_s") || column.ends_with("_ms");
            if is_number && !crate::record::JSONL_ONLY.contains(column) {
                assert_eq!(defined.iter().filter(|d| *d == column).count(), 1, "{column}");
            }
        }
        for column in defined {
            assert!(columns.contains(&column), "{column} is defined and is no column");
        }
    }

    #[test]
    fn definitions_can_be_picked_by_term() {
        let picked = of_terms(&["TTFT", "TPOT"]);
        assert!(picked.starts_with("TPOT: ") && picked.contains("\nTTFT: ") && picked.lines().count() == 2);
        assert_eq!(text().lines().count(), DEFINITIONS.len());
    }
}
