//! The kernels that put rows where they belong: rotation by position, the write into the KV cache, rows by index.

use highwater::error::Result;
use highwater::num::DType;
use highwater::ops::attention::AttnDims;
use highwater::ops::kv_write::{self, KvPages};
use highwater::ops::{Batch, Cx, rope, rows};
use highwater::tensor::Tensor;

use super::mixers::{CHECKED_ROWS, CONTEXT, checked, near, steps};
use super::operands::{self, Maker, Steps, whole};
use super::shapes::{Op, Shape};
use super::work::{Checked, Work};

/// Under the root of a norm.
const EPS: f32 = 1e-6;
/// Tokens in the cache of a sequence whose next one is written: in the middle of its only page, as there are many copies.
const WRITTEN_AFTER: usize = 32;
/// What row indices are spread by: no small table divides it.
const SPREAD: usize = 2_654_435_761;

/// The kernel of a shape with `copies` copies of its operands; none where the shape is of another kind.
pub(super) fn build(shape: &Shape, make: &Maker, copies: usize) -> Result<Option<Box<dyn Work>>> {
    let m = shape.m;
    let each = |one: &dyn Fn() -> Result<Tensor>| (0..copies).map(|_| one()).collect::<Result<Vec<_>>>();
    Ok(Some(match shape.op {
        Op::Rope { dims, theta, decode } => {
            let (frequencies, factor) = rope::inv_freq(&rope::Rope { theta, rotary_dim: dims.rotary_dim, yarn: None })?;
            let mut inv_freq = make.empty(DType::F32, &[frequencies.len()])?;
            inv_freq.write(0, &frequencies)?;
            let weight = || make.normal(DType::F32, &[dims.head_dim], 0.0, 0.05);
            let (q_norm, k_norm) = (weight()?, weight()?);
            let qkvs = each(&|| make.activations(&[m, dims.qkv_cols()]))?;
            let steps = steps(make, copies, decode, m, CONTEXT)?;
            Box::new(Rotated { decode, dims, factor, qkvs, q_norm, k_norm, inv_freq, steps })
        }
        Op::KvWrite { dims, kv, decode } => {
            let steps = steps(make, copies, decode, m, WRITTEN_AFTER)?;
            let mut pages = KvPages::new(make.cx.device, kv, steps.pages, dims)?;
            let of_a_half = pages.k.shape().to_vec();
            (pages.k, pages.v) = (make.normal(kv, &of_a_half, 0.0, 1.0)?, make.normal(kv, &of_a_half, 0.0, 1.0)?);
            if kv == DType::U8 {
                (pages.k_scale, pages.v_scale) = (1.0 / 64.0, 1.0 / 64.0);
            }
            Box::new(Written { decode, dims, qkvs: each(&|| make.activations(&[m, dims.qkv_cols()]))?, pages, steps })
        }
        Op::Gather { table, cols } => {
            let indices = |copy: usize| -> Vec<i32> {
                (0..m).map(|row| ((copy * m + row + 1).wrapping_mul(SPREAD) % table) as i32).collect()
            };
            let indices = (0..copies).map(|copy| make.ints(&indices(copy))).collect::<Result<_>>()?;
            Box::new(Gathered { table: make.activations(&[table, cols])?, indices })
        }
        _ => return Ok(None),
    }))
}

/// In place: a row that was normed and rotated is normed and rotated again, and stays as large.
struct Rotated {
    decode: bool,
    dims: AttnDims,
    factor: f32,
    qkvs: Vec<Tensor>,
    q_norm: Tensor,
    k_norm: Tensor,
    inv_freq: Tensor,
    steps: Steps,
}

impl Rotated {
    fn apply(cx: &Cx, x: &mut Tensor, weights: [&Tensor; 3], factor: f32, dims: AttnDims, batch: &Batch) -> Result<()> {
        let [q_norm, k_norm, inv_freq] = weights;
        rope::qk_norm_rope(cx, x, q_norm, k_norm, inv_freq, factor, EPS, dims, batch)
    }
}

impl Work for Rotated {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let Rotated { dims, factor, qkvs, q_norm, k_norm, inv_freq, steps, .. } = self;
        Rotated::apply(cx, &mut qkvs[copy], [q_norm, k_norm, inv_freq], *factor, *dims, &steps.batch(copy))?;
        Ok(Vec::new())
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = checked(self.decode, self.qkvs[0].rows());
        let steps = steps(&Maker::new(*cpu), 1, self.decode, few, CONTEXT)?;
        // Copied first: the rows change in place.
        let mut want = operands::rows(cpu, &self.qkvs[0], 0..few)?;
        let weights = [&self.q_norm, &self.k_norm, &self.inv_freq].map(|weight| whole(cpu, weight));
        let [q_norm, k_norm, inv_freq] = weights;
        let weights = [&q_norm?, &k_norm?, &inv_freq?];
        Rotated::apply(cpu, &mut want, weights, self.factor, self.dims, &steps.batch(0))?;
        self.run(cx, 0)?;
        near(&self.qkvs[0], &want, few)
    }
}

struct Written {
    decode: bool,
    dims: AttnDims,
    qkvs: Vec<Tensor>,
    pages: KvPages,
    steps: Steps,
}

impl Written {
    /// The context with the type that the pages have.
    fn cx<'a>(&self, cx: &Cx<'a>) -> Cx<'a> {
        let mut cx = *cx;
        cx.numerics.kv = self.pages.k.dtype();
        cx
    }
}

impl Work for Written {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let cx = self.cx(cx);
        kv_write::write(&cx, &self.qkvs[copy], self.dims, &mut self.pages, &self.steps.batch(copy))?;
        Ok(Vec::new())
    }

    fn check(&mut self, cx: &Cx, cpu: &Cx) -> Result<Checked> {
        let few = checked(self.decode, self.qkvs[0].rows());
        let cpu = self.cx(cpu);
        let steps = steps(&Maker::new(cpu), 1, self.decode, few, WRITTEN_AFTER)?;
        let mut want = KvPages::new(cpu.device, self.pages.k.dtype(), 1, self.dims)?;
        let first = 0..steps.pages;
        (want.k, want.v) =
            (operands::rows(&cpu, &self.pages.k, first.clone())?, operands::rows(&cpu, &self.pages.v, first)?);
        (want.k_scale, want.v_scale) = (self.pages.k_scale, self.pages.v_scale);
        let qkv = operands::rows(&cpu, &self.qkvs[0], 0..few)?;
        kv_write::write(&cpu, &qkv, self.dims, &mut want, &steps.batch(0))?;
        self.run(cx, 0)?;
        // Of a decode the pages of the checked sequences, of a prompt its checked tokens: what follows is not written alike.
        let token = self.dims.kv_cols() * want.k.dtype().bytes() as usize;
        let bytes = if self.decode { want.k.bytes() as usize } else { few * token };
        let same = |got: &Tensor, want: &Tensor| -> Result<Checked> {
            Ok(Checked::same(&got.read_range::<u8>(0, bytes)?, &want.read_range::<u8>(0, bytes)?))
        };
        Ok(same(&self.pages.k, &want.k)?.and(same(&self.pages.v, &want.v)?))
    }
}

/// One table, and other indices for each copy: it is larger than a cache.
struct Gathered {
    table: Tensor,
    indices: Vec<Tensor>,
}

impl Work for Gathered {
    fn run(&mut self, cx: &Cx, copy: usize) -> Result<Vec<Tensor>> {
        let indices = &self.indices[copy];
        Ok(vec![rows::gather(cx, &self.table, indices, indices.len(), "y")?])
    }

    fn check(&mut self, cx: &Cx, _: &Cx) -> Result<Checked> {
        let y = self.run(cx, 0)?.remove(0);
        let few = y.rows().min(CHECKED_ROWS);
        let row = y.cols() * y.dtype().bytes() as usize;
        let (mut got, mut want) = (Vec::new(), Vec::new());
        // The table is not copied for it: a row of a gather is a row of the table.
        for (at, index) in self.indices[0].read_range::<i32>(0, few)?.into_iter().enumerate() {
            got.extend(y.read_range::<u8>(at * row, row)?);
            want.extend(self.table.read_range::<u8>(index as usize * row, row)?);
        }
        Ok(Checked::same(&got, &want))
    }
}
