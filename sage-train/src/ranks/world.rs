//! Reads the rank of this process from the environment variables of one launcher: torchrun, Slurm or `--gpus`.

use candle_sage::{Error, Result};

use super::mesh::Rank;
use super::secret::{SECRET, Secret};

/// Environment variable that marks a process as started by `--gpus`.
pub(super) const LAUNCHED: &str = "SAGE_TRAIN_LAUNCHED";

/// The variables that torchrun and `--gpus` set.
const NAMES: [&str; 6] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// The environment variables that mark a process as a rank. A child process that is not a rank must not inherit them.
pub fn variables() -> impl Iterator<Item = &'static str> {
    NAMES.into_iter().chain(["SLURM_STEP_NUM_TASKS", LAUNCHED, SECRET])
}

/// [`World::launcher`] of ranks that `--gpus` started.
const GPUS: &str = "--gpus";

/// Largest number of ranks of a run.
const MOST: usize = 1 << 16;

/// The position of a process among the ranks, and the address at which rank 0 listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// The position of this rank among all ranks.
    pub rank: Rank,
    /// The position of this rank among the ranks of its machine.
    pub local: Rank,
    /// The host on which rank 0 listens.
    pub host: String,
    /// The port on which rank 0 listens.
    pub port: u16,
    /// The launcher that set the variables.
    pub launcher: &'static str,
    /// The secret that the ranks of the run share.
    pub(super) secret: Secret,
}

impl World {
    /// Reads the position of this process from environment variables. Returns `None` for a single process.
    ///
    /// # Errors
    /// When the environment is incomplete, or its numbers contradict each other.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variables(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// Whether `--gpus` started this process.
    pub(super) fn is_launched(&self) -> bool {
        self.launcher == GPUS
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let world = if NAMES[..2].iter().any(|name| variable(name).is_some()) {
            Some(Self::of_torchrun(variable)?)
        } else {
            Self::of_slurm(variable)?
        };
        let Some(world) = world else { return Ok(None) };
        if world.rank.of > MOST {
            return Err(Error::new("the number of ranks is too large")
                .got(format!("{} ranks, set by {}", world.rank.of, world.launcher))
                .allowed(format!("1 to {MOST}"))
                .hint("the environment may contain variables of an earlier launcher: unset them"));
        }
        for (rank, what, of) in
            [(world.rank, "rank", "ranks"), (world.local, "local rank", "ranks on the node")]
        {
            if rank.index >= rank.of {
                return Err(Error::new(format!("the {what} is not below the number of {of}"))
                    .got(format!("{what} {} of {}, set by {}", rank.index, rank.of, world.launcher))
                    .allowed(format!("0 to one less than the number of {of}"))
                    .hint("the environment may contain variables of an earlier launcher: unset them"));
            }
        }
        Ok((world.rank.of > 1).then_some(world))
    }

    fn of_torchrun(variable: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let missing: Vec<&str> = NAMES.into_iter().filter(|name| variable(name).is_none()).collect();
        if !missing.is_empty() {
            return Err(Error::new("environment variables of the ranks are missing")
                .got(format!("{} not set", missing.join(", ")))
                .allowed(NAMES.join(", "))
                .hint("torchrun and --gpus set all of them; to train with one process, unset those that are set"));
        }
        let number = |name: &str| number(name, &variable(name).unwrap_or_default());
        let port = number("MASTER_PORT")?;
        // torchrun's agent listens on `MASTER_PORT`, so the ranks use the next port.
        let agent = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = u16::try_from(port + usize::from(agent)).ok().filter(|port| *port > 0);
        let port = port.ok_or_else(|| not_a_number("MASTER_PORT", number("MASTER_PORT").unwrap_or(0)))?;
        Ok(Self {
            rank: Rank { index: number("RANK")?, of: number("WORLD_SIZE")? },
            local: Rank { index: number("LOCAL_RANK")?, of: number("LOCAL_WORLD_SIZE")? },
            host: variable("MASTER_ADDR").unwrap_or_default(),
            port,
            launcher: if variable(LAUNCHED).is_some() { GPUS } else { "torchrun" },
            secret: secret(variable, "TORCHELASTIC_RUN_ID"),
        })
    }

    /// Reads the variables that `srun` sets for a task. `None` for a batch script without `srun`: it is a single
    /// process, for which Slurm does not set `SLURM_STEP_NUM_TASKS`.
    fn of_slurm(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let Some(of) = variable("SLURM_STEP_NUM_TASKS") else { return Ok(None) };
        let of = number("SLURM_STEP_NUM_TASKS", &of)?;
        let needed = |name: &str| {
            variable(name).ok_or_else(|| {
                Error::new("environment variables of Slurm are missing")
                    .got(format!("SLURM_STEP_NUM_TASKS without {name}"))
                    .allowed("the variables that srun sets")
                    .hint("start sage-train with srun")
            })
        };
        if of < 2 {
            return Ok(None);
        }
        let (index, local) = (needed("SLURM_PROCID")?, needed("SLURM_LOCALID")?);
        let nodes = needed("SLURM_STEP_NODELIST")?;
        let job = number("SLURM_JOB_ID", &needed("SLURM_JOB_ID")?)?;
        let step = variable("SLURM_STEP_ID").and_then(|step| step.parse().ok()).unwrap_or(0usize);
        let tasks = needed("SLURM_STEP_TASKS_PER_NODE")?;
        let local_index = number("SLURM_LOCALID", &local)?;
        Ok(Some(Self {
            rank: Rank { index: number("SLURM_PROCID", &index)?, of },
            local: Rank { index: local_index, of: most_tasks(&tasks).max(local_index + 1) },
            host: first_host(&nodes),
            // The port is the same for all ranks of a Slurm step, rarely equal to another job's port, and below the
            // ephemeral ports.
            port: 20_000 + (job.wrapping_mul(7).wrapping_add(step) % 12_000) as u16,
            launcher: "Slurm",
            secret: secret(variable, "SLURM_JOB_ID"),
        }))
    }
}

/// The secret from the environment, or else the job's number. The number keeps the ranks of two jobs apart, but other
/// users may know it.
fn secret(variable: &dyn Fn(&str) -> Option<String>, job: &str) -> Secret {
    variable(SECRET).map_or_else(|| Secret::of_job(variable(job).unwrap_or_default()), Secret::given)
}

fn not_a_number(name: &str, got: impl std::fmt::Display) -> Error {
    Error::new(format!("the environment variable {name} is not a valid number"))
        .got(got)
        .allowed(match name {
            "MASTER_PORT" => "a port: 1 to 65535, or 1 to 65534 if torchrun's agent listens on it",
            _ => "a whole number from 0 to 4294967295",
        })
        .hint("start with torchrun, srun or --gpus, which set this variable")
}

fn number(name: &str, value: &str) -> Result<usize> {
    value.trim().parse().ok().filter(|&n: &usize| n < 1 << 32).ok_or_else(|| not_a_number(name, value))
}

/// The first host in Slurm's list of nodes: `node03` for `node[03-08,10],other`.
fn first_host(list: &str) -> String {
    let Some((name, rest)) = list.split_once('[').filter(|(name, _)| !name.contains(',')) else {
        return list.split(',').next().unwrap_or_default().to_owned();
    };
    let (inside, behind) = rest.split_once(']').unwrap_or((rest, ""));
    let first = inside.split([',', '-']).next().unwrap_or_default();
    format!("{name}{first}{}", behind.split(',').next().unwrap_or_default())
}

/// The largest number of tasks on a node, from Slurm's notation: 4 for `4(x2),1`.
fn most_tasks(list: &str) -> usize {
    let tasks = list.split(',').filter_map(|node| node.split('(').next()?.parse().ok());
    tasks.max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<Option<World>> {
        World::from_variables(&|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn launchers_are_understood() {
        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "29500"),
        ];
        let got = world(&torchrun).expect("a world").expect("several");
        assert_eq!((got.rank, got.local.index), (Rank { index: 5, of: 8 }, 1));
        assert_eq!((got.host.as_str(), got.port), ("a", 29_500));
        let agent = [&torchrun[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(world(&agent).expect("a world").expect("several").port, 29_501);
        let given = [&torchrun[..], &[("SAGE_TRAIN_SECRET", "s"), ("TORCHELASTIC_RUN_ID", "7")]].concat();
        assert_eq!(world(&given).expect("a world").expect("several").secret, Secret::given("s".into()));
        for left_out in 0..6 {
            let half: Vec<_> =
                torchrun.iter().enumerate().filter(|(n, _)| *n != left_out).map(|(_, v)| *v).collect();
            let error = world(&half).expect_err("half").to_string();
            assert!(error.contains(torchrun[left_out].0) && error.contains("hint:"), "{error}");
        }
        let beyond = torchrun.map(|(key, value)| (key, if key == "RANK" { "8" } else { value }));
        assert!(world(&beyond).is_err());
        let slurm = [
            ("SLURM_STEP_NUM_TASKS", "6"),
            ("SLURM_PROCID", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[07-08,12]"),
            ("SLURM_JOB_ID", "1234"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x3)"),
        ];
        let got = world(&slurm).expect("a world").expect("several");
        assert_eq!((got.rank, got.local), (Rank { index: 4, of: 6 }, Rank { index: 0, of: 2 }));
        assert_eq!(got.host, "gpu07");
        assert_eq!(got.secret, Secret::of_job("1234".into()));
        // A batch script without srun.
        assert_eq!(world(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "6")]), Ok(None));
        assert_eq!(world(&[]), Ok(None));
    }

    #[test]
    fn lists_of_nodes() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("n[1-3]", "n1"),
            ("n[08,10],m", "n08"),
            ("n[1-2]-ib,m", "n1-ib"),
            ("a,n[1-2]", "a"),
        ] {
            assert_eq!(first_host(list), first, "{list}");
        }
        assert_eq!((most_tasks("4(x2),1"), most_tasks("8")), (4, 8));
    }
}
