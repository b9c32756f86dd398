"""What the contract needs to know of single drafting methods. A method without an entry has default settings.

A method that loads weights needs an entry whose settings name tiny weights. A name such as `block:dspark` is the method
`block` with weights of another kind.
"""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.support.models import drafting_modules, mtp_targets, public_drafts, renumbered, tiny, tiny_tokenizer
from tests.support.models.public_drafts import DFLASH, DSPARK, HYDRA, LLAMA, speculators_config
from workers.draft.registry import METHODS
from workers.model.draft_shapes import TableShape
from workers.model.drafting.files import save_drafter
from workers.model.drafting.table import SuccessorTable

VOCABULARY = 320
HIDDEN = 48
EXAMPLE = Path(__file__).parents[4] / "deploy" / "docs" / "extending" / "drafting-method.md"
EXAMPLE_LINES = 40


@dataclass(frozen=True)
class Directories:
    """A tiny target, and a draft model that often agrees with it."""

    target: Path
    draft: Path
    others: Path
    """An empty directory, for weights that single methods need."""


@dataclass(frozen=True)
class MethodCase:
    """What is special about one method."""

    settings: Callable[[Directories], Mapping[str, Any]] = lambda _: {}
    """Computes the section `draft.<name>`."""
    drafts: bool = True
    """Whether the method drafts at all."""
    finds_repetitions: bool = True
    """Whether it drafts the right tokens once the target repeats one token for ever."""
    is_lossless: bool = True
    """Whether answers are those of the target alone."""
    keeps_sequences: bool = True
    """Whether the method stores committed tokens, so that a row after a gap does not fit them."""
    knows_target: bool = False
    """Whether it computes nearly what the target does, so that drafts are right even where no text repeats itself."""
    for_encoder_decoder: bool = True
    """Whether it drafts for encoder-decoder targets with these settings, if the method does."""


def _draft_model(directories: Directories) -> Mapping[str, Any]:
    return {"path": str(directories.draft), "device": "cpu", "compile": "off", "kv": {"pool_bytes": 4 << 20}}


def _parallel_model(directories: Directories) -> Mapping[str, Any]:
    """Settings of a PARD model: the draft model, whose last token is its mask token."""
    directory = directories.others / "pard"
    if not directory.exists():
        shutil.copytree(directories.draft, directory)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"pard_token": VOCABULARY - 1}))
    return {**_draft_model(directories), "path": str(directory)}


def _model_by_text(directories: Directories) -> Mapping[str, Any]:
    """Settings of the draft model with other numbers for its tokens."""
    directory = directories.others / "text"
    if not directory.exists():
        renumbered.renumber(directories.draft, directory)
    return {**_draft_model(directories), "path": str(directory)}


def _module(kind: str, *taps: int) -> Callable[[Directories], Mapping[str, Any]]:
    """Settings of a method that loads a module of a kind."""

    def settings(directories: Directories) -> Mapping[str, Any]:
        directory = directories.others / kind
        if not directory.exists():
            drafting_modules.save(directories.target, directory, kind, taps)
        return {"path": str(directory)}

    return settings


def _in_4_bits(kind: str, *taps: int) -> Callable[[Directories], Mapping[str, Any]]:
    """Settings of a method that loads a module of a kind and stores its weights in 4 bits."""
    return lambda directories: {**_module(kind, *taps)(directories), "weights": "int4"}


_SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "num_target_layers": None, "target_layer_ids": [-1, 0, 1]}
"""Keys of a public block drafter that reads the embedding and the layers of a small target."""


def _dspark(directories: Directories) -> Mapping[str, Any]:
    """Settings of a public checkpoint of DSpark."""
    config = DSPARK | _SMALL | {"markov_head_type": "gated"}
    tensors = public_drafts.spark("gated", size=VOCABULARY)
    return {"path": str(public_drafts.write(directories.others / "dspark", config, tensors))}


def _dflash(directories: Directories) -> Mapping[str, Any]:
    """Settings of a public checkpoint of DFlash."""
    config = DFLASH | _SMALL | {"dflash_config": {"mask_token_id": VOCABULARY - 1}}
    return {"path": str(public_drafts.write(directories.others / "dflash", config, public_drafts.block()))}


def _public_head(kind: str, **keys: Any) -> Callable[[Directories], Mapping[str, Any]]:
    """Settings of a head of the library `speculators` that reads the embedding and the layers of a small target."""

    def settings(directories: Directories) -> Mapping[str, Any]:
        config = speculators_config(
            speculators_model_type=kind,
            transformer_layer_config=LLAMA | {"vocab_size": VOCABULARY},
            draft_vocab_size=VOCABULARY,
            eagle_aux_hidden_state_layer_ids=[0, 1, 2],
            **keys,
        )
        own = ("d2t", "t2d", "lm_head.weight", "embed_tokens.weight")
        drawn = public_drafts.peagle(layers=1) if kind == "peagle" else public_drafts.eagle3("layers.0.")
        tensors = {name: value for name, value in drawn.items() if name not in own}
        return {"path": str(public_drafts.write(directories.others / kind, config, tensors))}

    return settings


def _medusa(directories: Directories) -> Mapping[str, Any]:
    """Settings of Medusa heads as their authors' second trainer stores them."""
    tensors = public_drafts.medusa(has_heads=False)
    return {"path": str(public_drafts.write(directories.others / "medusa", {"version": "2"}, tensors))}


def _hydra(directories: Directories) -> Mapping[str, Any]:
    """Settings of Hydra heads of their authors."""
    tensors = public_drafts.hydra(size=VOCABULARY)
    return {"path": str(public_drafts.write(directories.others / "hydra", HYDRA, tensors, "hydra_lm_head.pt"))}


def _table(directories: Directories) -> Mapping[str, Any]:
    """Settings of a table in which a token is followed by itself or by one of the next three."""
    directory = directories.others / "table"
    if not directory.exists():
        directory.mkdir()
        table = SuccessorTable(TableShape(4), VOCABULARY)
        table.successors.copy_((torch.arange(VOCABULARY).unsqueeze(1) + torch.arange(4)) % VOCABULARY)
        card = drafting_modules.card_for(directories.target, "table", (), shape=table.shape)
        save_drafter(directory, card, table, None, target_directory=directories.target)
    return {"path": str(directory)}


CASES = {
    "block": MethodCase(_module("block", 1, 2)),
    "block:dflash": MethodCase(_dflash),
    "block:dspark": MethodCase(_dspark),
    "blockwise": MethodCase(_module("heads", 2)),
    "eagle": MethodCase(_module("eagle", 1, 2)),
    "eagle:int4": MethodCase(_in_4_bits("eagle", 1, 2)),
    "eagle:eagle3": MethodCase(_public_head("eagle3")),
    "eagle:peagle": MethodCase(_public_head("peagle", mask_token_id=VOCABULARY - 1)),
    "early_exit": MethodCase(knows_target=True, keeps_sequences=False),
    "heads": MethodCase(_module("heads", 2)),
    "heads:hydra": MethodCase(_hydra),
    "heads:medusa": MethodCase(_medusa),
    "model": MethodCase(_draft_model, knows_target=True),
    "model:int4": MethodCase(lambda found: {**_draft_model(found), "quantization": "int4"}, knows_target=True),
    "model:pard": MethodCase(_parallel_model),
    "model:text": MethodCase(_model_by_text, finds_repetitions=False, for_encoder_decoder=False),
    "none": MethodCase(drafts=False, keeps_sequences=False),
    "recycling:table": MethodCase(_table),
    "synthetic": MethodCase(lambda _: {"acceptance": (0.7,), "seconds": 0.0}, is_lossless=False),
}


@contextmanager
def example_method() -> Iterator[None]:
    """Inside, the method that the page shows is registered by running its code. Other tests do not know it."""
    known = METHODS.names()  # the registry must know its own methods first
    if "successor" in known:  # somebody follows the page
        yield
        return
    text = EXAMPLE.read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    if len(code.splitlines()) > EXAMPLE_LINES:
        raise ValueError(f"the example in {EXAMPLE.name} has more than {EXAMPLE_LINES} lines")
    with TemporaryDirectory() as directory:
        file = Path(directory) / "successor.py"
        file.write_text(code, encoding="utf-8")
        runpy.run_path(str(file))
    try:
        yield
    finally:
        for name in set(METHODS.names()).difference(known):
            del METHODS._plugins[name]


CHECKPOINTS = ("block:dflash", "eagle:eagle3", "recycling:table")
"""Methods with weights of other kinds, which tests of public drafts and of recycling run on one rank."""
HEADS = ("heads:hydra", "heads:medusa")
"""Public heads on the target's last hidden state."""
COMBINATIONS = (
    "ngram+prediction",
    "model+suffix+prediction",
    "heads+suffix",
    "block+suffix",
    "early_exit+ngram",
    "suffix+recycling",
)
with example_method():
    NAMES = (*METHODS.names(), "block:dspark", "eagle:peagle", "model:pard", "model:text", *COMBINATIONS)
    """Every registered method, that of the page, and some that share a tree, joined by `+`."""


def cases_of(name: str) -> list[MethodCase]:
    """The entries of the joined methods; a method without an entry has the defaults."""
    return [CASES.get(one, MethodCase()) for one in name.split("+")]


def methods_of(name: str) -> list[str]:
    """The joined methods, by the names that settings have for them."""
    return [one.partition(":")[0] for one in name.split("+")]


def places_of(name: str) -> list[str]:
    """Where all of the joined methods can draft."""
    return [place for place in _PLACES if all(place in METHODS.get(one).places.order for one in methods_of(name))]


_PLACES = ("drafter", "target")
with example_method():
    NAMES_AND_PLACES = [(name, place) for name in NAMES for place in places_of(name)]


def values(name: str, directories: Directories, **drafting: Any) -> dict[str, Any]:
    """A configuration that selects the joined methods."""
    methods = methods_of(name)
    sections = {one: dict(case.settings(directories)) for one, case in zip(methods, cases_of(name), strict=True)}
    target = {"path": str(directories.target), "served_name": "tiny", "device": "cpu", "compile": "off"}
    draft = {"methods": methods, "max_nodes": 8, "max_depth": 5, "controller": "off", "timeout_seconds": 10.0}
    return {
        "target": target | {"kv": {"pool_bytes": 8 << 20, "block_size": 4}},
        "draft": draft | drafting | sections,
        "scheduler": {"max_sequences": 8, "max_step_tokens": 128},
        "server": {"grpc_port": 0, "http_port": 0},
    }


def drafts_for_translators(name: str) -> bool:
    """Whether all of the joined methods draft for encoder-decoder targets."""
    if name == "none" or not all(case.for_encoder_decoder for case in cases_of(name)):
        return False
    return all(METHODS.get(one).for_encoder_decoder for one in methods_of(name))


def has_layers_of_target(name: str) -> bool:
    """Whether one of the joined methods computes with the target's layers."""
    return any(METHODS.get(one).places.on_every_rank for one in methods_of(name))


PLACES_OF_FAMILIES = {"bart": _PLACES, "marian": ("target",), "t5": ("target",), "t5_gated": ("drafter",)}
"""Where methods draft for each family: at every place on the kernels (BART, Marian) and on modules (T5)."""
with example_method():
    DRAFTER_NAMES = [name for name in NAMES if not has_layers_of_target(name)]
    """Methods that draft without the target's own layers; the streams of a cluster cover the others."""
    SOURCED_NAMES_AND_PLACES = [(name, place) for name, place in NAMES_AND_PLACES if drafts_for_translators(name)]
    SOURCED_CASES = [
        (family, name, place)
        for family, places in PLACES_OF_FAMILIES.items()
        for name, place in SOURCED_NAMES_AND_PLACES
        if place in places or len(places_of(name)) == 1
    ]


def make_directories(root: Path, family: str = "llama", **changes: Any) -> Directories:
    """Save the models in subdirectories of `root`. `changes` are those of the family's configuration."""
    config = (tiny.FAMILIES | tiny.ENCODER_DECODER_FAMILIES)[family](vocab_size=VOCABULARY, **changes)
    target = tiny.save(tiny_tokenizer.byte_level(root / "target"), config)
    (root / "others").mkdir()
    draft = tiny.blur(target, root / "draft", noise=0.05)
    if family == "llama":
        mtp_targets.add_layer(target)
    return Directories(target, draft, root / "others")
