//! Turns the table of plans, `kernels/include/sage/params/plans.def`, whose lines the kernels include, into
//! Rust.

use std::fmt::Write as _;

/// The host's table as Rust source: `TARGETS` with their shared memory in KiB, and `PLANS`.
///
/// # Errors
/// Names a line that is not one of the table's three macros, or that has another number of arguments than its
/// macro.
pub(crate) fn table(definitions: &str) -> Result<String, String> {
    let (mut targets, mut plans, mut family) = (String::new(), String::new(), "");
    for (number, line) in definitions.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with("//") {
            continue;
        }
        let wrong = || format!("plans.def, line {}: {line}", number + 1);
        let (name, rest) = line.split_once('(').ok_or_else(wrong)?;
        let arguments: Vec<&str> =
            rest.strip_suffix(')').ok_or_else(wrong)?.split(',').map(str::trim).collect();
        let written = match (name, &arguments[..]) {
            ("SAGE_TARGET", [name, kib]) => {
                writeln!(targets, "    (Target::{}, {kib}),", camel_case(name))
            }
            ("SAGE_FAMILY", [name]) => {
                family = name;
                Ok(())
            }
            (
                "SAGE_PLAN",
                [kernel, head_dim, of_targets, visits, mainloop, rows, threads, row_bytes, stages, shared],
            ) => writeln!(
                plans,
                "    Plan {{ family: {family:?}, kernel: {kernel:?}, head_dim: {head_dim}, targets: {}, \
                 visits: {}, mainloop: Mainloop::{}, rows: {rows}, threads: {threads}, row_bytes: {row_bytes}, \
                 stages: {stages}, shared_bytes: {shared} }},",
                list("Target", of_targets),
                list("Visits", visits),
                camel_case(mainloop),
            ),
            _ => return Err(wrong()),
        };
        written.expect("a string takes everything");
    }
    Ok(format!(
        "#[cfg(test)]\npub(super) static TARGETS: &[(Target, usize)] = &[\n{targets}];\n\
         pub(super) static PLANS: &[Plan] = &[\n{plans}];\n"
    ))
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
