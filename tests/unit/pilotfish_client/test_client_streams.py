"""`pilotfish-client` against real servers: whole answers, streams that are cut, keys, certificates, refusals."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.generation.servicer import GenerationServicer
from cluster.ingress.access.api_keys import parse_keys
from cluster.wire.connection import fixed_address
from cluster.wire.peer_access import PeerAccess
from cluster.wire.server import WireServer
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import generation_pb2_grpc
from pilotfish_client import (
    AsyncClient,
    Client,
    Completion,
    Delta,
    FinishReason,
    InvalidRequest,
    Parameters,
    Started,
    Tls,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from tests.support.certificates import NAME, make_certificate
from tests.support.clusters.faulty_link import FaultRates, FaultyLink
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.fakes.fake_engine import fake_service
from tests.support.models import tiny, tiny_tokenizer

KEY = "alice-key-0123456789"
CASES = (
    Parameters(max_tokens=24, temperature=0.0, ignore_eos=True),
    Parameters(max_tokens=16, temperature=1.0, seed=5, ignore_eos=True, logprobs=2),
    Parameters(max_tokens=8, temperature=0.8, seed=7, n=3),
    Parameters(max_tokens=20, temperature=1.0, seed=9, stop=("e", "a")),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    return tiny.save(directory, tiny.llama(vocab_size=320))


@pytest.fixture
async def cluster(target: Path) -> AsyncIterator[LocalCluster]:
    configuration = tiny_cluster(target, {"method": "ngram", "controller": "off"})
    async with LocalCluster(configuration, api_keys=parse_keys(f"alice {KEY}", "keys")) as found:
        yield found


def without_ids(completion: Completion) -> object:
    """What must not depend on cuts: all but the request's id and the counts of steps and drafts."""
    choices = [
        (choice.text, choice.token_ids, choice.logprobs, choice.finished.reason, choice.finished.stop)
        for choice in completion.choices
    ]
    return completion.started.seed, completion.started.prompt_tokens, choices


async def test_streams_go_on_after_cuts_with_the_same_text(cluster: LocalCluster) -> None:
    link = FaultyLink(fixed_address(cluster.grpc_address), random.Random(3))
    address = await link.start()
    resumptions = {"sync": 0, "async": 0}
    with Client(cluster.grpc_address, api_key=KEY) as direct, Client(address, api_key=KEY) as cut:
        async with AsyncClient([address], api_key=KEY) as cut_async:
            for parameters in CASES:
                expected = await asyncio.to_thread(direct.generate, "one two one two", parameters)
                seeded = replace(parameters, seed=expected.started.seed)
                assert len(expected.choices) == (parameters.n or 1) and not expected.resumptions
                link.rates = FaultRates(cut=0.1)
                found = await asyncio.to_thread(cut.generate, "one two one two", seeded)
                found_async = await cut_async.generate("one two one two", seeded)
                link.rates = FaultRates()
                assert without_ids(found) == without_ids(found_async) == without_ids(expected)
                resumptions["sync"] += found.resumptions
                resumptions["async"] += found_async.resumptions
    await link.stop()
    assert min(resumptions.values()) > 0, "nothing was cut"


async def test_events_arrive_one_after_another_and_a_reader_may_leave(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.grpc_address, api_key=KEY) as client:
        whole = await client.generate("hi", CASES[0])
        events = client.stream("hi", CASES[0])
        assert isinstance(await anext(events), Started)
        first = await anext(events)
        assert isinstance(first, Delta) and whole.text.startswith(first.text)
        await events.aclose()
        assert (await client.generate("hi", CASES[0])).text == whole.text
    assert whole.choices[0].finished.reason is FinishReason.LENGTH
    assert whole.choices[0].usage.completion_tokens == 24 == len(whole.choices[0].token_ids)


async def test_the_other_calls(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.grpc_address, api_key=KEY) as client:
        tokens = await client.tokenize("hi there", add_special_tokens=False)
        assert await client.detokenize(tokens) == "hi there"
        (name,) = await client.models()
        assert not await client.abort("unknown")
        with pytest.raises(UnknownModel):
            await client.generate("hi", Parameters(model="other"))
        with Client(cluster.grpc_address, api_key=KEY) as other:
            assert await asyncio.to_thread(other.tokenize, "hi there", False) == tokens
            assert await asyncio.to_thread(other.detokenize, tokens) == "hi there"
            assert await asyncio.to_thread(other.models) == (name,)
            assert not await asyncio.to_thread(other.abort, "unknown")


async def test_refusals_and_losses_are_errors_of_the_client(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.grpc_address, api_key=KEY) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate("hi", Parameters(temperature=-1.0))
        assert (refused.value.field, "between" in str(refused.value)) == ("temperature", True)
    async with AsyncClient(cluster.grpc_address) as client:
        with pytest.raises(Unauthenticated):
            await client.generate("hi")
    async with AsyncClient("127.0.0.1:9", patience_seconds=0.2) as client:
        with pytest.raises(Unavailable):
            await client.generate("hi")
        with pytest.raises(Unavailable):
            await client.models()


async def test_another_address_answers_when_the_first_is_lost(cluster: LocalCluster) -> None:
    async with AsyncClient(["127.0.0.1:9", cluster.grpc_address], api_key=KEY) as client:
        found = await client.generate("hi", CASES[0])
    assert found.resumptions == 1 and len(found.text) > 0


async def test_a_server_of_this_machine_is_not_asked_through_a_proxy_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    generation, _, _ = fake_service(tmp_path)
    async with WireServer("127.0.0.1", 0) as server:
        add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        server.add("pilotfish.v1.GenerationService", add, GenerationServicer(generation))
        port = await server.start()
        for host in ("127.0.0.1", "localhost"):
            async with AsyncClient(f"{host}:{port}", patience_seconds=0.5) as client:
                assert (await client.generate("hi", Parameters(max_tokens=4))).text


async def test_certificates_of_both_sides(tmp_path: Path) -> None:
    files = make_certificate(tmp_path / "tls")
    generation, _, _ = fake_service(tmp_path)
    async with WireServer("127.0.0.1", 0, max_message_bytes=1 << 20, access=PeerAccess(tls=files)) as server:
        add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        server.add("pilotfish.v1.GenerationService", add, GenerationServicer(generation))
        address = f"127.0.0.1:{await server.start()}"
        own = Tls(ca=files.ca, certificate=files.certificate, key=files.key, server_name=NAME)
        with Client(address, tls=own) as client:
            assert (await asyncio.to_thread(client.generate, "hi", Parameters(max_tokens=4))).text
        async with AsyncClient(address, tls=own) as async_client:
            assert (await async_client.generate("hi", Parameters(max_tokens=4))).text
        async with AsyncClient(address, tls=Tls(ca=files.ca, server_name=NAME), patience_seconds=0.1) as stranger:
            with pytest.raises(Unavailable):
                await stranger.generate("hi")
