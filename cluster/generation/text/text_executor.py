"""Threads for work on texts, beside the event loop, with a bound on what waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from cluster.core.errors import Overloaded

_P = ParamSpec("_P")
_T = TypeVar("_T")

LONG_CHARS = 64 * 1024
"""Characters from which on a text counts as long."""
MOST_CHARS = 32 * 1024 * 1024
"""Most characters of all texts that are worked on or wait. A single text may be longer."""
_SHORT_THREADS = 2


class TextExecutor:
    """Tokenizes and renders in threads. Long texts take turns in one thread, so that short ones need not wait for them.

    Threads suffice: the tokenizer computes without Python's lock, and templates give it up every few milliseconds.
    """

    def __init__(self, most_chars: int = MOST_CHARS) -> None:
        self._most_chars = most_chars
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "texts")
        self._long = ThreadPoolExecutor(1, "long-texts")
        self._chars = 0
        self._lock = threading.Lock()

    async def run(self, chars: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what `work` returns for a text of `chars` characters. Raises its errors.

        Raises `Overloaded` if too many characters wait already.
        """
        with self._lock:
            if self._chars and self._chars + chars > self._most_chars:
                raise Overloaded("too many long texts wait to be tokenized")
            self._chars += chars
        pool = self._long if chars >= LONG_CHARS else self._short
        future = pool.submit(work, *args, **kwargs)
        future.add_done_callback(lambda done: self._ended(done, chars))
        return await asyncio.wrap_future(future)

    def _ended(self, _: Future[_T], chars: int) -> None:
        with self._lock:
            self._chars -= chars
