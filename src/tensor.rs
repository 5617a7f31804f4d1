//! A buffer with a shape and an element type. No arithmetic.

use half::bf16;

use crate::device::cuda::Arg;
use crate::device::{Buffer, Pod};
use crate::error::{Error, Result};
use crate::num::DType;

/// A float type activations are kept in; arithmetic is in f32, stores round to nearest even.
pub trait Elem: Pod {
    /// The type's name as a tensor's element type.
    const DTYPE: DType;
    /// The value, exactly.
    fn to_f32(self) -> f32;
    /// The nearest value, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Elem for f32 {
    const DTYPE: DType = DType::F32;
    #[inline]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline]
    fn from_f32(value: f32) -> f32 {
        value
    }
}

impl Elem for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline]
    fn from_f32(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
}

/// Runs `$body` with `$t` standing for the float type of a tensor's `$dtype`; any other type is a shape error of `$op`.
#[macro_export]
macro_rules! with_elem {
    ($op:expr, $dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            $crate::num::DType::F32 => {
                type $t = f32;
                $body
            }
            $crate::num::DType::Bf16 => {
                type $t = $crate::num::bf16;
                $body
            }
            other => Err($crate::error::Error::shape($op, format!("elements are {other}, must be f32 or bf16"))),
        }
    };
}

/// The most dimensions a tensor has.
pub const MAX_RANK: usize = 4;

/// A dense row-major tensor that owns its buffer.
#[derive(Debug)]
pub struct Tensor {
    buffer: Buffer,
    dtype: DType,
    shape: [usize; MAX_RANK],
    rank: usize,
}

impl Tensor {
    /// Puts a shape on a buffer, which must have the bytes for it.
    pub fn new(buffer: Buffer, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = byte_size(dtype, shape)?;
        if shape.is_empty() || shape.len() > MAX_RANK || buffer.bytes() < bytes {
            return Err(Error::shape(
                "tensor",
                format!(
                    "shape {shape:?} of {dtype} needs {bytes} B in 1 to {MAX_RANK} dimensions, the buffer has {} B",
                    buffer.bytes()
                ),
            ));
        }
        let mut dims = [1; MAX_RANK];
        dims[..shape.len()].copy_from_slice(shape);
        Ok(Tensor { buffer, dtype, shape: dims, rank: shape.len() })
    }

    /// The same elements under another shape of as many.
    pub fn reshape(self, shape: &[usize]) -> Result<Tensor> {
        if shape.iter().product::<usize>() != self.len() {
            return Err(Error::shape("tensor", format!("{:?} reshaped to {shape:?}", self.shape())));
        }
        Tensor::new(self.buffer, self.dtype, shape)
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// The first dimension.
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row: the product of the other dimensions.
    pub fn cols(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of the elements, without padding.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.dtype.bytes()
    }

    /// The buffer.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The buffer, to write.
    pub fn buffer_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }

    /// The elements, where the device holds data in host memory.
    pub fn host<T: Pod>(&self) -> Result<&[T]> {
        Ok(&self.buffer.host::<T>()?[..self.len() * self.dtype.bytes() as usize / size_of::<T>()])
    }

    /// The elements, to write.
    pub fn host_mut<T: Pod>(&mut self) -> Result<&mut [T]> {
        let len = self.len() * self.dtype.bytes() as usize / size_of::<T>();
        Ok(&mut self.buffer.host_mut::<T>()?[..len])
    }

    /// All elements, copied to the host from any device that holds data.
    pub fn read<T: Pod>(&self) -> Result<Vec<T>> {
        self.read_range(0, self.len() * self.dtype.bytes() as usize / size_of::<T>())
    }

    /// `count` elements from element `first` on, copied to the host.
    pub fn read_range<T: Pod>(&self, first: usize, count: usize) -> Result<Vec<T>> {
        self.buffer.read((first * size_of::<T>()) as u64, count)
    }

    /// Copies `values` to element `first` on, on any device that holds data; nothing on the plan device.
    pub fn write<T: Pod>(&mut self, first: usize, values: &[T]) -> Result<()> {
        self.buffer.write((first * size_of::<T>()) as u64, values)
    }

    /// The first element's address, as a kernel takes it.
    pub fn arg(&self) -> Arg {
        Arg::Address(self.buffer.address())
    }

    /// The address of an element.
    pub fn arg_at(&self, element: usize) -> Arg {
        Arg::Address(self.buffer.address() + element as u64 * self.dtype.bytes())
    }

    /// Columns `from..from + cols` of every row.
    pub fn columns(&self, from: usize, cols: usize) -> View<'_> {
        View { tensor: self, from, cols }
    }

    /// Every column.
    pub fn view(&self) -> View<'_> {
        View { tensor: self, from: 0, cols: self.cols() }
    }
}

/// Some columns of every row of a tensor.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    tensor: &'a Tensor,
    from: usize,
    cols: usize,
}

impl<'a> View<'a> {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.tensor.rows()
    }

    /// Columns of the view.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row's start to the next one's.
    pub fn pitch(&self) -> usize {
        self.tensor.cols()
    }

    /// The first column.
    pub fn from(&self) -> usize {
        self.from
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype
    }

    /// The address of the first row's first column, as a kernel takes it.
    pub fn arg(&self) -> Arg {
        self.tensor.arg_at(self.from)
    }

    /// The tensor behind.
    pub fn tensor(&self) -> &'a Tensor {
        self.tensor
    }

    /// The elements as rows to index, where the device holds data in host memory.
    pub fn host<T: Pod>(&self) -> Result<Rows<'a, T>> {
        if self.from + self.cols > self.pitch() {
            return Err(Error::shape(
                "view",
                format!("columns {}..{} of {}", self.from, self.from + self.cols, self.pitch()),
            ));
        }
        Ok(Rows { data: self.tensor.host()?, from: self.from, cols: self.cols, pitch: self.pitch() })
    }
}

/// Rows of a view in host memory.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    data: &'a [T],
    from: usize,
    cols: usize,
    pitch: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Dense rows of `cols` elements.
    pub fn dense(data: &'a [T], cols: usize) -> Rows<'a, T> {
        Rows { data, from: 0, cols, pitch: cols }
    }

    /// Row `i`.
    #[inline]
    pub fn row(&self, i: usize) -> &'a [T] {
        let start = i * self.pitch + self.from;
        &self.data[start..start + self.cols]
    }
}

/// Bytes of `shape` elements of `dtype`; an error where the product overflows.
pub fn byte_size(dtype: DType, shape: &[usize]) -> Result<u64> {
    shape
        .iter()
        .try_fold(dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim as u64))
        .ok_or_else(|| Error::shape("tensor", format!("shape {shape:?} of {dtype} has more bytes than 64 bits count")))
}
