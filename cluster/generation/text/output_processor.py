"""Processes one answer: converts committed tokens to text, applies stop strings, and counts the usage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cluster.core.draft_origin import NO_ORIGINS
from cluster.core.request import Commit, FinishReason, GeneratedPart, GenerationRequest, Usage
from cluster.core.tree import EMPTY_TREE
from cluster.generation.events import Delta, Finished, VerifiedDraft
from cluster.generation.text.thinking import ReasoningCount
from cluster.generation.text.tokenizer import Detokenizer


class OutputProcessor:
    """Converts the commits of one answer to deltas. `finished` is set once the answer has ended."""

    def __init__(self, request: GenerationRequest, detokenizer: Detokenizer, index: int = 0) -> None:
        self.finished: Finished | None = None
        self._index = index
        self._includes_stop = request.text.include_stop
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(request.stopping.stop_strings)
        self._min_tokens = request.sampling.min_tokens
        self._prediction = PredictionMatch(request.prediction) if request.prediction else None
        self._prompt_len = len(request.input)
        form, begins = request.text.reasoning, request.text.begins_in_reasoning
        self._reasoning = None if form is None else ReasoningCount(form, begins_inside=begins)
        self._seed = request.seed_of(index)
        self._returns_drafts = request.returns_drafts
        self._tokens = 0
        self._drafted = 0
        self._accepted = 0
        self._accepted_by_origin = NO_ORIGINS
        self._steps = 0
        self._resumed = 0
        self._cached = 0
        self._hidden = 0

    def resume(self, part: GeneratedPart, end: FinishReason | None, hidden: int) -> Finished | None:
        """Continue an answer after its first tokens, which the caller has. Call it before `process`.

        `end` says whether a stop token or the length bound ended the answer with them. The caller also has the next
        `hidden` tokens, which are generated again. Returns the end of an answer that has ended.
        """
        self._hidden = hidden
        if part.tokens or end is not None:
            self._process(Commit(part.tokens, 0, finish=end))
        self._resumed = len(part.tokens)
        self._drafted, self._accepted = part.drafted_tokens, part.accepted_tokens
        self._accepted_by_origin = part.accepted_by_origin
        self._steps = part.target_steps
        if self.finished is not None:
            self.finished = replace(self.finished, usage=self._usage())
        return self.finished

    @property
    def token_count(self) -> int:
        """Number of tokens of the answer so far."""
        return self._tokens

    def process(self, commit: Commit) -> tuple[Delta | Finished, ...]:
        """Return the events of one commit without the tokens that the caller has; none once the answer has ended."""
        count = min(self._hidden, len(commit.tokens))
        if not count:
            return self._process(commit)
        self._hidden -= count
        if count == len(commit.tokens):
            return _ends(self._process(commit))
        steps = self._steps
        head = Commit(commit.tokens[:count], min(commit.accepted, count), origins=commit.origins[:count])
        ends = _ends(self._process(head))
        self._steps = steps + bool(ends)  # both parts are one step
        accepted, logprobs = max(0, commit.accepted - count), commit.logprobs[count:]
        return ends or self._process(
            replace(
                commit,
                tokens=commit.tokens[count:],
                accepted=accepted,
                logprobs=logprobs,
                tree=EMPTY_TREE,
                tree_origins=(),
                origins=commit.origins[count:],
            )
        )

    def _process(self, commit: Commit) -> tuple[Delta | Finished, ...]:
        """Return the events of one commit; none once the answer has ended.

        A stop string cuts the commit after the token that completes the string, unless that is one of the first
        `min_tokens` tokens. A stop token counts as a token of the answer; it adds text only with `include_stop`.
        """
        if self.finished is not None:
            return ()
        texts, count, stop = self._read(commit)
        end = ""
        if stop is None and commit.finish is not None:
            last = self._matcher.push(self._detokenizer.flush(), self._tokens + count > self._min_tokens)
            end = last.text
            stop = last.stop
            if stop is None:
                end += self._matcher.flush()
            elif self._includes_stop:
                end += stop
        accepted = min(commit.accepted, count)
        text, draft = "".join(texts) + end, self._draft(commit, texts, count, end)
        delta = Delta(
            text,
            commit.tokens[:count],
            accepted,
            commit.logprobs[:count],
            self._index,
            commit.drafted,
            draft,
            commit.origins[:accepted],
        )
        self._count(commit, delta)
        self.finished = self._end(commit, stop)
        if self.finished is not None and (match := self._prediction) is not None:
            self.finished = replace(
                self.finished, accepted_prediction=match.accepted, rejected_prediction=match.rejected
            )
        seen = (delta,) if delta.tokens or delta.text else ()
        return seen if self.finished is None else (*seen, self.finished)

    def _draft(self, commit: Commit, texts: list[str], count: int, end: str) -> VerifiedDraft | None:
        """Return how the first `count` tokens were drafted, if requested. `end` is the text after the last token."""
        if not self._returns_drafts or not count:
            return None
        texts = texts + [""] * (count - len(texts))
        texts[-1] += end
        accepted = commit.tree.follow(commit.tokens[: min(commit.accepted, count)])
        return VerifiedDraft(commit.tree, accepted, tuple(texts), commit.tree_origins)

    def _read(self, commit: Commit) -> tuple[list[str], int, str | None]:
        """Return the text of each token, how many tokens belong to the answer, and the stop string found."""
        is_stopped = commit.finish is FinishReason.STOP and not self._includes_stop
        with_text = len(commit.tokens) - 1 if is_stopped else len(commit.tokens)
        texts: list[str] = []
        for position, token in enumerate(commit.tokens[:with_text]):
            may_end = self._tokens + position >= self._min_tokens
            text = self._detokenizer.push(token)
            if self._reasoning is not None:
                self._reasoning.push(text)
            matched = self._matcher.push(text, may_end)
            stop = matched.stop
            texts.append(matched.text + (stop if stop is not None and self._includes_stop else ""))
            if stop is not None:
                return texts, position + 1, stop
        return texts, len(commit.tokens), None

    def _count(self, commit: Commit, delta: Delta) -> None:
        self._tokens += len(delta.tokens)
        if self._prediction is not None:
            self._prediction.add(delta.tokens)
        self._accepted += delta.accepted
        self._accepted_by_origin = self._accepted_by_origin.plus(delta.origins)
        self._drafted += commit.drafted
        self._cached = max(self._cached, commit.cached_tokens)
        self._steps += 1 if commit.tokens else 0

    def _end(self, commit: Commit, stop: str | None) -> Finished | None:
        if stop is not None:
            return Finished(FinishReason.STOP, self._usage(), stop_string=stop, index=self._index, seed=self._seed)
        if commit.finish is None:
            return None
        stop_token = commit.tokens[-1] if commit.finish is FinishReason.STOP and commit.tokens else None
        usage = self._usage() if commit.usage is None else replace(commit.usage, reasoning_tokens=self._thought)
        return Finished(commit.finish, usage, stop_token=stop_token, index=self._index, seed=self._seed)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_len,
            completion_tokens=self._tokens,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            target_steps=self._steps,
            resumed_tokens=self._resumed,
            cached_tokens=self._cached,
            reasoning_tokens=self._thought,
            accepted_by_origin=self._accepted_by_origin,
        )

    @property
    def _thought(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.count


def _ends(events: tuple[Delta | Finished, ...]) -> tuple[Finished, ...]:
    return tuple(event for event in events if isinstance(event, Finished))


class PredictionMatch:
    """How much of the answer that a client expects is in the answer, as OpenAI counts it.

    It follows the prediction along the answer. After a divergence, it goes on where two tokens of the answer occur.
    """

    __slots__ = ("_before", "_is_counted", "_next", "_places", "_prediction", "accepted")

    def __init__(self, prediction: Sequence[int]) -> None:
        self.accepted = 0
        """Number of tokens of the prediction that are in the answer so far, in their order."""
        self._prediction = tuple(prediction)
        self._places: dict[tuple[int, int], list[int]] = {}
        for place, pair in enumerate(pairwise(self._prediction)):
            self._places.setdefault(pair, []).append(place + 1)
        self._next = 0
        self._before: int | None = None
        self._is_counted = False
        """Whether the token before is among the accepted ones."""

    @property
    def rejected(self) -> int:
        """Number of tokens of the prediction that are not in the answer."""
        return len(self._prediction) - self.accepted

    def add(self, tokens: Sequence[int]) -> None:
        """Follow the next tokens of the answer."""
        for token in tokens:
            if self._next < len(self._prediction) and self._prediction[self._next] == token:
                self._go_to(self._next, 1)
            else:
                self._realign(token)
            self._before = token

    def _realign(self, token: int) -> None:
        """Go on where the token before and this one stand in the rest of the prediction, if they do."""
        places = () if self._before is None else self._places.get((self._before, token), ())
        found = bisect_left(places, self._next + (not self._is_counted))
        if found < len(places):
            self._go_to(places[found], 1 if self._is_counted else 2)
        else:
            self._is_counted = False

    def _go_to(self, place: int, count: int) -> None:
        self.accepted += count
        self._next = place + 1
        self._is_counted = True


@dataclass(frozen=True, slots=True)
class Matched:
    """Text that may be sent, and the stop string that follows it, if one was found."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Finds the first stop string in a text that arrives in parts.

    A suffix that may still become a stop string is held back. The stop string that is complete first ends the text; of
    several that are complete at the same character, the longest. The result does not depend on how the text is split.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> Matched:
        """Add a part of the text, and return the text that may be sent. Do not call it again after a match.

        Without `may_end`, a stop string that this part completes is not a match; it is text like any other.
        """
        if not self._stops:
            return Matched(text)
        held = self._held + text
        found = self._first(held, len(self._held)) if may_end else None
        if found is not None:
            start, stop = found
            self._held = ""
            return Matched(held[:start], stop)
        certain = len(held) - self._undecided(held)
        self._held = held[certain:]
        return Matched(held[:certain])

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, seen: int) -> tuple[int, str] | None:
        """Return start and string of the first stop string that ends after the first `seen` characters."""
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, seen - len(stop) + 1))) >= 0
        ]
        if not ends:
            return None
        _, start, stop = min(ends)
        return start, stop

    def _undecided(self, text: str) -> int:
        """Return the length of the longest suffix that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
