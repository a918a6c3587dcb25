//! Tables of text: reads CSV, filters and pivots rows, and writes Markdown.

use anyhow::{Result, ensure};

#[derive(Debug, PartialEq)]
pub(crate) struct Table {
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(text.as_bytes());
        let own = |record: &csv::StringRecord| record.iter().map(str::to_owned).collect::<Vec<String>>();
        let header = own(reader.headers()?);
        let rows = reader.records().map(|record| Ok(own(&record?))).collect::<Result<Vec<_>>>()?;
        ensure!(
            !rows.is_empty(),
            "no rows\n  got:     {} columns\n  allowed: a header and rows",
            header.len()
        );
        Ok(Self { header, rows })
    }

    pub(crate) fn column(&self, name: &str) -> Result<usize> {
        let index = self.header.iter().position(|own| own == name);
        index.ok_or_else(|| {
            anyhow::anyhow!("no such column\n  got:     {name}\n  allowed: {}", self.header.join(", "))
        })
    }

    pub(crate) fn retain(&mut self, column: &str, values: &[String]) -> Result<()> {
        let index = self.column(column)?;
        self.rows.retain(|row| values.contains(&row[index]));
        ensure!(
            !self.rows.is_empty(),
            "no row has {column} {}\n  hint:    compare with the data",
            values.join(" or ")
        );
        Ok(())
    }

    /// One row for each combination of the `keys`. Each distinct cell of the column `spread`, such as `INT8`, becomes a
    /// column. With several columns `values`, such as `forward`, it becomes a column for each of them: `INT8.forward`.
    /// Rows and columns keep the order of the data.
    pub(crate) fn pivot(&self, keys: &[String], spread: &str, values: &[String]) -> Result<Self> {
        let indices =
            |names: &[String]| names.iter().map(|name| self.column(name)).collect::<Result<Vec<_>>>();
        let (key_indices, value_indices, spread) = (indices(keys)?, indices(values)?, self.column(spread)?);
        let mut result = Self { header: keys.to_vec(), rows: Vec::new() };
        for row in &self.rows {
            for value in values {
                let name =
                    if values.len() == 1 { row[spread].clone() } else { format!("{}.{value}", row[spread]) };
                if !result.header.contains(&name) {
                    result.header.push(name);
                }
            }
        }
        for row in &self.rows {
            let key: Vec<String> = key_indices.iter().map(|&index| row[index].clone()).collect();
            let at = result.rows.iter().position(|own| own.starts_with(&key)).unwrap_or_else(|| {
                let mut blank = key.clone();
                blank.resize(result.header.len(), String::new());
                result.rows.push(blank);
                result.rows.len() - 1
            });
            for (value, &index) in values.iter().zip(&value_indices) {
                let name =
                    if values.len() == 1 { row[spread].clone() } else { format!("{}.{value}", row[spread]) };
                let column = result.column(&name)?;
                let cell = &mut result.rows[at][column];
                ensure!(
                    cell.is_empty(),
                    "two figures for one cell\n  got:     {cell} and {} for {name}, {}\n  allowed: one row for each\n  \
                     hint:    name the columns that differ in rows=, or select with where=",
                    row[index],
                    key.join(", ")
                );
                cell.clone_from(&row[index]);
            }
        }
        Ok(result)
    }

    pub(crate) fn markdown(&self) -> Vec<String> {
        let line = |cells: &[String]| {
            cells.iter().fold(String::from("|"), |line, cell| match cell.is_empty() {
                true => line + " |",
                false => line + " " + cell + " |",
            })
        };
        let rule = format!("|{}", "---|".repeat(self.header.len()));
        [line(&self.header), rule].into_iter().chain(self.rows.iter().map(|row| line(row))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str = "D,N,scheme,forward,both\n64,1024,a,1.0,3.0\n64,1024,b,2.0,4.0\n64,4096,b,5.0,6.0\n128,1024,a,7.0,8.0\n";

    fn names(names: &str) -> Vec<String> {
        names.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn a_long_table_is_pivoted() {
        let table = Table::parse(LONG).unwrap();
        let wide = table.pivot(&names("D,N"), "scheme", &names("both")).unwrap();
        assert_eq!(wide, Table::parse("D,N,a,b\n64,1024,3.0,4.0\n64,4096,,6.0\n128,1024,8.0,\n").unwrap());
        let wide = table.pivot(&names("D,N"), "scheme", &names("forward,both")).unwrap();
        assert_eq!(wide.header, names("D,N,a.forward,a.both,b.forward,b.both"));
        assert_eq!(wide.rows[0], names("64,1024,1.0,3.0,2.0,4.0"));
        assert_eq!(wide.markdown()[3], "| 64 | 4096 | | | 5.0 | 6.0 |");
    }

    #[test]
    fn rows_are_selected() {
        let mut table = Table::parse(LONG).unwrap();
        table.retain("N", &names("1024")).unwrap();
        assert_eq!(table.rows.len(), 3);
        let error = table.retain("N", &names("1")).unwrap_err().to_string();
        assert!(error.contains("no row has N 1"), "{error}");
    }

    #[test]
    fn a_cell_has_one_figure() {
        let table = Table::parse(LONG).unwrap();
        let error = table.pivot(&names("D"), "scheme", &names("both")).unwrap_err().to_string();
        assert!(error.contains("4.0 and 6.0 for b, 64") && error.contains("hint:"), "{error}");
        let error = table.pivot(&names("d"), "scheme", &names("both")).unwrap_err().to_string();
        assert!(error.contains("no such column") && error.contains("allowed: D, N"), "{error}");
    }
}
