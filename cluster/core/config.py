"""The configuration, declared once: frozen, every key known, every bound checked before use.

A file (YAML), `--set` overrides and presets all end here; `load` is the only door.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cluster.core.errors import ConfigurationError, shorten


def _as_written(value: object) -> object:
    """YAML reads a bare `on` or `off` as a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
MIB = 1024 * 1024


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=False)


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
    compile: Annotated[Literal["off", "on", "auto"], BeforeValidator(_as_written)] = "auto"
    """Compile the model's layers at start: `auto` does in reduced precision, where no kernels of our own serve."""
    native: Literal["auto", "off"] = "auto"
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


class TargetSection(ModelSection):
    """The large model, whose word is the answer."""

    served_name: str | None = None
    """The model name that clients send; unset takes the last part of `path`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that share each layer; heads must divide by it."""
    max_context_len: Positive | None = None
    """Longest sequence, in tokens; unset takes the model's own bound."""
    acceptance: str = "coupled"
    """The registered acceptance rule: `coupled`, or `synthetic`: NOT LOSSLESS, and set by `draft.method` alone."""
    acceptance_rates: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=64)] = ()
    """Set by `draft.method: synthetic`: `draft.synthetic_acceptance`."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Intra-op threads of each rank on CPU; 0 divides the cores among the roles."""
    step_timeout_seconds: Seconds = 120.0
    """A step later than this counts as lost: its sequences are sent anew once the target answers."""
    kv: KvSection = KvSection()
    """The pool on each rank."""


class DraftSection(Section):
    """Who guesses."""

    method: str = "ngram"
    """A registered drafting method: `none`, `ngram`, `model`, `synthetic`."""
    model: ModelSection | None = None
    """The draft model, for methods that have one."""
    max_nodes: Annotated[int, Field(ge=0, le=256)] = 8
    """Most nodes in one tree."""
    max_depth: Annotated[int, Field(ge=0, le=64)] = 8
    """Most tokens on one path."""
    mode: Literal["serial", "run_ahead", "enumerate"] = "enumerate"
    """When a draft model's trees grow: only when asked, also past the guesses that were sent, or also off them."""
    width: Annotated[int, Field(ge=1, le=32)] = 4
    """Most nodes of one tree that a draft model's forward pass expands."""
    candidates: Annotated[int, Field(ge=1, le=16)] = 3
    """Guesses that a draft model makes below each expanded node."""
    lookup: Annotated[Literal["off", "on"], BeforeValidator(_as_written)] = "on"
    """Put into a draft model's trees also what followed the same words before, as method `ngram` looks it up."""
    controller: Annotated[Literal["off", "auto"], BeforeValidator(_as_written)] = "auto"
    """`auto` sizes each tree by what it is expected to gain, down to none; `off` always asks for the most."""
    alternate: Annotated[Literal["off", "on"], BeforeValidator(_as_written)] = "off"
    """Split the running sequences into halves: one is verified while the other is drafted for."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Drafters that share the target's sequences; each has the resources of one."""
    synthetic_acceptance: Annotated[
        tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1, max_length=64)
    ] = (0.8,)
    """NOT LOSSLESS, for method `synthetic`: the chance that a guess counts as right, by depth; the last one repeats."""
    synthetic_seconds: Annotated[float, Field(ge=0, le=10)] = 0.001
    """How long a forward pass of the `synthetic` drafter takes."""
    ngram_max: Annotated[int, Field(ge=1, le=16)] = 8
    """Longest suffix that is looked up."""
    ngram_min: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix that is looked up."""
    ngram_candidates: Annotated[int, Field(ge=1, le=16)] = 2
    """Most earlier occurrences that `ngram` merges into a tree."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Intra-op threads on CPU; 0 divides the cores among the roles."""
    timeout_seconds: Seconds = 0.5
    """A proposal later than this is not waited for: the round goes on without it."""
    kv: PoolSection = PoolSection()
    """The draft model's pool."""

    @model_validator(mode="after")
    def _check(self) -> DraftSection:
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min ({self.ngram_min}) must be at most ngram_max ({self.ngram_max})")
        if self.method == "model" and self.model is None:
            raise ValueError("method 'model' needs draft.model.path: a draft with the target's tokenizer")
        return self


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


def load(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Configuration:
    """Build the configuration from nested values and dotted overrides (`{"target.dtype": "bfloat16"}`).

    Raises `ConfigurationError`, which names the key, its value and the bound; for an unknown key,
    the nearest valid one.
    """
    merged = _deep_copy(values)
    for key, value in (overrides or {}).items():
        _assign(merged, key, value)
    try:
        return Configuration.model_validate(merged)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_explain(part) for part in error.errors())) from None


def known_keys(section: type[BaseModel] = Configuration, prefix: str = "") -> tuple[str, ...]:
    """Every settable key, dotted, in order of declaration."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        inner = _section_of(info.annotation)
        keys.extend(known_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"])
    return tuple(keys)


def _section_of(annotation: Any) -> type[Section] | None:
    """The section class inside an annotation such as `ModelSection | None`."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def _deep_copy(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deep_copy(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{key}: {section} is not a section")
        values = inner
    values[last] = value


def _explain(part: Any) -> str:
    key = ".".join(str(step) for step in part["loc"])
    if part["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.0)
        return f"{key}: unknown key; the nearest valid one is {nearest[0]}"
    if part["type"] == "value_error":
        return f"{key}: {part['msg'].removeprefix('Value error, ')}"
    return f"{key}: {shorten(part['input'])} is refused; {part['msg'][0].lower()}{part['msg'][1:]}"
