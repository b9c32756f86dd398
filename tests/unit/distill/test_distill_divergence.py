"""The distillation losses over the target's leading tokens and one remainder."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cluster.core.errors import ConfigurationError
from workers.distill.divergence import (
    DIVERGENCES,
    distillation_loss,
    divergence_named,
    divergences,
    forward_kl,
    overlap,
    reverse_kl,
)
from workers.distill.eagle3.training import roll_out_loss

POSITIONS, VOCABULARY = 5, 12


def drawn(seed: int) -> Tensor:
    return torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def everything() -> Tensor:
    return torch.arange(VOCABULARY).expand(POSITIONS, VOCABULARY)


def leading(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, tokens = logits.log_softmax(-1).topk(count)
    return tokens, values


class TestWithEveryTokenNamed:
    def test_forward_is_the_divergence_of_the_student_from_the_target(self) -> None:
        student, target = drawn(1), drawn(2)

        loss = distillation_loss(student, everything(), target.log_softmax(-1), forward_kl)

        expected = functional.kl_div(student.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="sum")
        assert float(loss) == pytest.approx(float(expected) / POSITIONS, rel=1e-5)

    def test_reverse_is_the_divergence_of_the_target_from_the_student(self) -> None:
        student, target = drawn(1), drawn(2)

        loss = distillation_loss(student, everything(), target.log_softmax(-1), reverse_kl)

        expected = functional.kl_div(target.log_softmax(-1), student.log_softmax(-1), log_target=True, reduction="sum")
        assert float(loss) == pytest.approx(float(expected) / POSITIONS, rel=1e-5)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
class TestEach:
    def test_the_loss_of_equal_distributions_is_zero(self, name: str) -> None:
        logits = drawn(3)

        loss = distillation_loss(logits, *leading(logits, 4), divergence_named(name))

        assert float(loss) == pytest.approx(0, abs=1e-5)

    def test_naming_fewer_tokens_never_makes_it_larger(self, name: str) -> None:
        """Merging tokens into one remainder can only hide a difference (the data-processing inequality)."""
        student, target = drawn(4), drawn(5)

        losses = [float(distillation_loss(student, *leading(target, k), divergence_named(name))) for k in (2, 4, 8, 12)]

        assert losses == sorted(losses)

    def test_a_position_without_target_probabilities_has_no_loss_and_no_gradient(self, name: str) -> None:
        student = drawn(8).requires_grad_()
        nothing = torch.full((POSITIONS, 3), -1), torch.full((POSITIONS, 3), -math.inf)

        loss = distillation_loss(student, *nothing, divergence_named(name))
        torch.autograd.backward(loss)

        assert float(loss.detach()) == 0
        assert student.grad is not None and float(student.grad.abs().max()) == 0


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_gradient_descent_reaches_the_target(name: str) -> None:
    tokens, log_probabilities, student = trained(name)

    reached = student.log_softmax(-1).gather(1, tokens)
    assert torch.allclose(reached.exp(), log_probabilities.exp(), atol=0.02)


def trained(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The target's leading tokens and their log-probabilities, and the logits of a student after a training."""
    student, target = drawn(6).requires_grad_(), drawn(7)
    optimizer = torch.optim.Adam([student], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        torch.autograd.backward(distillation_loss(student, *leading(target, 6), divergence_named(name)))
        optimizer.step()
    return *leading(target, 6), student.detach()


def test_with_one_certain_token_the_loss_is_cross_entropy() -> None:
    student, labels = drawn(9), torch.tensor([3, 1, 4, 1, 5])

    loss = distillation_loss(student, labels[:, None], torch.zeros(POSITIONS, 1), forward_kl)

    assert float(loss) == pytest.approx(float(functional.cross_entropy(student, labels)), abs=1e-4)


def test_tokens_that_the_student_cannot_propose_are_left_out_of_the_target() -> None:
    """Half of the target's mass is on such a token. The other half is renormalized."""
    student = drawn(10)
    known = torch.tensor([[2, 7]]).expand(POSITIONS, 2)
    with_unknown = torch.tensor([[-1, 2, 7]]).expand(POSITIONS, 3)
    probabilities = torch.tensor([[0.5, 0.5]]).log().expand(POSITIONS, 2)
    halved = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(POSITIONS, 3)

    whole = distillation_loss(student, known, probabilities, forward_kl)
    part = distillation_loss(student, with_unknown, halved, forward_kl)

    assert float(part) == pytest.approx(float(whole), abs=1e-4)


def test_an_unknown_loss_is_refused_with_the_available_ones() -> None:
    with pytest.raises(
        ConfigurationError, match="'jensen' is unknown; it must be one of forward_kl, reverse_kl, overlap"
    ):
        divergence_named("jensen")


def test_the_overlap_is_added_to_a_divergence_by_its_weight() -> None:
    student, target = drawn(1), drawn(2)
    tokens, log_probabilities = leading(target, 4)

    both = distillation_loss(student, tokens, log_probabilities, divergence_named("forward_kl", 0.25))

    parts = [distillation_loss(student, tokens, log_probabilities, one) for one in (forward_kl, overlap)]
    torch.testing.assert_close(both, parts[0] + 0.25 * parts[1])
    summed = roll_out_loss(student, target.softmax(-1), "forward_kl", 0.25)
    rows = divergences(student, everything(), target.log_softmax(-1), divergence_named("forward_kl", 0.25))
    torch.testing.assert_close(summed, rows.sum(), rtol=1e-4, atol=1e-4)


def test_positions_count_more_at_which_the_target_would_reject_the_students_token() -> None:
    student, target = drawn(1), drawn(2)
    target[:2] = student[:2]  # here both have the same most probable token
    tokens, log_probabilities = leading(target, 4)
    each = divergences(student, tokens, log_probabilities, forward_kl)
    weights = torch.where(student.argmax(-1) == target.argmax(-1), 1.0, 3.0)
    assert set(weights.tolist()) == {1.0, 3.0}

    loss = distillation_loss(student, tokens, log_probabilities, forward_kl, 3.0)

    torch.testing.assert_close(loss, (each * weights).sum() / weights.sum())


LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCABULARY, max_size=VOCABULARY)


class TestOverlap:
    def test_gradient_descent_makes_distributions_overlap(self) -> None:
        tokens, log_probabilities, student = trained("overlap")

        assert float(distillation_loss(student, tokens, log_probabilities, overlap)) < 0.05

    @given(LOGITS, LOGITS)
    def test_it_is_what_two_distributions_do_not_share(self, student: list[float], target: list[float]) -> None:
        """Half of the sum of the differences, by the definition of total variation."""
        q, p = (torch.tensor([one], dtype=torch.float64).softmax(-1) for one in (student, target))
        direct = float((p - q).abs().sum()) / 2

        found = divergences(q.log(), torch.arange(VOCABULARY)[None], p.log(), overlap)

        assert float(found) == pytest.approx(direct, abs=1e-5)

    @given(LOGITS, LOGITS, st.integers(1, VOCABULARY - 1))
    def test_the_remainder_counts_as_one_token(self, student: list[float], target: list[float], count: int) -> None:
        q, p = (torch.tensor(one, dtype=torch.float64).softmax(-1) for one in (student, target))
        order = p.argsort(descending=True)
        known, others = order[:count], order[count:]
        common = torch.minimum(p[known], q[known]).sum() + torch.minimum(p[others].sum(), q[others].sum())

        found = divergences(q.log()[None], known[None], p[known].log()[None], overlap)

        assert float(found) == pytest.approx(1 - float(common), abs=1e-5)

    @given(LOGITS, LOGITS, st.integers(2, VOCABULARY))
    def test_roll_outs_reject_what_a_draft_cannot_propose(
        self, student: list[float], target: list[float], count: int
    ) -> None:
        """The target's other tokens are in no row of the head: its probabilities sum to less than one."""
        logits, p = torch.tensor([student[:count]]), torch.tensor([target]).softmax(-1)[:, :count]
        direct = 1 - float(torch.minimum(logits.softmax(-1), p).sum())

        assert float(roll_out_loss(logits, p, "overlap")) == pytest.approx(direct, abs=1e-5)


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_roll_outs_have_the_gradient_of_the_divergence(name: str) -> None:
    student, target = drawn(11).requires_grad_(), drawn(12)

    (found,) = torch.autograd.grad(roll_out_loss(student, target.softmax(-1), name), student)

    loss = divergences(student, everything(), target.log_softmax(-1), divergence_named(name)).sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, student)[0], rtol=1e-4, atol=1e-5)
