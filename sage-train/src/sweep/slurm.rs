//! A sweep as a Slurm job array: each task does one run, and all tasks share the sweep's folder.

use std::path::Path;

/// Quotes a word for a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// A batch script that runs a sweep of `runs` runs. `command` is the sweep's command line as it was typed,
/// without the program and `--slurm`; each task adds `--only` with its own index. Slurm sends SIGTERM 120 s
/// before the time limit: the run then saves a checkpoint. The same script, submitted again, resumes the run.
pub fn script(name: &str, runs: usize, folder: &Path, gpus: bool, command: &[String]) -> String {
    let program = std::env::current_exe().map_or("sage-train".into(), |path| path.display().to_string());
    let words: Vec<String> = std::iter::once(&program).chain(command).map(|word| quoted(word)).collect();
    let gpu = if gpus { "#SBATCH --gres=gpu:1\n" } else { "" };
    format!(
        "#!/bin/bash\n\
         #SBATCH --job-name={name}\n\
         #SBATCH --array=0-{last}\n\
         {gpu}\
         #SBATCH --cpus-per-task=4\n\
         #SBATCH --time=24:00:00\n\
         #SBATCH --signal=B:TERM@120\n\
         #SBATCH --requeue\n\
         #SBATCH --output={folder}/slurm-%a.txt\n\
         # Finished runs are skipped: submit the script again to resume runs that reached the time limit.\n\
         {words} --only \"$SLURM_ARRAY_TASK_ID\" &\n\
         # Two minutes before the time limit the shell gets SIGTERM and forwards it to the run, which saves a checkpoint.\n\
         trap 'kill -TERM $!' TERM\n\
         wait $!\n\
         wait $!\n",
        name = quoted(name),
        last = runs.saturating_sub(1),
        folder = quoted(&folder.display().to_string()),
        words = words.join(" "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_a_run_and_arguments_are_quoted() {
        let words = ["sweep", "it's mine.toml", "--seed", "1,2"].map(String::from);
        let script = script("a b", 12, Path::new("runs/a b"), true, &words);
        assert!(script.contains("--array=0-11\n#SBATCH --gres=gpu:1"), "{script}");
        assert!(script.contains(r"sweep 'it'\''s mine.toml' --seed 1,2 --only"), "{script}");
    }
}
