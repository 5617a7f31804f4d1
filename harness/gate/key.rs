//! What a row is of, so that rows of two runs can be matched, and the conditions it was measured under, so that only rows
//! of equal conditions are compared.

use std::fmt;

use highwater::device::cards;

use crate::gate::conditions::{Difference, differing};
use crate::record::Row;

/// What a cell is. Equal keys are the same cell.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// What every row says.
    fixed: Vec<(&'static str, String)>,
    /// What a row says only where its cell got far enough; a null stands for anything.
    known: Vec<(&'static str, Option<String>)>,
}

/// Parts of a key that a reader takes for granted, and so are not shown.
const USUAL: [(&str, &str); 8] = [
    ("weights", "seed:0"),
    ("dtype", "bf16"),
    ("logits", "f32"),
    ("state", "f32"),
    ("KV", "bf16"),
    ("act-quant", "checkpoint"),
    ("batch-invariant", "false"),
    ("workload", "fixed"),
];

impl Key {
    /// The key of a row.
    pub(crate) fn of(row: &Row) -> Key {
        let text = |value: &Option<String>| value.clone().unwrap_or_default();
        let number = |value: Option<u64>| value.map_or(String::new(), |n| n.to_string());
        // This machine's own memory is no part of what a cell is; a card's is.
        let vram = if row.card == "host" { String::new() } else { number(row.vram_bytes) };
        Key {
            fixed: vec![
                ("model", row.model.clone()),
                ("recipe", row.recipe.clone()),
                ("layers", number(row.layers)),
                ("weights", text(&row.weights_source)),
                ("device", row.device.clone()),
                ("card", row.card.clone()),
                ("vram", vram),
                ("dtype", row.dtype.clone()),
                ("logits", row.logits_dtype.clone()),
                ("state", row.state_dtype.clone()),
                ("KV", row.kv_dtype.clone()),
                ("act-quant", text(&row.act_quant)),
                ("batch-invariant", row.batch_invariant.unwrap_or(false).to_string()),
                ("workload", row.workload.clone().unwrap_or_else(|| "fixed".into())),
                ("chunk", row.chunk.to_string()),
                ("batch", row.batch.to_string()),
                ("depth", row.depth.to_string()),
            ],
            known: vec![
                ("prompt", row.prompt.map(|n| n.to_string())),
                ("output", row.output.map(|n| n.to_string())),
                ("KV tokens", row.kv_tokens.map(|n| n.to_string())),
            ],
        }
    }

    /// Whether both are the same cell, as far as both say.
    pub(crate) fn matches(&self, other: &Key) -> bool {
        let agree = |(a, b): (&(_, Option<String>), &(_, Option<String>))| a.1.is_none() || b.1.is_none() || a.1 == b.1;
        self.fixed == other.fixed && self.known.iter().zip(&other.known).all(agree)
    }

    /// How many of the parts that may be null both say, for the best of several matches.
    pub(crate) fn agreement(&self, other: &Key) -> usize {
        self.known.iter().zip(&other.known).filter(|(a, b)| a.1.is_some() && a.1 == b.1).count()
    }

    /// The part every row says, as one text: rows that match have it in common.
    pub(crate) fn bucket(&self) -> String {
        format!("{:?}", self.fixed)
    }

    /// The key without these parts.
    pub(crate) fn without(&self, names: &[&str]) -> Key {
        let mut key = self.clone();
        key.fixed.retain(|(name, _)| !names.contains(name));
        key.known.retain(|(name, _)| !names.contains(name));
        key
    }

    fn part(&self, name: &str) -> &str {
        let fixed = self.fixed.iter().find(|(n, _)| *n == name).map(|(_, value)| value.as_str());
        fixed.or_else(|| self.known.iter().find(|(n, _)| *n == name)?.1.as_deref()).unwrap_or("")
    }

    /// Whether the part of that name is what it is nearly always.
    fn is_usual(&self, name: &str, value: &str) -> bool {
        let whole = || cards::find(self.part("card")).is_ok_and(|card| card.total_bytes.to_string() == value);
        match name {
            "model" | "recipe" | "layers" | "KV tokens" => true,
            "vram" => whole(),
            "KV" if value == self.part("dtype") => true,
            "prompt" => value == self.part("chunk"),
            _ => USUAL.contains(&(name, value)),
        }
    }
}

impl fmt::Display for Key {
    /// Model, device and card by themselves, then every part that is not the usual one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.part("model"))?;
        if !self.part("recipe").is_empty() {
            write!(f, "@{}", self.part("recipe"))?;
        }
        let known = self.known.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?)));
        for (name, value) in self.fixed.iter().map(|(name, value)| (*name, value.as_str())).chain(known) {
            match name {
                "device" | "card" => write!(f, " {value}")?,
                _ if value.is_empty() || self.is_usual(name, value) => {}
                _ => write!(f, " {name} {value}")?,
            }
        }
        Ok(())
    }
}

/// Where the conditions of two rows differ: the version of rows and of method always, and for what was timed the card's
/// driver, name, power limit and ECC, or the processor, and how the program was built.
pub(crate) fn differences(base: &Row, candidate: &Row) -> Vec<Difference> {
    let conditions = |row: &Row| {
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "not said".into());
        let mut all =
            vec![("schema", row.schema.to_string()), ("method", row.method.to_string()), ("card", row.card.clone())];
        if row.device == "cuda" {
            all.push(("driver", text(&row.driver)));
            all.push(("GPU", text(&row.gpu)));
            all.push(("power limit", text(&row.gpu_power_limit_w.map(|watts| format!("{watts} W")))));
            all.push(("ECC", text(&row.gpu_ecc.map(|on| on.to_string()))));
        }
        if ["cpu", "emulated"].contains(&row.device.as_str()) {
            all.push(("CPU", text(&row.cpu)));
            all.push(("cores", text(&row.cores.map(|n| n.to_string()))));
        }
        if row.device != "plan" {
            all.push(("build", row.profile.clone()));
        }
        all
    };
    differing(conditions(base), conditions(candidate))
}

/// Where the compilers behind two rows differ, and what they were given. Builds are what a gate compares, so none of it is
/// refused, and a reader is told. Earlier rows do not say; a plan's bytes are no compiler's.
pub(crate) fn tools_differ(base: &Row, candidate: &Row) -> Vec<Difference> {
    type Tool = (&'static str, fn(&Row) -> Option<&String>);
    let tools: [Tool; 4] = [
        ("rustc", |row| row.rustc.as_ref()),
        ("cargo flags", |row| row.cargo_flags.as_ref()),
        ("NVRTC", |row| row.nvrtc.as_ref()),
        ("NVRTC options", |row| row.nvrtc_options.as_ref()),
    ];
    if base.device == "plan" {
        return Vec::new();
    }
    let said =
        tools.into_iter().filter_map(|(what, of)| Some(((what, of(base)?.clone()), (what, of(candidate)?.clone()))));
    let (base, candidate) = said.unzip();
    differing(base, candidate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::ok_row;

    fn row() -> Row {
        Row { model: "tiny".into(), dtype: "bf16".into(), prompt: Some(512), output: Some(32), ..ok_row(512, 2, 64) }
    }

    #[test]
    fn a_cell_is_its_model_place_types_and_axes_and_not_its_results() {
        let key = Key::of(&row());
        let same = Row { tpot_ms: Some(9.0), time: "x".into(), vram_bytes: Some(1), kv_tokens: None, ..row() };
        assert!(key.matches(&Key::of(&same)));
        let changes: [fn(&mut Row); 10] = [
            |r| r.model = "tiny-moe".into(),
            |r| r.recipe = "fp8-channel".into(),
            |r| r.layers = Some(2),
            |r| r.device = "plan".into(),
            |r| r.kv_dtype = "fp8".into(),
            |r| r.batch_invariant = Some(true),
            |r| r.workload = Some("ladder".into()),
            |r| r.depth = 4096,
            |r| r.prompt = Some(100),
            |r| r.weights_source = Some("seed:1".into()),
        ];
        for (at, change) in changes.iter().enumerate() {
            let mut other = row();
            change(&mut other);
            assert!(!key.matches(&Key::of(&other)), "{at}");
        }
        let card = |vram| Row { card: "h200".into(), vram_bytes: Some(vram), ..row() };
        assert!(!Key::of(&card(1)).matches(&Key::of(&card(2))), "a card's budget is what the cell is");
        assert!(Key::of(&card(1)).without(&["vram"]).matches(&Key::of(&card(2)).without(&["vram"])));
    }

    #[test]
    fn what_a_cell_did_not_live_to_say_matches_anything() {
        let oom = Row { prompt: None, output: None, kv_tokens: None, ..row() };
        let key = Key::of(&Row { kv_tokens: Some(1024), ..row() });
        assert!(key.matches(&Key::of(&oom)));
        assert!(!key.matches(&Key::of(&Row { kv_tokens: Some(2048), ..row() })));
        assert!(key.agreement(&Key::of(&row())) > key.agreement(&Key::of(&oom)));
    }

    #[test]
    fn a_key_reads_as_people_name_a_cell() {
        assert_eq!(Key::of(&row()).to_string(), "tiny@bf16 cpu host chunk 512 batch 2 depth 0 output 32");
        let mut odd = Row { card: "rtx-4090".into(), vram_bytes: Some(16 << 30), prompt: Some(9), ..row() };
        odd.kv_dtype = "fp8".into();
        let text = Key::of(&odd).to_string();
        assert!(text.contains("rtx-4090 vram 17179869184 KV fp8") && text.contains("prompt 9"), "{text}");
    }

    #[test]
    fn each_condition_that_differs_is_named_once_and_only_where_it_matters() {
        let cuda = || Row { device: "cuda".into(), driver: Some("580.1".into()), gpu: Some("H200".into()), ..row() };
        let other = Row { driver: Some("590.2".into()), method: 9, ..cuda() };
        let found: Vec<String> = differences(&cuda(), &other).iter().map(Difference::to_string).collect();
        assert_eq!(
            found,
            ["method: 2 in the baseline, 9 in the candidate", "driver: 580.1 in the baseline, 590.2 in the candidate"]
        );
        let silent = Row { driver: None, ..cuda() };
        assert_eq!(differences(&silent, &cuda())[0].baseline, "not said");
        let plan = || Row { device: "plan".into(), ..row() };
        let elsewhere = Row { cpu: Some("other".into()), profile: "release".into(), ..plan() };
        assert_eq!(differences(&plan(), &elsewhere), []);
        assert_eq!(differences(&row(), &Row { cores: Some(3), ..row() })[0].what, "cores");
    }

    #[test]
    fn other_compilers_are_told_where_both_rows_say_and_make_no_other_conditions() {
        let by = |rustc: &str, nvrtc: Option<&str>| Row {
            rustc: Some(rustc.into()),
            cargo_flags: Some("--release lto=thin".into()),
            nvrtc: nvrtc.map(str::to_owned),
            ..row()
        };
        let (old, new) = (by("1.88.0", Some("13.0")), by("1.95.0", Some("13.1")));
        let told: Vec<String> = tools_differ(&old, &new).iter().map(Difference::to_string).collect();
        assert_eq!(
            told,
            [
                "rustc: 1.88.0 in the baseline, 1.95.0 in the candidate",
                "NVRTC: 13.0 in the baseline, 13.1 in the candidate"
            ]
        );
        assert_eq!(differences(&old, &new), []);
        assert_eq!(tools_differ(&row(), &new), [], "a baseline from before rows said so");
        let plan = |row: Row| Row { device: "plan".into(), ..row };
        assert_eq!(tools_differ(&plan(old), &plan(new)), []);
    }
}
