//! A run that another program began ends with it: `ab`'s processes must not hold a card once `ab` is gone, however it went.

use std::process::Command;

use anyhow::{Result, bail};

/// Names the process that began this one and reads what it writes.
const PARENT: &str = "HIGHWATER_PARENT";

/// Has what `command` starts end, at the next cell or row, once this process is gone.
pub(crate) fn tie(command: &mut Command) {
    command.env(PARENT, std::process::id().to_string());
}

/// An error where the process that this one is tied to is gone.
pub(crate) fn refuse_orphan() -> Result<()> {
    let Ok(parent) = std::env::var(PARENT) else { return Ok(()) };
    let Ok(parent) = parent.parse::<u32>() else { bail!("{PARENT}={parent} is no process") };
    #[cfg(unix)]
    if std::os::unix::process::parent_id() != parent {
        bail!("process {parent}, which began this run, is gone");
    }
    Ok(())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_is_tied_to_this_process_names_it() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &format!("test ${PARENT} = $PPID")]);
        tie(&mut command);
        assert!(command.status().unwrap().success());
        refuse_orphan().unwrap();
    }
}
