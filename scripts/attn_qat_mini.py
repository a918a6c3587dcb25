#!/usr/bin/env python3
"""Runs the ablation of Attn-QAT at a small scale. The arms are drop-in QAT, Attn-QAT without each of its
principles, Attn-QAT, full precision, FP4 inference without training for it, and fine-tuning of a
full-precision model. Each arm has several seeds, and its difference to full precision a confidence interval.

  attn_qat_mini.py SAGE_TRAIN DATA --out FOLDER [--seeds 3] [--jobs 4] [--steps 600] [--parts NAME,..]
                   [--csv FILE] [--plot FILE]

DATA is a folder of shards (sage-train data prepare). A run that is finished in FOLDER is not run again.
Differences to full precision are paired by seed (the same initial weights and batches); intervals are
Student's t, 95 %.

Needs a sage-train binary; with a GPU it takes minutes.
"""
import argparse
import concurrent.futures
import csv
import json
import math
import pathlib
import re
import statistics
import subprocess

QAT = ["--attn", "attn-qat"]
OFF = {name: [f"--{name}", "off"] for name in ("high-precision-output", "matched-recomputation", "requantized-p")}
DROP_IN = QAT + sum(OFF.values(), [])
PRETRAIN = {
    "full precision": ["--attn", "fpa"],
    "attn-qat": QAT,
    "no high-precision output": QAT + OFF["high-precision-output"],
    "no matched recomputation": QAT + OFF["matched-recomputation"],
    "no requantized P": QAT + OFF["requantized-p"],
    "literal P": QAT + ["--p-reference", "literal"],
    "drop-in": DROP_IN,
}
FINE_TUNE = {"full precision": ["--attn", "fpa"], "attn-qat": QAT, "drop-in": DROP_IN}
PARTS = ["QK-norm", "no QK-norm", "context 4k", "fine-tune"]
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def call(*words):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True)


class Bench:
    def __init__(self, args):
        self.args = args

    def train(self, name, flags):
        """Trains a run, if it is not finished. Returns its final validation loss, the mean training loss of its
        last 20 steps, its largest gradient norm after a fifth of its steps, its last step, and its error."""
        name = f"{name}-{self.args.steps}"
        folder = pathlib.Path(self.args.out) / name
        result = folder / "result.json"
        if not result.exists():
            done = call(self.args.sage_train, "--preset", "mini", "--data", self.args.data, "--out", self.args.out,
                        "--name", name, "--sample-tokens", 0, "--eval-tokens", self.args.eval_tokens, "--eval-every", 0,
                        *flags)
            # A loss that is not finite is a result; any other failure ends the script.
            if done.returncode != 0 and "stopped before the update" not in done.stderr:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            norms = [point["grad_norm"] for point in points if point.get("grad_norm") is not None]
            last = points[-1]
            summary = {"loss": last.get("val_loss") if done.returncode == 0 else None,
                       "train_loss": statistics.mean(p["loss"] for p in points[-20:]),
                       "largest_norm": max(norms[len(norms) // 5:] or norms), "steps": last["step"],
                       "error": None if done.returncode == 0 else done.stderr.strip().splitlines()[0][:100]}
            result.write_text(json.dumps(summary))
        return json.loads(result.read_text())

    def evaluate(self, name, attn):
        done = call(self.args.sage_train, "eval", pathlib.Path(self.args.out) / f"{name}-{self.args.steps}", "--attn", attn,
                    "--tokens", self.args.eval_tokens)
        if done.returncode != 0:
            raise SystemExit(f"eval of {name} failed:\n{done.stderr}")
        found = re.search(r"loss\s+([0-9.]+)", done.stdout)
        return float(found.group(1)) if found else None

    def seed(self, seed):
        """Runs all arms of one seed. Returns (part, arm) -> results."""
        a, results = self.args, {}
        parts = (("QK-norm", [], list(PRETRAIN)),
                 ("no QK-norm", ["--qk-norm", "off"], list(COLOURS)),
                 ("context 4k", ["--context", "4k"], ["full precision", "attn-qat", "literal P", "drop-in"]))
        for part, extra, arms in (row for row in parts if row[0] in a.parts):
            for arm in arms:
                name = f"{part}-{arm}-{seed}".replace(" ", "-").lower()
                flags = PRETRAIN[arm] + extra + ["--steps", a.steps, "--tokens-per-step", a.tokens_per_step,
                                                 "--micro-batch", 8 if part == "context 4k" else 32, "--seed", seed]
                results[part, arm] = self.train(name, flags)
            base = f"{part}-full-precision-{seed}".replace(" ", "-").lower()
            results[part, "FP4 after training"] = {"loss": self.evaluate(base, "attn-qat")}
        if "fine-tune" not in a.parts:
            return results
        base = pathlib.Path(a.out) / f"qk-norm-full-precision-{seed}-{a.steps}"
        exported = pathlib.Path(a.out) / f"exported-{seed}-{a.steps}"
        if not exported.exists():
            done = call(a.sage_train, "export", base, "--to", exported)
            if done.returncode != 0:
                raise SystemExit(f"export of {base} failed:\n{done.stderr}")
        for arm, flags in FINE_TUNE.items():
            name = f"fine-tune-{arm}-{seed}".replace(" ", "-")
            tune = ["--init-from", exported, "--steps", a.steps // 6, "--tokens-per-step", a.tokens_per_step,
                    "--micro-batch", 32, "--seed", 1000 + seed, "--lr", 1.5e-4]
            results["fine-tune", arm] = self.train(name, flags + tune)
            if arm == "full precision":
                results["fine-tune", "FP4 after training"] = {"loss": self.evaluate(name, "attn-qat")}
        return results


COLOURS = {"full precision": "#1b1b1b", "attn-qat": "#0072b2", "no high-precision output": "#e69f00", "drop-in": "#d55e00"}
DASHES = {"full precision": "", "attn-qat": "7 3", "no high-precision output": "2 3", "drop-in": ""}


def plot(path, out, seeds, steps):
    """Writes an SVG of the training loss without QK-norm: means over 10 steps, a line for each seed."""
    width, height, left, right, top, bottom = 760, 380, 60, 210, 34, 46
    curves = []
    for arm in COLOURS:
        for seed in range(seeds):
            file = pathlib.Path(out) / f"no-qk-norm-{arm}-{seed}-{steps}".replace(" ", "-") / "metrics.jsonl"
            losses = [json.loads(line)["loss"] for line in file.read_text().splitlines()]
            curves.append((arm, [statistics.mean(losses[max(0, i - 9):i + 1]) for i in range(len(losses))]))
    low, high = 2.8, min(9.0, max(max(curve) for _, curve in curves))

    def point(step, loss):
        x = left + (width - left - right) * step / steps
        return f"{x:.1f},{top + (height - top - bottom) * (high - min(loss, high)) / (high - low):.1f}"

    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
           f'<text x="{left}" y="20" font-size="15">FP4 attention without QK-norm: training loss</text>']
    for tick in range(3, int(high) + 1):
        x, y = point(0, tick).split(",")
        svg.append(f'<line x1="{left}" y1="{y}" x2="{width - right}" y2="{y}" stroke="#dddddd"/>'
                   f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick}</text>')
    for tick in range(0, steps + 1, max(1, steps // 5)):
        x, _ = point(tick, low).split(",")
        svg.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{tick}</text>')
    svg.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">step</text>'
               f'<text x="16" y="{height / 2}" transform="rotate(-90 16 {height / 2})" text-anchor="middle">nats a token</text>')
    for arm, curve in curves:
        line = " ".join(point(step, loss) for step, loss in enumerate(curve))
        svg.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[arm]}" stroke-width="1.4" '
                   f'stroke-dasharray="{DASHES[arm]}" opacity="0.85"/>')
    for n, arm in enumerate(COLOURS):
        y = top + 16 + 22 * n
        svg.append(f'<line x1="{width - right + 12}" y1="{y}" x2="{width - right + 42}" y2="{y}" stroke="{COLOURS[arm]}" '
                   f'stroke-width="2" stroke-dasharray="{DASHES[arm]}"/><text x="{width - right + 50}" y="{y + 4}">{arm}</text>')
    pathlib.Path(path).write_text("\n".join(svg) + "\n</svg>\n")


def interval(values):
    """Mean, and half the width of its 95 % confidence interval."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    return statistics.mean(values), T95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sage_train")
    parser.add_argument("data")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 11), metavar="1..10")
    parser.add_argument("--jobs", type=int, default=4, help="seeds side by side")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tokens-per-step", default="32k")
    parser.add_argument("--eval-tokens", default="512k")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS,
                        help="some of: " + ", ".join(PARTS) + "; fine-tune needs the runs of QK-norm")
    parser.add_argument("--csv")
    parser.add_argument("--plot", help="an SVG of the training losses without QK-norm")
    args = parser.parse_args()
    bench = Bench(args)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        seeds = list(pool.map(bench.seed, range(args.seeds)))
    rows = []
    print(f"{'part':<12} {'arm':<26} {'val loss':>9} {'over full precision':>24} {'largest norm':>13}  stopped")
    for part, arm in seeds[0]:
        runs = [results[part, arm] for results in seeds]
        exact = [results[part, "full precision"]["loss"] for results in seeds]
        losses = [run["loss"] for run in runs]
        ended = [(loss, base) for loss, base in zip(losses, exact) if loss is not None and base is not None]
        mean, _ = interval([loss for loss, _ in ended])
        over, half = interval([loss - base for loss, base in ended])
        norm = max((run.get("largest_norm") or 0.0) for run in runs)
        stopped = [f"step {run['steps']}: {run['error']}" for run in runs if run.get("error")]
        difference = "" if arm == "full precision" else f"{over:+.4f} +- {half:.4f}"
        print(f"{part:<12} {arm:<26} {mean:>9.4f} {difference:>24} {norm if norm else '':>13.4}  {'; '.join(stopped)}"
              if norm else f"{part:<12} {arm:<26} {mean:>9.4f} {difference:>24} {'':>13}  {'; '.join(stopped)}", flush=True)
        for seed, run in enumerate(runs):
            rows.append([part, arm, seed, run["loss"], run.get("train_loss"), run.get("largest_norm"), run.get("error") or ""])
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["part", "arm", "seed", "val_loss", "train_loss", "largest_grad_norm", "error"])
            writer.writerows(rows)
    if args.plot and "no QK-norm" in args.parts:
        plot(args.plot, args.out, args.seeds, args.steps)


if __name__ == "__main__":
    main()
