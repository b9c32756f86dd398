"""The method `recycling`: drafts what the target ranked highest after each token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.core.config.draft_section import DraftSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, Evidence
from cluster.core.errors import ConfigurationError, ModelLoadError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT, TokenTree
from tests.support.models import drafting_modules, tiny
from workers.draft.recycling import RecyclingDrafter, RecyclingSettings
from workers.draft.registry import create, needs_of
from workers.model.draft_card import read_card
from workers.model.draft_shapes import TableShape
from workers.model.drafting.files import save_drafter
from workers.model.drafting.stored_table import read_successors
from workers.model.drafting.table import SuccessorTable
from workers.serve.configuration import load_configuration

BUDGET = DraftBudget(8, 4)
GREEDY = SamplingParameters(temperature=0.0)


def drafter(target: Path | None = None, **settings: object) -> RecyclingDrafter:
    values: dict[str, object] = {"draft": {"method": "recycling", "recycling": settings}}
    configuration = load_configuration(values | ({"target": {"path": str(target)}} if target else {}))
    method = create(configuration.draft, configuration.target)
    assert isinstance(method, RecyclingDrafter)
    return method


def first(tokens: Sequence[int], name: str = "a", salt: str = "", sampling: SamplingParameters = GREEDY) -> DraftRow:
    start = SequenceStart(min(2, len(tokens)), sampling, salt)
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens), BUDGET, start)


def tree(method: RecyclingDrafter, row: DraftRow) -> TokenTree:
    (found,) = method.propose([row])
    assert found.fault is None
    assert len(found.probabilities) == len(found.tree) <= row.budget.max_nodes
    assert found.tree.depth() <= row.budget.max_depth
    return found.tree


def next_tokens(found: TokenTree) -> list[int]:
    """The tokens drafted directly after the text, the most probable first."""
    return [token for token, parent in zip(found.tokens, found.parents, strict=True) if parent == ROOT]


def taught() -> RecyclingDrafter:
    """A drafter whose target ranked 20, 21 and 22 highest after 10, and 30 and 31 after 20."""
    method = drafter(successors=3)
    tree(method, first([5, 10]))
    verified = TokenTree((20,), (-1,))
    evidence = Evidence(2, verified, (20, 30), top=((20, 21, 22), (30, 31)))
    tree(method, DraftRow(SequenceId("a"), 4, (20, 30), BUDGET, evidence=(evidence,)))
    return method


def stored_table(target: Path, directory: Path) -> tuple[SuccessorTable, Path]:
    """A table for a target, in which 20 and 21 follow 10, and the directory that it was written to."""
    module = SuccessorTable(TableShape(2), tiny.VOCABULARY)
    module.successors[10] = torch.tensor([20, 21])
    directory.mkdir()
    card = drafting_modules.card_for(target, "table", (), shape=TableShape(2))
    save_drafter(directory, card, module, None, target_directory=target)
    return module, directory


def test_the_most_probable_tokens_of_earlier_steps_form_the_tree() -> None:
    found = tree(taught(), first([7, 10], "b"))
    assert found.path_tokens(0) == (20,)
    assert {(20, 30), (20, 31), (21,), (22,)} <= set(found.candidates())


def test_without_ranked_tokens_the_decisions_are_the_successors() -> None:
    """A target of several ranks does not rank its tokens; it decides after rejected nodes, too."""
    method = drafter()
    tree(method, first([5, 10]))
    verified = TokenTree((20, 40), (-1, -1))
    tree(method, DraftRow(SequenceId("a"), 3, (21,), BUDGET, evidence=(Evidence(2, verified, (21, 50, 51)),)))
    assert tree(method, first([7, 10], "b")).candidates() == ((21,),)
    assert tree(method, first([7, 40], "c")).candidates() == ((51,),)


def test_a_longer_context_precedes_a_shorter_one_within_its_request() -> None:
    """After 10 came 20 last; after 5 and 10 came 30. Another request knows the single token only."""
    method = drafter()
    text = [5, 10, 30, 6, 10, 20, 5, 10]
    assert next_tokens(tree(method, first(text)))[:2] == [30, 20]
    assert tree(method, first([5, 10], "b")).path_tokens(0) == (20,)
    assert tree(drafter(context=1), first(text)).path_tokens(0) == (20,)


def test_the_target_ranks_successors_of_whole_contexts() -> None:
    method = drafter(successors=3)
    tree(method, first([5, 10]))
    evidence = Evidence(2, TokenTree((20,), (-1,)), (20, 6), top=((20, 21, 22), (6, 7)))
    tree(method, DraftRow(SequenceId("a"), 4, (20, 6), BUDGET, evidence=(evidence,)))
    tree(method, DraftRow(SequenceId("a"), 6, (10, 40), BUDGET, evidence=(Evidence(4, top=((10,), (40, 41))),)))
    found = tree(method, DraftRow(SequenceId("a"), 8, (5, 10), BUDGET, evidence=(Evidence(6, top=((5,), (10,))),)))
    assert next_tokens(found)[:3] == [20, 21, 22], "5 and 10 came before; 40 and 41 follow 10 alone"


def test_the_decision_after_a_rejected_node_follows_its_token() -> None:
    method = drafter()
    tree(method, first([5, 10]))
    verified = TokenTree((20, 40), (-1, 0))
    tree(method, DraftRow(SequenceId("a"), 3, (21,), BUDGET, evidence=(Evidence(2, verified, (21, 50, 51)),)))
    found = tree(method, DraftRow(SequenceId("a"), 7, (8, 10, 20, 40), BUDGET))
    assert found.path_tokens(0) == (51,)


def test_requests_with_different_salts_share_nothing() -> None:
    method = taught()
    assert len(tree(method, first([7, 10], "b", "other"))) == 0
    assert len(tree(method, first([7, 10], "c", ""))) > 0


def test_a_successor_that_the_target_never_takes_loses_its_place() -> None:
    method = drafter(successors=2)
    tree(method, first([5, 10]))
    length = 2
    for _ in range(150):
        evidence = Evidence(length, top=((20, 21),)), Evidence(length + 1, top=((10,),))
        tree(method, DraftRow(SequenceId("a"), length + 2, (21, 10), BUDGET, evidence=evidence))
        length += 2
    (found,) = method.propose([DraftRow(SequenceId("a"), length, (), BUDGET)])
    assert found.tree.path_tokens(0) == (21,)
    assert found.probabilities[0] > 0.6


def test_a_module_fills_the_table_before_the_first_request(tmp_path: Path) -> None:
    target = tiny.save(tmp_path / "target", tiny.llama())
    module, directory = stored_table(target, tmp_path / "table")
    card = read_card(directory)
    method = drafter(path=str(directory))
    for salt in ("", "other"):
        assert tree(method, first([7, 10], salt or "a", salt)).candidates() == ((20,), (21,))
    module.successors[10, 0] = tiny.VOCABULARY
    save_drafter(directory, card, module, None, target_directory=target)
    with pytest.raises(ModelLoadError, match="tokens below 96"):
        read_successors(directory)
    module.successors[10] = torch.tensor([20, 20])
    save_drafter(directory, card, module, None, target_directory=target)
    with pytest.raises(ModelLoadError, match="twice"):
        read_successors(directory)
    drafting_modules.save(target, tmp_path / "heads", "heads", (2,))
    with pytest.raises(ModelLoadError, match=r"kind is 'heads'; needed table"):
        read_successors(tmp_path / "heads")


def test_a_table_for_a_vocabulary_of_another_size_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory may have a packaged target's name, and so its table, and hold another model."""
    target, larger = (tiny.save(tmp_path / name, tiny.llama()) for name in ("target", "larger"))
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps(config | {"vocab_size": tiny.VOCABULARY + 1}))
    _, directory = stored_table(target, tmp_path / "table")
    assert tree(drafter(target, path=str(directory)), first([7, 10])).candidates() == ((20,), (21,))
    assert not caplog.messages

    method = drafter(larger, path=str(directory))

    assert len(tree(method, first([7, 10]))) == 0
    (message,) = caplog.messages
    assert f"target_vocabulary_size is {tiny.VOCABULARY} for " in message and f"{tiny.VOCABULARY + 1} in " in message


@pytest.mark.parametrize("text", ["{", "[]", '{"text_config": 3}', '{"vocab_size": "many"}'])
def test_a_table_for_a_target_without_a_valid_configuration_is_refused(tmp_path: Path, text: str) -> None:
    target = tiny.save(tmp_path / "target", tiny.llama())
    _, directory = stored_table(target, tmp_path / "table")
    (target / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="must be a JSON object with vocab_size"):
        drafter(target, path=str(directory))


def test_a_table_for_a_target_in_the_home_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    _, directory = stored_table(tiny.save(tmp_path / "target", tiny.llama()), tmp_path / "table")
    with pytest.raises(ConfigurationError, match=r"target\.path: needed a known user, found ~no\.body/target"):
        drafter(Path("~no.body/target"), path=str(directory))


def test_the_target_must_show_its_most_probable_tokens() -> None:
    configuration = load_configuration({"draft": {"method": "recycling", "recycling": {"successors": 5}}})
    needs = needs_of(configuration.draft)
    assert (needs.top, needs.decisions, needs.taps) == (5, True, ())


def origins(method: RecyclingDrafter, row: DraftRow) -> dict[int, DraftOrigin]:
    """The origin of each token that is drafted directly after the text."""
    (found,) = method.propose([row])
    nodes = zip(found.tree.tokens, found.tree.parents, found.origins, strict=True)
    return {token: origin for token, parent, origin in nodes if parent == ROOT}


def test_a_successor_says_whether_the_request_or_an_earlier_one_has_shown_it() -> None:
    method = taught()
    assert set(origins(method, first([6, 10], "b")).values()) == {DraftOrigin.EARLIER}
    found = origins(method, first([10, 40, 6, 10], "c"))
    assert (found[40], found[20]) == (DraftOrigin.REQUEST, DraftOrigin.EARLIER)


def test_a_successor_of_a_given_row_comes_from_a_trained_draft() -> None:
    given = np.full((11, 2), -1, dtype=np.int32)
    given[10] = 20, 21
    method = RecyclingDrafter(RecyclingSettings(), DraftSection(max_nodes=8, max_depth=4), given)
    assert set(origins(method, first([6, 10])).values()) == {DraftOrigin.TRAINED}
