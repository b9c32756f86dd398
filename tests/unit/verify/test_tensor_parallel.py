"""A group of ranks makes the same decisions as one rank. If one rank fails, the whole group fails."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.drafting import RowFaultCode
from cluster.core.errors import TargetUnavailable
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import OpenRow, StepBatch, Verdict, VerifyRow
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import Ranks, running_ranks
from tests.support.models import tiny, tiny_tokenizer

if TYPE_CHECKING:
    from workers.verify.engine import TargetEngine
    from workers.verify.group import DriverRank

pytestmark = pytest.mark.slow

RANKS = 3
LETTERS = Grammar(GrammarKind.REGEX, "[A-Za-z]{30,90}")
SETTINGS = {
    "greedy": SamplingParameters(temperature=0.0),
    "sampled, parts suffice": SamplingParameters(temperature=0.9, seed=4, presence_penalty=0.4),
    "top-k, top-p and min-p": SamplingParameters(temperature=0.9, seed=4, top_k=30, top_p=0.9, min_p=0.01),
    "top-k": SamplingParameters(temperature=1.3, seed=5, top_k=7),
    "top-p": SamplingParameters(temperature=1.1, seed=6, top_p=0.7, repetition_penalty=1.2),
    "wide top-p": SamplingParameters(temperature=3.0, seed=7, top_p=0.98),
    "min-p": SamplingParameters(temperature=1.5, seed=8, min_p=0.3),
    "top-p with logprobs": SamplingParameters(temperature=0.9, seed=4, top_p=0.8, logprobs=2),
    "logprobs": SamplingParameters(temperature=0.9, seed=4, logprobs=2),
    "allowed": SamplingParameters(temperature=0.9, seed=4, allowed_token_ids=tuple(range(3, 90, 7))),
    "bad words": SamplingParameters(temperature=0.0, bad_words=((41,), (7, 8), (60, 2))),
    "grammar": SamplingParameters(temperature=0.9, seed=4, end_token_ids=(2,), grammar=LETTERS),
    "scored prompt": SamplingParameters(temperature=0.0, prompt_logprobs=2),
    "minimal length": SamplingParameters(temperature=0.9, seed=4, end_token_ids=tuple(range(40, 60)), min_tokens=4),
}
QUANTIZATIONS = ("none", "int8")
"""The kinds of groups. The same processes form one group after the other."""
BLOCKS = 40
BLOCK_BYTES = 4 * 2 * 2 * 8 * 4
"""Bytes of a block of four tokens on one rank: keys and values of two layers, one head."""
HOST_BLOCKS = 8
DISK_BYTES = (1 << 20, 6 << 10, 1 << 20)
"""Bytes on the disk of each rank. The disks differ in size."""


def section(directory: Path, ranks: int, quantization: str = "none", **memory: Any) -> TargetSection:
    return TargetSection(
        path=str(directory),
        device="cpu",
        tensor_parallel=ranks,
        quantization=quantization,
        compile_directory=str(KEPT),
        kv=KvSection(block_size=4, pool_bytes=1 << 20, **memory),
    )


def build(target: TargetSection, rank: int = 0) -> TargetEngine:
    """An engine with a pool of `BLOCKS`."""
    from workers.verify import build as build_module

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build_module, "blocks_that_fit", lambda model, kv: BLOCKS)
        return build_module.build_engine(target, rank)


def serve_rank(rank: int, directory: Path, port: int, pipe: Connection) -> None:
    """Run one rank in its process. Rank 0 executes the calls that the test sends through its pipe."""
    import torch

    from workers.kv.load_cost import CostModel
    from workers.verify import group_decider
    from workers.verify.group import DriverRank, join_group, leave_group, run_worker_rank

    torch.set_num_threads(1)
    group_decider.GATHERS_TRUNCATED = frozenset()  # as on GPUs; rows with log-probabilities are gathered
    if rank == 1:
        limit_grammars()
    # Loading stored blocks always counts as worthwhile, even on a busy machine.
    CostModel.worth_loading = lambda costs, host_bytes, disk_bytes, tokens: tokens > 0  # type: ignore[method-assign]
    join_group(section(directory, RANKS), rank, "127.0.0.1", port)
    memory = {
        "host_bytes": HOST_BLOCKS * BLOCK_BYTES,
        "disk_directory": str(directory / f"disk-{rank}"),
        "disk_bytes": DISK_BYTES[rank],
    }
    for quantization in QUANTIZATIONS:
        engine = build(section(directory, RANKS, quantization, **memory), rank)
        if rank > 0:
            run_worker_rank(engine, section(directory, RANKS).step_timeout_seconds)
        else:
            serve_pipe(DriverRank(engine, section(directory, RANKS).step_timeout_seconds), engine, pipe)
    leave_group()
    os._exit(0)


FIRST_MARK, LATE_TURN, WAITS = 20, 6, 2
"""The first node of the tree of turn `i` is the token `FIRST_MARK + i` where one rank alone reaches limits: at the root
in one of the turns, so often."""


def limit_grammars() -> None:
    """Let the matchers of this rank reach a limit in the tree of every other turn, and at the root in one turn."""
    from workers.sampling.grammar import GrammarLimitError, GrammarMatcher

    allowed, left = GrammarMatcher.allowed, [None] * WAITS

    def limited(matcher: GrammarMatcher, tree: TokenTree) -> Any:
        turn = tree.tokens[0] - FIRST_MARK if tree else -1
        if turn == LATE_TURN and left:
            left.pop()
            raise GrammarLimitError("the grammar is too complex")
        return allowed(matcher, EMPTY_TREE if turn > 0 and turn % 2 else tree)

    GrammarMatcher.allowed = limited  # type: ignore[method-assign]


def serve_pipe(group: DriverRank, engine: TargetEngine, pipe: Connection) -> None:
    """Execute calls from the pipe until the group is closed."""
    from torch import distributed

    distributed.broadcast = broadcast = Mock(wraps=distributed.broadcast)
    pipe.send("ready")
    while True:
        method, arguments = pipe.recv()
        try:
            if method == "tiers":
                tiers = engine._pool.tiers
                pipe.send(tiers and (tiers.host, tiers.disk))
            elif method == "broadcasts":
                pipe.send(broadcast.call_count)
            else:
                pipe.send(getattr(group, method)(*arguments))
        except Exception as error:
            pipe.send(error)
        if method == "close":
            group.close()  # closing twice is harmless
            return


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(vocab_size=95)))


@pytest.fixture(scope="module")
def group(directory: Path) -> Iterator[Ranks]:
    with running_ranks(RANKS, serve_rank, directory) as group:
        assert group.answer(0) == "ready"
        yield group


PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)


def alone(directory: Path, quantization: str = "none") -> Callable[..., Any]:
    """A function that calls a single rank without sharing anything."""
    engine = build(section(directory, 1, quantization, prefix_cache=False))
    return lambda method, *arguments: getattr(engine, method)(*arguments)


def settled(ask: Callable[..., Any], row: VerifyRow) -> tuple[Verdict, int]:
    """The verdict on a row, and how often it was sent before its grammar was ready."""
    for count in range(1000):
        verdict = ask("step", StepBatch((row,))).verdicts[0]
        if verdict.fault is None or verdict.fault.code is not RowFaultCode.NOT_READY:
            return verdict, count
    raise TimeoutError("the grammar is not ready")


def test_a_limit_that_one_rank_reaches_holds_on_all_ranks(group: Ranks, directory: Path) -> None:
    """What a matcher can still do depends on all that its copies have read, which the ranks need not have in common."""
    ask_one, name = alone(directory), SequenceId("limited")
    sampling = replace(SETTINGS["grammar"], grammar=Grammar(GrammarKind.REGEX, "[A-Za-z]{80}"))
    first = row = VerifyRow(name, len(PROMPT), PROMPT, start=SequenceStart(len(PROMPT), sampling))
    expected = list(PROMPT)
    for _ in range(40):
        expected.extend(settled(ask_one, row)[0].tokens)
        row = VerifyRow(name, len(expected), (expected[-1],))
    tokens, row = list(PROMPT), first
    drafted, waits = [], []
    for turn in range(10):
        verdict, waited = settled(group.ask, row)
        assert verdict.fault is None, verdict.fault
        tokens.extend(verdict.tokens)
        assert tokens == expected[: len(tokens)]
        drafted.append(verdict.drafted)
        waits.append(waited)
        tree = TokenTree.from_candidates([[FIRST_MARK + turn], expected[len(tokens) :][:2]], max_nodes=8)
        row = VerifyRow(name, len(tokens), (tokens[-1],), tree)
    assert [bool(count) for count in drafted[1:]] == [turn % 2 == 0 for turn in range(9)]
    assert waits[1:] == [WAITS if turn == LATE_TURN else 0 for turn in range(9)]
    assert len(tokens) > len(PROMPT) + 10  # drafts were accepted
    group.ask("release", [name])


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_group_makes_the_same_decisions_as_one_rank(group: Ranks, directory: Path, name: str) -> None:
    ask_one = alone(directory)
    start = SequenceStart(len(PROMPT), SETTINGS[name])
    tokens = list(PROMPT)
    row = VerifyRow(SequenceId(name), len(tokens), PROMPT, start=start)
    for turn in range(12):
        batch = StepBatch((row,))
        expected, actual = ask_one("step", batch).verdicts[0], group.ask("step", batch).verdicts[0]
        assert actual.tokens == expected.tokens
        scored = len(PROMPT) - 1 if start.sampling.prompt_logprobs is not None and turn == 0 else 0
        assert len(actual.prompt_logprobs) == scored
        for ours, theirs in zip(
            (*actual.logprobs, *actual.prompt_logprobs), (*expected.logprobs, *expected.prompt_logprobs), strict=True
        ):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        tokens.extend(actual.tokens)
        tree = TokenTree.from_candidates([[turn, 2], [tokens[-2], turn, 7], [3]], max_nodes=8)
        row = VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), tree)
    released = group.ask("release", [SequenceId(name)])
    assert released.blocks_free == released.blocks_total


def test_forks_are_the_same_on_every_rank(group: Ranks) -> None:
    start = SequenceStart(len(PROMPT), SETTINGS["greedy"])
    group.ask("step", StepBatch((VerifyRow(SequenceId("p"), len(PROMPT), PROMPT, start=start),)))
    opened = group.ask("open", [OpenRow(SequenceId("c"), (*PROMPT, 11), start, SequenceId("p"))])
    assert opened.stored_lens == (len(PROMPT),)
    rows = tuple(VerifyRow(SequenceId(name), len(PROMPT) + 1, (11,)) for name in ("p", "c"))
    verdicts = group.ask("step", StepBatch(rows)).verdicts
    assert verdicts[0].tokens == verdicts[1].tokens
    released = group.ask("release_all")
    assert released.blocks_free == released.blocks_total
    again = (OpenRow(SequenceId("again"), (*PROMPT, 11, 12), start), OpenRow(SequenceId("new"), (1, *PROMPT), start))
    assert group.ask("open", again).stored_lens == (len(PROMPT), 0)
    row = VerifyRow(SequenceId("again"), len(PROMPT) + 1, (11,))
    assert group.ask("step", StepBatch((row,))).verdicts[0].tokens == verdicts[0].tokens
    group.ask("release_all")


@pytest.mark.parametrize("unknown", [0, 120])
def test_a_step_takes_no_broadcast_however_long_its_command_is(group: Ranks, unknown: int) -> None:
    """Rows of sequences that the target does not know make the command long; each of them is a fault."""
    start = SequenceStart(len(PROMPT), SETTINGS["greedy"])
    row = VerifyRow(SequenceId("known"), len(PROMPT), PROMPT, start=start)
    expected = group.ask("step", StepBatch((row,))).verdicts
    others = (VerifyRow(SequenceId(f"{index:0100}"), len(PROMPT), PROMPT[-1:]) for index in range(unknown))
    batch = StepBatch((row, *others))
    before = group.ask("broadcasts")
    verdicts = group.ask("step", batch).verdicts
    assert group.ask("broadcasts") == before
    assert verdicts[:1] == expected
    assert all(verdict.fault is not None for verdict in verdicts[1:])
    group.ask("release_all")


@pytest.mark.parametrize("count", [1, 250, 2000])
def test_commands_of_every_length_reach_all_ranks(group: Ranks, count: int) -> None:
    start = SequenceStart(len(PROMPT), SETTINGS["greedy"])
    row = VerifyRow(SequenceId("kept"), len(PROMPT), PROMPT, start=start)
    first = group.ask("step", StepBatch((row,))).verdicts
    group.ask("release", [SequenceId(f"an unknown sequence with the number {index}") for index in range(count)])
    assert group.ask("step", StepBatch((row,))).verdicts == first
    group.ask("release_all")


def answer(
    ask: Callable[..., Any],
    prompt: Sequence[int],
    name: str = "a",
    known: Sequence[int] = (),
    parent: str | None = None,
    count: int = 8,
) -> tuple[int, list[int]]:
    """The number of stored prompt tokens, and prompt and answer. Drafts are often tokens of `known`."""
    start = SequenceStart(len(prompt), SETTINGS["sampled, parts suffice"])
    row = OpenRow(SequenceId(name), tuple(prompt), start, None if parent is None else SequenceId(parent))
    opened = ask("open", [row]).stored_lens[0]
    tokens, stored = list(prompt), opened
    while len(tokens) < len(prompt) + count:
        right = known[len(tokens) : len(tokens) + 2]
        tree = TokenTree.from_candidates([[3, 4], [*right, 5]], max_nodes=6)
        row = VerifyRow(SequenceId(name), len(tokens), tuple(tokens[stored:]), tree)
        verdict = ask("step", StepBatch((row,))).verdicts[0]
        assert verdict.fault is None, verdict.fault
        stored = len(tokens) + verdict.accepted
        tokens.extend(verdict.tokens)
    return opened, tokens[: len(prompt) + count]


def check_memory(group: Ranks, ask_one: Callable[..., Any]) -> None:
    """Decode forks, and prompts that evict each other from the pool to the host and to disks, one of them small."""
    draw = random.Random(2)
    common = [draw.randrange(3, 95) for _ in range(12)]
    prompts = [[*common, *(draw.randrange(3, 95) for _ in range(29))] for _ in range(5)]
    expected = [answer(ask_one, prompt)[1] for prompt in prompts]
    longest = []
    for turn in range(15):
        name = f"m{turn}"
        text = expected[turn % 5]
        stored, tokens = answer(group.ask, prompts[turn % 5], name, text)
        assert tokens == text
        longest.append(stored)
        if turn % 4 == 0:
            child = [*text[:45], 7, 8]
            opened, tokens = answer(group.ask, child, f"{name}c", parent=name)
            assert opened == 45
            assert tokens == answer(ask_one, child)[1]
        released = group.ask("release", [SequenceId(name), SequenceId(f"{name}c")])
        assert released.blocks_free == released.blocks_total
    assert sum(stored > len(common) for stored in longest[5:]) > 2
    host, disk = group.ask("tiers")
    assert host.loaded > 0
    assert disk.loaded > 0


def test_shared_and_loaded_kv_is_the_same_on_every_rank(group: Ranks, directory: Path) -> None:
    check_memory(group, alone(directory))


def test_int8_ranks_share_kv_too_and_closing_leaves_no_file_on_any_disk(group: Ranks, directory: Path) -> None:
    before = [list(disk.iterdir()) for disk in sorted(directory.glob("disk-*"))]
    assert [len(homes) for homes in before] == [1] * RANKS
    group.ask("close")
    assert group.answer(0) == "ready"  # the same processes have formed the next group
    assert not any(home.exists() for homes in before for home in homes)
    check_memory(group, alone(directory, "int8"))


def test_the_death_of_any_rank_breaks_the_group_with_a_clear_error(group: Ranks, directory: Path) -> None:
    group.kill(2)
    start = SequenceStart(len(PROMPT), SETTINGS["greedy"])
    row = VerifyRow(SequenceId("late"), len(PROMPT), PROMPT, start=start)
    with pytest.raises(TargetUnavailable, match="tensor-parallel group is broken"):
        group.ask("step", StepBatch((row,)))
    with pytest.raises(TargetUnavailable, match="tensor-parallel group is broken"):
        group.ask("release", [SequenceId("late")])
    group.ask("close")
    group.processes[1].join(timeout=30)
    assert not [home for rank in (0, 1) for home in (directory / f"disk-{rank}").iterdir()]
