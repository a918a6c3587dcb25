//! Generates Rust from `kernels/include/sage/params/plans.def`, the table of the kernels' plans (tile sizes and
//! memory). The kernels include the same file.

use std::fmt::Write as _;

/// The table of plans as Rust source, for the host. `TARGETS` has the architectures of each target, and its shared
/// memory in KiB. The other items are the enum `Target`, the enum `Mainloop` with its properties, and `PLANS`.
///
/// # Errors
/// When a line does not use a macro of the table, or has invalid arguments.
pub(crate) fn table(definitions: &str) -> Result<String, String> {
    let (mut targets, mut target_names, mut plans, mut family) =
        (String::new(), String::new(), String::new(), "");
    let (mut mainloops, mut properties) = (String::new(), String::new());
    for (number, line) in definitions.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with("//") || line.starts_with('#') {
            continue;
        }
        let line = line.split("//").next().unwrap_or(line).trim_end();
        let wrong = || format!("plans.def, line {}: {line}", number + 1);
        let (name, rest) = line.split_once('(').ok_or_else(wrong)?;
        let arguments: Vec<&str> =
            rest.strip_suffix(')').ok_or_else(wrong)?.split(',').map(str::trim).collect();
        let written = match (name, &arguments[..]) {
            ("SAGE_TARGET", [name, kib, architectures @ ..]) if !architectures.is_empty() => {
                let name = camel_case(name);
                let row = writeln!(targets, "    (Target::{name}, {kib}, &[{}]),", architectures.join(", "));
                row.and_then(|()| writeln!(target_names, "    {name},"))
            }
            ("SAGE_MAINLOOP", [name, maps, documents, dq_parts, channels, persistent]) => {
                let (name, maps) = (camel_case(name), camel_case(maps));
                let flag = |word: &str| match word {
                    "0" => Ok(false),
                    "1" => Ok(true),
                    _ => Err(wrong()),
                };
                let (documents, persistent) = (flag(documents)?, flag(persistent)?);
                if name.starts_with("Backward") && [dq_parts, channels].contains(&&"0") {
                    return Err(wrong());
                }
                let row = writeln!(
                    properties,
                    "            Mainloop::{name} => MainloopProperties {{ maps: Maps::{maps}, documents: {documents}, dq_parts: {dq_parts}, \
                     channels: {channels}, persistent: {persistent} }},"
                );
                row.and_then(|()| writeln!(mainloops, "    {name},"))
            }
            ("SAGE_FAMILY", [name]) => {
                family = name;
                Ok(())
            }
            (
                "SAGE_PLAN",
                [
                    kernel,
                    head_dim,
                    value_dim,
                    of_targets,
                    visits,
                    mainloop,
                    rows,
                    threads,
                    row_bytes,
                    stages,
                    shared,
                ],
            ) => writeln!(
                plans,
                "    Plan {{ family: {family:?}, kernel: {kernel:?}, head_dim: {head_dim}, value_dim: {value_dim}, targets: {}, \
                 visits: {}, mainloop: Mainloop::{}, rows: {rows}, threads: {threads}, row_bytes: {row_bytes}, \
                 stages: {stages}, shared_bytes: {shared} }},",
                list("Target", of_targets),
                list("Visits", visits),
                camel_case(mainloop),
            ),
            _ => return Err(wrong()),
        };
        written.expect("writing to a string cannot fail");
    }
    let derive = "#[derive(Debug, Clone, Copy, PartialEq, Eq)]\n#[allow(missing_docs)]\n";
    Ok(format!(
        "{derive}pub(super) enum Target {{\n{target_names}}}\n\
         {derive}pub(super) enum Mainloop {{\n{mainloops}}}\n\
         impl Mainloop {{\n    const fn properties(self) -> MainloopProperties {{\n        match self {{\n{properties}        }}\n    }}\n}}\n\
         pub(super) static TARGETS: &[(Target, usize, &[u32])] = &[\n{targets}];\n\
         pub(super) static PLANS: &[Plan] = &[\n{plans}];\n"
    ))
}

/// The architectures of all targets, ascending.
///
/// # Errors
/// When an architecture is not a number.
pub(crate) fn architectures(definitions: &str) -> Result<Vec<u32>, String> {
    let mut all = Vec::new();
    for line in definitions.lines() {
        let Some(row) = line.trim().strip_prefix("SAGE_TARGET(") else { continue };
        let row = row.split_once(')').map_or(row, |(row, _)| row);
        for word in row.split(',').skip(2) {
            all.push(word.trim().parse().map_err(|_| format!("plans.def: not an architecture: {line}"))?);
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// `A_B | C` as a slice of variants of type `of`.
fn list(of: &str, names: &str) -> String {
    let each: Vec<String> =
        names.split('|').map(|name| format!("{of}::{}", camel_case(name.trim()))).collect();
    format!("&[{}]", each.join(", "))
}

/// `BACKWARD_SM90` as `BackwardSm90`.
fn camel_case(name: &str) -> String {
    name.split('_').map(|word| word[..1].to_string() + &word[1..].to_lowercase()).collect()
}
