"""lm-eval: a loglikelihood and a generate task over HTTP equal its own `hf` backend, sample by sample.

The tasks are made at run time from a JSONL file of GSM8K, whose path is an argument.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

from checks import arguments, check, require, run

URL, _, MODEL = arguments()
DIRECTORY, DATA, SAMPLES = sys.argv[4], Path(sys.argv[5]), int(sys.argv[6])
LARGEST_DIFFERENCE = 0.01
"""Largest difference of two summed log-probabilities: float32 in another order of sums."""
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "Question: {{question}}\nAnswer:"}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def make_tasks(directory: Path) -> None:
    """Write the questions, each with its answer and a wrong one, and the tasks over them."""
    draw = random.Random(0)
    rows = []
    for line in DATA.read_text(encoding="utf-8").splitlines()[:SAMPLES]:
        row = json.loads(line)
        answer = row["answer"].rsplit("####", 1)[1].strip().replace(",", "")
        wrong = str(int(float(answer)) + draw.randrange(1, 10))
        label = draw.randrange(2)
        choices = [f" {wrong}", f" {answer}"] if label else [f" {answer}", f" {wrong}"]
        rows.append({"question": row["question"], "answer": answer, "choices": choices, "label": label})
    file = directory / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        values = {"task": name, **COMMON, **task, "dataset_kwargs": {"data_files": {"test": str(file)}}}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


@cache
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    """The results over HTTP, and those of the `hf` backend."""
    with tempfile.TemporaryDirectory() as directory:
        make_tasks(Path(directory))
        manager = TaskManager(include_path=directory, include_defaults=False)
        own = f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=huggingface,tokenizer={DIRECTORY}"
        common: dict[str, Any] = {
            "tasks": list(TASKS),
            "task_manager": manager,
            "log_samples": True,
            "bootstrap_iters": 0,
        }
        over_http = lm_eval.simple_evaluate("local-completions", f"{own},num_concurrent=4,max_retries=1", **common)
        model = f"pretrained={DIRECTORY},dtype=float32"
        alone = lm_eval.simple_evaluate("hf", model, device="cpu", batch_size=1, **common)
    return over_http, alone


def pairs(task: str) -> list[tuple[Any, Any]]:
    """The responses of both to each sample."""
    sides = [{each["doc_id"]: each["filtered_resps"] for each in side["samples"][task]} for side in results()]
    require(sides[0].keys() == sides[1].keys() and len(sides[0]) == SAMPLES, len(sides[0]))
    return [(sides[0][index], sides[1][index]) for index in sorted(sides[0])]


@check("loglikelihood (multiple choice) equals hf")
def loglikelihood() -> str:
    found = pairs("choice")
    gaps = [abs(one[0] - other[0]) for mine, theirs in found for one, other in zip(mine, theirs, strict=True)]
    greedy = [(one[1], other[1]) for mine, theirs in found for one, other in zip(mine, theirs, strict=True)]
    require(max(gaps) <= LARGEST_DIFFERENCE and all(one == other for one, other in greedy), max(gaps))
    scores = [side["results"]["choice"]["acc,none"] for side in results()]
    require(scores[0] == scores[1], scores)
    return f"{len(gaps)} scores of {SAMPLES} samples, largest difference {max(gaps):.1e}, accuracy {scores[0]:.2f}"


@check("generate_until equals hf")
def generate() -> str:
    found = pairs("generate")
    different = [(mine, theirs) for mine, theirs in found if mine != theirs]
    require(not different, f"{len(different)} of {len(found)} differ, as {different[:1]}")
    return f"{len(found)} equal texts"


if __name__ == "__main__":
    run("lm_eval")
