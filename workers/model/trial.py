"""The trial of a model before it serves: step by step it must compute what it computes in one dense pass.

A step may be a single token, a chunk beside another row, a chain or a tree. State that is not keys and values,
positions that a model counts itself, masks that nobody reads: all of them show as other logits, in families that nobody
has seen as well. A model that fails is refused. One that passes is not tried again as long as nothing changes: the
verdict is kept in the directory of the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.core.config.model_section import PoolSection
from workers.forward.adapters.registry import dense_attentions
from workers.forward.attention import UnsupportedModel
from workers.forward.loaded_model import LoadedModel
from workers.forward.probe import attention_named
from workers.model.latents import expanded
from workers.model.trial_steps import run_steps, trial_texts, trial_token
from workers.model.verdicts import keep_verdict, read_verdict
from workers.ranks import least_of_all_ranks

_SOURCE = 7
"""Tokens of the source of an encoder."""
_BLOCK_SIZE = 4

_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Bounds on |found - expected| / |expected| of a token's logits, both less their mean.

In float32 they hold for every token. In a shorter format a mixture of experts may choose another expert where two are
nearly equal, so they hold for the median of each kind of step. SmolLM2-135M has errors of 5e-6 in float32, and a median
of 0.035 in bfloat16; where state or positions are lost, the error is about 1.
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits of the model's own dense pass, float32 `[tokens, vocabulary]`, by text."""

    source: tuple[int, ...]
    """Tokens that the encoder reads; empty without one."""
    logits: dict[tuple[int, ...], torch.Tensor]

    def after(self, text: Sequence[int]) -> torch.Tensor:
        """The logits after the last token of a text, `[vocabulary]`."""
        for known, logits in self.logits.items():
            if known[: len(text)] == tuple(text):
                return logits[len(text) - 1]
        raise KeyError(text)


class Trial:
    """The trial of one model that is being loaded."""

    def __init__(self, verdict: Path | None) -> None:
        """`verdict` is where the verdict is kept, if it is."""
        self._verdict = verdict
        self._expected: Expected | None = None

    @torch.inference_mode()
    def expect(
        self, module: Any, vocabulary: int, device: torch.device, ranks: int, *, source_vocabulary: int = 0
    ) -> None:
        """Compute the logits of the model of `transformers` by its own attention, unless it passed an earlier trial.

        `source_vocabulary` counts the tokens of its encoder, 0 without one. All ranks call this together.
        """
        known = read_verdict(self._verdict) is not None
        self._expected = None
        if least_of_all_ranks(int(known), ranks):
            return
        source: tuple[int, ...] = ()
        if source_vocabulary:
            source = tuple(trial_token(index, source_vocabulary) for index in range(_SOURCE))
        texts = trial_texts(vocabulary)
        rows = [texts.text, texts.neighbor, *texts.branches]
        longest = max(map(len, rows))
        ids = {"input_ids": [(*row, *[row[-1]] * (longest - len(row))) for row in rows]}  # no token sees later ones
        if source:
            ids = {"input_ids": [source] * len(rows), "decoder_input_ids": ids["input_ids"]}
        inputs = {name: torch.tensor(tokens, device=device) for name, tokens in ids.items()}
        each = 1 if source else len(rows)  # the experts of an encoder may be shared by all that it reads in a pass
        firsts = range(0, len(rows), each)
        passes = [{name: one[first : first + each] for name, one in inputs.items()} for first in firsts]
        for attention in dense_attentions(module):
            with attention_named(module, attention), expanded(module):
                logits = torch.cat([module(**one, use_cache=False).logits.float() for one in passes])
            # Eager products overflow in float16 where large ones are scaled only afterwards.
            if module.dtype is not torch.float16 or least_of_all_ranks(int(bool(logits.isfinite().all())), ranks):
                break
        self._expected = Expected(source, {row: one[: len(row)].clone() for row, one in zip(rows, logits, strict=True)})

    def check(self, model: LoadedModel) -> None:
        """Raise `UnsupportedModel` unless the model computes the expected logits in steps of every kind.

        All ranks of a model call this together, and all of them raise.
        """
        if self._expected is None:
            return
        bound = _MAX_RELATIVE_ERROR[model.dtype]
        for kind, errors in _step_errors(model, self._expected).items():
            ordered = torch.tensor(errors).sort().values
            error = float(ordered[-1] if model.dtype is torch.float32 else ordered[len(ordered) // 2])
            if not least_of_all_ranks(int(error <= bound), model.tensor_parallel):  # NaN is no such number
                raise UnsupportedModel(
                    f"{kind}, it computes other logits than in one dense pass (relative error {error:.2g}, at most "
                    f"{bound} are allowed), so its answers would be wrong"
                )
        keep_verdict(self._verdict, {"model": model.name, "verdict": "equal to the dense pass"})


@torch.inference_mode()
def _step_errors(model: LoadedModel, expected: Expected) -> dict[str, list[float]]:
    """Relative errors of the logits, by kind of step."""
    errors: dict[str, list[float]] = {}
    for found in run_steps(model, PoolSection(block_size=_BLOCK_SIZE), expected.source):
        whole = expected.after(found.text)
        first = model.vocabulary_offset if len(whole) != len(found.logits) else 0  # of this rank's part
        own = whole[first : first + len(found.logits)]
        errors.setdefault(found.kind, []).append(_relative_error(found.logits, own))
    return errors


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| of both less their mean, as Euclidean norms. NaN if either holds NaN."""
    found, expected = (part.double() - part.double().mean() for part in (found, expected))
    least = torch.finfo(torch.float32).tiny
    return float((found - expected).norm() / expected.norm().clamp(min=least))
