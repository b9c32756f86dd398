"""With two ranks, early exit drafts on both of them in lockstep. An error of one breaks the group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget
from cluster.core.grammar import Grammar
from cluster.core.request import SamplingParameters
from cluster.core.verification import StepBatch, StepResult
from tests.support.engines.colocated_decoding import decode_together, plain_answers
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import Ranks, running_ranks
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration

RANKS = 2
LAYERS = 2
BUDGET = DraftBudget(4, 4)
COUNT = 16
REQUESTS = {
    "greedy": ((5, 17, 33, 8, 60, 41, 41, 9), SamplingParameters(temperature=0.0)),
    "sampled, parts suffice": ((7, 7, 20), SamplingParameters(temperature=0.9, seed=4, presence_penalty=0.4)),
    "sampled, whole needed": ((11, 12, 13), SamplingParameters(temperature=0.9, seed=4, top_k=30, top_p=0.9)),
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["fish", "hello"]}, "swims": {"type": "boolean"}},
    "required": ["name", "swims"],
    "additionalProperties": False,
}
IN_SCHEMA = {
    "in a schema": ((30, 31, 32), SamplingParameters(temperature=0.0, grammar=Grammar.of_schema(SCHEMA))),
}


def configure(directory: Path, ranks: int, layers: int = LAYERS) -> Configuration:
    """Methods are combined: the other one drafts on rank 0 alone."""
    return load_configuration(
        {
            "target": {
                "path": str(directory),
                "device": "cpu",
                "compile": "off",
                "compile_directory": str(KEPT),
                "tensor_parallel": ranks,
                "kv": {"block_size": 4, "pool_bytes": 1 << 20},
            },
            "draft": {
                "methods": ["suffix", "early_exit"],
                "placement": "target",
                "early_exit": {"layers": layers},
            },
        }
    )


def serve_rank(rank: int, directory: Path, port: int, pipe: Connection) -> None:
    """Run one rank in its process. Rank 0 executes the steps that the test sends."""
    import torch

    from workers.draft.registry import create, create_for_worker_rank
    from workers.verify.build import build_engine
    from workers.verify.group import DriverRank, join_group, run_worker_rank

    torch.set_num_threads(1)
    configuration = configure(directory, RANKS)
    draft, target = configuration.draft, configuration.target
    join_group(target, rank, "127.0.0.1", port)
    if rank > 0:
        with contextlib.suppress(Exception):  # rank 0 ends without a stop command
            engine = build_engine(target, rank, create_for_worker_rank(draft, target))
            run_worker_rank(engine, target.step_timeout_seconds)
        os._exit(0)
    method = create(draft, target)
    group = DriverRank(build_engine(target, rank, method), target.step_timeout_seconds)
    pipe.send("ready")
    while True:
        called, arguments = pipe.recv()
        try:
            if called == "break":
                method.propose = lambda rows: 1 / 0  # type: ignore[method-assign,return-value]
                pipe.send(None)
            else:
                pipe.send(getattr(group, called)(*arguments))
        except Exception as error:
            pipe.send(error)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_hidden_layers": LAYERS, "num_key_value_heads": 2, "vocab_size": 321}
    return tiny.save(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target")), tiny.llama(**shape))


@pytest.fixture(scope="module")
def group(directory: Path) -> Iterator[Ranks]:
    with running_ranks(RANKS, serve_rank, directory) as group:
        assert group.answer(0) == "ready"
        yield group


def step_of(group: Ranks) -> Callable[[StepBatch], StepResult]:
    return partial(group.ask, "step")


@pytest.mark.slow
def test_two_ranks_draft_and_decide_as_one_does(group: Ranks, directory: Path) -> None:
    from workers.verify.build import build_engine

    expected = plain_answers(build_engine(configure(directory, 1).target).step, REQUESTS, COUNT)
    found = decode_together(step_of(group), REQUESTS, COUNT, BUDGET)
    assert {name: one.answer[:COUNT] for name, one in found.items()} == expected
    for one in found.values():
        assert one.accepted == one.deepest > 0  # the draft has all layers
        assert all(proposal.tree.depth() == BUDGET.max_depth for proposal in one.proposals)
    occupancy = group.ask("release_all")
    assert occupancy.blocks_free == occupancy.blocks_total


@pytest.mark.slow
def test_two_ranks_draft_what_a_grammar_permits(group: Ranks, directory: Path) -> None:
    from workers.verify.build import build_engine

    expected = plain_answers(build_engine(configure(directory, 1).target).step, IN_SCHEMA, COUNT)
    found = decode_together(step_of(group), IN_SCHEMA, COUNT, BUDGET)
    assert {name: one.answer[:COUNT] for name, one in found.items()} == expected
    assert all(one.accepted > COUNT // 2 for one in found.values())
    group.ask("release_all")


def test_an_error_of_the_method_on_one_rank_breaks_the_group(group: Ranks) -> None:
    from cluster.core.errors import TargetUnavailable

    group.ask("break")
    with pytest.raises(TargetUnavailable, match="ZeroDivisionError"):
        decode_together(step_of(group), REQUESTS, COUNT, BUDGET)
    with pytest.raises(TargetUnavailable, match="group is broken"):
        group.ask("release_all")
