"""P-EAGLE computes what its format publishes: one causal pass over text and mask tokens predicts all depths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.models import public_drafts, tiny
from tests.support.models.draft_references import Eagle3
from tests.support.models.drafting_evidence import drafter_of, shown_states
from tests.support.models.public_drafts import DRAFTED, LLAMA, speculators_config
from tests.support.models.shown_target import Shown
from tests.unit.draft.eagle.conftest import KNOWN, LAYERS, TOKENS
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_pass import committed_piece
from workers.draft.eagle.parallel_drafter import ParallelTreeDrafter
from workers.model.drafting.files import load_drafter
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.sampling.noise import gumbel

MASK, DEPTHS = public_drafts.VOCABULARY - 1, 5
GREEDY = SamplingParameters(temperature=0.0)
BODY = LLAMA | {"num_hidden_layers": 2}
SPECULATORS = speculators_config(speculators_model_type="peagle", transformer_layer_config=BODY, mask_token_id=MASK)
SPECFORGE = BODY | {"architectures": ["PeagleLlamaForCausalLM"], "draft_vocab_size": len(DRAFTED), "pard_token": MASK}
CASES = {"speculators": (SPECULATORS, "layers.0.", True), "specforge": (SPECFORGE, "midlayer.", False)}


def published(first: str, norm_before_residual: bool, states: list[Tensor], tokens: list[int], depths: int) -> Tensor:
    """Logits [depths, draft vocabulary] after `tokens`: the last pair and the mask tokens after it, in one causal pass.

    `states` are the target's hidden states of all tokens but the last one.
    """
    tensors = public_drafts.peagle(first)
    head = Eagle3(
        tensors,
        tensors["embed_tokens.weight"],
        first,
        layers=2,
        norm_before_residual=norm_before_residual,
    )
    taps = [torch.cat([one, mask.expand(depths - 1, -1)]) for one, mask in zip(states, _masks(tensors), strict=True)]
    following = [*tokens[1:], *[MASK] * (depths - 1)]
    return head.logits(head.outputs(head.features(taps), following))[-depths:]


def _masks(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tensors["mask_hidden"].view(3, 1, -1).unbind()


def write(name: str, directory: Path) -> Path:
    config, first, _ = CASES[name]
    return public_drafts.write(directory, config, public_drafts.peagle(first))


def proposals(
    draft: Path, shown: Shown, budget: DraftBudget, *, candidates: int, samplings: tuple[SamplingParameters, ...]
) -> tuple[Proposal, ...]:
    """What the method drafts after `KNOWN + 1` tokens, whose hidden states come in two pieces, all rows in one call."""
    settings = {"path": str(draft), "candidates": candidates}
    drafter, taps = drafter_of(shown.directory, LAYERS, "eagle", settings, max_depth=8, max_nodes=32)
    states = torch.cat([shown.states[tap] for tap in taps], dim=1)
    assert isinstance(drafter, ParallelTreeDrafter)
    ids = [SequenceId(str(index)) for index in range(len(samplings))]
    first = [
        DraftRow(
            one, 10, tuple(TOKENS[:10]), DraftBudget(0, 0), SequenceStart(4, sampling), (shown_states(states[:9]),)
        )
        for one, sampling in zip(ids, samplings, strict=True)
    ]
    assert all(len(one.tree) == 0 for one in drafter.propose(first))
    more = [
        DraftRow(one, KNOWN + 1, tuple(TOKENS[10 : KNOWN + 1]), budget, None, (shown_states(states[9:KNOWN], 9),))
        for one in ids
    ]
    return tuple(drafter.propose(more))


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_one_causal_pass(name: str, shown: Shown, tmp_path: Path) -> None:
    """The chain of all depths is drafted by one pass: later depths do not know the tokens drafted before them."""
    _, first, is_normed = CASES[name]
    draft, depths = write(name, tmp_path), 5 if name == "speculators" else 8
    states = [shown.states[tap].bfloat16().float() for tap in (2, LAYERS // 2, LAYERS - 3)]
    wanted = published(first, is_normed, states, TOKENS[: KNOWN + 1], depths)

    (found,) = proposals(draft, shown, DraftBudget(8, 8), candidates=1, samplings=(GREEDY,))

    assert found.fault is None and found.tree.is_chain
    assert list(found.tree.tokens) == [DRAFTED[int(row)] for row in wanted.argmax(-1)]
    assert found.tree.depth() == depths


def test_hidden_states_are_equal(shown: Shown, tmp_path: Path) -> None:
    _, first, is_normed = CASES["speculators"]
    loaded = load_drafter(write("speculators", tmp_path), shown.directory, torch.float32, torch.device("cpu"))
    assert isinstance(loaded.module, PublicModule)
    head = FeaturePass(loaded.module, loaded.ends, "float32", scratch=KNOWN)
    window = ContextWindow(head.context_shape, torch.device("cpu"))
    taps = torch.stack([shown.states[tap] for tap in (2, LAYERS // 2, LAYERS - 3)], dim=1)
    last = head.run(head.features(taps[:KNOWN]), [committed_piece(window, 0, TOKENS[1 : KNOWN + 1], 1 << 20)])
    window.mark(0, KNOWN)
    token, feature = head.mask
    rows = [last]
    for count in range(1, DEPTHS):
        piece = committed_piece(window, KNOWN, (token,) * count, 1 << 20)
        rows.append(head.run(feature.expand(count, -1), [piece]))

    wanted = published(first, is_normed, list(taps.unbind(1)), TOKENS[: KNOWN + 1], DEPTHS)
    torch.testing.assert_close(head.logits(torch.cat(rows)), wanted, rtol=1e-5, atol=1e-5)


def test_sampled_chains_are_drawn_with_the_shared_noise(shown: Shown, tmp_path: Path) -> None:
    _, first, is_normed = CASES["speculators"]
    draft = write("speculators", tmp_path)
    states = [shown.states[tap].bfloat16().float() for tap in (2, LAYERS // 2, LAYERS - 3)]
    logits = published(first, is_normed, states, TOKENS[: KNOWN + 1], DEPTHS)
    samplings = tuple(SamplingParameters(temperature=1.5, seed=seed) for seed in range(3))

    found = proposals(draft, shown, DraftBudget(DEPTHS, DEPTHS), candidates=1, samplings=samplings)

    for seed, one in enumerate(found):
        places = [KNOWN + 1 + depth for depth in range(DEPTHS)]
        noise = gumbel([seed] * DEPTHS, places, 0, public_drafts.VOCABULARY, torch.device("cpu"))
        drawn = (logits / 1.5 + noise[:, DRAFTED]).argmax(-1)
        assert list(one.tree.tokens) == [DRAFTED[int(row)] for row in drawn]


def test_trees_of_all_rows_come_from_one_call_and_rows_do_not_change_each_other(
    shown: Shown,
    tmp_path: Path,
) -> None:
    draft, budget = write("speculators", tmp_path), DraftBudget(12, DEPTHS)
    samplings = (GREEDY, SamplingParameters(temperature=0.8, seed=5), SamplingParameters(temperature=1.2, seed=6))

    together = proposals(draft, shown, budget, candidates=4, samplings=samplings)

    alone = [proposals(draft, shown, budget, candidates=4, samplings=(one,))[0] for one in samplings]
    assert [one.tree for one in together] == [one.tree for one in alone]
    for one in together:
        assert len(one.tree) == budget.max_nodes and not one.tree.is_chain and one.tree.depth() > 1


def test_the_depths_are_those_that_the_checkpoint_proposes(tmp_path: Path) -> None:
    found = [getattr(read_draft(write(name, tmp_path / name)).shape, "depths", None) for name in CASES]
    assert found == [5, 8]


def test_the_library_speculators_computes_the_same(tmp_path: Path) -> None:
    """`speculators/make.py` wrote the head and what the library computes for a random text and three mask tokens."""
    written, cpu = Path(__file__).parent / "speculators", torch.device("cpu")
    expected = load_file(written / "expected.safetensors")
    target = tiny.save(tmp_path, tiny.llama(vocab_size=24, hidden_size=16, num_attention_heads=2))
    loaded = load_drafter(written / "draft", target, torch.float32, cpu, "eagle")
    assert isinstance(loaded.module, PublicModule)
    head = FeaturePass(loaded.module, loaded.ends, "float32", scratch=16)
    window, following = ContextWindow(head.context_shape, cpu), expected["following"].tolist()
    count = len(following)

    features = head.features(expected["taps"].view(count, 3, -1))
    text = head.run(features, [replace(committed_piece(window, 0, following, 1 << 20), wanted=range(count))])
    window.mark(0, count)
    token, feature = head.mask
    piece = committed_piece(window, count, (token,) * (head.depths - 1), 1 << 20)
    masked = head.run(feature.expand(head.depths - 1, -1), [replace(piece, wanted=range(head.depths - 1))])

    assert head.depths == 4
    torch.testing.assert_close(head.logits(torch.cat([text, masked])), expected["logits"], rtol=1e-5, atol=1e-5)
