"""The clients of a fault schedule. Each compares every token that it reads with the reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from cluster.core.errors import DeadlineExceeded, NotReady, Overloaded, PilotfishError
from cluster.ingress.router.progress import StreamProgress
from deploy.simulation.faults.schedule import EOS_TOKENS, PATIENCE_SECONDS, PlannedRequest
from deploy.simulation.hashed_model import HashedModel
from deploy.simulation.invariants import Ledger
from deploy.simulation.remote import RemoteGeneration
from deploy.simulation.virtual_time import now
from pilotfish.v1 import generation_pb2

LATE_SECONDS = 2.0
"""How long after its deadline a client may wait for the status."""
_EXPECTED = ("complete", "left", "aborted")
PAUSE_SECONDS = 0.05
"""Pause of a client before it continues its stream at another ingress."""


class SimulatedClient:
    """Sends one request and reads its stream."""

    def __init__(
        self, name: str, planned: PlannedRequest, ingresses: Sequence[RemoteGeneration], ledger: Ledger
    ) -> None:
        self.name = name
        self.tokens = 0
        """Number of tokens read."""
        self.outcome = "unfinished"
        self._is_aborted = False
        self._aborting: asyncio.Task[None] | None = None
        self._planned = planned
        self._ingresses = ingresses
        self._ledger = ledger

    async def run(self, model: HashedModel) -> None:
        """Ask, read and compare."""
        planned = self._planned
        await asyncio.sleep(planned.at)
        begun = now()
        references = [self._reference(model, index) for index in range(planned.n)]
        while True:
            try:
                self.outcome = await self._read(references, planned.timeout_seconds - (now() - begun))
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_seconds)
                if now() - begun < planned.timeout_seconds:
                    continue
                self.outcome = "overloaded"
            except DeadlineExceeded:
                self.outcome = "deadline"
            except PilotfishError as error:
                self.outcome = "error"
                self._ledger.violate(f"{self.name} ended with {type(error).__name__}: {error}")
            break
        waited = now() - begun
        if waited > planned.timeout_seconds + LATE_SECONDS:
            self._ledger.violate(f"{self.name} ended {waited - planned.timeout_seconds:.2f} s after its deadline")
        if planned.timeout_seconds >= PATIENCE_SECONDS and self.outcome not in _EXPECTED:
            self._ledger.violate(f"{self.name} starved: {self.outcome} after {waited:.1f} s and {self.tokens} tokens")

    def _reference(self, model: HashedModel, index: int) -> list[int]:
        planned = self._planned
        seed = planned.seed + index if planned.temperature > 0 else 0
        stops = {*planned.stops, *EOS_TOKENS}
        answer = model.answer(planned.prompt, seed, planned.max_tokens, stops)
        if planned.stop_string is not None:
            text = ""
            for count, token in enumerate(answer, start=1):
                text += "" if token in stops else f"{token} "
                if planned.stop_string in text:
                    return answer[:count]
        return answer

    async def _read(self, references: list[list[int]], timeout_seconds: float) -> str:
        planned = self._planned
        answers: list[list[int]] = [[] for _ in references]
        ended: set[int] = set()
        if planned.leaves_after == 0:
            return "left"
        async with aclosing(self._responses(timeout_seconds)) as responses:
            async for response in responses:
                wrong = self._take(response, references[response.index], answers[response.index], ended)
                if wrong:
                    self._ledger.violate(f"{self.name}: answer {response.index} {wrong}")
                    return "wrong"
                if planned.aborts_after is not None and not self._aborting and self.tokens >= planned.aborts_after:
                    self._aborting = asyncio.create_task(self._abort())
                if planned.leaves_after is not None and self.tokens >= planned.leaves_after:
                    return "left"
        if len(ended) < planned.n:
            self._ledger.violate(f"{self.name}: the stream ended with {len(ended)} of {planned.n} answers")
        if self._is_aborted and planned.aborts_after is None:
            self._ledger.violate(f"{self.name} was aborted, and did not ask for it")
        return "aborted" if self._is_aborted else "complete"

    def _take(
        self, response: generation_pb2.GenerateResponse, reference: list[int], answer: list[int], ended: set[int]
    ) -> str | None:
        """Add a response to its answer. Returns what is wrong with it, if anything."""
        match response.WhichOneof("event"):
            case "delta":
                answer.extend(response.delta.token_ids)
                self.tokens += len(response.delta.token_ids)
                if response.index in ended:
                    return "grew after its end"
                if answer != reference[: len(answer)]:
                    return f"differs: {answer} instead of {reference}"
            case "finished":
                ended.add(response.index)
                if response.finished.reason == generation_pb2.FINISH_REASON_ABORT:
                    self._is_aborted = True
                elif answer != reference:
                    return f"ended after {len(answer)} tokens instead of {len(reference)}"
        return None

    async def _abort(self) -> None:
        with suppress(PilotfishError):
            await self._ingresses[0].abort(self.name)

    async def _responses(self, timeout_seconds: float) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The stream of the request. When its ingress is lost, it continues at another one."""
        progress, deadline = StreamProgress(self._message()), now() + timeout_seconds
        attempt = 0
        while True:
            message = progress.message()
            if self._planned.resumes_by_count:
                for answer in message.resume:
                    del answer.token_ids[:]
            ingress = self._ingresses[attempt % len(self._ingresses)]
            attempt += 1
            try:
                async with aclosing(ingress.generate(message, deadline - now())) as responses:
                    async for response in responses:
                        passed = progress.receive(response)
                        if passed is not None:
                            yield passed
            except NotReady:
                if progress.is_complete:
                    return
                if now() + PAUSE_SECONDS >= deadline:
                    raise DeadlineExceeded("the deadline passed while no ingress could answer") from None
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                return

    def _message(self) -> generation_pb2.GenerateRequest:
        planned = self._planned
        message = generation_pb2.GenerateRequest(request_id=self.name, n=planned.n, cache_salt=planned.salt)
        message.token_ids.ids.extend(planned.prompt)
        message.sampling.seed = planned.seed
        message.sampling.temperature = planned.temperature
        message.stopping.max_tokens = planned.max_tokens
        message.stopping.stop_token_ids.extend(planned.stops)
        if planned.stop_string is not None:
            message.stopping.stop.append(planned.stop_string)
        if planned.max_draft_tokens is not None:
            message.max_draft_tokens = planned.max_draft_tokens
        return message
