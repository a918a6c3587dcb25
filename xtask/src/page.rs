//! Generates the tables of a page, and finds tables that should be generated.
//!
//! ```text
//! <!-- figures: NAME; where=N:1024|4096; rows=D,N; columns=scheme; value=forward,both; digits=3
//! | D | N | 16 bit | INT8 |
//! | {D} | {N} | {16 bit.both} | {INT8.both}, {16 bit.both / INT8.both} |
//! -->
//! (the table, and a line that says how it was measured)
//! <!-- end of figures -->
//! ```
//!
//! Without options and template (the lines with bars) the table is the whole data file. With `provenance=short` the
//! line below the table has only device and date.

use anyhow::{Result, bail, ensure};

use crate::data::Data;
use crate::template::{fill, split};

pub(crate) const BEGIN: &str = "<!-- figures: ";
pub(crate) const END: &str = "<!-- end of figures -->";
pub(crate) const EXEMPT: &str = "<!-- not measured -->";

const SHORT: &str = "provenance=short";

/// The generated text of a page, and its differences from the current text.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) text: String,
    /// Line numbers, from 1, and a message for each line that differs from `text`.
    pub(crate) differences: Vec<(usize, String)>,
    /// Line numbers, and errors that generating the page does not correct.
    pub(crate) errors: Vec<(usize, String)>,
    /// The names of the data files.
    pub(crate) used: Vec<String>,
}

/// Generates the tables of a page. `load` reads a data file by name, `link` returns its path relative to the page.
pub(crate) fn generate(
    text: &str,
    load: impl Fn(&str) -> Result<Data>,
    link: impl Fn(&str) -> String,
) -> Page {
    let lines: Vec<&str> = text.lines().collect();
    let (mut page, mut at, mut is_code) = (Page::default(), 0, false);
    while at < lines.len() {
        let rest = &lines[at..];
        let mut length = 1;
        let mut new: Vec<String> = vec![lines[at].to_owned()];
        is_code ^= lines[at].trim_start().starts_with("```");
        if !is_code && lines[at].starts_with(BEGIN) {
            match block(rest, &load, &link) {
                Ok(block) => {
                    page.used.push(block.name.clone());
                    page.compare(at + block.directive, &rest[block.directive..block.length - 1], &block);
                    new = rest[..block.directive].iter().map(|&line| line.to_owned()).collect();
                    new.extend(block.body);
                    new.push(END.to_owned());
                    length = block.length;
                }
                Err(error) => page.errors.push((at + 1, format!("{error:#}"))),
            }
        } else if !is_code && lines[at].starts_with('|') {
            length = rest.iter().take_while(|line| line.starts_with('|')).count();
            new = rest[..length].iter().map(|&line| line.to_owned()).collect();
            if at.checked_sub(1).is_none_or(|above| lines[above] != EXEMPT) && has_figures(&rest[..length]) {
                let error = format!(
                    "a table of figures without data\n  got:     {}\n  allowed: a table that is generated, or under {EXEMPT}\n  \
                     hint:    write docs/figures/NAME.csv, and {BEGIN}NAME --> and {END} around the table",
                    lines[at]
                );
                page.errors.push((at + 1, error));
            }
        }
        page.text.extend(new.into_iter().map(|line| line + "\n"));
        at += length;
    }
    page
}

struct Block {
    name: String,
    /// Number of lines of the comment with name, options and template.
    directive: usize,
    /// Number of all lines from this comment to the end mark.
    length: usize,
    body: Vec<String>,
}

impl Page {
    fn compare(&mut self, first: usize, old: &[&str], block: &Block) {
        for index in 0..old.len().max(block.body.len()) {
            let (got, expected) = (old.get(index).copied(), block.body.get(index).map(String::as_str));
            if got != expected {
                let difference = format!(
                    "differs from docs/figures/{}.csv\n  got:     {}\n  allowed: {}\n  hint:    cargo run -p xtask -- figures",
                    block.name,
                    got.unwrap_or("no line"),
                    expected.unwrap_or("no line")
                );
                self.differences.push((first + index + 1, difference));
            }
        }
    }
}

fn block(
    lines: &[&str],
    load: impl Fn(&str) -> Result<Data>,
    link: impl Fn(&str) -> String,
) -> Result<Block> {
    let directive = lines.iter().position(|line| line.ends_with("-->")).map_or(lines.len(), |line| line + 1);
    let end = lines.iter().position(|line| *line == END);
    let next =
        lines.iter().skip(1).position(|line| line.starts_with(BEGIN)).map_or(lines.len(), |line| line + 1);
    let Some(length) = end.filter(|end| *end < next && directive <= *end).map(|end| end + 1) else {
        bail!("a generated table without an end\n  got:     {}\n  allowed: a later line {END}", lines[0]);
    };
    let comment = lines[..directive].join("\n");
    let comment = comment.trim_start_matches(BEGIN).trim_end_matches("-->").trim();
    let (options, template) = comment.split_once('\n').unwrap_or((comment, ""));
    let (name, options) = options.split_once(';').unwrap_or((options, ""));
    let data = load(name.trim())?;
    let line = data.line(&link(name.trim()), options.split(';').any(|option| option.trim() == SHORT));
    let mut body = table(data, options, template)?;
    body.extend([String::new(), line]);
    Ok(Block { name: name.trim().to_owned(), directive, length, body })
}

fn table(data: Data, options: &str, template: &str) -> Result<Vec<String>> {
    let (mut table, mut digits) = (data.table, None);
    let [mut rows, mut columns, mut value] = [const { Vec::new() }; 3];
    for option in options.split(';').map(str::trim).filter(|option| !option.is_empty() && *option != SHORT) {
        let (key, text) = option.split_once('=').unwrap_or((option, ""));
        let list: Vec<String> = text.split(',').map(|part| part.trim().to_owned()).collect();
        match key {
            "where" => {
                for part in list {
                    let (column, values) = part.split_once(':').unwrap_or((&part, ""));
                    table.retain(column, &values.split('|').map(str::to_owned).collect::<Vec<_>>())?;
                }
            }
            "rows" => rows = list,
            "columns" => columns = list,
            "value" => value = list,
            "digits" => digits = Some(text.to_owned()),
            _ => bail!(
                "unknown option\n  got:     {option}\n  allowed: where=, rows=, columns=, value=, digits=, {SHORT}"
            ),
        }
    }
    if let [spread] = &columns[..] {
        ensure!(
            !rows.is_empty() && !value.is_empty(),
            "columns= without rows= and value=\n  got:     {options}"
        );
        table = table.pivot(&rows, spread, &value)?;
    } else {
        ensure!(
            columns.is_empty() && rows.is_empty() && value.is_empty(),
            "a pivot needs one column of names\n  got:     {options}\n  allowed: rows=, columns=ONE, value="
        );
    }
    if let Some(digits) = digits {
        let each = table.header.iter().enumerate().map(|(index, name)| match index < rows.len() {
            true => format!("{{{name}}}"),
            false => format!("{{{name}:{digits}}}"),
        });
        table = fill(&table, &table.header.join("|"), &each.collect::<Vec<_>>().join("|"))?;
    }
    match template.trim().split_once('\n') {
        Some((header, cells)) => table = fill(&table, header, cells)?,
        None => ensure!(
            template.is_empty(),
            "a template needs two lines, header and cells\n  got:     {template}"
        ),
    }
    Ok(table.markdown())
}

/// Whether, in some column other than the first, at least half of the cells begin with a number.
fn has_figures(lines: &[&str]) -> bool {
    let rows: Vec<Vec<String>> = lines.iter().skip(2).map(|line| split(line)).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    (1..columns).any(|column| {
        let cells = rows.iter().filter_map(|row| row.get(column)).filter(|cell| !cell.is_empty());
        let (all, figures) =
            cells.fold((0, 0), |(all, some), cell| (all + 1, some + usize::from(is_figure(cell))));
        all > 0 && 2 * figures >= all
    })
}

fn is_figure(cell: &str) -> bool {
    let bare = cell.trim_start_matches(['*', '`', '+', '-', '±', '<', '~', '.']);
    bare.starts_with(|first: char| first.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: &str = "# command: bench\n# device: one H100\n# date: 2026-11-24\nN,scheme,ms\n1024,a,3.00\n1024,b,2.00\n4096,a,5.00\n";
    const LINE: &str = "_One H100, 2026-11-24: `bench`. [Data](figures/x.csv)._";

    fn page(text: &str) -> Page {
        let load = |name: &str| if name == "x" { Data::parse(DATA) } else { bail!("no file {name}") };
        generate(text, load, |name| format!("figures/{name}.csv"))
    }

    #[test]
    fn tables_are_generated_once() {
        for (options, table) in [
            (
                " -->",
                "| N | scheme | ms |\n|---|---|---|\n| 1024 | a | 3.00 |\n| 1024 | b | 2.00 |\n| 4096 | a | 5.00 |",
            ),
            (
                "; rows=N; columns=scheme; value=ms; digits=1 -->",
                "| N | a | b |\n|---|---|---|\n| 1024 | 3.0 | 2.0 |\n| 4096 | 5.0 | |",
            ),
            (
                "; where=N:1024; rows=N; columns=scheme; value=ms\n| N | b |\n| {N} | {b}, {a / b} |\n-->",
                "| N | b |\n|---|---|\n| 1024 | 2.00, 1.50x |",
            ),
        ] {
            let directive = format!("{BEGIN}x{options}");
            let first = page(&format!("before\n{directive}\nold\n{END}\nafter\n"));
            assert!(first.errors.is_empty() && !first.differences.is_empty(), "{first:?}");
            assert_eq!(first.text, format!("before\n{directive}\n{table}\n\n{LINE}\n{END}\nafter\n"));
            assert_eq!(first.used, ["x"]);
            let again = page(&first.text);
            assert_eq!((again.text, again.differences), (first.text, vec![]));
        }
    }

    #[test]
    fn differences_have_a_line() {
        let text = format!(
            "{BEGIN}x; where=scheme:b -->\n| N | scheme | ms |\n|---|---|---|\n| 1024 | b | 9 |\n\n{LINE}\n{END}\n"
        );
        let [(4, difference)] = &page(&text).differences[..] else { panic!("{:?}", page(&text)) };
        assert!(
            difference.contains("got:     | 1024 | b | 9 |") && difference.contains("hint:"),
            "{difference}"
        );
    }

    #[test]
    fn a_table_of_figures_is_generated() {
        let table = "| op | ms |\n|---|---|\n| a | **.5** |\n| b | +2 % |\n| c | |\n";
        let errors = page(&format!("text\n\n{table}")).errors;
        assert!(
            matches!(&errors[..], [(3, error)] if error.contains("without data") && error.contains("hint:")),
            "{errors:?}"
        );
        for accepted in [
            format!("{EXEMPT}\n{table}"),
            format!("```\n{table}```\n"),
            "| flag | meaning |\n|---|---|\n| `--a` | 2 of them |\n| `--b` | text |\n| `--c` | more |\n"
                .to_owned(),
        ] {
            assert!(page(&accepted).errors.is_empty(), "{accepted}");
        }
    }

    #[test]
    fn bad_directives_are_errors() {
        for (text, part) in [
            (format!("{BEGIN}y -->\n{END}\n"), "no file y"),
            (format!("{BEGIN}x -->\n{BEGIN}x -->\n{END}\n"), "without an end"),
            (format!("{BEGIN}x; over=a -->\n{END}\n"), "unknown option"),
            (format!("{BEGIN}x; columns=scheme -->\n{END}\n"), "without rows="),
            (format!("{BEGIN}x; rows=N -->\n{END}\n"), "one column of names"),
        ] {
            let page = page(&text);
            assert!(page.errors.len() == 1 && page.errors[0].1.contains(part), "{text}: {:?}", page.errors);
        }
    }
}
