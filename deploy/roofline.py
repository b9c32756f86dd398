"""The roofline of a GPU, and how many prompt tokens a step takes beside decoding because of it.

A product of few tokens takes as long as reading its weights. Beyond some number of tokens it takes as long as its
operations (Williams et al. 2009). Prompt tokens up to that number are almost free beside decoding. Each further one
makes every sequence that decodes wait, and more tokens in a step save the prompt little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from cluster.core.config.model_section import DTYPE_BYTES
from cluster.core.config.sections import Configuration
from workers.model.stored.source import may_stay_stored
from workers.model.weight_files import config_values


@dataclass(frozen=True, slots=True)
class Roofline:
    """The peaks of a GPU."""

    name: str
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    """By the type of the numbers that are multiplied, as `target.dtype`."""

    def balanced_tokens(self, dtype: str, weight_bytes: float) -> float:
        """Tokens for which a product takes as long to compute as to read its weights, of so many bytes each."""
        return self.flops_per_second[dtype] * weight_bytes / (2 * self.bytes_per_second)


H100 = Roofline(
    "H100",
    bytes_per_second=3.35e12,  # NVIDIA's data sheet, H100 SXM
    # NVIDIA's data sheet, H100 SXM: 16 bits without sparsity; 32 bits without tensor cores
    flops_per_second={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
)
"""The GPU by whose peaks the prompt tokens are chosen. Nobody knows before the start which GPU a target gets."""

BALANCED_PROMPTS = 4
"""Prompt tokens beside decoding, ÷ those for which products are balanced, or ÷ `DECODING` if these are more.

`pilotfish simulate step --prompts`, Llama-3.1-8B beside 32 sequences, whose steps take 9.5 ms without a prompt. With
256, 512, 1,024 and 2,048 prompt tokens in a step, a token waits 18, 28, 50 and 92 ms, and a prompt of 16,384 tokens
takes 1,176, 903, 794 and 737 ms. For one of eight ranks of Llama-3.3-70B, whose sums take time in each step, it takes
1,989, 1,334, 996 and 854 ms. Once, the prompt takes 60% and 133% longer than with 2,048; twice, 23% and 56%; four
times, 8% and 17%, while a token waits little more than half as long.
"""
DECODING = 32
"""Sequences that are taken to decode beside a prompt: those of the prediction above.

A step without a prompt takes what its products take to compute where that is more than to read the weights: stored
weights in 8 bits are read in the time of ten tokens in float32. Prompt tokens are then counted against these sequences,
or a prompt would take as long for their products as for its own.
"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names for the number of experts of a layer in `config.json`."""


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a layer, and those that each token chooses."""

    count: int
    chosen: int


def prompt_tokens(configuration: Configuration) -> int:
    """Prompt tokens of a step on a GPU in which other sequences decode: those of the setting, if it is set."""
    scheduler = configuration.scheduler
    return scheduler.max_prompt_tokens or min(_balanced_prompts(configuration), scheduler.max_step_tokens)


def with_prompt_tokens(configuration: Configuration) -> Configuration:
    """The configuration with `scheduler.max_prompt_tokens` set, if the target's device is a GPU."""
    if configuration.target.device != "cuda":
        return configuration
    bound = {"max_prompt_tokens": prompt_tokens(configuration)}
    return configuration.model_copy(update={"scheduler": configuration.scheduler.model_copy(update=bound)})


def describe_prompt_tokens(configuration: Configuration) -> str:
    """Prompt tokens of a step on a GPU in which other sequences decode, in words, and why there are so many."""
    target, scheduler, gpu = configuration.target, configuration.scheduler, H100
    begin = f"prompts beside decoding: at most {prompt_tokens(configuration)} tokens of a step"
    if scheduler.max_prompt_tokens is not None:
        return f"{begin}, as scheduler.max_prompt_tokens says"
    size, is_known = _weight_bytes(configuration), bool(model_values(configuration))
    form = target.dtype if size == DTYPE_BYTES[target.dtype] else "8 bits or fewer"
    experts, balanced = _experts(configuration), _balanced(configuration)
    spread = f" × {experts.count} ÷ {experts.chosen} experts that a token chooses" if experts else ""
    computed = f"an {gpu.name} computes products ({gpu.flops_per_second[target.dtype] / 1e12:g} TFLOP/s)"
    read = f"it reads weights in {form} ({gpu.bytes_per_second / 1e12:g} TB/s){spread}"
    if balanced < DECODING:
        reason = f"{DECODING} sequences that decode beside them, for which {computed} longer than {read}"
    else:
        reason = f"{gpu.balanced_tokens(target.dtype, size):.0f} for which {computed} as long as {read}"
    return (
        f"{begin} (scheduler.max_prompt_tokens is unset): {BALANCED_PROMPTS} × the {reason}, as a power of two and "
        f"within scheduler.max_step_tokens ({scheduler.max_step_tokens})"
        + ("" if is_known else "; a mixture of experts takes more, and the model is not here to tell")
    )


def _balanced_prompts(configuration: Configuration) -> int:
    """The rule: a power of two, whose tiles the kernels fill."""
    return 1 << int(BALANCED_PROMPTS * max(_balanced(configuration), DECODING)).bit_length() - 1


def _balanced(configuration: Configuration) -> float:
    """Tokens of a step for which the target's products take as long to compute as to read the weights."""
    experts = _experts(configuration)
    balanced = H100.balanced_tokens(configuration.target.dtype, _weight_bytes(configuration))
    return balanced if experts is None else balanced * experts.count / experts.chosen


def _weight_bytes(configuration: Configuration) -> int:
    """Bytes of a weight. Stored ones have 8 bits or fewer; those with fewer are multiplied at a lower speed."""
    target = configuration.target
    is_kept = target.quantization == "auto" and target.load_format == "auto" and may_stay_stored(target.path)
    return 1 if is_kept or target.quantization in ("int8", "stored") else DTYPE_BYTES[target.dtype]


def _experts(configuration: Configuration) -> _Experts | None:
    """The experts that `config.json` states; `None` for other models, and where it is not on this machine."""
    values = model_values(configuration)
    counts = [values.get(name) for name in (*_EXPERTS, "num_experts_per_tok")]
    *several, chosen = [count if isinstance(count, int) and count > 0 else 0 for count in counts]
    experts = max(several)
    return _Experts(experts, chosen) if 0 < chosen < experts else None


def model_values(configuration: Configuration) -> Mapping[str, Any]:
    """The target's `config.json`, or the part of it for text; empty where it is not on this machine."""
    values = config_values(Path(expanduser(configuration.target.path)))
    of_text = values.get("text_config")
    return of_text if isinstance(of_text, dict) else values
