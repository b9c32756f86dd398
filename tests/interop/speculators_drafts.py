"""Tiny drafts in the formats in which training stores them, and what Pilotfish computes with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import tiny
from tests.support.models.computed_states import computed_target
from tests.unit.distill.dspark import test_dspark_training as spark
from tests.unit.distill.eagle3 import test_eagle3_training as eagle
from tests.unit.draft.block.test_public_blocks import load_served
from workers.distill.answers import Answer
from workers.distill.dspark.rows import TextRows
from workers.distill.target_model import load_target
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.feature_pass import FeaturePass
from workers.model.drafting.files import load_drafter
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import TapNorm

CPU = torch.device("cpu")
LAYERS, LENGTH = 6, 14
Check = tuple[str, bool, str]
_CLOSE = 1e-5


class SpeculatorsDrafts:
    """Drafts in a directory, one folder each. `check` compares what the library wrote beside them."""

    def __init__(self, directory: Path) -> None:
        config = tiny.llama(num_hidden_layers=LAYERS, tie_word_embeddings=True, initializer_range=0.15)
        self._directory = directory
        self._target = tiny.save(directory / "target", config)
        self._model: Any = load_target(self._target, CPU)
        draws = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(3, tiny.VOCABULARY - 1, (LENGTH,), generator=draws)
        with torch.no_grad():
            states = self._model.get_decoder()(self._tokens[None], output_hidden_states=True).hidden_states
        self._taps = torch.cat([states[tap][0] for tap in eagle.TAPS], dim=1)  # those of DSpark are the same
        self._heads = {
            "eagle3, normalised taps": self._write_eagle3("eagle3-each", "each", is_normed=True),
            "eagle3, plain taps": self._write_eagle3("eagle3-none", "none", is_normed=False),
        }
        kinds: tuple[Literal["vanilla", "gated", "rnn"], ...] = ("vanilla", "gated", "rnn")
        self._blocks = {f"dspark, {kind} Markov head": self._write_dspark(f"dspark-{kind}", kind) for kind in kinds}
        self._blocks["dspark, some tokens"] = self._write_dspark("dspark-some", "rnn", spark.SOME)

    @property
    def folders(self) -> list[Path]:
        """The folders of the drafts."""
        return [self._directory / name for name, _ in (*self._heads.values(), *self._blocks.values())]

    def check(self) -> list[Check]:
        """Compare. Returns what, whether it holds, and the largest difference."""
        checks = [self._compared(name, self._eagle3(*one)) for name, one in self._heads.items()]
        return checks + [self._compared(name, self._dspark(*one)) for name, one in self._blocks.items()]

    def _compared(self, name: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> Check:
        differences = {what: float((one - other).abs().max()) for what, (one, other) in pairs.items()}
        is_close = all(torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE) for one, other in pairs.values())
        said = ", ".join(f"{what} {value:.1e}" for what, value in differences.items())
        return f"speculators, {name}: largest differences", is_close, said

    def _give(self, folder: str, taps: Tensor) -> None:
        """Write what the library reads: the taps, the tokens, and where the target is, which has embedding and head."""
        save_file({"taps": taps.clone().contiguous(), "tokens": self._tokens}, self._at(folder, "given"))
        file = self._directory / folder / "draft" / "config.json"
        config = json.loads(file.read_text("utf-8"))
        config["speculators_config"]["verifier"]["name_or_path"] = str(self._target)
        file.write_text(json.dumps(config), "utf-8")

    def _at(self, folder: str, name: str) -> Path:
        return self._directory / folder / f"{name}.safetensors"

    def _write_eagle3(self, folder: str, tap_norm: TapNorm, *, is_normed: bool) -> tuple[str, Any]:
        head = eagle.random_head(eagle.shape(tap_norm, is_normed=is_normed))
        (self._directory / folder).mkdir()
        eagle.write(head, self._directory / folder / "draft")
        self._give(folder, self._taps[:-1])
        return folder, head

    def _eagle3(self, folder: str, head: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Logits. At depth d the library keeps the row of the first input, which is d positions earlier."""
        found = load_file(self._at(folder, "found"))
        following = self._model.get_input_embeddings()(self._tokens[None, 1:])
        with torch.no_grad():
            rolled = [head.logits(one)[0] for one in head(self._taps[None, :-1], following, len(found))]
        count = len(rolled[0])
        known = count - eagle.DEPTHS
        taps = self._taps[:-1].view(count, len(eagle.TAPS), -1)
        loaded = load_drafter(self._directory / folder / "draft", self._target, torch.float32, CPU, "eagle")
        if not isinstance(loaded.module, PublicModule):
            raise TypeError(f"{type(loaded.module).__name__} is no public head")
        passes = FeaturePass(loaded.module, loaded.ends, "float32", scratch=LENGTH)
        served = eagle.served(passes, taps, self._tokens.tolist(), known)
        pairs = {"served, depth 0": (served[0], found["depth_0"][:known])}
        for depth, logits in enumerate(rolled):
            pairs[f"trained, depth {depth}"] = (logits[depth:], found[f"depth_{depth}"][: count - depth])
            if depth:
                pairs[f"served, depth {depth}"] = (served[depth], found[f"depth_{depth}"][known - 1 : known])
        return pairs

    def _write_dspark(
        self, folder: str, kind: Literal["vanilla", "gated", "rnn"], vocabulary: Tensor | None = None
    ) -> tuple[str, Any]:
        text = Answer("one", "", 0.0, False, tuple(self._tokens[:5].tolist()), tuple(self._tokens[5:].tolist()))
        texts = TextRows(computed_target(self._model, spark.TAPS), [text], length=spark.ROW)
        module = spark.random_module(self._model, texts, kind, vocabulary=vocabulary)
        weights = module.weights()
        if vocabulary is not None:
            weights = replace(weights, vocabulary=vocabulary, head=spark.head_of(self._model)[vocabulary].detach())
        (self._directory / folder).mkdir()
        spark.write(module, self._directory / folder / "draft", weights)
        self._give(folder, self._taps)
        return folder, module

    def _dspark(self, folder: str, module: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Vectors of the blocks as they are served, and logits, Markov head and confidences over them."""
        found = load_file(self._at(folder, "found"))
        drafter = load_served(self._directory / folder / "draft", self._target)
        anchors = found["indices"].view(-1, spark.SLOTS)[:, 0].tolist()
        windows = [ContextWindow(drafter.passes.context_shape, CPU) for _ in anchors]
        taps = self._taps.view(LENGTH, len(spark.TAPS), -1)
        for window, anchor in zip(windows, anchors, strict=True):
            window.store(0, drafter.passes.context(taps[:anchor], torch.arange(anchor)))
        hidden = drafter.passes.draft([int(self._tokens[one]) for one in anchors], anchors, windows)
        head = self._model.get_output_embeddings().weight.detach()
        if len(module.get_parameter(spark.SECOND)) < len(head):  # its rows are stored with the draft
            head = head[spark.SOME].bfloat16().float()
        with torch.no_grad():
            mixed, embedded = module.mixed(hidden, found["before"])
            bias = mixed @ module.get_parameter("markov_head.markov_w2.weight").T
            sure = module.sureness(hidden, embedded)
        return {
            "vectors": (hidden.flatten(0, 1), found["hidden"][0]),
            "logits": ((hidden @ head.T).flatten(0, 1), found["logits"].view(-1, head.shape[0])),
            "Markov head": (bias, found["bias"]),
            "confidences": (sure.flatten(), found["confidence"].flatten()),
        }
