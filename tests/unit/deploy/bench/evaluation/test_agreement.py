"""The agreement of two models, and what follows from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.core.errors import ConfigurationError
from deploy.bench.agreement.agree import Pair, read_pairs, read_texts
from deploy.bench.agreement.positions import MAX_RANK, Agreement, Text, compare
from deploy.bench.agreement.report import (
    AgreementReport,
    Measured,
    RoundTimes,
    TreeShape,
    markdown,
    tau_of_rate,
    tau_on_texts,
    tau_with_prompts,
)
from deploy.bench.options import AgreementOptions


class Model:
    """A model whose logits depend on the last token alone."""

    device = torch.device("cpu")

    def __init__(self, probabilities: list[list[float]]) -> None:
        self._logits = torch.tensor(probabilities).log()

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits[input_ids])


class Translator(Model):
    """A model whose logits depend on the last token, and on the source's last token."""

    def __call__(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor, use_cache: bool
    ) -> SimpleNamespace:
        assert attention_mask.tolist() == [[1] * input_ids.shape[1]]
        return SimpleNamespace(logits=self._logits[(decoder_input_ids + input_ids[:, -1]) % 3])


TARGET = Model([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]])
DRAFT = Model([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [0.5, 0.5, 0.0]])


def test_agreement_and_overlap_follow_from_the_distributions() -> None:
    found = compare(TARGET, DRAFT, [Text((0, 1, 2, 2), 1)])
    assert found.positions == 3
    # after 0 the target's best is second, after 1 first, after 2 the draft cannot propose it
    assert found.ranks == ((1, 0, MAX_RANK),)
    assert found.share_within(1) == pytest.approx(1 / 3) and found.share_within(2) == pytest.approx(2 / 3)
    assert found.overlap == pytest.approx((0.75 + 1.0 + 0.4) / 3)


def test_perplexity_leaves_out_what_the_draft_cannot_propose() -> None:
    found = compare(TARGET, DRAFT, [Text((0, 1, 2, 2), 1)])
    assert found.target_perplexity == pytest.approx((0.25 * 0.1 * 0.6) ** (-1 / 3))
    assert found.draft_perplexity == pytest.approx((0.5 * 0.1) ** (-1 / 2))
    assert found.share_outside == pytest.approx(1 / 3)


def test_a_translator_reads_the_source_and_writes_after_its_start() -> None:
    rows = [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]
    # the start token is 2, the source ends with 1: the answer 0, 1 is written after the rows 0 and 1
    found = compare(Translator(rows), Translator(rows), [Text((2, 0, 1), 1, source=(0, 1))])
    assert found.ranks == ((0, 0),)
    assert found.target_perplexity == pytest.approx((0.5 * 0.8) ** (-1 / 2))


def test_forbidden_tokens_have_no_probability() -> None:
    found = compare(TARGET, DRAFT, [Text((0, 1), 1)], forbidden=[0])
    # without token 0, the models choose between 1 and 2 after 0: (1/2, 1/2) and (2/3, 1/3)
    assert found.target_perplexity == pytest.approx(2)
    assert found.draft_perplexity == pytest.approx(3 / 2)
    assert found.overlap == pytest.approx(1 / 2 + 1 / 3)


def test_only_positions_from_the_first_one_count() -> None:
    assert compare(TARGET, DRAFT, [Text((0, 1, 2, 2), 3), Text((1,), 1)]).ranks == ((MAX_RANK,),)
    assert Agreement(()).share_within(1) == 0 and math.isnan(Agreement(()).target_perplexity)


def test_models_of_different_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needed the target's vocabulary of 3 tokens, found 2"):
        compare(TARGET, Model([[0.5, 0.5], [0.5, 0.5]]), [Text((0, 1), 1)])


@pytest.mark.parametrize(
    ("tree", "tau"),
    [
        (TreeShape(1, 1), 6 / 4),  # rounds: 0 0 | 1 | 0 0 | 1
        (TreeShape(1, 7), 6 / 2),  # rounds: 0 0 1 | 0 0 1
        (TreeShape(2, 7), 6 / 1),
    ],
)
def test_rounds_are_repeated_on_the_text(tree: TreeShape, tau: float) -> None:
    assert tau_on_texts([(0, 0, 1, 0, 0, 1)], tree) == tau


def test_with_prompts_the_first_token_is_decided_alone() -> None:
    assert tau_with_prompts([(0, 0, 1, 0, 0, 1)], TreeShape(1, 7)) == 6 / 3  # rounds: 0 | 0 1 | 0 0 1
    assert tau_with_prompts([(0,), (0,)], TreeShape(1, 7)) == 1
    assert tau_with_prompts([], TreeShape(1, 7)) == 0


def test_tau_of_independent_tokens_is_the_geometric_sum() -> None:
    assert tau_of_rate(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert tau_of_rate(1.0, 4) == 5 and tau_of_rate(0.0, 4) == 1
    assert (TreeShape(2, 3).nodes, TreeShape(1, 3).nodes) == (14, 3)


def test_a_speedup_needs_tau_above_the_ratio_of_the_rounds() -> None:
    assert RoundTimes(plain=10.0, drafted=20.0, waiting=4.0).speedup(3.0) == 1.5


def test_the_report_has_predictions_beside_measurements() -> None:
    compared = compare(TARGET, DRAFT, [Text((0, 1, 2, 2), 1)])
    report = AgreementReport("two models", 7, 7, 1.0, {"texts": compared, "the target's answers": compared})
    assert "| texts | chain of 4 | 4 | 1.50 |" in markdown(report) and "measured τ" not in markdown(report)
    report.measured = Measured(RoundTimes(0.01, 0.02, 0.004), 1.4, 0.7, 0.75, "3 / 0 / 0")
    text = markdown(report)
    assert "| at most 7 nodes, 7 deep | 1.50 | 1.40 | 1.00 | 0.75 | 0.70 | 3 / 0 / 0 | 10.00 | 20.00 | 4.00 |" in text
    assert "| texts | chain of 4 | 4 | 1.50 | 1.49 | 0.75 |" in text
    assert json.loads(report.to_json())["measured"]["tau"] == 1.4


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.jsonl", '{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.jsonl", '{"question": "one?"}\n', ["one?"]),
        ("a.txt", "one\n\ntwo\n", ["one", "two"]),
        ("a.txt", "one\u2028two\n", ["one\u2028two"]),
        ("a.jsonl", '{"text": "one\u2028two"}\n{"text": ""}\n{"text": "three"}\n', ["one\u2028two", "three"]),
    ],
)
def test_texts_are_read_from_several_formats(name: str, content: str, texts: list[str], tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    assert list(read_texts(file)) == texts


@pytest.mark.parametrize(("line", "found"), [("{", "needed JSON"), ('{"text": 5}', "text: needed a text .*, found 5")])
def test_the_line_that_is_no_text_is_named(line: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(ConfigurationError, match=f"FILE .*a.jsonl, line 2: {found}"):
        list(read_texts(file))


def test_pairs_have_a_source_and_a_text(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"fr": "un", "en": "one"}\n{"fr": "deux", "en": "two"}\n')
    assert read_pairs(file, "fr, en", 1) == [Pair("one", "un")] and read_pairs(file, "en,fr", 2)[1].source == "two"
    assert Pair("one", "un").prompt == "un" and Pair("one").prompt == "one"
    with pytest.raises(ConfigurationError, match="--fields: 'fr' is refused"):
        read_pairs(file, "fr", 1)
    with pytest.raises(ConfigurationError, match="line 1: de: needed a text"):
        read_pairs(file, "fr,de", 1)


def test_wrong_files_and_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ConfigurationError, match="needed at least one line"):
        list(read_texts(tmp_path / "empty.txt"))
    with pytest.raises(ConfigurationError, match="needed a readable file"):
        list(read_texts(tmp_path / "missing.txt"))
    with pytest.raises(ConfigurationError, match="--temperature: 0 is refused"):
        AgreementOptions(file=tmp_path, temperature=0)
    with pytest.raises(ConfigurationError, match="--texts: 0 is refused"):
        AgreementOptions(file=tmp_path, texts=0)
