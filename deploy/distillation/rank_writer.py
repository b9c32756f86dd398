"""Texts and hidden states for a training, from ranks of the serving engine that this process starts."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, TargetUnavailable
from cluster.core.ports import Target
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.distillation.conversations import Tokens, Write, WritingPlan
from deploy.distillation.one_rank import TargetRanks, one_rank
from deploy.distillation.served_texts import Server, TextClient
from deploy.distillation.target import for_answers, together, with_many_sequences
from deploy.local.local_cluster import LocalCluster
from deploy.models import served_name
from pilotfish.v1 import common_pb2, generation_pb2
from workers.distill.job import ReadStates
from workers.distill.served_states import served_states
from workers.model.target_ends import read_config
from workers.verify.evidence import MAX_SENT_BYTES

_ROW_SEEDS = 1 << 20
"""More than the rows of a batch, so that each row of each batch has a seed of its own."""
_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses after losses of the ranks in a row, in seconds: it takes a while until their end is noticed."""

Result = TypeVar("Result")


class RankWriter:
    """The ranks of a target. They start to write texts, and anew to show hidden states. It is a `TextWriter`.

    One rank runs in this process, several are processes of their own. Answers would take longer if they brought hidden
    states. A context manager.
    """

    def __init__(
        self,
        configuration: Configuration,
        told: Callable[[str], None],
        max_length: int,
        server: Server | None = None,
    ) -> None:
        """`told` gets lines of the progress, and no text has more than `max_length` tokens.

        Model paths in the configuration are local directories. A `server` writes the texts in the place of the ranks.
        """
        self._server = server
        self._configuration = with_many_sequences(for_answers(configuration))
        self._told = told
        self._max_length = max_length
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._write: Write | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        self._runner.close()

    @property
    def sequences(self) -> int:
        """Texts that are written at the same time."""
        return self._configuration.scheduler.max_sequences

    @property
    def settings(self) -> str:
        """Names the settings that hidden states depend on beside the weights; empty if all have their defaults."""
        target = self._configuration.target
        names = {"dtype", "window", "sinks"} if target.kv.window is not None else {"dtype"}
        kept = {"dtype"} if target.quantization == "none" else {"dtype", "quantization"}
        changed = [
            target.model_dump(mode="json", include=kept, exclude_defaults=True),
            target.kv.model_dump(mode="json", include=names, exclude_defaults=True),
        ]
        return blake2b(json.dumps(changed, sort_keys=True).encode(), digest_size=4).hexdigest() if any(changed) else ""

    def writing(self) -> Write:
        """Start the ranks, unless they write already. What is returned writes texts until `reading` or `release`."""
        if self._write is not None:
            return self._write
        self.release()
        if self._server is None:
            ranks, api = self._run(self._begin_writing())
        else:
            ranks, api = None, self._run(self._begin_asking(self._server))

        def write(prompts: Sequence[Tokens], temperatures: Sequence[float], plan: WritingPlan) -> list[Tokens]:
            writing = api.continuations(prompts, temperatures, plan)
            return self._run(writing if ranks is None else ranks.guarded(writing))

        self._write = write
        return write

    def reading(self, taps: Sequence[int]) -> ReadStates:
        """Start ranks that show these hidden states. What is returned reads texts until `writing` or `release`."""
        self.release()
        states = self._run(self._begin_reading(taps))

        def read(rows: Sequence[Sequence[int]], *_: object) -> list[Tensor]:
            return self._run(states.ranks.guarded(states.of(rows)))

        return read

    def release(self) -> None:
        """Stop the ranks, if they run. The memory of one in this process is free then."""
        self._write = None
        self._run(self._stack.aclose())
        gc.collect()  # the engine and its KV pool have references in cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def _ranks(self, purpose: str, taps: Sequence[int] = ()) -> AbstractAsyncContextManager[TargetRanks]:
        count = self._configuration.target.tensor_parallel
        self._told(f"the target starts on {count} rank{'s' if count > 1 else ''}, to {purpose}")
        if count == 1:
            return one_rank(self._configuration, taps)
        from deploy.distillation.target_ranks import target_ranks  # it needs Ray

        return target_ranks(self._configuration, taps)

    async def _begin_writing(self) -> tuple[TargetRanks, _Api]:
        configuration, enter = self._configuration, self._stack.enter_async_context
        ranks = await enter(self._ranks("write texts"))
        context = await self._context(ranks.target)
        cluster = await ranks.guarded(enter(LocalCluster(configuration, target=ranks.target)))
        client = GenerationClient(fixed_address(cluster.grpc_address), cluster.access)
        self._stack.push_async_callback(client.close)
        limits = configuration.limits
        most = min(context, limits.max_output_tokens or context)
        return ranks, _Api(client, context, most, self.sequences, limits.max_timeout_seconds)

    async def _begin_asking(self, server: Server) -> _Api:
        target = self._configuration.target
        self._told(f"{server.url} writes texts")
        client = await self._stack.enter_async_context(
            server.client(Path(target.path), served_name(self._configuration), self._told)
        )
        self._check_length(client.context)
        return _Api(client, client.context, client.context, self.sequences, 0.0)

    async def _begin_reading(self, taps: Sequence[int]) -> _States:
        configuration = self._configuration
        ranks = await self._stack.enter_async_context(self._ranks("compute hidden states", taps))
        await self._context(ranks.target)
        config = read_config(Path(configuration.target.path))
        width = len(taps) * int(config.get_text_config().hidden_size)
        step_tokens = max(1, min(configuration.scheduler.max_step_tokens, MAX_SENT_BYTES // (2 * width)))
        return _States(ranks, width, step_tokens, self._told)

    async def _context(self, target: Target) -> int:
        """Most tokens of a text that the target reads. Raises `ConfigurationError` if texts may have more."""
        context = (await target.info()).max_context_len
        self._check_length(context)
        return context

    def _check_length(self, context: int) -> None:
        if self._max_length > context:
            raise ConfigurationError(
                f"--max-length: {self._max_length} is refused; the target reads texts of {context} tokens at most"
            )


@dataclass(frozen=True, slots=True)
class _Api:
    """Lets a cluster continue prompts, all that it has sequences for at the same time."""

    client: TextClient
    context: int
    """Most tokens of a prompt and its continuation."""
    most_tokens: int
    """Most tokens of a continuation."""
    sequences: int
    timeout_seconds: float

    async def continuations(
        self, prompts: Sequence[Tokens], temperatures: Sequence[float], plan: WritingPlan
    ) -> list[Tokens]:
        """What the target writes after each prompt; nothing after one that fills its context.

        Where the plan has longer texts than the target writes, they end earlier.
        Texts depend on the plan and on their number, not on each other. Raises `PilotfishError`.
        """
        written: list[list[int]] = [[] for _ in prompts]
        waiting = iter(range(len(prompts)))

        async def work() -> None:
            for row in waiting:
                if len(prompts[row]) >= self.context:
                    continue
                request = generation_pb2.GenerateRequest(
                    token_ids=common_pb2.TokenIds(ids=prompts[row]),
                    sampling=common_pb2.SamplingParameters(
                        temperature=temperatures[row],
                        min_p=plan.floor,
                        seed=(plan.seed * _ROW_SEEDS + row) % (1 << 64),
                    ),
                    stopping=generation_pb2.StoppingCriteria(
                        max_tokens=min(plan.most_tokens, self.most_tokens), stop_token_ids=plan.stops
                    ),
                )
                async for response in self.client.generate(request, self.timeout_seconds):
                    if response.WhichOneof("event") == "delta":
                        written[row].extend(response.delta.token_ids)

        await together(self.sequences, work, plan.ends)
        return [tuple(row) for row in written]


@dataclass(frozen=True, slots=True)
class _States:
    """Reads the hidden states of texts from ranks that show them."""

    ranks: TargetRanks
    width: int
    """Numbers of a token."""
    step_tokens: int
    told: Callable[[str], None]

    async def of(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """The hidden states of texts; see `served_states`. Where ranks are lost, it waits for them and reads again.

        Raises `ConfigurationError`, and `TargetUnavailable` where they are lost again and again.
        """
        for pause in _PAUSES:
            await self.ranks.serving()
            try:
                return await served_states(self.ranks.target, rows, self.width, self.step_tokens)
            except TargetUnavailable as error:
                self.told(f"hidden states: {error}; {len(rows)} texts are read again")
            await asyncio.sleep(pause)
        raise TargetUnavailable(f"hidden states: the target was lost {len(_PAUSES)} times in a row")
