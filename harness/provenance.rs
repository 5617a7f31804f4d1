//! Where a row comes from: program, source tree, command line, machine. Nothing here fails; what cannot be read is null.

use std::hash::{Hash, Hasher};
use std::io::Read;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use highwater::device::DeviceSpec;
use highwater::device::cuda::{info, nvrtc};
use highwater::num::fnv::Fnv1a;

use crate::nvml::Management;
use crate::record::Row;

/// What one run's rows share.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Provenance {
    /// Identity of the run: when it began, and a hash of when exactly and of the process.
    pub(crate) run: String,
    /// Version of this program.
    pub(crate) version: String,
    /// Commit of the source tree this program was built from, if the tree is still where it was.
    pub(crate) git_sha: Option<String>,
    /// Whether tracked files of that tree differ from the commit.
    pub(crate) git_dirty: Option<bool>,
    /// FNV-1a, 64 bits, of the program's own file, as `fnv1a64:<16 hex digits>`.
    pub(crate) binary_hash: Option<String>,
    /// The command line, quoted for a shell; the program by its file name only.
    pub(crate) argv: String,
    /// The CPU's own name.
    pub(crate) cpu: Option<String>,
    /// Threads this process may run at once (affinity and quota counted).
    pub(crate) cores: Option<u64>,
    /// Memory this process may use: the machine's, or less where its control group is limited.
    pub(crate) ram_bytes: Option<u64>,
    /// Distribution and kernel.
    pub(crate) os: Option<String>,
    /// `release` or `debug`.
    pub(crate) profile: String,
    /// The compiler that built this program.
    pub(crate) rustc: Option<String>,
    /// What cargo built it with, as the build script was told.
    pub(crate) cargo_flags: String,
}

impl Provenance {
    /// Looks at this process and this machine.
    pub(crate) fn gather() -> Provenance {
        let built =
            std::env::current_exe().and_then(|program| program.metadata()).and_then(|program| program.modified());
        let (git_sha, git_dirty) = git(Path::new(env!("CARGO_MANIFEST_DIR")), built.ok());
        Provenance {
            run: run_id(SystemTime::now(), std::process::id()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            git_sha,
            git_dirty,
            binary_hash: std::env::current_exe().ok().and_then(|path| file_hash(&path)),
            argv: command_line(std::env::args_os().map(|arg| arg.to_string_lossy().into_owned())),
            cpu: read("/proc/cpuinfo").and_then(|text| cpu_name(&text)),
            cores: std::thread::available_parallelism().ok().map(|n| n.get() as u64),
            ram_bytes: DeviceSpec::host_memory(),
            os: os(),
            profile: if cfg!(debug_assertions) { "debug" } else { "release" }.to_owned(),
            rustc: Some(env!("HIGHWATER_RUSTC").to_owned()).filter(|version| !version.is_empty()),
            cargo_flags: env!("HIGHWATER_CARGO_FLAGS").to_owned(),
        }
    }

    /// Writes the shared columns into `row`.
    pub(crate) fn stamp(&self, row: &mut Row) {
        let Provenance {
            run,
            version,
            git_sha,
            git_dirty,
            binary_hash,
            argv,
            cpu,
            cores,
            ram_bytes,
            os,
            profile,
            rustc,
            cargo_flags,
        } = self.clone();
        row.schema = crate::record::SCHEMA;
        row.method = crate::record::METHOD;
        row.run = run;
        row.version = version;
        row.git_sha = git_sha;
        row.git_dirty = git_dirty;
        row.binary_hash = binary_hash;
        row.argv = argv;
        row.cpu = cpu;
        row.cores = cores;
        row.ram_bytes = ram_bytes;
        row.os = os;
        row.profile = profile;
        row.rustc = rustc;
        row.cargo_flags = Some(cargo_flags);
    }
}

/// What a driver says of a card, who it is and how it is set, and what compiles its kernels. What cannot be asked is null.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CardFacts {
    /// The driver's version, as 580.95.05.
    pub(crate) driver: Option<String>,
    /// The version of CUDA it speaks, as 13.0.
    pub(crate) cuda: Option<String>,
    /// The card's own name.
    pub(crate) gpu: Option<String>,
    /// Its own number.
    pub(crate) uuid: Option<String>,
    /// Where it is on the PCI bus.
    pub(crate) pci: Option<String>,
    /// Whether its memory corrects errors.
    pub(crate) ecc: Option<bool>,
    /// Its power limit, W.
    pub(crate) power_limit_w: Option<f64>,
    /// The version of the compiler of kernels, as 13.0.
    pub(crate) nvrtc: Option<String>,
    /// What it compiles every kernel with.
    pub(crate) nvrtc_options: Option<String>,
}

impl CardFacts {
    /// Asks card `ordinal`.
    pub(crate) fn gather(ordinal: u32) -> CardFacts {
        let card = info::card(ordinal).ok();
        let management = Management::open().ok();
        let now = management.as_ref().zip(card.as_ref()).and_then(|(management, card)| management.moment(&card.uuid));
        let dotted = |(major, minor): (i32, i32)| format!("{major}.{minor}");
        let nvrtc = Some(nvrtc::version()).filter(|version| *version != (0, 0)).map(dotted);
        let arch = card.as_ref().and_then(|card| card.arch).filter(|_| nvrtc.is_some());
        CardFacts {
            driver: management.and_then(|management| management.driver()),
            cuda: info::driver_version().ok().map(|version| dotted((version / 1000, version % 1000 / 10))),
            gpu: card.as_ref().map(|card| card.name.clone()),
            pci: card.as_ref().map(|card| card.pci.clone()),
            uuid: card.map(|card| card.uuid),
            ecc: now.as_ref().and_then(|now| now.ecc),
            power_limit_w: now.and_then(|now| now.power_limit_w),
            nvrtc_options: arch.map(|arch| nvrtc::options(arch).join(" ")),
            nvrtc,
        }
    }

    /// Writes the columns of the card into `row`.
    pub(crate) fn stamp(&self, row: &mut Row) {
        let CardFacts { driver, cuda, gpu, uuid, pci, ecc, power_limit_w, nvrtc, nvrtc_options } = self.clone();
        row.driver = driver;
        row.cuda = cuda;
        row.gpu = gpu;
        row.gpu_uuid = uuid;
        row.gpu_pci = pci;
        row.gpu_ecc = ecc;
        row.gpu_power_limit_w = power_limit_w;
        row.nvrtc = nvrtc;
        row.nvrtc_options = nvrtc_options;
    }
}

/// `time` as RFC 3339 in UTC, to the second.
pub(crate) fn rfc3339_utc(time: SystemTime) -> String {
    let [year, month, day, hour, minute, second] = civil(time);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn run_id(time: SystemTime, process: u32) -> String {
    let [year, month, day, hour, minute, second] = civil(time);
    let mut hash = Fnv1a::default();
    (time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos(), process).hash(&mut hash);
    let tail = hash.finish() >> 32;
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}Z-{tail:08x}")
}

/// Year, month, day, hour, minute, second of `time` in UTC; a time before 1970 is 1970.
fn civil(time: SystemTime) -> [u64; 6] {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // Counted from 1 March of year 0, a 400-year era has 146,097 days and the leap day is a year's last.
    let days = seconds / 86_400 + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months from March have 31, 30, 31, 30, 31 days twice over: 153 days every five.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    [year, month, day, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60]
}

/// Commit and dirtiness of the work tree whose top is `tree`; nulls if it is none, or there is no git, or the commit is
/// younger than a program `built` then: it says nothing of what that was built from.
fn git(tree: &Path, built: Option<SystemTime>) -> (Option<String>, Option<bool>) {
    let ask = |args: &[&str]| {
        let output = Command::new("git").arg("--no-optional-locks").arg("-C").arg(tree).args(args).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // A source tree unpacked inside someone else's repository has that repository's commit, which says nothing.
    let top = ask(&["rev-parse", "--show-toplevel"]).and_then(|top| Path::new(&top).canonicalize().ok());
    if top.is_none() || top != tree.canonicalize().ok() {
        return (None, None);
    }
    let head = ask(&["log", "-1", "--no-show-signature", "--format=%H %ct"]);
    let head = head.as_deref().and_then(|line| line.split_once(' '));
    let committed = head.and_then(|(_, seconds)| Some(UNIX_EPOCH + Duration::from_secs(seconds.parse().ok()?)));
    if committed.zip(built).is_some_and(|(committed, built)| built < committed) {
        return (None, None);
    }
    let sha = head.map(|(sha, _)| sha.to_owned());
    let dirty = ask(&["status", "--porcelain", "--untracked-files=no"]).map(|changes| !changes.is_empty());
    (sha, dirty)
}

/// FNV-1a, 64 bits, of a file's bytes, as `fnv1a64:<16 hex digits>`; `None` if it cannot be read.
pub(crate) fn file_hash(path: &Path) -> Option<String> {
    let mut file = std::fs::File::open(path).ok()?;
    let mut hash = Fnv1a::default();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block).ok()? {
            0 => return Some(format!("fnv1a64:{:016x}", hash.finish())),
            read => hash.write(&block[..read]),
        }
    }
}

/// The words as a shell would read them back; the first by its file name only.
pub(crate) fn command_line(words: impl Iterator<Item = String>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@+%".contains(c);
    let quote = |(at, word): (usize, String)| {
        let word = match Path::new(&word).file_name() {
            Some(name) if at == 0 => name.to_string_lossy().into_owned(),
            _ => word,
        };
        let quoted = word.is_empty() || !word.chars().all(plain);
        if quoted { format!("'{}'", word.replace('\'', "'\\''")) } else { word }
    };
    words.enumerate().map(quote).collect::<Vec<_>>().join(" ")
}

fn cpu_name(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key))?;
        Some(line.split_once(':')?.1.trim().to_owned()).filter(|name| !name.is_empty())
    };
    // x86 says "model name"; Arm boards say "Model" or "Hardware", and servers only their part number.
    value("model name")
        .or_else(|| value("Model"))
        .or_else(|| value("Hardware"))
        .or_else(|| Some(format!("implementer {} part {}", value("CPU implementer")?, value("CPU part")?)))
}

fn os() -> Option<String> {
    let name = read("/etc/os-release").and_then(|text| os_name(&text));
    let kernel = read("/proc/sys/kernel/osrelease").map(|text| format!("Linux {}", text.trim()));
    match (name, kernel) {
        (Some(name), Some(kernel)) => Some(format!("{name}, {kernel}")),
        (name, kernel) => name.or(kernel).or_else(|| Some(std::env::consts::OS.to_owned())),
    }
}

fn os_name(release: &str) -> Option<String> {
    let value = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
    Some(value.trim().trim_matches(['"', '\'']).to_owned()).filter(|name| !name.is_empty())
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use highwater::device::Arch;
    use std::time::Duration;

    #[test]
    fn dates_hold_over_leap_years_and_centuries() {
        let at = |seconds| rfc3339_utc(UNIX_EPOCH + Duration::from_secs(seconds));
        // Each from `date -u -d @N +%FT%TZ`.
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(951_868_800), "2000-03-01T00:00:00Z");
        assert_eq!(at(1_709_210_096), "2024-02-29T12:34:56Z");
        assert_eq!(at(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
        assert_eq!(rfc3339_utc(UNIX_EPOCH - Duration::from_secs(5)), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn run_ids_sort_by_time_and_differ_between_processes() {
        let time = UNIX_EPOCH + Duration::from_secs(1_709_210_096);
        assert!(run_id(time, 1).starts_with("20240229T123456Z-"));
        assert_ne!(run_id(time, 1), run_id(time, 2));
        assert_ne!(run_id(time, 1), run_id(time + Duration::from_nanos(1), 1));
    }

    #[test]
    fn file_hashes_are_the_published_fnv1a() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        // Test vectors of the FNV authors.
        for (text, hash) in [("", "cbf29ce484222325"), ("a", "af63dc4c8601ec8c"), ("foobar", "85944171f73967e8")] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(file_hash(&path).unwrap(), format!("fnv1a64:{hash}"));
        }
        assert_eq!(file_hash(&dir.path().join("none")), None);
    }

    #[test]
    fn a_card_s_facts_reach_the_row_and_what_is_not_known_is_null() {
        let facts = CardFacts {
            driver: Some("580.95.05".into()),
            cuda: Some("12.8".into()),
            gpu: Some("NVIDIA H200".into()),
            uuid: Some("0123456789abcdef0123456789abcdef".into()),
            pci: Some("0000:1B:00.0".into()),
            ecc: Some(true),
            power_limit_w: Some(700.0),
            nvrtc: Some("13.0".into()),
            nvrtc_options: Some(nvrtc::options(Arch::Sm90a).join(" ")),
        };
        let mut row = Row::default();
        facts.stamp(&mut row);
        assert_eq!((row.driver.as_deref(), row.cuda.as_deref()), (Some("580.95.05"), Some("12.8")));
        assert_eq!((row.gpu.as_deref(), row.gpu_uuid), (Some("NVIDIA H200"), facts.uuid));
        assert_eq!((row.gpu_ecc, row.gpu_power_limit_w), (Some(true), Some(700.0)));
        assert_eq!((row.gpu_pci.as_deref(), row.nvrtc.as_deref()), (Some("0000:1B:00.0"), Some("13.0")));
        let options = row.nvrtc_options.unwrap();
        assert!(options.starts_with("--gpu-architecture=sm_90a --std=c++17 "), "{options}");
        let mut row = Row::default();
        CardFacts::default().stamp(&mut row);
        assert_eq!(row, Row::default());
    }

    #[test]
    fn command_lines_can_be_pasted_back() {
        let words = ["/a/b/highwater", "sweep", "--axis", "chunk[pow2]=[9:13]", "it's", "", "a b", "@ids.json"];
        let line = command_line(words.iter().map(|w| (*w).to_owned()));
        assert_eq!(line, r"highwater sweep --axis 'chunk[pow2]=[9:13]' 'it'\''s' '' 'a b' @ids.json");
    }

    #[test]
    fn machine_files_are_read_or_null() {
        assert_eq!(
            cpu_name("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz: x\n").as_deref(),
            Some("Fast CPU @ 3 GHz: x")
        );
        let arm = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\n";
        assert_eq!(cpu_name(arm).as_deref(), Some("implementer 0x41 part 0xd40"));
        assert_eq!(cpu_name("rubbish"), None);
        assert_eq!(os_name("NAME=x\nPRETTY_NAME=\"Some Linux 12\"\n").as_deref(), Some("Some Linux 12"));
        assert_eq!(os_name("PRETTY_NAME=\"\""), None);
    }

    #[test]
    fn a_folder_that_is_no_work_tree_has_no_commit() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(git(dir.path(), None), (None, None));
        assert_eq!(git(&dir.path().join("none"), None), (None, None));
        // A folder inside a work tree is not the tree.
        assert_eq!(git(&Path::new(env!("CARGO_MANIFEST_DIR")).join("harness"), None), (None, None));
    }

    #[test]
    fn a_committed_tree_has_its_commit_and_a_changed_one_is_dirty() {
        let dir = tempfile::tempdir().unwrap();
        let run = |args: &[&str]| {
            let who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"];
            Command::new("git").arg("-C").arg(dir.path()).args(who).args(args).output().map(|o| o.status.success())
        };
        if run(&["init", "-q"]).is_err() {
            return; // no git here: nulls, as the test above shows
        }
        std::fs::write(dir.path().join("f"), "1").unwrap();
        assert!(run(&["add", "f"]).unwrap() && run(&["commit", "-q", "-m", "x"]).unwrap());
        let (sha, dirty) = git(dir.path(), Some(SystemTime::now() + Duration::from_secs(60)));
        assert!(sha.is_some_and(|sha| sha.len() >= 40 && sha.bytes().all(|b| b.is_ascii_hexdigit())));
        assert_eq!(dirty, Some(false));
        std::fs::write(dir.path().join("f"), "2").unwrap();
        assert_eq!(git(dir.path(), None).1, Some(true));
        assert_eq!(git(dir.path(), Some(UNIX_EPOCH)), (None, None), "built before its commit");
    }

    #[test]
    fn this_process_is_described_and_stamped() {
        let provenance = Provenance::gather();
        let mut row = Row::default();
        provenance.stamp(&mut row);
        assert_eq!(row.schema, crate::record::SCHEMA);
        assert_eq!(row.run, provenance.run);
        assert_eq!(row.version, env!("CARGO_PKG_VERSION"));
        assert_eq!(row.profile, if cfg!(debug_assertions) { "debug" } else { "release" });
        let (rustc, flags) = (row.rustc.unwrap(), row.cargo_flags.unwrap());
        assert!(rustc.starts_with("1.") && rustc.contains('('), "{rustc}");
        let profile = if cfg!(debug_assertions) { "--profile " } else { "--release " };
        assert!(flags.starts_with(profile), "{flags}");
        for part in [" opt-level=", " target=", std::env::consts::ARCH, " target-features="] {
            assert!(flags.contains(part), "{part} is missing in {flags}");
        }
        assert!(cfg!(debug_assertions) || flags.contains(" lto=thin "), "the manifest's own setting: {flags}");
        assert!(row.cores.unwrap() >= 1);
        if cfg!(target_os = "linux") {
            assert!(row.ram_bytes.unwrap() > 1 << 20);
            assert!(row.binary_hash.unwrap().starts_with("fnv1a64:"));
            assert!(row.os.unwrap().contains("Linux"));
        }
    }
}
