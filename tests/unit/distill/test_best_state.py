"""A training in one process keeps the state that drafts held-back texts best."""

from __future__ import annotations

from deploy.distillation.single_process import SingleProcess, Texts


class Training(SingleProcess):
    """A training without a target: only what it keeps is tested."""

    def __init__(self) -> None:
        self._best = float("-inf")

    def train(self, texts: Texts) -> None:
        """Do nothing."""


def test_a_state_that_drafts_held_back_texts_worse_is_not_kept() -> None:
    training = Training()
    assert not training.is_kept
    found = [2.5, 3.8, 3.6, 3.8, 3.7]
    kept = [training.is_best({"held out": value, "spec_bench": -value}) for value in found]
    assert kept == [True, True, False, True, False]
    assert training.is_kept


def test_without_texts_to_measure_on_the_latest_state_is_kept() -> None:
    training = Training()
    assert [training.is_best({}) for _ in range(3)] == [True] * 3
