"""The sections of the configuration. Each setting is declared once, with its type, bounds, default and meaning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.core.config.base import Choice, ModuleSection, PluginHost, PluginSettings, Positive, Seconds, Section
from cluster.core.config.cluster_section import ClusterSection
from cluster.core.config.server import AutoscalingSection, ServerSection

MIB = 1024 * 1024
NO_DRAFTS = "none"
"""Name of the drafting method that decodes without drafts."""


class ModelSection(Section):
    """A model: its weights and how they are loaded."""

    path: str = "smollm2-135m-instruct"
    """Source of the weights: a directory, hub id, `.gguf` file or packaged name; `…@x10`: at 10 times the cost."""
    revision: str | None = None
    """Hub revision of `path`; unset takes the default branch. It has no effect on local files."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights, computation and KV cache."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` draws random weights in the shape of `config.json`, to measure speed where no weights are at hand."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model computes on; `auto` takes a GPU where one is free, else the CPU."""
    compile: Choice[Literal["off", "on", "auto"]] = "auto"
    """Whether layers are compiled at start; `auto` compiles in reduced precision unless Pilotfish's kernels apply."""
    native: Choice[Literal["auto", "off"]] = "auto"
    """`auto` runs supported model families on CPU by Pilotfish's own kernels; `off` always runs the PyTorch modules."""
    compile_directory: str | None = None
    """Directory for compiled code that is reused at the next start; unset takes a folder in Pilotfish's cache."""
    quantization: Literal["none", "int8"] = "none"
    """`int8` stores the weights of linear layers in 8 bits; answers are then those of the quantized model."""


class PoolSection(Section):
    """The paged KV cache of one worker."""

    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Number of tokens in one KV block."""
    pool_bytes: Annotated[int, Field(ge=MIB)] | None = None
    """Size of the KV pool of each rank, in bytes; unset computes it from `memory_fraction`."""
    memory_fraction: Annotated[float, Field(gt=0, le=0.95)] = 0.1
    """Share of the device's free memory after loading that the KV pool takes when `pool_bytes` is unset."""
    window: Annotated[int, Field(ge=16)] | None = None
    """LOSSY: layers of full attention see only the last `window` tokens and the first `sinks` ones; unset: all."""
    sinks: Annotated[int, Field(ge=0, le=256)] = 4
    """Number of first tokens that stay visible when `window` is set (attention sinks)."""


class KvSection(PoolSection):
    """The KV cache of the target: the pool, the prefix cache, and the tiers for evicted blocks."""

    prefix_cache: bool = True
    """Whether full blocks of finished sequences stay in the pool, to be reused by sequences with the same prefix."""
    host_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory of each rank for blocks evicted from the pool, in bytes; 0 drops such blocks."""
    disk_directory: str | None = None
    """Directory for blocks evicted from host memory, unless the disk is too slow; unset drops such blocks."""
    disk_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes that each rank stores in `disk_directory`."""

    @model_validator(mode="after")
    def _check(self) -> KvSection:
        if not self.prefix_cache and (self.host_bytes or self.disk_directory):
            raise ValueError("prefix_cache (False) must be true where host_bytes or disk_directory is set")
        return self


class EvidenceSection(Section):
    """What the target shows to drafters beyond committed tokens. The selected drafting methods set it."""

    taps: Annotated[tuple[Annotated[int, Field(ge=-1, le=4096)], ...], Field(max_length=16)] = ()
    """Numbers of decoder layers after which hidden states are taken: 0 is the embedding, -1 the last layer's output."""
    top: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of most probable tokens at the root and at each accepted node of a draft tree."""
    decisions: bool = False
    """Whether the decisions at all nodes of a draft tree are taken."""
    is_sent: bool = False
    """Whether verdicts bring the evidence, for drafters in other processes."""

    @property
    def any(self) -> bool:
        """Whether anything is taken."""
        return bool(self.taps or self.top or self.decisions)


class TargetSection(ModelSection, PluginHost):
    """The target model, which decides every token of an answer. Each acceptance rule has its own subsection."""

    served_name: str | None = None
    """Model name that clients send; unset takes the last part of `path`."""
    aliases: Annotated[tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=64)] = ()
    """Further names that clients may send for the model. Its answers have the first name."""
    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of targets. Each has its own coordinator and ranks, and answers a part of the requests."""
    autoscaling: AutoscalingSection = AutoscalingSection()
    """How the number of replicas changes with the load."""
    node_resource: str | None = None
    """Custom Ray resource of the nodes that targets run on; unset: any node with enough cores and GPUs."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks that share each layer; it must divide the number of attention heads and of KV heads."""
    max_context_len: Positive | None = None
    """Longest sequence of prompt and answer, in tokens; unset takes the model's own bound."""
    acceptance: str = "coupled"
    """Name of the acceptance rule. `coupled` accepts what the target decides, so drafts change no token. `rejection`
    and `block` keep the distribution, but for one seed the text depends on the drafts. Other rules may be LOSSY."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Intra-op threads of each rank on CPU; 0 lets the placement choose."""
    step_timeout_seconds: Seconds = 120.0
    """Longest wait for a step, in seconds. Then its sequences are sent again, and a worker that hangs is replaced."""
    standby: bool = False
    """Whether each rank has a standby process with its libraries, so that a lost target serves sooner. Not for GPUs."""
    packed_bytes: Annotated[int, Field(ge=0)] = 4 << 30
    """Most bytes of weights that `compile_directory` keeps as the CPU kernels read them, for quick starts; 0: none."""
    kv: KvSection = KvSection()
    """The KV cache on each rank."""
    evidence: EvidenceSection = EvidenceSection()
    """What the target shows to drafters."""


class DraftModelSection(ModelSection, PluginSettings):
    """Settings of a drafting method that loads a model. Such a method is assigned a device."""

    path: str = ""
    """A draft model with the target's tokenizer: a local directory, hub id, `.gguf` file, or packaged model's name."""
    kv: PoolSection = PoolSection()
    """The draft model's KV pool."""

    def check_selected(self) -> None:
        """Raise `ValueError` when `path` is not set."""
        if not self.path:
            raise ValueError("path must be set to a draft model with the target's tokenizer")


class DraftModuleSection(ModuleSection):
    """Settings of a drafting method that loads a trained module, which reads the target's hidden states."""

    taps: Annotated[tuple[Annotated[int, Field(ge=-1, le=4096)], ...], Field(max_length=16)] = ()
    """Numbers of decoder layers after which hidden states are read, as in `target.evidence.taps`; unset: the card's."""

    def check_selected(self) -> None:
        """Raise `ValueError` when `path` is not set."""
        if not self.path:
            raise ValueError("path must be set to a module that was distilled from the target")


class DraftSection(PluginHost):
    """Drafting: the method, and the settings that all methods share. Each method has its own subsection."""

    method: str = "ngram"
    """Name of the drafting method; `none` decodes without drafts."""
    methods: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Several drafting methods, whose candidates share one draft tree; unset: `method` alone."""
    placement: Literal["auto", "target", "drafter"] = "auto"
    """`target`: drafts on the target's rank 0 after each step; `drafter`: in own processes; `auto`: by method."""
    max_nodes: Annotated[int, Field(ge=0, le=256)] = 8
    """Most drafted tokens in one draft tree."""
    max_depth: Annotated[int, Field(ge=0, le=64)] = 8
    """Most drafted tokens on one path of a draft tree."""
    controller: Choice[Literal["off", "auto"]] = "auto"
    """`auto` sizes each tree by its expected gain, down to no tree at all; `off` always requests the largest tree."""
    alternate: Choice[Literal["off", "on"]] = "off"
    """`on` splits the running sequences into two halves: one half is verified while the other is drafted for."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of drafters. Each serves a part of the sequences and has the resources of one drafter."""
    node_resource: str | None = None
    """Custom Ray resource of the nodes that drafters run on; unset: any node, also one that a target has room on."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Intra-op threads of each drafter on CPU; 0 lets the placement choose."""
    timeout_seconds: Seconds = 0.5
    """Longest wait for a proposal of a drafter, in seconds; then the round continues without drafts."""

    @property
    def is_enabled(self) -> bool:
        """Whether a drafting method is selected."""
        return self.selected("method") != (NO_DRAFTS,)

    @property
    def is_colocated(self) -> bool:
        """Whether drafts come from the target's rank 0. `auto` must be settled before."""
        return self.is_enabled and self.placement == "target"

    @property
    def name(self) -> str:
        """The selected methods, joined by `+`."""
        return "+".join(self.selected("method"))

    def selected(self, key: str) -> tuple[str, ...]:
        """See `PluginHost`."""
        return self.methods or super().selected(key)

    def disabled(self) -> DraftSection:
        """Return a copy of the section that selects no drafting method."""
        return self.model_copy(update={"method": NO_DRAFTS, "methods": (), "placement": "auto"})

    @property
    def weights(self) -> DraftModelSection | None:
        """The model that a selected method loads in a process of its own; `None` without such a method."""
        found = self.__pydantic_extra__.get(self.weights_method or "")
        return found if isinstance(found, DraftModelSection) else None

    @property
    def modules(self) -> dict[str, ModuleSection]:
        """The selected methods that load a module, with their settings."""
        sections = {name: self.__pydantic_extra__.get(name) for name in self.selected("method")}
        return {name: one for name, one in sections.items() if isinstance(one, ModuleSection) and one.path}

    def with_module(self, method: str, **changes: object) -> DraftSection:
        """Return a copy with changed fields of the settings of `method`, one of `modules`."""
        return self.model_copy(update={method: self.modules[method].model_copy(update=changes)})

    def with_weights(self, **changes: object) -> DraftSection:
        """Return a copy with changed fields of `weights`, or this section if the method has no model."""
        weights, name = self.weights, self.weights_method or ""
        return self if weights is None else self.model_copy(update={name: weights.model_copy(update=changes)})

    @property
    def weights_method(self) -> str | None:
        """The selected method that loads a model in a process of its own; `None` without such a method."""
        sections = self.__pydantic_extra__
        return next((n for n in self.selected("method") if isinstance(sections.get(n), DraftModelSection)), None)

    @model_validator(mode="after")
    def _check(self) -> DraftSection:
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods ({', '.join(self.methods)}) must name each method once")
        if len(self.methods) > 1 and NO_DRAFTS in self.methods:
            raise ValueError(f"methods ({', '.join(self.methods)}) must not contain {NO_DRAFTS}")
        return self


class SchedulerSection(Section):
    """Bounds of one step and of the waiting queue."""

    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    """Most sequences that run at once."""
    max_step_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Most tokens in one step of the target: prompt chunks, last committed tokens and draft trees together."""
    max_prompt_tokens: Positive | None = None
    """Most prompt tokens in a step in which other sequences decode, to bound their delay; unset: `max_step_tokens`."""
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Most waiting requests; further ones are refused as overloaded (HTTP 429, RESOURCE_EXHAUSTED)."""
    policy: Literal["fair", "priority"] = "fair"
    """Who starts next: `fair` lets clients take turns; `priority` serves requests with the lowest `priority` first."""


class LimitsSection(Section):
    """Bounds on requests, over HTTP and gRPC alike."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    """Largest HTTP body and gRPC message, in bytes."""
    max_output_tokens: Positive = 8192
    """Largest `max_tokens` of a request."""
    max_stop_strings: Annotated[int, Field(ge=0)] = 16
    """Most stop strings in one request; OpenAI's own bound is 4."""
    max_stop_string_chars: Positive = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: Annotated[int, Field(ge=0, le=1024)] = 64
    """Most stop token ids in one request."""
    max_logprobs: Annotated[int, Field(ge=0, le=20)] = 20
    """Most alternatives with log probabilities per token."""
    max_logit_bias: Annotated[int, Field(ge=0, le=1024)] = 1024
    """Most tokens with a logit bias in one request."""
    max_prediction_tokens: Annotated[int, Field(ge=0, le=65536)] = 8192
    """Most tokens of a request's `prediction`."""
    max_prompts: Positive = 64
    """Most prompts in one completions request."""
    max_n: Annotated[int, Field(ge=1, le=128)] = 16
    """Most sequences for one prompt: the bound of `n`, `best_of` and the beam width."""
    max_messages: Positive = 1024
    """Most messages in one chat request."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Fields of HTTP bodies that OpenAI and vLLM lack: `ignore` names them in `x-ignored-fields`, `refuse` fails."""
    max_timeout_seconds: Seconds = 3600.0
    """Longest timeout of a request, in seconds; it is also the default."""


class Configuration(Section):
    """All settings."""

    target: TargetSection = TargetSection()
    """The target model."""
    draft: DraftSection = DraftSection()
    """Drafting."""
    scheduler: SchedulerSection = SchedulerSection()
    """Bounds of one step and of the waiting queue."""
    limits: LimitsSection = LimitsSection()
    """Bounds on requests."""
    server: ServerSection = ServerSection()
    """Addresses and lifetime of the public APIs."""
    cluster: ClusterSection = ClusterSection()
    """The traffic inside the cluster."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of messages that are logged."""
