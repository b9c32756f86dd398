"""What it costs to verify several tokens with a mixture of experts: each token may read the weights of other experts.

The mixture has 64 experts, of which a token takes 8, with random weights. Beside it stands a dense model whose layers
have as many weights as one token of the mixture reads. The controller's choice follows from the measured times.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from cluster.core.config.target_section import TargetSection
from cluster.core.verification import StepSample
from cluster.speculation.goodput import DraftForecast, size_trees
from cluster.speculation.latency import LatencyModel
from tests.bench.decoding import decoding
from tests.bench.options import Options
from tests.bench.report import heading, ratios, spread, table, write

EXPERTS, EACH = 64, 8
VERIFIED, QUICK_VERIFIED = (1, 2, 4, 8, 16), (1, 4)
"""Tokens of one sequence that a step verifies: its last one, and a chain of drafted ones."""
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Probability that a drafted token is accepted if the one before it is."""
DTYPES = ("float32", "bfloat16")
WARM_STEPS, TIMED_STEPS = 3, 9
CONTEXT = tuple(range(3, 67))
_SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
INNER = 384
MODELS: dict[str, PreTrainedConfig] = {
    "mixture": Qwen3MoeConfig(**_SHAPE, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=EACH),
    "dense": Qwen3Config(**_SHAPE, intermediate_size=INNER * EACH),
}

Times = dict[tuple[str, int], list[float]]
"""Seconds of a step by model and verified tokens, one per repetition."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Mixture: verifying several tokens with 8 of 64 experts, against a dense model with as many active weights")
    torch.set_num_threads(os.cpu_count() or 1)
    for dtype in DTYPES:
        verified = QUICK_VERIFIED if options.quick else VERIFIED
        _report(dtype, _measured(options, dtype, verified), verified)


def _measured(options: Options, dtype: str, verified: tuple[int, ...]) -> Times:
    """Step times of both models, which run in turn."""
    times: Times = {}
    steps = 2 if options.quick else TIMED_STEPS
    with tempfile.TemporaryDirectory() as folder:
        sections = {name: _section(options, dtype, config, Path(folder, name)) for name, config in MODELS.items()}
        with decoding(sections["mixture"], 512) as mixture, decoding(sections["dense"], 512) as dense:
            for _ in range(options.repeats):
                for tokens in verified:
                    for name, engine in (("mixture", mixture), ("dense", dense)):
                        seconds = engine.median_step([CONTEXT], tokens, warm=WARM_STEPS, timed=steps)
                        times.setdefault((name, tokens), []).append(seconds)
    return times


def _section(options: Options, dtype: str, config: PreTrainedConfig, directory: Path) -> TargetSection:
    config.architectures = ["Qwen3MoeForCausalLM" if isinstance(config, Qwen3MoeConfig) else "Qwen3ForCausalLM"]
    config.save_pretrained(directory)
    changes = {"path": str(directory), "load_format": "dummy", "dtype": dtype, "device": "cpu"}
    return options.configuration().target.model_copy(update=changes | {"compile": "off", "native": "off"})


def _report(dtype: str, times: Times, verified: tuple[int, ...]) -> None:
    rows: list[list[str]] = []
    for tokens in verified:
        share = EXPERTS * (1 - (1 - EACH / EXPERTS) ** tokens)
        line = [str(tokens), f"{share:.0f}"]
        for name in MODELS:
            seconds = times[name, tokens]
            line += [spread([value * 1e3 for value in seconds], 1), spread(ratios(seconds, times[name, 1]))]
        rows.append(line)
    columns = ("verified", "experts expected", "mixture, ms", "÷ one", "dense, ms", "÷ one")
    table(columns, rows)
    for name in MODELS:
        samples = [StepSample(1, tokens, statistics.median(times[name, tokens])) for tokens in verified]
        chosen = [_drafted(samples, acceptance) for acceptance in ACCEPTANCES]
        choices = ", ".join(f"{acceptance}: {nodes}" for acceptance, nodes in zip(ACCEPTANCES, chosen, strict=True))
        write(f"{dtype}, {name}: drafted tokens that the controller asks for, by acceptance, free drafts: {choices}")


def _drafted(samples: list[StepSample], acceptance: float) -> int:
    """Tokens that the controller drafts for one sequence, if drafts take no time."""
    most = samples[-1].tokens - 1
    forecast = DraftForecast(tuple(acceptance**depth for depth in range(1, most + 1)), tuple(range(1, most + 1)), most)
    return size_trees([forecast], LatencyModel.of_profile(samples), LatencyModel(floor_seconds=1e-6)).nodes[0]
