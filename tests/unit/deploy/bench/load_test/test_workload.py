"""What a load test sends, and when; the options that are refused."""

from __future__ import annotations

import json
import math
import statistics
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from deploy.bench.load_test.run import arrival_seconds, make_requests
from deploy.bench.options import Endpoint, LoadOptions, parse_goodput


def test_all_requests_are_sent_at_once_without_a_rate() -> None:
    assert arrival_seconds(3, math.inf, 1.0, 0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness: float, variation: float) -> None:
    times = arrival_seconds(20_000, 5.0, burstiness, 1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(variation, rel=0.1)
    assert arrival_seconds(20, 5.0, burstiness, 1) == times[:20]


def test_prompts_take_one_of_each_task_in_turn_and_repeat(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    rows = [("writing", "w"), ("rag", "r1"), ("rag", "r2")]
    file.write_text("".join(json.dumps({"category": task, "turns": [text]}) + "\n" for task, text in rows))
    _, requests, more = islice(make_requests(LoadOptions(prompts=(file,), num_prompts=5, seed=3, max_tokens=7)), 3)
    assert [request.prompt for request in requests] == ["r1", "r2", "w", "r1", "r2"]
    assert [request.prompt for request in more] == ["w", "r1", "r2", "w", "r1"]
    assert [request.seed for request in requests] == [3, 4, 5, 6, 7]
    chat, completion = (requests[0].body(endpoint, "small") for endpoint in Endpoint)
    assert chat["messages"] == [{"role": "user", "content": "r1"}]
    assert completion["prompt"] == "r1" and "messages" not in completion
    assert chat["max_tokens"] == 7 and chat["stream_options"] == {"include_usage": True} and "ignore_eos" not in chat


def test_random_prompts_repeat_from_their_seed() -> None:
    options = LoadOptions(num_prompts=4, random_input_len=9, ignore_eos=True)
    measurements = list(islice(make_requests(options), 3))
    assert [len(requests) for requests in measurements] == [1, 4, 4]
    assert {len(request.prompt.split()) for requests in measurements for request in requests} == {9}
    assert list(islice(make_requests(options), 3)) == measurements
    requests = measurements[1]
    assert requests[0].body(Endpoint.COMPLETIONS, "m")["ignore_eos"] is True


def test_no_measurement_sends_a_prompt_of_another_one_unless_asked_to() -> None:
    measurements = list(islice(make_requests(LoadOptions(num_prompts=8)), 4))
    prompts = [request.prompt for requests in measurements for request in requests]
    assert len(set(prompts)) == len(prompts) == 25
    _, first, second = islice(make_requests(LoadOptions(num_prompts=8, same_prompts=True)), 3)
    assert first == second


def test_goodput_is_written_as_for_vllm() -> None:
    assert parse_goodput(("ttft:500", "tpot:50,e2el:2000")) == {"ttft": 0.5, "tpot": 0.05, "e2el": 2.0}
    assert parse_goodput(()) == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"goodput": ("ttfb:500",)}, "--goodput: 'ttfb:500' is refused; it must be NAME:MS with a name of ttft, tpot"),
        ({"goodput": ("ttft:",)}, "--goodput: 'ttft:' is refused"),
        ({"request_rate": (1.0, 0.0)}, "--request-rate: (1.0, 0.0) is refused; each must be above 0"),
        ({"request_rate": (math.nan,)}, "--request-rate"),
        ({"max_concurrency": (-1,)}, "--max-concurrency: (-1,) is refused; each must be at least 0"),
        ({"num_prompts": 0}, "--num-prompts: 0 is refused; it must be at least 1"),
        ({"burstiness": 0.0}, "--burstiness: 0.0 is refused; it must be above 0"),
        ({"temperature": 3.0}, "--temperature: 3.0 is refused; it must be within 0 and 2"),
        ({"timeout": math.inf}, "--timeout: inf is refused"),
        ({"seed": -1}, "--seed: -1 is refused"),
    ],
)
def test_a_value_out_of_bounds_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        LoadOptions(**values)
    assert words in str(refused.value)
