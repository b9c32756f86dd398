"""The target's hidden states of all answers, computed once and kept in files of bounded size beside the answers.

A tap `l` is the residual stream after `l` decoder layers (0: the embedding's output). The files hold the taps of every
token of prompt and answer as bfloat16 rows [tokens, taps x hidden size], an answer in one file; an index has one JSON
line for each answer. Training many epochs then costs no passes of the target.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer, hold_alone
from workers.distill.budget import StepTimes
from workers.distill.examples import fill_batches, padded
from workers.distill.job import ReadStates
from workers.model.fingerprint import weights_digest
from workers.model.target_ends import decoder_layer_count

_BATCH_TOKENS = 2048
"""Tokens of one pass of the target, padding included."""
_FILE_BYTES = 4 << 30
"""Bytes after which the rows of further answers go into a new file."""
_SORTED = 64
"""Answers that are sorted by length before they are put into batches."""

Report = Callable[[int, int], None]
"""Called with the number of tokens computed so far in this run and the number wanted."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: int
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
        self._name = "-".join(map(str, taps))
        self.taps = tuple(taps)
        self.width = len(self.taps) * hidden_size
        self.max_length = max_length
        self._directory = directory
        self._index_path = directory / f"taps-{self._name}.jsonl"
        self._entries: dict[str, _Entry] = {}
        self._stored, self._index_bytes = [0], 0  # rows of each file and bytes of whole lines; the rest was cut off
        self._rows: list[Tensor] = []
        directory.mkdir(parents=True, exist_ok=True)
        self.refresh()

    def _file(self, number: int) -> Path:
        """The file of rows with this number."""
        return self._directory / f"taps-{self._name}{f'.{number}' if number else ''}.bfloat16"

    def refresh(self) -> None:
        """Read the index again: answers that another process appended become visible.

        Raises `ConfigurationError` if index and rows are damaged.
        """
        self._entries, self._stored, self._index_bytes = {}, [0], 0
        if self._index_path.exists():
            for line in self._index_path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                try:
                    self._add_line(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                    raise ConfigurationError(
                        f"taps {self._index_path}: {line[:80]!r} at byte {self._index_bytes} is refused; it must be a "
                        f"JSON object with key, tokens and checksum; remove the file and {self._file(0).name}"
                    ) from error
                self._index_bytes += len(line)
        self._rows = [self._mapped(number) for number in range(len(self._stored))]

    def _add_line(self, found: Any) -> None:
        """Read a line of the index. Answers are in its order, also those that are stored again with other tokens."""
        file, tokens, last = int(found.get("file", 0)), int(found["tokens"]), len(self._stored) - 1
        if file not in (last, last + 1):
            raise ValueError(f"file {file} after file {last}")
        if file > last:
            self._stored.append(0)
        self._entries[found["key"]] = _Entry(file, self._stored[file], tokens, int(found["checksum"]))
        self._stored[file] += tokens

    def _mapped(self, number: int) -> Tensor:
        """The rows of a file. A shared mapping may be larger than the memory."""
        path, size = self._file(number), self._stored[number] * self.width
        if not size:
            return torch.empty(0, dtype=torch.bfloat16)
        if path.stat().st_size < stored_bytes(self._stored[number], self.width):
            raise ConfigurationError(f"taps {path}: shorter than its index; remove it and {self._index_path.name}")
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)

    def has(self, answer: Answer) -> bool:
        """Whether the taps of exactly these tokens are stored."""
        entry = self._entries.get(answer.key)
        return entry is not None and entry.checksum == self._checksum(answer)

    def of(self, answer: Answer) -> Tensor:
        """The taps [tokens, taps x hidden size], bfloat16, of the prompt and the answer, cut to the longest length."""
        entry = self._entries[answer.key]
        rows = self._rows[entry.file]
        return rows[entry.row * self.width : (entry.row + entry.tokens) * self.width].view(-1, self.width)

    def check_space(self, answers: Sequence[Answer], option: str) -> None:
        """Raise `ConfigurationError` if the disk has no room for the taps that are missing.

        `option` is the one that chooses the directory. Call it before anything is computed: a disk that is full in the
        middle would waste what was.
        """
        if lack := self.lack_of_space(answers):
            raise ConfigurationError(f"{option}: {self._directory} is refused; {lack}")

    def lack_of_space(self, answers: Sequence[Answer]) -> str:
        """What the taps that are missing take and what the disk has free, if that is less; else an empty text."""
        tokens = sum(len(self._cut(answer)) for answer in answers if not self.has(answer))
        needed = stored_bytes(tokens, self.width)
        free = shutil.disk_usage(self._directory).free
        if needed <= free:
            return ""
        return f"the hidden states of {tokens:,} tokens take {needed:,} bytes, and its disk has {free:,} free"

    def fill(self, read: ReadStates, answers: Sequence[Answer], report: Report, ends: float | None = None) -> None:
        """Store the taps that are missing, until `ends` (of `time.monotonic`), which the last batch is to keep.

        Raises `ConfigurationError` where some are missing while another process stores some here.
        """
        if all(map(self.has, answers)):
            return
        with self._index_path.open("ab") as index:
            hold_alone(index, f"taps {self._index_path}")
            self.refresh()  # another process may have stored some since this one looked
            index.truncate(self._index_bytes)  # drops a part of a line that an interruption left
            with _Rows(self._file, stored_bytes(1, self.width), self._stored) as rows:
                self._fill(read, [answer for answer in answers if not self.has(answer)], report, ends, rows, index)
        self.refresh()

    def _fill(
        self,
        read: ReadStates,
        missing: Sequence[Answer],
        report: Report,
        ends: float | None,
        rows: _Rows,
        index: BinaryIO,
    ) -> None:
        times = StepTimes()
        wanted, done = sum(len(self._cut(answer)) for answer in missing), 0
        for batch in _batches(missing, self.max_length):
            if not times.one_fits(ends):
                break
            tokens, sources = [self._cut(answer) for answer in batch], [answer.source for answer in batch]
            with times.one():
                found = read(tokens, self.taps, sources)
            for answer, states in zip(batch, found, strict=True):
                file = rows.append(states)
                line = {"key": answer.key, "tokens": len(states), "checksum": self._checksum(answer)}
                index.write(json.dumps(line | ({"file": file} if file else {})).encode() + b"\n")
                done += len(states)
            index.flush()
            report(done, wanted)

    def _cut(self, answer: Answer) -> tuple[int, ...]:
        return (*answer.prompt, *answer.answer)[: self.max_length]

    def _checksum(self, answer: Answer) -> int:
        return zlib.crc32(np.asarray((*answer.source, *self._cut(answer)), np.int32).tobytes())


class _Rows:
    """Appends rows to the last one of several files, and begins another one where it would get too long.

    A context manager. What an interruption left behind the known rows is dropped.
    """

    def __init__(self, file: Callable[[int], Path], row_bytes: int, stored: Sequence[int]) -> None:
        """`stored` are the known rows of each file."""
        self._file = file
        self._row_bytes = row_bytes
        self._number = len(stored) - 1
        self._stored = stored[-1]
        self._open: BinaryIO | None = None

    def __enter__(self) -> Self:
        self._open = self._file(self._number).open("ab")
        self._open.truncate(self._stored * self._row_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            os.fsync(self._open.fileno())
            self._open.close()

    def append(self, states: Tensor) -> int:
        """Write and flush the rows of one answer, bfloat16. Returns the number of their file."""
        if self._stored and (self._stored + len(states)) * self._row_bytes > _FILE_BYTES:
            self.__exit__()
            self._number, self._stored = self._number + 1, 0
            self.__enter__()
        if self._open is None:
            raise ValueError("rows: needed an open file")
        self._open.write(states.view(torch.int16).numpy().tobytes())
        self._open.flush()
        self._stored += len(states)
        return self._number


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
