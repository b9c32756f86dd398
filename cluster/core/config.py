"""The sections of the configuration. Each setting is declared once, with its type, bounds, default and meaning.

`cluster.core.load_config` builds a configuration from the values of a file and from overrides.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.core.section import Choice, PluginHost, PluginSettings, Port, Positive, Seconds, Section

MIB = 1024 * 1024


class ModelSection(Section):
    """Where weights come from and how they are held."""

    path: str = "smollm2-135m-instruct"
    """A local directory, a hub id, a `.gguf` file, or the name of a packaged model."""
    revision: str | None = None
    """The hub revision, for a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type weights and KV are held in."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    compile: Choice[Literal["off", "on", "auto"]] = "auto"
    """Compile the model's layers at start: `auto` does in reduced precision, where no kernels of our own serve."""
    native: Choice[Literal["auto", "off"]] = "auto"
    """On CPU: compute known kinds of models by Pilotfish's own kernels, built by the machine's C compiler."""
    compile_directory: str | None = None
    """Where compiled code is kept between starts; unset takes a folder in Pilotfish's cache."""
    quantization: Literal["none", "int8"] = "none"
    """`int8` stores linear layers in eight bits per weight: the quantized model is then the model."""


class PoolSection(Section):
    """The paged KV pool of one worker."""

    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens per block."""
    pool_bytes: Annotated[int, Field(ge=MIB)] | None = None
    """Bytes for keys and values on each rank; unset takes `memory_fraction`."""
    memory_fraction: Annotated[float, Field(gt=0, le=0.95)] = 0.1
    """Share of the device's free memory after loading, when `pool_bytes` is unset."""
    window: Annotated[int, Field(ge=16)] | None = None
    """LOSSY: let layers of full attention see the last `window` positions and the first `sinks` only."""
    sinks: Annotated[int, Field(ge=0, le=256)] = 4
    """First positions that stay visible when `window` is set (attention sinks)."""


class KvSection(PoolSection):
    """The target's pool, and what becomes of blocks whose sequence is gone."""

    prefix_cache: bool = True
    """Keep full blocks of keys and values after their sequence is gone, for others that begin alike."""
    host_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of host memory, on each rank, for blocks that the pool has no place for; 0 drops them."""
    disk_directory: str | None = None
    """Where blocks go that host memory has no place for, as far as the disk keeps up; unset drops them."""
    disk_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes that each rank keeps in `disk_directory`."""

    @model_validator(mode="after")
    def _check(self) -> KvSection:
        if not self.prefix_cache and (self.host_bytes or self.disk_directory):
            raise ValueError("prefix_cache (False) must be true where host_bytes or disk_directory is set")
        return self


class TargetSection(ModelSection, PluginHost):
    """The large model, whose word is the answer."""

    served_name: str | None = None
    """The model name that clients send; unset takes the last part of `path`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share each layer; heads must divide by it."""
    max_context_len: Positive | None = None
    """Longest sequence, in tokens; unset takes the model's own bound."""
    acceptance: str = "coupled"
    """Name of the acceptance rule. Rules other than `coupled` may be NOT LOSSLESS."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Intra-op threads of each rank on CPU; 0 divides the cores among the roles."""
    step_timeout_seconds: Seconds = 120.0
    """A step later than this counts as lost: its sequences are sent anew once the target answers."""
    kv: KvSection = KvSection()
    """The pool on each rank."""


class DraftModelSection(ModelSection, PluginSettings):
    """A model that a drafting method loads. A method whose settings derive from this section is given a device."""

    path: str = ""
    """A draft with the target's tokenizer: a local directory, a hub id, a `.gguf` file, or a packaged model's name."""
    kv: PoolSection = PoolSection()
    """The draft model's KV pool."""

    def check_selected(self) -> None:
        """See `PluginSettings`."""
        if not self.path:
            raise ValueError("path must be set to a draft with the target's tokenizer")


class DraftSection(PluginHost):
    """The drafter: the method, and what all methods have in common. Each method has a subsection of its own."""

    method: str = "ngram"
    """Name of the drafting method; `none` decodes without drafts."""
    max_nodes: Annotated[int, Field(ge=0, le=256)] = 8
    """Most nodes in one draft tree."""
    max_depth: Annotated[int, Field(ge=0, le=64)] = 8
    """Most tokens on one path of a draft tree."""
    controller: Choice[Literal["off", "auto"]] = "auto"
    """`auto` sizes each tree by its expected gain, down to no tree at all; `off` always requests the largest tree."""
    alternate: Choice[Literal["off", "on"]] = "off"
    """`on` splits the running sequences into halves: one is verified while the other is drafted for."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Drafters that share the target's sequences; each has the resources of one."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Intra-op threads of each drafter on CPU; 0 divides the cores among the roles."""
    timeout_seconds: Seconds = 0.5
    """Longest wait for a proposal, in seconds; a round whose proposal is later goes on without drafts."""

    @property
    def weights(self) -> DraftModelSection | None:
        """The model that the selected method loads, or `None` for a method without a model."""
        found = self.__pydantic_extra__.get(self.method)
        return found if isinstance(found, DraftModelSection) else None

    def with_weights(self, **changes: object) -> DraftSection:
        """A copy in which fields of `weights` are changed; the same section where the method has no model."""
        weights = self.weights
        return self if weights is None else self.model_copy(update={self.method: weights.model_copy(update=changes)})


class SchedulerSection(Section):
    """What one step may hold."""

    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 32
    """Most sequences in flight."""
    max_step_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Most tokens in one forward pass: prompt chunks, last tokens and trees together."""
    max_prompt_tokens: Positive | None = None
    """Most prompt tokens in a step that others decode in, so that they are not held up; unset: `max_step_tokens`."""
    max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Bound of the queue; a request beyond it is refused with `Overloaded`."""


class LimitsSection(Section):
    """The one table of bounds that both doors check requests against."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MIB
    """Longest HTTP body and gRPC message."""
    max_output_tokens: Positive = 8192
    """Most `max_tokens` that may be asked for."""
    max_stop_strings: Annotated[int, Field(ge=0)] = 16
    """Most stop strings (OpenAI's bound is 4)."""
    max_stop_string_chars: Positive = 256
    """Longest stop string."""
    max_stop_token_ids: Annotated[int, Field(ge=0)] = 64
    """Most stop tokens a request may add."""
    max_logprobs: Annotated[int, Field(ge=0, le=20)] = 20
    """Most alternatives reported per token."""
    max_logit_bias: Annotated[int, Field(ge=0, le=1024)] = 1024
    """Most tokens whose logit a request may shift."""
    max_prompts: Positive = 64
    """Most prompts in one completions request."""
    max_n: Annotated[int, Field(ge=1, le=128)] = 16
    """Most answers to one prompt that are made: `n`, `best_of` and the beams of a search."""
    max_messages: Positive = 1024
    """Most messages in one chat request."""
    max_timeout_seconds: Seconds = 3600.0
    """Longest deadline a request may ask for, and its default."""


class ServerSection(Section):
    """Where clients come in."""

    http_host: str = "127.0.0.1"
    """Address of the HTTP ingress."""
    http_port: Port = 8000
    """Port of the HTTP ingress."""
    grpc_host: str = "127.0.0.1"
    """Address of the public gRPC service."""
    grpc_port: Port = 9000
    """Port of the public gRPC service; 0 takes a free one."""
    start_timeout_seconds: Seconds = 600.0
    """How long loading may take before `serve` gives up."""
    drain_timeout_seconds: Seconds = 30.0
    """How long running answers may go on after SIGTERM."""


class Configuration(Section):
    """Everything an operator can set."""

    target: TargetSection = TargetSection()
    """The large model."""
    draft: DraftSection = DraftSection()
    """The drafter."""
    scheduler: SchedulerSection = SchedulerSection()
    """What one step may hold."""
    limits: LimitsSection = LimitsSection()
    """Bounds on requests."""
    server: ServerSection = ServerSection()
    """Addresses and ports."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
