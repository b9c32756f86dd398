"""The quality of answers stands beside their speed, and costs follow from the recorded passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.config.target_section import TargetSection
from deploy.bench.contestants.answers import Arrival, BenchAnswer, BenchPass, ResourceUse
from deploy.bench.evaluation.evaluation import Evaluation, Scoreboard
from deploy.bench.evaluation.report import markdown, points, roofline, status
from deploy.bench.evaluation.tasks.arithmetic import score_arithmetic
from deploy.bench.evaluation.tasks.task import Example, Task
from deploy.bench.evaluation.token_costs import token_costs
from deploy.bench.measuring.competitors import Skipped
from deploy.bench.measuring.costs import kv_layers
from deploy.bench.measuring.results import BenchResults, Cell, CellResult, Cost, Entry, Exactness, KvLayer
from deploy.bench.measuring.roofs import Roofs
from tests.unit.deploy.bench.race.test_report import MACHINE
from tests.zoo.configs import tiny_config

CELL = Cell("sums", 1, 0.0)
EXAMPLES = (Example("1+1?", "", ("#### 2",)), Example("2+1?", "", ("#### 3",)))
TASK = Task("sums", EXAMPLES, 4, score_arithmetic, ("Sums.",))
KV = (KvLayer(4), KvLayer(4, 5))
COST = Cost(read_bytes=1000, draft_bytes=100, target_flops=10.0, draft_flops=1.0, kv_layers=KV)


def answer(text: str, *counts: int, drafted: int = 0, lossless: bool = True) -> BenchAnswer:
    """An answer with a text, and one commit for each number of tokens."""
    arrivals = tuple(Arrival(0.5 * (index + 1), count) for index, count in enumerate(counts))
    tokens = tuple(map(ord, text))[: sum(counts)]
    return BenchAnswer(tokens, arrivals, sum(counts), drafted, len(counts), lossless, text, prompt_tokens=4)


def one_pass(*answers: BenchAnswer, seconds: float = 2.0, proposed: float = 0.0) -> BenchPass:
    steps = float(max(len(found.arrivals) for found in answers))
    counters = {"target_passes": steps, "proposed_tokens": proposed, "target_seconds": 0.5, "drafter_seconds": 0.1}
    return BenchPass(answers, seconds, counters, ResourceUse(1.5, {"python 1": 3 << 20}, None))


PLAIN = one_pass(answer("is 2", 1, 1, 1, 1), answer("is 3", 1, 1, 1, 1))


def evaluation(*entries: tuple[Entry, BenchPass, Exactness], plain: BenchPass | None = PLAIN) -> Evaluation:
    results = BenchResults("tiny", MACHINE, "pilotfish bench tasks", plain_cost=COST)
    for entry, own, exactness in entries:
        results.entries.append(entry)
        results.cells.append(CellResult(entry.name, CELL, (plain, plain) if plain else (), (own,), exactness))
    found = Evaluation(results, (TASK,), Scoreboard({"sums": TASK}), Roofs(1e9, 1e9))
    found.quality.update(results)
    return found


def entry(name: str, *assignments: str, alters: bool = False, baseline: str = "", kind: str = "cluster") -> Entry:
    return Entry(name, kind, assignments, COST, baseline=baseline, alters_target=alters)


def row(text: str, name: str, after: str) -> dict[str, str]:
    """The cells of a line by column."""
    lines = [line for line in text[text.index(after) :].splitlines() if line.startswith("|")]
    head, cells = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (lines[0], next(line for line in lines if line.startswith(f"| {name} |")))
    )
    return dict(zip(head, cells, strict=True))


def test_a_lossless_method_is_equal_and_its_speed_stands_beside_the_quality() -> None:
    own = one_pass(answer("is 2", 2, 2, drafted=2), answer("is 3", 2, 2, drafted=2), seconds=1.0, proposed=8.0)
    found = evaluation((entry("lookup"), own, Exactness(equal=2)))
    cells = row(markdown(found), "lookup", "## sums, batch 1")
    assert (cells["exact match, %"], cells["Δ exact match, %"]) == ("100.00", "+0.00")
    assert (cells["differ from plain"], cells["status"], cells["chrF to plain"]) == ("0 of 2", "equal", "100.0")
    assert (cells["÷ plain"], cells["tokens/s"], cells["cut at the limit"]) == ("2.00", "8.00", "2 of 2")
    assert row(markdown(found), "plain", "## sums")["exact match, %"] == "100.00"


def test_the_loss_of_another_target_is_measured_and_its_methods_are_compared_with_it() -> None:
    worse = one_pass(answer("is 2", 1, 1, 1, 1), answer("is 7", 1, 1, 1, 1))
    found = evaluation(
        (entry("int8", "target.quantization=int8", "draft.method=none", alters=True), worse, Exactness(1, 0, 1)),
        (entry("int8 ngram", "target.quantization=int8", "draft.method=ngram", alters=True), worse, Exactness(1, 0, 1)),
    )
    cells = row(markdown(found), "int8 ngram", "## sums")
    assert (cells["Δ exact match, %"], cells["differ from plain"], cells["status"]) == (
        "-50.00",
        "1 of 2",
        "other target",
    )
    assert cells["differ from the same target without drafts"] == "0"
    assert row(markdown(found), "int8", "## sums")["differ from the same target without drafts"] == "–"
    assert float(cells["chrF to plain"]) < 100


def test_requests_of_another_kind_have_their_own_plain_line() -> None:
    own = one_pass(answer("is 2", 4), answer("is 3", 4))
    found = evaluation((entry("beams", baseline="4 beams"), own, Exactness(equal=2)))
    assert [line.name for line in found.lines(1, 0.0)] == ["plain, 4 beams", "beams"]


def test_a_server_alone_has_scores_and_no_comparison() -> None:
    own = one_pass(answer("is 2", 4), answer("is 3", 4))
    found = evaluation((entry("http://server", kind="endpoint"), own, Exactness()), plain=None)
    cells = row(markdown(found), "http://server", "## sums")
    assert (cells["exact match, %"], cells["differ from plain"], cells["÷ plain"]) == ("100.00", "–", "–")
    assert "plain" not in [line.name for line in found.lines(1, 0.0)]


@pytest.mark.parametrize(
    ("exactness", "lossless", "expected"),
    [
        (Exactness(equal=2), True, "equal"),
        (Exactness(1, 1), True, "rounding"),
        (Exactness(1, 0, 1), True, "WRONG"),
        (Exactness(not_compared=2), True, ""),
        (Exactness(equal=2), False, "LOSSY"),
    ],
)
def test_a_status_says_how_answers_relate_to_plain_decoding(
    exactness: Exactness, lossless: bool, expected: str
) -> None:
    own = one_pass(answer("is 2", 4, lossless=lossless))
    assert status(entry("one"), [CellResult("one", CELL, (), (own,), exactness)]) == expected


def test_costs_follow_from_passes_and_lengths() -> None:
    own = one_pass(answer("is 2", 1, 3, drafted=3), proposed=6.0)
    found = token_costs(COST, [own])
    assert (found.steps, found.target_flops, found.draft_flops) == (0.5, 10.0 * 5 / 4, 1.0 * 6 / 4)
    # two passes of the target's weights, six of the draft's
    assert found.weight_bytes == (2 * 1000 + 6 * 100) / 4
    # the second step reads 4 + 1 tokens in one layer, and at most 5 in the other
    assert found.kv_bytes == 4 * (5 + 5) / 4
    assert (found.cpu_seconds, found.busy_seconds, found.joules) == (375.0, pytest.approx(150.0), None)
    assert found.peak_bytes == 3 << 20
    # prompt 4, two steps, three drafted tokens; six proposed ones
    flops = 10.0 * (4 + 2 + 3) + 6
    assert found.flops_per_second == flops / 2.0
    assert found.intensity == pytest.approx(flops / (2600 + 40))


def test_a_window_bounds_what_a_layer_reads_and_beams_multiply() -> None:
    long = one_pass(replace(answer("is 2", 1, 1), prompt_tokens=100))
    one = token_costs(replace(COST, kv_layers=(KvLayer(4, 5),)), [long])
    assert one.kv_bytes == 4 * 5 / 2
    # four beams: the second and third steps read 5 and 6 tokens, although all tokens arrive at the end
    beams = one_pass(replace(answer("is 2", 3), steps=3))
    assert token_costs(replace(COST, kv_layers=(KvLayer(4),), sequences=4), [beams]).kv_bytes == 4 * 4 * (5 + 6) / 3


@pytest.mark.parametrize(("family", "attend"), [("qwen3_next", 1), ("lfm2", 2), ("falcon_h1", 4), ("nemotron_h", 1)])
def test_layers_that_do_not_attend_have_no_keys_and_values_to_read(family: str, attend: int, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    section = TargetSection(path=str(tmp_path), dtype="float32")
    assert len(kv_layers(tmp_path, section)) == attend


def test_unknown_costs_stay_unknown() -> None:
    own = BenchPass((BenchAnswer((), (Arrival(1.0, 4),), 4, text="is 2"),), 1.0)
    found = token_costs(COST, [own])
    assert (found.steps, found.kv_bytes, found.weight_bytes, found.intensity, found.cpu_seconds) == (None,) * 5
    assert token_costs(COST, []).steps is None


def test_every_task_has_tables_of_speed_and_of_cost() -> None:
    own = one_pass(answer("is 2", 2, 2, drafted=2), answer("is 3", 2, 2, drafted=2), seconds=1.0, proposed=8.0)
    text = markdown(evaluation((entry("lookup"), own, Exactness(equal=2))))
    cost = "### Cost of sums, batch 1"
    speed = row(text, "lookup", cost)
    assert (speed["equal to plain"], speed["÷ plain"], speed["÷ plain, per device"]) == ("2 of 2", "2.00", "2.00")
    assert speed["TTFT p50 / p90 / p99, ms"] == "500.0 / 500.0 / 500.0"
    assert speed["TPOT p50 / p90 / p99, ms"] == "250.0 / 250.0 / 250.0"
    work = row(text[text.index(cost) :], "lookup", "| competitor | τ")
    assert (work["τ"], work["steps per token"], work["CPU s"], work["peak, MiB"]) == ("2.00", "0.50", "187.50", "3")
    assert work["weights, MB"] == "0.00" and "J" not in work  # no device reported energy
    assert "Cost of all tasks" not in text  # there is one


def test_a_task_has_the_costs_of_its_own_passes_and_all_tasks_have_a_table_together() -> None:
    slow, fast = (one_pass(answer("is 2", 2, 2), answer("is 3", 2, 2), seconds=seconds) for seconds in (4.0, 1.0))
    found = evaluation((entry("lookup"), slow, Exactness(equal=2)))
    other = replace(TASK, name="more sums")
    found.tasks = (*found.tasks, other)
    found.quality.tasks = {task.name: task for task in found.tasks}
    cell = replace(found.results.cells[0], cell=replace(CELL, task="more sums"), passes=(fast,))
    found.results.cells.append(cell)
    found.quality.update(found.results)
    text = markdown(found)
    rates = [row(text, "lookup", f"## Cost of {name}")["tokens/s"] for name in ("sums", "more sums", "all tasks")]
    assert rates == ["2.00", "8.00", "3.20"]


def test_what_did_not_run_is_listed() -> None:
    found = evaluation((entry("lookup"), PLAIN, Exactness(equal=2)))
    found.results.skipped.append(Skipped("code", "it runs what the model writes"))
    assert "| code | it runs what the model writes |" in markdown(found)


def test_json_holds_quality_and_raw_figures() -> None:
    found = json.loads(evaluation((entry("lookup"), PLAIN, Exactness(equal=2))).to_json())
    assert {quality["competitor"] for quality in found["quality"]} == {"plain", "lookup"}
    assert found["quality"][0]["scores"] == {"exact match, %": 100.0}
    assert found["roofs"]["bytes_per_second"] == 1e9 and found["cells"][0]["passes"][0]["answers"][0]["text"] == "is 2"


def test_the_roofline_has_a_point_for_plain_and_for_each_method() -> None:
    found = evaluation((entry("lookup"), one_pass(answer("is 2", 4), answer("is 3", 4)), Exactness(equal=2)))
    assert [point.name for point in points(found)] == ["plain, batch 1", "lookup, batch 1"]
    pytest.importorskip("matplotlib")
    picture = roofline(found)
    assert picture is not None and picture.startswith(b"\x89PNG")
    found.roofs = None
    assert roofline(found) is None


def test_an_answer_without_a_text_is_decoded() -> None:
    board = Scoreboard({"sums": TASK}, decode=lambda tokens: "".join(map(chr, tokens)))
    results = evaluation((entry("peer", kind="peer"), PLAIN, Exactness(equal=2))).results
    silent = tuple(replace(found, text="") for found in PLAIN.answers)
    results.cells[0] = replace(results.cells[0], passes=(replace(PLAIN, answers=silent),))
    board.update(results)
    quality = board.of("peer", CELL)
    assert quality is not None and quality.scores == {"exact match, %": 100.0} and quality.differing == 0
