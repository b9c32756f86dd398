"""An engine that generates scripted answers, and a client that calls the servicers without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cluster.core.config.draft_section import LearnsFrom
from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.config.sections import LimitsSection
from cluster.core.draft_origin import DraftOrigin
from cluster.core.errors import Overloaded, PilotfishError
from cluster.core.ids import RequestId, SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import Commit, FinishReason, GenerationRequest, TokenLogprobs, Usage
from cluster.core.sequence import Sequence as Record
from cluster.core.tree import TokenTree
from cluster.core.verification import TargetInfo, Verdict
from cluster.generation.prompt_log import PromptLog
from cluster.generation.service import GenerationService
from cluster.generation.servicer import GenerationServicer
from cluster.generation.text.tokenizer import Tokenizer
from cluster.ingress.connections.protocol import BoundedHttpProtocol, ConnectionBounds
from cluster.ingress.connections.tls import tls_options
from cluster.ingress.observability.operations import OperationsServicer
from cluster.wire.address import http_url
from pilotfish.v1 import generation_pb2, operations_pb2
from tests.support.models.tiny_tokenizer import byte_level

MODEL = "tiny"
CONTEXT = 64
VOCABULARY = 300
Script = Callable[[GenerationRequest], Sequence[int]]


class ScriptedEngine:
    """Generates scripted answers. Each commit has `block` tokens, of which all but the last are accepted draft tokens.

    After `hold_after` commits it hangs.
    """

    def __init__(self, script: Script, block: int = 3) -> None:
        self.script = script
        self.block = block
        self.ready = True
        self.is_lossless = True
        self.context = CONTEXT
        """Longest sequence, in tokens."""
        self.decoder_start: tuple[int, ...] = ()
        self.max_source_len = 0
        self.forced_eos_token_id: int | None = None
        self.bad_words: tuple[tuple[int, ...], ...] = ()
        self.eos_token_ids: tuple[int, ...] = (2,)
        self.hold_after: int | None = None
        self.is_full = False
        self.refusal: PilotfishError | None = None
        self.failure: PilotfishError | None = None
        """Raised after the first commit."""
        self.certainty: Callable[[GenerationRequest], float] = lambda _: -0.5
        """Log-probability of every token of an answer."""
        self.requests: list[GenerationRequest] = []
        self.sent = 0
        """Number of tokens sent to clients."""
        self.concluded: list[tuple[RequestId, int]] = []
        self.arrived: asyncio.Queue[RequestId] = asyncio.Queue()
        self.freed: asyncio.Queue[RequestId] = asyncio.Queue()
        self._aborted: dict[RequestId, asyncio.Event] = {}

    @property
    def info(self) -> TargetInfo:
        layout, kv = KvLayout(16), KvOccupancy(self.context // 8, self.context // 8)
        info = TargetInfo(MODEL, VOCABULARY, self.context, layout, kv, self.eos_token_ids, 1, "float32")
        return replace(
            info,
            is_lossless=self.is_lossless,
            decoder_start=self.decoder_start,
            max_source_len=self.max_source_len,
            forced_eos_token_id=self.forced_eos_token_id,
            bad_words=self.bad_words,
        )

    def abort(self, request_id: RequestId) -> bool:
        event = self._aborted.get(request_id)
        if event is not None:
            event.set()
        return event is not None

    def count_sent(self, tokens: int) -> None:
        self.sent += tokens

    def longest_sequence(self, source_len: int) -> int:
        return self.context

    def check_room(self, client: str, request_id: RequestId, answers: int, priority: int = 0) -> None:
        if self.is_full:
            raise Overloaded("full")

    def conclude(self, request_id: RequestId, index: int) -> bool:
        self.concluded.append((request_id, index))
        return True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        self.requests.append(request)
        self.arrived.put_nowait(request.request_id)
        if self.refusal is not None:
            raise self.refusal
        aborted = self._aborted[request.request_id] = asyncio.Event()
        try:
            for count, commit in enumerate(self._all(request)):
                if count == self.hold_after:
                    await aborted.wait()
                    for index in range(request.n):
                        yield Commit((), 0, finish=FinishReason.ABORT, usage=Usage(len(request.input)), index=index)
                    return
                if (request.request_id, commit.index) not in self.concluded:
                    yield commit
                if self.failure is not None:
                    raise self.failure
                await asyncio.sleep(0)
        finally:
            del self._aborted[request.request_id]
            self.freed.put_nowait(request.request_id)

    def _all(self, request: GenerationRequest) -> list[Commit]:
        """Commits of all answers in turn. An answer has the script of a single request with its seed."""
        answers = []
        for index in range(request.n):
            seed = (request.sampling.seed + index) % 2**64
            single = replace(request, n=1, sampling=replace(request.sampling, seed=seed))
            commits = self._commits(Record(SequenceId(f"{request.request_id}-{index}"), single, 0))
            answers.append([replace(commit, index=index) for commit in commits])
        return [commit for turn in zip_longest(*answers) for commit in turn if commit is not None]

    def _commits(self, record: Record) -> list[Commit]:
        script = list(self.script(record.request))
        wanted = record.request.sampling.logprobs
        commits: list[Commit] = []
        position = 0
        while record.finish is None:
            tokens = tuple(script[(position + step) % len(script)] for step in range(self.block))
            position += self.block
            logprobs = () if wanted is None else tuple(self._logprobs(record, token, wanted) for token in tokens)
            verdict = Verdict(record.id, len(record), tokens, self.block, logprobs)
            verdict = replace(verdict, prompt_logprobs=() if commits else self._scored(record))
            commit = record.commit(
                verdict, (DraftOrigin.EARLIER, *[DraftOrigin.REQUEST] * verdict.accepted)[: verdict.accepted]
            )
            if commit is not None:
                commits.append(self._with_tree(record.request, commit))
        return commits

    def _with_tree(self, request: GenerationRequest, commit: Commit) -> Commit:
        """The commit with its draft tree, if the request wants it: the accepted chain beside one rejected token.

        The first accepted token comes from an earlier answer, the others from the request, the rejected one from a
        model.
        """
        if not request.returns_drafts:
            return commit
        accepted = commit.tokens[: commit.accepted]
        parents = tuple(range(-1, len(accepted) - 1))
        rejected = next(token for token in range(3, VOCABULARY) if token not in accepted[:1])
        tree = TokenTree((*accepted, rejected), (*parents, -1))
        return replace(commit, tree=tree, tree_origins=(*commit.origins, DraftOrigin.TRAINED))

    def _scored(self, record: Record) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the prompt, if the request wants them."""
        wanted, prompt = record.request.sampling.prompt_logprobs, record.request.prompt
        return () if wanted is None else tuple(self._logprobs(record, token, wanted) for token in prompt[1:])

    def _logprobs(self, record: Record, token: int, count: int) -> TokenLogprobs:
        logprob = self.certainty(record.request)
        return TokenLogprobs(token, logprob, tuple((token + rank, logprob - rank) for rank in range(count)))


class InProcessClient:
    """A client of the public service that calls the servicer directly."""

    def __init__(self, servicer: GenerationServicer, ready: Callable[[], bool]) -> None:
        self._servicer = servicer
        self._ready = ready
        self.reachable = True
        self.timeouts: list[float] = []
        self.aborted: list[tuple[str, str]] = []

    async def generate(
        self, request: generation_pb2.GenerateRequest, seconds: float, /
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        self.timeouts.append(seconds)
        async with aclosing(self._servicer.Generate(request, Remaining(seconds))) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    async def abort(self, request_id: str, client: str = "") -> bool:
        """Record the request, and abort nothing."""
        self.aborted.append((request_id, client))
        return True

    async def close(self) -> None:
        """Nothing is open."""

    async def list_models(self) -> Sequence[generation_pb2.Model]:
        return list((await self._servicer.ListModels(generation_pb2.ListModelsRequest(), Remaining(1))).models)

    async def get_model(self, name: str) -> generation_pb2.Model:
        return (await self._servicer.GetModel(generation_pb2.GetModelRequest(model=name), Remaining(1))).model

    async def tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        return await self._servicer.Tokenize(request, Remaining(1))

    async def detokenize(self, request: generation_pb2.DetokenizeRequest) -> generation_pb2.DetokenizeResponse:
        return await self._servicer.Detokenize(request, Remaining(1))

    async def metrics(self) -> tuple[bytes, str]:
        response = await OperationsServicer(OneMetric(), lambda *_: False).GetMetrics(
            operations_pb2.GetMetricsRequest(), Remaining(1)
        )
        return response.exposition, response.content_type

    async def is_ready(self) -> bool:
        return self._ready()

    async def is_reachable(self) -> bool:
        return self.reachable


class Remaining:
    """The part of a servicer context that the servicer reads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time_remaining(self) -> float:
        return self._seconds


class OneMetric:
    """A metrics source with one metric."""

    def exposition(self) -> tuple[bytes, str]:
        return b"answers_total 1\n", "text/plain; version=0.0.4"


def script_of(tokenizer: Tokenizer, text: str, *, ends: bool = True) -> Script:
    """A script of one text and the end-of-sequence token."""
    tokens = tokenizer.encode(text)
    return lambda _: (*tokens, 2) if ends else tokens


def fake_service(
    directory: Path,
    text: str = "hello the world",
    *,
    block: int = 3,
    limits: LimitsSection | None = None,
    learns_from: LearnsFrom = "none",
    prompt_log: PromptLog | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[GenerationService, ScriptedEngine, Tokenizer]:
    """A generation service over an engine that generates `text`.

    Without a `tokenizer`, `directory` receives the files of a byte-level one.
    """
    if tokenizer is None:
        byte_level(directory)
        tokenizer = _tokenizer()
    engine = ScriptedEngine(script_of(tokenizer, text), block)
    service = GenerationService(
        engine,
        tokenizer,
        limits or LimitsSection(),
        created=1_700_000_000,
        learns_from=learns_from,
        prompt_log=prompt_log,
    )
    return service, engine, tokenizer


_TOKENIZER_FILES = TemporaryDirectory(prefix="pilotfish-tokenizer-")


@cache
def _tokenizer() -> Tokenizer:
    """What `byte_level` saves, loaded once: compiling a chat template takes longer than most tests."""
    return Tokenizer.load(byte_level(Path(_TOKENIZER_FILES.name)))


_LAST_SECONDS = 0.1
"""How long `listening` waits for responses at its end."""


@asynccontextmanager
async def listening(
    app: ASGIApp, tls: PublicTlsSection | None = None, bounds: ConnectionBounds | None = None
) -> AsyncIterator[str]:
    """Serve the application on a free loopback port. Yields its address.

    `uvicorn.Server.serve` looks ten times a second whether it shall end, and then waits for another tenth.
    """

    class Protocol(BoundedHttpProtocol):
        pass

    Protocol.bounds = bounds or Protocol.bounds
    files: dict[str, Any] = {**tls_options(tls)}
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", http=Protocol, **files)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    await server.on_tick(0)  # makes the headers of responses
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield http_url("127.0.0.1", port, has_tls=tls is not None)
    finally:
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        if server.server_state.tasks:
            await asyncio.wait(server.server_state.tasks, timeout=_LAST_SECONDS)
