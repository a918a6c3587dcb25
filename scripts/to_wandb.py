#!/usr/bin/env python3
"""Converts runs to offline runs of Weights & Biases: settings, every step, and how the run ended.

usage: to_wandb.py PROJECT RUN [RUN ..]      (needs wandb; then: wandb sync wandb/offline-run-*)
"""
import hashlib
import json
import pathlib
import sys
import tomllib

import wandb


def settings(run):
    """The settings of config.toml, with table and key as name: optimizer.lr."""
    tables = tomllib.loads((run / "config.toml").read_text())
    flat = {}
    for table, values in tables.items():
        if isinstance(values, dict):
            flat |= {f"{table}.{key}": value for key, value in values.items()}
        else:
            flat[table] = values
    return flat


def points(run):
    """The steps. A truncated last line is skipped."""
    for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]:
        point = json.loads(line)
        # The checksum of the line is not a metric.
        point.pop("crc32c", None)
        yield point.pop("step"), {name: float(value) for name, value in point.items()}


def write(project, run):
    # The id depends only on the run's folder, so that a later conversion of a run continues the first one.
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
    ending = run / "ending.json"
    ending = json.loads(ending.read_text()) if ending.exists() else {"status": "unfinished"}
    logged = wandb.init(
        project=project, id=name, name=run.name, group=run.parent.name, config=settings(run), mode="offline", resume="allow"
    )
    last = 0
    for last, metrics in points(run):
        logged.log(metrics, step=last)
    logged.summary.update({f"ending.{key}": value for key, value in ending.items()})
    logged.finish(exit_code=0 if ending["status"] == "finished" else 1)
    print(f"{run}: {last} steps, {ending['status']}")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for run in sys.argv[2:]:
        write(sys.argv[1], pathlib.Path(run))


if __name__ == "__main__":
    main()
