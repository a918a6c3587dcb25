//! The build's parser of `plans.def`, the table of the kernels' tile and thread-block sizes. Errors name the line that
//! cannot be parsed.

#[path = "../../build/plans.rs"]
mod build;

#[test]
fn the_table_of_plans_becomes_rust() {
    let table = build::table(
        "// a comment\n#ifndef X\nSAGE_TARGET(SM80, 162, 80, 87)\nSAGE_MAINLOOP(FORWARD_SM90, MAPPED_IF_WIDE, 1, 0, 0, 1)  // two\n\nSAGE_FAMILY(attn_fwd)\n\
         SAGE_PLAN(attn_fwd_a, 64, 32, SM80 | SM86, EVERY | LISTED, FORWARD_SM90, 128, 384, 64, 2, 1024)\n",
    )
    .expect("a table");
    assert!(
        table.contains("(Target::Sm80, 162, &[80, 87])")
            && table.contains("enum Mainloop {\n    ForwardSm90,\n}"),
        "{table}"
    );
    let properties = "Mainloop::ForwardSm90 => MainloopProperties { maps: Maps::MappedIfWide, documents: true, dq_parts: 0, channels: 0, persistent: true }";
    assert!(table.contains(properties), "{table}");
    let plan = "Plan { family: \"attn_fwd\", kernel: \"attn_fwd_a\", head_dim: 64, value_dim: 32, \
                targets: &[Target::Sm80, Target::Sm86], visits: &[Visits::Every, Visits::Listed], \
                mainloop: Mainloop::ForwardSm90, rows: 128, threads: 384, row_bytes: 64, stages: 2, \
                shared_bytes: 1024 }";
    assert!(table.contains(plan), "{table}");
}

#[test]
fn a_line_that_is_no_row_is_named() {
    for line in [
        "SAGE_PLAN(a, 64)",
        "SAGE_PLANS(a)",
        "SAGE_TARGET(SM80, 162)",
        "SAGE_TARGET(SM80, 162, 80",
        "SAGE_MAINLOOP(A, MAPPED)",
        "SAGE_MAINLOOP(A, MAPPED, true, 1, 1, 0)",
        "SAGE_MAINLOOP(BACKWARD_X, MAPPED, 1, 0, 128, 0)",
        "int x;",
    ] {
        let text = format!("SAGE_FAMILY(attn_fwd)\n{line}");
        assert_eq!(build::table(&text), Err(format!("plans.def, line 2: {line}")));
    }
}

#[test]
fn architectures_are_those_of_the_targets() {
    assert_eq!(
        build::architectures(
            "SAGE_TARGET(A, 98, 86, 120)  // two\n SAGE_TARGET(B, 1,  80)\nSAGE_FAMILY(x)\n"
        ),
        Ok(vec![80, 86, 120])
    );
    assert!(build::architectures("SAGE_TARGET(A, 98, sm_86)").is_err());
}

/// `bits/sm_90.txt` contains results for every head_dim in `plans.def`.
#[test]
fn the_bits_of_every_width_are_recorded() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/include/sage/params/plans.def");
    let table = std::fs::read_to_string(path).expect("the table of plans");
    let rows: Vec<_> = table.lines().filter_map(|line| line.strip_prefix("SAGE_PLAN(")).collect();
    assert!(rows.len() > 50, "{} plans", rows.len());
    for row in rows {
        let width = row.split(',').nth(1).expect("a width").trim();
        assert!(include_str!("bits/sm_90.txt").contains(&format!(" d{width} ")), "{row}");
    }
}
