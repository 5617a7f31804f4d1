//! The delta rule a thousand times: every run gives the first one's bits.

use highwater::num::DType;
use highwater::ops::gdn_prefill::GdnDims;

use super::{Pair, Where, assert_same, place};
use crate::ops::delta_rule::{Part, Stream, run, state_of};
use crate::ops::{bytes, numerics, random, rng};

#[test]
fn prompts_and_single_tokens_give_the_same_bits_a_thousand_times() {
    let runs = if place() == Where::Card { 1000 } else { 3 };
    let dims = if place() == Where::Card { GdnDims::new(2, 6, 128, 128) } else { GdnDims::new(1, 2, 128, 128) };
    for kept in [DType::F32, DType::Bf16] {
        let Some(pair) = Pair::new("a thousand times", numerics(DType::Bf16, kept), 1 << 20) else { return };
        let rig = &pair.cuda;
        // A run copies its inputs anew, which is most of its time: two sequences of each sort are enough.
        let streams: Vec<Stream> = (0..4).map(|i| Stream::random(dims, 200, DType::Bf16, i)).collect();
        let parts: Vec<Part> = streams
            .iter()
            .enumerate()
            .map(|(i, stream)| Part::new(stream, 10, if i < 2 { 11 } else { 170 }, i as i32))
            .collect();
        let start = |i: usize| random(&mut rng(500 + i as u64), kept, dims.state_len(), 0.5);
        let once = || {
            let mut state = state_of(rig, dims, parts.len(), start);
            let rows = run(rig, &parts, 2, &mut state);
            (rows.concat(), bytes(&state))
        };
        let first = once();
        for i in 1..runs {
            let again = once();
            assert_same(&format!("rows of run {i}"), &again.0, &first.0);
            assert_same(&format!("states of run {i}"), &again.1, &first.1);
        }
        println!("{runs} runs of prompts and single tokens with a {kept} state: the same bits");
    }
}
