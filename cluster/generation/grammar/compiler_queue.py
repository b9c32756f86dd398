"""The order in which new grammars are compiled: fair among clients, by the time that their grammars have taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cluster.core.errors import Overloaded
from cluster.core.fair_queue import FairQueue
from cluster.core.grammar import Grammar
from cluster.generation.grammar.compiler_process import Compiled

MOST_WAITING = 1024
"""Most grammars that wait to be compiled."""
MOST_OF_ONE_FLOW = 64
"""Most of them that one client, or one request of a client without a name, has."""


class _Job:
    """A grammar that waits or is compiled."""

    def __init__(self) -> None:
        self.done: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        self.waiting_for_it = 0
        self.flows: set[str] = set()
        self.has_begun = False


class CompilerQueue:
    """Compiles one grammar at a time in a thread.

    A compilation that has begun is finished even if nobody waits for it any more. One that has not is dropped then.
    """

    def __init__(
        self, name: str, compile_one: Callable[[Grammar], Compiled], keep: Callable[[Grammar, Compiled], None]
    ) -> None:
        """`compile_one` is called in a thread named `name`, `keep` with what it returns."""
        self._compile, self._keep = compile_one, keep
        self._thread = ThreadPoolExecutor(1, name)
        self._jobs: dict[Grammar, _Job] = {}
        self._waiting: dict[str, dict[Grammar, None]] = {}
        """The grammars of each flow that wait, in order of arrival."""
        self._shares = FairQueue()
        """The time that each flow has had, in milliseconds."""
        self._work: asyncio.Task[None] | None = None

    async def compile(self, grammar: Grammar, flow: str) -> Compiled:
        """Return what the compilation shows. Raises `Overloaded` if too many grammars wait, and what it raises."""
        job = self._enter(grammar, flow)
        job.waiting_for_it += 1
        try:
            return await asyncio.shield(job.done)
        finally:
            job.waiting_for_it -= 1
            if not job.waiting_for_it and not job.has_begun:
                self._leave(grammar, job)

    def close(self) -> None:
        """Compile no more. Who waits is cancelled."""
        if self._work is not None:
            self._work.cancel()
        for job in self._jobs.values():
            job.done.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _enter(self, grammar: Grammar, flow: str) -> _Job:
        job = self._jobs.get(grammar)
        if job is not None and (job.has_begun or flow in job.flows):
            return job
        own = self._waiting.get(flow, {})
        if len(self._jobs) >= MOST_WAITING or len(own) >= MOST_OF_ONE_FLOW:
            raise Overloaded("too many grammars wait to be compiled")
        job = self._jobs.setdefault(grammar, job or _Job())
        job.flows.add(flow)
        self._waiting.setdefault(flow, own)[grammar] = None
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._compile_all())
        return job

    def _leave(self, grammar: Grammar, job: _Job) -> None:
        """Take a grammar out of the queue."""
        for flow in job.flows:
            own = self._waiting[flow]
            del own[grammar]
            if not own:
                del self._waiting[flow]
        if not job.has_begun:
            del self._jobs[grammar]

    async def _compile_all(self) -> None:
        """Compile until nothing waits. The flow that has had the least time is next."""
        while self._waiting:
            flow = min(self._waiting, key=lambda name: max(self._shares.now, self._shares.used.get(name, 0)))
            grammar = next(iter(self._waiting[flow]))
            job = self._jobs[grammar]
            job.has_begun = True
            self._leave(grammar, job)
            begun = time.monotonic()
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
            except Exception as error:
                job.done.set_exception(error)
                job.done.exception()  # it is logged where it is awaited
            else:
                self._keep(grammar, found)
                job.done.set_result(found)
            del self._jobs[grammar]
            milliseconds = 1 + int((time.monotonic() - begun) * 1000)
            turn, self._shares = self._shares.enter(flow, milliseconds)
            self._shares = self._shares.start(turn, milliseconds, len({flow, *self._waiting}))
