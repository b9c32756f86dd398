"""How many prompt tokens a step takes beside decoding: on a GPU by its roofline, on a CPU as before."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from deploy.coordinator_server import CoordinatorServer
from deploy.roofline import DECODING, H100, describe_prompt_tokens, prompt_tokens, with_prompt_tokens
from deploy.simulation.device import speeds
from tests.support.fakes.fake_cluster import request, tokens_of
from tests.support.fakes.fake_target import FakeTarget
from workers.serve.configuration import load_configuration


def on_gpu(**settings: Any) -> Configuration:
    values = {"target.device": "cuda", "target.dtype": "bfloat16", "scheduler.max_step_tokens": 2048}
    values["target.quantization"] = "none"
    return load_configuration({}, values | {key.replace("__", "."): value for key, value in settings.items()})


def mixture(directory: Path, **config: int) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_products_in_bfloat16_compute_on_an_h100_as_long_as_they_read_for_295_tokens() -> None:
    assert H100.balanced_tokens("bfloat16", 2) == pytest.approx(295.2, abs=0.1)
    assert H100.balanced_tokens("bfloat16", 1) == pytest.approx(147.6, abs=0.1)


@pytest.mark.parametrize(("settings", "tokens"), [
    ({}, 1024),
    ({"target__quantization": "int8"}, 512),
    ({"target__quantization": "stored"}, 512),
    ({"target__dtype": "float32"}, 128),
    ({"target__dtype": "float32", "target__quantization": "int8"}, 128),
    ({"target__dtype": "float32", "target__quantization": "stored"}, 128),
    ({"scheduler__max_step_tokens": 512}, 512),
    ({"scheduler__max_step_tokens": 8192}, 1024),
    ({"scheduler__max_prompt_tokens": 300}, 300),
    ({"scheduler__max_prompt_tokens": 4096}, 4096),
])  # fmt: skip
def test_a_gpu_takes_four_times_the_balanced_tokens_within_a_step_unless_the_setting_says_otherwise(
    settings: dict[str, Any], tokens: int
) -> None:
    assert prompt_tokens(on_gpu(**settings)) == tokens
    assert with_prompt_tokens(on_gpu(**settings)).scheduler.max_prompt_tokens == tokens


@pytest.mark.parametrize(("config", "tokens"), [
    ({"num_experts": 128, "num_experts_per_tok": 8}, 16384),
    ({"num_local_experts": 32, "num_experts_per_tok": 4}, 8192),
    ({"n_routed_experts": 256, "num_experts_per_tok": 8}, 32768),
    ({"num_experts": 0, "num_experts_per_tok": 8}, 1024),
    ({"hidden_size": 4096}, 1024),
])  # fmt: skip
def test_experts_of_which_a_token_chooses_few_need_as_many_times_the_tokens(
    config: dict[str, int], tokens: int, tmp_path: Path
) -> None:
    path = mixture(tmp_path, **config)
    assert prompt_tokens(on_gpu(target__path=path, scheduler__max_step_tokens=65536)) == tokens
    assert prompt_tokens(on_gpu(target__path=path)) == min(tokens, 2048)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quantization", ["none", "int8", "stored"])
def test_a_prompt_takes_most_of_the_products_of_its_steps_whatever_the_weights_are(
    dtype: str, quantization: str
) -> None:
    """The rest is what the sequences beside it take, or reading the weights."""
    tokens = prompt_tokens(on_gpu(target__dtype=dtype, target__quantization=quantization))
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype] if quantization == "none" else 1
    assert tokens > 2 * max(DECODING, H100.balanced_tokens(dtype, size))


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_without_a_gpu_the_configuration_stays_as_it_is(device: str) -> None:
    configuration = on_gpu(target__device=device)
    assert with_prompt_tokens(configuration) is configuration
    assert configuration.scheduler.max_prompt_tokens is None


def test_the_choice_is_explained(tmp_path: Path) -> None:
    said = describe_prompt_tokens(on_gpu(target__path=mixture(tmp_path, hidden_size=1)))
    assert said == (
        "prompts beside decoding: at most 1024 tokens of a step (scheduler.max_prompt_tokens is unset): 4 × the 295 "
        "for which an H100 computes products (989 TFLOP/s) as long as it reads weights in bfloat16 (3.35 TB/s), as a "
        "power of two and within scheduler.max_step_tokens (2048)"
    )
    path = mixture(tmp_path, num_experts=128, num_experts_per_tok=8)
    assert " × 128 ÷ 8 experts that a token chooses, " in describe_prompt_tokens(on_gpu(target__path=path))
    assert "weights in 8 bits or fewer" in describe_prompt_tokens(on_gpu(target__quantization="stored"))
    wide = describe_prompt_tokens(on_gpu(target__quantization="stored", target__dtype="float32"))
    assert (
        "at most 128 tokens of a step (scheduler.max_prompt_tokens is unset): 4 × the 32 sequences that decode beside "
        "them, for which an H100 computes products (67 TFLOP/s) longer than it reads weights in 8 bits or fewer (3.35 "
        "TB/s), as a power of two"
    ) in wide
    unknown = describe_prompt_tokens(on_gpu())
    assert unknown.endswith("; a mixture of experts takes more, and the model is not here to tell")
    given = describe_prompt_tokens(on_gpu(scheduler__max_prompt_tokens=300))
    assert given == "prompts beside decoding: at most 300 tokens of a step, as scheduler.max_prompt_tokens says"


def test_the_simulated_device_has_the_same_peaks() -> None:
    assert speeds.H100.bytes_per_second == H100.bytes_per_second
    assert speeds.H100.flops_per_second == H100.flops_per_second["bfloat16"]


@pytest.mark.parametrize(("device", "most"), [("cuda", 128), ("cpu", 1000)])
async def test_a_coordinator_bounds_prompts_beside_decoding_on_a_gpu_alone(device: str, most: int) -> None:
    target = FakeTarget(block_size=16, blocks=1024, max_context_len=4096, step_delay=0.001)
    configuration = on_gpu(target__device=device, target__dtype="float32", draft__method="none")
    coordinator = CoordinatorServer(configuration, target).coordinator
    first, prompt = request("first", max_tokens=2000), [token % 32 for token in range(1000)]
    async with asyncio.timeout(30), coordinator, aclosing(coordinator.generate(first)) as commits:
        await anext(commits)
        assert len(await tokens_of(coordinator, request("second", prompt, max_tokens=2))) == 2
    pending = [len(row.pending) for batch in target.batches for row in batch.rows if row.sequence_id != "first"]
    assert max(pending) == most
