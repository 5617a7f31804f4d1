//! `doctor --calibrate`: a card's memory outside the slab, each part as the difference that its own event made: the
//! context, cuBLASLt with its kernels and workspace, every kernel of this program, and graphs. What comes out is the entry
//! for `src/device/cards.rs`.

use std::fmt::Write as _;

use anyhow::{Context, Result, anyhow};
use highwater::device::cuda::blas::Product;
use highwater::device::cuda::{Arg, Cuda, Grid, Kernel, Outside, info};
use highwater::device::{Arch, Device, cards};
use highwater::error::mib;
use highwater::mem::{End, Layer, Tag};
use highwater::num::DType;
use highwater::ops::launch;
use serde::Serialize;

use crate::nvml::Management;
use crate::{doctor, kernels};

/// The slab: large enough for the products below, small beside what is measured.
const SLAB_BYTES: u64 = 512 << 20;
/// Products whose kernels cuBLASLt loads: rows of x as in decode and in prefill.
const ROWS: [u64; 6] = [1, 8, 16, 64, 512, 4096];
/// Outputs and inputs of those products.
const WIDTH: u64 = 4096;
/// Nodes of a graph: 64 layers of about sixteen launches.
const GRAPH_NODES: usize = 1024;
/// Graphs: a decode step for each batch bucket up to 64, one at a time.
const GRAPHS: usize = 7;

/// What was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    card: String,
    title: String,
    driver: String,
    date: String,
    kernels: usize,
    entry_points: usize,
    graphs: usize,
    graph_nodes: usize,
    outside: Outside,
    /// What the entry holds: all parts and what none of them explains.
    bytes: u64,
    rust: String,
}

/// Opens card `ordinal`, loads all there is to load, and adds up what that took.
pub(crate) fn measure(ordinal: u32) -> Result<Measured> {
    let card = info::card(ordinal)?;
    let spec = cards::of(&card)?;
    let (name, title) = (spec.name, spec.title);
    let device = Device::cuda(spec, ordinal, SLAB_BYTES)?;
    let cuda = device.as_cuda().context("a card's device has the CUDA arm")?;
    let here = |kernel: &Kernel| launch::runs_on(*kernel, cuda.arch());
    let variants: Vec<Kernel> = kernels::compilations(&launch::variants()).into_iter().filter(here).collect();
    // Loading measures memory and goes one by one; compiling does not, and fills the cache that loading reads.
    let jobs: Vec<(Kernel, Arch)> = variants.iter().map(|kernel| (*kernel, cuda.arch())).collect();
    drop(kernels::compile_side_by_side(&jobs));
    let mut entry_points = 0;
    for variant in &variants {
        entry_points += cuda.preload(*variant).with_context(|| variant.variant())?;
    }
    let take = |name, bytes| device.alloc(End::Persistent, Tag::new(Layer::Other, "calibrate", name), bytes);
    let most = ROWS[ROWS.len() - 1] * WIDTH * 4;
    let (x, w, y) = (take("x", most)?, take("w", WIDTH * WIDTH * 2)?, take("y", most)?);
    let (x, w, y) = (Arg::Address(x.address()), Arg::Address(w.address()), Arg::Address(y.address()));
    for m in ROWS {
        for out in [DType::Bf16, DType::F32] {
            cuda.product(Product::dense(m, WIDTH, WIDTH, DType::Bf16, out), x, w, y)?;
        }
    }
    cuda.synchronize()?;
    let graphs = (0..GRAPHS).map(|_| cuda.capture(|| nodes(cuda, x, y))).collect::<Result<Vec<_>, _>>()?;
    for graph in &graphs {
        cuda.replay(graph)?;
    }
    cuda.synchronize()?;
    let outside = cuda.outside()?;
    let driver = doctor::driver_version(Management::open().ok().as_ref());
    let driver = driver.ok_or_else(|| anyhow!("the driver does not tell its version"))?;
    let bytes = outside.total() + outside.unattributed.max(0) as u64;
    let date = doctor::today();
    let rust = format!("Overhead::Measured {{ bytes: {bytes}, date: \"{date}\", driver: \"{driver}\" }}");
    Ok(Measured {
        card: name.to_owned(),
        title: title.to_owned(),
        driver,
        date,
        kernels: variants.len(),
        entry_points,
        graphs: GRAPHS,
        graph_nodes: GRAPH_NODES,
        outside,
        bytes,
        rust,
    })
}

/// As many launches as a graph has nodes, each of one block.
fn nodes(cuda: &Cuda, x: Arg, y: Arg) -> highwater::error::Result<()> {
    let kernel = Kernel::new("stream", "stream_copy");
    (0..GRAPH_NODES).try_for_each(|_| cuda.launch(kernel, Grid::new([1, 1, 1], 256), &[x, y, Arg::I64(1)]))
}

impl Measured {
    pub(crate) fn text(&self) -> String {
        let Outside { context, modules, blas, graphs, unattributed } = self.outside;
        let mut text = format!("{} ({}), driver {}, {}\n", self.title, self.card, self.driver, self.date);
        let kernels = format!("{} kernel files, {} entry points", self.kernels, self.entry_points);
        let captured = format!("{} graphs of {} nodes", self.graphs, self.graph_nodes);
        for (part, bytes, what) in [
            ("context", context, "with the stream and pinned memory"),
            ("modules", modules, kernels.as_str()),
            ("cuBLASLt", blas, "the handle, its kernels, its workspace"),
            ("graphs", graphs, captured.as_str()),
        ] {
            let _ = writeln!(text, "  {part:<13} {bytes:>13} B  {:>10}  {what}", mib(bytes));
        }
        let _ = writeln!(text, "  {:<13} {unattributed:>13} B              by none of these", "unattributed");
        let _ = writeln!(text, "  {:<13} {:>13} B  {:>10}", "in all", self.bytes, mib(self.bytes));
        let _ = writeln!(text, "\nfor {} in src/device/cards.rs:\n{}", self.card, self.rust);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_is_rust_and_the_parts_are_listed() {
        let outside =
            Outside { context: 552 << 20, modules: 40 << 20, blas: 70 << 20, graphs: 8 << 20, unattributed: -4096 };
        let measured = Measured {
            card: "h200".into(),
            title: "NVIDIA H200".into(),
            driver: "580.95".into(),
            date: "2026-11-30".into(),
            kernels: 12,
            entry_points: 60,
            graphs: GRAPHS,
            graph_nodes: GRAPH_NODES,
            outside,
            bytes: outside.total(),
            rust: format!("Overhead::Measured {{ bytes: {}, .. }}", outside.total()),
        };
        let text = measured.text();
        for part in [
            "552.0 MiB",
            "12 kernel files, 60 entry points",
            "-4096 B",
            "670.0 MiB",
            "Overhead::Measured { bytes: 702545920",
        ] {
            assert!(text.contains(part), "{part} is missing in:\n{text}");
        }
    }
}
