//! Checkpoints that the peers' own software wrote: each opens with every tensor accounted for.

use std::path::PathBuf;

use highwater::checkpoint::{Checkpoint, Dtype, Mixer, Mlp, SkipRule};
use safetensors::SafeTensors;

fn folder(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(case)
}

const CASES: [&str; 8] = [
    "moe_bf16",
    "moe_fp32",
    "moe_v509_bf16",
    "moe_realdims_bf16",
    "dense_bf16",
    "dense_tied_bf16",
    "moe_vl_bf16",
    "moe_vl_fused_bf16",
];

#[test]
fn every_fixture_opens_with_every_byte_accounted_for() {
    for case in CASES {
        let c = Checkpoint::open(&folder(case)).unwrap_or_else(|e| panic!("{e}"));
        let g = c.geometry();
        assert_eq!(g.name, case);
        assert_eq!(g.layers, [Mixer::Gdn, Mixer::Gdn, Mixer::Gdn, Mixer::Attention], "{case}");
        assert_eq!(g.tied, case == "dense_tied_bf16");
        assert_eq!(matches!(g.mlp, Mlp::Moe { .. }), case.starts_with("moe"));
        assert_eq!((g.eos.as_slice(), g.rope.theta, g.max_context), ([1].as_slice(), 1e7, 4096));
        let dtype = if case == "moe_fp32" { Dtype::F32 } else { Dtype::Bf16 };
        for p in g.params() {
            let e = c.entry(&p.name).unwrap();
            assert_eq!((e.dtype, &e.shape), (dtype, &p.shape), "{case}: {}", p.name);
        }
        assert_eq!(c.bytes(), g.param_count() * dtype.bits() / 8, "{case}");
        // Data of the file, and nothing but what was skipped, beside the parameters; golden values are another file's.
        let skipped = |rule| c.skipped().iter().filter(|s| s.rule == rule).map(|s| s.bytes).sum::<u64>();
        let whole = std::fs::read(folder(case).join("model.safetensors")).unwrap();
        let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap());
        assert_eq!(c.bytes() + skipped(SkipRule::Vision), whole.len() as u64 - header, "{case}");
        assert_eq!(skipped(SkipRule::Vision) > 0, case.contains("_vl_"), "{case}");
        let others: Vec<&str> =
            c.skipped().iter().filter(|s| s.rule == SkipRule::OtherFile).map(|s| s.name.as_str()).collect();
        assert_eq!(others, ["golden.safetensors"], "{case}");
    }
}

#[test]
fn every_fixture_reads_as_the_reference_reader_does() {
    for case in CASES {
        let c = Checkpoint::open(&folder(case)).unwrap_or_else(|e| panic!("{e}"));
        let whole = std::fs::read(folder(case).join("model.safetensors")).unwrap();
        let reference = SafeTensors::deserialize(&whole).unwrap();
        for p in c.geometry().params() {
            let e = c.entry(&p.name).unwrap();
            let mut ours = vec![0; e.bytes() as usize];
            c.read(&p.name, 0..e.rows(), &mut ours).unwrap();
            let theirs = reference.tensor(c.disk_name(e)).unwrap();
            let expert = p.name.split_once(".mlp.experts.").filter(|_| case == "moe_vl_fused_bf16");
            let from = if let Some((_, rest)) = expert {
                // [experts, 2 * inter, hidden], gate rows first; [experts, hidden, inter].
                let (expert, part) = rest.split_once('.').unwrap();
                let expert: usize = expert.parse().unwrap();
                match part {
                    "gate_proj.weight" => 2 * expert * ours.len(),
                    "up_proj.weight" => (2 * expert + 1) * ours.len(),
                    _ => expert * ours.len(),
                }
            } else {
                assert_eq!(theirs.shape(), e.shape, "{case}: {}", p.name);
                0
            };
            assert_eq!(ours, theirs.data()[from..from + ours.len()], "{case}: {}", p.name);
        }
    }
}

#[test]
fn the_lone_operations_are_there() {
    let bytes = std::fs::read(folder("gdn_ops").join("ops.safetensors")).unwrap();
    let ops = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(ops.tensor("c1/zero/recurrent_f64/out").unwrap().shape(), [1, 64, 2, 32]);
    assert!(Checkpoint::open(&folder("gdn_ops")).is_err_and(|e| e.to_string().contains("no config.json")));
}
