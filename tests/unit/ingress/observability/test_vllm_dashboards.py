"""After traffic, the metrics have every name that vLLM's Grafana dashboards read, with its labels."""

from __future__ import annotations

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.model_section import GPU_FRACTION
from tests.support.fakes.fake_cluster import all_tokens, configure, request, value_of
from tests.support.fakes.fake_drafters import PerfectDrafter
from tests.support.fakes.fake_target import FakeTarget

HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_per_output_token_seconds",
    "time_to_first_token_seconds",
)
COUNTERS = (
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_drafts",
)
GAUGES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
NAMES = {
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")),
    *(f"vllm:{name}_total" for name in COUNTERS),
    *(f"vllm:{name}" for name in GAUGES),
    "vllm:request_success_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:cache_config_info",
}


@pytest.fixture
async def metrics() -> Metrics:
    """The metrics of a coordinator that has answered two requests."""
    target = FakeTarget()
    metrics = Metrics()
    async with Coordinator(target, [PerfectDrafter(target)], configure(), metrics) as coordinator:
        await all_tokens(coordinator, [request("a", max_tokens=20), request("b", (1, 2, 3), max_tokens=9, n=2)])
    return metrics


def test_every_name_of_the_dashboards_is_exposed_with_model_and_engine(metrics: Metrics) -> None:
    lines = metrics.exposition()[0].decode().splitlines()
    found = {line.partition("{")[0] for line in lines if 'engine="0"' in line and 'model_name="fake"' in line}
    assert found >= NAMES, NAMES - found


def test_each_answer_counts_once_with_its_lengths_and_phases(metrics: Metrics) -> None:
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "generation_tokens"):
        assert value_of(metrics, f"vllm:request_{name}_count") == 3, name
    assert value_of(metrics, "vllm:request_prompt_tokens_sum") == 5 + 3 + 3
    assert value_of(metrics, "vllm:request_generation_tokens_sum") == 20 + 9 + 9
    assert value_of(metrics, "vllm:request_max_num_generation_tokens_sum") == 20 + 9
    assert value_of(metrics, "vllm:request_params_n_sum") == 1 + 2
    assert value_of(metrics, "vllm:request_params_max_tokens_sum") == 20 + 9
    phases = ("queue", "prefill", "decode")
    total = sum(value_of(metrics, f"vllm:request_{phase}_time_seconds_sum") for phase in phases)
    assert total == pytest.approx(value_of(metrics, "vllm:e2e_request_latency_seconds_sum"))


def test_accepted_tokens_are_counted_by_their_position(metrics: Metrics) -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_position = [value_of(metrics, name, position=str(position)) for position in range(8)]
    assert by_position == sorted(by_position, reverse=True)
    assert sum(by_position) == value_of(metrics, "vllm:spec_decode_num_accepted_tokens_total") > 0
    assert by_position[0] <= value_of(metrics, "vllm:spec_decode_num_drafts_total")


def test_a_second_name_has_the_same_samples(metrics: Metrics) -> None:
    first, second = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
    for part in ("count", "sum"):
        assert value_of(metrics, f"{second}_{part}") == value_of(metrics, f"{first}_{part}") > 0


def test_the_kv_cache_is_described(metrics: Metrics) -> None:
    (family,) = [one for one in metrics.registry.collect() if one.name == "vllm:cache_config_info"]
    (sample,) = family.samples
    assert sample.value == 1
    assert sample.labels["block_size"] == "16"
    assert int(sample.labels["num_gpu_blocks"]) > 0
    assert float(sample.labels["gpu_memory_utilization"]) == GPU_FRACTION, "as vLLM says of its default"
