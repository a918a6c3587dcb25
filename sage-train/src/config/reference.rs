//! Generates the Markdown page of all settings, `docs/settings.md`, from their declarations.

use std::fmt::Write as _;

use toml::Table;

use super::identity::tells_runs_apart;
use super::{as_text, preset};
use crate::settings::{Preset, Role, has_role, tables};

/// The text of `docs/settings.md`: a Markdown table for each TOML table of a settings file.
pub fn reference() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Each setting is a flag of `sage-train` and a key of a TOML file (`--config FILE`); in the file, the key may be in its table or above all tables. \
         `sage-train --help` has the same descriptions. *Default* is the default of `--preset tiny`; if it is empty, the default \
         is in the description or follows from other settings. *Run*: sweeps and reports treat runs with different values as different runs. \
         *Resume*: `--resume RUN` accepts another value.\n\n\
         <!-- Written by `tests/it/command.rs` (`INSTA_UPDATE=always`), which fails when this page is old. -->\n",
    );
    let defaults = Table::try_from(preset::defaults(Preset::Tiny)).expect("settings are plain values");
    let mut last = "";
    for setting in tables::described() {
        if setting.table != last {
            last = setting.table;
            write!(page, "\n## `[{last}]`\n\n| key | flag | what it does | default | run | resume |\n|---|---|---|---|---|---|\n")
                .expect("a string takes everything");
        }
        // The page shows no default for `device`, because this default depends on the build.
        let default = defaults.get(&setting.flag).filter(|_| setting.flag != "device");
        let default = default.map_or(String::new(), |value| format!("`{}`", as_text(value)));
        let yes = |yes: bool| if yes { "yes" } else { "" };
        writeln!(
            page,
            "| `{}` | `--{} {}` | {} | {default} | {} | {} |",
            setting.key,
            setting.flag,
            setting.values.replace('|', "\\|"),
            setting.help.replace('|', "\\|"),
            yes(tells_runs_apart(&setting.flag)),
            yes(has_role(&setting.flag, Role::Resumable)),
        )
        .expect("a string takes everything");
    }
    page
}
