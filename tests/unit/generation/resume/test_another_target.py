"""A stream that continues on another cluster with the same model equals the undisturbed one, wherever it was cut."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.ingress.client import ServiceClient
from cluster.ingress.router.progress import StreamProgress
from pilotfish.v1 import generation_pb2
from tests.support.clusters.restartable_drafters import restartable_cluster
from tests.support.clusters.routed_requests import TIMEOUT_SECONDS, answers_of, collect, request_of
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import tiny, tiny_tokenizer

KINDS = ("greedy", "sampled", "penalties", "logprobs", "stop", "several")
VOCABULARY = 320


def configure(directory: Path, method: str) -> Configuration:
    draft = {"method": method, "controller": "off", "max_nodes": 6, "max_depth": 4}
    return tiny_cluster(directory, draft, scheduler={"max_sequences": 8, "max_step_tokens": 64})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    return tiny.save(directory, tiny.llama(vocab_size=VOCABULARY))


async def cut_after(client: ServiceClient, progress: StreamProgress, most: int) -> list[Any]:
    """The first responses of a stream."""
    responses = []
    async with aclosing(client.generate(progress.message(), TIMEOUT_SECONDS)) as stream:
        async for response in stream:
            responses.append(progress.receive(response))
            if len(responses) == most:
                break
    return responses


@pytest.mark.slow
async def test_a_stream_continues_at_another_target_after_any_event(target: Path) -> None:
    drafted = 0
    async with (
        restartable_cluster(configure(target, "none")) as plain,
        restartable_cluster(configure(target, "ngram")) as other,
    ):
        for kind in KINDS:
            request = request_of(kind, 2, max_tokens=24)
            expected = await answers_of(plain.client, request)
            for most in range(1, 24, 4):
                progress = StreamProgress(request)
                first = await cut_after(plain.client, progress, most)

                async def whole(first: list[Any] = first, progress: StreamProgress = progress) -> Any:
                    for response in first:
                        yield response
                    if progress.is_complete:
                        return
                    async for response in other.client.generate(progress.message(), TIMEOUT_SECONDS):
                        passed = progress.receive(response)
                        if passed is not None:
                            yield passed

                found = await collect(whole(), request)
                for one, wanted in zip(found, expected, strict=True):
                    assert (one.text, one.tokens, one.end) == (wanted.text, wanted.tokens, wanted.end), (kind, most)
                    for entry, correct in zip(one.logprobs, wanted.logprobs, strict=True):
                        assert (entry[0], entry[2]) == (correct[0], correct[2])
                        assert entry[1] == pytest.approx(correct[1], abs=1e-4)
        usage = generation_pb2.Usage()
        async for response in other.client.generate(request_of("greedy", 2, max_tokens=24), TIMEOUT_SECONDS):
            usage.MergeFrom(response.finished.usage)
        drafted = usage.drafted_tokens
    assert drafted > 0
