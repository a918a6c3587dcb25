//! NVIDIA's Multi-Process Service (MPS): kernels of several processes run on a GPU at once, and not in turns.
//!
//! Small models leave a GPU idle between launches. Four processes that take turns there reach 1.7M tokens/s together, four
//! that share it 2.2M, where one alone has 2.1M after its start (mini preset, one H100; `docs/sweeps.md`). The price: a GPU
//! fault of one process, such as an access out of bounds, ends all that share.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;

/// Whether runs side by side share a GPU through MPS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Sharing {
    /// Where several runs are side by side on a GPU and MPS is installed
    #[default]
    Auto,
    /// Never: runs take turns
    Off,
}

const CONTROL: &str = "nvidia-cuda-mps-control";

/// Where processes look for a server that nobody named.
const USUAL: &str = "/tmp/nvidia-mps";

/// A server of its own for one sweep, which ends with it. Nothing of the GPU's settings is changed.
#[derive(Debug)]
pub(super) struct Mps {
    folder: PathBuf,
}

impl Mps {
    /// Starts a server; nothing where there is no MPS, or where one is there already, which runs then use by themselves.
    pub(super) fn start() -> Option<Self> {
        if std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some() || Path::new(USUAL).join("control").exists()
        {
            return None;
        }
        // Its pipes have short names on every system's longest path.
        let folder = std::env::temp_dir().join(format!("sage-train-mps-{}", std::process::id()));
        std::fs::create_dir_all(&folder).ok()?;
        let mps = Self { folder };
        // Processes name devices as they are without a server: it must know them all.
        let mut server = Command::new(CONTROL);
        let server = mps.set(&mut server).env_remove("CUDA_VISIBLE_DEVICES").arg("-d");
        let started = server.stdin(Stdio::null()).output();
        // Dropped, it takes its folder away.
        started.is_ok_and(|output| output.status.success()).then_some(mps)
    }

    /// Tells a command which server to use.
    pub(super) fn set<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.folder).env("CUDA_MPS_LOG_DIRECTORY", &self.folder)
    }
}

impl Drop for Mps {
    fn drop(&mut self) {
        use std::io::Write;
        let child = self
            .set(&mut Command::new(CONTROL))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        if let Ok(mut child) = child {
            if let Some(mut stdin) = child.stdin.take() {
                let _ = stdin.write_all(b"quit\n");
            }
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
