//! What the driver's management library says of a card at this moment: clocks, power, heat, who else is on it. Nothing here
//! fails: a number that the library does not have is none.

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use serde::Serialize;

use crate::hygiene::Source;

/// The names the loader knows the library by.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// The library, open.
#[derive(Debug)]
pub(crate) struct Management(Nvml);

/// A card at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Moment {
    pub(crate) sm_clock_mhz: Option<u32>,
    pub(crate) sm_clock_max_mhz: Option<u32>,
    pub(crate) memory_clock_mhz: Option<u32>,
    pub(crate) memory_clock_max_mhz: Option<u32>,
    pub(crate) power_w: Option<f64>,
    pub(crate) power_limit_w: Option<f64>,
    pub(crate) temperature_c: Option<u32>,
    /// Why clocks are below what they could be; empty where nothing holds them, none where that is not known.
    pub(crate) throttled: Option<Vec<&'static str>>,
    pub(crate) ecc: Option<bool>,
    /// Other processes on the card; none where they are not told.
    pub(crate) others: Option<Vec<Process>>,
}

/// Another process on a card.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    pub(crate) name: Option<String>,
    pub(crate) bytes: Option<u64>,
}

impl Management {
    /// Opens the library; the error is a sentence.
    pub(crate) fn open() -> Result<Management, String> {
        let mut found = None;
        for name in NAMES {
            match Nvml::builder().lib_path(name.as_ref()).init() {
                Ok(nvml) => return Ok(Management(nvml)),
                Err(NvmlError::LibloadingError(_)) => {}
                Err(error) => found = Some(error),
            }
        }
        Err(match found {
            None => format!("{} was not found; it comes with the driver", NAMES[0]),
            Some(error) => format!("{} does not start: {error}; it must be of the driver's own version", NAMES[0]),
        })
    }

    /// The driver's version, as 580.95.05.
    pub(crate) fn driver(&self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    /// The card of this uuid (32 hexadecimal digits), as it is now; none where the library does not have it.
    pub(crate) fn moment(&self, uuid: &str) -> Option<Moment> {
        self.moment_of(uuid, false)
    }

    /// The same; `aboard` says that this process is on the card itself.
    fn moment_of(&self, uuid: &str, aboard: bool) -> Option<Moment> {
        let card = self.0.device_by_uuid(dashed(uuid)?).ok()?;
        let watts = |milliwatts: u32| f64::from(milliwatts) / 1e3;
        Some(Moment {
            sm_clock_mhz: card.clock_info(Clock::SM).ok(),
            sm_clock_max_mhz: card.max_clock_info(Clock::SM).ok(),
            memory_clock_mhz: card.clock_info(Clock::Memory).ok(),
            memory_clock_max_mhz: card.max_clock_info(Clock::Memory).ok(),
            power_w: card.power_usage().ok().map(watts),
            power_limit_w: card.enforced_power_limit().ok().map(watts),
            temperature_c: card.temperature(TemperatureSensor::Gpu).ok(),
            throttled: card.current_throttle_reasons().ok().map(reasons),
            ecc: card.is_ecc_enabled().ok().map(|state| state.currently_enabled),
            others: self.others(&card, aboard),
        })
    }

    fn others(&self, card: &Device, aboard: bool) -> Option<Vec<Process>> {
        let listed = card.running_compute_processes().ok()?;
        let listed = listed.into_iter().map(|process| Process {
            pid: process.pid,
            name: None,
            bytes: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            },
        });
        let mut others = foreign(listed.collect(), std::process::id(), aboard);
        for process in &mut others {
            process.name = self.0.sys_process_name(process.pid, 64).ok();
        }
        Some(others)
    }
}

/// The processes that are not this one. In a container the library may know this process by a number it does not know itself:
/// where it is on the card and its own number is not listed, one of those listed is it, and the one with the most memory is
/// taken to be, as its slab is most of the card.
fn foreign(mut listed: Vec<Process>, own: u32, aboard: bool) -> Vec<Process> {
    let here = listed.iter().position(|process| process.pid == own).or_else(|| {
        let largest = listed.iter().enumerate().max_by_key(|(_, process)| process.bytes);
        largest.map(|(at, _)| at).filter(|_| aboard)
    });
    if let Some(at) = here {
        listed.remove(at);
    }
    listed
}

/// A card that this process computes on, to be looked at while it does.
#[derive(Debug)]
pub(crate) struct CardSource {
    management: Management,
    uuid: String,
}

impl CardSource {
    /// Card `ordinal`; none where the library or the card does not answer.
    pub(crate) fn open(ordinal: u32) -> Option<CardSource> {
        let uuid = highwater::device::cuda::info::card(ordinal).ok()?.uuid;
        Some(CardSource { management: Management::open().ok()?, uuid })
    }
}

impl Source for CardSource {
    fn look(&mut self) -> Option<Moment> {
        self.management.moment_of(&self.uuid, true)
    }
}

impl Moment {
    /// One line.
    pub(crate) fn text(&self) -> String {
        let or = |value: Option<u32>| value.map_or("?".to_owned(), |value| value.to_string());
        let watts = |value: Option<f64>| value.map_or("?".to_owned(), |value| format!("{value:.0}"));
        let throttled = match &self.throttled {
            None => "unknown".to_owned(),
            Some(reasons) if reasons.is_empty() => "nothing".to_owned(),
            Some(reasons) => reasons.join(", "),
        };
        let ecc = self.ecc.map_or("?", |on| if on { "on" } else { "off" });
        let others = match &self.others {
            None => "unknown".to_owned(),
            Some(others) if others.is_empty() => "none".to_owned(),
            Some(others) => others
                .iter()
                .map(|process| {
                    let bytes =
                        process.bytes.map_or(String::new(), |bytes| format!(" {}", highwater::error::mib(bytes)));
                    format!("{} {}{bytes}", process.pid, process.name.as_deref().unwrap_or("?"))
                })
                .collect::<Vec<_>>()
                .join(", "),
        };
        format!(
            "SM {} of {} MHz, memory {} of {} MHz, {} of {} W, {} C, clocks held by {throttled}, ECC {ecc}, other \
             processes: {others}",
            or(self.sm_clock_mhz),
            or(self.sm_clock_max_mhz),
            or(self.memory_clock_mhz),
            or(self.memory_clock_max_mhz),
            watts(self.power_w),
            watts(self.power_limit_w),
            or(self.temperature_c),
        )
    }
}

/// As the library writes it: GPU-8-4-4-4-12.
fn dashed(uuid: &str) -> Option<String> {
    if uuid.len() != 32 || !uuid.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let parts = [&uuid[..8], &uuid[8..12], &uuid[12..16], &uuid[16..20], &uuid[20..]];
    Some(format!("GPU-{}", parts.join("-")))
}

fn reasons(set: ThrottleReasons) -> Vec<&'static str> {
    let named = [
        (ThrottleReasons::APPLICATIONS_CLOCKS_SETTING, "a clock setting"),
        (ThrottleReasons::SW_POWER_CAP, "the power limit"),
        (ThrottleReasons::HW_SLOWDOWN, "hardware slowdown"),
        (ThrottleReasons::SYNC_BOOST, "another card of its group"),
        (ThrottleReasons::SW_THERMAL_SLOWDOWN, "heat"),
        (ThrottleReasons::HW_THERMAL_SLOWDOWN, "heat, by the hardware"),
        (ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN, "the power brake"),
        (ThrottleReasons::DISPLAY_CLOCK_SETTING, "the display"),
        (ThrottleReasons::GPU_IDLE, "idleness"),
    ];
    named.into_iter().filter(|(reason, _)| set.contains(*reason)).map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_written_as_the_library_does() {
        assert_eq!(
            dashed("0123456789abcdef0123456789abcdef").as_deref(),
            Some("GPU-01234567-89ab-cdef-0123-456789abcdef")
        );
        for wrong in ["", "0123", "x123456789abcdef0123456789abcdef", "ééééééééééééééééé"] {
            assert_eq!(dashed(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn this_process_is_not_another_whatever_number_it_has() {
        let process = |pid: u32, bytes: Option<u64>| Process { pid, name: None, bytes };
        let pids = |listed: &[Process], aboard| {
            foreign(listed.to_vec(), 7, aboard).iter().map(|process| process.pid).collect::<Vec<u32>>()
        };
        let (own, other, big) = (process(7, Some(5)), process(8, Some(9)), process(900, Some(100)));
        assert_eq!(pids(&[other.clone(), own], true), [8]);
        assert_eq!(pids(&[other.clone(), big.clone()], true), [8]);
        assert_eq!(pids(&[other, big], false), [8, 900]);
        assert_eq!(pids(&[process(3, None)], true), Vec::<u32>::new());
        assert_eq!(pids(&[], true), Vec::<u32>::new());
    }

    #[test]
    fn what_is_not_known_is_said_so() {
        let text = Moment::default().text();
        assert!(text.contains("SM ? of ? MHz") && text.ends_with("other processes: unknown"), "{text}");
        let known = Moment {
            sm_clock_mhz: Some(345),
            power_w: Some(76.4),
            throttled: Some(reasons(ThrottleReasons::GPU_IDLE | ThrottleReasons::SW_POWER_CAP)),
            ecc: Some(true),
            others: Some(vec![Process { pid: 7, name: Some("python3".into()), bytes: Some(2 << 30) }]),
            ..Moment::default()
        };
        let text = known.text();
        for part in ["SM 345 of", "76 of ? W", "the power limit, idleness", "ECC on", "7 python3 2.00 GiB"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
