"""Drafting modules: what they compute piece by piece while serving equals what they compute at once in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models import drafting_modules, tiny
from workers.model.draft_shapes import HeadsShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.files import Drafter, load_drafter
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.selector import Selector, top_candidates

CPU = torch.device("cpu")
SIZE = 48
LENGTH = 30  # longer than the window of the layers, 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


def drafter(target: Path, directory: Path, kind: str) -> Drafter:
    drafting_modules.save(target, directory, kind, vocabulary=range(0, 96, 2))
    return load_drafter(directory, target, torch.float32, CPU)


@pytest.fixture
def taps() -> torch.Tensor:
    return torch.randn(2, LENGTH, 2 * SIZE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(2))


class TestHeads:
    def test_new_heads_repeat_the_hidden_state(self, target: Path, tmp_path: Path) -> None:
        """All trained corrections are zero at first, as in Medusa."""
        ends = drafter(target, tmp_path, "heads").ends
        hidden, last = torch.randn(2, 5, SIZE).unbind()

        vectors = MedusaHeads(ends, HeadsShape(depths=3, mix_rank=4, selector_rank=4))(hidden, last)

        assert vectors.shape == (5, 3, SIZE)
        assert all(torch.equal(vectors[:, depth], hidden) for depth in range(3))

    def test_every_depth_has_its_own_weights_and_uses_the_last_token(self, target: Path, tmp_path: Path) -> None:
        heads = drafter(target, tmp_path, "heads").module
        hidden, last, other = torch.randn(3, 5, SIZE).unbind()

        vectors = heads(hidden, last)

        assert not torch.allclose(vectors[:, 0], vectors[:, 1])
        assert not torch.allclose(vectors, heads(hidden, other))

    def test_heads_without_mixture_and_selector_are_plain_medusa(self, target: Path, tmp_path: Path) -> None:
        ends = drafter(target, tmp_path, "heads").ends
        heads = MedusaHeads(ends, HeadsShape(depths=1, mix_rank=0, selector_rank=0))
        drafting_modules.randomized(heads)
        hidden, last = torch.randn(2, 5, SIZE).unbind()

        expected = hidden + torch.nn.functional.silu(hidden @ heads.weights.T)

        torch.testing.assert_close(heads(hidden, last)[:, 0], expected)
        assert heads.selector is None


class TestSelector:
    def test_a_new_selector_changes_no_probability(self, target: Path, tmp_path: Path) -> None:
        ends = drafter(target, tmp_path, "heads").ends
        hidden, previous = torch.randn(2, 5, SIZE).unbind()
        rows, log_probabilities = top_candidates(ends, hidden, 4)

        found = drafting_modules.selected(Selector(SIZE, 8), ends, hidden, previous, rows, log_probabilities)

        torch.testing.assert_close(found, log_probabilities)

    def test_a_selector_moves_probability_among_the_candidates_alone(self, target: Path, tmp_path: Path) -> None:
        heads = drafter(target, tmp_path, "heads")
        assert isinstance(heads.module, MedusaHeads)
        assert heads.module.selector is not None
        hidden, previous = torch.randn(2, 5, SIZE).unbind()
        rows, before = top_candidates(heads.ends, hidden, 4)

        after = drafting_modules.selected(heads.module.selector, heads.ends, hidden, previous, rows, before)

        assert not torch.allclose(after, before, atol=1e-2)
        torch.testing.assert_close(after.logsumexp(-1), before.logsumexp(-1))


class TestBlock:
    def test_context_in_pieces_and_one_anchor_at_a_time_equal_all_anchors_at_once(
        self, target: Path, tmp_path: Path, taps: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        loaded = drafter(target, tmp_path, "block")
        block = loaded.module
        assert isinstance(block, BlockDrafter)
        positions = torch.arange(LENGTH).expand(2, -1)
        fused, keys, values = block.context(taps, positions)
        anchors = torch.tensor([[3, 9, 29], [1, 20, 28]])
        at_once = block(
            loaded.ends.embed(tokens.gather(1, anchors)),
            fused.gather(1, (anchors - 1).unsqueeze(-1).expand(-1, -1, SIZE)),
            anchors,
            keys,
            values,
            positions,
        )
        assert at_once.shape == (2, 3, 4, SIZE)

        for row in range(2):
            for number, anchor in enumerate(anchors[row].tolist()):
                pieces = [
                    block.context(taps[row, first : first + 5], positions[row, first : first + 5])
                    for first in range(0, anchor, 5)
                ]
                own_fused = torch.cat([piece[0] for piece in pieces])[:anchor]
                own_keys, own_values = (torch.cat([piece[part] for piece in pieces], 1)[:, :anchor] for part in (1, 2))
                recent = slice(max(0, anchor - 16), anchor)  # older positions are outside the window
                alone = block(
                    loaded.ends.embed(tokens[row, anchor]).view(1, 1, SIZE),
                    own_fused[-1].view(1, 1, SIZE),
                    torch.tensor([[anchor]]),
                    own_keys[:, None, recent],
                    own_values[:, None, recent],
                    positions[row, None, recent],
                )
                torch.testing.assert_close(alone[0, 0], at_once[row, number], atol=1e-5, rtol=1e-4)

    def test_padding_is_never_attended_to(
        self, target: Path, tmp_path: Path, taps: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        loaded = drafter(target, tmp_path, "block")
        block = loaded.module
        assert isinstance(block, BlockDrafter)
        positions = torch.arange(LENGTH).expand(2, -1)
        fused, keys, values = block.context(taps, positions)
        anchor, last = torch.tensor([[6], [6]]), loaded.ends.embed(tokens[:, 6:7])

        short = block(last, fused[:, 5:6], anchor, keys[:, :, :6], values[:, :, :6], positions[:, :6])
        padded = block(last, fused[:, 5:6], anchor, keys, values, positions.masked_fill(positions > 5, -1))

        torch.testing.assert_close(padded, short)


class TestEagle:
    def test_token_by_token_equals_all_positions_at_once(
        self, target: Path, tmp_path: Path, taps: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        loaded = drafter(target, tmp_path, "eagle")
        eagle = loaded.module
        assert isinstance(eagle, EagleHead)
        features, following = eagle.fusion(taps)[:, :-1], loaded.ends.embed(tokens[:, 1:])
        positions = torch.arange(LENGTH - 1).expand(2, -1)
        at_once, _, _ = eagle(
            features, following, positions, eagle.no_past(2), drafting_modules.causal_mask(eagle, positions, positions)
        )

        past, found = eagle.no_past(2), []
        for first in (*range(0, 20, 4), *range(20, LENGTH - 1)):
            now = slice(first, min(first + 4, LENGTH - 1) if first < 20 else first + 1)
            mask = drafting_modules.causal_mask(eagle, positions[:, now], positions[:, : now.stop])
            outputs, keys, values = eagle(features[:, now], following[:, now], positions[:, now], past, mask)
            past = (torch.cat([past[0], keys], 1), torch.cat([past[1], values], 1))
            found.append(outputs)

        torch.testing.assert_close(torch.cat(found, 1), at_once, atol=1e-5, rtol=1e-4)
        assert eagle.normalised(at_once).shape == (2, LENGTH - 1, SIZE)


def test_a_reduced_head_proposes_the_tokens_of_its_vocabulary(target: Path, tmp_path: Path) -> None:
    ends = drafter(target, tmp_path, "heads").ends

    rows = ends.logits(torch.randn(5, SIZE)).argmax(-1)

    assert (ends.tokens_of(rows) == 2 * rows).all()
    assert (ends.row_of[ends.tokens_of(rows)] == rows).all()
    assert ends.row_of[1] == -1


def test_the_final_norm_is_the_targets(target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ends = drafter(target, tmp_path, "heads").ends
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    hidden = torch.randn(5, SIZE)

    torch.testing.assert_close(ends.normalised(hidden), model.model.norm(hidden))
