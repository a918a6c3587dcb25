//! With feature `kernels`, compiles each `kernels/*.cu` into a separate fatbin: machine code for the known
//! architectures, and PTX for later ones.

#[path = "build/fingerprint.rs"]
mod fingerprint;
#[path = "build/params.rs"]
mod params;
#[path = "build/plans.rs"]
mod plans;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The architecture to build PTX for. All later GPUs can run this PTX, and have enough shared memory for this
/// architecture's plans (table `PLANS`).
const PTX: u32 = 89;

/// The `.cu` file with FP4 matmuls, and its architectures: 100 and 120, which have FP4 instructions, and 90 (Hopper),
/// on which tests emulate the instructions of 120.
const NVFP4: (&str, [u32; 3]) = ("attn_fwd_nvfp4", [90, 100, 120]);

/// The architectures without FP4 matmuls. Every architecture of the table `PLANS` must be here or in NVFP4.
const NO_NVFP4: [u32; 3] = [80, 86, 89];

/// The table of plans: how each kernel runs. The kernels include this file. `build/plans.rs` translates it to Rust.
const PLANS: &str = "include/sage/params/plans.def";

/// The headers with the kernels' arguments, from which the host's structs are generated. A header may use the headers
/// before it.
const PARAMS: [&str; 3] = ["sage/params/attention.cuh", "sage/params/ops.cuh", "sage/params/sla2.cuh"];

/// Environment variable that restricts the architectures, for quick builds: `CANDLE_SAGE_CUDA_ARCHS=90` or
/// `80,90`.
const SELECTION: &str = "CANDLE_SAGE_CUDA_ARCHS";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    if env::var_os("CARGO_FEATURE_KERNELS").is_none() {
        return;
    }
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", SELECTION] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=kernels");
    if let Err(message) = build() {
        // Prints only the message; a panic would add its own text.
        eprintln!("\n{message}\n");
        std::process::exit(1);
    }
}

fn build() -> Result<(), String> {
    let root = kernels()?;
    println!("cargo:rerun-if-changed={}", root.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let nvcc = find_nvcc()?;
    let version = output(Command::new(&nvcc).arg("--version"))?;
    let definitions = fs::read_to_string(root.join(PLANS)).map_err(|e| format!("{PLANS}: {e}"))?;
    let all = plans::architectures(&definitions)?;
    if let Some(other) = all.iter().find(|arch| !NVFP4.1.contains(arch) && !NO_NVFP4.contains(arch)) {
        return Err(format!("build.rs: sm_{other} of {PLANS} is neither in NVFP4 nor in NO_NVFP4"));
    }
    let architectures = architectures(&nvcc, &all)?;
    let mut flags: Vec<String> =
        ["-fatbin", "-std=c++20", "-O3", "-Xptxas", "-v", "--threads", "0", "-I"].map(String::from).into();
    flags.push(root.join("include").display().to_string());
    let machine_code =
        |arch: u32, own: &str| format!("-gencode=arch=compute_{arch}{own},code=sm_{arch}{own}");
    // `wgmma` needs target sm_90a, which later architectures cannot run.
    let own = |arch: u32| if arch == 90 { "a" } else { "" };
    let mut targets: Vec<String> = architectures.iter().map(|&arch| machine_code(arch, own(arch))).collect();
    let ptx = format!("-gencode=arch=compute_{PTX},code=compute_{PTX}");
    targets.push(ptx.clone());
    // FP4 matmuls need the family targets sm_100f and sm_120f. Compilers before 12.9 do not support families and need
    // sm_100a and sm_120a.
    let family = if release(&version) >= (12, 9) { "f" } else { "a" };
    let with_nvfp4 = architectures.iter().filter(|arch| NVFP4.1.contains(arch));
    let mut nvfp4_targets: Vec<String> =
        with_nvfp4.map(|&arch| machine_code(arch, if arch >= 100 { family } else { own(arch) })).collect();
    if nvfp4_targets.is_empty() {
        nvfp4_targets.push(ptx);
    }

    fs::write(out.join("plans.rs"), plans::table(&definitions)?).map_err(|e| e.to_string())?;
    arguments(&root.join("include"), &nvcc, &out)?;
    constants(&root, &out)?;
    let images = shared_by_builds(&out)?;
    let sources = fingerprint::files(&root, "cu").map_err(|e| e.to_string())?;
    let mut table = String::from("pub(super) static FAMILIES: &[(&str, &[u8])] = &[\n");
    let mut report = String::new();
    for source in &sources {
        let inputs = fingerprint::with_headers(source, &root.join("include")).map_err(|e| e.to_string())?;
        let name = source.file_stem().and_then(|s| s.to_str()).ok_or("a kernel's name is not UTF-8")?;
        let flags = [&flags[..], if name == NVFP4.0 { &nvfp4_targets } else { &targets }].concat();
        let print = fingerprint::of(&inputs, &[&version, &flags.join(" ")]).map_err(|e| e.to_string())?;
        let fatbin = images.join(format!("{name}-{print:016x}.fatbin"));
        let resources = fatbin.with_extension("txt");
        if !(fatbin.exists() && resources.exists()) {
            compile(&nvcc, &flags, source, &fatbin, &resources)?;
        }
        writeln!(table, "    ({name:?}, include_bytes!({:?})),", fatbin)
            .expect("writing to a string cannot fail");
        report.push_str(&fs::read_to_string(&resources).map_err(|e| e.to_string())?);
    }
    table.push_str("];\n");
    writeln!(table, "pub(super) const ENTRIES: &[&str] = &{:?};", entries(&report)).expect("a string");
    writeln!(table, "pub(super) const ARCHITECTURES: &[u32] = &{architectures:?};").expect("a string");
    writeln!(table, "pub(super) const PTX: u32 = {PTX};").expect("a string");
    writeln!(table, "#[cfg(test)]\npub(super) const NVFP4: (&str, [u32; 3]) = {NVFP4:?};").expect("a string");
    writeln!(table, "pub(super) const NVFP4_FAMILIES: bool = {};", family == "f").expect("a string");
    writeln!(table, "#[cfg(test)]\npub(super) const RESOURCES: &str = {report:?};").expect("a string");
    fs::write(out.join("kernels.rs"), table).map_err(|e| e.to_string())
}

/// The names of the kernels that ptxas reported, each once.
fn entries(report: &str) -> Vec<&str> {
    let lines = report.lines().filter(|line| line.contains("Compiling entry function"));
    let names: BTreeSet<&str> = lines.filter_map(|line| line.split('\'').nth(1)).collect();
    names.into_iter().collect()
}

/// Writes the kernels' arguments as Rust structs, and checks the structs' layout with the kernels' compiler.
fn arguments(include: &Path, nvcc: &Path, out: &Path) -> Result<(), String> {
    let mut structs = Vec::new();
    for header in PARAMS {
        let text = fs::read_to_string(include.join(header)).map_err(|e| format!("{header}: {e}"))?;
        params::read(header, &text, &mut structs)?;
    }
    let checks = out.join("params.cc");
    let written = fs::write(out.join("params.rs"), params::in_rust(&structs));
    written
        .and_then(|()| fs::write(&checks, params::in_cpp(&PARAMS, &structs)))
        .map_err(|e| e.to_string())?;
    let mut compiler = Command::new(nvcc);
    compiler.args(["-std=c++20", "-x", "cu", "-c", "-I"]).arg(include).arg("-o").arg(out.join("params.o"));
    output(compiler.arg(&checks)).map(drop)
}

/// Writes the integer constants of the kernels' sources and headers, in one module per file: for example `rms_norm` for
/// `rms_norm.cu` and `quant_tile` for `quant/tile.cuh`.
fn constants(root: &Path, out: &Path) -> Result<(), String> {
    let of = |folder: PathBuf, ending: &str| -> Result<Vec<_>, String> {
        let files = fingerprint::files(&folder, ending).map_err(|e| e.to_string())?;
        let read = |path: &PathBuf| {
            let name = path.strip_prefix(&folder).unwrap_or(path).with_extension("").display().to_string();
            let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
            Ok((name.replace(['/', '\\'], "_"), params::integers(&text)))
        };
        files.iter().map(read).collect()
    };
    let mut all = of(root.to_owned(), "cu")?;
    all.extend(of(root.join("include/sage"), "cuh")?);
    fs::write(out.join("constants.rs"), params::constants(&all)).map_err(|e| e.to_string())
}

/// The folder of the kernels. In the repository `kernels` is a symbolic link. In a checkout without links (Git on
/// Windows) `kernels` is a file that contains the path; in a package it is the folder itself.
fn kernels() -> Result<PathBuf, String> {
    let path = PathBuf::from("kernels");
    match path.is_file() {
        false => Ok(path),
        true => fs::read_to_string(&path).map(|link| link.trim().into()).map_err(|e| format!("kernels: {e}")),
    }
}

/// The folder for compiled kernels, `target/PROFILE/build/candle-sage-kernels`. All builds of a profile share it
/// (`OUT_DIR` is `target/PROFILE/build/candle-sage-HASH/out`). Without this folder, `cargo build`, `cargo doc` and each
/// set of features would compile the kernels again. The name of a compiled kernel's file contains a fingerprint of
/// everything that the kernel depends on.
fn shared_by_builds(out: &Path) -> Result<PathBuf, String> {
    let builds = out.ancestors().nth(2).filter(|builds| builds.ends_with("build"));
    let folder = builds.map_or_else(|| out.to_owned(), |builds| builds.join("candle-sage-kernels"));
    fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    Ok(folder)
}

fn compile(nvcc: &Path, flags: &[String], source: &Path, to: &Path, report: &Path) -> Result<(), String> {
    let partial = to.with_extension(format!("{}.partial", std::process::id()));
    let result = Command::new(nvcc).args(flags).arg("-o").arg(&partial).arg(source).output();
    let result = result.map_err(|e| format!("{} did not start: {e}", nvcc.display()))?;
    let text =
        String::from_utf8_lossy(&result.stderr).into_owned() + &String::from_utf8_lossy(&result.stdout);
    if !result.status.success() {
        return Err(format!("nvcc could not compile {}:\n{text}", source.display()));
    }
    // Complete files are renamed into place, so that no other build uses a partial file.
    let partial_report = partial.with_extension("report");
    let named = fs::write(&partial_report, text).and_then(|()| fs::rename(&partial_report, report));
    named.and_then(|()| fs::rename(&partial, to)).map_err(|e| e.to_string())
}

/// The architectures to build: `CANDLE_SAGE_CUDA_ARCHS` if it is set, else the ones of `all` that nvcc supports.
fn architectures(nvcc: &Path, all: &[u32]) -> Result<Vec<u32>, String> {
    let list = output(Command::new(nvcc).arg("--list-gpu-arch"))?;
    let known: Vec<u32> =
        list.lines().filter_map(|l| l.trim().strip_prefix("compute_")?.parse().ok()).collect();
    let (available, missing): (Vec<u32>, Vec<u32>) = all.iter().partition(|arch| known.contains(arch));
    let Ok(selection) = env::var(SELECTION) else {
        for arch in missing {
            println!("cargo:warning=nvcc does not support sm_{arch}: this build has no machine code for it");
        }
        return Ok(available);
    };
    selection
        .split(',')
        .map(|arch| arch.trim().parse().ok().filter(|arch| available.contains(arch)))
        .collect::<Option<Vec<u32>>>()
        .filter(|selected| !selected.is_empty())
        .ok_or_else(|| {
            format!(
                "candle-sage: {SELECTION} contains an architecture that cannot be built\n  got:     {selection}\n  \
                 allowed: some of {available:?}, separated by commas\n  hint:    unset it to build all of them"
            )
        })
}

/// Major and minor number of the compiler's release; 0 if `version` does not contain them.
fn release(version: &str) -> (u32, u32) {
    let number = version.split("release ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or("0.0");
    let mut parts = number.split('.').map(|part| part.trim().parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

fn find_nvcc() -> Result<PathBuf, String> {
    if let Some(path) = env::var_os("NVCC") {
        return Ok(path.into());
    }
    let homes = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].iter().filter_map(env::var_os).map(PathBuf::from);
    let homes = homes.map(|home| home.join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/cuda/bin", "/opt/cuda/bin"].map(PathBuf::from);
    homes.chain(env::split_paths(&path)).chain(usual).map(|dir| dir.join("nvcc")).find(|nvcc| nvcc.is_file()).ok_or_else(
        || {
            "candle-sage: features `cuda` and `kernels` need nvcc, the compiler of the CUDA toolkit, which was not found\n  \
             looked in: NVCC, CUDA_HOME/bin, CUDA_PATH/bin, CUDA_ROOT/bin, PATH, /usr/local/cuda/bin, /opt/cuda/bin\n  \
             allowed:   CUDA 12.0 or later\n  \
             hint:      install the toolkit (https://developer.nvidia.com/cuda-downloads) and set CUDA_HOME, or build \
             without the feature; no GPU is needed to build"
                .to_string()
        },
    )
}

fn output(command: &mut Command) -> Result<String, String> {
    let result = command.output().map_err(|e| format!("{command:?} did not start: {e}"))?;
    if result.status.success() {
        Ok(String::from_utf8_lossy(&result.stdout).into_owned())
    } else {
        Err(format!("{command:?} failed:\n{}", String::from_utf8_lossy(&result.stderr)))
    }
}
