"""A process of a translating cluster is killed while drafts are in flight. Texts are those of `transformers`.

`tests/nodes/test_killed_translators.py` kills other processes, with models of other families.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from cluster.core.config.sections import Configuration
from cluster.generation.text.tokenizer import Tokenizer
from deploy.implied_settings import with_implied_settings
from tests.support.engines.kept_kernels import KEPT
from tests.support.translation.tiny_marian import FRENCH, save_translator
from tests.translations.reference import Answer
from tests.translations.run import Plan, translate
from tests.translations.sentences import Sentence
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

SENTENCES = [Sentence(" ".join((*FRENCH[number:], *FRENCH[:number])), "") for number in range(4)] * 5
PLAN = Plan("model", 1, 5, 60, "target")


def configure(directory: Path, method: str = "model", **settings: object) -> Configuration:
    """A cluster whose draft has the target's own weights, at the place that is the default."""
    model: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    model["kv"] = {"pool_bytes": 8 << 20}
    return with_implied_settings(
        load_configuration(
            {
                "target": model,
                "draft": {"method": method, "model": model, "controller": "off", "max_nodes": 4, "max_depth": 2},
                "scheduler": {"max_sequences": 6 * PLAN.at_once},
                "server": {"grpc_port": 0, "http_port": 0},
            },
            settings,
        )
    )


def answers(directory: Path, beams: int = 1) -> dict[str, Answer]:
    """What `generate` writes for each sentence."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer, found = Tokenizer.load(directory), {}
    starts = 2 if model.generation_config.forced_bos_token_id is not None else 1
    for source in {sentence.source for sentence in SENTENCES}:
        encoded = torch.tensor([tokenizer.encode(source)])
        written = model.generate(encoded, num_beams=beams, do_sample=False, max_new_tokens=PLAN.most + starts - 1)
        tokens = tuple(written[0, starts:].tolist())
        found[source] = Answer(tokens, tokenizer.decode(tokens))
    return found


async def test_a_killed_target_with_its_draft_changes_no_text_and_drafts_again(tmp_path: Path) -> None:
    directory = save_translator(tmp_path / "bart", "bart")
    configuration = configure(directory)
    assert configuration.draft.is_colocated
    outcome = await translate(configuration, PLAN, SENTENCES, tmp_path)
    expected = answers(directory)
    assert outcome.answers == [expected[sentence.source] for sentence in SENTENCES]
    assert [kind for kind, _ in outcome.reasons] == ["target"]
    assert outcome.with_drafts
    assert outcome.accepted_before and outcome.accepted_after


async def test_beams_on_two_ranks_outlive_a_killed_rank(tmp_path: Path) -> None:
    directory = save_translator(tmp_path / "bart", "bart")
    plan = replace(PLAN, method="none", beams=3, kill="rank")
    configuration = configure(directory, "none", **{"target.tensor_parallel": 2})
    outcome = await translate(configuration, plan, SENTENCES, tmp_path)
    expected = answers(directory, plan.beams)
    assert outcome.answers == [expected[sentence.source] for sentence in SENTENCES]
    assert len(outcome.reasons) == 1
    assert outcome.interrupted
