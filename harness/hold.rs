//! A folder held for one process: two sweeps that write into it at once would mix their rows.

use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Held until it is dropped or the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Held {
    #[cfg(target_os = "linux")]
    _name: std::os::unix::net::UnixListener,
}

fn make(dir: &Path) -> Result<()> {
    ensure!(!dir.is_file(), "{} is a file; rows are written into a folder", dir.display());
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create the folder {}", dir.display()))
}

/// Holds `dir`, which is made if need be. An error says that another process of this machine has it.
#[cfg(target_os = "linux")]
pub(crate) fn hold(dir: &Path) -> Result<Held> {
    use std::hash::{Hash as _, Hasher as _};
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixListener};

    make(dir)?;
    let path = dir.canonicalize().with_context(|| format!("cannot open {}", dir.display()))?;
    let mut hash = highwater::num::fnv::Fnv1a::default();
    path.hash(&mut hash);
    // A name without a file: the kernel forgets it with the process that has it.
    let name = SocketAddr::from_abstract_name(format!("highwater-{:016x}", hash.finish()))?;
    let bound = UnixListener::bind_addr(&name);
    let bound = bound.with_context(|| format!("another sweep writes into {}; wait for it or end it", dir.display()))?;
    Ok(Held { _name: bound })
}

/// Elsewhere nothing is held.
#[cfg(not(target_os = "linux"))]
pub(crate) fn hold(dir: &Path) -> Result<Held> {
    make(dir)?;
    Ok(Held {})
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn one_process_at_a_time_whatever_the_folder_is_called() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let held = hold(dir.path()).unwrap();
        let refused = format!("{:#}", hold(&dir.path().join(".")).unwrap_err());
        assert!(refused.contains("another sweep writes into"), "{refused}");
        hold(other.path()).unwrap();
        drop(held);
        hold(dir.path()).unwrap();
        hold(&dir.path().join("new")).unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        assert!(format!("{:#}", hold(&dir.path().join("file")).unwrap_err()).contains("is a file"));
    }
}
