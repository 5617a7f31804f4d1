//! The CUDA arm against the CPU arm, op by op: on a card where there is one, else the kernels' own sources built for this
//! processor. Outputs are poisoned and stand between guard bands.
#![allow(unreachable_pub)] // shared by the modules of one test binary

mod activation;
mod attention;
mod captures;
mod conv1d;
mod determinism;
mod fill;
mod gdn_decode;
mod gdn_prefill;
mod kv_write;
mod linear;
mod model;
mod moe;
mod norm;
mod parity;
mod quantise;
mod rope;
mod rows;
mod sampler;
mod stream;

use std::sync::OnceLock;

use highwater::device::{Device, cards, cuda};
use highwater::ops::{Meter, Numerics};

use crate::ops::{Rig, SLAB_BYTES};

/// Multiply-adds (or elements moved) of one case that emulation has time for.
const EMULATED_WORK: u64 = 30_000_000;

/// Where the CUDA arm runs in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// A card.
    Card,
    /// This processor.
    Emulated,
    /// Nowhere: neither a card nor a C++ compiler.
    Nowhere,
}

/// Found out once. `REQUIRE_GPU=1` and `REQUIRE_EMULATOR=1` turn a skip into a failure.
pub fn place() -> Where {
    static PLACE: OnceLock<Where> = OnceLock::new();
    *PLACE.get_or_init(|| {
        if cuda::info::cards().is_ok_and(|cards| !cards.is_empty()) {
            return Where::Card;
        }
        assert!(std::env::var_os("REQUIRE_GPU").is_none(), "REQUIRE_GPU is set and no card was found");
        match Device::emulated(cards::find("h200").unwrap(), 1 << 20) {
            Ok(_) => Where::Emulated,
            Err(why) => {
                assert!(std::env::var_os("REQUIRE_EMULATOR").is_none(), "REQUIRE_EMULATOR is set: {why}");
                println!("skipped: no card, and kernels cannot be built for this processor: {why}");
                Where::Nowhere
            }
        }
    })
}

/// The two arms of one comparison.
pub struct Pair {
    pub cpu: Rig,
    pub cuda: Rig,
}

impl Pair {
    /// Both arms under the H200's tactics; `None`, after a printed line, where there is no CUDA arm or emulation has no
    /// time for `work` multiply-adds (or elements, where nothing is multiplied).
    pub fn new(what: &str, numerics: Numerics, work: u64) -> Option<Pair> {
        let spec = cards::find("h200").unwrap();
        let device = match place() {
            // A checker of memory or races makes a card as slow as emulation.
            Where::Card if std::env::var_os("SMALL_CASES").is_some() && work > EMULATED_WORK / 10 => return None,
            Where::Card => Device::cuda_guarded(spec.clone(), 0, SLAB_BYTES).unwrap(),
            Where::Emulated if work <= EMULATED_WORK => Device::emulated(spec.clone(), SLAB_BYTES).unwrap(),
            Where::Emulated => {
                println!("{what}: {work} operations, left to a card");
                return None;
            }
            Where::Nowhere => return None,
        };
        let cpu = Device::cpu_poisoned(spec, SLAB_BYTES).unwrap();
        let rig = |device| Rig { device, meter: Meter::default(), numerics };
        Some(Pair { cpu: rig(cpu), cuda: rig(device) })
    }

    /// What `body` gives on the CPU arm and on the CUDA arm. Guard bands must be whole afterwards.
    #[track_caller]
    pub fn run<R>(&self, body: impl Fn(&Rig) -> R) -> (R, R) {
        let results = (body(&self.cpu), body(&self.cuda));
        let overruns = self.cuda.device.take_overruns();
        assert!(overruns.is_empty(), "written past its end: {overruns:?}");
        results
    }
}

/// `|a - b| / |b|` in the Euclidean norm; NaN in one place only makes it infinite.
pub fn relative_norm(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        if a.is_nan() != b.is_nan() {
            return f64::INFINITY;
        }
        if !a.is_nan() && a != b {
            difference += (f64::from(a) - f64::from(b)).powi(2);
            norm += f64::from(b).powi(2);
        } else if !b.is_nan() && b.is_finite() {
            norm += f64::from(b).powi(2);
        }
    }
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Asserts [`relative_norm`] is at most `bound`, and that each value is within `worst` times the largest magnitude.
#[track_caller]
pub fn assert_near(what: &str, cuda: &[f32], cpu: &[f32], bound: f64, worst: f64) {
    let norm = relative_norm(cuda, cpu);
    let largest = cpu.iter().filter(|v| v.is_finite()).fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    let (at, off) = cuda
        .iter()
        .zip(cpu)
        .map(|(a, b)| if a == b || (a.is_nan() && b.is_nan()) { 0.0 } else { (f64::from(*a) - f64::from(*b)).abs() })
        .enumerate()
        .fold((0, 0.0), |(at, most), (i, off)| if off > most || off.is_nan() { (i, off) } else { (at, most) });
    assert!(norm <= bound, "{what}: relative norm {norm:e}, bound {bound:e}; element {at} is off by {off:e}");
    assert!(
        off <= worst * largest,
        "{what}: element {at} is {} for {}, off by {off:e}, bound {:e}",
        cuda[at],
        cpu[at],
        worst * largest
    );
}

/// Asserts two lists are the same bits.
#[track_caller]
pub fn assert_same<T: PartialEq + std::fmt::Debug>(what: &str, cuda: &[T], cpu: &[T]) {
    assert_eq!(cuda.len(), cpu.len(), "{what}");
    if let Some(i) = (0..cpu.len()).find(|&i| cuda[i] != cpu[i]) {
        let differing = cuda.iter().zip(cpu).filter(|(a, b)| a != b).count();
        panic!("{what}: element {i} is {:?} for {:?}; {differing} of {} differ", cuda[i], cpu[i], cpu.len());
    }
}
