"""A draft checkpoint on disk: its configuration, the sizes of its tensors, and the tensors. Sizes need no torch."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.core.errors import ModelLoadError, shorten
from workers.model.public_shapes import Sizes
from workers.model.weight_files import CONFIG, config_values, weight_files

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*_lm_head.pt")
"""Names of weight files. The first pattern with a file is read."""
_LONGEST_HEADER = 100 * 1024 * 1024
"""Bytes; the bound that safetensors itself sets on its headers."""
_MOST_LAYERS = 1024
_ARITHMETIC = re.compile(
    r"norm|bias|caus|scal|rope|rotary|cap|sink|window|swa|mult|conv|gate|expert|moe|residual|attn|attention|logit"
    r"|_act|act_|parallel|mask|interleav|neox|offset|layer_types|layer_ids|quant"
    r"|from_anchor|bonus_anchor|states_first"
)
"""Names of configuration keys that may change what a model computes."""
_NEUTRAL = frozenset(
    (
        *("attention_dropout", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("output_attentions", "max_window_layers"),
    )
)
"""Keys of that kind that do not change what a trained model computes."""
_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    **dict.fromkeys(("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"), (1, 1.0)),
}
"""Values of keys of that kind with which a model computes what it computes without them."""


def safetensors_header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of each of its tensors, by name. Raises `OSError`, `ValueError`."""
    return _read_header(file)[0]


def read_tensors(file: Path, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file with these names, in memory of their own. A name without one is left out.

    They stay as they are when somebody changes the file in place. Raises `OSError`, and `ValueError` for a broken file.
    """
    from workers.model import tensor_file

    header, first = _read_header(file)
    try:
        return tensor_file.read_tensors(file, header, first, names)
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header is wrong: {error!r}") from error


def read_pickled(file: Path) -> Any:
    """What a file of `torch.save` holds, read without running its code. Tensors are memory-mapped.

    Raises whatever the reader of a broken or hostile file raises, and `ValueError` for an archive that is compressed:
    `torch` maps its bytes as they are.
    """
    import torch

    is_archive = zipfile.is_zipfile(file)
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its entries are compressed; torch.save stores them as they are")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each of its tensors, and the number of bytes before the first one's."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"its header claims {length} bytes")
        try:
            header = json.loads(stream.read(length))
        except RecursionError:
            raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header holds no object")  # noqa: TRY004 - the file is wrong, not a caller
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


@dataclass(frozen=True)
class Checkpoint:
    """A directory with `config.json` and weights."""

    directory: Path
    config: Mapping[str, Any]
    prefix: str = ""
    """Begins the names of keys in errors, where `config` is a part of the file."""
    known_sizes: Sizes | None = None
    """The sizes of all tensors, where the weights are elsewhere."""

    @classmethod
    def read(cls, directory: Path, known_sizes: Sizes | None = None) -> Checkpoint:
        """The checkpoint in a directory, with an empty configuration where there is none that is an object."""
        return cls(directory, config_values(directory), known_sizes=known_sizes)

    def fail(self, problem: str) -> NoReturn:
        """Raise `ModelLoadError` with the directory and the problem."""
        raise ModelLoadError(f"draft directory {str(self.directory)!r}: {problem}")

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files with weights; empty if there are none. Raises `ModelLoadError` for an index without its files."""
        others = (tuple(sorted(self.directory.glob(pattern))) for pattern in _WEIGHTS[1:])
        return tuple(weight_files(self.directory)) or next((files for files in others if files), ())

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of all tensors by name. Raises `ModelLoadError` for a file that cannot be read."""
        if self.known_sizes is not None:
            return self.known_sizes
        found: Sizes = {}
        for file in self.files:
            if file.suffix == ".safetensors":
                own = self._header(file)
            else:
                own = {name: tuple(value.shape) for name, value in self._pickled(file).items()}
            if twice := own.keys() & found.keys():
                self.fail(f"{min(twice)} is in {file.name} and in a file before it; one of them must go")
            found |= own
        return found

    @property
    def model_type(self) -> str:
        """The family that the configuration names; `llama` if it names none."""
        return str(self.config.get("model_type") or "llama")

    def tensors(self, names: Collection[str], *, mapped: bool = False) -> dict[str, Tensor]:
        """Tensors by name, in memory of their own: a draft's files may be changed in place while it is served.

        With `mapped`, those of safetensors are memory-mapped. A name that no file has is left out. Raises
        `ModelLoadError`.
        """
        from safetensors import SafetensorError, safe_open

        found: dict[str, Tensor] = {}
        for file in self.files:
            if file.suffix != ".safetensors":
                found |= {name: value.clone() for name, value in self._pickled(file).items() if name in names}
                continue
            try:
                if not mapped:
                    found |= read_tensors(file, names)
                    continue
                with safe_open(file, framework="pt") as stored:
                    found |= {name: stored.get_tensor(name) for name in stored.keys() if name in names}  # noqa: SIM118
            except (OSError, ValueError, SafetensorError) as error:
                self.fail(f"{file.name} cannot be read: {error}")
        return found

    def weights(self, names: Collection[str], *, mapped: bool = False) -> dict[str, Tensor]:
        """Tensors that a draft computes with, as `tensors` returns them.

        Raises `ModelLoadError` for numbers of another kind than floats of two or more bytes: nothing would scale them.
        """
        found = self.tensors(names, mapped=mapped)
        for name, value in found.items():
            if not value.is_floating_point() or value.dtype.itemsize == 1:
                self.fail(f"{name} is {value.dtype}; it must be float32, bfloat16 or float16")
        return found

    def stored_bytes(self, names: Collection[str]) -> int:
        """Bytes that the tensors with these names take in the files together. Raises `ModelLoadError`."""
        found = 0
        for file in self.files:
            if file.suffix != ".safetensors":
                found += sum(value.nbytes for name, value in self._pickled(file).items() if name in names)
                continue
            try:
                entries = [one for name, one in safetensors_header(file).items() if name in names]
                found += sum(int(end) - int(begin) for begin, end in (one["data_offsets"] for one in entries))
            except (OSError, ValueError, KeyError, TypeError) as error:
                self.fail(f"{file.name} is no safetensors file: {error}")
        return found

    def nested(self, key: str) -> Checkpoint:
        """Return this checkpoint with the object at `key` as its configuration, empty if there is none."""
        found = self.config.get(key)
        if found is not None and not isinstance(found, dict):
            self.refuse(key, "it must be an object")
        return Checkpoint(self.directory, found or {}, f"{self.prefix}{key}.")

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of the configuration. Raises `ModelLoadError`."""
        found = self.config.get(key, default)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < least:
            self.refuse(key, f"it must be a whole number of at least {least}")
        return found

    def layers(self, default: int | None = None) -> int:
        """The number of decoder layers that the configuration states. Raises `ModelLoadError`."""
        key = "num_hidden_layers"
        found = self.count(key, default)
        if found > _MOST_LAYERS:
            self.refuse(key, f"it must be at most {_MOST_LAYERS}")
        return found

    def token(self, key: str, vocabulary: int) -> int:
        """A token of the configuration, which must be below `vocabulary`. Raises `ModelLoadError`."""
        found = self.count(key, least=0)
        if found >= vocabulary:
            self.refuse(key, f"it must be below vocab_size, {vocabulary}")
        return found

    def reduced_vocabulary(self, vocabulary: int) -> int:
        """The number of tokens that a draft can propose, out of `vocabulary`. Raises `ModelLoadError`."""
        key = "draft_vocab_size"
        found = self.count(key, vocabulary)
        if found > vocabulary:
            self.refuse(key, f"it must be at most vocab_size, {vocabulary}")
        return found

    def number(self, key: str, default: float) -> float:
        """A positive number of the configuration. Raises `ModelLoadError`."""
        found = self.config.get(key)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < math.inf:
            self.refuse(key, "it must be a number above 0")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value of the configuration. Raises `ModelLoadError`."""
        found = self.config.get(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            self.refuse(key, "it must be true or false")
        return found

    def numbers(self, key: str, *, least: int = 0) -> tuple[int, ...] | None:
        """A list of layer numbers of the configuration, ascending; `None` without one. Raises `ModelLoadError`."""
        found = self.config.get(key)
        if found is None:
            return None
        if (
            not isinstance(found, list)
            or not found
            or not all(isinstance(one, int) and not isinstance(one, bool) and one >= least for one in found)
            or found != sorted(set(found))
        ):
            self.refuse(key, "it must be a list of ascending layer numbers")
        return tuple(found)

    def allow(self, key: str, *values: object) -> None:
        """Raise `ModelLoadError` if the configuration sets `key` to anything but `None` and `values`."""
        found = self.config.get(key)
        if found is not None and not _is_one_of(found, values):
            accepted = f"it must be {' or '.join(map(shorten, values))}" if values else "it is not supported"
            self.refuse(key, accepted)

    def refuse_unknown_keys(self, known: Collection[str]) -> None:
        """Raise `ModelLoadError` for a set key that may change the arithmetic and that no reader knows."""
        for key, value in self.config.items():
            if value is None or key in known or key in _NEUTRAL or not _ARITHMETIC.search(key):
                continue
            if not _is_one_of(value, _NEUTRAL_VALUES.get(key, ())):
                self.refuse(key, "it may change what the draft computes, and this format does not know it")

    def check_tensors(self, wanted: Sizes, ignored: Collection[str] = ()) -> None:
        """Raise `ModelLoadError` unless the files hold the wanted tensors, and no others but ignored ones."""
        if not self.files:
            self.fail(f"it has no weights; needed one of {', '.join(_WEIGHTS)}")
        missing = sorted(wanted.keys() - self.sizes.keys())
        strange = sorted(self.sizes.keys() - wanted.keys() - set(ignored))
        if missing or strange:
            self.fail(
                f"its weights lack {shorten(missing[:3] or 'nothing')} and have {shorten(strange[:3] or 'nothing')} in "
                f"excess"
            )
        for name, size in wanted.items():
            if self.sizes[name] != size:
                self.fail(f"{name} must be {list(size)} by {CONFIG}, not {list(self.sizes[name])}")

    def refuse(self, key: str, wanted: str) -> NoReturn:
        """Raise `ModelLoadError` that names a key, its value and what it must be."""
        self.fail(f"{self.prefix}{key} in {CONFIG}: {shorten(self.config.get(key))} is refused; {wanted}")

    def _header(self, file: Path) -> Sizes:
        try:
            return {name: tuple(map(int, one["shape"])) for name, one in safetensors_header(file).items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.fail(f"{file.name} is no safetensors file: {error}")

    def _pickled(self, file: Path) -> dict[str, Tensor]:
        """The tensors of a file of `torch.save`, which is read without running its code."""
        import torch

        try:
            found = read_pickled(file)
        except Exception as error:  # the reader of a broken or hostile file may raise anything
            self.fail(f"{file.name} cannot be read as plain tensors: {error}")
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            self.fail(f"{file.name} must hold tensors by name")
        return {str(name): value for name, value in found.items()}


def _is_one_of(found: object, values: Collection[object]) -> bool:
    """Whether a value of a configuration is one of these, of the same type: 1 is neither 1.0 nor true."""
    return any(found == value and type(found) is type(value) for value in values)
