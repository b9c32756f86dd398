"""Settings of drafting: the selected methods, what all of them share, and the bases of methods with weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.core.config.base import MIB, UNSHARED, Choice, ModuleSection, PluginHost, PluginSettings, Seconds, Taps
from cluster.core.config.model_section import ModelSection, PoolSection

NO_DRAFTS = "none"
"""Name of the drafting method that decodes without drafts."""
DEFAULT_METHOD = "ngram"
"""Name of the drafting method where neither `draft.method` nor `draft.methods` is set."""
SELECTORS = ("draft.method", "draft.methods")
"""Two keys for one choice: an override of either one replaces what a file or preset says under both."""
MOST_DEPTH = 64
"""The largest `draft.max_depth`."""
LearnsFrom = Literal["none", "keys", "all"]
"""Whose texts drafts are trained on: nobody's, those of clients whose API key allows it, or those of all clients."""


class DraftModelSection(ModelSection, PluginSettings):
    """Settings of a drafting method that loads a model. Such a method is assigned a device."""

    path: str = ""
    """A draft model: a local directory, hub id, `.gguf` file, or packaged model's name; unset: the target's packaged
    draft, if there is one. A model with another tokenizer than the target's drafts by text."""
    kv: PoolSection = PoolSection()
    """The draft model's KV pool."""

    def check_selected(self) -> None:
        """Raise `ValueError` when `path` is not set."""
        if not self.path:
            raise ValueError("path must be set to a draft model, best with the target's tokenizer")


class DraftModuleSection(ModuleSection):
    """Settings of a drafting method that loads a trained module, which reads the target's hidden states."""

    revision: str | None = None
    """Hub revision of `path`; unset takes the default branch. It has no effect on local files."""
    taps: Taps = ()
    """Numbers of decoder layers after which hidden states are read, as in `target.evidence.taps`; unset: the card's."""

    def check_selected(self) -> None:
        """Raise `ValueError` when `path` is not set."""
        if not self.path:
            raise ValueError("path must be set to a module that was distilled from the target")


class DraftSection(PluginHost):
    """Drafting: the method, and the settings that all methods share. Each method has its own subsection."""

    method: str | None = None
    """Name of the drafting method; `none` decodes without drafts; unset: `methods`, or `ngram` without them."""
    methods: Annotated[tuple[str, ...], Field(max_length=8)] = ()
    """Several drafting methods, which share one draft tree; unset: `method` alone."""
    path: str = ""
    """A draft for the target: a local directory, hub id or packaged name. Its format chooses the drafting method."""
    revision: str | None = None
    """Hub revision of `path`; unset takes the default branch. It has no effect on local files."""
    placement: Literal["auto", "target", "drafter"] = "auto"
    """`target`: drafts on the target's rank 0 after each step; `drafter`: in processes of their own; `auto`: on rank 0
    if all methods prefer it, if drafts learn, or if no GPU is left for a draft model, unless `replicas` is above 1."""
    max_nodes: Annotated[int, Field(ge=0, le=256)] = 7
    """Most drafted tokens in one draft tree. With the last committed token, the default is 8 rows: the kernels for CPUs
    with AVX-512 compute them while they read the weights once."""
    max_depth: Annotated[int, Field(ge=0, le=MOST_DEPTH)] = 7
    """Most drafted tokens on one path of a draft tree."""
    controller: Choice[Literal["off", "auto"]] = "auto"
    """`auto` sizes each tree by its expected gain, down to no tree at all; `off` always requests the largest tree."""
    alternate: Choice[Literal["off", "on"]] = "off"
    """`on` splits the running sequences into two halves: one half is verified while the other is drafted for."""
    replicas: Annotated[int, Field(ge=1, le=64), UNSHARED] = 1
    """Number of drafters. Each drafts for a part of the sequences."""
    node_resource: Annotated[str | None, UNSHARED] = None
    """Custom Ray resource of the nodes that drafters run on; unset: any node, also one that a target has room on."""
    threads: Annotated[int, Field(ge=0), UNSHARED] = 0
    """Intra-op threads of each drafter on CPU; 0 lets the placement choose."""
    timeout_seconds: Seconds = 0.5
    """Longest wait for a proposal of a drafter, in seconds; then the round continues without drafts."""
    learn: Choice[Literal["off", "on"]] = "off"
    """`on` trains the draft on the answers that it drafts for, while no request runs, and uses new weights that save
    steps of the target. What one client's texts teach drafts for that client only, unless API keys share. It is for one
    method alone: `heads`, `blockwise`, `eagle`, `block`, or `model` on a CPU. It needs `target.acceptance: coupled` and
    `pilotfish[distill]`."""
    learn_from: Literal["keys", "all"] = "keys"
    """Whose texts are learned from, and stored in `draft.prompt_log_directory`: `keys`: of clients whose line in the
    API key file has `learn`; `all`: of every client. Requests with `store: false` are left out."""
    learn_directory: str | None = None
    """Directory for the learned weights, which are used after a restart; unset: they end with the process. No texts are
    written to it."""
    learn_directory_bytes: Annotated[int, Field(ge=MIB, le=1 << 50)] | None = None
    """Most bytes of all versions in `draft.learn_directory`; unset: 16 GiB, or three versions of one client if they
    take more. To make room, versions that no rollback would serve are removed first, then other clients' versions."""
    learn_text_bytes: Annotated[int, Field(ge=MIB, le=1 << 40)] | None = None
    """Most memory for texts and their hidden states to learn from, in bytes, in the process that drafts; unset: room
    for 96 texts of 1,024 tokens, at least 64 MiB and at most 2 GiB. A training copies one client's texts into a process
    of its own."""
    learn_weight_bytes: Annotated[int, Field(ge=MIB, le=1 << 40)] | None = None
    """Most memory for learned weights in the process that drafts, in bytes; unset: 256 MiB, or those of one client if
    they take more. Clients beyond it draft with the weights of the draft's files."""
    prompt_log_directory: str | None = None
    """Directory for what users and systems say in the chats of clients that `draft.learn_from` names, as JSONL that
    `pilotfish distill --prompts` reads; unset: nothing is stored. `draft.learn` need not be `on`. Answers, plain
    completions and names of clients are not stored. The server's user must own the directory, or be able to make it."""
    prompt_log_bytes: Annotated[int, Field(ge=MIB, le=1 << 40)] = 1 << 28
    """Most bytes of all files in `draft.prompt_log_directory`; then nothing is added until files are moved away. The
    default has room for about 100,000 chats of 2,500 characters."""

    @property
    def is_enabled(self) -> bool:
        """Whether a drafting method is selected."""
        return self.selected("method") != (NO_DRAFTS,)

    @property
    def is_colocated(self) -> bool:
        """Whether drafts come from the target's rank 0. `auto` must be settled before."""
        return self.is_enabled and self.placement == "target"

    @property
    def uses_drafters(self) -> bool:
        """Whether drafts come from drafters in processes of their own. `auto` must be settled before."""
        return self.is_enabled and not self.is_colocated

    @property
    def learns_from(self) -> LearnsFrom:
        """Whose texts the draft is trained on."""
        return self.learn_from if self.learn == "on" else "none"

    @property
    def name(self) -> str:
        """The selected methods, joined by `+`."""
        return "+".join(self.selected("method"))

    def selected(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - the section has plug-ins of one kind
        return self.methods or (self.method or DEFAULT_METHOD,)

    def disabled(self) -> DraftSection:
        """Return a copy of the section that selects no drafting method and stores no texts."""
        changes = {"method": NO_DRAFTS, "methods": (), "placement": "auto", "learn": "off"}
        return self.model_copy(update={**changes, "prompt_log_directory": None})

    @property
    def weights_method(self) -> str | None:
        """The selected method that loads a model in a process of its own; `None` without such a method."""
        for name in self.selected("method"):
            if isinstance(self.__pydantic_extra__.get(name), DraftModelSection):
                return name
        return None

    @property
    def weights(self) -> DraftModelSection | None:
        """The model that `weights_method` loads; `None` without such a method."""
        found = self.__pydantic_extra__.get(self.weights_method or "")
        return found if isinstance(found, DraftModelSection) else None

    def with_weights(self, **changes: object) -> DraftSection:
        """Return a copy with changed fields of `weights`, or this section if no method loads a model."""
        method, weights = self.weights_method, self.weights
        if method is None or weights is None:
            return self
        return self.model_copy(update={method: weights.model_copy(update=changes)})

    @property
    def modules(self) -> dict[str, ModuleSection]:
        """The selected methods that load a module, with their settings."""
        sections = {name: self.__pydantic_extra__.get(name) for name in self.selected("method")}
        return {name: one for name, one in sections.items() if isinstance(one, ModuleSection) and one.path}

    def with_module(self, method: str, **changes: object) -> DraftSection:
        """Return a copy with changed fields of the settings of `method`, one of `modules`."""
        return self.model_copy(update={method: self.modules[method].model_copy(update=changes)})

    @model_validator(mode="after")
    def _check(self) -> DraftSection:
        several = f"methods ({', '.join(self.methods)})"
        if self.method is not None and self.methods and self.methods != (self.method,):
            raise ValueError(f"method ({self.method}) and {several} must not both be set, unless they agree")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"{several} must name each method once")
        if len(self.methods) > 1 and NO_DRAFTS in self.methods:
            raise ValueError(f"{several} must not contain {NO_DRAFTS}")
        return self
