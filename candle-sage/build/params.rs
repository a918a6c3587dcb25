//! Turns the structs of `kernels/include/sage/params/*.cuh`, the kernels' arguments, into Rust structs. Rust and
//! C++ assert every offset. Also turns integer constants of the kernels' sources, such as numbers of threads, into Rust
//! constants.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A field of a C++ struct.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Field {
    name: String,
    rust: String,
    offset: usize,
}

/// A struct in C layout.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Struct {
    name: String,
    fields: Vec<Field>,
    size: usize,
    align: usize,
    /// Whether the struct contains addresses, which borrow the memory that they point to.
    borrows: bool,
    /// Whether the struct is declared by hand in Rust, because another library defines its content.
    opaque: bool,
}

/// Appends the structs of a header to `structs`.
///
/// # Errors
/// When a line of a struct is not a field, or has a type that the host does not support.
pub(crate) fn read(header: &str, text: &str, structs: &mut Vec<Struct>) -> Result<(), String> {
    let mut open: Option<Struct> = None;
    for (number, line) in text.lines().enumerate() {
        let code = line.split("//").next().unwrap_or("").trim();
        let wrong = |why: &str| format!("{header}, line {}: {why}: {code}", number + 1);
        if let Some(name) = code.strip_prefix("struct ").and_then(|rest| rest.strip_suffix('{')) {
            let (align, name) = match name.strip_prefix("alignas(").and_then(|rest| rest.split_once(") ")) {
                Some((align, name)) => (align.parse().map_err(|_| wrong("invalid alignment"))?, name),
                None => (1, name),
            };
            let name = name.trim().to_owned();
            open =
                Some(Struct { name, fields: Vec::new(), size: 0, align, borrows: false, opaque: align > 1 });
        } else if code == "};" {
            let mut done = open.take().ok_or_else(|| wrong("no struct is open"))?;
            done.size = done.size.next_multiple_of(done.align);
            structs.push(done);
        } else if let Some(open) = &mut open
            && !code.is_empty()
        {
            let declared = code.strip_suffix(';').ok_or_else(|| wrong("not a field"))?;
            let (kind, name) = declared.rsplit_once(' ').ok_or_else(|| wrong("not a field"))?;
            let (name, count) = match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
                Some((name, count)) => (name, count.parse().map_err(|_| wrong("invalid length"))?),
                None => (name, 1),
            };
            let known = structs.iter().find(|known| known.name == kind);
            let (rust, size, align, borrows) = match (kind, known) {
                (kind, _) if kind.ends_with('*') => ("Address<'a>".to_owned(), 8, 8, true),
                ("int32_t", _) => ("i32".to_owned(), 4, 4, false),
                ("uint32_t", _) => ("u32".to_owned(), 4, 4, false),
                ("float", _) => ("f32".to_owned(), 4, 4, false),
                ("int64_t", _) => ("i64".to_owned(), 8, 8, false),
                ("uint64_t", _) => ("u64".to_owned(), 8, 8, false),
                (_, Some(known)) => (known.in_rust("'a"), known.size, known.align, known.borrows),
                _ => return Err(wrong("a type that the host does not support")),
            };
            if count != 1 && !open.opaque {
                return Err(wrong("an array, which the host does not support"));
            }
            let offset = open.size.next_multiple_of(align);
            open.fields.push(Field { name: name.to_owned(), rust, offset });
            open.size = offset + size * count;
            open.align = open.align.max(align);
            open.borrows |= borrows;
        }
    }
    Ok(())
}

impl Struct {
    fn in_rust(&self, lifetime: &str) -> String {
        if self.borrows || self.opaque { format!("{}<{lifetime}>", self.name) } else { self.name.clone() }
    }
}

/// Rust source that defines the structs and asserts the offsets of their fields.
pub(crate) fn in_rust(structs: &[Struct]) -> String {
    let mut out = String::new();
    for of in structs.iter().filter(|of| !of.opaque) {
        let (name, unnamed) = (of.in_rust("'a"), of.in_rust("'_"));
        let fields: String = of
            .fields
            .iter()
            .map(|field| format!("    pub(in crate::cuda) {}: {},\n", field.name, field.rust))
            .collect();
        write!(
            out,
            "#[repr(C)]\n#[derive(Debug, Clone, Copy, Default, PartialEq)]\n#[allow(dead_code)]\n\
             pub(in crate::cuda) struct {name} {{\n{fields}}}\n\
             // SAFETY: plain data in C layout; Rust and C++ assert the same offsets.\n\
             unsafe impl cudarc::driver::DeviceRepr for {unnamed} {{}}\n"
        )
        .expect("writing to a string cannot fail");
    }
    let sizes = structs.iter().map(|of| {
        format!(
            "    assert!(size_of::<{}>() == {} && align_of::<{0}>() == {});\n",
            of.name, of.size, of.align
        )
    });
    let offsets = structs.iter().filter(|of| !of.opaque).flat_map(|of| {
        let each = |field: &Field| {
            format!("    assert!(std::mem::offset_of!({}, {}) == {});\n", of.name, field.name, field.offset)
        };
        of.fields.iter().map(each).collect::<Vec<_>>()
    });
    let asserted: String = sizes.chain(offsets).collect();
    out + &format!("const _: () = {{\n{asserted}}};\n")
}

/// A C++ source that compiles only if the kernels' compiler agrees with the sizes and offsets of `structs`.
pub(crate) fn in_cpp(headers: &[&str], structs: &[Struct]) -> String {
    let mut out: String = headers.iter().map(|header| format!("#include <{header}>\n")).collect();
    out += "using namespace sage::params;\n";
    for of in structs {
        writeln!(out, "static_assert(sizeof({}) == {} && alignof({0}) == {});", of.name, of.size, of.align)
            .expect("a string");
        for field in &of.fields {
            writeln!(out, "static_assert(offsetof({}, {}) == {});", of.name, field.name, field.offset)
                .expect("a string");
        }
    }
    out
}

/// The integers that a source defines as `constexpr int NAME = VALUE` outside functions and structs. VALUE may use
/// numbers and previous constants. A name that is defined more than once, with different values, is omitted.
pub(crate) fn integers(text: &str) -> BTreeMap<String, u64> {
    let mut found: BTreeMap<String, Option<u64>> = BTreeMap::new();
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or("").trim_end();
        let Some(all) = code.strip_prefix("constexpr int ").and_then(|rest| rest.strip_suffix(';')) else {
            continue;
        };
        for one in all.split(", ") {
            let Some((name, value)) = one.split_once(" = ") else { continue };
            let value = value_of(value, &found);
            let first = found.entry(name.to_owned()).or_insert(value);
            if *first != value {
                *first = None;
            }
        }
    }
    found.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Evaluates a number, a name, a shift `A << B`, or a chain of `*` and `/`, where names have the values in `known`.
fn value_of(text: &str, known: &BTreeMap<String, Option<u64>>) -> Option<u64> {
    let mut words = text.split_whitespace();
    // A leading zero is not supported: 010 is 8 in C++.
    let written = |word: &str| word.parse().ok().filter(|_| word == "0" || !word.starts_with('0'));
    let number = |word: &str| written(word).or_else(|| known.get(word).copied().flatten());
    // A shift mixed with products is not supported: a shift has a lower precedence than a product.
    if text.contains("<<") && text.split_whitespace().count() > 3 {
        return None;
    }
    let mut value: u64 = number(words.next()?)?;
    while let Some(operator) = words.next() {
        let other = number(words.next()?)?;
        value = match operator {
            "*" => value.checked_mul(other)?,
            "/" => value.checked_div(other)?,
            "<<" => value.checked_shl(u32::try_from(other).ok()?)?,
            _ => return None,
        };
    }
    Some(value)
}

/// The integer constants of the kernels' `sources` as Rust code, in one module per source.
pub(crate) fn constants(sources: &[(String, BTreeMap<String, u64>)]) -> String {
    let mut out = String::new();
    for (name, integers) in sources.iter().filter(|(_, integers)| !integers.is_empty()) {
        let each: String = integers
            .iter()
            .map(|(name, value)| format!("    pub(in crate::cuda) const {name}: usize = {value};\n"))
            .collect();
        writeln!(out, "pub(in crate::cuda) mod {name} {{\n{each}}}")
            .expect("writing to a string cannot fail");
    }
    out
}
