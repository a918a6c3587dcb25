//! Every kernel runs on a CPU in a program of `kernels/host`, or is listed here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The bodies of kernels that no program of `kernels/host` runs, by file.
const NOT_EMULATED: [(&str, &str); 20] = [
    // Not emulated, because they only loop over rows, elements or ids. Tests on a GPU compare them with the CPU.
    ("adamw.cu", "squares sum_partials update"),
    ("attn_bwd.cu", "finish"),
    ("blend.cu", "blend_forward"),
    ("copy_heads.cu", "copy"),
    ("cross_entropy.cu", "forward backward mean scale"),
    ("embedding.cu", "gather find_starts sum_pieces sum_rows"),
    ("fake_quantize.cu", "fake_quantize value_maxima"),
    ("ids.cu", "check count place"),
    ("layer_norm.cu", "forward backward"),
    ("muon.cu", "momentum trace combine row_squares row_factors scale_rows apply"),
    ("partial_sums.cu", "sum sum_long_rows"),
    ("quantize.cu", "mean_of_sample log_sum_exp sink_gradient"),
    ("rms_norm.cu", "forward backward"),
    ("rope.cu", "forward norm_backward"),
    ("selection.cu", "choose pool"),
    ("swiglu.cu", "forward backward"),
    // The programs emulate neither wgmma nor TMA.
    ("backward_sm90.cuh", "backward_sm90"),
    ("backward_sm90_channel_parts.cuh", "backward_sm90_channel_parts"),
    ("backward_sm90_dq_warpgroup.cuh", "backward_sm90_dq_warpgroup"),
    ("forward_sm90.cuh", "forward_sm90"),
];

fn sources(folder: &Path, all: &mut Vec<(PathBuf, String)>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, all);
        } else {
            let text = std::fs::read_to_string(&path).expect("UTF-8");
            all.push((path, text));
        }
    }
}

/// The names of the kernels, and of the functions whose only argument has a type from the C++ namespace `params`. A
/// kernel that only calls such a function is left out.
fn bodies(text: &str) -> Vec<&str> {
    let lines = text.lines().zip(text.lines().skip(1).chain([""]));
    let names = lines.filter_map(|(line, following)| {
        let (name, parameters) = line.split_once("(const ")?;
        let is_function = line.starts_with("__device__ ")
            && name.contains("void ")
            && parameters.starts_with("params::")
            && !parameters.contains(',');
        let is_kernel = parameters.starts_with("__grid_constant__ ") && line.ends_with('{');
        (is_function || is_kernel && !following.contains("(p);")).then(|| name.rsplit(' ').next())?
    });
    names.collect()
}

/// Whether `program` calls `name` with a variable as the only argument: `name(p);` or `name<..>(p);`.
fn runs(program: &str, name: &str) -> bool {
    program.match_indices(name).any(|(at, _)| {
        let after = &program[at + name.len()..];
        let after =
            after.strip_prefix('<').and_then(|of| of.split_once('>')).map_or(after, |(_, after)| after);
        let call = after.strip_prefix('(').and_then(|after| after.split_once(");"));
        let is_variable = |text: &str| !text.is_empty() && text.chars().all(char::is_alphanumeric);
        !program[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
            && call.is_some_and(|(argument, _)| is_variable(argument))
    })
}

#[test]
fn every_kernel_is_emulated_or_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let mut all = Vec::new();
    sources(&root, &mut all);
    let is_host = |path: &Path| path.starts_with(root.join("host"));
    let programs: Vec<&str> =
        all.iter().filter(|(path, _)| is_host(path)).map(|(_, text)| text.as_str()).collect();
    let (mut found, mut missing) = (0, BTreeSet::new());
    for (path, text) in all.iter().filter(|(path, _)| !is_host(path)) {
        let file = path.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        let include = format!("\"../{file}\"");
        for name in bodies(text) {
            // `.cu` files may have functions of the same name, so only programs that include this `.cu` file count.
            let mut own =
                programs.iter().filter(|program| file.ends_with(".cuh") || program.contains(&include));
            found += 1;
            if !own.any(|program| runs(program, name)) {
                missing.insert((file, name));
            }
        }
    }
    assert!(found > 60, "{found} kernels");
    let listed = NOT_EMULATED.iter().flat_map(|(file, names)| names.split(' ').map(|name| (*file, name)));
    assert_eq!(missing, listed.collect(), "(file, body): run it in kernels/host, or list it above");
}
