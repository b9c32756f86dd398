"""Settings of the target: the model, its KV cache, its replicas and ranks, and what it shows to drafters."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cluster.core.answer_format_rows import call_format_names, reasoning_format_names
from cluster.core.config.base import UNSHARED, Choice, PluginHost, Positive, Seconds, Section, Taps
from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.config.server import AutoscalingSection


class KvSection(PoolSection):
    """The KV cache of the target: the pool, the prefix cache, and the tiers for evicted blocks."""

    dtype: Literal["auto", "int8", "fp8"] = "auto"
    """LOSSY unless `auto`, which is the target's own type. `int8` and `fp8` store keys and values in 8 bits, with a
    scale per token and KV head."""
    prefix_cache: bool = True
    """Whether full blocks of finished sequences stay in the pool, to be reused by sequences with the same prefix."""
    host_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory of each rank for blocks evicted from the pool, in bytes; 0 drops such blocks."""
    disk_directory: str | None = None
    """Directory for blocks evicted from host memory, unless the disk is too slow; unset drops such blocks."""
    disk_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes that each rank stores in `disk_directory`."""

    sequences: Annotated[Annotated[int, Field(ge=1, le=4096)] | None, UNSHARED] = None
    """Number of sequences whose recurrent states the pool holds, at least `scheduler.max_sequences`, which is the
    default. For models with recurrent layers."""
    step_tokens: Annotated[Annotated[int, Field(ge=16, le=65536)] | None, UNSHARED] = None
    """Number of tokens for whose activations the pool leaves memory on a GPU; unset: `scheduler.max_step_tokens`."""
    prefix_states: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Number of recurrent states that the pool keeps at the ends of cached blocks, from which sequences with the same
    prefix begin; unset: two for each of `sequences`."""

    @model_validator(mode="after")
    def _check(self) -> KvSection:
        if not self.prefix_cache and (self.host_bytes or self.disk_directory):
            raise ValueError("prefix_cache (False) must be true where host_bytes or disk_directory is set")
        return self


class EvidenceSection(Section):
    """What the target shows to drafters beyond committed tokens. The selected drafting methods set it."""

    taps: Taps = ()
    """Numbers of decoder layers after which hidden states are taken: 0 is the embedding, -1 the last layer's output,
    `middle` half of all layers."""
    top: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of most probable tokens that are taken at the root and at each accepted node of a draft tree."""
    decisions: bool = False
    """Whether the decisions at all nodes of a draft tree are taken."""
    is_sent: bool = False
    """Whether verdicts bring the evidence, for drafters in other processes."""
    fusion: str | None = None
    """Directory of the draft whose first matrix the target applies to the taps, in their order. Verdicts then bring the
    product for each position in place of the taps."""

    @property
    def any(self) -> bool:
        """Whether anything is taken."""
        return bool(self.taps or self.top or self.decisions)


class TargetSection(ModelSection, PluginHost):
    """The target model, which decides every token of an answer. Each acceptance rule has its own subsection."""

    quantization: Literal["auto", "none", "int8", "stored"] = "auto"  # type: ignore[assignment] # settled before loading
    """`auto` keeps a checkpoint's bits where its format is read, its ranks divide it and the device multiplies it;
    `stored` keeps them or is refused; `none` de-quantizes them. `int8` rounds linear layers to 8 bits, and answers are
    those of the rounded model."""
    served_name: str | None = None
    """Model name that clients send; unset takes the last part of `path`."""
    aliases: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=64)] = ()
    """Further names that clients may send for the model. Its answers have the first name."""
    tool_parser: str = "auto"
    """Form of the model's tool calls, by vLLM's name of their parser; `auto` takes it from the tokenizer's
    `response_template`, else from the chat template."""
    reasoning_parser: str = "auto"
    """Form of the model's reasoning, by vLLM's name of its parser; `auto`: as for `tool_parser`; `none`: reasoning is
    part of the content."""
    replicas: Annotated[int, Field(ge=1, le=1024), UNSHARED] = 1
    """Number of targets. Each has its own coordinator and ranks, and answers a part of the requests."""
    autoscaling: Annotated[AutoscalingSection, UNSHARED] = AutoscalingSection()
    """How the number of replicas changes with the load."""
    node_resource: Annotated[str | None, UNSHARED] = None
    """Custom Ray resource of the nodes that targets run on; unset: any node with enough cores and GPUs."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks that share each layer. It must divide the number of KV heads, or be a multiple of that number and
    at most the number of attention heads: several ranks then hold the same KV head, and divide the heads that read it.
    Some families, as OLMo 2, need a divisor of the number of attention heads, too."""
    enable_expert_parallel: bool = False
    """Whether each rank holds whole experts of a mixture, instead of a part of each. `tensor_parallel` must divide
    their number; with one rank this changes nothing."""
    span_nodes: bool = False
    """Whether the ranks of a target may be on several nodes, where no node has enough GPUs or cores for all of them."""
    max_context_len: Positive | None = None
    """Longest sequence of prompt and answer, in tokens; unset takes the model's own bound."""
    acceptance: str = "coupled"
    """Name of the acceptance rule. `coupled` accepts what the target decides, so drafts change no token. `rejection`
    and `block` keep the distribution, but for one seed the text depends on the drafts. Other rules may be LOSSY."""
    trial: Choice[Literal["on", "off"]] = "on"
    """LOSSY if `off`: whether a model is refused if its logits in steps differ from those of one dense pass."""
    attention_backend: str = "auto"
    """Name of the attention backend where Pilotfish's CPU kernels do not compute the layers, as on GPUs; one that the
    model or the device does not support is refused. `auto` takes the most preferred one that agrees with the reference
    on the device. `flash` computes prompt chunks of more than 512 tokens (`scheduler.max_step_tokens`); it has not run
    on GPUs yet."""
    symmetric_memory: Choice[Literal["off", "on"]] = "off"
    """Whether ranks on GPUs of one host sum up to 10 MiB through PyTorch's symmetric memory, if all of them pass a
    trial; else a warning says why not. It has not run on GPUs yet."""
    step_ahead: Choice[Literal["off", "on"]] = "off"
    """Whether a target on one GPU launches a step before its rows come, while nearly all steps have come as they were
    expected. No token depends on it; with several ranks and on a CPU it has no effect. It has not run on GPUs yet."""
    threads: Annotated[int, Field(ge=0), UNSHARED] = 0
    """Intra-op threads of each rank on CPU; 0 lets the placement choose."""
    step_timeout_seconds: Seconds = 120.0
    """Longest wait for a step, in seconds. Then its sequences are sent again, and a worker that hangs is replaced."""
    standby: Literal["auto"] | bool = "auto"
    """Whether spare processes with loaded libraries wait, so that a lost target serves again sooner. Not for GPUs.

    With `auto`, one waits for all replicas where `pilotfish serve` starts Ray and a target has one rank, and none
    elsewhere. With `true`, each rank elsewhere has one, too.
    """
    packed_bytes: Annotated[int, Field(ge=0)] = 4 << 30
    """Most bytes of weights, packed for the CPU kernels, that `compile_directory` keeps for faster starts; 0: none."""
    kv: KvSection = KvSection()
    """The KV cache on each rank."""
    evidence: EvidenceSection = EvidenceSection()
    """What the target shows to drafters."""

    @model_validator(mode="after")
    def _check_replicas(self) -> TargetSection:
        most = self.autoscaling.max_replicas
        if 0 < most < self.replicas:
            raise ValueError(f"autoscaling.max_replicas ({most}) must be 0 or at least replicas ({self.replicas})")
        return self

    @model_validator(mode="after")
    def _check_parsers(self) -> TargetSection:
        for name, value, known, others in (
            ("tool_parser", self.tool_parser, call_format_names(), ("auto",)),
            ("reasoning_parser", self.reasoning_parser, reasoning_format_names(), ("auto", "none")),
        ):
            if value not in (*others, *known):
                raise ValueError(f"{name} ({value}) must be one of {', '.join((*others, *known))}")
        return self


_FIELDS = ("path", "revision", "load_format", "dtype", "quantization", "max_context_len", "acceptance")


def answer_version(target: TargetSection) -> str:
    """Return a name of the settings that answers depend on, 12 hexadecimal digits.

    Targets of one version continue each other's answers: with the rule `coupled`, exactly, up to rounding. Settings
    that change speed and memory alone are not in it, and drafts are not.
    """
    included: dict[str, Any] = dict.fromkeys(_FIELDS, True)
    included |= {target.acceptance: True, "kv": {"dtype", "window", "sinks"}}
    values = json.dumps(target.model_dump(mode="json", include=included), sort_keys=True)
    return blake2b(values.encode(), digest_size=6).hexdigest()
