"""In every drafting mode, every stream equals plain decoding while drafters stop and restart."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from cluster.core.request import SamplingParameters
from tests.soak.watch import rounds_without_drafter
from tests.support.clusters.restartable_drafters import TIMEOUT_SECONDS, FullAnswer, SamplingCase, restartable_cluster
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.deadline import deadline
from tests.support.models import drafting_modules, mtp_targets, tiny, tiny_tokenizer
from tests.support.models.plain_generation import write_alone
from tests.unit.draft.contract.methods import CASES as METHOD_CASES
from tests.unit.draft.contract.methods import Directories, MethodCase

pytestmark = pytest.mark.slow

VOCABULARY = 320
TOKENS = 40
RESTARTS = 4
"""How often drafters are restarted in one test."""
MODULES = ("block", "eagle", "heads")
"""Methods that read the target's hidden states."""
PUBLIC = (
    *("eagle:eagle3", "eagle:peagle", "block:dflash", "block:dspark", "heads:medusa", "heads:hydra"),
    *("mtp", "model:pard", "model:text"),
)
"""Methods with drafts in public formats, and a draft model whose tokens are not the target's."""

SAMPLINGS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8, top_p=0.9, seed=11),
    SamplingParameters(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParameters(temperature=1.0, top_k=20, presence_penalty=0.5, seed=2**64 - 1),
    SamplingParameters(temperature=0.0, logprobs=2),
    SamplingParameters(temperature=0.7, min_p=0.05, seed=5, logprobs=0),
)


def case_number(number: int, max_draft_tokens: int | None = None) -> SamplingCase:
    """Requests with different prompts; their sampling parameters repeat."""
    return SamplingCase(number, SAMPLINGS[number % len(SAMPLINGS)], TOKENS, VOCABULARY, max_draft_tokens)


def repeating(number: int, token: int) -> SamplingCase:
    """A request whose answer repeats one token, which every method drafts."""
    return SamplingCase(number, SamplingParameters(temperature=0.0, logit_bias=((token, 100.0),)), TOKENS, VOCABULARY)


NO_DRAFTS = 9
"""Index of the request that disables drafts."""
CASES = [*map(case_number, range(NO_DRAFTS)), case_number(9, max_draft_tokens=0), case_number(12, max_draft_tokens=2)]
CASES.append(repeating(2, token=77))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    tiny.save(directory, tiny.llama(vocab_size=VOCABULARY))
    mtp_targets.add_layer(directory)
    return directory


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a draft model whose drafts are often accepted and often rejected, and with random modules."""
    directory = tmp_path_factory.mktemp("drafts")
    tiny.blur(target, directory / "model", noise=0.05)
    for method in MODULES:
        drafting_modules.save(target, directory / method, method)
    (directory / "others").mkdir()
    return directory


def configure(target: Path, draft: Path, **drafting: Any) -> Configuration:
    drafting = {"method": "model", "max_nodes": 6, "max_depth": 4, "timeout_seconds": 5.0} | drafting
    model: dict[str, Any] = {"path": str(draft / "model"), "device": "cpu", "compile": "off"}
    model["kv"] = {"pool_bytes": 4 << 20}
    if drafting["method"] in MODULES:
        drafting[drafting["method"]] = {"path": str(draft / drafting["method"])}
    elif drafting["method"] in PUBLIC:
        case, method = METHOD_CASES.get(drafting["method"], MethodCase()), drafting["method"].partition(":")[0]
        section = dict(case.settings(Directories(target, draft / "model", draft / "others")))
        drafting |= {"method": method, method: section}
        model = section if method == "model" else model
    if "mode" in drafting:
        model["mode"] = drafting.pop("mode")
    return tiny_cluster(target, drafting | {"model": model}, scheduler={"max_sequences": 8, "max_step_tokens": 64})


@pytest.fixture(scope="module")
def expected(target: Path) -> list[tuple[int, ...]]:
    """The tokens that `transformers` generates."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return [write_alone(model, case.prompt, case.sampling, TOKENS) for case in CASES]


@pytest.fixture(scope="module")
def logprobs(target: Path, draft: Path) -> list[tuple[float, ...]]:
    """The log-probabilities of plain decoding."""

    async def decode_plainly() -> list[FullAnswer]:
        async with restartable_cluster(configure(target, draft, method="none")) as cluster:
            return await cluster.answer_all(CASES)

    return [answer.logprobs for answer in asyncio.run(decode_plainly())]


DRAFTING: list[dict[str, Any]] = [
    {"method": "ngram", "placement": "drafter", "controller": "off"},
    {"mode": "serial", "controller": "off"},
    {"mode": "run_ahead", "controller": "off"},
    {"mode": "enumerate", "controller": "off"},
    {"mode": "serial", "controller": "auto", "alternate": "on", "replicas": 2},
    {"mode": "run_ahead", "controller": "off", "alternate": "on"},
    {"mode": "run_ahead", "controller": "auto", "replicas": 2},
    {"mode": "enumerate", "controller": "off", "alternate": "on", "replicas": 2},
    {"mode": "enumerate", "controller": "auto"},
    {"method": "lookahead", "placement": "drafter", "controller": "off", "max_nodes": 12},
    *({"method": method, "placement": "drafter", "controller": "off"} for method in ("recycling", "suffix")),
    *({"method": method, "placement": "drafter", "controller": "off"} for method in (*MODULES, *PUBLIC)),
]


@pytest.mark.parametrize("drafting", DRAFTING, ids=lambda drafting: " ".join(str(value) for value in drafting.values()))
async def test_restarted_drafters_change_no_token(
    drafting: dict[str, Any],
    target: Path,
    draft: Path,
    expected: list[tuple[int, ...]],
    logprobs: list[tuple[float, ...]],
) -> None:
    """First all drafters run. Then they stop at random, several times, and new ones start without any sequence."""
    configuration = configure(target, draft, **drafting)
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        undisturbed = await cluster.answer_all(CASES)
        disturbed = await cluster.answer_while_drafters_restart(CASES, random.Random(str(drafting)), RESTARTS)
        after = await cluster.answer_once_drafts_are_accepted(CASES[-1])
        starts, missed = sum(one.starts for one in cluster.drafters), await rounds_without_drafter(cluster.client)
    assert starts >= RESTARTS + len(cluster.drafters)
    for answers in (undisturbed, *disturbed):
        assert [answer.tokens for answer in answers] == expected
        assert [answer.logprobs for answer in answers] == logprobs
        assert not any(answer.lossy for answer in answers)
        assert answers[NO_DRAFTS].drafted == 0
    if drafting["controller"] == "off":
        assert missed > 0
        assert sum(one.drafted for one in undisturbed) > sum(one.accepted for one in undisturbed) > 0
        assert after.tokens == expected[-1] and after.accepted > 0


ON_THE_TARGET: list[dict[str, Any]] = [
    {"method": "ngram", "controller": "off"},
    {"method": "ngram", "controller": "auto"},
    {"method": "model", "mode": "serial", "controller": "off"},
    {"method": "model", "mode": "serial", "controller": "auto"},
    {"method": "lookahead", "controller": "off", "max_nodes": 12},
    {"method": "lookahead", "controller": "auto", "max_nodes": 24},
    {"method": "early_exit", "controller": "off", "early_exit": {"layers": 1}},
    {"method": "early_exit", "controller": "auto", "early_exit": {"layers": 2}},
]


@pytest.mark.parametrize("drafting", ON_THE_TARGET, ids=lambda drafting: " ".join(map(str, drafting.values())))
async def test_drafts_of_the_target_change_no_token_even_when_it_restarts(
    drafting: dict[str, Any],
    target: Path,
    draft: Path,
    expected: list[tuple[int, ...]],
    logprobs: list[tuple[float, ...]],
) -> None:
    configuration = configure(target, draft, placement="target", **drafting)
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        assert not cluster.drafters
        answers = await cluster.answer_before_during_and_after_a_restart(CASES)
    for disturbed in answers:
        assert [answer.tokens for answer in disturbed] == expected
        assert [answer.logprobs for answer in disturbed] == logprobs
        assert disturbed[NO_DRAFTS].drafted == 0
        if drafting["controller"] == "off":
            assert sum(answer.drafted for answer in disturbed) > sum(answer.accepted for answer in disturbed) > 0


async def test_a_restarted_drafter_is_used_again(target: Path, draft: Path, expected: list[tuple[int, ...]]) -> None:
    configuration = configure(target, draft, controller="off")
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        await cluster.drafters[0].stop()
        without = await cluster.answer_all(CASES)
        await cluster.drafters[0].start()
        after = await cluster.answer_once_drafts_are_accepted(CASES[0])
    assert sum(answer.drafted for answer in without) == 0
    assert after.accepted > 0
    assert [answer.tokens for answer in (*without, after)] == [*expected, expected[0]]


@pytest.mark.parametrize("mode", ["serial", "run_ahead"])
async def test_with_synthetic_acceptance_every_answer_says_that_it_is_not_lossless(
    mode: str, target: Path, draft: Path, expected: list[tuple[int, ...]]
) -> None:
    """Drafts do not change a synthetic answer if all depths have one acceptance rate: the draw is per position."""
    drafting = {"controller": "off", "synthetic": {"acceptance": (0.7,), "seconds": 0.0, "mode": mode}}
    configuration = configure(target, draft, method="synthetic", **drafting)
    cases = [case_number(number, most) for number in range(4) for most in (None, 0, 2)]
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration) as cluster:
        answers = await cluster.answer_all(cases)
        exposition, _ = await cluster.client.metrics()
    assert all(answer.lossy for answer in answers)
    assert b'pilotfish:lossless{engine="0",model_name="tiny"} 0.0' in exposition
    for first in range(0, len(cases), 3):
        drafted, plain, short = answers[first : first + 3]
        assert drafted.tokens == plain.tokens == short.tokens != expected[first // 3]
        assert drafted.accepted > short.accepted > plain.accepted == 0
