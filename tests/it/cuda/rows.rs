//! Rows by index: copies, so every bit is the CPU arm's.

use highwater::num::DType;
use highwater::ops::batch::Placement;
use highwater::ops::rows::{Case, cases, embed, gather};
use highwater::ops::{Batch, Numerics, Span, StepInputs};
use highwater::tensor::Tensor;
use rand::RngExt;

use super::{Pair, assert_same};
use crate::ops::{LIMITS, Rig, bytes, empty, numerics, random, rng, tensor, values};

fn ints(rig: &Rig, values: &[i32]) -> Tensor {
    let mut t = empty(&rig.cx(), DType::I32, &[values.len()]);
    t.write(0, values).unwrap();
    t
}

/// The embedding of `ids`.
fn embedded(rig: &Rig, table: &Tensor, ids: &[i32]) -> Tensor {
    let mut inputs = StepInputs::new(&rig.device, LIMITS).unwrap();
    let spans = [Span { start: 0, len: ids.len(), context: 0 }];
    let pages = vec![0; ids.len().div_ceil(64)];
    inputs.upload(&spans, &[Placement { slot_in: 0, slot_out: 0, pages }], ids, &[]).unwrap();
    embed(&rig.cx(), table, &Batch { spans: &spans, decodes: 0, inputs: &inputs }).unwrap()
}

#[test]
fn every_case_is_the_cpu_arms_bits() {
    let case = |name, table, hidden, n, dtype| Case { name, table, hidden, n, dtype };
    let awkward = [
        case("several blocks a row", 5, 9000, 4, DType::Bf16),
        case("several blocks a row, odd", 5, 9001, 4, DType::F32),
        case("whole runs", 11, 64, 3, DType::F32),
        case("half a run", 11, 4, 9, DType::Bf16),
    ];
    for (seed, Case { name, table, hidden, n, dtype }) in cases().into_iter().chain(awkward).enumerate() {
        for activations in [DType::F32, DType::Bf16] {
            let what = format!("{name}: {n} of [{table}, {hidden}] {dtype} as {activations}");
            let Some(pair) = Pair::new(&what, numerics(activations, DType::F32), (n * hidden) as u64) else { continue };
            let mut rng = rng(seed as u64);
            let rows = random(&mut rng, dtype, table * hidden, 1.0);
            let ids: Vec<i32> = (0..n).map(|_| rng.random_range(0..table as i32)).collect();
            let (cpu, cuda) = pair.run(|rig| {
                let table = tensor(&rig.cx(), dtype, &[table, hidden], &rows);
                let gathered = bytes(&gather(&rig.cx(), &table, &ints(rig, &ids), n, "y").unwrap());
                let widens = (dtype, activations) != (DType::F32, DType::Bf16);
                (gathered, widens.then(|| bytes(&embedded(rig, &table, &ids))))
            });
            assert_same(&what, &cuda.0, &cpu.0);
            assert_eq!(cuda.1, cpu.1, "{what}: embedding");
        }
    }
}

#[test]
fn an_index_outside_the_table_gives_a_row_of_nan_and_touches_no_other() {
    for (dtype, hidden) in [(DType::F32, 12), (DType::Bf16, 40), (DType::Bf16, 7)] {
        let Some(pair) = Pair::new("outside", Numerics::F32, 1000) else { return };
        let rows = random(&mut rng(1), dtype, 6 * hidden, 1.0);
        let rig = &pair.cuda;
        let table = tensor(&rig.cx(), dtype, &[6, hidden], &rows);
        let ids = [5, 6, 0, -1, i32::MAX, i32::MIN, 2];
        let gathered = values(&gather(&rig.cx(), &table, &ints(rig, &ids), ids.len(), "y").unwrap());
        let embedded = values(&embedded(rig, &table, &ids));
        for got in [gathered, embedded] {
            for (&id, got) in ids.iter().zip(got.chunks(hidden)) {
                match rows.chunks(hidden).nth(usize::try_from(id).unwrap_or(usize::MAX)) {
                    Some(want) => assert_eq!(got, want, "row {id}"),
                    None => assert!(got.iter().all(|v| v.is_nan()), "row {id}: {got:?}"),
                }
            }
        }
        assert!(rig.device.take_overruns().is_empty());
    }
}
