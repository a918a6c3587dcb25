//! No file and no function is longer than a reader takes in at once, in both crates, the kernels, the examples and the scripts.

use std::path::{Path, PathBuf};

const FOLDERS: [&str; 5] = ["candle-sage", "sage-train", "kernels", "examples", "scripts"];
const EXTENSIONS: [&str; 6] = ["rs", "cu", "cuh", "cc", "h", "py"];

/// The most lines of a file, and of a function from its name to its closing brace.
const FILE: usize = 450;
const FUNCTION: usize = 80;

/// Adds the sources below a folder, but for what builds have made.
fn sources(folder: &Path, all: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        // A link, as candle-sage/kernels is one, leads to a folder that is read in its own place.
        let (path, kind) = (entry.path(), entry.file_type().expect("a type"));
        if kind.is_dir() && entry.file_name() != "target" {
            sources(&path, all);
        } else if kind.is_file() && EXTENSIONS.iter().any(|end| path.extension() == Some(end.as_ref())) {
            all.push(path);
        }
    }
}

/// The name of the function whose declaration begins on a line of Rust.
fn rust_function(line: &str) -> Option<&str> {
    let (modifiers, rest) = line.trim_start().split_once("fn ")?;
    // `pub(in crate::cpu)` has two words.
    let known = |word: &str| {
        ["pub", "const", "async", "unsafe", "extern", "\"C\""].contains(&word)
            || word.starts_with("pub(")
            || word.ends_with(')')
    };
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    modifiers.split_whitespace().all(known).then_some(name).filter(|name| !name.is_empty())
}

/// Each function of a Rust source, with the number of its lines. It ends with the first brace that is as far from the margin as
/// its beginning, where rustfmt puts it.
fn rust_functions(source: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let margin = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let Some(name) = rust_function(line) else { continue };
        // A line that ends the function itself is one without a body, or with all of it.
        let ends = |later: &&str| {
            margin(later) == margin(line)
                && (later.trim_start().starts_with('}') || later.ends_with(['}', ';']))
        };
        if let Some(rest) = lines[first..].iter().position(ends) {
            found.push((name.to_owned(), rest + 1));
        }
    }
    found
}

/// A source of C++ where comments, preprocessor lines, and the contents of strings and characters are blank, so that every brace
/// and parenthesis that is left is one of the grammar. Lines keep their numbers.
fn bare(source: &str) -> String {
    let (mut out, mut rest) = (String::new(), source);
    while let Some(next) = rest.chars().next() {
        let at_margin = out.rsplit('\n').next().is_some_and(|line| line.trim().is_empty());
        let identifier = out.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let end_of = |end: &str| rest.find(end).map_or(rest.len(), |at| at + end.len());
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            end_of("*/")
        } else if next == '#' && at_margin {
            // A directive goes on after a backslash, as the bodies of macros do.
            let lines = rest.split_inclusive('\n');
            let more = lines.clone().take_while(|line| line.trim_end().ends_with('\\')).count();
            lines.take(more + 1).map(str::len).sum()
        } else if rest.starts_with("R\"") && !identifier {
            let open = rest.find('(').unwrap_or(rest.len());
            end_of(&format!("){}\"", &rest[2..open.max(2)]))
        } else if next == '"' || (next == '\'' && !identifier) {
            // An apostrophe inside a number separates its digits.
            let mut escaped = false;
            let end = rest.char_indices().skip(1).find(|&(_, c)| {
                let ends = c == next && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            end.map_or(rest.len(), |(at, _)| at + 1)
        } else {
            out.push(next);
            rest = &rest[next.len_utf8()..];
            continue;
        };
        let (blank, later) = rest.split_at(skipped);
        out.extend(blank.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = later;
    }
    out
}

/// The text of a declaration after its `template <..>`: the closing bracket is the one that no parenthesis surrounds.
fn without_template(head: &str) -> &str {
    let head = head.trim_start();
    let Some(list) = head.strip_prefix("template") else { return head };
    let (mut angles, mut parentheses) = (0, 0);
    for (at, c) in list.char_indices() {
        match c {
            '(' => parentheses += 1,
            ')' => parentheses -= 1,
            '<' if parentheses == 0 => angles += 1,
            '>' if parentheses == 0 => angles -= 1,
            _ => {}
        }
        if angles == 0 && c == '>' {
            return without_template(&list[at + 1..]);
        }
    }
    head
}

/// What a brace opens, by the text between it and the end of the last declaration.
enum Opens {
    /// A namespace or a type: functions may be inside.
    Scope,
    /// The body of the function of this name.
    Body(String),
    /// A value, or a concept's requirements: the declaration goes on after the closing brace.
    Value,
}

fn opens(head: &str) -> Opens {
    let head = without_template(head);
    let mut words = head.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let first = words.next().unwrap_or("");
    let types = ["namespace", "struct", "class", "union", "enum"];
    if types.contains(&first) || (first == "extern" && !head.contains('(')) {
        return Opens::Scope;
    }
    // The name is what stands before the first parenthesis that belongs to no attribute.
    let attributes = ["__launch_bounds__", "__align__", "__attribute__", "alignas", "decltype"];
    let (mut name, mut initializers) = (None, false);
    let (mut depth, mut from) = (0, 0);
    for (at, c) in head.char_indices() {
        if c == '(' && depth == 0 && name.is_none() {
            let before = &head[from..at];
            let word = before.trim_end().rsplit(|c: char| !c.is_alphanumeric() && c != '_').next();
            let word = if before.contains("operator") { Some("operator") } else { word };
            name = word.filter(|word| !attributes.contains(word) && !word.is_empty()).map(|word| (word, at));
        }
        match c {
            '(' => depth += 1,
            ')' => (depth, from) = (depth - 1, at + 1),
            // A constructor's list of initializers; `::` is part of a name.
            ':' if depth == 0 && name.is_some() => {
                initializers |= !head[..at].ends_with(':') && !head[at + 1..].starts_with(':');
            }
            _ => {}
        }
    }
    let Some((name, at)) = name else { return Opens::Value };
    let is_value = name != "operator" && head[..at].contains('=');
    // `member{value}`; the constructor's body comes after a closing brace or parenthesis.
    let is_member = initializers && head.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '>');
    if is_value || is_member { Opens::Value } else { Opens::Body(name.to_owned()) }
}

/// Each function of a C++ source, with the number of its lines from the first after `template <..>` to the closing brace. Lambdas
/// are lines of the function around them.
fn cpp_functions(source: &str) -> Vec<(String, usize)> {
    let bare = bare(source);
    let line_of = |at: usize| bare[..at].matches('\n').count();
    let mut found = Vec::new();
    let (mut head, mut at) = (0, 0); // where the declaration begins; how far the source is read
    // The end of the brace or parenthesis that opens at a place.
    let closing = |open: usize| {
        let mut depth = 0;
        let end = bare[open..].char_indices().find(|&(_, c)| {
            depth += i32::from(matches!(c, '{' | '(')) - i32::from(matches!(c, '}' | ')'));
            depth == 0
        });
        end.map_or(bare.len(), |(at, _)| open + at + 1)
    };
    while let Some(next) = bare[at..].find([';', '{', '}', '(', ':', '\n']) {
        let place = at + next;
        at = place + 1;
        match bare.as_bytes()[place] {
            b'(' => at = closing(place),
            b':' => {
                if ["public", "private", "protected"].contains(&bare[head..place].trim()) {
                    head = at;
                }
            }
            // A macro's call on a line of its own has no semicolon.
            b'\n' => {
                let line = bare[head..place].trim();
                let word = line.split('(').next().unwrap_or("");
                let capitals = word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
                if capitals && line.ends_with(')') {
                    head = at;
                }
            }
            b'{' => match opens(bare[head..place].trim()) {
                Opens::Scope => head = at,
                Opens::Value => at = closing(place),
                Opens::Body(name) => {
                    let declaration = without_template(&bare[head..place]);
                    at = closing(place);
                    found.push((name, line_of(at - 1) - line_of(place - declaration.len()) + 1));
                    head = at;
                }
            },
            _ => head = at,
        }
    }
    found
}

#[test]
fn files_and_functions_are_short() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut paths = Vec::new();
    for folder in FOLDERS {
        sources(&root.join(folder), &mut paths);
    }
    assert!(paths.len() > 200, "{} sources", paths.len());
    paths.sort();
    let (mut long, mut cpp) = (Vec::new(), 0);
    for path in paths {
        let source = std::fs::read_to_string(&path).expect("a source");
        let name = path.strip_prefix(&root).expect("a path below the root").display();
        let lines = source.lines().count();
        if lines > FILE {
            long.push(format!("{name}: {lines} lines, at most {FILE}"));
        }
        let functions = match path.extension().and_then(|end| end.to_str()) {
            Some("rs") => rust_functions(&source),
            Some("cu" | "cuh" | "cc" | "h") => cpp_functions(&source),
            _ => Vec::new(),
        };
        cpp += if path.extension() == Some("rs".as_ref()) { 0 } else { functions.len() };
        let functions = functions.into_iter().filter(|(_, lines)| *lines > FUNCTION);
        long.extend(
            functions.map(|(of, lines)| format!("{name}: {of} has {lines} lines, at most {FUNCTION}")),
        );
    }
    assert!(cpp > 500, "{cpp} functions in the kernels");
    assert!(long.is_empty(), "too long:\n{}", long.join("\n"));
}

fn counted(functions: &[(String, usize)]) -> Vec<(&str, usize)> {
    functions.iter().map(|(name, lines)| (name.as_str(), *lines)).collect()
}

#[test]
fn functions_of_rust_end_where_they_end() {
    let source = "
impl A {
    pub(in crate::cpu) const fn one(
        x: u8,
    ) -> u8 {
        match x {
            _ => 1,
        }
    }
    fn two() {}
    fn declared(
        x: u8,
    );
}
// A comment: fn none() {
pub extern \"C\" fn three<T>()
where
    T: Copy,
{
    let fn_is_no_word = || 3;
}
";
    assert_eq!(counted(&rust_functions(source)), [("one", 7), ("two", 1), ("declared", 3), ("three", 6)]);
}

#[test]
fn functions_of_cpp_end_where_they_end() {
    let source = r##"
// A comment: void none() {
#define MACRO(name) \
  void name() {     \
  }
MACRO(a)
MACRO(b)
namespace sage {
template <class T, bool KEPT = (1 > 2)>
struct __align__(16) Tile : Base<T> {
  static constexpr int ROWS[2] = {1, 2};
  int big = 1'000;
  __device__ explicit Tile(int x) : a{x, 1}, b(x),
                                    c{x} {
    if (x) { use('{', "}\"{", R"x(}{)")x"); }
  }
  __device__ float& operator()(int i) { return a[i]; }
  bool declared(int x) const;

 private:
  bool kept() const { return KEPT; }
};
template <class N>
concept Numerics = requires(N n) {
  n.load();
} && (N::ONCE ? requires(N n) { n.once(); } : true);
enum Order : int {
  FIRST,
};
template <Numerics N, class F = decltype([] { return 1; })>
extern "C" __global__ void __launch_bounds__(N::THREADS, 1)
    kernel(const Tile<N>& p, F f = {}) {
  auto half = [&](int x) {
    return x / 2;
  };
  /* } */
}
extern __shared__ unsigned char shared[];
}  // namespace sage
"##;
    let expected = [("Tile", 4), ("operator", 1), ("kept", 1), ("kernel", 7)];
    assert_eq!(counted(&cpp_functions(source)), expected);
}
