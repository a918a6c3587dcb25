//! Tests of `build/params.rs`, which turns the kernels' C++ argument structs and integer constants into Rust. Fields
//! that it does not support are errors.

#[path = "../../build/params.rs"]
mod build;

const NESTED: &str = "struct alignas(64) Map {\n  uint64_t opaque[16];\n};\n\n// A view.\nstruct View {\n  void* data;  // first\n  \
                      int64_t row;\n};\nstruct Sizes {\n  int32_t a;\n  float b;\n};\nstruct All {\n  const float* x;\n  View view;\n  \
                      Sizes sizes;\n  uint32_t n;\n  Map map;\n};\n";

#[test]
fn structs_become_rust_and_both_sides_assert_every_offset() {
    let mut structs = Vec::new();
    build::read("a.cuh", NESTED, &mut structs).expect("structs");
    let rust = build::in_rust(&structs);
    let all = "pub(in crate::cuda) struct All<'a> {\n    pub(in crate::cuda) x: Address<'a>,\n    pub(in crate::cuda) view: View<'a>,\n    \
               pub(in crate::cuda) sizes: Sizes,\n    pub(in crate::cuda) n: u32,\n    \
               pub(in crate::cuda) map: Map<'a>,\n}";
    assert!(rust.contains(all) && !rust.contains("struct Map"), "{rust}");
    let cpp = build::in_cpp(&["sage/a.cuh"], &structs);
    for (field, offset) in [("x", 0), ("view", 8), ("sizes", 24), ("n", 32), ("map", 64)] {
        assert!(rust.contains(&format!("offset_of!(All, {field}) == {offset})")), "{field}: {rust}");
        assert!(
            cpp.contains(&format!("static_assert(offsetof(All, {field}) == {offset});")),
            "{field}: {cpp}"
        );
    }
    assert!(
        rust.contains("size_of::<All>() == 192 && align_of::<All>() == 64")
            && cpp.contains("sizeof(All) == 192")
    );
}

#[test]
fn what_is_no_field_is_named() {
    for (field, why) in [
        ("double a;", "a type that the host does not support"),
        ("int32_t a", "not a field"),
        ("int32_t a[2];", "an array"),
    ] {
        let error = build::read("a.cuh", &format!("struct A {{\n  {field}\n}};\n"), &mut Vec::new())
            .expect_err(field);
        assert!(error.contains(why) && error.starts_with("a.cuh, line "), "{field}: {error}");
    }
}

#[test]
fn integers_of_kernels_become_constants() {
    let text = "constexpr int THREADS = 256, WARPS = THREADS / 32;\nconstexpr int BITS = 8, DIGITS = 1 << BITS;  // a digit\n\
                constexpr int TILE = THREADS * WARPS;\nconstexpr int SUM = 1 << 2 * 3, OCTAL = 010;\ntemplate <int D>\nconstexpr int OF = TILE * D;\n#if X\nconstexpr int MOST = 1;\n#else\n\
                constexpr int MOST = 2;\n#endif\n  constexpr int LOCAL = 3;\n";
    let integers = build::integers(text);
    let wanted = [("BITS", 8), ("DIGITS", 256), ("THREADS", 256), ("TILE", 2048), ("WARPS", 8)];
    assert_eq!(integers, wanted.map(|(name, value)| (name.to_owned(), value)).into());
    let rust = build::constants(&[("ids".into(), integers), ("none".into(), Default::default())]);
    assert!(
        rust.contains("mod ids {") && rust.contains("const TILE: usize = 2048;") && !rust.contains("none"),
        "{rust}"
    );
}
