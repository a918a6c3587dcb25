#!/usr/bin/env python3
"""Reads a run's event files with TensorBoard's own reader and compares every scalar with metrics.jsonl.

usage: check_tensorboard.py RUN      (needs tensorboard)
"""
import json
import pathlib
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main():
    run = pathlib.Path(sys.argv[1])
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    wanted = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        # The checksum of the line is not a metric.
        point.pop("crc32c", None)
        point["skipped"] = float(point.get("skipped", False))
        for name, value in point.items():
            if name != "step":
                wanted.setdefault(name, []).append((point["step"], value))
    assert set(events.Tags()["scalars"]) == set(wanted), (events.Tags()["scalars"], sorted(wanted))
    compared = 0
    for name, values in wanted.items():
        got = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in got] == [step for step, _ in values], (name, got)
        for (_, a), (_, b) in zip(got, values):
            # Event files store scalars in f32.
            assert abs(a - b) <= 1e-6 * abs(b) + 1e-30, (name, a, b)
            compared += 1
    print(f"{compared} scalars of {len(wanted)} names equal those in metrics.jsonl")


if __name__ == "__main__":
    main()
