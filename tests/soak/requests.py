"""The requests of the soak test: a fixed list of requests of every kind, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.request import SamplingParameters
from pilotfish.v1 import common_pb2, generation_pb2

KINDS = {"short": 4, "long": 3, "sharing": 5, "several": 2, "structured": 2, "beams": 2}
"""Relative frequency of each kind."""
SALTS = ("", "", "tenant-a", "tenant-b")
END = 2
"""The end of sequence of the tiny models."""
PATTERNS = (
    r'\{"name": "[a-z]{4,40}", "is_the_world": (true|false)\}',
    "(hello world, |the fish swims, ){3,9}[0-9]{2,8}",
)
"""Regular expressions that force some tokens and leave others open."""
MAX_TOKENS = 384
"""Largest number of tokens in a prompt and its answer. The context must be at least as long."""


@dataclass(frozen=True)
class SoakRequest:
    """One request. It is hashable and determines its answers."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    n: int = 1
    width: int = 0
    """Width of the beam search; 0 selects sampling."""
    length_penalty: float = 1.0
    cache_salt: str = ""
    pattern: str = ""
    """A regular expression that the answer matches; empty: any text."""

    def sampling(self, index: int) -> SamplingParameters:
        """The sampling parameters of the single request that has the same answer as answer `index` of this one."""
        sampling = SamplingParameters(temperature=self.temperature, top_p=self.top_p, seed=self.seed + index)
        if not self.pattern:
            return sampling
        return replace(sampling, grammar=Grammar(GrammarKind.REGEX, self.pattern), end_token_ids=(END,))

    def message(self, request_id: str) -> generation_pb2.GenerateRequest:
        """The gRPC request."""
        request = generation_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=common_pb2.TokenIds(ids=self.prompt),
            sampling=common_pb2.SamplingParameters(temperature=self.temperature, top_p=self.top_p, seed=self.seed),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.max_tokens, ignore_eos=not self.pattern),
        )
        if self.pattern:
            request.sampling.grammar.regex = self.pattern
        if self.cache_salt:
            request.cache_salt = self.cache_salt
        if self.n > 1:
            request.n = self.n
        if self.width:
            request.best_of = self.width
            request.beam_search.length_penalty = self.length_penalty
        return request


class RequestCatalogue:
    """`count` requests made of a few phrases, so that prompts share prefixes and repeat themselves."""

    def __init__(self, phrases: Sequence[Sequence[int]], kinds: Collection[str], count: int, seed: int) -> None:
        self._draw = random.Random(seed)
        self._phrases = [tuple(phrase) for phrase in phrases]
        self._stems = [self._text(length) for length in (32, 64, 96, 150)]
        makers: dict[str, Callable[[], SoakRequest]] = {
            "short": self._short,
            "long": self._long,
            "sharing": self._sharing,
            "several": self._several,
            "structured": self._structured,
            "beams": self._beams,
        }
        makers_in_turn = [makers[kind] for kind, share in KINDS.items() if kind in kinds for _ in range(share)]
        self.requests = tuple(makers_in_turn[index % len(makers_in_turn)]() for index in range(count))

    def _short(self) -> SoakRequest:
        return self._ask("short", self._text(self._draw.randint(1, 24)), self._draw.randint(1, 16))

    def _long(self) -> SoakRequest:
        return self._ask("long", self._text(self._draw.randint(120, 260)), self._draw.randint(32, 96))

    def _sharing(self) -> SoakRequest:
        prompt = self._draw.choice(self._stems) + self._text(self._draw.randint(1, 40))
        return self._ask("sharing", prompt, self._draw.randint(4, 48), cache_salt=self._draw.choice(SALTS))

    def _several(self) -> SoakRequest:
        prompt = self._draw.choice(self._stems) + self._text(self._draw.randint(1, 16))
        return self._ask("several", prompt, self._draw.randint(4, 32), n=self._draw.randint(2, 4))

    def _structured(self) -> SoakRequest:
        request = self._ask("structured", self._text(self._draw.randint(1, 40)), self._draw.randint(24, 96))
        return replace(request, pattern=self._draw.choice(PATTERNS))

    def _beams(self) -> SoakRequest:
        width = self._draw.randint(2, 4)
        return SoakRequest(
            "beams",
            self._text(self._draw.randint(4, 80)),
            self._draw.randint(4, 24),
            n=self._draw.randint(1, width),
            width=width,
            length_penalty=self._draw.choice((0.0, 1.0, 2.0)),
        )

    def _ask(
        self, kind: str, prompt: tuple[int, ...], max_tokens: int, n: int = 1, cache_salt: str = ""
    ) -> SoakRequest:
        # Several greedy answers would all be the same.
        temperature = self._draw.choice((0.7, 1.0) if n > 1 else (0.0, 0.0, 0.7, 1.0))
        top_p = self._draw.choice((1.0, 0.9)) if temperature else 1.0
        return SoakRequest(
            kind, prompt, max_tokens, temperature, top_p, self._draw.getrandbits(32), n, cache_salt=cache_salt
        )

    def _text(self, length: int) -> tuple[int, ...]:
        """`length` tokens of random phrases, some of them repeated."""
        tokens: tuple[int, ...] = ()
        while len(tokens) < length:
            tokens += self._draw.choice(self._phrases) * self._draw.randint(1, 2)
        return tokens[:length]
