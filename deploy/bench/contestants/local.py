"""A cluster in this process as a contestant. Clients reach it over gRPC, as in production."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.origin_counts import origins_as_json
from deploy.bench.contestants.answers import (
    Arrival,
    BenchAnswer,
    BenchPass,
    BenchPrompt,
    PassRequest,
    RequestOptions,
    answer_pass,
)
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from workers.model.weight_files import is_encoder_decoder

COUNTERS = {
    "pilotfish:proposed_nodes_total": "proposed_tokens",
    "pilotfish:drafter_call_seconds_total": "drafter_seconds",
    "pilotfish:target_step_seconds_sum": "target_seconds",
    "pilotfish:target_step_seconds_count": "target_passes",
    "pilotfish:propose_latency_seconds_sum": "wait_for_drafts_seconds",
    "pilotfish:drafter_fallback_total": "missing_drafts",
}
"""The coordinator's counters that a pass records: from the metric's name to the name in the results."""
_PREDICTION = "prediction"
"""The drafting method that drafts from the request's prediction."""
_ALTERNATIVES = 20
"""Number of most probable tokens that `LocalContestant.gap` requests."""
_SHARED_SALT = "bench-shared"
"""The salt of requests that share stored blocks over passes."""
_NO_CHANGE = RequestOptions()


@dataclass(frozen=True, slots=True)
class LocalContestant:
    """Sends the requests of a pass to a cluster and counts what it reports."""

    client: GenerationClient
    timeout_seconds: float
    drafts: bool = True
    """Otherwise, every request turns speculation off."""
    predicts: bool = False
    """Whether requests have a prediction (see `GenerateRequest`). It suits answers that repeat much of the prompt."""
    options: RequestOptions = _NO_CHANGE
    reads_source: bool = False
    """Whether prompts are sources of an encoder-decoder model: no request can ask what follows half an answer."""

    def without_drafts(self) -> LocalContestant:
        """A contestant that turns speculation off in every request to the cluster of this one."""
        return replace(self, drafts=False, predicts=False)

    def with_options(self, options: RequestOptions) -> LocalContestant:
        """A contestant that sends these options in every request to the cluster of this one."""
        return replace(self, options=options)

    async def answer(self, request: PassRequest) -> BenchPass:
        before = await self._counters()
        found = await answer_pass(request, self._answer)
        after = await self._counters()
        return replace(found, counters={name: after[name] - before.get(name, 0.0) for name in after})

    async def gap(self, context: tuple[int, ...], expected: int, found: int) -> float | None:
        """By how much the logit of `expected` is above that of `found` after the tokens of `context`.

        `None` if one of them is not among the 20 most probable tokens.
        """
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=context),
            sampling=common_pb2.SamplingParameters(temperature=0.0, logprobs=_ALTERNATIVES),
            stopping=generation_pb2.StoppingCriteria(max_tokens=1, ignore_eos=True),
            max_draft_tokens=0,
        )
        known: dict[int, float] = {}
        async for response in self.client.generate(request, self.timeout_seconds):
            for logprobs in response.delta.logprobs:
                known.update({entry.token_id: entry.logprob for entry in logprobs.top})
        return known[expected] - known[found] if expected in known and found in known else None

    async def _answer(self, request: PassRequest, prompt: BenchPrompt, seed: int) -> BenchAnswer:
        message = self._message(request, prompt, seed)
        tokens: list[int] = []
        text: list[str] = []
        arrivals: list[Arrival] = []
        usage = generation_pb2.Usage()
        is_lossless = True
        begun = time.perf_counter()
        async for response in self.client.generate(message, self.timeout_seconds):
            is_lossless &= not response.lossy
            delta = response.delta
            text.append(delta.text)
            if delta.token_ids:
                elapsed = time.perf_counter() - begun
                arrivals.append(Arrival(elapsed, len(delta.token_ids), delta.accepted_draft_tokens))
                tokens.extend(delta.token_ids)
            if response.HasField("finished"):
                usage = response.finished.usage
        return BenchAnswer(
            tuple(tokens),
            tuple(arrivals),
            usage.completion_tokens,
            usage.drafted_tokens,
            usage.target_steps,
            is_lossless,
            "".join(text),
            usage.prompt_tokens,
            usage.cached_tokens,
            origins_as_json(usage.accepted_by_origin),
        )

    def _message(self, request: PassRequest, prompt: BenchPrompt, seed: int) -> generation_pb2.GenerateRequest:
        """The request for one answer. A prompt without tokens is sent as text, which the server tokenizes."""
        message = generation_pb2.GenerateRequest(
            sampling=common_pb2.SamplingParameters(temperature=request.temperature, seed=seed),
            stopping=generation_pb2.StoppingCriteria(max_tokens=request.max_tokens),
            cache_salt=_SHARED_SALT if self.options.reuses_cache else request.salt,
            max_draft_tokens=None if self.drafts else 0,
        )
        if prompt.tokens:
            message.token_ids.ids.extend(prompt.tokens)
        else:
            message.text = prompt.text
        if self.predicts:
            message.prediction_text = prompt.prediction or prompt.text
        if self.options.beams > 1:
            message.best_of = self.options.beams
            message.beam_search.length_penalty = self.options.length_penalty
        return message

    async def _counters(self) -> dict[str, float]:
        exposition, _ = await self.client.metrics()
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(exposition.decode("utf-8")):
            for sample in family.samples:
                if sample.name in COUNTERS:
                    name = COUNTERS[sample.name]
                    totals[name] = totals.get(name, 0.0) + sample.value
        return totals


@asynccontextmanager
async def local_contestant(
    configuration: Configuration, options: RequestOptions = _NO_CHANGE
) -> AsyncIterator[LocalContestant]:
    """Start a cluster in this process. Raises `PilotfishError`."""
    async with LocalCluster(configuration) as cluster:
        predicts = _PREDICTION in configuration.draft.selected("method")
        async with GenerationClient(fixed_address(cluster.grpc_address), cluster.access) as client:
            seconds = configuration.limits.max_timeout_seconds
            reads_source = is_encoder_decoder(Path(configuration.target.path))
            yield LocalContestant(client, seconds, predicts=predicts, options=options, reads_source=reads_source)
