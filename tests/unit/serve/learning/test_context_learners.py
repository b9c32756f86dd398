"""Drafts that keep keys and values learn what one client repeats: they draft it for it alone, and every text stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from cluster.core.drafting import NO_DRAFT
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult
from tests.support.engines.colocated_decoding import Decoded, decode_together
from tests.unit.serve.learning.served import BUDGET, PROMPTS, TIMES, TOKENS, Served, accepted, answers
from workers.draft.common.learning import salt_key

pytestmark = pytest.mark.slow

KEY = salt_key("a/")
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", params=["eagle", "block", "dspark", "eagle3", "model", "distilled"])
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Weights]:
    """A target that has answered one client's prompts again and again, and weights that its draft learned from that."""
    torch.set_num_threads(1)
    served = Served(tmp_path_factory.mktemp(request.param), request.param)
    for _ in range(TIMES):
        served.serve()
    return served, served.learned(KEY)


def drafts(found: Sequence[Decoded]) -> list[list[tuple[TokenTree, tuple[float, ...]]]]:
    """The trees of each sequence, with what is expected of their nodes."""
    return [[(proposal.tree, proposal.probabilities) for proposal in one.proposals] for one in found]


def plain(served: Served) -> list[list[int]]:
    """The answers without any draft."""
    served.restart()
    return answers(list(decode_together(served.step(), PROMPTS, TOKENS, NO_DRAFT).values()))


def test_what_one_client_repeats_is_drafted_better_for_it_and_every_draft_for_others_stays(
    taught: tuple[Served, Weights],
) -> None:
    """Bit for bit: how often the drafts of one client are right changes nothing for the other one either."""
    served, weights = taught
    served.restart()
    before_b, before_a = served.serve("b/", allows=False), served.serve("a/", allows=False)
    served.restart()
    served.weights.replace(KEY, weights)
    after_a, after_b = served.serve("a/", allows=False), served.serve("b/", allows=False)
    assert accepted(after_a) > 1.5 * accepted(before_a)
    assert drafts(after_b) == drafts(before_b)
    assert answers(after_a) == answers(before_a) == answers(before_b) == plain(served)


def test_clients_with_different_weights_are_answered_in_one_batch(taught: tuple[Served, Weights]) -> None:
    served, weights = taught
    expected = plain(served)
    served.restart()
    served.weights.replace(KEY, weights)
    named = {f"{salt}:{name}": prompt for salt in ("a/", "b/") for name, prompt in PROMPTS.items()}
    found = list(decode_together(served.step(), named, TOKENS, BUDGET).values())
    assert answers(found) == expected + expected
    assert accepted(found[: len(PROMPTS)]) > accepted(found[len(PROMPTS) :])


def test_weights_that_are_replaced_in_the_middle_of_a_sequence_change_no_text(taught: tuple[Served, Weights]) -> None:
    served, weights = taught
    expected = plain(served)
    served.restart()
    step, count = served.step(), 0

    def swapping(batch: StepBatch) -> StepResult:
        nonlocal count
        count += 1
        if count in (3, 6):
            served.weights.replace(KEY, weights if count == 3 else None)
        return step(batch)

    found = list(decode_together(swapping, PROMPTS, TOKENS, BUDGET).values())
    assert answers(found) == expected
    assert count > 6
    assert accepted(found) > 0


def test_a_text_has_all_taps_from_the_prompt_on(taught: tuple[Served, Weights]) -> None:
    served, _ = taught
    (texts,) = served.reservoir.salts()
    for text in (*texts.training, *texts.left_out, *texts.held_back):
        assert (text.first, text.base_len) == (0, 7)
        assert text.hidden.shape == (len(text.tokens) - 1, len(served.taps) * 48)
