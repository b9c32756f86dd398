"""A hybrid model begins behind a cached prefix, with the state that was kept there, and its text does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from cluster.core.ids import CacheSalt, SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import OpenRow, StepBatch, VerifyRow
from tests.support.engines.engine_rows import SAMPLED, verify
from tests.support.engines.engine_sequence import GREEDY, Propose, no_draft
from tests.support.models import tiny
from tests.support.models.hybrids import KINDS, OTHERS, committed_parts, save_hybrid
from tests.support.models.model_cases import BLOCK, ModelCase
from tests.support.slow import slow_but
from workers.kv.pool import KvPool
from workers.verify.engine import TargetEngine

COUNT = 10
SHARED = (5, 17, 33, 8, 60, 41, 41, 9, 77, 12)
"""Two blocks, and a half."""


@pytest.fixture(scope="module", params=slow_but(("lfm2",), (*KINDS, *OTHERS)))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return save_hybrid(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return save_hybrid(tmp_path_factory.mktemp("lfm2"), "lfm2")


@pytest.fixture(scope="module")
def engine(case: ModelCase) -> TargetEngine:
    """Tests share it, each with a first token of its own."""
    return case.engine()


@pytest.fixture(scope="module")
def plain(case: ModelCase) -> TargetEngine:
    """A target without a prefix cache."""
    return case.engine(prefix_cache=False)


def begin(engine: TargetEngine, prompt: Sequence[int], salt: str = "", name: str = "a") -> int:
    """Open a sequence. Returns how many of its tokens are stored."""
    start = SequenceStart(len(prompt), GREEDY, CacheSalt(salt))
    return engine.open([OpenRow(SequenceId(name), tuple(prompt), start)]).stored_lens[0]


def decode(
    engine: TargetEngine,
    prompt: Sequence[int],
    sampling: SamplingParameters = GREEDY,
    propose: Propose = no_draft,
    count: int = COUNT,
) -> tuple[int, list[int]]:
    """How many tokens of the prompt were stored, and the answer."""
    start = SequenceStart(len(prompt), sampling)
    stored = engine.open([OpenRow(SequenceId("a"), tuple(prompt), start)]).stored_lens[0]
    tokens, pending = list(prompt), tuple(prompt[stored:])
    while len(tokens) < len(prompt) + count:
        tree = propose(tokens) if len(tokens) > len(prompt) else TokenTree()
        begins = start if len(pending) == len(tokens) else None  # as a coordinator sends it
        verdict = verify(engine, VerifyRow(SequenceId("a"), len(tokens), pending, tree, start=begins))
        assert verdict.fault is None
        tokens, pending = [*tokens, *verdict.tokens], verdict.tokens[-1:]
    engine.release([SequenceId("a")])
    return stored, tokens[len(prompt) : len(prompt) + count]


@pytest.mark.parametrize("sampling", slow_but([GREEDY], [GREEDY, SAMPLED]), ids=["greedy", "sampled"])
def test_a_repeated_prompt_begins_behind_its_last_full_block(
    engine: TargetEngine, plain: TargetEngine, sampling: SamplingParameters
) -> None:
    first = 1 if sampling is GREEDY else 2
    for prompt, stored in (((first, *SHARED), 8), ((first, 3, *SHARED[:6]), 4)):  # the last token is always computed
        nothing, expected = decode(plain, prompt, sampling)
        assert nothing == 0
        assert [decode(engine, prompt, sampling) for _ in range(2)] == [(0, expected), (stored, expected)]


def test_what_two_prompts_share_is_kept_for_the_third(engine: TargetEngine, plain: TargetEngine) -> None:
    prompts = [(3, *SHARED, number, 3, number) for number in (20, 21, 22)]
    found = [decode(engine, prompt) for prompt in prompts]
    assert [stored for stored, _ in found] == [0, 0, 8]
    assert [text for _, text in found] == [decode(plain, prompt)[1] for prompt in prompts]


def test_a_conversation_goes_on_behind_the_last_block_of_the_answer(engine: TargetEngine, plain: TargetEngine) -> None:
    prompt = (4, *SHARED)
    expected = decode(plain, prompt)[1]
    text = [*prompt, *expected, *range(9)]
    accepted = 0

    def propose(tokens: Sequence[int]) -> TokenTree:
        nonlocal accepted
        true, wrong = text[len(tokens) : len(tokens) + 3], (text[len(tokens)] + 1) % tiny.VOCABULARY
        accepted += len(tokens) - len(prompt) > 1
        return TokenTree.from_candidates([(wrong, 1, 2), (*true[:2], wrong, 3), true[:1]], 9)

    stored, answer = decode(engine, prompt, propose=propose)
    assert (stored, answer) == (0, expected)
    assert 0 < accepted < COUNT / 2  # so drafts were accepted
    following = (*prompt, *answer, 3, 4)
    stored, answer = decode(engine, following)
    assert (stored, answer) == (20, decode(plain, following)[1])
    assert begin(engine, prompt) == 8  # the prompt's own


@pytest.mark.slow
def test_a_chunked_prompt_beside_a_neighbor_keeps_the_same_state(engine: TargetEngine, plain: TargetEngine) -> None:
    begin(engine, SHARED)
    begin(engine, SHARED[::-1], name="b")
    for first, last in ((0, 3), (3, 9), (9, 10)):
        rows = [
            replace(VerifyRow(SequenceId(name), last, tuple(text[first:last])), decide=last == len(SHARED))
            for name, text in (("a", SHARED), ("b", SHARED[::-1]))
        ]
        assert all(verdict.fault is None for verdict in engine.step(StepBatch(tuple(rows))).verdicts)
    engine.release_all()
    for prompt in (SHARED, SHARED[::-1]):
        assert decode(engine, prompt) == (8, decode(plain, prompt)[1])


@pytest.mark.slow
def test_kept_states_have_the_bits_of_tokens_computed_one_by_one(short: ModelCase) -> None:
    plain, engine_and_pool = short.engine(prefix_cache=False), short.engine_and_pool(200)
    text = [*SHARED, *decode(plain, SHARED, count=30)[1]]

    def partly_right(tokens: Sequence[int]) -> TokenTree:
        true = text[len(tokens) : len(tokens) + 2]
        return TokenTree.chain([*true, *((token + 1) % tiny.VOCABULARY for token in true)])

    engine, pool = engine_and_pool
    decode(engine, SHARED, propose=partly_right, count=26)
    single = short.engine_and_pool(200)
    verify(single[0], VerifyRow(SequenceId("a"), 1, tuple(text[:1]), start=SequenceStart(1, GREEDY)))
    ends = 0
    for length in range(2, 40):
        verify(single[0], VerifyRow(SequenceId("a"), length, (text[length - 1],)))
        found, wanted = (one.open([*text[:length], 1]) for one in (pool, single[1]))
        if found.stored_len == length:
            ends += 1
            assert length % BLOCK == 0
            for mine, own in zip(committed_parts(pool, found), committed_parts(single[1], wanted), strict=True):
                assert torch.equal(mine, own)
        pool.release(found)
        single[1].release(wanted)
    assert ends == 2  # the prompt's and the answer's


def test_another_salt_finds_nothing(short: ModelCase) -> None:
    engine = short.engine()
    decode(engine, SHARED)
    assert [begin(engine, SHARED, salt) for salt in ("key", "")] == [0, 8]


def kept(pool: KvPool) -> int:
    assert pool.states is not None
    return len(pool.states.prefixes)


@pytest.mark.slow
def test_states_are_bounded_and_the_least_recently_used_goes(short: ModelCase) -> None:
    engine, pool = short.engine_and_pool(200, prefix_states=2)
    prompts = [(number, *SHARED) for number in (20, 21, 22)]
    for prompt in prompts:
        decode(engine, prompt, count=1)
        assert kept(pool) <= 2
    assert [begin(engine, prompt, name=str(prompt[0])) for prompt in prompts] == [0, 8, 8]
    engine.release_all()
    assert pool.states is not None and pool.states.free == pool.states.capacity


@pytest.mark.slow
def test_a_failed_step_keeps_no_state(short: ModelCase, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, pool = short.engine_and_pool(200)
    begin(engine, SHARED)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_decide", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verify(engine, VerifyRow(SequenceId("a"), len(SHARED), SHARED))
    assert kept(pool) == 0
    assert pool.states is not None and pool.states.free == pool.states.capacity
    assert decode(engine, SHARED)[0] == 0


@pytest.mark.slow
def test_a_preempted_sequence_goes_on_behind_its_last_full_block(short: ModelCase) -> None:
    engine = short.engine()
    expected = decode(short.engine(prefix_cache=False), SHARED)[1]
    begin(engine, SHARED)
    tokens, pending = list(SHARED), tuple(SHARED)
    for _ in range(8):
        verdict = verify(engine, VerifyRow(SequenceId("a"), len(tokens), tuple(pending)))
        tokens, pending = [*tokens, *verdict.tokens], verdict.tokens
    engine.release([SequenceId("a")])
    assert begin(engine, tokens) == 16
    assert verify(engine, VerifyRow(SequenceId("a"), len(tokens), tuple(tokens[16:]))).tokens == (expected[8],)
