//! Tokenizer and generation files that do not belong to the model, or to nothing.

use std::fs;

use super::{Base, Case, Kind};

fn file(file: &'static str, name: &str, text: impl Into<Vec<u8>>, want: Kind, says: &[&str]) -> Case {
    let text = text.into();
    let says: Vec<&str> = says.iter().copied().chain([file]).collect();
    Case::new(format!("{file}: {name}"), Base::Dense, want, &says).bend(move |dir| {
        if file == "tokenizer_config.json" {
            fs::write(dir.join("tokenizer.json"), r#"{"model": {"vocab": {"a": 0, "b": 1, "c": 3}}}"#).unwrap();
        }
        fs::write(dir.join(file), &text).unwrap();
    })
}

pub(super) fn cases() -> Vec<Case> {
    use Kind::{Checkpoint, Config};
    let t = |name: &str, text: &str, want, says: &[&str]| file("tokenizer.json", name, text, want, says);
    let g = |name: &str, text: &str, want, says: &[&str]| file("generation_config.json", name, text, want, says);
    let c = |name: &str, text: &str, want, says: &[&str]| file("tokenizer_config.json", name, text, want, says);
    let vocab = |v: &str| format!("{{\"model\": {{\"vocab\": {v}}}}}");
    let added = |v: &str| format!("{{\"model\": {{\"vocab\": {{\"a\": 3}}}}, \"added_tokens\": {v}}}");
    vec![
        t("empty", "", Checkpoint, &["cut short"]),
        t("a list", "[]", Checkpoint, &["JSON"]),
        t("no model", "{}", Checkpoint, &["model"]),
        t("no vocab", r#"{"model": {"type": "BPE"}}"#, Checkpoint, &["vocab"]),
        t("vocab a string", &vocab("\"abc\""), Checkpoint, &["vocab"]),
        t("vocab empty", &vocab("{}"), Config, &["model.vocab", "no token"]),
        t("an id of the vocabulary's size", &vocab(r#"{"a": 3, "b": 40}"#), Config, &["token id 40", "40 rows"]),
        t("an id beyond 32 bits", &vocab(r#"{"a": 18446744073709551615}"#), Config, &["18446744073709551615"]),
        t("an id beyond 64 bits", &vocab(r#"{"a": 18446744073709551616}"#), Checkpoint, &["token \"a\""]),
        t("a negative id", &vocab(r#"{"bad": -1}"#), Checkpoint, &["bad", "-1"]),
        t("a fractional id", &vocab(r#"{"bad": 1.5}"#), Checkpoint, &["bad", "1.5"]),
        t("an id in quotes", &vocab(r#"{"bad": "1"}"#), Checkpoint, &["bad"]),
        t("a null id", &vocab(r#"{"bad": null}"#), Checkpoint, &["bad"]),
        t("an id that is NaN", &vocab(r#"{"bad": NaN}"#), Checkpoint, &["bad"]),
        t("ids that end below the end of sequence", &vocab(r#"{"a": 0, "b": 2}"#), Config, &["3 ends a sequence"]),
        t("41 tokens in a list", &vocab(&format!("[{}]", vec!["[\"a\",0.5]"; 41].join(","))), Config, &["token id 40"]),
        t("added tokens no list", &added("{}"), Checkpoint, &["added_tokens"]),
        t("an added token without id", &added(r#"[{"content": "<x>"}]"#), Checkpoint, &["id"]),
        t("an added token of a negative id", &added(r#"[{"id": -3}]"#), Checkpoint, &["-3"]),
        t("an added token of id 99", &added(r#"[{"id": 99}]"#), Config, &["added_tokens", "token id 99"]),
        t("model twice", r#"{"model": {"vocab": {"a": 3}}, "model": {"vocab": {"a": 3}}}"#, Checkpoint, &["duplicate"]),
        t("deep", &format!("{{\"model\": {}", "[".repeat(100_000)), Checkpoint, &["nested", "32"]),
        file(
            "tokenizer.json",
            "not UTF-8",
            b"{\"model\": {\"vocab\": {\"\xff\": 3}}}".to_vec(),
            Checkpoint,
            &["UTF-8"],
        ),
        t("cut", &vocab(r#"{"a": 3"#)[..20], Checkpoint, &["cut short"]),
        c("empty", "", Checkpoint, &["cut short"]),
        c("a list for added_tokens_decoder", r#"{"added_tokens_decoder": []}"#, Checkpoint, &["added_tokens_decoder"]),
        c("a key that is no id", r#"{"added_tokens_decoder": {"x": {}}}"#, Checkpoint, &["\"x\"", "token id"]),
        c("a negative key", r#"{"added_tokens_decoder": {"-1": {}}}"#, Checkpoint, &["\"-1\"", "token id"]),
        c("id 40", r#"{"added_tokens_decoder": {"40": {}}}"#, Config, &["added_tokens_decoder", "token id 40"]),
        g("empty", "", Checkpoint, &["cut short"]),
        g("a list", "[248044]", Checkpoint, &["object"]),
        g("a list of nothing known", r#"{"eos_token_id": ["<|im_end|>"]}"#, Config, &["eos_token_id", "im_end"]),
        g("another model's ids", r#"{"eos_token_id": [248046, 248044]}"#, Config, &["eos_token_id", "248046", "39"]),
        g("a negative id", r#"{"eos_token_id": -1}"#, Config, &["eos_token_id", "-1"]),
        g("an object", r#"{"eos_token_id": {"id": 1}}"#, Config, &["eos_token_id", "object"]),
        g("NaN", r#"{"temperature": NaN}"#, Checkpoint, &["line 1"]),
        g("a key twice", r#"{"eos_token_id": 1, "eos_token_id": 2}"#, Checkpoint, &["twice"]),
        g("deep", &"[".repeat(1000), Checkpoint, &["nested", "32"]),
    ]
}
