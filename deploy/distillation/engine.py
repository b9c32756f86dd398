"""Measures a drafting module as it is served: a cluster in this process drafts with it and answers prompts."""

from __future__ import annotations

import asyncio
import gc
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from deploy.bench.contestants.answers import BenchPrompt, PassRequest
from deploy.bench.contestants.local import local_contestant
from deploy.terminal import notices
from workers.distill.answers import Answer
from workers.distill.modules.module_card import ServedTokens
from workers.serve.configuration import load_configuration

_METHODS = {"exit": "early_exit"}
"""The drafting method of a kind of module, where it has another name."""
_PROMPTS = 8
_MAX_TOKENS = 64

Write = Callable[[Path], None]
"""Writes a module into an empty directory."""


@dataclass(frozen=True, slots=True)
class EngineMeasure:
    """Serves modules of one kind and counts the tokens of each step of the target.

    The settings are those of the command but for the drafting method, its path, and the controller, which is off:
    every step drafts the largest tree, so that the figure does not depend on how busy the machine is.
    """

    configuration: Configuration
    """The configuration of the command. It names the target by its directory."""
    kind: str
    max_prompt: int
    """Longer prompts are left out, in tokens."""

    def chosen(self, answers: Sequence[Answer]) -> tuple[BenchPrompt, ...]:
        """The prompts to answer: at most eight, evenly spread, the same ones for the same answers."""
        prompts = [answer.source or answer.prompt for answer in sorted(answers, key=lambda each: each.key)]
        prompts = [prompt for prompt in prompts if len(prompt) <= self.max_prompt]
        step = max(1.0, len(prompts) / _PROMPTS)
        indices = (int(place * step) for place in range(min(_PROMPTS, len(prompts))))
        return tuple(BenchPrompt(prompts[index], "") for index in indices)

    def measure(self, write: Write, prompts: Sequence[BenchPrompt]) -> ServedTokens | None:
        """Serve the module that `write` stores, and answer the prompts greedily, with at most 64 tokens each.

        Returns `None` without prompts, or, with a notice, where the cluster does not serve it.
        """
        if not prompts:
            return None
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch))
            try:
                return asyncio.run(self._answers(Path(scratch), prompts))
            except (PilotfishError, OSError, torch.OutOfMemoryError) as error:
                notices.print(f"tokens per step were not measured: {error}")
                return None
            finally:
                gc.collect()  # the memory of the cluster's KV, before the training goes on

    def identity(self, prompts: Sequence[BenchPrompt]) -> str:
        """A hash of what a measure depends on besides the module."""
        values = self.configuration.model_dump(mode="json", include={"draft", "target"})
        tokens = [prompt.tokens for prompt in prompts]
        return blake2b(json.dumps([self.kind, values, tokens], sort_keys=True).encode(), digest_size=8).hexdigest()

    async def _answers(self, module: Path, prompts: Sequence[BenchPrompt]) -> ServedTokens:
        async with local_contestant(self.serving(module)) as contestant:
            found = await contestant.answer(PassRequest(prompts, len(prompts), 0.0, 0, _MAX_TOKENS, "distill"))
        steps = sum(answer.steps for answer in found.answers)
        return ServedTokens(len(prompts), found.tokens, steps)

    def serving(self, module: Path) -> Configuration:
        """The configuration that serves the module in this directory."""
        method = _METHODS.get(self.kind, self.kind)
        values = self.configuration.model_dump(mode="json")
        changes = {"method": method, "methods": (), f"{method}.path": str(module), "controller": "off"}
        return load_configuration(
            values, {f"draft.{key}": value for key, value in changes.items()} | {"server.grpc_port": 0}
        )
