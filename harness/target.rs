//! From flags to what they mean: the card, the device behind it, the types of values, the model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use highwater::checkpoint::{ModelRef, Source};
use highwater::device::cuda::info;
use highwater::device::{Arch, Device, DeviceSpec, cards};
use highwater::engine::{Engine, Fault, Options};
use highwater::error::{Error, mib};
use highwater::num::DType;
use highwater::ops::{self, ActQuant};

use crate::cli::{self, DeviceChoice};
use crate::progress::Progress;
use crate::provenance::CardFacts;
use crate::record::{METHOD, Row, SCHEMA};

/// The card whose kernels are emulated where none is named.
const EMULATED_CARD: &str = "h200";

/// Where a cell runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Values on this machine's processor.
    Cpu,
    /// Values on the card of this number.
    Cuda(u32),
    /// Values on this machine's processor, by the kernels of the cards.
    Emulated,
    /// Sizes alone.
    Plan,
}

/// A device to be made: a card's sizes and tactics, a memory budget, and who computes.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) spec: DeviceSpec,
    pub(crate) vram: Option<u64>,
    pub(crate) kind: Kind,
}

impl Place {
    /// The card of `name` (this machine if `None`) with `vram` bytes (all it has if `None`).
    pub(crate) fn new(card: Option<&str>, vram: Option<u64>, kind: Kind) -> Result<Place, Error> {
        let spec = card.map_or_else(|| Ok(DeviceSpec::host_within(vram)), cards::find)?;
        if spec.slab_bytes(vram) == 0 {
            let overhead = spec.overhead.bytes();
            return Err(Error::Request {
                param: "--vram",
                what: format!(
                    "{} B; more than the {overhead} B outside the slab of {} are needed",
                    vram.unwrap_or(0),
                    spec.name
                ),
            });
        }
        Ok(Place { spec, vram, kind })
    }

    /// What `--device`, `--card` and `--vram` ask for. `auto` computes on the first card, or on this machine's processor
    /// where there is none; with a card named, it plans.
    pub(crate) fn of(target: &cli::Target) -> Result<Place, Error> {
        Place::choose(target.device, target.card.as_deref(), target.budget.vram)
    }

    /// The same for one card of an axis of cards. One that cannot run here is a place too: its cells say so.
    pub(crate) fn of_axis(target: &cli::Target, card: &str) -> Result<Place, Error> {
        match (Place::choose(target.device, Some(card), target.budget.vram), target.device) {
            (Err(Error::Unsupported { .. }), DeviceChoice::Cuda(ordinal)) => {
                Place::new(Some(card), target.budget.vram, Kind::Cuda(ordinal))
            }
            (place, _) => place,
        }
    }

    /// The same, each by itself.
    pub(crate) fn choose(device: DeviceChoice, name: Option<&str>, vram: Option<u64>) -> Result<Place, Error> {
        let kind = match (device, name) {
            (DeviceChoice::Cuda(ordinal), _) => return Place::on_card(name, vram, ordinal),
            (DeviceChoice::Emulated, _) => return Place::new(name.or(Some(EMULATED_CARD)), vram, Kind::Emulated),
            (DeviceChoice::Auto, None) if info::cards().is_ok_and(|cards| !cards.is_empty()) => {
                return Place::on_card(None, vram, 0);
            }
            (DeviceChoice::Cpu, _) | (DeviceChoice::Auto, None) => Kind::Cpu,
            (DeviceChoice::Plan, _) | (DeviceChoice::Auto, Some(_)) => Kind::Plan,
        };
        Place::new(name, vram, kind)
    }

    /// Card `ordinal` of this machine, by its own sizes and tactics or by those of the card of `name`, which must run here.
    fn on_card(name: Option<&str>, vram: Option<u64>, ordinal: u32) -> Result<Place, Error> {
        let card = info::card(ordinal)?;
        let own = cards::of(&card)?;
        let spec = name.map_or(Ok(own.clone()), cards::find)?;
        tactics_run_on(&spec, &own)?;
        let place = Place::new(Some(spec.name), vram, Kind::Cuda(ordinal));
        // A card that is not in the list has no name to be found by.
        place.or(Ok(Place { spec, vram, kind: Kind::Cuda(ordinal) }))
    }

    /// What of the card it stands for this device is not, where it measures as one that it is not.
    pub(crate) fn not_emulated(&self) -> Option<String> {
        let Place { spec: DeviceSpec { name, overhead, .. }, vram, kind } = self;
        let overhead = format!(
            "the {} outside the slab ({}) is taken from its description",
            mib(overhead.bytes()),
            overhead.kind()
        );
        match kind {
            Kind::Plan => None,
            Kind::Cpu if *name == cards::HOST => None,
            Kind::Cpu | Kind::Emulated => Some(format!(
                "{name} is emulated in its bytes and tactics alone: times are this processor's, and {overhead}"
            )),
            Kind::Cuda(ordinal) => {
                let own = cards::of(&info::card(*ordinal).ok()?).ok()?;
                let bounded = vram.filter(|vram| *vram < own.total_bytes);
                if own.name == *name && bounded.is_none() {
                    return None;
                }
                let memory = mib(bounded.unwrap_or(self.spec.total_bytes));
                Some(format!(
                    "{name} with {memory} is emulated in its bytes and tactics alone: times are those of {}, and {overhead}",
                    own.name
                ))
            }
        }
    }

    /// The slab's bytes.
    pub(crate) fn slab(&self) -> u64 {
        self.spec.slab_bytes(self.vram)
    }

    /// Makes the device.
    pub(crate) fn device(&self) -> Result<Arc<Device>, Error> {
        match self.kind {
            Kind::Cpu => Device::cpu(self.spec.clone(), self.slab()),
            Kind::Cuda(ordinal) => {
                tactics_run_on(&self.spec, &cards::of(&info::card(ordinal)?)?)?;
                Device::cuda(self.spec.clone(), ordinal, self.slab())
            }
            Kind::Emulated => Device::emulated_bare(self.spec.clone(), self.slab()),
            Kind::Plan => Ok(Device::plan(self.spec.clone(), self.slab())),
        }
    }

    /// Writes the columns of the device into a row.
    pub(crate) fn stamp(&self, row: &mut Row) {
        row.device = match self.kind {
            Kind::Cpu => "cpu",
            Kind::Cuda(_) => "cuda",
            Kind::Emulated => "emulated",
            Kind::Plan => "plan",
        }
        .into();
        row.card = self.spec.name.into();
        row.arch = Some(self.spec.arch.to_string());
        row.vram_bytes = Some(self.vram.unwrap_or(self.spec.total_bytes));
        row.slab_bytes = Some(self.slab());
        row.overhead_bytes = Some(self.spec.overhead.bytes());
        row.overhead_kind = Some(self.spec.overhead.kind().into());
    }
}

/// Whether a card can run what is chosen for another.
fn tactics_run_on(spec: &DeviceSpec, own: &DeviceSpec) -> Result<(), Error> {
    if spec.arch != Arch::Host && spec.arch <= own.arch {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("tactics of {} ({}) on {} ({})", spec.name, spec.arch, own.title, own.arch),
        supported: "a card takes its own and those of earlier ones; --device plan needs no card".into(),
    })
}

/// A model as the user named it, with the seed of whatever is random about it.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) text: String,
    pub(crate) seed: u64,
}

impl Model {
    /// Opens it.
    pub(crate) fn open(&self) -> Result<Source, Error> {
        ModelRef::parse(&self.text)?.open(self.seed)
    }
}

/// The types of values, and the fault if one is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Values {
    pub(crate) numerics: ops::Numerics,
    pub(crate) fault: Option<Fault>,
}

impl Values {
    /// What the flags ask for; `default` says what stands where they are silent.
    pub(crate) fn of(flags: &cli::Numerics, default: ops::Numerics) -> Result<Values, Error> {
        Values::with_kv(flags, default, flags.kv_dtype)
    }

    /// The same with another type of the KV cache.
    pub(crate) fn with_kv(
        flags: &cli::Numerics,
        default: ops::Numerics,
        kv: Option<cli::KvDtype>,
    ) -> Result<Values, Error> {
        let fault = flags.fault.as_deref().map(Fault::parse).transpose()?;
        Ok(Values { fault, ..Values::sound(flags, default, kv) })
    }

    /// The same without the fault.
    pub(crate) fn sound(flags: &cli::Numerics, default: ops::Numerics, kv: Option<cli::KvDtype>) -> Values {
        let activations = flags.dtype.map_or(default.activations, dtype);
        Values {
            numerics: ops::Numerics {
                activations,
                logits: dtype(flags.logits),
                state: dtype(flags.state),
                kv: match kv {
                    None => activations,
                    Some(cli::KvDtype::F32) => DType::F32,
                    Some(cli::KvDtype::Bf16) => DType::Bf16,
                    Some(cli::KvDtype::Fp8) => DType::U8,
                },
                act_quant: match flags.act_quant {
                    Some(cli::ActQuant::Checkpoint) => ActQuant::Checkpoint,
                    Some(cli::ActQuant::Off) => ActQuant::Off,
                    None => default.act_quant,
                },
                batch_invariant: flags.batch_invariant,
            },
            fault: None,
        }
    }
}

fn act_quant_name(act_quant: ActQuant) -> &'static str {
    match act_quant {
        ActQuant::Checkpoint => "checkpoint",
        ActQuant::Off => "off",
    }
}

fn dtype(flag: cli::Dtype) -> DType {
    match flag {
        cli::Dtype::F32 => DType::F32,
        cli::Dtype::Bf16 => DType::Bf16,
    }
}

/// Loads an engine, with a bar that shows how far it is.
pub(crate) fn load(place: &Place, source: Source, options: Options) -> Result<Engine, Error> {
    load_telling(place, source, options, None).map(|(engine, _)| engine)
}

/// As [`load`], and tells `other` too: bytes done and bytes in all. Beside the engine the time from the open device to it.
pub(crate) fn load_telling(
    place: &Place,
    source: Source,
    options: Options,
    mut other: Option<&mut (dyn FnMut(u64, u64) + 'static)>,
) -> Result<(Engine, Duration), Error> {
    let device = place.device()?;
    let bar = Progress::bytes(0);
    bar.doing("loading");
    let (mut shown, begun) = (0, Instant::now());
    let engine = Engine::load(&device, source, options, &mut |done, total| {
        bar.length(total);
        bar.advance(done.saturating_sub(shown));
        shown = done;
        if let Some(other) = &mut other {
            other(done, total);
        }
    });
    bar.finish();
    Ok((engine?, begun.elapsed()))
}

/// A folder's own name, not where it lies; of `.` and `..` the name of what they stand for.
fn folder_name(text: &str) -> String {
    let path = std::path::Path::new(text);
    let named = if path.file_name().is_some() { Ok(path.to_owned()) } else { path.canonicalize() };
    let name = named.ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    name.unwrap_or_else(|| text.to_owned())
}

/// Where the weights come from, as rows say it.
pub(crate) fn weights_source(source: &Source) -> String {
    match source {
        Source::Disk(checkpoint) => format!("headers:{:016x}", checkpoint.header_hash()),
        Source::Seeded { seed, .. } => format!("seed:{seed}"),
    }
}

/// A row with the columns that a model, its place and its types decide.
pub(crate) fn template(model: &Model, source: &Source, place: &Place, values: Values) -> Row {
    let geometry = source.geometry();
    let (name, recipe) = model.text.split_once('@').unwrap_or((&model.text, "bf16"));
    let mut row = Row {
        schema: SCHEMA,
        method: METHOD,
        layers: Some(geometry.layers.len() as u64),
        dtype: values.numerics.activations.to_string(),
        logits_dtype: values.numerics.logits.to_string(),
        state_dtype: values.numerics.state.to_string(),
        kv_dtype: if values.numerics.kv == DType::U8 { "fp8".into() } else { values.numerics.kv.to_string() },
        act_quant: Some(act_quant_name(values.numerics.act_quant).into()),
        batch_invariant: Some(values.numerics.batch_invariant),
        weights_source: Some(weights_source(source)),
        fault: values.fault.map(|f| f.name().to_owned()),
        ..Row::default()
    };
    match source {
        Source::Disk(_) => {
            row.model = folder_name(&model.text);
            row.recipe = "checkpoint".into();
        }
        Source::Seeded { .. } => {
            name.clone_into(&mut row.model);
            recipe.clone_into(&mut row.recipe);
        }
    }
    place.stamp(&mut row);
    if let Kind::Cuda(ordinal) = place.kind {
        CardFacts::gather(ordinal).stamp(&mut row);
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_called_by_its_own_name_however_it_is_reached() {
        assert_eq!(folder_name("models/qwen/"), "qwen");
        assert_eq!(folder_name("models/qwen/."), "qwen");
        let here = std::env::current_dir().unwrap();
        assert_eq!(folder_name("."), here.file_name().unwrap().to_string_lossy());
        let above = here.parent().and_then(|p| p.file_name()).map_or("..".into(), |n| n.to_string_lossy());
        assert_eq!(folder_name(".."), above);
        assert_eq!(folder_name("/"), "/");
    }

    #[test]
    fn a_budget_of_this_machine_is_not_cut_by_a_quarter_of_its_memory() {
        let place = Place::new(None, Some(256 << 20), Kind::Plan).unwrap();
        assert_eq!(place.slab(), 192 << 20);
        let refused = Place::new(None, Some(64 << 20), Kind::Plan).unwrap_err().to_string();
        assert!(refused.contains("--vram"), "{refused}");
    }
}
