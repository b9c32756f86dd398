"""In reduced precision, clients receive the tokens of the model alone, up to rounding.

The reference is the same model in single precision: `transformers` with the weights that the target holds (rounded, or
integers times scale). Every token of an answer must have the reference's largest logit, or fall short of it by less
than rounding may change. So wherever two answers differ, with drafts or without, the logits of the two tokens lie
within that bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from deploy.local.local_cluster import LocalCluster
from deploy.settings import code_directory, load_settings
from tests.support.clusters.live_cluster import ClientAnswer, Reference, RequestCase, Server, answer_grpc
from tests.support.clusters.tiny_cluster import tiny_cluster
from workers.forward.native.build import load_library
from workers.forward.weights.int8 import quantize

pytestmark = pytest.mark.weights

CODE = code_directory(load_settings().cache_directory)
"""Directory of the kernels that were compiled for this machine."""
TOKENS = 16
FEW = 4
BOUND = {"kernels": 0.1, "layers": 0.25}
"""Bounds for logits between 8 and 32. The kernels round activations but not logits; the largest error seen is 0.055
(0.014 without tile registers). The compiled modules also round logits to bfloat16 (steps of up to 0.125); the largest
error seen is 0.18."""
Answers = dict[RequestCase, tuple[int, ...]]


class WideReference:
    """The target's model in single precision."""

    def __init__(self, directory: Path, quantization: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval().requires_grad_(False)
        exact = {
            name: dequantized(module.weight)
            for name, module in model.named_modules()
            if quantization == "int8" and isinstance(module, nn.Linear)
        }
        self._known: dict[tuple[RequestCase, tuple[int, ...]], float] = {}
        self._model = model.float()
        for name, weight in exact.items():  # a tied head is quantized without the embedding
            self._model.get_submodule(name).weight = nn.Parameter(weight, requires_grad=False)

    @torch.inference_mode()
    def shortfalls(self, answers: Answers) -> list[float]:
        """For each answer, the largest difference between the largest logit and the logit of the answer's token."""
        fresh = [pair for pair in answers.items() if pair not in self._known]
        if fresh:
            texts = [torch.tensor([*request.prompt, *answer]) for request, answer in fresh]
            hidden = self._model.base_model(pad_sequence(texts, batch_first=True), use_cache=False).last_hidden_state
            for pair, states in zip(fresh, hidden, strict=True):  # padding comes after the tokens that are compared
                first, answer = len(pair[0].prompt) - 1, torch.tensor(pair[1])
                logits = self._model.get_output_embeddings()(states[first : first + len(answer)])
                self._known[pair] = float((logits.amax(dim=1) - logits.gather(1, answer[:, None])[:, 0]).max())
        return [self._known[pair] for pair in answers.items()]


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """The quantized weight as integers times scale."""
    integers, scale = quantize(weight)
    return integers.float() * scale.float()[:, None]


def configure(target: Path, draft: Path, method: str, quantization: str, way: str) -> Configuration:
    drafting: dict[str, Any] = {"method": method, "max_nodes": 6, "max_depth": 3, "timeout_seconds": 60.0}
    drafting["controller"] = "off"  # drafts are verified even where they do not increase the speed
    if method == "model":
        drafting["model"] = {"path": str(draft), "device": "cpu", "kv": {"pool_bytes": 100 << 20}}
    settings = {"dtype": "bfloat16", "compile": "auto", "compile_directory": str(CODE), "quantization": quantization}
    settings["native"] = "auto" if way == "kernels" else "off"
    scheduler = {"max_sequences": 8, "max_step_tokens": 128}
    return tiny_cluster(target, drafting, target=settings, kv={"pool_bytes": 100 << 20}, scheduler=scheduler)


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[RequestCase]:
    return [RequestCase(prompt, TOKENS) for prompt in prompts[::2]]


@pytest.fixture(scope="module")
def references(target_directory: Path) -> dict[str, WideReference]:
    return {quantization: WideReference(target_directory, quantization) for quantization in ("none", "int8")}


async def answer_all(configuration: Configuration, requests: Sequence[RequestCase]) -> dict[RequestCase, ClientAnswer]:
    """The answers to all requests, sent at the same time, so that most steps have rows of several sequences."""
    async with LocalCluster(configuration) as cluster:
        server = Server(cluster.grpc_address, "")
        answers = await asyncio.gather(*(answer_grpc(server, request) for request in requests))
        return dict(zip(requests, answers, strict=True))


@pytest.mark.parametrize(
    ("way", "quantization", "methods"),
    [
        ("kernels", "none", ("ngram", "model")),
        ("kernels", "int8", ("ngram",)),
        ("layers", "none", ("ngram",)),
        ("layers", "int8", ("ngram",)),
    ],
    ids=["kernels-bfloat16", "kernels-int8", "layers-bfloat16", "layers-int8"],
)
async def test_every_token_is_the_models_own_with_and_without_drafts(
    way: str,
    quantization: str,
    methods: Sequence[str],
    target_directory: Path,
    draft_directory: Path,
    requests: list[RequestCase],
    references: dict[str, WideReference],
) -> None:
    if way == "kernels" and load_library(str(CODE)) is None:
        pytest.skip("no C compiler on this machine")
    plain: Answers = {}
    for method in ("none", *methods):
        configuration = configure(target_directory, draft_directory, method, quantization, way)
        found = await answer_all(configuration, requests[:FEW] if method == "model" else requests)
        answers = {request: answer.tokens for request, answer in found.items()}
        assert all(len(answer) == TOKENS for answer in answers.values())
        assert max(references[quantization].shortfalls(answers)) < BOUND[way], method
        assert (sum(answer.accepted for answer in found.values()) > 0) == (method != "none")
        plain = plain or answers
        alike = sum(plain[request] == answer for request, answer in answers.items())
        # The kernels give a token the same logits in every batch. Elsewhere few answers differ.
        assert alike == len(answers) if way == "kernels" else alike > len(answers) // 2


def test_transformers_in_this_precision_stays_within_the_same_bound(
    target_directory: Path, requests: list[RequestCase], references: dict[str, WideReference]
) -> None:
    reference = Reference(target_directory, torch.bfloat16)
    answers = {request: reference.greedy(request.prompt, TOKENS // 2) for request in requests[:FEW]}
    assert max(references["none"].shortfalls(answers)) < BOUND["layers"]
    backwards = {request: answer[::-1] for request, answer in answers.items()}
    assert min(references["none"].shortfalls(backwards)) > 4 * BOUND["layers"]  # the reference detects a different text
