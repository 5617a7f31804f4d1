//! Codes and scales from a checkpoint into rows of tensors, on the device with data and on the plan.

use std::sync::Arc;

use highwater::checkpoint::Source;
use highwater::device::{Device, cards};
use highwater::mem::{End, Layer, Tag};
use highwater::num::DType;
use highwater::ops::{Cx, Meter, Numerics};
use highwater::tensor::{Tensor, byte_size};

use super::open;

fn device() -> Arc<Device> {
    Device::cpu_poisoned(cards::find("h200").unwrap(), 64 << 20).unwrap()
}

fn cx<'a>(device: &'a Arc<Device>, meter: &'a Meter) -> Cx<'a> {
    Cx { device, numerics: Numerics::F32, layer: Layer::Attention, bound: None, meter, routes: None }
}

fn blank(device: &Arc<Device>, dtype: DType, shape: &[usize]) -> Tensor {
    let bytes = byte_size(dtype, shape).unwrap();
    let buffer = device.alloc(End::Persistent, Tag::new(Layer::Attention, "test", "weight"), bytes).unwrap();
    Tensor::new(buffer, dtype, shape).unwrap()
}

fn source(case: &str) -> Source {
    Source::Disk(Box::new(open(case)))
}

#[test]
fn experts_fill_rows_of_one_tensor() {
    let (source, reference) = (source("ct_nvfp4"), open("ct_nvfp4"));
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter);
    let (mut codes, mut scales) = (blank(&device, DType::U8, &[8 * 32, 32]), blank(&device, DType::U8, &[8 * 32, 4]));
    for e in (0..8).rev() {
        let module = format!("layers.1.mlp.experts.{e}.up_proj");
        source.fill_codes(&cx, &mut codes, e * 32, 32, &module).unwrap();
        source.fill_scales(&cx, &mut scales, e * 32, 32, &module).unwrap();
        assert_eq!(source.row_scale(&module).unwrap(), reference.row_scale(&module).unwrap());
        assert_eq!(source.verdict(&module).unwrap(), reference.verdict(&module).unwrap());
    }
    for e in 0..8 {
        let module = format!("layers.1.mlp.experts.{e}.up_proj");
        let (mut c, mut s) = (vec![0; 32 * 32], vec![0; 32 * 4]);
        reference.read_codes(&module, 0..32, &mut c).unwrap();
        reference.read_group_scales(&module, 0..32, &mut s).unwrap();
        assert_eq!(codes.host::<u8>().unwrap()[e * 1024..(e + 1) * 1024], c, "{module}");
        assert_eq!(scales.host::<u8>().unwrap()[e * 128..(e + 1) * 128], s, "{module}");
    }
}

#[test]
fn block_scales_arrive_as_f32_rows_of_blocks() {
    for case in ["ct_fp8_block", "hf_fp8_block"] {
        let (source, reference) = (source(case), open(case));
        let (device, meter) = (device(), Meter::default());
        let module = "layers.0.linear_attn.in_proj_qkv";
        let m = reference.module(module).unwrap();
        let (rows, cols) = (m.rows.div_ceil(128), m.cols.div_ceil(128));
        let mut scales = blank(&device, DType::F32, &[rows + 3, cols]);
        source.fill_scales(&cx(&device, &meter), &mut scales, 2, rows, module).unwrap();
        let got = &scales.host::<f32>().unwrap()[2 * cols..(2 + rows) * cols];
        assert_eq!(got, reference.block_scales(module).unwrap(), "{case}");
        assert!(scales.host::<f32>().unwrap()[..2 * cols].iter().all(|v| v.is_nan()), "rows before are left alone");
    }
}

#[test]
fn the_plan_looks_modules_up_and_reads_nothing() {
    let source = source("ct_nvfp4");
    let device = Device::plan(cards::find("h200").unwrap(), 64 << 20);
    let meter = Meter::default();
    let cx = cx(&device, &meter);
    let mut codes = blank(&device, DType::U8, &[32, 32]);
    source.fill_codes(&cx, &mut codes, 0, 32, "layers.1.mlp.experts.0.up_proj").unwrap();
    let error = source.fill_codes(&cx, &mut codes, 0, 32, "layers.9.mlp.experts.0.up_proj").unwrap_err();
    assert!(error.to_string().contains("layers.9.mlp.experts.0.up_proj is not a linear module"), "{error}");
    // Whether parts fuse depends on the input's scale, so that one is read here too.
    assert!(source.verdict("layers.3.self_attn.q_proj").unwrap().input_scale.is_some());
}

#[test]
fn a_destination_of_another_shape_or_type_is_an_error() {
    let (device, meter) = (device(), Meter::default());
    let cx = cx(&device, &meter);
    let nvfp4 = source("ct_nvfp4");
    let module = "layers.1.mlp.experts.0.up_proj";
    for (dtype, shape, first, rows) in [
        (DType::U8, [32, 64], 0, 32),
        (DType::U8, [31, 32], 0, 31),
        (DType::U8, [32, 32], 1, 32),
        (DType::F32, [32, 32], 0, 32),
        (DType::U8, [64, 32], 0, 64),
    ] {
        let mut t = blank(&device, dtype, &shape);
        let error = nvfp4.fill_codes(&cx, &mut t, first, rows, module).unwrap_err().to_string();
        assert!(error.contains(module) && error.contains("u8 [32, 32]"), "{error}");
        let error = nvfp4.fill_scales(&cx, &mut t, first, rows, module).unwrap_err().to_string();
        assert!(error.contains(module) && error.contains("u8 [32, 4]"), "{error}");
    }
    let block = source("ct_fp8_block");
    let mut t = blank(&device, DType::U8, &[3, 1]);
    let error = block.fill_scales(&cx, &mut t, 0, 3, "layers.0.linear_attn.in_proj_qkv").unwrap_err().to_string();
    assert!(error.contains("f32 [3, 1]"), "{error}");
    assert!(block.row_scale("layers.0.linear_attn.in_proj_qkv").is_err());
    // What is not quantised has neither codes nor scales.
    let mut t = blank(&device, DType::U8, &[4, 64]);
    let plain = "layers.0.linear_attn.in_proj_a";
    assert!(nvfp4.fill_codes(&cx, &mut t, 0, 4, plain).is_err());
    assert!(nvfp4.fill_scales(&cx, &mut t, 0, 4, plain).is_err());
    assert!(nvfp4.row_scale(plain).unwrap_err().to_string().contains(plain));
    assert!(nvfp4.verdict("embed_tokens").is_err());
}
