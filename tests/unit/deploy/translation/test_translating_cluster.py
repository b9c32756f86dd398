"""A whole cluster with a tiny translator of each family: texts, beams, streams that go on elsewhere."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from cluster.core.config.sections import Configuration
from cluster.generation.text.tokenizer import Tokenizer
from cluster.ingress.router.progress import StreamProgress
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import tiny
from tests.support.translation.tiny_marian import FRENCH, save_translator

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 60.0
MOST = 20


@pytest.fixture(scope="module", params=sorted(tiny.ENCODER_DECODER_FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_translator(tmp_path_factory.mktemp(request.param), request.param)


def configure(directory: Path, method: str) -> Configuration:
    draft: dict[str, Any] = {"method": method, "controller": "off", "max_nodes": 6, "max_depth": 4}
    if method == "model":  # its own weights: every draft is right
        draft |= {"timeout_seconds": 60.0, "model": {"path": str(directory), "device": "cpu"}}
        draft["model"]["kv"] = {"pool_bytes": 4 << 20}
    return tiny_cluster(directory, draft, scheduler={"max_sequences": 16, "max_step_tokens": 64})


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[int, list[list[int]]]:
    """The tokens of `generate`, by the number of beams."""
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = Tokenizer.load(directory)
    found: dict[int, list[list[int]]] = {1: [], 4: []}
    forced = int(model.generation_config.forced_bos_token_id is not None)
    for sentence in FRENCH:
        source = torch.tensor([tokenizer.encode(sentence)])
        for beams, answers in found.items():
            written = model.generate(source, num_beams=beams, do_sample=False, max_new_tokens=MOST + forced)
            answers.append(written[0, 1 + forced :].tolist())
    return found


@pytest.mark.parametrize("method", ["none", "ngram", "model"])
async def test_completions_are_those_of_transformers(
    directory: Path, expected: dict[int, list[list[int]]], method: str
) -> None:
    tokenizer = Tokenizer.load(directory)
    async with (
        LocalCluster(configure(directory, method), http=True) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=TIMEOUT_SECONDS) as http,
    ):
        for beams, wanted in expected.items():
            search = {"use_beam_search": True, "best_of": beams} if beams > 1 else {}
            body = {"prompt": list(FRENCH), "max_tokens": MOST, "return_token_ids": True, **search}
            answer = (await http.post("/v1/completions", json=body)).json()
            choices = answer["choices"]
            assert [choice["token_ids"] for choice in choices] == wanted
            assert [choice["text"] for choice in choices] == [tokenizer.decode(tokens) for tokens in wanted]
            details = answer["usage"]["completion_tokens_details"]
            if method == "model" and beams == 1:
                assert details["accepted_prediction_tokens"] > answer["usage"]["completion_tokens"] // 2


async def test_a_stream_goes_on_at_another_cluster_after_any_event(directory: Path) -> None:
    """The caller sends the source again, with the tokens that it has."""
    sampling = common_pb2.SamplingParameters(temperature=0.8, seed=5)
    stopping = generation_pb2.StoppingCriteria(max_tokens=MOST, ignore_eos=True)
    async with LocalCluster(configure(directory, "none")) as one, LocalCluster(configure(directory, "model")) as other:
        clients = [GenerationClient(fixed_address(cluster.grpc_address)) for cluster in (one, other)]
        request = generation_pb2.GenerateRequest(text=FRENCH[0], sampling=sampling, stopping=stopping, model="tiny")
        whole = [response async for response in clients[0].generate(request, TIMEOUT_SECONDS)]
        text = "".join(response.delta.text for response in whole)
        for most in range(1, MOST, 5):
            progress, parts = StreamProgress(request), []
            async with aclosing(clients[0].generate(progress.message(), TIMEOUT_SECONDS)) as stream:
                async for response in stream:
                    parts.append(progress.receive(response))
                    if len(parts) == most:
                        break
            rest = clients[1].generate(progress.message(), TIMEOUT_SECONDS)
            parts += [progress.receive(response) async for response in rest]
            received = [part for part in parts if part is not None]
            assert "".join(part.delta.text for part in received) == text, most
            assert received[-1].finished.usage.prompt_tokens == whole[-1].finished.usage.prompt_tokens
        for client in clients:
            await client.close()
