"""Takes evidence from a step for drafting methods: hidden states, decisions, most probable tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from cluster.core.bounds import MAX_MESSAGE_BYTES
from cluster.core.config.target_section import EvidenceSection
from cluster.core.drafting import Evidence, HiddenStates, Tap
from cluster.core.evidence_store import largest_share
from cluster.core.ids import SequenceId
from cluster.core.ports import ReadsHiddenStates
from cluster.core.verification import Verdict, VerifyRow
from workers.forward.runner import ModelRunner
from workers.sampling.acceptance import Accepted
from workers.transfer import HostArray, HostCopies, is_on_device, rows_of
from workers.verify.decider import Decider

Fuse = Callable[[torch.Tensor], torch.Tensor]
"""Maps hidden states `[tokens, taps, hidden]` to what is sent in their place, `[tokens, width]`."""
MAX_SENT_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of hidden states that the verdicts of one step bring. Of a step with more, the rows with the most lose
their first positions, and drafters go without those."""
_MOST_FUSED = 1024
"""Most tokens whose hidden states are fused at once, in float32, which takes twice the memory of those recorded."""
_MOST_RANKED = 512
"""Most decisions of a step at all of which a GPU ranks the tokens, before it is known which of them are accepted."""
_MOST_SHOWN_BYTES = 32 << 20
"""Most bytes of hidden states of a step that are copied from a GPU with the decisions, those of rejected nodes too. A
copy is in pinned memory first, and such memory is not given back."""


def resolve_taps(taps: Sequence[Tap], layers: int) -> tuple[int, ...]:
    """The taps as numbers of decoder layers, for a target with this number of layers."""
    numbers = (layers // 2 if tap == "middle" else tap for tap in taps)
    return tuple(tap + layers + 1 if tap < 0 else tap for tap in numbers)


def within_bytes(verdicts: Sequence[Verdict], most_bytes: int = MAX_SENT_BYTES) -> list[Evidence | None]:
    """Return the evidence of verdicts, with the latest hidden states that take at most `most_bytes` together."""
    found = [verdict.evidence for verdict in verdicts]
    share = largest_share((_size(one) for one in found), most_bytes)
    return [one if one is None or _size(one) <= share else _latest(one, share) for one in found]


def _size(evidence: Evidence | None) -> int:
    return 0 if evidence is None or evidence.hidden is None else len(evidence.hidden.data)


def _latest(evidence: Evidence, most_bytes: int) -> Evidence:
    hidden = evidence.hidden
    return replace(evidence, hidden=None if hidden is None else hidden.latest(most_bytes // (2 * hidden.width)))


class EvidenceCollector:
    """Takes what the configuration asks for from the last forward pass of a runner, for the rows that need it.

    Where verdicts bring the evidence, every row needs it. A drafter on the target needs it only of rows whose
    `next_budget` says so, and steps cost nothing more while it is not asked for drafts.
    """

    def __init__(
        self,
        section: EvidenceSection,
        runner: ModelRunner,
        decider: Decider,
        is_alone: bool,
        method: object = None,
        fuse: Fuse | None = None,
    ) -> None:
        """`method` drafts on this rank, if it is not `None`. `is_alone`: this rank is the only one.

        With `fuse`, evidence has what it returns in place of hidden states.
        """
        self._section = section
        self._runner = runner
        self._decider = decider
        self._fuse = fuse
        self._fused: torch.Tensor | None = None
        """What `fuse` returned for all tokens of the last pass, bfloat16 `[tokens, width]`, until `complete`."""
        self._paths: dict[SequenceId, torch.Tensor] = {}
        """This rank's logits `[tokens, vocabulary]` along the accepted paths of the last pass, until `complete`."""
        self._states: dict[SequenceId, tuple[int, torch.Tensor]] = {}
        """First position, and hidden states or what `fuse` returned, bfloat16 `[tokens, width]`, until `complete`."""
        self._ranked: Callable[[int], HostArray] | None = None
        """Returns the most probable tokens at the decisions from those of a row on, if they arrive with the decisions.
        On all ranks but the first there are none."""
        self._shown: Callable[[], HostArray] | None = None
        """Returns the hidden states of all tokens of the pass, as int16, if they arrive with the decisions."""
        # Several ranks record hidden states together, and only the batch is the same on all of them.
        self._reader = method if is_alone and isinstance(method, ReadsHiddenStates) else None

    def is_needed(self, rows: Iterable[VerifyRow]) -> bool:
        """Whether drafts are asked for with any of these rows, or evidence of it."""
        return any(map(self._needs, rows))

    def records_hidden(self, rows: Sequence[VerifyRow]) -> bool:
        """Whether the forward pass of these rows must record hidden states."""
        if not self._section.taps or not any(map(self._needs, rows)):
            return False
        return self._section.is_sent or self._reader is None or self._reader.reads_hidden

    def ranked(self, rows: Sequence[VerifyRow]) -> int:
        """How many of the most probable tokens the evidence of these rows shows: that many logits must be computed."""
        return self._section.top if any(map(self._is_drafted, rows)) else 0

    def records_for(self, launched: Sequence[VerifyRow], rows: Sequence[VerifyRow]) -> bool:
        """Whether a pass of the `launched` rows records what `rows` need. They differ at most in what they ask for."""
        is_recorded = self.records_hidden(launched) or not self.records_hidden(rows)
        return is_recorded and self.ranked(launched) >= self.ranked(rows)

    def launch(
        self, rows: Sequence[VerifyRow], owns: Sequence[range], logits: torch.Tensor, copies: HostCopies
    ) -> None:
        """Let a GPU look up the evidence at all nodes of the last pass of `rows`: it arrives with the decisions.

        `logits` are `[decisions, vocabulary (this rank's part)]`, and `owns` the indices of each row's decisions.
        Nothing is done on a CPU; what is much follows in `complete`, for accepted nodes alone. Of several ranks, all
        must call this.
        """
        if not is_on_device(logits):
            return
        if self.ranked(rows) and 0 < len(logits) <= _MOST_RANKED:
            found = self._decider.most_probable(logits, self._section.top)
            self._ranked = partial(_ranked_from, owns, None if found is None else copies.add(found))
        hidden = self._all_recorded()
        if hidden is not None and hidden.numel() * hidden.element_size() <= _MOST_SHOWN_BYTES:
            self._shown = copies.add(hidden.view(torch.int16))

    def collect(
        self, index: int, row: VerifyRow, accepted: Accepted, decisions: Sequence[int], logits: torch.Tensor
    ) -> Evidence | None:
        """Take the evidence of row `index` of the pass; `None` if nothing is asked for.

        `decisions` and this rank's `logits` `[nodes + 1, vocabulary]` are those at the root and at every node, or empty
        for a row that decides nothing. Call this before the next pass. Hidden states and the most probable tokens
        follow in `complete`.
        """
        if not self._section.any or not self._needs(row):
            return None
        is_drafted = self._is_drafted(row)
        found = Evidence(
            base_len=row.base_len,
            tree=row.tree,
            decisions=tuple(decisions) if self._section.decisions and is_drafted else (),
        )
        if self._section.top and row.decide and is_drafted:
            path = [0, *(node + 1 for node in accepted.nodes)]
            if self._ranked is None:
                self._paths[row.sequence_id] = rows_of(logits, path)
            elif len(ranked := self._ranked(index)):
                found = replace(found, top=_top(ranked[path]))
        if self._shown is not None:
            kept = np.array(self._shown()[self._runner.tokens_of(index, accepted.nodes)])
            found = replace(found, hidden=_hidden(row.start_len, kept))
        elif self._runner.hidden is not None:
            states = self._runner.hidden_of(index, accepted.nodes, self._all_recorded())
            self._states[row.sequence_id] = row.start_len, states
        return found

    def complete(self, verdicts: dict[SequenceId, Verdict]) -> None:
        """Add hidden states and the most probable tokens to the evidence in the verdicts of the last pass.

        What did not arrive with the decisions is copied from a GPU for all rows together, with one wait. Of several
        ranks, all must call this; only the first one adds the tokens.
        """
        states, paths, copies = self._states, self._paths, HostCopies()
        self.discard()
        shown = launched_states([values for _, values in states.values()], copies)
        found = None
        if paths:
            found = self._decider.most_probable(torch.cat(list(paths.values())), self._section.top)
        ranked = None if found is None else copies.add(found)
        for (sequence_id, (first, _)), values in zip(states.items(), shown(), strict=True):
            _add(verdicts, sequence_id, hidden=_hidden(first, values))
        if ranked is None:
            return
        first = 0
        for sequence_id, path in paths.items():
            _add(verdicts, sequence_id, top=_top(ranked()[first : first + len(path)]))
            first += len(path)

    def discard(self) -> None:
        """Drop the data of a pass that failed."""
        self._paths, self._states, self._fused, self._ranked, self._shown = {}, {}, None, None, None

    def _needs(self, row: VerifyRow) -> bool:
        """Whether the row needs evidence; before its first draft, only hidden states, which are a drafter's context."""
        return self._is_drafted(row) or (bool(self._section.taps) and row.next_budget.max_depth > 0)

    def _is_drafted(self, row: VerifyRow) -> bool:
        """Whether all evidence of the row is used: it is drafted for, perhaps by a drafter in another process."""
        return self._section.is_sent or row.next_budget.max_nodes > 0

    def _all_recorded(self) -> torch.Tensor | None:
        """Hidden states of all tokens of the last pass, or what `fuse` makes of them: bfloat16 `[tokens, width]`."""
        hidden = self._runner.hidden
        if self._fuse is None or hidden is None:
            return hidden
        if self._fused is None:
            taps = hidden.view(len(hidden), len(self._section.taps), -1)
            parts = (taps[first : first + _MOST_FUSED] for first in range(0, len(taps), _MOST_FUSED))
            self._fused = torch.cat([self._fuse(part).bfloat16() for part in parts])
        return self._fused


def _ranked_from(owns: Sequence[range], ranked: Callable[[], HostArray] | None, row: int) -> HostArray:
    """The most probable tokens at the decisions from those of a row on; none on a rank that has none."""
    return np.empty(0, dtype=np.int64) if ranked is None else ranked()[owns[row].start :]


def _add(verdicts: dict[SequenceId, Verdict], sequence_id: SequenceId, **found: Any) -> None:
    """Add to the evidence in a verdict, if it has some."""
    verdict = verdicts[sequence_id]
    if verdict.evidence is not None:
        verdicts[sequence_id] = replace(verdict, evidence=replace(verdict.evidence, **found))


def launched_states(states: Sequence[torch.Tensor], copies: HostCopies) -> Callable[[], list[HostArray]]:
    """Return a function that returns these bfloat16 `[tokens, width]` on the host, as int16. Those of a GPU are copied
    in one piece, those of the CPU not at all."""
    numbers = [one.view(torch.int16) for one in states]
    if not any(is_on_device(one) for one in numbers):
        return lambda: [one.detach().numpy() for one in numbers]
    whole, ends = copies.add(torch.cat(numbers)), np.cumsum([len(one) for one in numbers])
    return lambda: [np.array(part) for part in np.split(whole(), ends[:-1])]


def _hidden(first: int, values: HostArray) -> HiddenStates:
    return HiddenStates(first, values.shape[1], np.ascontiguousarray(values).data.cast("B"))


def _top(ranked: HostArray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokens) for tokens in ranked.tolist())
