"""Tiny drafts in public layouts, which are trained by their oracles on a tiny target's own answers.

Training runs the oracle's forward pass, so a draft learns the reading of its layout that the oracle has. Nothing here
calls the product.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.interop.draft_rates import DraftChain, Target, cut
from tests.support.models import mtp_targets, public_drafts, tiny, tiny_tokenizer
from tests.support.models.draft_references import Eagle3
from tests.support.models.mtp_targets import OTHERS, names_of
from tests.support.models.public_drafts import HIDDEN, SLOTS, Tensors
from tests.support.models.shown_target import Shown
from tests.unit.draft.block import test_public_blocks as blocks
from tests.unit.draft.contract.methods import VOCABULARY
from tests.unit.draft.eagle import test_parallel_heads as parallel_heads
from tests.unit.draft.eagle import test_public_heads as heads
from tests.unit.draft.eagle.conftest import LAYERS
from tests.unit.draft.heads import test_own_heads as own_heads
from tests.unit.draft.mtp.test_mtp import LayerOracle
from tests.unit.draft.mtp.test_speculators_mtp import converted

DEPTH = 4
HEAD_WIDTH = 32
"""The least width of heads that all engines compute."""
MASK = VOCABULARY - 1
_DAMPED = 0.7
_SPEED = 3e-3


@dataclass(frozen=True)
class Draft:
    """A draft that is written to files, and what its oracle makes of it."""

    depth: int
    """Tokens of a chain."""
    chain: DraftChain
    settings: tuple[str, ...]
    """What selects it in a cluster."""


Texts = Sequence[tuple[Sequence[int], Shown]]
"""Tokens, and what the target shows of all of them."""


def damped_target(directory: Path) -> Target:
    """A Llama whose layers add less than they were drawn for: the last token decides much of the next one."""
    tiny_tokenizer.byte_level(directory)
    tiny.save(
        directory,
        tiny.llama(num_hidden_layers=LAYERS, rope_theta=5e5, vocab_size=VOCABULARY, head_dim=HEAD_WIDTH),
    )
    weights = load_file(directory / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value *= _DAMPED
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return Target(directory)


def shown_texts(target: Target) -> Texts:
    """The target's answers."""
    return [(text, target.run(text)[1]) for text in target.texts]


def trained(tensors: Mapping[str, Tensor], loss: Callable[[Tensors, int], Tensor], steps: int) -> Tensors:
    """The tensors after some steps of Adam. `loss` has those that are to be trained, and the number of the step."""
    floats = {name: value.clone().requires_grad_() for name, value in tensors.items() if value.is_floating_point()}
    whole = {**tensors, **floats}
    optimizer = torch.optim.Adam(floats.values(), _SPEED)
    for step in range(steps):
        optimizer.zero_grad()
        loss(whole, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.detach() for name, value in whole.items()}


def reduced(tensors: Tensors, texts: Texts) -> tuple[Tensors, list[int]]:
    """Tensors with a head for the tokens of the texts alone, and these tokens."""
    tokens = sorted({token for text, _ in texts for token in text})
    is_drafted = torch.zeros(VOCABULARY, dtype=torch.bool)
    is_drafted[tokens] = True
    head = public_drafts.Draw(21).matrix(len(tokens), HIDDEN)
    offsets = torch.tensor(tokens) - torch.arange(len(tokens))
    return tensors | {"lm_head.weight": head, "d2t": offsets, "t2d": is_drafted}, tokens


def widened(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """A checkpoint with heads of `HEAD_WIDTH` elements."""
    draw, found = public_drafts.Draw(22), dict(tensors)
    heads_of = {"q": public_drafts.HEADS, "k": public_drafts.KV_HEADS, "v": public_drafts.KV_HEADS}
    for name, value in tensors.items():
        part = name.split(".self_attn.")[-1]
        if part.endswith("_norm.weight") and part != name:
            found[name] = draw.norm(HEAD_WIDTH)
        elif part == "o_proj.weight":
            found[name] = draw.matrix(len(value), public_drafts.HEADS * HEAD_WIDTH)
        elif part != name and part[0] in heads_of:  # a matrix, or its bias
            found[name] = draw.matrix(heads_of[part[0]] * HEAD_WIDTH, *value.shape[1:])
    body = "transformer_layer_config"
    if body in config:
        return {**config, body: {**config[body], "head_dim": HEAD_WIDTH}}, found
    return {**config, "head_dim": HEAD_WIDTH}, found


def anchors(texts: Texts, depth: int, step: int) -> tuple[Sequence[int], Shown, int]:
    """A text and a place in it for a step of training: `depth` tokens follow the token at the place."""
    draw = torch.Generator().manual_seed(step)
    text, shown = texts[step % len(texts)]
    return text, shown, int(torch.randint(4, len(text) - depth, (), generator=draw))


def sized(config: Mapping[str, Any], rows: int | None = None) -> dict[str, Any]:
    """A configuration for the target's vocabulary, and for a head of so many rows."""
    found = dict(config) if rows is None else {**config, "draft_vocab_size": rows}
    body = "transformer_layer_config"
    if body in found:
        found[body] = {**found[body], "vocab_size": VOCABULARY}
        return found if rows is not None else {**found, "draft_vocab_size": VOCABULARY}
    return {**found, "vocab_size": VOCABULARY}


def served(path: Path, method: str) -> tuple[str, ...]:
    """The settings that select chains of a draft in float32."""
    return f"draft.path={path}", f"draft.{method}.weights=float32", f"draft.{method}.candidates=1"


def eagle(name: str, target: Target, directory: Path) -> Draft:
    """A head of a case of `test_public_heads`. The second step of training feeds back the outputs of the first."""
    case, texts = heads.CASES[name], shown_texts(target)
    config, tensors = widened(case.config, case.tensors)
    config, rows = sized(config), list(range(VOCABULARY))
    if "d2t" in tensors:
        tensors, rows = reduced(tensors, texts)
        config = sized(config, len(rows))

    def loss(found: Tensors, step: int) -> Tensor:
        text, shown = texts[step % len(texts)]
        head = replace(case, tensors=found).reference(shown)
        fed = head.features(case.read(cut(shown, len(text) - 1)))
        wanted, sums = torch.tensor([rows.index(token) for token in text[2:]]), []
        for _ in range(2):
            outputs = head.outputs(fed, text[1:])
            sums.append(cross_entropy(head.logits(outputs)[:-1], wanted))
            fed = torch.cat([fed[:1], outputs[:-1]])
        return torch.stack(sums).sum()

    last = replace(case, config=config, tensors=trained(tensors, loss, 150))

    def chain(tokens: Sequence[int], shown: Shown, count: int) -> list[int]:
        head, path = last.reference(shown), list(tokens)
        fed = head.features(last.read(shown))
        for _ in range(count):
            outputs = head.outputs(fed, path[1:])
            path.append(rows[int(head.logits(outputs[-1]).argmax())])
            fed = torch.cat([fed, outputs[-1:]])
        return path[len(tokens) :]

    return Draft(DEPTH, chain, served(last.write(directory), "eagle"))


def parallel(name: str, target: Target, directory: Path) -> Draft:
    """A P-EAGLE head of a case of `test_parallel_heads`: one causal pass over the text and mask tokens."""
    config, first, is_normed = parallel_heads.CASES[name]
    texts = shown_texts(target)
    config, tensors = widened(config, public_drafts.peagle(first))
    tensors, rows = reduced(tensors, texts)
    tensors |= {"embed_tokens.weight": texts[0][1].embedding.clone()}

    def logits(found: Tensors, tokens: Sequence[int], shown: Shown, depth: int) -> Tensor:
        head = Eagle3(found, found["embed_tokens.weight"], first, layers=2, norm_before_residual=is_normed)
        masks = found["mask_hidden"].view(3, 1, -1).expand(-1, depth - 1, -1)
        taps = [torch.cat([shown.states[tap], mask]) for tap, mask in zip((2, 4, 5), masks, strict=True)]
        following = [*tokens[1:], *[parallel_heads.MASK] * (depth - 1)]
        return head.logits(head.outputs(head.features(taps), following))[-depth:]

    def loss(found: Tensors, step: int) -> Tensor:
        text, shown, place = anchors(texts, DEPTH, step)
        wanted = torch.tensor([rows.index(token) for token in text[place + 1 : place + 1 + DEPTH]])
        return cross_entropy(logits(found, text[: place + 1], cut(shown, place), DEPTH), wanted)

    last = trained(tensors, loss, 200)

    def chain(tokens: Sequence[int], shown: Shown, count: int) -> list[int]:
        return [rows[row] for row in logits(last, tokens, shown, count).argmax(-1).tolist()] if count else []

    path = public_drafts.write(directory, sized(config, len(rows)), last)
    return Draft(DEPTH, chain, served(path, "eagle"))


def block(name: str, target: Target, directory: Path) -> Draft:
    """A block drafter of a case of `test_public_blocks`."""
    case, texts = blocks.CASES[name], shown_texts(target)
    config, tensors = widened(case.config, case.tensors)
    for part, value in tensors.items():
        if value.ndim == 2 and len(value) == public_drafts.VOCABULARY:  # of the Markov head or of DFlash2's selector
            tensors = {**tensors, part: public_drafts.Draw(len(part)).matrix(VOCABULARY, value.shape[1])}
    case = replace(case, config=sized(config), tensors=tensors)
    depth = SLOTS if case.reading.get("predicts_next") else SLOTS - 1

    def loss(found: Tensors, step: int) -> Tensor:
        text, shown, place = anchors(texts, depth, step)
        block_pass, sums = replace(case, tensors=found).reference(shown), []
        hidden = block_pass.hidden(case.read(cut(shown, place)), text[place])
        readings = [block_pass, block_pass.changed(candidates=0)] if block_pass.candidates else [block_pass]
        for one in readings:
            for slot in range(depth):
                logits, wanted = one.logits(hidden, text[place : place + slot + 1]), text[place + slot + 1]
                if bool(logits[wanted].isfinite()):  # among the candidates of DFlash2
                    sums.append(cross_entropy(logits, torch.tensor(wanted)))
        return torch.stack(sums).sum()

    last = replace(case, tensors=trained(tensors, loss, 200))

    def chain(tokens: Sequence[int], shown: Shown, count: int) -> list[int]:
        block_pass, path = last.reference(shown), [tokens[-1]]
        hidden = block_pass.hidden(last.read(shown), tokens[-1])
        for _ in range(count):
            path.append(int(block_pass.logits(hidden, path).argmax()))
        return path[1:]

    directory.mkdir()
    return Draft(depth, chain, served(last.write(directory), "block"))


def medusa(layout: str, target: Target, directory: Path) -> Draft:
    """Medusa heads of one block: x + SiLU(W x + b), then an output head of the depth, or the target's."""
    texts, depth = shown_texts(target), 3
    prefix = "medusa_head." if layout == "merged" else ""
    rows = list(range(VOCABULARY))

    def names(number: int) -> tuple[str, str]:
        if layout == "vllm":
            return f"blocks.{number}.layers.0", f"lm_heads.{number}.weight"
        return f"{prefix}{number}.0.linear", f"{prefix}{number}.1.weight"

    draw, tensors = public_drafts.Draw(7), Tensors()
    if layout == "vllm":
        _, rows = reduced({}, texts)
        rows = rows[::-1]  # its map has absolute tokens in any order
    for number in range(depth):
        inner, outer = names(number)
        tensors |= {f"{inner}.weight": draw.matrix(HIDDEN, HIDDEN), f"{inner}.bias": draw.matrix(HIDDEN)}
        if layout != "blocks":
            tensors[outer] = draw.matrix(len(rows), HIDDEN)

    def logits(found: Tensors, final: Tensor, head: Tensor, number: int) -> Tensor:
        inner, outer = names(number)
        hidden = final + silu(final @ found[f"{inner}.weight"].T + found[f"{inner}.bias"])
        return hidden @ found.get(outer, head).T

    def loss(found: Tensors, step: int) -> Tensor:
        text, shown = texts[step % len(texts)]
        sums = []
        for number in range(depth):
            wanted = torch.tensor([rows.index(token) for token in text[number + 2 :]])
            sums.append(cross_entropy(logits(found, shown.final, shown.head, number)[: len(wanted)], wanted))
        return torch.stack(sums).sum()

    last = trained(tensors, loss, 200)

    def chain(_: Sequence[int], shown: Shown, count: int) -> list[int]:
        return [rows[int(logits(last, shown.final[-1], shown.head, number).argmax())] for number in range(count)]

    config, file, stored = own_heads.AUTHORS, "medusa_lm_head.pt", last
    if layout == "vllm":
        config = own_heads.VLLM | {"medusa_fc_bias": True, "vocab_size": VOCABULARY}
        file, stored = "model.safetensors", last | {"token_map": torch.tensor(rows)}
    elif layout == "merged":
        config = json.loads((target.directory / "config.json").read_text()) | own_heads.AUTHORS
        file, stored = "model.safetensors", last | load_file(target.directory / "model.safetensors")
    path = public_drafts.write(directory, config, stored, file)
    return Draft(depth, chain, served(path, "heads"))


def hydra(target: Target, directory: Path) -> Draft:
    """Hydra heads: the last state and the embeddings of all tokens after it, then blocks and an output head."""
    texts, depth = shown_texts(target), 3

    def logits(found: Tensors, final: Tensor, path: Tensor, embedding: Tensor) -> Tensor:
        """`path` [rows, tokens] are the tokens after the states [rows, hidden size]."""
        number = path.shape[1] - 1
        rows = torch.cat([final, embedding[path].flatten(1)], dim=1)

        def affine(name: str, inputs: Tensor) -> Tensor:
            name = f"hydra_mlp.{number}.{name}"
            return inputs @ found[f"{name}.weight"].T + found[f"{name}.bias"]

        rows = affine("0.res_connection", rows) + silu(affine("0.linear", rows))
        rows = rows + silu(affine("1.linear", rows))
        return rows @ found[f"hydra_lm_head.{number}.weight"].T + found[f"hydra_lm_head.{number}.bias"]

    def loss(found: Tensors, step: int) -> Tensor:
        text, shown = texts[step % len(texts)]
        sums = []
        for number in range(depth):
            path = torch.tensor(text[1:]).unfold(0, number + 2, 1)
            given = logits(found, shown.final[: len(path)], path[:, :-1], shown.embedding)
            sums.append(cross_entropy(given, path[:, -1]))
        return torch.stack(sums).sum()

    last = trained(public_drafts.hydra(size=VOCABULARY), loss, 200)

    def chain(tokens: Sequence[int], shown: Shown, count: int) -> list[int]:
        path = [tokens[-1]]
        for _ in range(count):
            path.append(int(logits(last, shown.final[-1:], torch.tensor([path]), shown.embedding).argmax()))
        return path[1:]

    path = public_drafts.write(directory, public_drafts.HYDRA, last, "hydra_lm_head.pt")
    return Draft(depth, chain, served(path, "heads"))


def pard(target: Target, directory: Path) -> Draft:
    """A PARD model: a copy of the target, trained to predict behind mask tokens too."""
    texts = shown_texts(target)
    model: Any = AutoModelForCausalLM.from_pretrained(target.directory, attn_implementation="eager")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def logits(tokens: Sequence[int], depth: int) -> Tensor:
        found: Tensor = model(torch.tensor([[*tokens, *[MASK] * (depth - 1)]]), use_cache=False).logits
        return found[0, -depth:]

    for step in range(100):
        text, _, place = anchors(texts, DEPTH, step)
        optimizer.zero_grad()
        wanted = torch.tensor(text[place + 1 : place + 1 + DEPTH])
        cross_entropy(logits(text[: place + 1], DEPTH), wanted).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval().requires_grad_(False)
    shutil.copytree(target.directory, directory)
    model.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": MASK}))

    def chain(tokens: Sequence[int], _: Shown, count: int) -> list[int]:
        return logits(tokens, count).argmax(-1).tolist() if count else []

    settings = ["path=" + str(directory), "model.device=cpu", "model.compile=off", "model.candidates=1"]
    return Draft(DEPTH, chain, tuple(f"draft.{one}" for one in [*settings, "model.kv.pool_bytes=4194304"]))


def mtp_target(family: str, directory: Path) -> Target:
    """A target of a family with a random layer for multi-token prediction."""
    tiny_tokenizer.byte_level(directory)
    tiny.save(directory, mtp_targets.config(family, VOCABULARY))
    mtp_targets.add_layer(directory, sureness=4.0)
    return Target(directory)


def mtp(family: str, target: Target, directory: Path, *, is_converted: bool = False) -> Draft:
    """The target's own layer, whose projection is trained, by modules of `transformers`.

    With `is_converted`, the layer is stored in a directory of its own, in the format of `speculators`.
    """
    texts, model = shown_texts(target), target.model
    file, number = target.directory / "model.safetensors", model.config.num_hidden_layers
    weights = load_file(file)
    if family in OTHERS:
        oracle: Any = LayerOracle(family, model, weights)
        (prefix, parts) = names_of(family)
        stored = prefix + {part: name for name, part in parts.items()}["eh_proj"] + ".weight"
    else:
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\."]
        oracle, stored = MtpModel.from_pretrained(model).eval(), f"model.layers.{number}.eh_proj.weight"
    owner = oracle.layer if family in OTHERS else oracle
    (projection,) = (one for name, one in owner.named_parameters() if name.endswith("eh_proj.weight"))
    optimizer = torch.optim.Adam([projection], _SPEED)

    def outputs(fed: Tensor, following: Sequence[int]) -> Tensor:
        places = torch.arange(len(following)).unsqueeze(0)
        found: Tensor = oracle.forward_layer(0, fed.unsqueeze(0), places, None, input_ids=torch.tensor([following]))
        return found[0]

    for step in range(150):
        text, shown = texts[step % len(texts)]
        fed, sums = shown.final[:-1], []
        optimizer.zero_grad()
        for _ in range(2):
            found = outputs(fed, text[1:])
            sums.append(cross_entropy(oracle.shared_head(found)[:-1], torch.tensor(text[2:])))
            fed = torch.cat([fed[:1], found[:-1]])
        torch.stack(sums).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights[stored] = projection.detach().clone()
    save_file(weights, file, metadata={"format": "pt"})

    def chain(tokens: Sequence[int], shown: Shown, count: int) -> list[int]:
        path, fed = list(tokens), shown.final
        with torch.no_grad():
            for _ in range(count):
                found = outputs(fed, path[1:])[-1:]
                path.append(int(oracle.shared_head(found).argmax()))
                fed = torch.cat([fed, found])
        return path[len(tokens) :]

    settings = ("draft.mtp.weights=float32", "draft.mtp.candidates=1", "target.kv.sequences=64")
    if is_converted:
        return Draft(DEPTH, chain, (f"draft.path={converted(target.directory, directory)}", *settings))
    return Draft(DEPTH, chain, ("draft.method=mtp", *settings))


Maker = Callable[[Target, Path], Draft]
DRAFTS: dict[str, Maker] = {
    "EAGLE-1, EAGLE-2": partial(eagle, "eagle 1"),
    "EAGLE-3 (authors, SpecForge)": partial(eagle, "authors"),
    "EAGLE-3.1": partial(eagle, "3.1"),
    "EAGLE-3 (NVIDIA)": partial(eagle, "nvidia"),
    "EAGLE-3 (speculators)": partial(eagle, "speculators"),
    "P-EAGLE (SpecForge)": partial(parallel, "specforge"),
    "P-EAGLE (speculators)": partial(parallel, "speculators"),
    "DFlash (authors)": partial(block, "dflash"),
    "DFlash (speculators)": partial(block, "speculators dflash"),
    "DFlash2 (authors)": partial(block, "dflash2"),
    "DFlash2 (speculators)": partial(block, "speculators dflash2"),
    "DSpark (authors)": partial(block, "dspark"),
    "DSpark (SpecForge)": partial(block, "specforge"),
    "DSpark (speculators)": partial(block, "speculators dspark"),
    "Medusa, the authors' two layouts": partial(medusa, "blocks"),
    "Medusa, merged models": partial(medusa, "merged"),
    "Medusa, vLLM's layout": partial(medusa, "vllm"),
    "Hydra": hydra,
    "PARD": pard,
}
"""By format, what makes a draft for `damped_target`."""
LAYERS_OF_TARGETS = {
    "MTP: DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, MiMo-7B": (*mtp_targets.FAMILIES, *OTHERS),
    "MTP (speculators)": ("qwen3_next",),
}
"""By format, the families whose own layer drafts."""
