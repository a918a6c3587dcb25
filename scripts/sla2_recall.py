#!/usr/bin/env python3
"""Measures the recall of block-sparse attention: trains a small model until dense attention answers every question
about facts thousands of tokens before, then continues with selected blocks, and counts right answers by distance.

  sla2_recall.py SAGE_TRAIN --out FOLDER [--arms fpa,sla2:3,sla2-window:3,..] [--seeds 2,3,4] [--tokens 16m]
                 [--dense-steps 100] [--router-steps 60] [--jobs 5] [--csv FILE] [--plot FILE]
  sla2_recall.py --plot FILE --from CSV ..

An arm is a kind of attention, the number of past blocks of 128 tokens that it selects, and how many of these must be
the nearest blocks (sla2:6:2). The dense model is trained on documents of 200, 800, 3000 and 6000 words in turn, at
contexts of 256 to 8192: trained only on long documents, it does not learn to look anything up. Finished runs in FOLDER
are not repeated. An H100 needs two minutes for the dense model and half a minute for five concurrent arms.
"""
import argparse
import concurrent.futures
import csv
import json
import pathlib
import re
import subprocess
import sys

# Words per document, megabytes of text, context, training tokens, micro-batch, learning rate.
STAGES = [
    (200, 200, 256, "70m", 64, "2e-3"),
    (800, 240, 1024, "60m", 16, "1.5e-3"),
    (3000, 240, 4096, "60m", 4, "1e-3"),
    (6000, 300, 8192, "80m", 2, "1e-3"),
]
WORDS, _, CONTEXT, _, _, _ = STAGES[-1]
MODEL = "--preset mini --layers 4 --width 256 --heads 4 --eval-tokens 128k --sample-tokens 0".split()
DASHES = {"window": "5 4", "identity": "2 3", "sparse": "12 3"}
ARMS = "fpa,sla2:3,sla2-identity:3,sla2-sparse:3,sla2-window:3"
ROW = re.compile(r"^(announced|unannounced)\s+(\d+) (?:to (\d+)|and more)\s+(\d+)\s+([\d.]+) %", re.MULTILINE)
# Names of the arms in the plot.
KINDS = {
    "sla2": "router", "sla2-identity": "untrained router", "sla2-sparse": "router, no tail", "sla2-window": "window"
}


class Lab:
    def __init__(self, args):
        self.args, self.out = args, pathlib.Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)

    def call(self, *words):
        done = subprocess.run([self.args.sage_train, *map(str, words)], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"sage-train {' '.join(map(str, words))}\n{done.stderr}")
        return done.stdout

    def data(self, number):
        """Shards of a stage's documents. All stages use the first stage's tokenizer."""
        words, megabytes, *_ = STAGES[number]
        shards, text = self.out / f"shards-{words}", self.out / f"documents-{words}.jsonl"
        if not (shards / "dataset.json").exists():
            text.write_text(self.call("corpus", "--recall", words, "--megabytes", megabytes, "--seed", number + 1))
            first = self.out / f"shards-{STAGES[0][0]}" / "tokenizer.json"
            tokenizer = ["--vocab-size", "2k"] if number == 0 else ["--tokenizer", first]
            self.call("data", "prepare", text, "--to", shards, "--val-fraction", 0.004, *tokenizer)
            text.unlink()
        return shards

    def run(self, name, stage, *flags):
        """Trains a run on a stage's documents, or resumes it if it is not finished, and returns its folder."""
        folder = self.out / "runs" / name
        ending = folder / "ending.json"
        if not (ending.exists() and json.loads(ending.read_text())["status"] == "finished"):
            flags = [*flags, "--resume", "auto"]
            self.call(*MODEL, "--data", self.data(stage), "--context", STAGES[stage][2], "--out", self.out / "runs", "--name", name, *flags)
        return folder

    def dense(self):
        """Trains the dense model and exports it."""
        before = []
        for stage, (words, _, _, tokens, micro_batch, rate) in enumerate(STAGES):
            exported = self.out / f"dense-{words}"
            if not (exported / "config.json").exists():
                run = self.run(f"dense-{words}", stage, "--attn", "fpa", "--schedule", "wsd", "--tokens", tokens, "--lr", rate,
                               "--tokens-per-step", "16k", "--micro-batch", micro_batch, *before)
                self.call("export", run, "--to", exported)
            before = ["--init-from", exported]
        return exported

    def arm(self, arm, seed, start):
        """Rows of one arm: arm, seed, kind of question, from, to (empty: no limit), number of questions, right answers
        in percent."""
        attention, blocks, nearest = (arm.split(":") + ["", ""])[:3]
        args = self.args
        select = ["--sla2-nearest", nearest] if nearest else []
        select += ["--sla2-numerics", "fpa", "--sla2-blocks", blocks, "--sla2-dense-steps", args.dense_steps,
                  "--sla2-router-steps", args.router_steps] if blocks else []
        stages = f"-{args.dense_steps}-{args.router_steps}" if blocks else ""
        name = f"{arm.replace(':', '-')}-{args.tokens}{stages}-seed-{seed}"
        run = self.run(name, len(STAGES) - 1, "--attn", attention, "--seed", seed, "--init-from", start, "--tokens", args.tokens,
                       "--lr", "3e-4", "--tokens-per-step", "32k", "--micro-batch", 4, *select)
        answers = run / "recall.txt"
        if not answers.exists():
            answers.write_text(self.call("eval", run, "--recall", WORDS, "--tokens", "4m"))
        found = ROW.findall(answers.read_text())
        return [(arm, seed, *row) for row in found]


def report(rows):
    """Prints a line per arm and kind of question: right answers by distance, in percent, means over seeds."""
    ranges = sorted({int(row[3]) for row in rows})
    print(f"{'':<22} {'asked':<12}" + "".join(f" {first:>6}+" for first in ranges))
    for arm in dict.fromkeys(row[0] for row in rows):
        for asked in ("announced", "unannounced"):
            line = f"{arm:<22} {asked:<12}"
            for first in ranges:
                right = [float(row[6]) for row in rows if row[0] == arm and row[2] == asked and int(row[3]) == first]
                line += f" {sum(right) / len(right):>6.1f} " if right else " " * 8
            print(line)


def plot(path, rows):
    """Writes an SVG: right answers to unannounced questions by distance, with a line per arm, a colour per number of
    blocks, and dashes by kind of attention."""
    width, height, left, right, top, bottom = 810, 360, 52, 240, 34, 52
    palette = ["#000000", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e"]
    rows = [row for row in rows if row[2] == "unannounced" and int(row[3]) in range(64, 4096)]
    ranges = sorted({int(row[3]) for row in rows})
    arms = list(dict.fromkeys(row[0] for row in rows))

    def blocks(arm):
        return (arm.split(":") + [""])[1]

    budgets = list(dict.fromkeys(map(blocks, arms)))
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
           f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
           f'<text x="{left}" y="20" font-size="15">Right answers to unannounced questions by distance, in percent</text>']
    across = [left + 20 + (width - left - right - 20) * n / max(len(ranges) - 1, 1) for n in range(len(ranges))]

    def label(arm):
        attention, selected, nearest = (arm.split(":") + ["", ""])[:3]
        name = ", ".join([KINDS.get(attention, "dense"), *([f"{selected} blocks"] if selected else [])])
        return f"{name} ({nearest} nearest)" if nearest else name

    def up(percent):
        return top + (height - top - bottom) * (1 - percent / 100)

    for tick in range(0, 101, 20):
        svg.append(f'<line x1="{left}" y1="{up(tick):.1f}" x2="{width - right}" y2="{up(tick):.1f}" stroke="#dddddd"/>'
                   f'<text x="{left - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for x, first in zip(across, ranges):
        svg.append(f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{first}+</text>')
    svg.append(f'<text x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">tokens before the question</text>')
    for n, arm in enumerate(arms):
        colour = palette[budgets.index(blocks(arm)) % len(palette)]
        part = next((look for name, look in DASHES.items() if name in arm), "9 3 2 3" if arm.count(":") == 2 else "none")
        look = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{part}"'
        means = []
        for first in ranges:
            values = [float(row[6]) for row in rows if row[0] == arm and int(row[3]) == first]
            means.append(sum(values) / len(values))
        line = " ".join(f"{x:.1f},{up(mean):.1f}" for x, mean in zip(across, means))
        y = top + 12 + 20 * n
        svg.append(f'<polyline points="{line}" fill="none" {look}/><line x1="{width - right + 14}" y1="{y}" x2="{width - right + 44}" '
                   f'y2="{y}" {look}/><text x="{width - right + 52}" y="{y + 4}">{label(arm)}</text>')
    pathlib.Path(path).write_text("\n".join(svg) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sage_train", nargs="?")
    parser.add_argument("--out")
    parser.add_argument("--arms", help=f"variants to compare [default: {ARMS}; with --from: all arms of the tables]")
    parser.add_argument("--seeds", default="2,3,4", help="seeds of the arms' batches [%(default)s]")
    parser.add_argument("--tokens", default="16m", help="training tokens of an arm [%(default)s]")
    parser.add_argument("--dense-steps", type=int, default=100, help="steps of an arm, of 32k tokens each, with dense attention before it selects blocks [%(default)s]")
    parser.add_argument("--router-steps", type=int, default=60, help="number of these steps, the last ones, that train the router [%(default)s]")
    parser.add_argument("--jobs", type=int, default=5, help="concurrent arms [%(default)s]")
    parser.add_argument("--csv", help="CSV file to write: right answers of each arm, seed and distance")
    parser.add_argument("--plot", help="SVG file to write")
    parser.add_argument("--from", dest="tables", nargs="+", default=[], help="CSV files of earlier runs of equal length, to print and to plot")
    args = parser.parse_args()
    if args.tables:
        rows = []
        for table in args.tables:
            with open(table, newline="") as file:
                rows += [tuple(row.values()) for row in csv.DictReader(file)]
        if args.arms:
            unknown = set(args.arms.split(",")) - {row[0] for row in rows}
            if unknown:
                parser.error(f"the tables have no {', '.join(sorted(unknown))}")
            rows = [row for arm in args.arms.split(",") for row in rows if row[0] == arm]
        report(rows)
        if args.plot:
            plot(args.plot, rows)
        return
    if not (args.sage_train and args.out):
        parser.error("SAGE_TRAIN and --out are needed, or --from with tables of earlier runs")
    arms = (args.arms or ARMS).split(",")
    for arm in arms:
        if not re.fullmatch(r"fpa|sagebwd|sla2(-identity|-sparse|-window)?:[0-9]+(:[0-9]+)?", arm):
            parser.error(f"unknown arm: {arm} (allowed: fpa, sagebwd, or a kind of SLA2 with its number of blocks, such as sla2:6 or sla2:6:2)")
    lab = Lab(args)
    start = lab.dense()
    jobs = [(arm, int(seed), start) for seed in args.seeds.split(",") for arm in arms]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        rows = [row for rows in pool.map(lambda job: lab.arm(*job), jobs) for row in rows]
    report(rows)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["arm", "seed", "asked", "from", "to", "questions", "right_percent"])
            writer.writerows(rows)
    if args.plot:
        plot(args.plot, rows)


if __name__ == "__main__":
    main()
