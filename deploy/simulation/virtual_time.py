"""An event loop on a virtual clock, and simulated processes in it that can be killed and frozen.

Sleeping costs no real time: the clock jumps to the next timer when nothing is ready. The same coroutines with the same
random numbers run in the same order every time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from cluster.core.errors import PilotfishError

Value = TypeVar("Value")

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class Stalled(PilotfishError):
    """All tasks wait, and no timer is set."""


class _NoSockets(selectors.SelectSelector):
    """Advances the virtual time instead of waiting for sockets."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return at once, without events."""
        if timeout is None:
            raise Stalled("all tasks wait, and no timer is set")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which only sleeping takes (virtual) time. It has no sockets and no threads."""

    def __init__(self) -> None:
        self._clock = _NoSockets()
        self.frozen = 0
        """Number of frozen processes."""
        super().__init__(self._clock)
        self._clock_resolution = 1e-9
        self.set_task_factory(_create_task)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clock.now

    def call_soon(  # type: ignore[override]  # the stub requires variadic type arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a callback. Those of a frozen process wait until it continues."""
        if self.frozen:
            owner = _process.get() if context is None else context.get(_process)
            if owner is not None and owner.is_frozen:
                handle = asyncio.Handle(callback, args, self, context)
                owner.held.append(handle)
                return handle
        return super().call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]  # the stub requires variadic type arguments
        self,
        executor: object,  # noqa: ARG002 - asyncio's signature
        func: Callable[..., Any],
        *args: Any,
    ) -> asyncio.Future[Any]:
        """Call a function at once instead of in a thread."""
        result: asyncio.Future[Any] = self.create_future()
        result.set_result(func(*args))
        return result

    def resume_handle(self, handle: asyncio.Handle) -> None:
        """Run a callback that was held back."""
        self._ready.append(handle)  # type: ignore[attr-defined]  # BaseEventLoop's queue keeps the handle's context


class Process:
    """A simulated process: the tasks that run in it, and those that they start."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.held: list[asyncio.Handle] = []
        """Callbacks that wait until the process is no longer frozen."""
        self.on_exit: list[Callable[[], None]] = []
        """Called once when the process is killed."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        context = copy_context()
        context.run(_process.set, self)
        self._context = context

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks of the process that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def spawn(self, coroutine: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Run a coroutine as a task of this process."""
        return asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())

    def kill(self, unnoticed_seconds: float = 0.0) -> None:
        """End the process. Its tasks are cancelled, and nothing that they still do leaves the process.

        Callers notice after `unnoticed_seconds`.
        """
        if not self.is_alive:
            return
        self.thaw()
        self.is_alive = False
        for task in self.tasks:
            task.cancel()
        for callback in list(self.on_exit):
            _loop().call_later(unnoticed_seconds, callback)

    def freeze(self) -> None:
        """Stop the process as SIGSTOP does: its callbacks wait, the clock goes on."""
        if self.is_alive and not self.is_frozen:
            self.is_frozen = True
            _loop().frozen += 1

    def thaw(self) -> None:
        """Let a frozen process continue."""
        if self.is_frozen:
            self.is_frozen = False
            loop = _loop()
            loop.frozen -= 1
            held, self.held = self.held, []
            for handle in held:
                loop.resume_handle(handle)

    def add(self, task: asyncio.Task[Any]) -> None:
        """Count a task as part of this process."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


def current_process() -> Process | None:
    """The process that the running task belongs to; `None` outside of every process."""
    return _process.get()


def now() -> float:
    """The virtual time in seconds."""
    return asyncio.get_running_loop().time()


def run_virtual(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine in virtual time. Raises `Stalled` when it can never end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise TypeError("a simulated process needs a VirtualLoop")
    return loop


def _create_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, *, context: Context | None = None
) -> asyncio.Task[Any]:
    owner = _process.get() if context is None else context.get(_process)
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, context=context)
    if owner is not None:
        owner.add(task)
    return task
