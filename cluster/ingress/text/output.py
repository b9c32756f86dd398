"""One answer's way from committed tokens to text: detokenize, look for stop strings, count."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.ids import RequestId
from cluster.core.request import Commit, FinishReason, GenerationRequest, TokenLogprobs, Usage
from cluster.ingress.text.stop_strings import StopMatcher
from cluster.ingress.text.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; sending `seed` again gives the same answer."""

    request_id: RequestId
    model: str
    seed: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What one commit added. `text` may lag behind `tokens`; together all texts are the answer."""

    text: str
    tokens: tuple[int, ...]
    accepted: int
    """How many of the leading `tokens` a drafter wrote first."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    index: int = 0
    """Which of the request's answers it belongs to."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Why an answer ended, by which stop, and what it cost."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token: int | None = None
    index: int = 0
    """Which of the request's answers it ends."""


Event = Started | Delta | Finished


class Answer:
    """Turns commits into deltas until something ends the answer; then `finished` is set."""

    __slots__ = (
        "_accepted",
        "_drafted",
        "_index",
        "_matcher",
        "_prompt_len",
        "_steps",
        "_stream",
        "_tokens",
        "finished",
    )

    def __init__(self, request: GenerationRequest, stream: Detokenizer, index: int = 0) -> None:
        self.finished: Finished | None = None
        self._index = index
        self._stream = stream
        self._matcher = StopMatcher(request.stopping.stop_strings)
        self._prompt_len = len(request.prompt)
        self._tokens = 0
        self._drafted = 0
        self._accepted = 0
        self._steps = 0

    def take(self, commit: Commit) -> tuple[Delta | Finished, ...]:
        """What the commit adds; nothing once the answer has ended.

        A stop string cuts it after the token that completes the string. The stop token of an answer
        counts as one of its tokens and adds nothing to its text.
        """
        if self.finished is not None:
            return ()
        text, count, stop = self._read(commit)
        if stop is None and commit.finish is not None:
            last = self._matcher.push(self._stream.flush())
            text += last.text
            stop = last.stop
            if stop is None:
                text += self._matcher.flush()
        accepted = min(commit.accepted, count)
        delta = Delta(text, commit.tokens[:count], accepted, commit.logprobs[:count], self._index)
        self._count(commit, delta)
        self.finished = self._end(commit, stop)
        seen = (delta,) if delta.tokens or delta.text else ()
        return seen if self.finished is None else (*seen, self.finished)

    def _read(self, commit: Commit) -> tuple[str, int, str | None]:
        """Text of the commit, how many of its tokens the answer keeps, and the stop string found."""
        silent = len(commit.tokens) - 1 if commit.finish is FinishReason.STOP else len(commit.tokens)
        texts: list[str] = []
        for position, token in enumerate(commit.tokens[:silent]):
            matched = self._matcher.push(self._stream.push(token))
            texts.append(matched.text)
            if matched.stop is not None:
                return "".join(texts), position + 1, matched.stop
        return "".join(texts), len(commit.tokens), None

    def _count(self, commit: Commit, delta: Delta) -> None:
        self._tokens += len(delta.tokens)
        self._accepted += delta.accepted
        self._drafted += commit.drafted
        self._steps += 1 if commit.tokens else 0

    def _end(self, commit: Commit, stop: str | None) -> Finished | None:
        if stop is not None:
            return Finished(FinishReason.STOP, self._usage(), stop_string=stop, index=self._index)
        if commit.finish is None:
            return None
        stop_token = commit.tokens[-1] if commit.finish is FinishReason.STOP and commit.tokens else None
        return Finished(commit.finish, commit.usage or self._usage(), stop_token=stop_token, index=self._index)

    def _usage(self) -> Usage:
        return Usage(self._prompt_len, self._tokens, self._drafted, self._accepted, self._steps)
