"""The contract of every drafting method under three tensor-parallel ranks: answers and evidence are those of one rank.

Three ranks divide neither the vocabulary nor the columns of a layer evenly. They have a KV head each, or all the same
one. A method in a process of its own sees the ranks only through evidence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.drafting import NO_DRAFT, Evidence
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.clusters.restartable_drafters import restartable_cluster
from tests.support.deadline import deadline
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_group import RankGroup, rank_group
from tests.support.models import mtp_targets, tiny, tiny_tokenizer
from tests.unit.draft.contract.methods import (
    CHECKPOINTS,
    NAMES_AND_PLACES,
    VOCABULARY,
    Directories,
    cases_of,
    make_directories,
    places_of,
    values,
)
from tests.unit.draft.contract.test_streams import NEVER_RIGHT, RIGHT, TIMEOUT_SECONDS, USUAL, answer
from workers.draft.registry import needs_of
from workers.serve.configuration import load_configuration
from workers.serve.target_servicer import StepEngine
from workers.verify.build import build_engine

pytestmark = pytest.mark.slow

RANKS = 3
REQUESTS = [*RIGHT, NEVER_RIGHT[0], *USUAL[:2]]
DRAFTED = [*NAMES_AND_PLACES, *((name, place) for name in CHECKPOINTS for place in places_of(name))]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A target with a KV head for each rank."""
    return make_directories(tmp_path_factory.mktemp("ranks"), num_key_value_heads=RANKS)


@pytest.fixture(scope="module")
def directories_with_one_head(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A target with a single KV head, which all ranks hold."""
    return make_directories(tmp_path_factory.mktemp("one-head"), num_key_value_heads=1)


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with rank_group(RANKS) as group:
        yield group


def configure(name: str, place: str, directories: Directories, ranks: int = RANKS) -> Configuration:
    chosen = values(name, directories, placement=place)
    chosen["target"] |= {"tensor_parallel": ranks, "compile_directory": str(KEPT)}
    if "model" in chosen["draft"]:
        chosen["draft"]["model"]["compile_directory"] = str(KEPT)
    return load_configuration(chosen)


async def answer_all(configuration: Configuration, group: RankGroup | None) -> tuple[list[tuple[int, ...]], list[int]]:
    """The tokens of all answers, and how many of each answer's drafted tokens were accepted."""
    build = {} if group is None else {"build": group.form}
    async with deadline(TIMEOUT_SECONDS), restartable_cluster(configuration, **build) as cluster:
        answers = await asyncio.gather(*(answer(cluster.client, message) for message in REQUESTS))
    return [one.tokens for one in answers], [one.accepted for one in answers]


@pytest.fixture(scope="module")
def plain(directories: Directories) -> list[tuple[int, ...]]:
    """The answers of one rank without drafts."""
    return asyncio.run(answer_all(configure("none", "drafter", directories, ranks=1), None))[0]


@pytest.mark.parametrize(("name", "place"), DRAFTED)
async def test_three_ranks_draft_and_answer_as_one_does(
    name: str, place: str, directories: Directories, group: RankGroup, plain: list[tuple[int, ...]]
) -> None:
    cases = cases_of(name)
    configuration = configure(name, place, directories)
    if name == "none" or (place == "drafter" and not needs_of(configuration.draft).any):
        pytest.skip("the ranks compute nothing for it")
    answers, accepted = await answer_all(configuration, group)
    if not all(case.is_lossless for case in cases):
        plain, _ = await answer_all(configure(name, place, directories, ranks=1), None)
    assert answers == plain
    if any(case.drafts and case.finds_repetitions for case in cases):
        assert all(accepted[: len(RIGHT)])
    if any(case.knows_target for case in cases):
        assert all(accepted[-2:])  # greedy and sampled, of texts that repeat nothing


@pytest.mark.parametrize("name", ["eagle", "heads", "mtp", "early_exit"])
async def test_ranks_that_share_a_kv_head_draft_and_answer_as_one_does(
    name: str, directories_with_one_head: Directories, group: RankGroup
) -> None:
    plain, _ = await answer_all(configure("none", "drafter", directories_with_one_head, ranks=1), None)
    answers, accepted = await answer_all(configure(name, "target", directories_with_one_head), group)
    assert answers == plain
    assert all(accepted[: len(RIGHT)])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
async def test_ranks_draft_with_the_layer_of_a_family_as_one_does(
    family: str, group: RankGroup, tmp_path: Path
) -> None:
    """Latent attention or grouped queries, and experts: the layer for multi-token prediction of public checkpoints."""
    target = tiny_tokenizer.byte_level(tmp_path / "target")
    tiny.save(target, mtp_targets.config(family, VOCABULARY))
    mtp_targets.add_layer(target)
    directories = Directories(target, target, tmp_path)
    plain, _ = await answer_all(configure("none", "drafter", directories, ranks=1), None)
    answers, accepted = await answer_all(configure("mtp", "target", directories), group)
    assert answers == plain
    assert all(accepted[: len(RIGHT)])


def evidence_of(engine: StepEngine) -> list[Evidence]:
    """The evidence of some steps with trees, greedy and sampled."""
    found: list[Evidence] = []
    tokens = {"greedy": [5, 17, 33, 8], "sampled": [7, 7, 20]}
    samplings = {"greedy": SamplingParameters(temperature=0.0), "sampled": SamplingParameters(seed=4)}
    rows = [
        VerifyRow(SequenceId(name), len(prompt), tuple(prompt), start=SequenceStart(len(prompt), samplings[name]))
        for name, prompt in tokens.items()
    ]
    for _ in range(6):
        for verdict in engine.step(StepBatch(tuple(rows))).verdicts:
            assert verdict.evidence is not None
            found.append(verdict.evidence)
            tokens[verdict.sequence_id] += verdict.tokens
        best = [evidence.top[-1][:4] for evidence in found[-len(rows) :]]
        trees = [TokenTree(tokens=tops, parents=(-1, -1, 0, 1)) for tops in best]
        rows = [
            VerifyRow(SequenceId(name), len(held), (held[-1],), tree, next_budget=NO_DRAFT)
            for (name, held), tree in zip(tokens.items(), trees, strict=True)
        ]
    return found


@pytest.mark.parametrize("top", [8, 60])
def test_three_ranks_show_drafters_what_one_shows(top: int, tmp_path: Path, group: RankGroup) -> None:
    """The most probable tokens of all parts are merged, also where more are wanted than a part has."""
    directory = tiny.save(tmp_path, tiny.llama(num_key_value_heads=RANKS, vocab_size=95))
    target = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    target |= {"evidence": {"top": top, "decisions": True, "is_sent": True}, "kv": {"pool_bytes": 1 << 20}}
    one, three = (load_configuration({"target": target | {"tensor_parallel": ranks}}) for ranks in (1, RANKS))
    expected = evidence_of(build_engine(one.target))
    assert {len(best) for evidence in expected for best in evidence.top} == {top}
    assert any(len(evidence.top) > 1 for evidence in expected)  # some tokens of the trees were accepted
    assert evidence_of(group.form(three)) == expected
