"""GPTQ checkpoints: 2, 3, 4 or 8 bits with zero points, packed along the inputs, perhaps in activation order.

`qweight` int32 `[in * bits / 32, out]`, `qzeros` int32 `[groups, out * bits / 32]`, `scales` `[groups, out]`, `g_idx`
int32 `[in]`: the group of each input. A weight is scale * (integer - zero). Checkpoints of `checkpoint_format: gptq`
store each zero less one, those of `gptq_v2` as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from workers.forward.weights.base import CutRefused, Storage
from workers.forward.weights.gathered import gathered_groups
from workers.forward.weights.integers import BITS, group_storage, unpacked
from workers.model.stored.parts import (
    FLOATS,
    WORD_INTEGERS,
    Parts,
    Region,
    group_size,
    groups,
    integer,
    own_groups,
    words,
)

_FORMATS = ("gptq", "gptq_v2")


class Gptq:
    """The format of one checkpoint."""

    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    scales = ("scales",)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises `ValueError` for settings that are not read."""
        self._settings = settings
        dynamic = settings.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise ValueError(f"dynamic is {dynamic!r}; it must have fields for patterns")  # noqa: TRY004 - of a file
        self._dynamic: Mapping[str, Mapping[str, Any]] = dynamic
        stored = str(settings.get("checkpoint_format") or "gptq")
        if stored not in _FORMATS:
            raise ValueError(f"checkpoint_format is {stored!r}; it must be {' or '.join(_FORMATS)}")
        if settings.get("is_marlin_format"):
            raise ValueError("is_marlin_format is true; it must be false")
        self._less_one = stored == "gptq"
        for pattern, given in (("", {}), *self._dynamic.items()):
            if not isinstance(given or {}, dict):
                raise ValueError(f"dynamic.{pattern} is {given!r}; it must have fields")  # noqa: TRY004 - of a file
            own = {**settings, **(given or {})}
            integer(own, "bits", BITS)
            group_size(own)
            try:
                re.compile(_pattern(pattern))
            except re.error as error:
                raise ValueError(f"dynamic has {pattern!r}, which is no pattern: {error}") from error

    def is_quantized(self, names: Collection[str]) -> bool:
        """Whether a layer has packed weights."""
        return "qweight" in names

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Outputs and inputs of the matrix."""
        shape, bits = parts.get("qweight").shape, self._of(parts.module)[0]
        if len(shape) != 2 or int(shape[0]) * 32 % bits:
            raise ValueError(f"qweight is {[*shape]}; it must have two dimensions, the first of whole integers")
        return int(shape[1]), int(shape[0]) * 32 // bits

    def storage(self, parts: Parts, region: Region) -> Storage:
        """A region of a matrix."""
        bits, per_group = self._of(parts.module)
        outputs, inputs = self.shape(parts)
        if bits == 3 and (inputs % WORD_INTEGERS or outputs % WORD_INTEGERS):
            raise ValueError(
                f"{outputs} outputs of {inputs} inputs in 3 bits; both must be multiples of {WORD_INTEGERS}"
            )
        count, size = groups(inputs, per_group), inputs if per_group == -1 else per_group
        packed = parts.checked("qweight", (torch.int32,), (inputs * bits // 32, outputs))
        zeros = parts.checked("qzeros", (torch.int32,), (count, -(-outputs * bits // 32)))
        scales = parts.checked("scales", FLOATS, (count, outputs))
        group_of, is_gathered = torch.arange(inputs) // size, False
        if "g_idx" in parts:
            given = parts.checked("g_idx", (torch.int32, torch.int64), (inputs,)).long()
            if int(given.min()) < 0 or int(given.max()) >= count:
                raise ValueError(f"g_idx has {int(given.min())} to {int(given.max())}; it must have 0 to {count - 1}")
            is_cut = (region.inputs.start, region.inputs.stop) != (0, inputs)
            is_gathered = is_cut and not torch.equal(given, group_of)
            group_of = given
        own = slice(0, count) if is_gathered else own_groups(region.inputs, inputs, size)
        group_of = group_of[region.inputs] - own.start
        rows, among = words(region.inputs, bits)
        held = packed[rows, region.outputs].t().clone(memory_format=torch.contiguous_format)  # [out, words]
        if among.start and not is_gathered:  # the groups begin within a word
            held = _shifted(held, among.start, bits)
        columns, of_word = words(region.outputs, bits)
        points = unpacked(zeros[own, columns], bits)[:, of_word]  # [groups, out]
        if self._less_one:
            points = (points + 1) & ((1 << bits) - 1)
        if is_gathered:
            integers = unpacked(held, bits)[:, among]
            return gathered_groups(integers, bits, scales[:, region.outputs].t(), points.t(), group_of)
        return group_storage(held, bits, scales[own, region.outputs].t(), points.t(), group_of)

    def _of(self, module: str) -> tuple[int, int]:
        """Bits and group size of a layer: the checkpoint's own, or those of the first pattern that fits its name."""
        for pattern, given in self._dynamic.items():
            if given and not pattern.startswith("-:") and re.match(_pattern(pattern), module):
                settings = {**self._settings, **given}
                return int(settings["bits"]), group_size(settings)
        return int(self._settings["bits"]), group_size(self._settings)


def _pattern(given: str) -> str:
    """A regular expression without the sign that says whether its layers are quantized."""
    return given.removeprefix("+:").removeprefix("-:")


def _shifted(held: torch.Tensor, first: int, bits: int) -> torch.Tensor:
    """Words `[out, n]` without those of their first integers."""
    if first * bits % 32:
        raise CutRefused("inputs that begin within a word of the packed weights are refused")
    return held[:, first * bits // 32 :].contiguous()
