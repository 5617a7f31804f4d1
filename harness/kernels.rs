//! `kernels`: every kernel file under every set of values that the published models need, compiled for every arch without
//! a card; what each entry point takes of a multiprocessor. One that does not compile, or that spills without being named
//! in [`SPILLS`], is a failure.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::anyhow;
use highwater::device::Arch;
use highwater::device::cuda::library::{self, Library};
use highwater::device::cuda::nvrtc::{self, Compiled};
use highwater::device::cuda::{Kernel, cache, sources};
use highwater::error::{Error, Result, mib};
use highwater::ops::launch;
use rayon::prelude::*;
use serde::Serialize;

use crate::cli::KernelsArgs;
use crate::failure::Failure;
use crate::out;
use crate::progress::Progress;
use crate::table::{Align, Table, number};

/// An entry point that may spill.
struct Spill {
    /// The entry point.
    entry: &'static str,
    /// Where.
    arch: Arch,
    /// Bytes a thread stores or reads back at most.
    bytes: u32,
    /// Why that is left.
    why: &'static str,
}

/// The exceptions to "no kernel spills".
const SPILLS: &[Spill] = &[
    Spill { entry: "moe_gemm_gate_up", arch: Arch::Sm80, bytes: 368, why: BLOCKED },
    Spill { entry: "moe_gemm_gate_up", arch: Arch::Sm86, bytes: 368, why: BLOCKED },
    Spill { entry: "moe_gemm_gate_up", arch: Arch::Sm100a, bytes: 88, why: BLOCKED },
    Spill { entry: "moe_gemm_down", arch: Arch::Sm80, bytes: 348, why: BLOCKED },
    Spill { entry: "moe_gemm_down", arch: Arch::Sm86, bytes: 348, why: BLOCKED },
    Spill { entry: "moe_gemm_down", arch: Arch::Sm100a, bytes: 40, why: BLOCKED },
    Spill { entry: "settle_bf16", arch: Arch::Sm86, bytes: 28, why: SETTLE },
    Spill { entry: "settle_bf16", arch: Arch::Sm89, bytes: 28, why: SETTLE },
    Spill { entry: "nvfp4_gemm", arch: Arch::Sm100a, bytes: 12, why: NVFP4 },
];
/// Tiles of experts in FP8 blocks.
const BLOCKED: &str = "two sets of sums, one for each 128 columns; a smaller tile would read the weights again";
/// The sampler's rows without a short list.
const SETTLE: &str =
    "one word, read back outside the loop over lanes; more registers would leave a block fewer a processor";
/// One tile of NVFP4 by NVFP4.
const NVFP4: &str = "three words outside the loop, on one arch";

/// One entry point of one compilation.
#[derive(Debug, Serialize)]
struct Row {
    variant: String,
    arch: String,
    entry: String,
    registers: u32,
    spill_stores: u32,
    spill_loads: u32,
    stack: u32,
    shared: u32,
    cubin_bytes: u64,
    cached: bool,
    /// Why its spills are left, where they are.
    exception: Option<&'static str>,
}

impl Row {
    fn spilled(&self) -> u32 {
        self.spill_stores.max(self.spill_loads)
    }
}

/// Compilations that failed in the same words.
#[derive(Debug, Serialize)]
struct Broken {
    variant: String,
    archs: Vec<String>,
    message: String,
}

#[derive(Debug, Serialize)]
struct Report {
    nvrtc: String,
    library: String,
    compilations: usize,
    cached: usize,
    seconds: f64,
    kernels: Vec<Row>,
    failed: Vec<Broken>,
}

pub(crate) fn kernels(args: &KernelsArgs) -> Result<(), Failure> {
    let variants = chosen(args.filter.as_deref(), &launch::variants())?;
    let archs = if args.archs.is_empty() { Arch::CARDS.to_vec() } else { args.archs.clone() };
    let library = library::load(Library::Nvrtc)?;
    let report = compile(&variants, &archs, library);
    if args.json {
        out::print(&(serde_json::to_string_pretty(&report)? + "\n"))?;
    } else {
        out::print(&(table(&report.kernels).text() + &summary(&report, &variants, &archs)))?;
    }
    match complaints(&report) {
        None => Ok(()),
        Some(complaints) => Err(anyhow!(complaints).into()),
    }
}

/// One kernel of each compilation whose variant has `filter` in its name; all of them without one.
fn chosen(filter: Option<&str>, kernels: &[Kernel]) -> Result<Vec<Kernel>> {
    let all = compilations(kernels);
    let names: Vec<String> = all.iter().map(Kernel::variant).collect();
    let wanted = filter.unwrap_or("");
    let some: Vec<Kernel> = all.into_iter().filter(|kernel| kernel.variant().contains(wanted)).collect();
    if some.is_empty() {
        let what = format!("no kernel has {wanted:?} in its name; the kernels are {}", names.join(", "));
        return Err(Error::Request { param: "FILTER", what });
    }
    Ok(some)
}

/// One kernel of each compilation.
pub(crate) fn compilations(kernels: &[Kernel]) -> Vec<Kernel> {
    let mut all: Vec<Kernel> = kernels.iter().map(Kernel::module_key).collect();
    all.sort();
    all.dedup();
    all
}

/// Compiles each job, or takes it from the cache, on every core; for each the module and whether it was in the cache.
pub(crate) fn compile_side_by_side(jobs: &[(Kernel, Arch)]) -> Vec<Result<(Compiled, bool)>> {
    let progress = Progress::kernels(jobs.len() as u64);
    let done = jobs
        .par_iter()
        .map(|(kernel, arch)| {
            progress.doing(&format!("{} for {arch}", kernel.variant()));
            let compiled = sources::kernel(kernel.module()).and_then(|source| cache::compiled(&source, *kernel, *arch));
            progress.advance(1);
            compiled
        })
        .collect();
    progress.finish();
    done
}

fn compile(variants: &[Kernel], archs: &[Arch], library: String) -> Report {
    let started = Instant::now();
    let jobs: Vec<(Kernel, Arch)> = variants
        .iter()
        .flat_map(|v| archs.iter().map(move |a| (*v, *a)))
        .filter(|(v, a)| launch::runs_on(*v, *a))
        .collect();
    let done = compile_side_by_side(&jobs);
    let mut report = Report {
        nvrtc: format!("{}.{}", nvrtc::version().0, nvrtc::version().1),
        library,
        compilations: jobs.len(),
        cached: done.iter().filter(|done| matches!(done, Ok((_, true)))).count(),
        seconds: started.elapsed().as_secs_f64(),
        kernels: Vec::new(),
        failed: Vec::new(),
    };
    let mut failed: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for ((kernel, arch), done) in jobs.iter().zip(done) {
        match done {
            Ok((compiled, _)) if compiled.usage.is_empty() => {
                let message = "the assembler reports no entry point".to_owned();
                failed.entry((kernel.variant(), message)).or_default().push(arch.to_string());
            }
            Ok((compiled, cached)) => report.kernels.extend(rows(*kernel, *arch, &compiled, cached)),
            Err(error) => {
                // The arch is in the first line and the same fault shows on each: what follows is what was wrong.
                let message = error.to_string().replace(&format!(" for {arch}"), "");
                failed.entry((kernel.variant(), message)).or_default().push(arch.to_string());
            }
        }
    }
    report.failed = failed.into_iter().map(|((variant, message), archs)| Broken { variant, archs, message }).collect();
    report
}

fn rows(kernel: Kernel, arch: Arch, compiled: &Compiled, cached: bool) -> Vec<Row> {
    let row = |usage: &nvrtc::Usage| {
        let spilled = usage.spill_stores.max(usage.spill_loads);
        let excused = SPILLS.iter().find(|s| s.entry == usage.entry && s.arch == arch && spilled <= s.bytes);
        Row {
            variant: kernel.variant(),
            arch: arch.to_string(),
            entry: usage.entry.clone(),
            registers: usage.registers,
            spill_stores: usage.spill_stores,
            spill_loads: usage.spill_loads,
            stack: usage.stack,
            shared: usage.shared,
            cubin_bytes: compiled.cubin.len() as u64,
            cached,
            exception: excused.filter(|_| spilled > 0).map(|s| s.why),
        }
    };
    compiled.usage.iter().map(row).collect()
}

fn table(rows: &[Row]) -> Table {
    use Align::{Left, Right};
    let mut table = Table::new(&[
        ("kernel", Left),
        ("arch", Left),
        ("entry", Left),
        ("registers", Right),
        ("spill B", Right),
        ("stack B", Right),
        ("static shared B", Right),
        ("cubin B", Right),
        ("left because", Left),
    ]);
    for row in rows {
        table.push(vec![
            row.variant.clone(),
            row.arch.clone(),
            row.entry.clone(),
            row.registers.to_string(),
            row.spilled().to_string(),
            row.stack.to_string(),
            row.shared.to_string(),
            row.cubin_bytes.to_string(),
            row.exception.unwrap_or("-").to_owned(),
        ]);
    }
    table.without_empty_columns()
}

fn summary(report: &Report, variants: &[Kernel], archs: &[Arch]) -> String {
    let cubins: BTreeMap<(&str, &str), u64> =
        report.kernels.iter().map(|row| ((row.variant.as_str(), row.arch.as_str()), row.cubin_bytes)).collect();
    let spilling = report.kernels.iter().filter(|row| row.spilled() > 0).count();
    let excused = report.kernels.iter().filter(|row| row.exception.is_some()).count();
    format!(
        "\n{} kernels for {} archs by NVRTC {} ({}): {} entry points, {} of machine code, {} spilling ({} by name), {} \
         failed; {} s, {} of {} from the cache\n",
        variants.len(),
        archs.len(),
        report.nvrtc,
        report.library,
        report.kernels.len(),
        mib(cubins.values().sum()),
        spilling,
        excused,
        report.failed.iter().map(|broken| broken.archs.len()).sum::<usize>(),
        number(report.seconds),
        report.cached,
        report.compilations,
    )
}

/// What is wrong, all of it.
fn complaints(report: &Report) -> Option<String> {
    let broken = report.failed.iter().map(|b| format!("{} for {}: {}", b.variant, b.archs.join(", "), b.message));
    let spilling = report.kernels.iter().filter(|row| row.spilled() > 0 && row.exception.is_none()).map(|row| {
        format!(
            "{} of {} for {}: a thread spills {} B and reads back {} B; no kernel may, unless SPILLS in \
             harness/kernels.rs names it",
            row.entry, row.variant, row.arch, row.spill_stores, row.spill_loads
        )
    });
    let lines: Vec<String> = broken.chain(spilling).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater::device::cuda::nvrtc::Usage;

    fn report(usage: Usage) -> Report {
        let compiled = Compiled { cubin: vec![0; 2048], usage: vec![usage] };
        let kernels = rows(Kernel::new("norm", "").define("D", 128), Arch::Sm90a, &compiled, false);
        Report {
            nvrtc: "13.0".into(),
            library: "somewhere".into(),
            compilations: 1,
            cached: 0,
            seconds: 1.0,
            kernels,
            failed: vec![],
        }
    }

    #[test]
    fn a_spill_that_no_exception_names_is_a_complaint() {
        let clean = Usage { entry: "rms_bf16".into(), registers: 40, shared: 128, ..Usage::default() };
        assert_eq!(complaints(&report(clean.clone())), None);
        for spilling in [Usage { spill_stores: 8, ..clean.clone() }, Usage { spill_loads: 4, ..clean.clone() }] {
            let text = complaints(&report(spilling)).unwrap();
            assert!(text.starts_with("rms_bf16 of norm[D=128] for sm_90a: a thread spills"), "{text}");
        }
        let text = table(&report(clean).kernels).text();
        assert!(
            text.contains("norm[D=128]  sm_90a  rms_bf16         40        0        0              128     2048"),
            "{text}"
        );
    }

    #[test]
    fn every_exception_names_a_kernel_and_says_why() {
        for spill in SPILLS {
            assert!(spill.bytes > 0 && spill.why.len() > 20, "{}", spill.entry);
        }
    }

    #[test]
    fn failures_are_told_once_with_their_archs() {
        let mut report = report(Usage::default());
        let archs = vec!["sm_80".to_owned(), "sm_86".to_owned()];
        report.failed = vec![Broken { variant: "norm".into(), archs, message: "expected a \";\"".into() }];
        assert_eq!(complaints(&report).unwrap(), "norm for sm_80, sm_86: expected a \";\"");
    }

    #[test]
    fn a_filter_chooses_compilations_and_an_unknown_one_lists_them() {
        let all =
            || vec![Kernel::new("a", "x").define("D", 1), Kernel::new("a", "y").define("D", 1), Kernel::new("b", "x")];
        assert_eq!(chosen(None, &all()).unwrap().len(), 2, "entry points of one compilation are compiled once");
        assert_eq!(chosen(Some("D=1"), &all()).unwrap()[0].variant(), "a[D=1]");
        let error = chosen(Some("q"), &all()).unwrap_err();
        assert!(matches!(&error, Error::Request { .. }) && error.to_string().ends_with("a[D=1], b"), "{error}");
    }
}
