//! `embed` and `gather` against the rows themselves, and what they say about an index outside.

use highwater::num::DType;
use highwater::ops::rows::{cases, cost, embed, gather};
use highwater::ops::{Limits, Meter, Numerics};
use rand::RngExt;

use super::world::{Step, blank, cx, device, ints, message, numerics, plan, stored, tensor, uniform};
use super::{bytes, rng, values};

/// A step of one sequence with these ids.
fn step(device: &std::sync::Arc<highwater::device::Device>, ids: &[i32]) -> Step {
    let n = ids.len();
    let pages = vec![(0..n.div_ceil(64) as i32).collect()];
    let mut step = Step::new(device, Limits { step_tokens: n, batch: 1, context: n }, &[(0, n)], 0, &pages);
    if device.has_data() {
        step.inputs.tokens.host_mut::<i32>().unwrap().copy_from_slice(ids);
    }
    step
}

#[test]
fn rows_are_copied_in_the_order_of_the_indices() {
    for (i, case) in cases().into_iter().enumerate() {
        let mut rng = rng(i as u64);
        let (device, meter) = (device(), Meter::default());
        let cx = cx(&device, &meter, numerics(case.dtype));
        let given = uniform(&mut rng, case.table * case.hidden, 3.0);
        let table = tensor(&device, case.dtype, &[case.table, case.hidden], &given);
        let indices: Vec<i32> = (0..case.n).map(|_| rng.random_range(0..case.table as i32)).collect();
        let held = stored(case.dtype, &given);
        let want: Vec<f32> =
            indices.iter().flat_map(|&r| held[r as usize * case.hidden..][..case.hidden].to_vec()).collect();
        let embedded = embed(&cx, &table, &step(&device, &indices).batch()).unwrap();
        assert_eq!((embedded.shape(), embedded.dtype()), (&[case.n, case.hidden][..], case.dtype));
        assert_eq!(values(&embedded), want, "{}", case.name);
        // Indices past the n-th are not looked at.
        let longer = ints(&device, &[&indices[..], &[-7, i32::MAX]].concat());
        assert_eq!(values(&gather(&cx, &table, &longer, case.n, "rows").unwrap()), want, "{}", case.name);
    }
}

#[test]
fn a_bf16_table_widens_exactly_to_f32_activations() {
    let (device, meter) = (device(), Meter::default());
    let given = [0.1, -2.7, f32::MIN_POSITIVE, 3e38, -0.0, 1.0];
    let table = tensor(&device, DType::Bf16, &[2, 3], &given);
    let y = embed(&cx(&device, &meter, Numerics::F32), &table, &step(&device, &[1, 0]).batch()).unwrap();
    assert_eq!(y.dtype(), DType::F32);
    let held = stored(DType::Bf16, &given);
    let want: Vec<f32> = [&held[3..], &held[..3]].concat();
    let want = tensor(&device, DType::F32, &[2, 3], &want);
    assert_eq!(bytes(&y), bytes(&want));
}

#[test]
fn an_id_outside_the_vocabulary_is_named_with_its_row() {
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let table = tensor(&device, DType::F32, &[10, 2], &[0.0; 20]);
    for id in [10, -1, i32::MAX, i32::MIN] {
        let said = message(embed(&cx, &table, &step(&device, &[9, 0, id, 3]).batch()));
        assert!(said.contains(&format!("index 2 is row {id},")) && said.contains("10 rows"), "{said}");
    }
}

#[test]
fn a_sampled_row_outside_the_window_is_named_with_the_window() {
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter, Numerics::F32);
    let x = tensor(&device, DType::F32, &[5, 2], &[0.0; 10]);
    for row in [5, 130, -1, i32::MIN] {
        let said = message(gather(&cx, &x, &ints(&device, &[4, row]), 2, "rows"));
        assert!(said.contains(&format!("index 1 is row {row},")) && said.contains("5 rows (0..5)"), "{said}");
    }
}

#[test]
fn operands_that_disagree_are_named_with_their_numbers() {
    for device in [device(), plan()] {
        let meter = Meter::default();
        let cx = cx(&device, &meter, Numerics::BF16);
        let x = blank(&device, DType::Bf16, &[5, 2]);
        let rows = ints(&device, &[0, 1]);
        for n in [0, 3] {
            let said = message(gather(&cx, &x, &rows, n, "rows"));
            assert!(said.contains(&format!("{n} rows of 2 indices")), "{said}");
        }
        let said = message(gather(&cx, &x, &blank(&device, DType::F32, &[2]), 1, "rows"));
        assert!(said.contains("f32"), "{said}");
        let said = message(gather(&cx, &blank(&device, DType::Bf16, &[5]), &rows, 1, "rows"));
        assert!(said.contains("[5]"), "{said}");
        let said = message(embed(&cx, &blank(&device, DType::F32, &[5, 2]), &step(&device, &[0]).batch()));
        assert!(said.contains("f32") && said.contains("bf16"), "{said}");
        assert!(meter.take().is_empty());
    }
}

#[test]
fn plan_and_cpu_allocate_the_same_bytes_and_count_the_same_cost() {
    for case in cases() {
        let reports = [device(), plan()].map(|device| {
            let meter = Meter::default();
            let cx = cx(&device, &meter, numerics(case.dtype));
            let table = blank(&device, case.dtype, &[case.table, case.hidden]);
            let step = step(&device, &vec![0; case.n]);
            device.begin_step();
            let x = embed(&cx, &table, &step.batch()).unwrap();
            let y = gather(&cx, &x, &ints(&device, &[0]), 1, "rows").unwrap();
            drop((x, y));
            (device.report(), meter.take())
        });
        assert_eq!(reports[0], reports[1], "{}", case.name);
        assert_eq!(reports[0].1[0].cost, cost(case.n, case.hidden, case.dtype, case.dtype, true));
    }
}
