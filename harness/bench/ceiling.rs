//! What a card can do at most, measured in the same process: reading as many bytes, and cuBLASLt's largest products.

use std::collections::HashMap;

use highwater::device::cuda::blas::Product;
use highwater::error::Result;
use highwater::num::DType;
use highwater::ops::launch::stream;
use highwater::ops::{Cost, Cx, cost::Unit};
use highwater::tensor::Tensor;

use super::operands::Maker;
use super::rig::Rig;
use super::time::Timing;

/// Rows, outputs and inputs of the products that give the ceiling of arithmetic.
pub(super) const PRODUCT: u64 = 8192;
/// Sizes within a sixteenth of a power of two share a measurement.
const SIZES_PER_DOUBLING: f64 = 16.0;
/// What a product reads and writes at a time: whole vectors.
const VECTOR_BYTES: u64 = 16;

/// Ceilings, measured when they are first asked for.
#[derive(Debug, Default)]
pub(super) struct Ceilings {
    reads: HashMap<i64, f64>,
    bf16: Option<f64>,
    fp8: Option<f64>,
}

impl Ceilings {
    /// Seconds that a call of this cost takes at least: to read its bytes, or for its arithmetic on the tensor cores; and
    /// which of the two. None where there is no card to measure on.
    pub(super) fn seconds(&mut self, rig: &Rig, cost: &Cost) -> Result<Option<(f64, &'static str)>> {
        if !rig.on_card() {
            return Ok(None);
        }
        let bytes = cost.bytes();
        let key = ((bytes.max(1) as f64).log2() * SIZES_PER_DOUBLING).round() as i64;
        let per_byte = if let Some(seconds) = self.reads.get(&key) {
            *seconds
        } else {
            let seconds = read(rig, bytes)?.median() / bytes.max(1) as f64;
            self.reads.insert(key, seconds);
            seconds
        };
        let memory = per_byte * bytes as f64;
        let rate = match cost.unit {
            Unit::F32 => return Ok(Some((memory, "memory"))),
            Unit::Fp8 if rig.has_fp8() => rate(rig, &mut self.fp8, DType::U8)?,
            Unit::Fp8 | Unit::Bf16 => rate(rig, &mut self.bf16, DType::Bf16)?,
        };
        let compute = cost.flops as f64 / rate;
        Ok(Some(if compute > memory { (compute, "compute") } else { (memory, "memory") }))
    }
}

fn rate(rig: &Rig, known: &mut Option<f64>, operands: DType) -> Result<f64> {
    if let Some(rate) = known {
        return Ok(*rate);
    }
    let flops = 2.0 * (PRODUCT as f64).powi(3);
    let rate = flops / largest_product(rig, operands)?.median();
    *known = Some(rate);
    Ok(rate)
}

/// Reads of `bytes`, with the cache as the rows have it.
pub(super) fn read(rig: &Rig, bytes: u64) -> Result<Timing> {
    let vectors = bytes.div_ceil(VECTOR_BYTES).max(1) as usize;
    let copies = rig.copies(bytes);
    rig.with(|cx| {
        let make = Maker::new(*cx);
        let xs = (0..copies).map(|_| make.normal(DType::F32, &[4 * vectors], 0.0, 1.0)).collect::<Result<Vec<_>>>()?;
        let blocks = stream::blocks(cx.device, xs[0].bytes()) as usize;
        let mut fold = make.empty(DType::I32, &[blocks])?;
        let mut run = |copy: usize| stream::read(cx.device, &xs[copy], &mut fold).map(|()| Vec::new());
        run(0)?;
        rig.watch(cx).time(copies, bytes as f64 / cx.device.spec().rates.dram, &mut run)
    })
}

/// Copies of `bytes`, read and written.
pub(super) fn copy(rig: &Rig, bytes: u64) -> Result<Timing> {
    let vectors = bytes.div_ceil(VECTOR_BYTES).max(1) as usize;
    let copies = rig.copies(2 * bytes);
    rig.with(|cx| {
        let make = Maker::new(*cx);
        let operand = || make.normal(DType::F32, &[4 * vectors], 0.0, 1.0);
        let xs = (0..copies).map(|_| operand()).collect::<Result<Vec<_>>>()?;
        let mut ys = (0..copies).map(|_| operand()).collect::<Result<Vec<_>>>()?;
        let mut run = |copy: usize| stream::copy(cx.device, &xs[copy], &mut ys[copy]).map(|()| Vec::new());
        run(0)?;
        rig.watch(cx).time(copies, 2.0 * bytes as f64 / cx.device.spec().rates.dram, &mut run)
    })
}

/// cuBLASLt's product of 8192 cubed.
pub(super) fn largest_product(rig: &Rig, operands: DType) -> Result<Timing> {
    product(rig, Product::dense(PRODUCT, PRODUCT, PRODUCT, operands, DType::Bf16))
}

/// cuBLASLt's product of dense rows.
pub(super) fn product(rig: &Rig, product: Product) -> Result<Timing> {
    let Product { m, n, k, .. } = product;
    let bytes = Dense::bytes(product);
    let copies = rig.copies(bytes);
    rig.with(|cx| {
        let dense = Dense::new(&Maker::new(*cx), product, copies)?;
        drop(dense.run(cx, 0)?);
        let rates = cx.device.spec().rates;
        let floor = (bytes as f64 / rates.dram).max(2.0 * (m * n * k) as f64 / rates.fp8);
        rig.watch(cx).time(copies, floor, &mut |copy| dense.run(cx, copy))
    })
}

/// A product of dense rows with copies of its operands: bf16, or e4m3 codes under one scale each.
pub(super) struct Dense {
    product: Product,
    xs: Vec<Tensor>,
    ws: Vec<Tensor>,
}

impl Dense {
    /// Bytes of one copy and its result.
    pub(super) fn bytes(product: Product) -> u64 {
        let Product { m, n, k, operands, out, .. } = product;
        (m * k + n * k) * operands.bytes() + m * n * out.bytes()
    }

    pub(super) fn new(make: &Maker, product: Product, copies: usize) -> Result<Dense> {
        let [m, n, k] = [product.m, product.n, product.k].map(|size| size as usize);
        let each = |shape: &[usize], std: f32| {
            (0..copies).map(|_| make.normal(product.operands, shape, 0.0, std)).collect::<Result<Vec<_>>>()
        };
        Ok(Dense { product, xs: each(&[m, k], 1.0)?, ws: each(&[n, k], (k as f32).sqrt().recip())? })
    }

    pub(super) fn run(&self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let Product { m, n, out, .. } = self.product;
        let y = cx.alloc("bench", "y", out, &[m as usize, n as usize])?;
        if let Some(cuda) = cx.device.as_cuda() {
            cuda.product(self.product, self.xs[copy].arg(), self.ws[copy].arg(), y.arg())?;
        }
        Ok(vec![y])
    }
}
