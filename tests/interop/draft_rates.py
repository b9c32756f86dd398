"""Tokens per step with a trained draft: here, in a cluster, and in a loop around the draft's oracle.

The loop is greedy drafting and verification without a line of the product: the oracle drafts a chain from the target's
hidden states, `transformers` runs the target over text and chain, and the tokens that agree are accepted. It keeps no
cache. Both sides answer the same prompts with chains of the same length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.deadline import deadline
from tests.support.models.shown_target import Shown
from tests.unit.draft.contract.test_public_drafts import configured
from tests.unit.draft.contract.test_streams import answer
from workers.draft.eagle import eagle_growth

LENGTH = 24
"""Tokens of an answer."""
_SECONDS = 900.0
PROMPTS = tuple(tuple(range(first, first + 30, 5)) for first in range(20, 260, 24))
DraftChain = Callable[[Sequence[int], Shown, int], Sequence[int]]
"""The chain of at most so many tokens that an oracle drafts after a text, from what the target shows of all its tokens
but the last."""


@dataclass(frozen=True)
class Rate:
    """What steps of the target after those of the prompts gave."""

    tokens: int
    steps: int

    @property
    def per_step(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.tokens + other.tokens, self.steps + other.steps)


class Target:
    """A target in `transformers`, and its greedy answers to `PROMPTS`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
        self.texts = [self._answered(prompt) for prompt in PROMPTS]
        """Prompts with their answers."""

    def run(self, tokens: Sequence[int]) -> tuple[list[int], Shown]:
        """The most probable token after each token, and what the target shows of them."""
        last: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0][0]))
        with torch.no_grad():
            found = self.model(torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
        hook.remove()
        *states, final = (one[0] for one in found.hidden_states)
        ends = (self.model.get_input_embeddings().weight.detach(), self.model.lm_head.weight.detach())
        return found.logits[0].argmax(-1).tolist(), Shown(self.directory, [*states, *last], final, *ends)

    def _answered(self, prompt: Sequence[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + LENGTH:
            tokens.append(self.run(tokens)[0][-1])
        return tokens


def rate_of_oracle(target: Target, draft: DraftChain, depth: int) -> Rate:
    """The rate of chains of an oracle. Raises `RuntimeError` if an answer is not the target's."""
    rate = Rate(0, 0)
    for prompt, text in zip(PROMPTS, target.texts, strict=True):
        following, shown = target.run(prompt)
        tokens = [*prompt, following[-1]]
        while (missing := len(text) - len(tokens)) > 0:
            chain = list(draft(tokens, cut(shown, len(tokens) - 1), min(depth, missing - 1)))
            following, shown = target.run([*tokens, *chain])
            following = following[len(tokens) - 1 :]
            accepted = next((n for n, token in enumerate(chain) if token != following[n]), len(chain))
            tokens += [*chain[:accepted], following[accepted]]
            rate += Rate(accepted + 1, 1)
        if tokens != text:
            raise RuntimeError("drafts of an oracle have changed the target's answer")
    return rate


def cut(shown: Shown, length: int) -> Shown:
    """What the target shows of the first tokens."""
    states = [one[:length] for one in shown.states]
    return Shown(shown.directory, states, shown.final[:length], shown.embedding, shown.head)


def rate_here(target: Target, settings: Sequence[str], depth: int) -> Rate:
    """The rate of chains in a cluster. Raises `RuntimeError` if an answer is not the target's.

    Chains have all their tokens: an EAGLE head does not stop at an improbable one, as it else does.
    """
    chains = [f"draft.max_nodes={depth}", f"draft.max_depth={depth}", "draft.placement=target"]
    whole = ["target.dtype=float32", "target.quantization=none"]
    with mock.patch.object(eagle_growth, "LEAST_PROBABILITY", 0.0):
        return asyncio.run(_rate_here(target, [*whole, *chains, *settings]))


async def _rate_here(target: Target, settings: Sequence[str]) -> Rate:
    async with (
        deadline(_SECONDS),
        LocalCluster(configured(target.directory, *settings)) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        answers = await asyncio.gather(*(answer(client, _request(prompt)) for prompt in PROMPTS))
    rate = Rate(0, 0)
    for prompt, text, found in zip(PROMPTS, target.texts, answers, strict=True):
        if [*prompt, *found.tokens] != text:
            raise RuntimeError("drafts have changed the target's answer")
        rate += Rate(LENGTH - 1, LENGTH - 1 - found.accepted)
    return rate


def _request(prompt: Sequence[int]) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=LENGTH, ignore_eos=True),
    )
