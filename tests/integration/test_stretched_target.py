"""SmolLM2 at twice its cost writes what SmolLM2 writes, and drafts made for SmolLM2 are accepted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchPass, BenchPrompt, PassRequest
from deploy.bench.contestants.local import local_contestant
from deploy.bench.measuring.measures import drafted_tokens
from deploy.models import resolve_models
from deploy.settings import load_settings
from workers.model.model_files import resolve_model_directory

pytestmark = pytest.mark.weights

TEXTS = ("What is the capital of France?", "Write a sentence about a shark.", "List three colours.")
TOKENS = 16


def configure(path: Path, method: str) -> Configuration:
    assignments = [f"target.path={path}", f"draft.method={method}", "draft.model.path=smollm2-135m-draft"]
    assignments += ["draft.controller=off", "draft.timeout_seconds=60", "target.kv.pool_bytes=67108864"]
    settings = load_settings(None, [*assignments, "draft.model.kv.pool_bytes=16777216", "server.grpc_port=0"])
    return resolve_models(settings.configuration, settings.cache_directory, lambda _: None).configuration


async def answers(path: Path, method: str) -> BenchPass:
    tokenizer = Tokenizer.load(path)
    prompts = tuple(BenchPrompt(tokenizer.encode_chat([Message("user", text, None)]), text) for text in TEXTS)
    async with local_contestant(configure(path, method)) as contestant:
        return await contestant.answer(PassRequest(prompts, 3, 0.0, 0, TOKENS))


def tokens(found: BenchPass) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in found.answers]


@pytest.mark.parametrize("kind", ["wider", "deeper"])
async def test_a_stretched_target_writes_the_same_tokens_with_the_same_drafts(tmp_path: Path, kind: str) -> None:
    original = resolve_model_directory("smollm2-135m-instruct", load_settings().cache_directory)
    stretched = resolve_model_directory(f"{original}@{kind}-x2", tmp_path)
    try:
        plain, found = await answers(original, "none"), await answers(stretched, "model")
    finally:
        shutil.rmtree(stretched)
    assert tokens(found) == tokens(plain)
    drafted, accepted = drafted_tokens([found])
    assert 0 < accepted < drafted
