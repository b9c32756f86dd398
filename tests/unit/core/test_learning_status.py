"""What several drafters have learned is shown as one."""

from __future__ import annotations

from cluster.core.verification import LearningStatus


def test_texts_and_trainings_add_up_and_the_rest_is_that_of_the_drafter_that_has_trained_most() -> None:
    busy = LearningStatus(2, 3, 70, 900, 4, 1, 0, 2.0, 2.5)
    other = LearningStatus(5, 1, 30, 100, 1, 1, 2, 3.0, 3.5)
    assert LearningStatus.of_all([busy, other]) == LearningStatus(5, 3, 100, 1000, 5, 2, 2, 2.0, 2.5)
    assert LearningStatus.of_all([other]) == other
