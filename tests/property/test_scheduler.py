"""The scheduler finishes every request within all bounds and starves no sequence, whatever arrives and is accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.coordinator.requests.request_table import Turns
from cluster.core.config.sections import SchedulerSection
from cluster.core.drafting import DraftBudget
from cluster.core.fair_queue import expected_cost
from cluster.core.ids import SequenceId
from cluster.core.kv import KvGroup, KvLayout, KvOccupancy
from cluster.core.scheduling.scheduler import plan
from cluster.core.scheduling.state import Plan, SequenceView, State

CONTEXT = 96
Arrival = tuple[int, int, int, str]
"""Step, prompt, answer and client of a job."""


@dataclass(slots=True)
class Job:
    """A request of client `flow` that arrives before step `at` and ends after `answer` tokens."""

    arrival: int
    at: int
    prompt: int
    answer: int
    flow: str
    length: int = 0
    turn: int = 0
    stored: int = 0
    finished_at: int | None = None

    @property
    def id(self) -> SequenceId:
        return SequenceId(str(self.arrival))

    @property
    def order(self) -> tuple[int, int]:
        return self.turn, self.arrival

    @property
    def missing(self) -> int:
        return self.length - self.stored

    def view(self) -> SequenceView:
        remaining = self.prompt + self.answer - self.length
        goes_last = (self.arrival + self.stored) % 3 == 0  # the target is not ready for some of them
        return SequenceView(
            self.id, self.arrival, self.length, self.stored, remaining, turn=self.turn, goes_last=goes_last
        )


@dataclass(slots=True)
class SimulatedTarget:
    """A target that stores the rows and accepts as much of each tree as `accepted_lens` says."""

    limits: SchedulerSection
    draft: DraftBudget
    layout: KvLayout
    blocks: int
    accepted_lens: list[int]
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    turns: Turns = field(default_factory=Turns)
    steps: int = 0

    def free(self) -> int:
        return self.blocks - sum(self.layout.held(job.stored) for job in self.running)

    def arrive(self, job: Job) -> None:
        job.turn = self.turns.give(job.id, job.flow, expected_cost(job.prompt, job.answer))
        self.waiting.append(job)

    def step(self) -> Plan:
        state = State(
            waiting=tuple(job.view() for job in self.waiting),
            running=tuple(job.view() for job in self.running),
            kv=KvOccupancy(self.blocks, self.free()),
            layout=self.layout,
            max_context_len=CONTEXT,
            limits=self.limits,
            max_draft=self.draft,
        )
        decided = plan(state)
        assert decided == plan(state)
        self._move(decided)
        self._check(decided)
        self._compute(decided)
        self.steps += 1
        return decided

    def _move(self, decided: Plan) -> None:
        by_id = {job.view().id: job for job in (*self.waiting, *self.running)}
        for sequence_id in decided.preempt:
            job = by_id[sequence_id]
            # A preempted sequence is younger than all sequences that keep running.
            assert all(other.order < job.order for other in self.running if other.id not in decided.preempt)
            job.stored = 0
            self.running.remove(job)
            self.waiting.append(job)
        for sequence_id in decided.admit:
            self.turns.start(sequence_id)
            self.waiting.remove(by_id[sequence_id])
            self.running.append(by_id[sequence_id])
        for job in self.waiting:
            assert all(other.order < job.order for other in self.running), "a waiting sequence was overtaken"

    def _check(self, decided: Plan) -> None:
        running = {job.view().id: job for job in self.running}
        assert len(running) <= self.limits.max_sequences
        assert len({row.sequence_id for row in decided.rows}) == len(decided.rows)
        assert sum(row.pending + row.draft.max_nodes for row in decided.rows) <= self.limits.max_step_tokens
        needed = 0
        for row in decided.rows:
            job = running[row.sequence_id]
            assert 1 <= row.pending <= job.missing
            assert row.decide == (row.pending == job.missing)
            assert row.decide or row.draft.max_nodes == 0
            assert row.draft.max_nodes <= self.draft.max_nodes
            assert row.draft.max_depth <= min(self.draft.max_depth, job.view().remaining - 1, CONTEXT - job.length)
            assert (row.draft.max_nodes == 0) == (row.draft.max_depth == 0)
            end = job.stored + row.pending + row.draft.max_nodes
            needed += self.layout.held(job.stored, end) - self.layout.held(job.stored)
        assert needed <= self.free(), "more blocks than the pool has"
        self._check_latency(decided, left=self.free() - needed)

    def _check_latency(self, decided: Plan, left: int) -> None:
        """A decoding sequence lacks a token only if it lacks blocks, and prompts stay within their budget."""
        granted = {row.sequence_id: row.pending for row in decided.rows}
        decoding = [job for job in self.running if job.missing == 1 and job.view().id not in decided.admit]
        for job in decoding:
            lacks = self.layout.held(job.stored, job.length) - self.layout.held(job.stored)
            assert job.view().id in granted or lacks > left, "a decoding sequence was passed over"
        most = self.limits.max_prompt_tokens
        if most is not None and any(job.view().id in granted for job in decoding):
            filling = [job for job in self.running if job not in decoding]
            assert sum(granted.get(job.view().id, 0) for job in filling) <= most

    def _compute(self, decided: Plan) -> None:
        running = {job.view().id: job for job in self.running}
        for index, row in enumerate(decided.rows):
            job = running[row.sequence_id]
            job.stored += row.pending
            if row.decide:
                accepted = min(self.accepted_lens[(self.steps + index) % len(self.accepted_lens)], row.draft.max_depth)
                job.stored += accepted
                job.length += accepted + 1
            if job.length == job.prompt + job.answer:
                job.finished_at = self.steps
                self.running.remove(job)


def layouts() -> st.SearchStrategy[KvLayout]:
    full = st.builds(KvGroup, tables=st.integers(1, 3))
    windowed = st.builds(
        KvGroup, tables=st.integers(1, 3), window=st.integers(2, 40), sinks=st.sampled_from([0, 0, 1, 5, 20])
    )
    groups = st.lists(full | windowed, min_size=1, max_size=3).map(tuple)
    return st.builds(KvLayout, st.sampled_from([1, 3, 4, 16]), groups)


def targets() -> st.SearchStrategy[SimulatedTarget]:
    return st.builds(
        SimulatedTarget,
        limits=st.builds(
            SchedulerSection,
            max_sequences=st.integers(1, 8),
            max_step_tokens=st.integers(16, 64),
            max_prompt_tokens=st.none() | st.integers(1, 64),
        ),
        draft=st.integers(0, 8).flatmap(lambda n: st.integers(min(n, 1), n).map(lambda depth: DraftBudget(n, depth))),
        layout=layouts(),
        blocks=st.just(0),
        accepted_lens=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    )


def jobs() -> st.SearchStrategy[list[Arrival]]:
    one = st.tuples(st.integers(0, 20), st.integers(1, 60), st.integers(1, 36), st.sampled_from("aab"))
    return st.lists(one, min_size=1, max_size=12)


def run_to_end(target: SimulatedTarget, arrivals: list[Arrival], spare_blocks: int) -> list[Job]:
    """Run all jobs to their end in a pool for the largest request and `spare_blocks` more."""
    largest = max(prompt + answer for _, prompt, answer, _ in arrivals)
    target.blocks = target.layout.peak(largest, target.limits.max_step_tokens) + spare_blocks
    assert target.layout.longest(target.blocks, target.limits.max_step_tokens, CONTEXT) >= largest
    arriving = [
        Job(arrival, at, prompt, answer, flow, length=prompt)
        for arrival, (at, prompt, answer, flow) in enumerate(sorted(arrivals, key=lambda job: job[0]))
    ]
    all_jobs = list(arriving)
    while arriving or target.waiting or target.running:
        while arriving and arriving[0].at <= target.steps:
            target.arrive(arriving.pop(0))
        busy = bool(target.waiting or target.running)
        decided = target.step()
        assert bool(decided.rows) == busy, "a step was empty although a sequence waited or ran"
    return all_jobs


@settings(max_examples=150, deadline=None)
@given(target=targets(), arrivals=jobs(), spare_blocks=st.integers(0, 24))
def test_everything_finishes_within_every_bound(
    target: SimulatedTarget, arrivals: list[Arrival], spare_blocks: int
) -> None:
    all_jobs = run_to_end(target, arrivals, spare_blocks)
    # The oldest job always progresses, so serving the jobs one by one bounds any wait: one step per token of each
    # answer, and the steps for the chunks of its prompt and of replayed tokens.
    bound = max(job.at for job in all_jobs) + sum(job.answer + job.prompt + 1 for job in all_jobs)
    for job in all_jobs:
        assert job.finished_at is not None
        assert job.finished_at <= bound


@settings(max_examples=50, deadline=None)
@given(target=targets(), arrivals=jobs())
def test_with_enough_blocks_no_sequence_is_preempted(target: SimulatedTarget, arrivals: list[Arrival]) -> None:
    preempted: list[SequenceId] = []
    plain = SimulatedTarget.step

    class Recorded(SimulatedTarget):
        def step(self) -> Plan:
            decided = plain(self)
            preempted.extend(decided.preempt)
            return decided

    recorded = Recorded(target.limits, target.draft, target.layout, 0, target.accepted_lens)
    run_to_end(recorded, arrivals, spare_blocks=12 * target.layout.peak(CONTEXT, 64))
    assert preempted == []
