"""Alternating requests and answers on one gRPC stream, for a caller that waits for each answer.

A stream that stays open costs half of the time of a call: for each call, gRPC starts a thread and opens a stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any


class StreamEnded(Exception):
    """The server has ended the stream."""


class Exchange:
    """One stream. After an error it is of no use; close it."""

    def __init__(self, open_stream: Callable[[Iterator[Any]], Any]) -> None:
        """`open_stream` calls a streaming method with an iterator of requests, and returns gRPC's call."""
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call = open_stream(iter(self._requests.get, None))
        threading.Thread(target=self._read, name="pilotfish-drafts", daemon=True).start()

    def ask(self, request: Any, seconds: float) -> Any:
        """Send a request and return its answer.

        Raises gRPC's `RpcError`, `StreamEnded`, and `TimeoutError` without an answer in time.
        """
        self._requests.put(request)
        try:
            answer = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the stream and its threads."""
        self._requests.put(None)
        self._call.cancel()

    def _read(self) -> None:
        try:
            for answer in self._call:
                self._answers.put(answer)
        except Exception as error:  # the caller raises it
            self._answers.put(error)
        else:
            self._answers.put(StreamEnded("the drafter has ended the stream"))
