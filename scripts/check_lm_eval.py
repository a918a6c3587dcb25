#!/usr/bin/env python3
"""Prints the scores of lm-evaluation-harness for an exported model, on the same files as `sage-train eval --task`.

usage: check_lm_eval.py EXPORT TASK=FILE [TASK=FILE ..]      (needs lm_eval[hf]; tasks: hellaswag, arc, piqa, lambada)
"""
import json
import pathlib
import sys
import tempfile

import lm_eval
from lm_eval.tasks import TaskManager

# The harness's definition of each task.
TASKS = {
    "hellaswag": "hellaswag/hellaswag.yaml",
    "arc": "arc/arc_easy.yaml",
    "piqa": "piqa/piqa.yaml",
    "lambada": "lambada/lambada_openai.yaml",
}


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    export, *tasks = sys.argv[1:]
    tasks = [task.split("=", 1) for task in tasks]
    harness = pathlib.Path(lm_eval.__file__).parent / "tasks"
    with tempfile.TemporaryDirectory() as folder:
        for task, file in tasks:
            # The file is used for every split: a zero-shot task reads only one of them. JSON is valid YAML.
            splits = {split: str(pathlib.Path(file).resolve()) for split in ("train", "validation", "test")}
            local = {"include": str(harness / TASKS[task]), "task": f"local_{task}", "dataset_path": "json"}
            local |= {"dataset_name": None, "dataset_kwargs": {"data_files": splits}}
            pathlib.Path(folder, f"{task}.yaml").write_text(json.dumps(local))
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": export, "dtype": "float32"},
            tasks=[f"local_{task}" for task, _ in tasks],
            task_manager=TaskManager(include_path=folder),
            device="cpu",
            bootstrap_iters=0,
        )
    for task, _ in tasks:
        scores = found["results"][f"local_{task}"]
        names = [name for name in ("acc", "acc_norm", "perplexity") if f"{name},none" in scores]
        print(task, *(f"{name} {scores[f'{name},none']:.4f}" for name in names))


if __name__ == "__main__":
    main()
