"""`make translations`: real translations equal those of `transformers`, token for token, with every method.

    python -m tests.translations [FILE] [--model opus-mt-fr-en] [--sentences N] [--methods none,model,…]
        [--beams 1,4] [--at-once 1,16] [--kill target,draft] [--placement auto] [--kept FILE] [--json FILE]

FILE has one JSON object per line with a field for each language; the default is `sentences.jsonl`. Each method
translates greedily, and by beams without drafts. With `--kill`, a process of that role is killed in the middle of each
run. Exits with 1 if a token or a text differs, if no draft is accepted, if a kill interrupts no translation, or if no
draft is accepted before the kill of a target or after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from cluster.core.config.sections import Configuration
from deploy.bench.evaluation.tasks.metrics import bleu_and_chrf
from deploy.implied_settings import with_implied_settings
from deploy.models import resolve_models
from deploy.packaged_drafts import packaged_drafts
from deploy.settings import load_settings
from tests.translations.reference import Answer, Reference
from tests.translations.run import Outcome, Plan, translate
from tests.translations.sentences import Sentence, read_sentences
from workers.draft.registry import METHODS

_SENTENCES = Path(__file__).parent / "sentences.jsonl"
_MOST_TOKENS = 96
_METHODS = (
    *("none", "model", "heads", "blockwise"),
    *("ngram", "suffix", "prediction", "lookahead", "recycling", "early_exit"),
)
_LOADING = {"model": "draft", "heads": "heads", "blockwise": "heads"}
"""Methods that load a packaged draft, and the end of its name. They are left out for a model without one."""


def main() -> None:
    """Run with the options of the command line."""
    options = _options()
    logging.basicConfig(level=logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    sentences = read_sentences(options.file, options.model[-5:], options.first, options.sentences)
    directory = load_settings().cache_directory / options.model
    reference = Reference(directory, _MOST_TOKENS, options.kept)
    failures = 0
    for plan in plans(options):
        expected = reference.answers(sentences, plan.beams, _show)
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="pilotfish-translations-") as logs:
            outcome = asyncio.run(
                translate(configure(options.model, plan, options.placement), plan, sentences, Path(logs))
            )
        row = describe(plan, sentences, expected, outcome)
        row["seconds"] = round(time.perf_counter() - begun, 1)
        problems = problems_of(plan, expected, outcome)
        failures += len(problems)
        sys.stdout.write("\n".join([json.dumps(row), *problems]) + "\n")
        sys.stdout.flush()
        if options.json is not None:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | {"problems": problems}) + "\n")
    sys.exit(1 if failures else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.translations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=_SENTENCES, help="JSON lines with a field for each language"
    )
    parser.add_argument("--model", default="opus-mt-fr-en", help="a packaged model whose name ends with its languages")
    parser.add_argument("--sentences", type=int, help="number of sentences; all if it is left out")
    parser.add_argument("--first", type=int, default=0, help="first line, from 0")
    parser.add_argument("--methods", default=",".join(_METHODS), help="drafting methods")
    parser.add_argument("--beams", default="1,4", help="numbers of beams; beams are not drafted for")
    parser.add_argument("--at-once", default="1,16", help="numbers of translations at once")
    parser.add_argument("--kill", default="", help="processes to kill: target, draft; empty: none")
    parser.add_argument("--placement", default="auto", help="draft.placement; `--kill draft` needs a drafter")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--kept", type=Path, help="file that keeps the translations of transformers between runs")
    parser.add_argument("--json", type=Path, help="file that the results are appended to")
    options = parser.parse_args()
    options.methods = ",".join(
        name for name in options.methods.split(",") if name not in _LOADING or packaged_draft(options.model, name)
    )
    return options


def plans(options: argparse.Namespace) -> Iterator[Plan]:
    """All runs: methods and numbers at once; and by beams, which are not drafted for, without a method."""
    for method, beams, at_once in product(
        options.methods.split(","), map(int, options.beams.split(",")), map(int, options.at_once.split(","))
    ):
        for kill in options.kill.split(","):
            has_drafter = method != "none" and "drafter" in METHODS.get(method).places.order
            if (beams == 1 or method == "none") and (has_drafter or kill != "draft"):
                yield Plan(method, beams, at_once, _MOST_TOKENS, kill)


def packaged_draft(model: str, method: str) -> Path | None:
    """The shipped draft of a model that a method loads, if there is one."""
    return packaged_drafts().get(f"{model}-{_LOADING[method]}") if method in _LOADING else None


def configure(model: str, plan: Plan, placement: str) -> Configuration:
    """The cluster of a run, in float32. The controller does not turn drafts off."""
    settings: dict[str, Any] = {
        "target.path": model,
        "target.device": "cpu",
        "target.kv.pool_bytes": 200 << 20,
        "draft.method": plan.method,
        "draft.controller": "off",
        "draft.max_nodes": 6,
        "draft.max_depth": 4,
        "server.grpc_port": 0,
        "server.http_port": 0,
        "scheduler.max_sequences": 4 * plan.at_once * plan.beams,
    }
    if plan.method != "none":
        settings["draft.placement"] = "drafter" if plan.kill == "draft" else placement
    draft = packaged_draft(model, plan.method)
    if draft is not None:
        settings |= {"draft.timeout_seconds": 60.0, f"draft.{plan.method}.path": str(draft)}
    if plan.method == "model":
        settings |= {"draft.model.device": "cpu", "draft.model.kv.pool_bytes": 100 << 20}
    found = load_settings(None, [f"{name}={value}" for name, value in settings.items()])
    resolved = resolve_models(found.configuration, found.cache_directory, lambda _: None).configuration
    return with_implied_settings(resolved)


def describe(plan: Plan, sentences: Sequence[Sentence], expected: Sequence[Answer], outcome: Outcome) -> dict[str, Any]:
    """One row of the results."""
    references = [(sentence.reference,) for sentence in sentences]
    own, theirs = (
        bleu_and_chrf([answer.text for answer in answers], references)["BLEU"]
        for answers in (outcome.answers, expected)
    )
    same = sum(found == wanted for found, wanted in zip(outcome.answers, expected, strict=True))
    return asdict(plan) | {
        "sentences": len(sentences),
        "tokens": sum(len(answer.tokens) for answer in outcome.answers),
        "equal": same,
        "BLEU": round(own, 2),
        "BLEU of transformers": round(theirs, 2),
        "drafted": outcome.drafted,
        "accepted": outcome.accepted,
        "lost": outcome.reasons,
        "interrupted": outcome.interrupted,
        "interrupted with tokens": outcome.with_tokens,
        "interrupted with accepted drafts": outcome.with_drafts,
        "accepted before the kill": outcome.accepted_before,
        "accepted after it": outcome.accepted_after,
    }


def problems_of(plan: Plan, expected: Sequence[Answer], outcome: Outcome) -> list[str]:
    """What is wrong with a run."""
    problems = [
        f"sentence {number}: {found} instead of {wanted}"
        for number, (found, wanted) in enumerate(zip(outcome.answers, expected, strict=True))
        if found != wanted
    ]
    if plan.method != "none" and not 0 < outcome.accepted <= outcome.drafted:
        problems.append(f"{outcome.accepted} of {outcome.drafted} drafted tokens were accepted")
    if plan.kill and [kind for kind, _ in outcome.reasons] != [plan.kill]:
        problems.append(f"the lost processes are {outcome.reasons}, not one {plan.kill}")
    if plan.kill and not (outcome.with_tokens if plan.beams == 1 else outcome.interrupted):
        problems.append("the kill interrupted no translation")
    if plan.kill == "target" and plan.method != "none" and not (outcome.accepted_before and outcome.accepted_after):
        problems.append(
            f"{outcome.accepted_before} drafted tokens were accepted before the kill, {outcome.accepted_after} after it"
        )
    return problems


def _show(text: str) -> None:
    sys.stderr.write(f"\r{text}   ")


if __name__ == "__main__":
    main()
