"""The port to a coordinator in the same process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from cluster.core.ids import RequestId
from cluster.core.request import Commit, GenerationRequest
from cluster.core.verification import TargetInfo


class Engine(Protocol):
    """The coordinator, as the generation service uses it."""

    @property
    def info(self) -> TargetInfo:
        """The description of the target. Available once `ready` is true."""

    @property
    def ready(self) -> bool:
        """Whether the engine accepts requests."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """Yield the commits of all answers; the last of each has `finish`. Closing the iterator frees their memory.

        Raises `Overloaded`, `NotReady` or `InvalidRequest` at the first step, `DeadlineExceeded` later.
        """

    def conclude(self, request_id: RequestId, index: int) -> bool:
        """End one running answer with `STOP`, because its text is complete. Returns whether it was running."""

    def longest_sequence(self, source_len: int) -> int:
        """Return the most tokens of a prompt and its answer together that context and KV memory can hold.

        `source_len` is the number of tokens that an encoder reads, which take memory of their own.
        """

    def count_sent(self, tokens: int) -> None:
        """Count tokens of an answer that are sent to the client, for the metrics."""

    def check_room(self, client: str, request_id: RequestId, answers: int, priority: int = 0) -> None:
        """Raise `Overloaded` if a request of the client would be refused now, before work is spent on its texts."""

    def abort(self, request_id: RequestId) -> bool:
        """End the running answers of a request with `ABORT`. Returns whether there were any."""
