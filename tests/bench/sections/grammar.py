"""Counts the steps of the target that forced tokens and drafts save in answers that match JSON schemas.

Each method drafts twice: once knowing which of the next tokens the grammar forces and allows, once without.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from cluster.core.drafting import ANY_TOKENS
from cluster.core.grammar import Grammar
from cluster.generation.text.chat_messages import Message
from cluster.wire.codec.grammar import encode_grammar
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.bench.client import TIMEOUT_SECONDS, connected
from tests.bench.options import Options
from tests.bench.report import heading, table

CASES: dict[str, dict[str, Any]] = {
    "Describe a river in Europe.": {
        "name": {"type": "string", "maxLength": 20},
        "length_in_kilometres": {"type": "integer", "minimum": 1, "maximum": 9999},
        "countries": {"type": "array", "items": {"type": "string", "maxLength": 16}, "minItems": 1, "maxItems": 3},
        "flows_into": {"enum": ["the Atlantic", "the Mediterranean Sea", "the Black Sea", "the North Sea"]},
    },
    "Which animals live in a coral reef? Name one.": {
        "common_name": {"type": "string", "maxLength": 20},
        "kind_of_animal": {"enum": ["fish", "mollusc", "crustacean", "reptile", "mammal"]},
        "is_dangerous_for_divers": {"type": "boolean"},
        "usual_depth_in_metres": {"type": "integer", "minimum": 1, "maximum": 200},
    },
    "Plan a short meeting for tomorrow.": {
        "title_of_the_meeting": {"type": "string", "maxLength": 30},
        "starts_at": {"type": "string", "pattern": "^(0[89]|1[0-7]):(00|15|30|45)$"},
        "duration_in_minutes": {"enum": [15, 30, 45, 60]},
        "participants": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
    },
}
"""Questions, and the properties of their answers."""
_METHODS = (
    *("none", "ngram", "suffix+recycling", "eagle", "heads", "block", "eagle@drafter", "heads@drafter"),
    *("model", "lookahead", "early_exit"),
)
"""Drafting methods besides forced tokens, unless `--variants` names others. `@` precedes a `draft.placement`."""
_TELLS_DRAFTERS = "cluster.coordinator.clients.drafter"
"""The module that tells drafters in other processes."""
_MOST_TOKENS = 200


def run(options: Options) -> None:
    """Measure and report."""
    torch.set_num_threads(os.cpu_count() or 1)
    asyncio.run(_measure(options))


async def _measure(options: Options) -> None:
    heading("Grammar: target steps of answers that match JSON schemas")
    rows: list[list[str]] = []
    for method in options.variants or _METHODS:
        tokens, steps, equal = await _answers(options, method)
        rows.append([method, str(tokens), str(steps), f"{tokens / steps:.2f}", f"{equal} of {len(CASES)}"])
        if method == "none":
            rows[-1] += ["", "", ""]
            continue
        with _untold():
            tokens, steps, equal = await _answers(options, method)
        rows[-1] += [str(steps), f"{tokens / steps:.2f}", f"{equal} of {len(CASES)}"]
    told = ("steps", "tokens per step", "equal answers")
    untold = [f"{name}, drafts without the grammar" for name in told]
    table(("forced tokens, and", "tokens = steps without drafts", *told, *untold), rows)


async def _answers(options: Options, method: str) -> tuple[int, int, int]:
    """The tokens of all answers, the steps of the target with drafts, and how many answers are those without drafts."""
    tokens = steps = equal = 0
    async with (
        LocalCluster(options.configuration(*_assignments(method))) as cluster,
        connected(cluster.grpc_address) as client,
    ):
        for question, properties in CASES.items():
            plain = await _answer(options, client, question, properties, 0)
            drafted = await _answer(options, client, question, properties, None)
            tokens, steps, equal = tokens + len(plain[0]), steps + drafted[1], equal + (plain[0] == drafted[0])
    return tokens, steps, equal


@contextmanager
def _untold() -> Iterator[None]:
    """Inside, drafting methods of clusters in this process are told nothing of grammars."""

    def nothing(*_: Any, **__: Any) -> Any:
        return ANY_TOKENS

    with patch("workers.verify.grammars.NextTokens", nothing), patch(f"{_TELLS_DRAFTERS}.NextTokens", nothing):
        yield


def _assignments(variant: str) -> list[str]:
    """The settings of a variant: methods with `+` between them, and a placement after `@`."""
    names, _, place = variant.partition("@")
    methods = f"draft.methods=[{names.replace('+', ',')}]" if "+" in names else f"draft.method={names}"
    others = ["draft.controller=off", "draft.max_nodes=8", "draft.timeout_seconds=60"]
    return [methods, f"draft.placement={place or 'auto'}", *others]


async def _answer(
    options: Options, client: GenerationClient, question: str, properties: dict[str, Any], max_draft_tokens: int | None
) -> tuple[list[int], int]:
    """The tokens of a greedy answer, and the number of target steps."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    grammar = encode_grammar(Grammar.of_schema(schema))
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=options.tokenizer.encode_chat([Message("user", question)])),
        sampling=common_pb2.SamplingParameters(temperature=0.0, seed=0, grammar=grammar),
        stopping=generation_pb2.StoppingCriteria(max_tokens=_MOST_TOKENS),
        cache_salt=f"{max_draft_tokens}",  # the answer without drafts is not drafted from
        max_draft_tokens=max_draft_tokens,
    )
    tokens: list[int] = []
    steps = 0
    async for response in client.generate(request, TIMEOUT_SECONDS):
        tokens.extend(response.delta.token_ids)
        steps += response.finished.usage.target_steps
    return tokens, steps
