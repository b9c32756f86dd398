"""An EAGLE head learns what one client repeats: it drafts it for this client alone, and every text stays."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from cluster.core.drafting import NO_DRAFT
from cluster.core.verification import StepBatch, StepResult
from tests.support.engines.colocated_decoding import decode_together
from tests.unit.serve.learning.served import BUDGET, PROMPTS, TIMES, TOKENS, Served, accepted, answers
from workers.draft.common.learning import salt_key

pytestmark = pytest.mark.slow

KEY = salt_key("a/")
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Weights]:
    """A target that has answered one client's prompts again and again, and weights that its head learned from that."""
    torch.set_num_threads(1)
    served = Served(tmp_path_factory.mktemp("eagle"), "eagle")
    for _ in range(TIMES):
        served.serve()
    return served, served.learned(KEY)


def plain(served: Served) -> list[list[int]]:
    """The answers without any draft."""
    served.restart()
    return answers(list(decode_together(served.step(), PROMPTS, TOKENS, NO_DRAFT).values()))


def test_what_one_client_repeats_is_drafted_better_for_it_and_every_draft_for_others_stays(
    taught: tuple[Served, Weights],
) -> None:
    served, weights = taught
    found = []
    for replaced in (None, weights):
        served.restart()
        served.weights.replace(KEY, replaced)
        found.append((served.serve("b/", allows=False), served.serve("a/", allows=False)))
    (before_b, before_a), (after_b, after_a) = found
    assert accepted(after_a) > 1.5 * accepted(before_a)
    assert [one.proposals for one in after_b] == [one.proposals for one in before_b]
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
        assert text.hidden.shape == (len(text.tokens) - 1, 2 * 48)
