"""An answer ends in the middle of an accepted block: nothing beyond its end is sent, counted or kept.

The draft model has the target's weights, so that greedy drafts are accepted to the end of every block.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from cluster.core.request import SamplingParameters
from cluster.generation.text.tokenizer import Tokenizer
from cluster.wire.codec.common import encode_sampling
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.deadline import deadline
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.plain_generation import write_alone

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 120.0
"""Far above the duration of any test on a busy machine."""
VOCABULARY = 320
CONTEXT = 256
END = 2
"""The model's end of sequence."""
COUNT = 40
GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.7, seed=3)
STOP, LENGTH = generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True)
class Received:
    """An answer as a client receives it."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    """Number of tokens of each delta."""
    text: str
    finished: generation_pb2.GenerationFinished


class Alone:
    """The target alone, by `transformers`. An encoder-decoder model reads the prompt as its source."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.has_source = AutoConfig.from_pretrained(directory).is_encoder_decoder
        kind: Any = AutoModelForSeq2SeqLM if self.has_source else AutoModelForCausalLM
        self._model = kind.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.load(directory)

    def answer(self, prompt: Sequence[int], sampling: SamplingParameters, count: int = COUNT) -> tuple[int, ...]:
        """The first tokens of the answer, whatever they are."""
        if not self.has_source:
            return write_alone(self._model, prompt, sampling, count)
        defaults = self._model.generation_config
        starts = (defaults.decoder_start_token_id, defaults.forced_bos_token_id)
        with torch.inference_mode():
            encoded = self._model.get_encoder()(torch.tensor([prompt]))

        def decoder(tokens: torch.Tensor, **cache: Any) -> Any:
            return self._model(encoder_outputs=encoded, decoder_input_ids=tokens, **cache)

        return write_alone(decoder, [token for token in starts if token is not None], sampling, count)


CONFIGURATIONS = {
    "llama": tiny.llama(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT),
    "t5": tiny.t5(vocab_size=VOCABULARY),
    "bart": tiny.bart(vocab_size=VOCABULARY),
}


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    tiny.save(directory, CONFIGURATIONS[request.param])
    file = directory / "generation_config.json"
    defaults = json.loads(file.read_text("utf-8")) | {"forced_eos_token_id": None}
    file.write_text(json.dumps(defaults), "utf-8")  # so that an answer may reach its largest length without an end
    return directory


@pytest.fixture(scope="module")
def alone(directory: Path) -> Alone:
    return Alone(directory)


@pytest.fixture
async def client(directory: Path) -> AsyncIterator[GenerationClient]:
    model = {"path": str(directory), "device": "cpu", "compile": "off", "kv": {"pool_bytes": 4 << 20}}
    draft = {"method": "model", "controller": "off", "timeout_seconds": 10.0, "max_nodes": 6, "max_depth": 6}
    scheduler = {"max_sequences": 8, "max_step_tokens": 128}
    configuration = tiny_cluster(directory, draft | {"model": model}, kv={"block_size": 4}, scheduler=scheduler)
    async with (
        deadline(TIMEOUT_SECONDS),
        LocalCluster(configuration) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        yield client


def prompt(number: int, length: int = 12) -> tuple[int, ...]:
    return tuple((7 * number + 11 * place) % 300 + 3 for place in range(length))


async def receive(
    client: GenerationClient, prompt: Sequence[int], sampling: SamplingParameters, **stopping: Any
) -> Received:
    message = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=encode_sampling(sampling),
        stopping=generation_pb2.StoppingCriteria(**stopping),
    )
    deltas: list[generation_pb2.GenerationDelta] = []
    finished = generation_pb2.GenerationFinished()
    async for response in client.generate(message, TIMEOUT_SECONDS):
        deltas += [response.delta] if response.HasField("delta") else []
        finished.MergeFrom(response.finished)
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    assert finished.usage.completion_tokens == len(tokens)
    assert finished.usage.accepted_draft_tokens == sum(delta.accepted_draft_tokens for delta in deltas)
    blocks = tuple(len(delta.token_ids) for delta in deltas)
    return Received(tokens, blocks, "".join(delta.text for delta in deltas), finished)


async def values(client: GenerationClient, *names: str) -> dict[str, float]:
    """Metrics by name."""
    lines = (await client.metrics())[0].decode().splitlines()
    return {name: next(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")) for name in names}


def until(tokens: Sequence[int], *ends: int) -> tuple[int, ...]:
    """The tokens up to the first end, inclusive."""
    count = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: count + 1])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_an_answer_ends_at_the_first_of_several_stop_tokens(
    sampling: SamplingParameters, alone: Alone, client: GenerationClient
) -> None:
    used = 0
    for number in range(6):
        plain = alone.answer(prompt(number), sampling)
        stops = [plain[9 + number], plain[15], plain[30]]
        got = await receive(client, prompt(number), sampling, max_tokens=COUNT, stop_token_ids=stops, ignore_eos=True)
        assert got.tokens == until(plain, *stops)
        assert (got.finished.reason, got.finished.stop_token_id) == (STOP, got.tokens[-1])
        used += got.finished.usage.accepted_draft_tokens
    assert used > 0


async def test_the_models_end_of_sequence_ends_an_answer_unless_it_is_ignored(
    alone: Alone, client: GenerationClient
) -> None:
    found = 0
    for number, bias in itertools.product(range(3), (0.0, 2.0)):
        biased = replace(SAMPLED, logit_bias=((END, bias),))
        plain = alone.answer(prompt(number), biased)
        if not 3 <= len(until(plain, END)) < 30:
            continue
        found += 1
        got = await receive(client, prompt(number), biased, max_tokens=COUNT)
        assert (got.tokens, got.finished.reason) == (until(plain, END), STOP)
        got = await receive(client, prompt(number), biased, max_tokens=COUNT, ignore_eos=True)
        assert (got.tokens, got.finished.reason) == (plain, LENGTH)
    assert found > 0


async def test_a_stop_string_across_tokens_ends_the_answer_at_the_token_that_completes_it(
    alone: Alone, client: GenerationClient
) -> None:
    before = await values(client, "vllm:generation_tokens_total")
    decode = alone.tokenizer.decode
    sent = cut = 0
    for number in range(12):
        plain = alone.answer(prompt(number), GREEDY)
        for first in range(4, 20):
            stop = decode(plain[first : first + 2])
            if len(stop) >= 2 and stop.isascii() and decode(plain[first : first + 1]) != stop:
                break
        else:
            continue
        count = next(count for count in range(len(plain) + 1) if stop in decode(plain[:count]))
        got = await receive(client, prompt(number), GREEDY, max_tokens=COUNT, stop=[stop], ignore_eos=True)
        assert (got.tokens, got.finished.reason, got.finished.stop_string) == (plain[:count], STOP, stop)
        assert got.text == decode(plain[:count]).split(stop)[0]
        sent += len(got.tokens)
        cut += 1
    assert cut >= 3
    after = await values(client, "vllm:generation_tokens_total")
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == sent


async def test_the_longest_answer_cuts_a_block(alone: Alone, client: GenerationClient) -> None:
    for most in (1, 2, 5, 11):
        got = await receive(client, prompt(1), GREEDY, max_tokens=most, ignore_eos=True)
        assert (got.tokens, got.finished.reason) == (alone.answer(prompt(1), GREEDY, most), LENGTH)


async def test_the_end_of_the_context_cuts_a_block(alone: Alone, client: GenerationClient) -> None:
    if alone.has_source:
        pytest.skip("a source takes nothing of the context of its answer")
    long = prompt(2, CONTEXT - 40)  # longer than the drafter needs to read it
    got = await receive(client, long, GREEDY, ignore_eos=True)
    assert (got.tokens, got.finished.reason) == (alone.answer(long, GREEDY, 40), LENGTH)
    assert max(got.blocks) > 1


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_nothing_ends_an_answer_before_its_minimal_length(
    sampling: SamplingParameters, alone: Alone, client: GenerationClient
) -> None:
    for number in range(4):
        plain = alone.answer(prompt(number), sampling)
        stops = sorted({END, *plain[2:20:3]})
        least = 9 + number
        expected = alone.answer(prompt(number), replace(sampling, end_token_ids=tuple(stops), min_tokens=least))
        got = await receive(
            client, prompt(number), sampling, max_tokens=COUNT, stop_token_ids=stops[1:], min_tokens=least
        )
        assert got.tokens == until(expected, *stops)
        assert len(got.tokens) > least


async def test_after_all_answers_no_memory_is_held_and_every_token_is_counted_once(
    alone: Alone, client: GenerationClient
) -> None:
    stops = [alone.answer(prompt(number), GREEDY)[10] for number in range(8)]
    answers = await asyncio.gather(
        *(
            receive(client, prompt(number), GREEDY, max_tokens=COUNT, stop_token_ids=[stops[number]])
            for number in range(8)
        )
    )
    usages = [got.finished.usage for got in answers]
    for _ in range(500):
        held = (await values(client, "vllm:kv_cache_usage_perc"))["vllm:kv_cache_usage_perc"]
        if held == 0.0:
            break
        await asyncio.sleep(0.02)
    assert held == 0.0
    assert await values(
        client,
        "vllm:generation_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ) == {
        "vllm:generation_tokens_total": sum(usage.completion_tokens for usage in usages),
        "vllm:spec_decode_num_accepted_tokens_total": sum(usage.accepted_draft_tokens for usage in usages),
        "vllm:spec_decode_num_draft_tokens_total": sum(usage.drafted_tokens for usage in usages),
    }
