"""The class that vLLM's speculative method `custom_class` loads: it asks a drafter of Pilotfish for every step.

    vllm serve TARGET --speculative-config \
        '{"method": "custom_class", "model": "pilotfish_vllm.Proposer", "num_speculative_tokens": 5}' \
        --additional-config '{"pilotfish": {"address": "drafter-host:9100"}}'

vLLM verifies chains: of a drafter's tree, the path is taken from which most tokens are expected to be accepted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from pilotfish.v1 import common_pb2, draft_pb2
from pilotfish_vllm.drafter import RemoteDrafter
from pilotfish_vllm.sequences import Sequence as Known
from pilotfish_vllm.sequences import Sequences
from pilotfish_vllm.settings import RefusedSettings, read_settings

logger = logging.getLogger(__name__)

MOST_DRAFTED = 64
"""Most tokens of one draft."""
MOST_TOKENS = 1 << 20
"""Longest sequence that a drafter accepts, in tokens."""
MOST_ROWS = 4096
"""Most rows of one call."""
MOST_NEW_TOKENS = 1 << 22
"""Most new tokens in one call, so that its message stays below the bound of 64 MiB. Further rows wait for a step."""


class Proposer:
    """Proposes tokens for each row of a step. vLLM makes one in each worker, and calls it from one thread."""

    def __init__(self, vllm_config: Any) -> None:
        """`vllm_config` is vLLM's `VllmConfig`. Raises `RefusedSettings`, also for a drafter that cannot draft here."""
        count = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= count <= MOST_DRAFTED:
            raise RefusedSettings(
                f"speculative_config.num_speculative_tokens: {count} is refused; it must be from 1 to {MOST_DRAFTED}"
            )
        additional = vllm_config.additional_config
        section = additional.get("pilotfish") if isinstance(additional, dict) else None
        settings = read_settings(section, os.environ)
        self._count = int(count)
        self._longest = min(int(vllm_config.model_config.max_model_len), MOST_TOKENS)
        self._vocabulary_size = int(vllm_config.model_config.get_vocab_size())
        self._sequences = Sequences()
        self._lock = threading.Lock()
        self._drafter: RemoteDrafter | None = None
        parallel = vllm_config.parallel_config
        if parallel.rank % parallel.tensor_parallel_size == 0:  # vLLM takes the drafts of this rank
            self._drafter = RemoteDrafter(settings, self._end_idle)
            self._drafter.start()

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing: the drafter has the model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: npt.NDArray[Any],
        slot_mappings: Any = None,  # noqa: ARG002 - part of vLLM's interface
    ) -> list[list[int]]:
        """Propose up to `num_speculative_tokens` tokens after each row's last token.

        `sampled_token_ids` has the tokens that the step decided for each row, none for a prompt that is not read to its
        end. `num_tokens_no_spec` is `[rows]`, with these tokens; `token_ids_cpu` is `[rows, longest]`. A row without
        drafts has an empty list.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._drafter is None:
            return drafts
        contents = {
            index: token_ids_cpu[index, : num_tokens_no_spec[index]]
            for index, sampled in enumerate(sampled_token_ids)
            if sampled and num_tokens_no_spec[index] < self._longest
        }
        with self._lock:
            known, ended = self._sequences.match(contents, time.monotonic())
        if ended:
            self._drafter.release([one.id for one in ended])
        asked = self._rows(sampled_token_ids, known)
        proposals = self._drafter.propose([row for _, row in asked]) if asked else None
        for (index, _), proposal in zip(asked, proposals or (), strict=proposals is not None):
            drafts[index] = self._take(known[index], proposal)
        return drafts

    def _rows(
        self, sampled_token_ids: Sequence[Sequence[int]], known: dict[int, Known]
    ) -> list[tuple[int, draft_pb2.DraftRow]]:
        """The rows to draft for, each with its index in the step."""
        asked: list[tuple[int, draft_pb2.DraftRow]] = []
        left = MOST_NEW_TOKENS
        for index, one in known.items():
            left -= one.length - one.held
            # A negative number takes the place of a token that vLLM knows as a vector alone, or not yet.
            one.is_refused = one.is_refused or bool((one.tokens[one.held : one.length] < 0).any())
            if one.is_refused or len(asked) == MOST_ROWS or (left < 0 and asked):
                continue
            most = min(self._count, self._longest - one.length)
            asked.append((index, self._row(one, most, max(1, one.length - len(sampled_token_ids[index])))))
        return asked

    def _row(self, one: Known, most: int, prompt_len: int) -> draft_pb2.DraftRow:
        start = None
        if not one.held:  # vLLM tells no sampling parameters; the most probable tokens suit all of them
            start = common_pb2.SequenceStart(
                prompt_len=prompt_len,
                sampling=common_pb2.SamplingParameters(temperature=0.0),
                cache_salt="" if self._drafter is None else self._drafter.client,
            )
        return draft_pb2.DraftRow(
            sequence_id=one.id,
            base_len=one.length,
            new_tokens=one.tokens[one.held : one.length].tolist(),
            max_nodes=most,
            max_depth=most,
            start=start,
        )

    def _take(self, one: Known, proposal: Any) -> list[int]:
        """Record what the drafter holds now. Returns the draft."""
        if not proposal.HasField("fault"):
            one.held = one.length
            return best_path(proposal.tree, proposal.probabilities, self._vocabulary_size)[: self._count]
        if proposal.fault.code == common_pb2.ROW_FAULT_CODE_OUT_OF_SYNC:
            one.held = 0
        elif proposal.fault.code == common_pb2.ROW_FAULT_CODE_INVALID:
            logger.warning("a sequence gets no drafts: %s", proposal.fault.message)
            one.is_refused = True
        return []

    def _end_idle(self) -> list[str]:
        with self._lock:
            return [one.id for one in self._sequences.end_idle(time.monotonic())]


def best_path(tree: Any, probabilities: Sequence[float], vocabulary_size: int) -> list[int]:
    """The tokens of the path from the root of a `TokenTree` on which most tokens are expected to be accepted.

    `probabilities` has for each node the estimate that all tokens down to it are accepted; without any, the longest
    path is taken. Subtrees below tokens outside of the vocabulary are left out.
    """
    tokens, parents = list(tree.tokens), list(tree.parents)
    if len(parents) != len(tokens) or any(not -1 <= parent < node for node, parent in enumerate(parents)):
        return []
    weights = list(probabilities) if len(probabilities) == len(tokens) else [1.0] * len(tokens)
    below: dict[int, tuple[float, int]] = {}  # the best value below a node, and the child that has it
    for node in range(len(tokens) - 1, -1, -1):
        if tokens[node] >= vocabulary_size:
            continue
        value = weights[node] + below.get(node, (0.0, node))[0]
        if value > below.get(parents[node], (0.0, node))[0]:
            below[parents[node]] = (value, node)
    path: list[int] = []
    node = -1
    while node in below:
        node = below[node][1]
        path.append(tokens[node])
    return path
