//! Byte sizes as people write them: `16GiB`, `24GB`, `3.5GiB`, `512MiB`, `1000`.
//!
//! `KiB MiB GiB TiB` are powers of 1024 and `kB MB GB TB` powers of 1000, in any case; a plain number is bytes.
//! `16G` is refused, since half the world reads it one way and half the other. Arithmetic is exact.

use anyhow::{Context, Result, bail, ensure};

/// Smallest size [`parse_memory`] takes: below it a unit was forgotten.
const MIN_MEMORY_BYTES: u64 = 1 << 20;

/// The bytes in `text`; a fraction of a byte is dropped.
pub(crate) fn parse(text: &str) -> Result<u64> {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..at], text[at..].trim());
    let unit_bytes: u128 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "m" | "g" | "t" => {
            let letter = unit.to_ascii_uppercase();
            bail!(
                "`{text}` can be read two ways: write {number}{letter}iB (powers of 1024) or {number}{letter}B (powers of 1000)"
            )
        }
        _ => bail!(
            "`{text}` is not a size; write bytes, or a number with KiB, MiB, GiB, TiB, kB, MB, GB or TB, e.g. 16GiB"
        ),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    ensure!(
        (!whole.is_empty() || !fraction.is_empty()) && !fraction.contains('.'),
        "`{text}` is not a size; write e.g. 16GiB, 3.5GiB or 17179869184"
    );
    ensure!(number.len() <= 32, "`{text}`: a size has at most 32 digits");
    let digits = |text: &str| if text.is_empty() { Ok(0) } else { text.parse::<u128>() };
    let too_large = || format!("`{text}` does not fit 64 bits");
    let whole = digits(whole).ok().and_then(|n| n.checked_mul(unit_bytes)).with_context(too_large)?;
    // Up to 19 digits of fraction times 2^40 fit 128 bits; later digits are below a byte of a TiB.
    let fraction = &fraction[..fraction.len().min(19)];
    let part = digits(fraction).ok().with_context(too_large)? * unit_bytes / 10u128.pow(fraction.len() as u32);
    u64::try_from(whole + part).ok().with_context(too_large)
}

/// A memory budget: [`parse`], and at least 1 MiB, so that `--vram 24` is not taken for 24 bytes.
pub(crate) fn parse_memory(text: &str) -> Result<u64> {
    let bytes = parse(text)?;
    ensure!(
        bytes >= MIN_MEMORY_BYTES,
        "`{text}` is {bytes} bytes, and the least is {MIN_MEMORY_BYTES}; is a unit missing, as in 24GiB?"
    );
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        format!("{:#}", parse(text).expect_err(text))
    }

    #[test]
    fn binary_and_decimal_units_differ() {
        assert_eq!(parse("16GiB").unwrap(), 17_179_869_184);
        assert_eq!(parse("24GB").unwrap(), 24_000_000_000);
        assert_eq!(parse("3.5GiB").unwrap(), 3_758_096_384);
        assert_eq!(parse("512MiB").unwrap(), 536_870_912);
        assert_eq!(parse("12345").unwrap(), 12_345);
        assert_eq!(parse("7 kib").unwrap(), 7168);
        assert_eq!(parse("1TB").unwrap(), 1_000_000_000_000);
        assert_eq!(parse("1TiB").unwrap(), 1 << 40);
        assert_eq!(parse("10B").unwrap(), 10);
    }

    #[test]
    fn fractions_are_exact() {
        // 2.01 * 1e9 in binary floating point is 2009999999.9999998.
        assert_eq!(parse("2.01GB").unwrap(), 2_010_000_000);
        assert_eq!(parse("31.36GiB").unwrap(), 33_672_543_600);
        assert_eq!(parse("0.1GB").unwrap(), 100_000_000);
        assert_eq!(parse(".5KiB").unwrap(), 512);
        assert_eq!(parse("5.KiB").unwrap(), 5120);
        assert_eq!(parse("1.99999999999999999999999999999B").unwrap(), 1);
        assert_eq!(parse("18446744073709551615").unwrap(), u64::MAX);
    }

    #[test]
    fn ambiguous_and_malformed_sizes_are_refused() {
        assert!(refusal("16G").contains("16GiB") && refusal("16G").contains("16GB"));
        for text in
            ["", ".", "GiB", "-1", "+1", "1e9", "1,000", "1..2", "1.2.3", "1 2", "0x10", "16Gib/s", "\u{661}", "NaN"]
        {
            refusal(text);
        }
        assert!(refusal("18446744073709551616").contains("64 bits"));
        assert!(refusal("99999999999999999999999999999999TiB").contains("64 bits"));
        assert!(refusal(&"9".repeat(1000)).contains("digits"));
        assert!(refusal("16777216TiB").contains("64 bits"));
    }

    #[test]
    fn a_memory_budget_without_its_unit_is_refused() {
        assert_eq!(parse_memory("1MiB").unwrap(), 1 << 20);
        let text = format!("{:#}", parse_memory("24").unwrap_err());
        assert!(text.contains("24GiB"), "{text}");
        assert!(parse_memory("0").is_err());
    }
}
