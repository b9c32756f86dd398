"""Draft models with other tokenizers than SmolLM2's: what SmolLM2 writes stays the same, and drafts are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from deploy.bench.contestants.answers import BenchPass, BenchPrompt, PassRequest
from deploy.bench.contestants.local import local_contestant
from deploy.bench.measuring.measures import drafted_tokens
from deploy.models import resolve_models
from deploy.settings import load_settings
from tests.support.models import tiny, tiny_tokenizer
from workers.draft.model.text_drafter import TextSession, Tokenizers
from workers.model.model_files import resolve_model_directory
from workers.model.text_tokenizer import TextTokenizer

pytestmark = pytest.mark.weights

TEXTS = (
    "What is the capital of France?",
    "Repeat: swim little 🐟, swim little 🐟, swim little 🐟, swim little 🐟.",
    "Traduis « La forêt est près de la côte » en anglais.",
)
TOKENS = 24


def configure(draft: str, method: str) -> Configuration:
    assignments = ["target.path=smollm2-135m-instruct", f"draft.method={method}"]
    assignments += [f"draft.model.path={draft}"] if draft else []
    assignments += ["draft.controller=off", "draft.timeout_seconds=60", "target.kv.pool_bytes=67108864"]
    settings = load_settings(None, [*assignments, "draft.model.kv.pool_bytes=67108864", "server.grpc_port=0"])
    return resolve_models(settings.configuration, settings.cache_directory, lambda _: None).configuration


async def answers(draft: str, method: str) -> list[BenchPass]:
    """The answers to all texts, greedy and sampled."""
    target = resolve_model_directory("smollm2-135m-instruct", load_settings().cache_directory)
    tokenizer = Tokenizer.load(target)
    prompts = tuple(BenchPrompt(tokenizer.encode_chat([Message("user", text, None)]), text) for text in TEXTS)
    async with local_contestant(configure(draft, method)) as contestant:
        return [await contestant.answer(PassRequest(prompts, 3, one, 7, TOKENS)) for one in (0.0, 0.7)]


_ALONE: list[BenchPass] = []


async def answers_alone() -> list[BenchPass]:
    """The answers without drafts, which are computed once."""
    if not _ALONE:
        _ALONE.extend(await answers("", "none"))
    return _ALONE


@pytest.mark.parametrize("draft", ["gemma-3-270m", "a tiny Llama"])
async def test_a_draft_model_of_another_family_changes_no_token(draft: str, tmp_path: Path) -> None:
    if draft == "a tiny Llama":  # it knows no language: what it repeats of the text is accepted
        directory = tiny_tokenizer.sentencepiece(tmp_path / "llama")
        draft = str(tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=512)))

    passes = zip(await answers(draft, "model"), await answers_alone(), strict=True)

    for found, plain in passes:
        assert [one.tokens for one in found.answers] == [one.tokens for one in plain.answers]
        drafted, accepted = drafted_tokens([found])
        assert 0 < accepted < drafted


def test_texts_are_read_token_by_token_as_they_are_encoded_as_a_whole() -> None:
    cache = load_settings().cache_directory
    names = ("smollm2-135m-instruct", "gemma-3-270m")
    both = [TextTokenizer.load(resolve_model_directory(name, cache)) for name in names]
    text = Path(__file__).read_text(encoding="utf-8") + "".join(f"<|im_start|>user\n{one}<|im_end|>\n" for one in TEXTS)
    text += "Grüße 世界 नमस्ते 👩‍👩‍👧‍👦!!!\n\n\n   the end"
    for target, draft in (both, both[::-1]):
        session = TextSession(SequenceStart(1, SamplingParameters()), Tokenizers(target, draft, 300_000))
        (tokens,) = target.encode([text])
        for length, token in enumerate(tokens):
            session.replace(length, [token])
            session.read()
            if length % 16 == 0 or length == len(tokens) - 1:
                (whole,) = draft.encode([session.text.decode()])
                assert session.draft_tokens == [*draft.opening, *whole]
        assert session.text.decode() == text
