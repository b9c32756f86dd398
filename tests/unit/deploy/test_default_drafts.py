"""The drafts of the CPU preset: on the target, without a file that a target may lack, and apart for each salt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.core.drafting import DraftBudget, DraftRow, Evidence
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from deploy.implied_settings import with_implied_settings
from deploy.models import with_module_directories
from deploy.settings import load_settings
from workers.draft.recycling import RecyclingSettings
from workers.draft.registry import create

BUDGET = DraftBudget(7, 7)
TEXT = (5001, 5002, 5003, 5004, 5005)
"""A rare text: the packaged table knows nothing of it."""
OTHER_TARGET = ["target.path=/models/another"]


def made(assignments: Sequence[str]) -> DraftMethod:
    configuration = with_implied_settings(load_settings("cpu", assignments, {}).configuration)
    return create(with_module_directories(configuration.draft), configuration.target)


def drafted(method: DraftMethod, name: str, tokens: Sequence[int], salt: str = "") -> set[int]:
    start = SequenceStart(len(tokens), SamplingParameters(temperature=0.0), salt)
    (found,) = method.propose([DraftRow(SequenceId(name), len(tokens), tuple(tokens), BUDGET, start)])
    assert found.fault is None and len(found.tree) <= BUDGET.max_nodes
    return set(found.tree.tokens)


def test_the_packaged_target_has_a_table_from_the_start_and_drafts_on_the_target() -> None:
    configuration = with_implied_settings(load_settings("cpu", [], {}).configuration)
    draft = configuration.draft
    assert (draft.name, draft.placement) == ("suffix+recycling", "target")
    assert draft.settings("recycling", RecyclingSettings).path == "smollm2-135m-table"
    assert drafted(made([]), "a", (28, 253)) != set()


def test_another_target_begins_without_drafts_and_learns_them() -> None:
    draft = load_settings("cpu", OTHER_TARGET, {}).configuration.draft
    assert draft.name == "suffix+recycling" and not draft.modules
    method = made(OTHER_TARGET)
    assert drafted(method, "a", (28, 253)) == set()
    evidence = Evidence(2, TokenTree((), ()), (300,), top=((300, 301),))
    method.propose([DraftRow(SequenceId("a"), 3, (300,), BUDGET, evidence=(evidence,))])
    assert drafted(method, "b", (29, 253)) >= {300, 301}


def test_a_translator_is_drafted_for_by_its_packaged_draft_on_the_target() -> None:
    configuration = load_settings("cpu", ["target.path=opus-mt-fr-en"], {}).configuration
    assert (configuration.draft.name, configuration.draft.max_nodes) == ("model", 7)
    assert configuration.draft.weights is not None and configuration.draft.weights.path == "opus-mt-fr-en-draft"


def test_a_translator_without_a_packaged_draft_has_no_drafts(tmp_path: Path) -> None:
    """A translation does not repeat words of its source text, so lookups would find nothing to draft."""
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    for target in ("opus-mt-en-fr", str(tmp_path)):
        assert not load_settings("cpu", [f"target.path={target}"], {}).configuration.draft.is_enabled


@pytest.mark.parametrize("config", ['{"model_type": "bart"}', "[]", "no JSON"])
def test_a_target_that_may_copy_from_its_source_has_lookups(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert load_settings("cpu", [f"target.path={tmp_path}"], {}).configuration.draft.name == "suffix+recycling"


@pytest.mark.parametrize(
    ("assignment", "name"),
    [
        ("draft.method=ngram", "ngram"),
        ("draft.methods=[suffix, recycling]", "suffix+recycling"),
        ("draft.method=none", "none"),
        ("draft={method: ngram}", "ngram"),
        ("draft.model.path=/mine", "suffix+recycling"),
    ],
)
def test_what_a_user_chooses_for_a_translator_stays(assignment: str, name: str) -> None:
    for below in ([], [assignment]):  # a layer of its own, as in benchmarks
        on_top = ["target.path=opus-mt-fr-en", *([] if below else [assignment])]
        assert load_settings("cpu", on_top, {}, below=below).configuration.draft.name == name


def test_a_file_that_chooses_drafts_for_a_translator_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for drafts, name in (("draft: {methods: [suffix, ngram]}", "suffix+ngram"), ("draft: {max_nodes: 4}", "model")):
        file.write_text(f"target: {{path: opus-mt-fr-en, device: cpu}}\n{drafts}\n")
        assert load_settings(str(file), [], {}).configuration.draft.name == name


@pytest.mark.parametrize("assignments", [[], OTHER_TARGET], ids=["packaged target", "another target"])
def test_nothing_of_one_salt_is_drafted_for_another(assignments: list[str]) -> None:
    method = made(assignments)
    drafted(method, "a", (*TEXT, *TEXT), "one")
    method.propose([DraftRow(SequenceId("a"), 13, (5001, 5002, 5003), BUDGET)])
    method.release([SequenceId("a")])
    assert drafted(method, "b", TEXT[:2], "one") & set(TEXT)
    assert not drafted(method, "c", TEXT[:2], "two") & set(TEXT)
