"""Metrics against values computed by hand."""

from __future__ import annotations

from decimal import Decimal

import pytest

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.tasks import metrics


def test_bleu_is_the_geometric_mean_of_precisions() -> None:
    found = metrics.bleu_and_chrf(["the cat sat on the mat today"], [["the cat sat on the mat"]])
    # precisions of 1 to 4 words: 6/7, 5/6, 4/5, 3/4; no brevity penalty, since the answer is longer
    assert found["BLEU"] == pytest.approx(100 * (6 / 7 * 5 / 6 * 4 / 5 * 3 / 4) ** 0.25)


def test_chrf_is_100_for_equal_texts_and_0_without_a_common_character() -> None:
    assert metrics.bleu_and_chrf(["un chat"], [["un chat"]])["chrF"] == pytest.approx(100)
    assert metrics.chrf(["aaaa"], ["bbbb"]) == 0
    assert metrics.chrf(["", "x"], ["", "x"]) == 100


def test_bleu_takes_the_best_of_several_references() -> None:
    references = [["a man sleeps in a room", "a man is sleeping in a green room"]]
    assert metrics.bleu_and_chrf(["a man sleeps in a room"], references)["BLEU"] == pytest.approx(100)


def test_gleu_counts_common_sequences_of_words() -> None:
    # 3 single words, 2 pairs, 1 triple on both sides; common are a, b and a b
    assert metrics.gleu([["a", "b", "c"]], [[["a", "b", "d"]]]) == pytest.approx(50)
    assert metrics.gleu([["a", "b", "d"]], [[["x"], ["a", "b", "d"]]]) == pytest.approx(100)


def test_words_separate_punctuation() -> None:
    assert metrics.words("Sciences and technologies.\n") == metrics.words("Sciences and technologies .")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She sold 48+24 = 72 clips.", "72"),
        ("#### 1,234", "1234"),
        ("It costs $10.50.", "10.5"),
        ("between 10-15", "15"),
        ("minus -3", "-3"),
        ("none", None),
    ],
)
def test_the_last_number_is_found(text: str, number: str | None) -> None:
    assert metrics.last_number(text) == (None if number is None else Decimal(number))


def test_an_answer_contains_a_reference_as_whole_words() -> None:
    assert metrics.contains_one("It was sung by The George Harrison!", ["james ray", "George Harrison"])
    assert not metrics.contains_one("It was sung by George Harrisons", ["George Harrison"])
    assert not metrics.contains_one("anything", ["the", ""])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(metrics, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"needs sacrebleu: pip install 'pilotfish\[bench\]'"):
        metrics.chrf(["a"], ["b"])
