"""The target's hidden states of all answers, computed once and kept in a file beside the answers.

A tap `l` is the residual stream after `l` decoder layers (0: the embedding's output). The file holds the taps of every
token of prompt and answer as bfloat16 rows [tokens, taps x hidden size]; an index has one JSON line for each answer.
Training many epochs then costs no passes of the target.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.budget import StepTimes
from workers.distill.examples import fill_batches, padded
from workers.model.fingerprint import weights_digest
from workers.model.target_ends import decoder_layer_count

_BATCH_TOKENS = 2048
"""Tokens of one pass of the target, padding included."""
_SORTED = 64
"""Answers that are sorted by length before they are put into batches."""

ReadStates = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[Sequence[int]]], list[Tensor]]
"""The taps of rows, bfloat16 [tokens, taps x hidden size] each. It is called with the token ids of the rows, the taps,
and what an encoder reads for each row; `taps_of` with a model is one."""

Report = Callable[[int, int], None]
"""Called with the number of tokens computed so far in this run and the number wanted."""


@dataclass(frozen=True, slots=True)
class _Entry:
    row: int
    tokens: int
    checksum: int


def stored_bytes(tokens: int, width: int) -> int:
    """Bytes of rows [tokens, taps x hidden size]; `width` is that of a row."""
    return 2 * tokens * width


def states_of(target: Path, directory: Path) -> Path:
    """The folder in `directory` for hidden states of exactly these weights. Raises `ModelLoadError`."""
    return directory / weights_digest(target)[:12]


class TapCache:
    """The taps of answers in one directory. One process appends at a time; readers see whole answers alone."""

    def __init__(self, directory: Path, taps: Sequence[int], hidden_size: int, max_length: int) -> None:
        name = "-".join(map(str, taps))
        self.taps = tuple(taps)
        self.width = len(self.taps) * hidden_size
        self.max_length = max_length
        self._rows_path = directory / f"taps-{name}.bfloat16"
        self._index_path = directory / f"taps-{name}.jsonl"
        self._entries: dict[str, _Entry] = {}
        self._stored, self._index_bytes = 0, 0  # rows and bytes of whole lines; what follows them was cut off
        self._rows: Tensor | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def refresh(self) -> None:
        """Read the index again: answers that another process appended become visible.

        Raises `ConfigurationError` if index and rows are damaged.
        """
        self._entries, row, self._index_bytes = {}, 0, 0
        if self._index_path.exists():
            for line in self._index_path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                try:
                    found = json.loads(line)
                    entry = _Entry(row, int(found["tokens"]), int(found["checksum"]))
                    self._entries[found["key"]] = entry
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigurationError(
                        f"taps {self._index_path}: {line[:80]!r} at byte {self._index_bytes} is refused; it must be a "
                        f"JSON object with key, tokens and checksum; remove the file and {self._rows_path.name}"
                    ) from error
                row += entry.tokens
                self._index_bytes += len(line)
        self._stored = row  # also of answers that were stored again with other tokens
        size = row * self.width
        if size and self._rows_path.stat().st_size < stored_bytes(row, self.width):
            raise ConfigurationError(f"taps {self._rows_path}: shorter than its index; remove both files")
        # A shared mapping may be larger than the memory.
        self._rows = (
            None if not size else torch.from_file(str(self._rows_path), shared=True, size=size, dtype=torch.bfloat16)
        )

    def has(self, answer: Answer) -> bool:
        """Whether the taps of exactly these tokens are stored."""
        entry = self._entries.get(answer.key)
        return entry is not None and entry.checksum == self._checksum(answer)

    def of(self, answer: Answer) -> Tensor:
        """The taps [tokens, taps x hidden size], bfloat16, of the prompt and the answer, cut to the longest length."""
        entry = self._entries[answer.key]
        if self._rows is None:
            raise ConfigurationError(f"taps {self._rows_path}: needed the answer {answer.key!r}, found no taps")
        return self._rows[entry.row * self.width : (entry.row + entry.tokens) * self.width].view(-1, self.width)

    def check_space(self, answers: Sequence[Answer], option: str) -> None:
        """Raise `ConfigurationError` if the disk has no room for the taps that are missing.

        `option` is the one that chooses the directory. Call it before anything is computed: a disk that is full in the
        middle would waste what was.
        """
        if lack := self.lack_of_space(answers):
            raise ConfigurationError(f"{option}: {self._rows_path.parent} is refused; {lack}")

    def lack_of_space(self, answers: Sequence[Answer]) -> str:
        """What the taps that are missing take and what the disk has free, if that is less; else an empty text."""
        tokens = sum(len(self._cut(answer)) for answer in answers if not self.has(answer))
        needed = stored_bytes(tokens, self.width)
        free = shutil.disk_usage(self._rows_path.parent).free
        if needed <= free:
            return ""
        return f"the hidden states of {tokens:,} tokens take {needed:,} bytes, and its disk has {free:,} free"

    def fill(self, read: ReadStates, answers: Sequence[Answer], report: Report, ends: float | None = None) -> None:
        """Store the taps that are missing, until `ends` (of `time.monotonic`), which the last batch is to keep."""
        times = StepTimes()
        missing = [answer for answer in answers if not self.has(answer)]
        wanted, done = sum(len(self._cut(answer)) for answer in missing), 0
        with self._rows_path.open("ab") as rows, self._index_path.open("ab") as index:
            # Drops what an interruption left: rows without an index line, and a part of a line.
            rows.truncate(stored_bytes(self._stored, self.width))
            index.truncate(self._index_bytes)
            for batch in _batches(missing, self.max_length):
                if not times.one_fits(ends):
                    break
                tokens, sources = [self._cut(answer) for answer in batch], [answer.source for answer in batch]
                with times.one():
                    found = read(tokens, self.taps, sources)
                for answer, states in zip(batch, found, strict=True):
                    rows.write(states.view(torch.int16).numpy().tobytes())
                    line = {"key": answer.key, "tokens": len(states), "checksum": self._checksum(answer)}
                    rows.flush()
                    index.write(json.dumps(line).encode() + b"\n")
                    done += len(states)
                index.flush()
                report(done, wanted)
            os.fsync(rows.fileno())
        self.refresh()

    def _cut(self, answer: Answer) -> tuple[int, ...]:
        return (*answer.prompt, *answer.answer)[: self.max_length]

    def _checksum(self, answer: Answer) -> int:
        return zlib.crc32(np.asarray((*answer.source, *self._cut(answer)), np.int32).tobytes())


def taps_of(
    target: Any, rows: Sequence[Sequence[int]], taps: Sequence[int], sources: Sequence[Sequence[int]] = ()
) -> list[Tensor]:
    """The taps of each row, bfloat16 [tokens, taps x hidden size]. `target` is a `transformers` model.

    `sources` are what the encoder of an encoder-decoder model reads for each row; its taps are those of the decoder.
    """
    device = target.get_output_embeddings().weight.device
    tokens, _ = padded(rows, device)
    found: dict[int, Tensor] = {}
    hooks = [_capture(target, tap, found) for tap in set(taps)]
    try:
        with torch.inference_mode():
            if target.config.is_encoder_decoder:
                read, mask = padded(sources, device)
                states = target.get_encoder()(input_ids=read, attention_mask=mask).last_hidden_state
                memory = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
                target.get_decoder()(input_ids=tokens, use_cache=False, **memory)
            else:
                target.base_model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    states = torch.cat([found[tap].to("cpu", torch.bfloat16) for tap in taps], dim=-1)
    return [states[number, : len(row)].contiguous() for number, row in enumerate(rows)]


def decoder_layers(target: Any) -> nn.ModuleList:
    """The decoder layers of a `transformers` model."""
    count = decoder_layer_count(target.config)
    for module in (target.get_decoder() if target.config.is_encoder_decoder else target).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigurationError(f"model type {target.config.model_type!r}: its {count} decoder layers were not found")


def _capture(target: Any, tap: int, found: dict[int, Tensor]) -> Any:
    layers = decoder_layers(target)
    if not 0 <= tap <= len(layers):
        raise ConfigurationError(f"taps: {tap} is refused; it must be within 0 and {len(layers)}")

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        found[tap] = output[0] if isinstance(output, tuple) else output

    def keep_input(_: nn.Module, inputs: Any) -> None:
        found[tap] = inputs[0]

    return layers[0].register_forward_pre_hook(keep_input) if tap == 0 else layers[tap - 1].register_forward_hook(keep)


def _batches(answers: Sequence[Answer], max_length: int) -> Iterator[list[Answer]]:
    lengths = [min(max_length, len(answer.prompt) + len(answer.answer)) for answer in answers]
    for start in range(0, len(answers), _SORTED):
        near = sorted(range(len(answers))[start : start + _SORTED], key=lengths.__getitem__)
        for batch in fill_batches(near, lengths, _BATCH_TOKENS):
            yield [answers[index] for index in batch]
