"""vLLM's contract for a proposer, with a real drafter over a real socket: texts never change, drafts are accepted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DescribedMethod, EvidenceNeeds
from cluster.wire.peer_access import PeerAccess
from deploy.network.cluster_token import draw_token
from pilotfish.v1 import common_pb2
from pilotfish_vllm import Proposer, drafter, sequences
from pilotfish_vllm.proposer import best_path
from pilotfish_vllm.settings import RefusedSettings
from tests.support.certificates import make_certificate
from tests.support.engines.vllm_contract import Engine, vllm_config
from tests.support.models.draft_model import GREEDY, ReferenceModel
from tests.unit.pilotfish_vllm.conftest import Counted, Served
from workers.draft.ngram import NgramDrafter, NgramSettings
from workers.draft.registry import create
from workers.serve.configuration import load_configuration

PROMPTS = ((5, 17, 33), (8, 60, 41, 41, 9), (5, 17, 33), tuple(range(3, 23)), (70, 2, 31, 9), (44,), (5, 17, 33, 8))
COUNT = 24


@pytest.fixture
def decide(target: ReferenceModel) -> Callable[[Sequence[int]], int]:
    return lambda tokens: target.continued(tokens, 1, GREEDY, 1)[0]


@contextmanager
def proposing(proposer: Proposer) -> Iterator[Proposer]:
    """The proposer, with the start of its life in vLLM, and an end, which vLLM leaves to the process."""
    proposer.load_model("the target")
    try:
        yield proposer
    finally:
        if proposer._drafter is not None:
            proposer._drafter.close()


def alone(decide: Callable[[Sequence[int]], int]) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        answers.append(list(prompt))
        for _ in range(COUNT):
            answers[-1].append(decide(answers[-1]))
    return answers


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answers_are_the_targets_own_and_most_drafts_are_accepted(
    served: Served, method: Counted, decide: Callable[[Sequence[int]], int]
) -> None:
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer:
        engine = Engine(proposer, decide)
        assert engine.run(PROMPTS, COUNT) == alone(decide)
    assert engine.accepted > 0.4 * len(PROMPTS) * COUNT
    starts = [row for row in method.rows if row.start is not None]
    assert len(starts) <= len(PROMPTS)  # a row that moves keeps its sequence
    assert sum(len(row.new_tokens) for row in method.rows) <= sum(map(len, PROMPTS)) + len(PROMPTS) * COUNT
    assert all(row.start.cache_salt and not row.start.allows_learning for row in starts if row.start is not None)


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_lookups_draft_too(name: str, decide: Callable[[Sequence[int]], int]) -> None:
    configuration = load_configuration({"draft": {"method": name}})
    lookup = create(configuration.draft, configuration.target)
    described = DescribedMethod(name, EvidenceNeeds())
    with (
        Served(lookup, described=described) as served,
        proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer,
    ):
        engine = Engine(proposer, decide)
        assert engine.run(PROMPTS, COUNT) == alone(decide)
    assert engine.accepted > 0


def test_one_call_asks_for_all_rows_of_a_step(served: Served, method: Counted) -> None:
    calls: list[int] = []
    propose = method.propose
    method.propose = lambda rows: (calls.append(len(rows)), propose(rows))[1]  # type: ignore[method-assign]
    tokens = np.arange(40, dtype=np.int32).reshape(4, 10)
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer:
        drafts = proposer.propose([[3], [13], [], [33]], np.array([4, 4, 4, 4]), tokens)
    assert calls == [3]
    assert [len(draft) for draft in drafts] == [4, 4, 0, 4]


def test_ended_sequences_are_released(
    served: Served, method: Counted, decide: Callable[[Sequence[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(drafter, "_RENEWALS", 100)
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer:
        Engine(proposer, decide).run(PROMPTS, 4)
        assert method.held
        until(lambda: not method.held)


def test_the_lease_is_renewed_while_vllm_is_idle_and_ends_with_it(
    method: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(10, dtype=np.int32)[None]
    with Served(method, lease_seconds=0.2) as served:
        with proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer:
            proposer.propose([[3]], np.array([4]), tokens)
            time.sleep(0.7)
            assert method.held
        until(lambda: not method.held)


def test_a_drafter_that_dies_costs_drafts_and_its_successor_drafts_again(
    method: Counted, decide: Callable[[Sequence[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(drafter, "LONGEST_PAUSE_SECONDS", 0.02)
    running = [Served(method)]
    running[0].__enter__()
    port = int(running[0].address.rpartition(":")[2])
    accepted: dict[int, int] = {}

    def on_step(step: int) -> None:
        accepted[step] = engine.accepted
        if step == 6:
            running.pop().__exit__(None, None, None)
        if step == 14:
            running.append(Served(method, port=port))
            running[0].__enter__()
        if step > 14:
            time.sleep(0.03)  # gRPC connects again

    with proposing(Proposer(vllm_config(f"127.0.0.1:{port}", timeout_seconds=20.0))) as proposer:
        engine = Engine(proposer, decide)
        try:
            assert engine.run(PROMPTS, COUNT, on_step) == alone(decide)
        finally:
            running.pop().__exit__(None, None, None)
    assert accepted[6] > 0
    assert accepted[14] - accepted[7] == 0
    assert engine.accepted > accepted[14]


def test_a_frozen_drafter_delays_few_steps(
    served: Served, method: Counted, decide: Callable[[Sequence[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "FIRST_PAUSE_SECONDS", 30.0)
    monkeypatch.setattr(drafter, "LONGEST_PAUSE_SECONDS", 30.0)
    answers = alone(decide)
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=0.2))) as proposer:
        method.gate.clear()
        engine = Engine(proposer, decide)
        begun = time.monotonic()
        assert engine.run(PROMPTS, COUNT) == answers
        assert time.monotonic() - begun < 5.0
        assert engine.accepted == 0
        method.gate.set()


def test_a_method_that_needs_hidden_states_is_refused_by_name(method: Counted) -> None:
    described = DescribedMethod("eagle", EvidenceNeeds(taps=(2, 15, 27)))
    with Served(method, described=described) as served, pytest.raises(RefusedSettings) as refused:
        Proposer(vllm_config(served.address))
    assert "drafts by eagle, which needs the target's hidden states" in str(refused.value)


def test_a_successor_of_another_method_at_the_same_address_is_refused(
    method: Counted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drafter, "FIRST_PAUSE_SECONDS", 0.0)
    tokens = np.arange(10, dtype=np.int32)[None]
    successor = Counted(NgramDrafter(NgramSettings(), DraftSection()))
    said = "drafts by recycling, which needs the target's ranked tokens"
    with Served(method) as served:
        proposer = Proposer(vllm_config(served.address, timeout_seconds=20.0))
        assert proposer.propose([[3]], np.array([4]), tokens)[0]
    port, described = int(served.address.rpartition(":")[2]), DescribedMethod("recycling", EvidenceNeeds(top=8))
    with proposing(proposer), Served(successor, port=port, described=described), caplog.at_level(logging.WARNING):
        until(lambda: proposer.propose([[4]], np.array([5]), tokens) == [[]] and said in caplog.text)
    assert len(successor.rows) <= 1  # it does not know the sequence


def test_the_drafter_demands_the_cluster_token_and_a_certificate(
    method: Counted, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, tls = draw_token(), make_certificate(tmp_path)
    files = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
    tokens = np.arange(10, dtype=np.int32)[None]
    with Served(method, PeerAccess(token, tls)) as served:
        with pytest.raises(RefusedSettings, match="refuses this client: UNAUTHENTICATED"):
            Proposer(vllm_config(served.address, tls=files))
        monkeypatch.setenv("PILOTFISH_CLUSTER_TOKEN", token.text)
        with proposing(Proposer(vllm_config(served.address, tls=files, timeout_seconds=20.0))) as proposer:
            assert len(proposer.propose([[3]], np.array([4]), tokens)[0]) == 4


def test_without_a_drafter_vllm_starts_and_decodes_alone(
    decide: Callable[[Sequence[int]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "CONNECT_SECONDS", 0.1)
    with proposing(Proposer(vllm_config("127.0.0.1:1", timeout_seconds=0.2))) as proposer:
        engine = Engine(proposer, decide)
        assert engine.run(PROMPTS[:2], 4) == [answer[: len(answer) - COUNT + 4] for answer in alone(decide)[:2]]
    assert engine.accepted == 0


def test_only_the_rank_whose_drafts_vllm_takes_asks_for_them(served: Served, method: Counted) -> None:
    with proposing(Proposer(vllm_config(served.address, rank=1))) as proposer:
        assert proposer.propose([[3], [4]], np.array([4, 4]), np.zeros((2, 9), np.int32)) == [[], []]
    assert not method.rows


def test_drafts_end_at_the_longest_text_and_at_the_vocabulary(served: Served) -> None:
    tokens = np.arange(10, dtype=np.int32)[None]
    with proposing(Proposer(vllm_config(served.address, longest=6, timeout_seconds=20.0))) as proposer:
        assert len(proposer.propose([[3]], np.array([4]), tokens)[0]) == 2
        assert proposer.propose([[5]], np.array([6]), tokens) == [[]]
    with proposing(Proposer(vllm_config(served.address, vocabulary_size=1, timeout_seconds=20.0))) as proposer:
        assert proposer.propose([[3]], np.array([4]), tokens) == [[]]


def test_a_token_that_the_draft_model_does_not_know_costs_this_sequence_its_drafts(
    served: Served, method: Counted
) -> None:
    tokens = np.array([[3, 4, 5, 95_000], [3, 4, 5, 6]], np.int32)
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer:
        drafts = proposer.propose([[95_000], [6]], np.array([4, 4]), tokens)
        assert [len(draft) for draft in drafts] == [0, 4]
        asked = len(method.rows)
        proposer.propose([[95_000]], np.array([4]), tokens)
        assert len(method.rows) == asked


def test_a_negative_number_in_the_place_of_a_token_costs_this_sequence_its_drafts(served: Served) -> None:
    tokens = np.array([[3, -1, 5, 7], [3, 4, 5, 6]], np.int32)
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=20.0))) as proposer:
        drafts = proposer.propose([[7], [6]], np.array([4, 4]), tokens)
    assert [len(draft) for draft in drafts] == [0, 4]


def test_a_step_waits_no_longer_when_the_drafter_must_be_asked_what_it_is(
    served: Served, method: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(10, dtype=np.int32)[None]
    with proposing(Proposer(vllm_config(served.address, timeout_seconds=0.6))) as proposer:
        remote = proposer._drafter
        assert remote is not None
        check = remote._check

        def slow(seconds: float) -> None:
            time.sleep(0.5)
            check(seconds)

        monkeypatch.setattr(remote, "_check", slow)
        remote._is_checked = False
        method.gate.clear()
        begun = time.monotonic()
        assert proposer.propose([[3]], np.array([4]), tokens) == [[]]
        assert time.monotonic() - begun < 0.9
        method.gate.set()


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_tokens_beyond_the_bound_is_refused(count: int) -> None:
    with pytest.raises(RefusedSettings, match=f"num_speculative_tokens: {count} is refused; it must be from 1 to 64"):
        Proposer(vllm_config("127.0.0.1:1", drafted=count))


class TestThePathOfATree:
    TREE = common_pb2.TokenTree(tokens=[10, 11, 12, 13, 14], parents=[-1, -1, 0, 1, 3])

    def test_has_the_most_expected_tokens(self) -> None:
        assert best_path(self.TREE, [0.6, 0.3, 0.5, 0.2, 0.1], 96) == [10, 12]
        assert best_path(self.TREE, [0.4, 0.4, 0.1, 0.3, 0.2], 96) == [11, 13, 14]

    def test_is_the_longest_without_estimates(self) -> None:
        assert best_path(self.TREE, [], 96) == [11, 13, 14]

    def test_stays_in_the_vocabulary(self) -> None:
        assert best_path(self.TREE, [], 13) == [10, 12]

    def test_of_a_malformed_tree_is_empty(self) -> None:
        assert best_path(common_pb2.TokenTree(tokens=[1, 2], parents=[1, -1]), [], 96) == []
        assert best_path(common_pb2.TokenTree(tokens=[1, 2], parents=[-1]), [], 96) == []
