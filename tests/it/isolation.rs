//! Sweeps whose cells break: every planned cell has a row, a killed sweep goes on, and what broke says how.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::verb::{code, output as run, rows, text};

const BIN: &str = env!("CARGO_BIN_EXE_highwater");
/// Six cells, of which `worker-...@chunk=64,batch=1` is the second.
const AXES: [&str; 6] = ["--axis", "chunk=16,64,128", "--axis", "batch=1,2", "--output", "4"];

fn sweep(dir: &Path, extra: &[&str]) -> Output {
    let out = dir.display().to_string();
    run(&[&["sweep", "tiny", "--device", "cpu", "--repetitions", "1", "--out", &out], &AXES[..], extra].concat())
}

/// (chunk, batch) of every row, and of every line of the CSV, which must agree.
fn cells(dir: &Path) -> Vec<(u64, u64)> {
    let number = |row: &Value, column: &str| row[column].as_u64().unwrap();
    let of_jsonl: Vec<_> = rows(dir).iter().map(|row| (number(row, "chunk"), number(row, "batch"))).collect();
    let mut csv = csv::Reader::from_path(dir.join("sweep.csv")).unwrap();
    let header = csv.headers().unwrap().clone();
    let at = |column: &str| header.iter().position(|name| name == column).unwrap();
    let (chunk, batch) = (at("chunk"), at("batch"));
    let of_csv: Vec<(u64, u64)> = csv
        .records()
        .map(Result::unwrap)
        .map(|row| (row[chunk].parse().unwrap(), row[batch].parse().unwrap()))
        .collect();
    assert_eq!(of_jsonl, of_csv);
    of_jsonl
}

const ALL: [(u64, u64); 6] = [(16, 1), (64, 1), (128, 1), (16, 2), (64, 2), (128, 2)];

#[test]
fn a_worker_is_started_with_the_flags_before_the_verb_too() {
    let dir = tempfile::tempdir().unwrap();
    let toolkit = dir.path().join("toolkit");
    std::fs::create_dir(&toolkit).unwrap();
    // Never loaded: no cell is a card's.
    std::fs::write(toolkit.join("libnvrtc.so.13"), "").unwrap();
    let (cuda, out) = (toolkit.display().to_string(), dir.path().join("out").display().to_string());
    let words = ["--cuda", &cuda, "sweep", "tiny", "--device", "cpu", "--axis", "chunk=16", "--output", "2"];
    let hang = ["--fault", "worker-hang@chunk=16,batch=1", "--cell-timeout", "60", "--out", &out];
    let mut command = Command::new(BIN);
    let mut child = command.args(words).args(hang).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let deadline = Instant::now() + Duration::from_secs(60);
    let worker = loop {
        let pids = std::fs::read_to_string(&children).unwrap_or_default();
        let lines = pids.split_whitespace().filter_map(|pid| std::fs::read(format!("/proc/{pid}/cmdline")).ok());
        let words = lines.map(|line| String::from_utf8(line).unwrap().replace('\0', " "));
        if let Some(words) = words.into_iter().find(|words| words.contains(" worker ")) {
            break words;
        }
        assert!(Instant::now() < deadline, "no worker in {pids:?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    let start = format!("highwater worker --group 0 --start 0 --cuda {cuda} tiny --device cpu --axis chunk=16 ");
    assert!(worker.starts_with(&start), "{worker}");
}

#[test]
fn whatever_breaks_at_a_cell_every_cell_has_its_row() {
    let dir = tempfile::tempdir().unwrap();
    for (fault, extra, status, exit, detail, note) in [
        ("panic", &[][..], "error", 1, "panicked", "panicked"),
        ("abort", &[], "lost", 1, "signal 6 (SIGABRT); it last printed: about to abort", "SIGABRT"),
        ("kill", &[], "lost", 1, "signal 9 (SIGKILL", "SIGKILL"),
        ("hang", &["--cell-timeout", "5"], "timeout", 1, "no answer within 5 s", "ran past 5 s"),
        ("sticky", &[], "error", 1, "CUDA_ERROR_ILLEGAL_ADDRESS", "context failed"),
        ("leak", &[], "ok", 0, "", "1048576 B (1.0 MiB) more than its weights and pools"),
        ("noise", &[], "ok", 0, "", ""),
    ] {
        let out = dir.path().join(fault);
        let fault = format!("worker-{fault}@chunk=64,batch=1");
        let ran = sweep(&out, &[&["--fault", &fault], extra].concat());
        assert_eq!(code(&ran), exit, "{fault}: {}", text(&ran));
        assert_eq!(cells(&out), ALL, "{fault}");
        for (at, row) in rows(&out).iter().enumerate() {
            let hit = at == 1;
            assert_eq!(row["status"], if hit { status } else { "ok" }, "{fault}: {row}");
            assert_eq!(row["workers_replaced"], u64::from(hit && !note.is_empty()), "{fault}: {row}");
            assert_eq!(row["fault"], fault);
            let says = |column: &str| row[column].as_str().unwrap_or_default().to_owned();
            if hit {
                assert!(says("detail").contains(detail), "{fault}: {row}");
                assert!(says("worker_note").contains(note), "{fault}: {row}");
                assert!(note.is_empty() || text(&ran).contains(note), "{fault}: {}", text(&ran));
            } else {
                assert!(row["detail"].is_null() && row["worker_note"].is_null(), "{row}");
            }
        }
    }
}

#[test]
fn where_no_worker_can_be_started_any_more_the_rest_is_lost_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let ran = sweep(dir.path(), &["--fault", "worker-lost@chunk=128,batch=1"]);
    assert_eq!(code(&ran), 1);
    assert_eq!(cells(dir.path()), ALL);
    let rows = rows(dir.path());
    let statuses: Vec<&str> = rows.iter().map(|row| row["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["ok", "ok", "lost", "lost", "lost", "lost"]);
    assert!(rows[2]["detail"].as_str().unwrap().contains("died while it ran this cell"));
    for row in &rows[3..] {
        let detail = row["detail"].as_str().unwrap();
        assert!(detail.contains("3 times in a row") && detail.contains("CUDA_ERROR_NO_DEVICE"), "{detail}");
    }
}

#[test]
fn running_out_of_memory_is_an_answer_and_the_worker_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run").display().to_string();
    let args = ["--axis", "chunk=16,8192", "--axis", "batch=1,64,2", "--output", "4", "--vram", "80MiB"];
    let head = ["sweep", "tiny", "--device", "cpu", "--repetitions", "1", "--out", &out];
    let ran = run(&[&head[..], &args[..]].concat());
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    let rows = rows(Path::new(&out));
    assert_eq!(rows.len(), 6);
    assert!(rows.iter().any(|row| row["status"] == "oom_predicted" && row["oom_tag"].is_string()));
    assert_eq!(rows[4]["status"], "ok", "{}", rows[4]);
    assert!(rows.iter().all(|row| row["workers_replaced"].is_null() || row["workers_replaced"] == 0));
}

#[test]
fn in_this_process_or_in_a_worker_the_bytes_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (dir.path().join("here"), dir.path().join("there"));
    for (out, extra) in [(&here, &["--in-process"][..]), (&there, &[])] {
        let out = out.display().to_string();
        let ran = run(&[&["sweep", "tiny", "--device", "plan", "--out", &out], &AXES[..], extra].concat());
        assert_eq!(code(&ran), 0, "{}", text(&ran));
    }
    let mut pairs = rows(&here).into_iter().zip(rows(&there));
    assert!(pairs.all(|(mut a, mut b)| {
        for column in ["time", "run", "argv", "workers_replaced"] {
            (a[column], b[column]) = (Value::Null, Value::Null);
        }
        assert_eq!(a, b);
        true
    }));
    let refused = sweep(&dir.path().join("x"), &["--in-process", "--fault", "worker-kill"]);
    assert_eq!(code(&refused), 2, "{}", text(&refused));
    assert!(!dir.path().join("x").exists());
}

/// A sweep in the background, slow enough to be killed in its middle.
struct Slow {
    child: Child,
    out: PathBuf,
}

impl Slow {
    const CELLS: usize = 8;

    fn args(out: &Path) -> Vec<String> {
        let axes = "--axis chunk=16,32,48,64 --axis batch=1,2 --prompt 64 --output 40".split(' ').map(String::from);
        let head = ["sweep", "tiny", "--device", "cpu", "--cell-seconds", "1", "--out"].map(String::from);
        head.into_iter().chain([out.display().to_string()]).chain(axes).collect()
    }

    fn start(out: &Path) -> Slow {
        let mut command = Command::new(BIN);
        command.args(Slow::args(out)).stdout(Stdio::null()).stderr(Stdio::null());
        Slow { child: command.spawn().unwrap(), out: out.to_owned() }
    }

    /// Waits until `count` rows are on disk.
    fn wait_for(&self, count: usize) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let journal = self.out.join("sweep.jsonl");
        while std::fs::read_to_string(&journal).map_or(0, |text| text.lines().count()) < count {
            assert!(Instant::now() < deadline, "no row after a minute");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The processes that it started.
    fn children(&self) -> Vec<u32> {
        children(self.child.id())
    }

    /// By signal 9.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn children(process: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn is_running(process: u32) -> bool {
    // A zombie's state is Z: it has ended.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim().is_empty() && !rest.trim().starts_with(['Z', 'X']))
}

fn gone_within(process: u32, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    while is_running(process) {
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

#[test]
fn a_sweep_killed_in_its_middle_goes_on_and_runs_no_finished_cell_again() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut slow = Slow::start(&out);
    slow.wait_for(3);
    let workers = slow.children();
    assert_eq!(workers.len(), 1, "one worker");
    slow.kill();
    // The worker computes for nobody now and must end by itself.
    assert!(gone_within(workers[0], Duration::from_secs(10)), "worker {} outlives its sweep", workers[0]);

    let before = rows(&out);
    assert!((3..Slow::CELLS).contains(&before.len()), "{} rows", before.len());
    let plan: Value = serde_json::from_slice(&std::fs::read(out.join("sweep.plan.json")).unwrap()).unwrap();
    let planned: Vec<&Value> = plan["cells"].as_array().unwrap().iter().map(|cell| &cell["cell"]).collect();
    assert_eq!(planned.len(), Slow::CELLS);
    // A crash in the middle of a write.
    let journal = out.join("sweep.jsonl");
    let whole = std::fs::read(&journal).unwrap();
    std::fs::write(&journal, [&whole[..], b"{\"schema\":4,\"chunk\":"].concat()).unwrap();

    let mut args = Slow::args(&out);
    args.push("--resume".into());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let ran = run(&args);
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    assert!(text(&ran).contains("torn"), "{}", text(&ran));
    let after = rows(&out);
    assert_eq!(after.iter().map(|row| &row["cell"]).collect::<Vec<_>>(), planned);
    assert_eq!(cells(&out).len(), Slow::CELLS);
    for (at, row) in after.iter().enumerate() {
        assert_eq!(row["cached"], at < before.len(), "{row}");
        assert_eq!(row["run"], before[0]["run"]);
        if let Some(earlier) = before.get(at) {
            let mut earlier = earlier.clone();
            earlier["cached"] = true.into();
            assert_eq!(*row, earlier, "a finished cell's row, its samples and its time included");
        }
    }

    // With nothing left to do it changes nothing and starts no worker.
    let ran = run(&args);
    assert!(code(&ran) == 0 && text(&ran).contains("8 of 8 cells are of an earlier run"), "{}", text(&ran));
    let again = rows(&out);
    assert!(again.iter().zip(&after).all(|(a, b)| a["time"] == b["time"] && a["cached"] == true));
}

#[test]
fn two_sweeps_into_one_folder_do_not_mix_their_rows() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut slow = Slow::start(&out);
    slow.wait_for(1);
    let mut args = Slow::args(&out);
    args.push("--resume".into());
    let ran = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(code(&ran) == 1 && text(&ran).contains("another sweep writes into"), "{}", text(&ran));
    assert!(slow.child.wait().unwrap().success());
    assert_eq!(cells(&out).len(), Slow::CELLS);
    assert!(rows(&out).iter().all(|row| row["cached"] == false));
}

#[test]
fn a_comparison_s_run_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("ab");
    let mut command = Command::new(BIN);
    command.args(["ab", "--base", BIN, "--cand", BIN, "--out"]).arg(&out).arg("--");
    let sweep = Slow::args(Path::new("")).into_iter().filter(|word| word != "--out" && !word.is_empty());
    let child = command.args(sweep).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut slow = Slow { child, out: out.join("0001-base") };
    slow.wait_for(1);
    let run = slow.children();
    assert_eq!(run.len(), 1);
    slow.kill();
    assert!(gone_within(run[0], Duration::from_secs(60)));
    assert!(cells(&slow.out).len() < Slow::CELLS, "it ran to its own end");
}

#[test]
fn of_sweeps_begun_into_one_folder_at_once_one_runs_and_its_plan_stays() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let out = dir.path().join(round.to_string());
        let args = |i: usize| {
            let head = ["sweep", "tiny", "--device", "plan", "--out"].map(String::from);
            let tail = ["--axis".to_owned(), format!("chunk={}", 16 + i)];
            head.into_iter().chain([out.display().to_string()]).chain(tail).collect::<Vec<_>>()
        };
        let start = |i| Command::new(BIN).args(args(i)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let mut begun: Vec<Child> = (0..6).map(start).collect();
        let won: Vec<usize> = (0..6).filter(|i| begun[*i].wait().unwrap().success()).collect();
        let &[winner] = &won[..] else { panic!("{won:?} of one folder succeeded") };
        let again = run(&args(winner).iter().map(String::as_str).chain(["--resume"]).collect::<Vec<_>>());
        assert_eq!(code(&again), 0, "{}", text(&again));
        assert!(rows(&out).iter().all(|row| row["cached"] == true && row["chunk"] == 16 + winner));
    }
}

#[test]
fn a_sweep_killed_before_its_first_row_or_not_begun_starts_anew_with_resume() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let ran = sweep(&out, &["--resume"]);
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    std::fs::remove_file(out.join("sweep.jsonl")).unwrap();
    std::fs::remove_file(out.join("sweep.csv")).unwrap();
    let ran = sweep(&out, &["--resume"]);
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    assert_eq!(cells(&out), ALL);
    // Rows without a plan are not gone on with, and nothing is overwritten without being asked.
    let again = sweep(&out, &[]);
    assert!(code(&again) == 1 && text(&again).contains("--resume"), "{}", text(&again));
    std::fs::remove_file(out.join("sweep.plan.json")).unwrap();
    let ran = sweep(&out, &["--resume"]);
    assert!(code(&ran) == 1 && text(&ran).contains("sweep.plan.json"), "{}", text(&ran));
    assert_eq!(cells(&out), ALL);
}

#[test]
fn a_sweep_whose_journal_is_gone_keeps_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run").display().to_string();
    let args = ["sweep", "tiny", "--device", "plan", "--axis", "chunk=16,32", "--out", &out, "--resume"];
    assert_eq!(code(&run(&args)), 0);
    std::fs::remove_file(dir.path().join("run/sweep.jsonl")).unwrap();
    let csv = std::fs::read(dir.path().join("run/sweep.csv")).unwrap();
    let refused = run(&args);
    assert!(code(&refused) == 1 && text(&refused).contains("holds 2 rows"), "{}", text(&refused));
    assert!(csv == std::fs::read(dir.path().join("run/sweep.csv")).unwrap());
}

#[test]
fn resuming_runs_failures_again_unless_told_to_keep_them() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let fault = ["--fault", "worker-kill@chunk=64"];
    assert_eq!(code(&sweep(&out, &fault)), 1);
    let first = rows(&out);
    let kept = sweep(&out, &[&fault[..], &["--resume", "--keep-failures"]].concat());
    assert_eq!(code(&kept), 1);
    assert!(rows(&out).iter().zip(&first).all(|(a, b)| a["time"] == b["time"] && a["cached"] == true));
    std::thread::sleep(Duration::from_millis(1100));
    let again = sweep(&out, &[&fault[..], &["--resume"]].concat());
    assert_eq!(code(&again), 1);
    assert_eq!(cells(&out), ALL);
    for (now, then) in rows(&out).iter().zip(&first) {
        let failed = then["status"] == "lost";
        assert_eq!(now["cached"], !failed);
        assert_eq!(now["time"] != then["time"], failed, "{now}");
    }
}

#[test]
fn another_sweep_is_not_gone_on_with_and_each_difference_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    assert_eq!(code(&sweep(&out, &[])), 0);
    let before = std::fs::read(out.join("sweep.jsonl")).unwrap();
    for (extra, words) in [
        (&["--seed", "1"][..], "seed: 0 then, 1 now"),
        (&["--card", "h100"], "card: host then, h100 now"),
        (&["--dtype", "f32"], "dtype: bf16 then, f32 now"),
        (&["--axis", "depth=0,64"], "axes: 6 cells, 0 of them only then, 12 cells, 6 of them only"),
        (&["--shard", "1/2"], "shard: none then, 1/2 now"),
    ] {
        let ran = sweep(&out, &[&["--resume"], extra].concat());
        let said = text(&ran);
        assert!(code(&ran) == 1 && said.contains(words) && said.contains("--force"), "{said}");
        assert_eq!(std::fs::read(out.join("sweep.jsonl")).unwrap(), before, "{words}");
    }
    // Another program: its hash is in the plan.
    let path = out.join("sweep.plan.json");
    let plan = std::fs::read_to_string(&path).unwrap();
    let hash = rows(&out)[0]["binary_hash"].as_str().unwrap().to_owned();
    std::fs::write(&path, plan.replace(&hash, "fnv1a64:0000000000000000")).unwrap();
    let ran = sweep(&out, &["--resume"]);
    assert!(code(&ran) == 1 && text(&ran).contains("binary_hash: fnv1a64:0000000000000000 then"), "{}", text(&ran));
    std::fs::write(&path, &plan).unwrap();

    // Forced, it takes the rows of cells that are in both, and keeps the file as it was.
    let ran = sweep(&out, &["--resume", "--force", "--axis", "depth=0,64"]);
    assert_eq!(code(&ran), 0, "{}", text(&ran));
    let now = rows(&out);
    assert_eq!(now.len(), 12);
    assert!(now.iter().all(|row| row["cached"] == (row["depth"] == 0)));
    assert_eq!(std::fs::read(out.join("sweep.jsonl.before-1")).unwrap(), before);
}

#[test]
fn a_worker_s_end_between_cells_costs_no_cell() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut slow = Slow::start(&out);
    slow.wait_for(2);
    let victim = slow.children()[0];
    let killed = Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap();
    assert!(killed.success() && slow.child.wait().unwrap().code().is_some());
    assert!(!is_running(victim));
    assert_eq!(cells(&out).len(), Slow::CELLS);
    let rows = rows(&out);
    let replaced: u64 = rows.iter().filter_map(|row| row["workers_replaced"].as_u64()).sum();
    assert_eq!(replaced, 1);
    let lost = rows.iter().filter(|row| row["status"] == "lost").count();
    assert!(lost <= 1, "at most the cell that ran");
}

#[test]
fn a_worker_by_hand_and_broken_flags_are_refused() {
    let ran = run(&["worker", "--group", "0", "--start", "0", "tiny"]);
    assert!(code(&ran) == 1 && text(&ran).contains("not by hand"), "{}", text(&ran));
    for (args, words) in [
        (&["sweep", "tiny", "--resume"][..], "--out"),
        (&["sweep", "tiny", "--force", "--out", "x"], "--resume"),
        (&["sweep", "tiny", "--shard", "1/2"], "--out"),
        (&["sweep", "--shard", "1/2", "--out", "x"], "MODEL"),
        (&["sweep", "tiny", "--shard", "3/2", "--out", "x"], "1/N"),
        (&["sweep", "tiny", "--cell-timeout=-1", "--out", "x"], "outside 0"),
        (&["sweep", "tiny", "--cell-timeout", "nan", "--out", "x"], "outside 0"),
        (&["sweep", "tiny", "--fault", "worker-fly", "--out", "x"], "worker-kill"),
        (&["merge", "--out", "x"], "DIR"),
    ] {
        let ran = run(args);
        assert!(code(&ran) == 2 && text(&ran).contains(words), "{args:?}: {}", text(&ran));
    }
}
