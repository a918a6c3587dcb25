//! NVIDIA's Multi-Process Service (MPS): kernels of several processes run on a GPU concurrently instead of in
//! time slices.
//!
//! A small model leaves a GPU idle between launches. Four processes together reach 1.7M tokens/s in time slices,
//! and 2.2M under MPS (start-up included; mini preset, one H100; `docs/sweeps.md`). MPS reduces isolation: a GPU fault
//! of one process, such as an out-of-bounds access, ends all processes that share the server.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::ValueEnum;

/// Whether concurrent runs share a GPU through MPS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum MpsMode {
    /// If several runs share a GPU and MPS is installed
    #[default]
    Auto,
    /// Never: runs share a GPU in time slices
    Off,
}

const CONTROL: &str = "nvidia-cuda-mps-control";

/// The pipe directory in which CUDA looks for a server when `CUDA_MPS_PIPE_DIRECTORY` is not set.
const USUAL: &str = "/tmp/nvidia-mps";

/// The MPS server of this sweep. It is stopped on drop.
#[derive(Debug)]
pub(super) struct Mps {
    folder: PathBuf,
}

impl Mps {
    /// Starts a server. Returns `None` if MPS is not installed, or if a server is already running (the runs then use
    /// that server).
    pub(super) fn start() -> Option<Self> {
        if std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some() || Path::new(USUAL).join("control").exists()
        {
            return None;
        }
        // The folder of the server's pipes and sockets. The system limits the length of a socket's path (108 bytes on
        // Linux), and a path in the temporary folder is short regardless of the sweep's folder.
        let folder = std::env::temp_dir().join(format!("sage-train-mps-{}", std::process::id()));
        std::fs::create_dir_all(&folder).ok()?;
        let mps = Self { folder };
        // The runs select GPUs by the machine's GPU numbers, so the server must see all GPUs.
        let mut server = Command::new(CONTROL);
        let server = mps.set(&mut server).env_remove("CUDA_VISIBLE_DEVICES").arg("-d");
        let started = server.stdin(Stdio::null()).output();
        // If the start failed, `mps` is dropped here, which removes its folder.
        started.is_ok_and(|output| output.status.success()).then_some(mps)
    }

    /// Makes a command a client of this server.
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
