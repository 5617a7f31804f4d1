//! What the numbers mean under the key names of other programs: whose definition holds, and where ours differs.

/// One form a line.
pub(crate) const FORMATS: &str = "\
json, jsonl, sql (table highwater): every column under its own name; lists in sql are JSON text, truth values 1 and 0\n\
bmf (Bencher): does-not-fit is 1 for a cell that ran out of memory; prefill-ms, tpot-ms: median, lower and upper value its 95 % \
bootstrap interval; bytes to the byte; a failed cell reports nothing\n\
gh-benchmark (github-action-benchmark, customSmallerIsBetter): the same numbers; range is the interval's ends\n\
llama-bench: n_batch and n_ubatch are the chunk; ppN: n_prompt tokens of each sequence, n_depth primed with seeded values and \
counted in no speed; tgN: n_gen decode steps after n_depth tokens (depth and prompt); samples_ns a repetition each, avg and stddev \
(n - 1) of them; sampling is included, where llama-bench leaves it out; n_seqs sequences at once (avg_ts over all of them), where \
llama-bench has one; avg_ts of tg is null where sequences do not decode in step; a cell that ran out of memory is a record \
with null times; test, n_seqs and all after it are keys of ours\n\
vllm: as vllm bench serve with all requests sent at once (request_rate inf), but in the engine: no network, no tokenisation; TTFT \
from submission to a sequence's first token; TPOT is (e2el - ttft) / (output - 1); ITL all gaps pooled; percentiles \
linear; std as numpy's (n); avg_latency, latencies, percentiles as vllm bench latency: seconds of the whole batch, a repetition \
each; single requests' times are null, but for the median TTFT, where sequences do not decode in step\n";
