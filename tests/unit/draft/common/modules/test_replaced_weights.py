"""Drafters that keep keys and values: other weights for requests of one salt, and weights that are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import NO_DRAFT
from cluster.core.ids import SequenceId
from tests.support.engines.graph_replay import FakeRecorder
from tests.support.models import public_drafts
from tests.unit.draft.rows import TAPS, draft, row, shown
from workers.draft.block import block_drafter
from workers.draft.block.block_drafter import BlockTreeDrafter, ServedBlocks, load_block_drafter
from workers.draft.common.learning import LearnedWeights, salt_key
from workers.draft.common.modules import decoder_stack, layer_stack
from workers.draft.common.modules.learned_modules import LearnedModules
from workers.draft.common.modules.module_settings import ContextModuleSettings
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.draft.eagle import eagle_drafter
from workers.draft.eagle.eagle_drafter import EagleTreeDrafter, load_eagle_drafter
from workers.draft.eagle.eagle_growth import GrowthLimits
from workers.forward import graph_sizes, window_attention
from workers.forward.triton.tiles import WindowTiles

SALT = "a/"
KEY = salt_key(SALT)
Drafter = EagleTreeDrafter | BlockTreeDrafter
Make = Callable[[bool], Drafter]


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A public draft."""
    config = public_drafts.speculators_block("dspark", aux_hidden_state_layer_ids=TAPS)
    return public_drafts.write(tmp_path_factory.mktemp("dspark"), config, public_drafts.spark(taps=len(TAPS)))


@pytest.fixture(params=["eagle", "block", "dspark"])
def make(request: pytest.FixtureRequest, target: Path, modules: Path, dspark: Path) -> Make:
    """Makes a drafter of each kind, with other weights for one salt or with those of its files alone."""
    path = dspark if request.param == "dspark" else modules / request.param

    def create(is_replaced: bool) -> Drafter:
        section = TargetSection.model_validate({"path": str(target), "device": "cpu", "evidence": {"taps": TAPS}})
        settings = ContextModuleSettings.model_validate({"path": str(path), "weights": "float32"})
        learning = DraftSection(learn="on")
        if request.param == "eagle":
            found = load_eagle_drafter(settings, learning, section, GrowthLimits(siblings=3, width=2))
            assert isinstance(found, EagleTreeDrafter)
            drafter: Drafter = found
        else:
            drafter = load_block_drafter(settings, learning, section, TreeForm(siblings=3))
        if is_replaced:
            weights_of(drafter).replace(KEY, others(drafter))
        return drafter

    return create


def weights_of(drafter: Drafter) -> LearnedWeights:
    assert drafter.weights is not None
    return drafter.weights


def others(drafter: Drafter) -> Mapping[str, torch.Tensor]:
    """Weights that draft otherwise than those of the files."""
    return {name: value.roll(1, 0) for name, value in weights_of(drafter).of("").items()}


def test_rows_with_different_weights_are_drafted_in_one_call_as_each_is_alone(make: Make) -> None:
    rows = [row(40, 0, [shown(0, 39)], name=name, salt=salt) for name, salt in (("1", SALT), ("2", "b/"), ("3", SALT))]
    together = make(True).propose(rows)
    assert [one.tree for one in together] == [make(True).propose([one])[0].tree for one in rows]
    assert together[0].tree == together[2].tree != together[1].tree
    assert together[1] == make(False).propose([rows[1]])[0]


def test_later_sequences_find_no_keys_of_weights_that_were_replaced(make: Make) -> None:
    """The target finds the first 32 tokens in its cache and shows only the rest."""
    drafter = make(False)
    cached = row(40, 0, [shown(32, 39)], name="cached", salt=SALT)
    draft(drafter, row(40, 0, [shown(0, 39)], salt=SALT))
    weights_of(drafter).replace(KEY, others(drafter))
    found = draft(drafter, cached)
    assert found.probabilities == pytest.approx(draft(make(True), cached).probabilities)
    whole = draft(drafter, row(40, 0, [shown(0, 39)], name="again", salt=SALT))
    drafter.release([SequenceId("cached")])
    assert draft(drafter, cached).probabilities == pytest.approx(whole.probabilities) != found.probabilities


def test_later_sequences_find_no_keys_of_learned_weights_when_those_of_the_files_draft_again(make: Make) -> None:
    """A sequence that begins with the files' weights goes on with the learned ones."""
    drafter = make(False)
    weights, cached = weights_of(drafter), row(40, 0, [shown(32, 39)], name="cached", salt=SALT)
    draft(drafter, row(20, 0, [shown(0, 19)], salt=SALT))
    weights.replace(KEY, others(drafter))
    draft(drafter, row(40, 20, [shown(19, 39)]))
    weights.replace(KEY, None)
    assert draft(drafter, cached).probabilities == pytest.approx(draft(make(False), cached).probabilities)


def test_a_running_sequence_is_drafted_for_with_the_new_weights_on_its_old_keys(make: Make) -> None:
    drafter = make(False)
    weights = weights_of(drafter)
    expected = draft(make(False), row(20, 0, [shown(0, 19)], salt=SALT), row(24, 20, [shown(19, 23)]))
    draft(drafter, row(20, 0, [shown(0, 19)], salt=SALT))
    weights.replace(KEY, others(drafter))
    replaced = draft(drafter, row(24, 20, [shown(19, 23)]))
    assert len(replaced.tree) and replaced.tree != expected.tree
    weights.replace(KEY, None)
    assert len(draft(drafter, row(28, 24, [shown(23, 27)])).tree)


def test_the_files_of_a_draft_may_become_shorter_while_it_drafts(make: Make) -> None:
    """A process ends that reads what was mapped of such a file (SIGBUS)."""
    weights = weights_of(make(True))
    assert isinstance(weights, LearnedModules)
    maps = Path("/proc/self/maps").read_text()
    assert str(weights._source) not in maps


def test_all_weights_share_what_is_the_targets(make: Make) -> None:
    weights = weights_of(make(True))
    assert isinstance(weights, LearnedModules)
    own, learned = weights.own, weights.of_salt(SALT)
    assert learned is not own
    if isinstance(own, ServedBlocks):
        heads = [getattr(getattr(one.rank, "__self__", one.rank), "_head", one.rank) for one in (own, learned)]
        assert heads[0] is heads[1]
        own, learned = own.passes, learned.passes
    else:
        assert own._head is learned._head
    assert own._embedding is learned._embedding


class NoAttention:
    """Stands for the kernels over windows. They attend to nothing: layers compute with their products alone."""

    def write_windows(self, keys: Tensor, values: Tensor, tiles: WindowTiles, layer: int) -> None:
        """Store nothing."""

    def write_layers(self, keys: Tensor, values: Tensor, tiles: WindowTiles) -> None:
        """Store nothing."""

    def window_attention(
        self, queries: Tensor, tiles: WindowTiles, layer: int, kv_heads: int, value_dim: int, scale: float
    ) -> Tensor:
        return queries.new_zeros((*queries.shape[:2], value_dim))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """What captures the passes of the drafters that are made from now on, as on a GPU, in one size of rows."""
    found = FakeRecorder()
    for module in (block_drafter, eagle_drafter):
        monkeypatch.setattr(module, "capture_of", lambda *_: found)
    monkeypatch.setattr(graph_sizes, "_ROWS", (4,))
    for module in (layer_stack, decoder_stack):
        monkeypatch.setattr(module, "pack_window_layers", lambda *_: None)
    monkeypatch.setattr(window_attention, "kernels_for", lambda *_: NoAttention())
    return found


def test_captured_passes_draft_with_the_weights_of_the_files_alone(recorder: FakeRecorder, make: Make) -> None:
    """Learned weights draft with passes that are launched, and when they are dropped, graphs are replayed again."""
    drafter = make(False)
    weights, captured = weights_of(drafter), recorder.recorded
    texts = (row(40, 0, [shown(0, 39)], name=name, salt=SALT) for name in ("files", "learned", "files again"))
    expected = draft(drafter, next(texts))
    replayed = recorder.replayed
    assert replayed > 0
    weights.replace(KEY, others(drafter))
    assert draft(drafter, next(texts)).tree != expected.tree
    assert recorder.replayed == replayed
    weights.replace(KEY, None)
    assert draft(drafter, next(texts)).tree == expected.tree
    assert recorder.replayed > replayed
    assert recorder.recorded == captured, "nothing is captured while serving"


def test_what_a_captured_pass_says_of_a_sequence_outlives_the_passes_for_others(
    recorder: FakeRecorder, make: Make
) -> None:
    """A sequence is drafted for again, with another budget, after passes for another one."""
    drafter, first = make(False), row(40, 0, [shown(0, 39)], name="first", budget=NO_DRAFT)
    draft(drafter, first, row(30, 0, [shown(0, 29)], name="second"))
    found = draft(drafter, row(40, 40, name="first"))
    assert recorder.replayed > 0
    assert len(found.tree)
    assert found.tree == draft(make(False), first, row(40, 40, name="first")).tree
