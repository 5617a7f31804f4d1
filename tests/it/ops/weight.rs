//! Stored weights: values of every scheme, bytes of every buffer, forms that cannot be.

use std::sync::Arc;

use highwater::device::Device;
use highwater::mem::{ALIGN_BYTES, End, Layer, Tag};
use highwater::num::DType;
use highwater::ops::reference::weight::Matrix;
use highwater::ops::scheme::{ActScheme, Global, Grain, Scheme};
use highwater::ops::weight::{InputScale, LinearSpec, Weight, layout};
use highwater::tensor::{Tensor, byte_size};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::rng;
use super::world::{blank, card, device, message, plan, tensor};

/// The value of an e4m3 code, by the formula.
pub(super) fn e4m3(code: u8) -> f64 {
    let (e, f) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = if e == 0 { f / 512.0 } else { (1.0 + f / 8.0) * 2f64.powi(e - 7) };
    if code < 128 { magnitude } else { -magnitude }
}

/// The value of an e2m1 code.
pub(super) fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code as usize & 7];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// A weight drawn at random, with what its buffers mean.
#[derive(Debug, Clone)]
pub struct Synth {
    pub spec: LinearSpec,
    pub codes: Vec<u8>,
    /// Of FP8 blocks.
    pub block_scales: Vec<f32>,
    /// Of NVFP4 groups.
    pub group_scales: Vec<u8>,
    pub row_scales: Vec<f32>,
    /// The scale of its input, where it takes one.
    pub input: f32,
}

impl Synth {
    /// Any finite code; scales within a factor of four, so that values are about one over the root of the width.
    pub fn new(rng: &mut ChaCha8Rng, spec: LinearSpec) -> Synth {
        let (rows, cols) = (spec.rows, spec.cols);
        let near = |rng: &mut ChaCha8Rng, at: f32| at * rng.random_range(0.5..2.0f32);
        let width = (cols as f32).sqrt();
        let mut synth = Synth {
            spec,
            codes: Vec::new(),
            block_scales: Vec::new(),
            group_scales: Vec::new(),
            row_scales: Vec::new(),
            input: 0.0,
        };
        match spec.scheme {
            Scheme::Plain(_) => panic!("not quantised"),
            Scheme::Fp8(grain) => {
                let finite = |rng: &mut ChaCha8Rng| rng.random_range(0..0x7Fu8) | rng.random_range(0..2u8) << 7;
                synth.codes = (0..rows * cols).map(|_| finite(rng)).collect();
                if grain == Grain::Block {
                    let grid = rows / spec.segment_rows * spec.segment_rows.div_ceil(128) * cols.div_ceil(128);
                    synth.block_scales = (0..grid).map(|_| near(rng, 0.01 / width)).collect();
                } else {
                    synth.row_scales = (0..rows).map(|_| near(rng, 0.01 / width)).collect();
                }
                synth.input = near(rng, 0.01);
            }
            Scheme::Nvfp4(global) => {
                synth.codes = (0..rows * cols / 2).map(|_| rng.random_range(0..=255)).collect();
                synth.group_scales = (0..rows * cols / 16).map(|_| rng.random_range(1..0x7F)).collect();
                let per_row = if global == Global::Divides { 60.0 * width } else { 1.0 / (60.0 * width) };
                synth.row_scales = (0..rows).map(|_| near(rng, per_row)).collect();
                synth.input = near(rng, if global == Global::Divides { 900.0 } else { 1.0 / 900.0 });
            }
        }
        synth
    }

    /// Rows `first..first + rows` as a weight of their own; whole segments.
    pub fn slice(&self, first: usize, rows: usize) -> Synth {
        let (cols, segment) = (self.spec.cols, self.spec.segment_rows);
        let part = |all: &[u8], per_row: usize| all[first * per_row..(first + rows) * per_row].to_vec();
        let mut slice = self.clone();
        slice.spec.rows = rows;
        slice.spec.segment_rows = rows;
        if self.spec.scheme == Scheme::Fp8(Grain::Block) {
            assert!(first % segment == 0 && rows % segment == 0);
            let per_segment = segment.div_ceil(128) * cols.div_ceil(128);
            slice.block_scales =
                self.block_scales[first / segment * per_segment..(first + rows) / segment * per_segment].to_vec();
            slice.spec.segment_rows = segment;
        } else {
            slice.row_scales = self.row_scales[first..first + rows].to_vec();
        }
        match self.spec.scheme {
            Scheme::Nvfp4(_) => {
                slice.codes = part(&self.codes, cols / 2);
                slice.group_scales = part(&self.group_scales, cols / 16);
            }
            _ => slice.codes = part(&self.codes, cols),
        }
        slice
    }

    /// On a device; its input's scale is one for all rows.
    pub fn on(&self, device: &Arc<Device>) -> Weight {
        let stored = matches!(self.spec.act, ActScheme::Fp8Tensor | ActScheme::Nvfp4);
        self.with(device, if stored { InputScale::One(self.input) } else { InputScale::None })
    }

    /// On a device, with an input scale for each of equal groups of rows where it takes any.
    pub fn on_each(&self, device: &Arc<Device>, scales: &[f32]) -> Weight {
        let stored = matches!(self.spec.act, ActScheme::Fp8Tensor | ActScheme::Nvfp4);
        let each = || InputScale::Each(tensor(device, DType::F32, &[scales.len()], scales));
        self.with(device, if stored { each() } else { InputScale::None })
    }

    fn with(&self, device: &Arc<Device>, input: InputScale) -> Weight {
        let tag = Tag::new(Layer::Weights, "test", "weight");
        let mut w = Weight::alloc(device, tag, self.spec, input).unwrap();
        w.codes_mut().write(0, &self.codes).unwrap();
        if let Some(t) = w.row_scales_mut() {
            t.write(0, &self.row_scales).unwrap();
        }
        if let Some(t) = w.scales_mut() {
            match t.dtype() {
                DType::U8 => t.write(0, &self.group_scales).unwrap(),
                _ => t.write(0, &self.block_scales).unwrap(),
            }
        }
        w
    }

    /// The code's value and its scales, each exactly: (code, scale, global).
    fn factors(&self, row: usize, col: usize) -> (f64, f64, f64) {
        let LinearSpec { cols, scheme, segment_rows, .. } = self.spec;
        match scheme {
            Scheme::Nvfp4(_) => {
                let byte = self.codes[(row * cols + col) / 2];
                let code = if col % 2 == 0 { byte & 15 } else { byte >> 4 };
                (e2m1(code), e4m3(self.group_scales[row * (cols / 16) + col / 16]), self.row_scales[row].into())
            }
            Scheme::Fp8(Grain::Block) => {
                let (segment, inside) = (row / segment_rows, row % segment_rows);
                let block_row = segment * segment_rows.div_ceil(128) + inside / 128;
                let scale = self.block_scales[block_row * cols.div_ceil(128) + col / 128];
                (e4m3(self.codes[row * cols + col]), scale.into(), 1.0)
            }
            _ => (e4m3(self.codes[row * cols + col]), self.row_scales[row].into(), 1.0),
        }
    }

    /// An element, as the product of its factors in f64.
    pub fn exact(&self, row: usize, col: usize) -> f64 {
        let (code, scale, global) = self.factors(row, col);
        if self.spec.scheme == Scheme::Nvfp4(Global::Divides) { code * scale / global } else { code * scale * global }
    }

    /// An element in f32, in the peers' order of operations.
    pub fn written(&self, row: usize, col: usize) -> f32 {
        let (code, scale, global) = self.factors(row, col);
        let (code, scale, global) = (code as f32, scale as f32, global as f32);
        match self.spec.scheme {
            Scheme::Nvfp4(Global::Divides) => code * (scale / global),
            Scheme::Nvfp4(Global::Multiplies) => code * (scale * global),
            _ => code * scale,
        }
    }
}

/// Every quantised scheme with the input scheme it comes with.
pub const SCHEMES: [(Scheme, ActScheme); 6] = [
    (Scheme::Fp8(Grain::Tensor), ActScheme::Fp8Tensor),
    (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Token),
    (Scheme::Fp8(Grain::Block), ActScheme::Fp8Group),
    (Scheme::Fp8(Grain::Channel), ActScheme::Fp8Tensor),
    (Scheme::Nvfp4(Global::Divides), ActScheme::Nvfp4),
    (Scheme::Nvfp4(Global::Multiplies), ActScheme::Nvfp4),
];

/// Forms of each scheme: one segment and several, whole blocks and partial ones.
fn forms() -> Vec<LinearSpec> {
    let mut forms = Vec::new();
    for (scheme, act) in SCHEMES {
        for (rows, cols, segment_rows) in [(1, 16, 1), (130, 272, 130), (6, 144, 2), (390, 48, 130), (256, 256, 128)] {
            forms.push(LinearSpec { rows, cols, scheme, act, segment_rows });
        }
        if matches!(scheme, Scheme::Fp8(_)) {
            forms.push(LinearSpec { rows: 7, cols: 131, scheme, act, segment_rows: 7 });
        }
    }
    forms
}

#[test]
fn every_element_is_the_peers_order_of_f32_operations_and_near_the_exact_product() {
    for (i, spec) in forms().into_iter().enumerate() {
        let synth = Synth::new(&mut rng(i as u64), spec);
        let w = synth.on(&device());
        let matrix = Matrix::weight(&w).unwrap();
        let mut row = vec![f32::NAN; spec.cols];
        for r in 0..spec.rows {
            matrix.widen(r, 0, &mut row);
            for (c, &got) in row.iter().enumerate() {
                let (written, exact) = (synth.written(r, c), synth.exact(r, c));
                assert_eq!(got.to_bits(), written.to_bits(), "{spec:?} [{r}, {c}]");
                // FP8 rounds once; NVFP4's scale and product once each, the first error grown by up to 1.5 in ulps.
                let ulp = f64::from(f32::from_bits(got.abs().to_bits() + 1)) - f64::from(got.abs());
                let bound = if matches!(spec.scheme, Scheme::Fp8(_)) { 0.5 } else { 1.25 };
                assert!((f64::from(got) - exact).abs() <= bound * ulp, "{spec:?} [{r}, {c}]: {got} for {exact}");
            }
            // Any piece that starts at a multiple of 16 is that piece.
            for from in (0..spec.cols).step_by(16) {
                for len in [16, 48, spec.cols - from].into_iter().filter(|len| from + len <= spec.cols) {
                    let mut piece = vec![f32::NAN; len];
                    matrix.widen(r, from, &mut piece);
                    assert!(piece.iter().zip(&row[from..]).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }
}

#[test]
fn a_power_of_two_global_means_the_same_as_divisor_and_as_multiplier() {
    let spec =
        |global| LinearSpec { rows: 5, cols: 64, scheme: Scheme::Nvfp4(global), act: ActScheme::None, segment_rows: 5 };
    let mut divides = Synth::new(&mut rng(3), spec(Global::Divides));
    divides.row_scales = vec![1024.0, 4096.0, 0.25, 2.0, 1.0];
    let mut multiplies = Synth { spec: spec(Global::Multiplies), ..divides.clone() };
    multiplies.row_scales = divides.row_scales.iter().map(|g| 1.0 / g).collect();
    let device = device();
    let widened = |synth: &Synth| -> Vec<u32> {
        let w = synth.on(&device);
        let mut row = vec![f32::NAN; 64];
        let rows = 0..5;
        rows.flat_map(|r| {
            Matrix::weight(&w).unwrap().widen(r, 0, &mut row);
            row.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
        })
        .collect()
    };
    assert_eq!(widened(&divides), widened(&multiplies));
}

#[test]
fn bytes_are_those_of_the_layout_on_every_device() {
    // The head of incident two: codes and a scale per row, and its bf16 twin.
    let head = LinearSpec {
        rows: 248_320,
        cols: 2048,
        scheme: Scheme::Fp8(Grain::Channel),
        act: ActScheme::Fp8Token,
        segment_rows: 248_320,
    };
    assert_eq!(layout(&card(), &head).unwrap().bytes(), 248_320 * 2048 + 248_320 * 4);
    let twin = LinearSpec::plain(248_320, 2048, DType::Bf16);
    assert_eq!(layout(&card(), &twin).unwrap().bytes(), 248_320 * 2048 * 2);

    for (i, spec) in forms().into_iter().enumerate() {
        let bytes = layout(&card(), &spec).unwrap();
        let (rows, cols) = (spec.rows as u64, spec.cols as u64);
        let grid = (rows / spec.segment_rows as u64) * (spec.segment_rows as u64).div_ceil(128) * cols.div_ceil(128);
        let want = match spec.scheme {
            Scheme::Nvfp4(_) => (rows * cols / 2, rows * cols / 16, rows * 4),
            Scheme::Fp8(Grain::Block) => (rows * cols, grid * 4, 0),
            _ => (rows * cols, 0, rows * 4),
        };
        assert_eq!((bytes.codes, bytes.scales, bytes.row_scales), want, "{spec:?}");
        let synth = Synth::new(&mut rng(i as u64), spec);
        let resident = [device(), plan()].map(|device| {
            let before = device.report().resident;
            let w = synth.on(&device);
            assert_eq!(w.bytes(), bytes.bytes());
            device.report().resident - before
        });
        let padded: u64 = [want.0, want.1, want.2].into_iter().map(|b| b.next_multiple_of(ALIGN_BYTES)).sum();
        assert_eq!(resident, [padded; 2], "{spec:?}");
    }
}

#[test]
fn a_block_s_row_of_scales_counts_the_segments_above() {
    let spec = |rows, segment_rows| LinearSpec {
        rows,
        cols: 128,
        scheme: Scheme::Fp8(Grain::Block),
        act: ActScheme::None,
        segment_rows,
    };
    let of = |spec: LinearSpec, rows: [usize; 4]| rows.map(|row| spec.block_row(row));
    assert_eq!(of(spec(512, 512), [0, 128, 256, 384]), [0, 1, 2, 3]);
    assert_eq!(of(spec(520, 130), [0, 128, 130, 390]), [0, 1, 2, 6]);
    assert_eq!(of(spec(4, 1), [0, 1, 2, 3]), [0, 1, 2, 3]);
}

#[test]
fn what_cannot_be_a_weight_is_refused_with_its_numbers() {
    let base =
        LinearSpec { rows: 6, cols: 48, scheme: Scheme::Nvfp4(Global::Divides), act: ActScheme::None, segment_rows: 6 };
    let fp8 = LinearSpec { scheme: Scheme::Fp8(Grain::Block), ..base };
    let plain = LinearSpec::plain(6, 48, DType::Bf16);
    let refused: [(LinearSpec, &[&str]); 8] = [
        (LinearSpec { cols: 40, ..base }, &["[6, 40]", "multiple of 16"]),
        (LinearSpec { rows: 0, ..base }, &["[0, 48]", "empty"]),
        (LinearSpec { segment_rows: 4, ..fp8 }, &["[6, 48]", "segments of 4"]),
        (LinearSpec { segment_rows: 0, ..fp8 }, &["segments of 0"]),
        (LinearSpec { act: ActScheme::Nvfp4, ..fp8 }, &["NVFP4 input", "NVFP4 weight"]),
        (LinearSpec { act: ActScheme::Fp8Token, ..plain }, &["Fp8Token", "None"]),
        (LinearSpec { scheme: Scheme::Plain(DType::U8), ..plain }, &["f32 or bf16"]),
        (LinearSpec { rows: usize::MAX / 2, segment_rows: 1, ..fp8 }, &["more bytes"]),
    ];
    let tag = Tag::new(Layer::Weights, "test", "weight");
    for device in [device(), plan()] {
        for (spec, parts) in refused {
            let text = message(Weight::alloc(&device, tag, spec, InputScale::None));
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            assert_eq!(message(layout(&card(), &spec)), text);
        }
        let stored = LinearSpec { act: ActScheme::Nvfp4, ..base };
        let each = |n: usize| InputScale::Each(blank(&device, DType::F32, &[n]));
        let one = |v: f32| InputScale::One(v);
        for (spec, input, part) in [
            (stored, InputScale::None, "no input scale"),
            (stored, one(0.0), "input scale 0"),
            (stored, one(f32::NAN), "input scale NaN"),
            (stored, one(-1.0), "input scale -1"),
            (stored, each(4), "[4]"),
            (base, one(1.0), "must be none"),
            (LinearSpec { act: ActScheme::Fp8Token, ..fp8 }, each(2), "must be none"),
        ] {
            let text = message(Weight::alloc(&device, tag, spec, input));
            assert!(text.contains(part), "{text}");
        }
        assert!(Weight::alloc(&device, tag, stored, each(3)).is_ok());
        let bytes = byte_size(DType::I32, &[6, 48]).unwrap();
        let ints = Tensor::new(device.alloc(End::Persistent, tag, bytes).unwrap(), DType::I32, &[6, 48]).unwrap();
        assert!(message(Weight::plain(ints)).contains("f32 or bf16"));
    }
}
