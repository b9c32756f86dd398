"""The comparison of a draft that learns with a frozen one: what it reads, and the figures that it tells."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.learning import FROZEN, LEARNING, Answer, Minute, gains, plot, prompts_of, times


def answer(tokens: int, steps: int, per_token: float = 0.01) -> Answer:
    return Answer(tuple(range(tokens)), steps, 0.1, per_token, 1.0)


def minutes() -> list[Minute]:
    """Eight minutes, in the middle of which the prompts change; the draft that learns gets better in each half."""
    return [
        Minute(end, (end - 1) // 4, version, answers={LEARNING: [answer(20, steps)], FROZEN: [answer(20, 20)]})
        for end, version, steps in zip(
            range(1, 9), (0, 1, 2, 2, 2, 3, 4, 4), (20, 16, 10, 10, 20, 16, 10, 8), strict=True
        )
    ]


def test_the_gain_of_each_quarter_is_that_of_its_tokens_per_step() -> None:
    assert [row[-1] for row in gains(minutes())] == [
        *("+0.0%", "+25.0%", "+100.0%", "+100.0%"),
        *("+0.0%", "+25.0%", "+100.0%", "+150.0%"),
    ]


def test_times_are_medians_and_99th_percentiles_in_milliseconds() -> None:
    answers = [answer(2, 1, per_token / 1000) for per_token in range(1, 101)]
    assert times("frozen", answers) == ["frozen", "100", "100.0", "100.0", "50.5", "99.0"]


def test_the_plot_is_a_picture_or_left_out_without_matplotlib() -> None:
    picture = plot(minutes(), "a machine")
    assert picture is None or picture.startswith(b"\x89PNG")


def test_sentences_to_correct_become_prompts_and_other_files_are_read_as_for_training(tmp_path: Path) -> None:
    corrections, translations = tmp_path / "corrections.jsonl", tmp_path / "translations.jsonl"
    corrections.write_text(json.dumps({"source": "He go .", "references": ["He goes ."]}))
    translations.write_text(json.dumps({"en": "A man.", "fr": "Un homme."}))
    (correction,) = prompts_of(corrections)
    assert correction.endswith("He go .")
    assert prompts_of(translations) == ["Translate French to English: Un homme."]
