"""A draft model on the target reads sources by the target's encoder, changes no token, and frees all memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, HiddenStates
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import EMPTY_TREE
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_sequence import GREEDY, some_tokens
from tests.support.engines.sourced import SAMPLED, SOURCE, SourcedModel
from workers.draft.common.combination import combined
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.model.model_expander import ModelExpander
from workers.draft.registry import placement_of
from workers.forward.runner import ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import StoredSource
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.decider import LocalDecider, decider_of_model
from workers.verify.engine import EngineOptions, TargetEngine

pytestmark = pytest.mark.slow

BUDGET = DraftBudget(6, 4)
COUNT = 16
SOURCES = {"a": SOURCE, "b": tuple(some_tokens(21, 1)), "c": (7, 2), "d": SOURCE}


@dataclass
class Colocated:
    """A target with a draft model on it, which is the same model."""

    engine: TargetEngine
    pool: KvPool
    draft_pool: KvPool
    expander: ModelExpander

    def decode(self, names: str = "abcd", *, drafts: bool = True, sampled: bool = False) -> dict[str, list[int]]:
        """The first tokens of the answers to some of `SOURCES`, decoded together. Releases nothing."""
        prompt = self.engine.info().decoder_start
        tokens = {name: list(prompt) for name in names}
        rows = []
        budget = BUDGET if drafts else NO_DRAFT
        for name in names:
            start = SequenceStart(len(prompt), SAMPLED if sampled else GREEDY, source=SOURCES[name])
            rows.append(VerifyRow(SequenceId(name), len(prompt), prompt, start=start, next_budget=budget))
        self.accepted = 0
        while rows:
            following = []
            for row, verdict in zip(rows, self.engine.step(StepBatch(tuple(rows))).verdicts, strict=True):
                assert verdict.fault is None, verdict.fault
                own = tokens[row.sequence_id]
                own += verdict.tokens
                self.accepted += verdict.accepted
                tree = EMPTY_TREE if verdict.proposal is None else verdict.proposal.tree
                if len(own) < COUNT + len(prompt):
                    following.append(VerifyRow(row.sequence_id, len(own), (own[-1],), tree, next_budget=budget))
            rows = following
        return {name: own[len(prompt) : len(prompt) + COUNT] for name, own in tokens.items()}


def colocated(directory: Path, *, in_combination: bool = False, blocks: int = 300) -> Colocated:
    draft = load_model(ModelSection(path=str(directory), device="cpu"))
    draft_pool = KvPool(draft.kv_spec, KvSection(block_size=4), blocks, truncatable=True)
    expander = ModelExpander(draft, draft_pool, 2, has_target_encoder=True)
    section = DraftSection(max_nodes=6, max_depth=4)
    method = TreeDrafter(expander, ExpansionSettings(mode="serial"), section, clock=lambda: 0.0)
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), 300)
    methods = [method, TreeDrafter(expander, ExpansionSettings(), section)] if in_combination else [method]
    decider = decider_of_model(model, LocalDecider())
    return Colocated(
        TargetEngine(model, pool, decider, EngineOptions(method=combined(methods))), pool, draft_pool, expander
    )


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> dict[ModelRunner, int]:
    """How many sources each runner has read by an encoder."""
    found: dict[ModelRunner, int] = {}
    encode = ModelRunner.encode

    def counted(self: ModelRunner, sources: list[StoredSource], store: object) -> None:
        found[self] = found.get(self, 0) + len(sources)
        encode(self, sources, store)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "encode", counted)
    return found


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_answers_are_those_without_drafts_and_only_the_target_reads_sources(
    model: SourcedModel, encodings: Mapping[ModelRunner, int], sampled: bool
) -> None:
    expected = colocated(model.directory).decode(drafts=False, sampled=sampled)
    cluster = colocated(model.directory)
    encodings.clear()  # type: ignore[attr-defined]
    assert cluster.decode(sampled=sampled) == expected
    assert cluster.accepted >= COUNT  # the draft is the target itself
    assert encodings == {cluster.engine._runner: 3}  # "a" and "d" share a source
    for name in "abcd":
        assert cluster.decode(name, sampled=sampled)[name] == expected[name]
    cluster.engine.release_all()
    assert cluster.pool.blocks_free == cluster.pool.blocks_total
    assert cluster.draft_pool.blocks_free == cluster.draft_pool.blocks_total
    assert not len(cluster.engine._sources)


def test_a_source_of_which_only_keys_and_values_are_stored_is_read_by_the_draft(
    marian: SourcedModel, encodings: Mapping[ModelRunner, int]
) -> None:
    cluster = colocated(marian.directory)
    first = cluster.decode("b")
    cluster.engine.release_all()
    encodings.clear()  # type: ignore[attr-defined]
    assert cluster.decode("b") == first
    assert cluster.accepted >= COUNT // 2
    assert encodings == {cluster.expander._runner: 1}  # the target finds the source in its prefix cache


def test_a_draft_without_room_changes_nothing(marian: SourcedModel) -> None:
    expected = colocated(marian.directory).decode(drafts=False)
    cluster = colocated(marian.directory, blocks=9)
    assert cluster.decode() == expected
    cluster.engine.release_all()
    assert cluster.draft_pool.blocks_free == cluster.draft_pool.blocks_total


def test_a_member_of_a_combination_reads_them_too(marian: SourcedModel, encodings: Mapping[ModelRunner, int]) -> None:
    cluster = colocated(marian.directory, in_combination=True)
    encodings.clear()  # type: ignore[attr-defined]
    assert cluster.decode("ab") == {name: cluster.decode(name, drafts=False)[name] for name in "ab"}
    assert cluster.expander._runner not in encodings


def test_a_draft_with_another_encoder_reads_sources_itself(marian: SourcedModel) -> None:
    class States:
        def of(self, source: object, salt: str) -> HiddenStates | None:
            raise AssertionError("these states are another encoder's")

    model = load_model(ModelSection(path=str(marian.directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), 100, truncatable=True)
    expander = ModelExpander(model, pool, 1)
    expander.read_sources_from(States())
    start = SequenceStart(1, GREEDY, source=SOURCE)
    held = expander.open_source(start)
    assert held is not None
    held.close()
    assert expander._states is None


@pytest.mark.parametrize(
    ("device", "changes", "place"),
    [
        ("cpu", {}, "target"),
        ("cuda", {}, "drafter"),
        ("cpu", {"draft.replicas": 2}, "drafter"),
        ("cpu", {"draft.placement": "drafter"}, "drafter"),
        ("cpu", {"draft.methods": ["model", "ngram"]}, "target"),
        ("cuda", {"draft.methods": ["model", "ngram"]}, "drafter"),
    ],
    ids=["cpu", "cuda", "several", "chosen", "with a lookup", "with a lookup on cuda"],
)
def test_on_cpu_a_translators_draft_is_on_the_target(
    marian: SourcedModel, device: str, changes: dict[str, object], place: str
) -> None:
    values = {"target.path": str(marian.directory), "target.device": device, "draft.methods": ["model"]}
    configuration = load_configuration({}, values | {"draft.model.path": str(marian.directory)} | changes)
    assert placement_of(configuration.draft, configuration.target) == place
    assert placement_of(configuration.draft, TargetSection(path="llama")) == "drafter"
