"""Capacity simulations: theory where it is known, and the files that they write."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from cluster.core.errors import ConfigurationError
from deploy.simulation.capacity.capacity_run import CapacityRun, simulate_capacity
from deploy.simulation.capacity.options import CapacityOptions
from deploy.simulation.capacity.report import markdown, write
from deploy.simulation.capacity.step_times import MeasuredTimes, measured_times, of_measured

STEP_SECONDS, CALL_SECONDS = 0.02, 0.0005


def run(*, drafts: bool = False, step: float = STEP_SECONDS, depth: float = 0.0, **options: object) -> CapacityRun:
    """One target with a constant step time and a drafter that takes `depth` seconds for each level of a tree."""
    values: dict[str, object] = {"targets": 1, "drafters": 1, "lengths": "16:40", "seconds": 6.0, "network_delay": 0.0}
    steps = ((1, 1, step), (1, 64, step))
    times = of_measured(MeasuredTimes(steps=steps, draft_call_seconds=CALL_SECONDS, draft_depth_seconds=depth))
    return simulate_capacity(CapacityOptions(**(values | options)), times, lambda _, __: None, drafts=drafts)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_plain_decoding_commits_one_token_per_step_and_request(in_flight: int) -> None:
    found = run(in_flight=in_flight)
    assert found.tokens_per_step == 1.0
    assert found.tokens_per_second == pytest.approx(in_flight / STEP_SECONDS, rel=0.05)
    assert found.per_token["p50"] == pytest.approx(STEP_SECONDS, rel=0.02)
    assert found.target_idle < 0.03


def test_a_free_drafter_that_is_always_right_multiplies_the_speed() -> None:
    plain = run(in_flight=1)
    drafted = run(in_flight=1, drafts=True, acceptance=1.0, max_nodes=4)
    assert drafted.tokens_per_step > 4
    assert drafted.tokens_per_second > 3.5 * plain.tokens_per_second
    assert drafted.gpus == 2
    assert drafted.drafter_idle > 0.9


def test_a_drafter_that_is_always_wrong_costs_next_to_nothing() -> None:
    plain, drafted = run(in_flight=2), run(in_flight=2, drafts=True, acceptance=0.0)
    assert drafted.tokens_per_second > 0.95 * plain.tokens_per_second


RIGHT: dict[str, Any] = {"in_flight": 1, "drafts": True, "acceptance": 1.0, "max_nodes": 4, "controller": "off"}
"""Four levels of right drafts for one answer: five tokens in a round, which is a step and the time of drafts."""
LEVEL_SECONDS = 0.003
ASKED = STEP_SECONDS + CALL_SECONDS + 4 * LEVEL_SECONDS


def test_drafts_on_rank_0_take_its_time_and_no_gpu_of_their_own() -> None:
    found = run(**RIGHT, depth=LEVEL_SECONDS, placement="target")
    assert (found.gpus, found.drafter_idle) == (1, 0.0)
    assert found.target_idle < 0.03
    assert found.per_token["p50"] == pytest.approx(ASKED / 5, rel=0.1)


def test_what_is_drafted_ahead_takes_no_time_and_a_distant_drafter_takes_that_of_two_messages() -> None:
    asked, ahead = (run(**RIGHT, depth=LEVEL_SECONDS, ahead=ahead) for ahead in (False, True))
    far = run(**RIGHT, depth=LEVEL_SECONDS, ahead=True, drafter_delay=0.01)
    rounds = (ASKED, STEP_SECONDS + CALL_SECONDS, STEP_SECONDS + CALL_SECONDS + 0.02)
    for found, seconds in zip((asked, ahead, far), rounds, strict=True):
        assert found.per_token["p50"] == pytest.approx(seconds / 5, rel=0.1)
    wrong = run(**(RIGHT | {"acceptance": 0.0}), depth=LEVEL_SECONDS, ahead=True)
    assert wrong.per_token["p50"] == pytest.approx(ASKED, rel=0.1)  # what follows a wrong draft is drafted anew


def test_an_idle_cluster_serves_what_arrives() -> None:
    found = run(arrivals=2.0, targets=2, seconds=20.0)
    assert found.requests_per_second == pytest.approx(2.0, rel=0.5)
    assert found.target_idle > 0.3
    assert found.refused == 0


def test_a_sample_scales_to_thousands_of_gpus() -> None:
    found = run(in_flight=2000, targets=1000, ranks=4, sample=1)
    assert found.gpus == 4000
    assert found.tokens_per_second == pytest.approx(2000 / STEP_SECONDS, rel=0.05)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run(arrivals=5.0, lengths="32:16:0.5", drafts=True) == run(arrivals=5.0, lengths="32:16:0.5", drafts=True)


def test_measured_times_need_no_import_that_takes_seconds(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text('{"steps": [[1, 1, 0.02]]}')
    arguments = f"capacity --targets 1 --in-flight 1 --lengths 16:4 --seconds 0.1 --step-times {file}".split()
    code = (
        f"import sys; from deploy.simulation.commands import simulate; simulate({arguments!r}, standalone_mode=False); "
        "print('imported:', *({'torch', 'transformers'} & sys.modules.keys()))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "| plain |" in ended.stdout
    assert ended.stdout.split()[-1] == "imported:"


def test_json_markdown_and_a_plot_are_written(tmp_path: Path) -> None:
    options = CapacityOptions(targets=1, drafters=1)
    runs = {"drafts": run(in_flight=1, drafts=True), "plain": run(in_flight=1)}
    files = write(tmp_path / "out", options, runs)
    assert [file.name for file in files][:2] == ["capacity.json", "capacity.md"]
    assert json.loads(files[0].read_text())["runs"]["plain"]["tokens_per_step"] == 1.0
    assert "Per GPU, drafts give" in markdown(options, runs)
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("placement", ["drafter", "target"])
def test_the_report_of_plain_decoding_names_no_drafts(placement: Literal["drafter", "target"]) -> None:
    options = CapacityOptions(drafters=0, placement=placement)
    assert "4 targets × 1 GPUs, 0 drafters, 8 requests/s" in markdown(options, {"plain": run(in_flight=1)})


def test_wrong_times_and_options_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text('{"steps": []}')
    with pytest.raises(ConfigurationError, match="--step-times"):
        measured_times(file)
    with pytest.raises(ConfigurationError, match="--lengths"):
        CapacityOptions(lengths="10")
    with pytest.raises(ConfigurationError, match="--sample"):
        CapacityOptions(targets=2, sample=3)
    with pytest.raises(ConfigurationError, match="--max-nodes: 65 is refused; it must be at most 64"):
        CapacityOptions(max_nodes=65)
    with pytest.raises(ConfigurationError, match="--acceptance"):
        CapacityOptions(acceptance=1.5)


@pytest.mark.parametrize("name", ["arrivals", "seconds", "network_delay", "drafter_delay"])
def test_an_endless_load_or_time_is_refused(name: str) -> None:
    """A simulation of it would not end."""
    for value in (math.inf, math.nan, -1.0):
        with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')}: {value} is refused"):
            CapacityOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", ["inf:1", "1:nan", "nan:1"])
def test_endless_texts_are_refused(lengths: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--lengths: '{lengths}' is refused"):
        CapacityOptions(lengths=lengths)
