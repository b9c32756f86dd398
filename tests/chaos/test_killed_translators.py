"""A translator with its draft model on it is killed while drafts are in flight. Texts are those of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from cluster.core.config.sections import Configuration
from cluster.ingress.text.tokenizer import Tokenizer
from deploy.implied_settings import with_implied_settings
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import tiny
from tests.support.translation.tiny_marian import FRENCH, save_translator
from tests.translations.reference import Answer
from tests.translations.run import Plan, translate
from tests.translations.sentences import Sentence
from workers.serve.configuration import load_configuration

SENTENCES = [Sentence(" ".join((*FRENCH[number:], *FRENCH[:number])), "") for number in range(4)] * 5
PLAN = Plan("model", 1, 5, 60, "target")


@pytest.fixture(params=sorted(tiny.ENCODER_DECODER_FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_translator(tmp_path / request.param, request.param)


def configure(directory: Path) -> Configuration:
    """A cluster whose draft has the target's own weights, at the place that is the default."""
    target: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    model = {"path": str(directory), "device": "cpu", "kv": {"pool_bytes": 8 << 20}}
    return with_implied_settings(
        load_configuration(
            {
                "target": target | {"kv": {"pool_bytes": 8 << 20}},
                "draft": {"method": "model", "model": model, "controller": "off", "max_nodes": 4, "max_depth": 2},
                "scheduler": {"max_sequences": 2 * PLAN.at_once},
                "server": {"grpc_port": 0, "http_port": 0},
            }
        )
    )


def answers(directory: Path) -> dict[str, Answer]:
    """What `generate` writes for each sentence."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer, found = Tokenizer.load(directory), {}
    starts = 2 if model.generation_config.forced_bos_token_id is not None else 1
    for source in {sentence.source for sentence in SENTENCES}:
        encoded = torch.tensor([tokenizer.encode(source)])
        written = model.generate(encoded, num_beams=1, do_sample=False, max_new_tokens=PLAN.most + starts - 1)
        tokens = tuple(written[0, starts:].tolist())
        found[source] = Answer(tokens, tokenizer.decode(tokens))
    return found


async def test_a_killed_target_with_its_draft_changes_no_text_and_drafts_again(directory: Path, tmp_path: Path) -> None:
    configuration = configure(directory)
    assert configuration.draft.is_colocated
    outcome = await translate(configuration, PLAN, SENTENCES, tmp_path)
    expected = answers(directory)
    assert outcome.answers == [expected[sentence.source] for sentence in SENTENCES]
    assert [kind for kind, _ in outcome.reasons] == ["target"]
    assert outcome.with_drafts
    assert outcome.accepted_before and outcome.accepted_after
