"""The decoding methods of transformers, as contestants on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import WorkerUnavailable
from cluster.core.request import SamplingParameters
from deploy.bench.contestants import peers
from deploy.bench.contestants.answers import BenchPass, BenchPrompt, PassRequest
from deploy.bench.contestants.peers import (
    ASSISTED,
    GENERATE,
    PROMPT_LOOKUP,
    TransformersPeer,
    load_assistant,
    load_target,
)
from deploy.bench.measuring.competitors import BenchSettings
from deploy.bench.measuring.measures import committed_per_step
from tests.support.models import quantized, tiny
from tests.support.models.plain_generation import write_alone
from workers.distill.seq2seq_data import decoder_start
from workers.distill.seq2seq_student import make_seq2seq_student
from workers.distill.student import StudentPlan, export
from workers.distill.target_model import load_seq2seq_target

PROMPTS = ((5, 6, 7, 8, 5, 6, 7, 8, 5, 6), (9, 10, 11))
TOKENS = 12
END = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("peer") / "target", tiny.llama())


async def answers(directory: Path, method: str, batch: int, most_seconds: float = 0.0) -> BenchPass:
    model = load_target(Configuration(target=TargetSection(path=str(directory), device="cpu")))
    assistant = load_target(Configuration(target=TargetSection(path=str(directory), device="cpu")))
    peer = TransformersPeer(model, method, assistant, most_seconds=most_seconds)
    return await peer.answer(PassRequest(tuple(BenchPrompt(p, "") for p in PROMPTS), batch, 0.0, 0, TOKENS))


def target_tokens(directory: Path) -> list[tuple[int, ...]]:
    """Greedy answers of the model alone, up to the end token."""
    model = load_target(Configuration(target=TargetSection(path=str(directory), device="cpu")))
    whole = [write_alone(model, prompt, SamplingParameters(temperature=0.0), TOKENS) for prompt in PROMPTS]
    return [tokens[: tokens.index(END) + 1] if END in tokens else tokens for tokens in whole]


def test_a_target_that_stays_as_it_is_stored_is_dequantized_for_peers(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No library of its format is needed."""
    monkeypatch.setenv("PILOTFISH_CACHE_DIR", str(tmp_path / "cache"))
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    quantized.save(directory, tmp_path / "awq", quantized.awq(16), settings)
    assignments = (f"target.path={tmp_path / 'awq'}", "target.device=cpu")
    plain = BenchSettings(None, assignments).plain().configuration
    assert plain.target.quantization == "stored"
    copy = BenchSettings(None, (*assignments, "target.quantization=none")).plain().configuration
    found, expected = (load_target(one).state_dict() for one in (plain, copy))
    assert found.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in found.items())


@pytest.mark.parametrize(("method", "batch"), [(GENERATE, 1), (GENERATE, 2), (PROMPT_LOOKUP, 1), (ASSISTED, 1)])
async def test_every_peer_writes_the_tokens_of_the_model(directory: Path, method: str, batch: int) -> None:
    found = await answers(directory, method, batch)
    assert [answer.tokens for answer in found.answers] == target_tokens(directory)
    for answer in found.answers:
        assert sum(arrival.tokens for arrival in answer.arrivals) == answer.completion_tokens == len(answer.tokens)
        assert answer.seconds > 0


async def test_a_perfect_assistant_saves_passes_of_the_target(directory: Path) -> None:
    tau = committed_per_step([await answers(directory, ASSISTED, 1)])
    assert tau is not None and tau > 1.0
    assert committed_per_step([await answers(directory, GENERATE, 1)]) == 1.0


@pytest.mark.parametrize("method", [PROMPT_LOOKUP, ASSISTED])
async def test_drafts_for_several_sequences_are_refused(directory: Path, method: str) -> None:
    with pytest.raises(WorkerUnavailable, match="one sequence at a time"):
        await answers(directory, method, 2)


async def test_a_pass_that_takes_too_long_is_refused(directory: Path) -> None:
    with pytest.raises(WorkerUnavailable, match=r"1 of 2 prompts took longer than --peer-seconds \(1e-09\)"):
        await answers(directory, GENERATE, 1, 1e-9)


async def test_without_a_bound_the_time_follows_from_the_tokens_asked(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_LEAST_SECONDS", 1e-9)
    assert len((await answers(directory, GENERATE, 1)).answers) == len(PROMPTS)
    monkeypatch.setattr(peers, "_SECONDS_PER_TOKEN", 1e-9)
    with pytest.raises(WorkerUnavailable, match=re.escape(f"({len(PROMPTS) * TOKENS * 1e-9:g})")):
        await answers(directory, GENERATE, 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
async def test_a_translators_draft_with_a_reduced_vocabulary_assists(family: str, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path / "target", tiny.ENCODER_DECODER_FAMILIES[family]())
    layers = load_seq2seq_target(directory, torch.device("cpu"))
    plan = StudentPlan((0, 1), vocabulary=tuple(range(0, tiny.VOCABULARY, 2)))
    student = make_seq2seq_student(layers, plan, decoder_start(layers), 0)
    export(student, tmp_path / "draft", directory.name, "", {})
    model = load_target(Configuration(target=TargetSection(path=str(directory), device="cpu")))
    assistant = load_assistant(tmp_path / "draft", directory, model)
    request = PassRequest(tuple(BenchPrompt(p, "") for p in PROMPTS), 1, 0.0, 0, TOKENS)
    alone = await TransformersPeer(model, GENERATE).answer(request)
    assisted = await TransformersPeer(model, ASSISTED, assistant).answer(request)
    assert [answer.tokens for answer in assisted.answers] == [answer.tokens for answer in alone.answers]
