//! Computes cells from several columns. In a template `{ms}` is the text of a column, `{ms:2}` rounds it to two digits
//! after the point, and `{baseline / ms}` computes a ratio, such as `1.54x`. A suffix changes the ratio's format: `:1`
//! gives `1.5x`, `:%1` gives `154.0 %`, and `:+%1` gives `+54.0 %`. Ratios may have more than two terms, and a term may
//! be a number. A cell, or a part of it in square brackets, is omitted if a column that it uses is empty.

use anyhow::{Context, Result, bail};

use crate::table::Table;

/// A table with the template's header, and a row of filled cells for each row of the data.
pub(crate) fn fill(table: &Table, header: &str, cells: &str) -> Result<Table> {
    let (header, cells) = (split(header), split(cells));
    if header.len() != cells.len() {
        bail!(
            "header and cells differ in number\n  got:     {} and {} cells\n  allowed: equal numbers",
            header.len(),
            cells.len()
        );
    }
    let row = |row: &Vec<String>| {
        cells.iter().map(|cell| Ok(render(table, row, cell)?.unwrap_or_default())).collect()
    };
    Ok(Table { header, rows: table.rows.iter().map(row).collect::<Result<_>>()? })
}

pub(crate) fn split(line: &str) -> Vec<String> {
    let line = line.trim();
    let inner = line.strip_prefix('|').and_then(|line| line.strip_suffix('|')).unwrap_or(line);
    inner.split('|').map(|cell| cell.trim().to_owned()).collect()
}

/// Fills `template` with the values of `row`. Returns `None` if a value outside square brackets is empty.
fn render(table: &Table, row: &[String], template: &str) -> Result<Option<String>> {
    let (mut out, mut rest, mut complete) = (String::new(), template, true);
    while let Some(at) = rest.find(['{', '[']) {
        out.push_str(&rest[..at]);
        let (open, close) = if rest[at..].starts_with('{') { ('{', '}') } else { ('[', ']') };
        let end =
            at + rest[at..].find(close).with_context(|| format!("`{open}` without `{close}`: {template}"))?;
        let inner = &rest[at + 1..end];
        let part = if open == '{' { value(table, row, inner)? } else { render(table, row, inner)? };
        complete &= part.is_some() || open == '[';
        out.push_str(&part.unwrap_or_default());
        rest = &rest[end + 1..];
    }
    Ok(complete.then(|| out + rest))
}

fn value(table: &Table, row: &[String], text: &str) -> Result<Option<String>> {
    let (names, form) = text.split_once(':').unwrap_or((text, ""));
    if !names.contains(" / ") {
        let cell = &row[table.column(names)?];
        if form.is_empty() {
            return Ok(Some(cell.clone()).filter(|cell| !cell.is_empty()));
        }
        let places = digits(form, 0)?;
        return Ok(number(table, row, names)?.map(|value| format!("{value:.places$}")));
    }
    let terms =
        names.split(" / ").map(|name| number(table, row, name)).collect::<Result<Option<Vec<_>>>>()?;
    let Some(ratio) = terms.and_then(|terms| terms.into_iter().reduce(|above, below| above / below)) else {
        return Ok(None);
    };
    Ok(Some(match (form.strip_prefix("+%"), form.strip_prefix('%')) {
        (Some(form), _) => format!("{:+.*} %", digits(form, 1)?, 100.0 * (ratio - 1.0)),
        (_, Some(form)) => format!("{:.*} %", digits(form, 1)?, 100.0 * ratio),
        _ => format!("{ratio:.*}x", digits(form, 2)?),
    }))
}

fn digits(form: &str, default: usize) -> Result<usize> {
    if form.is_empty() {
        Ok(default)
    } else {
        form.parse().with_context(|| format!("not a number of digits: {form}"))
    }
}

/// The number in a column, or a literal number in the template.
fn number(table: &Table, row: &[String], name: &str) -> Result<Option<f64>> {
    let cell = match table.column(name) {
        Ok(column) => row[column].as_str(),
        Err(_) if name.parse::<f64>().is_ok() => name,
        Err(error) => return Err(error),
    };
    match cell {
        "" => Ok(None),
        _ => Ok(Some(cell.parse().with_context(|| {
            format!("not a number\n  got:     {cell} in {name}\n  hint:    one number a column; a template joins columns")
        })?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(template: &str) -> Result<String> {
        let table = Table::parse("case,base,ours,none,text\na,3.0,2.00,,n/a\n")?;
        Ok(fill(&table, "| x |", template)?.rows[0][0].clone())
    }

    #[test]
    fn cells_are_filled() {
        for (template, expected) in [
            ("{ours}", "2.00"),
            (
                "{ours:1} ms: {base / ours}, {ours / base:%0}, {base / ours:+%1}, {1 / ours / 2}",
                "2.0 ms: 1.50x, 67 %, +50.0 %, 0.25x",
            ),
            ("{ours}[ ({none})], **{base}**", "2.00, **3.0**"),
            ("{ours}, {none}", ""),
            ("{none / ours}", ""),
        ] {
            assert_eq!(cell(template).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn bad_templates_are_errors() {
        for (template, part) in [
            ("{oops}", "no such column"),
            ("{text / ours}", "not a number"),
            ("{ours", "without `}`"),
            ("{ours:x}", "not a number of digits"),
            ("| {ours} | {base} |", "header and cells differ in number"),
        ] {
            let error = format!("{:#}", cell(template).unwrap_err());
            assert!(error.contains(part), "{template}: {error}");
        }
    }
}
