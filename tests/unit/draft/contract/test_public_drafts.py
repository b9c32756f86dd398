"""Public draft checkpoints in a cluster: `draft.path` alone selects them, they draft, and they change no token."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.implied_settings import with_implied_settings
from deploy.local.local_cluster import LocalCluster
from deploy.settings import load_settings
from tests.support.deadline import deadline
from tests.support.models import public_drafts, tiny, tiny_tokenizer
from tests.support.models.draft_references import norm
from tests.support.models.model_cases import gemma3
from tests.support.models.public_drafts import (
    DFLASH,
    DFLASH2,
    DRAFTED,
    DSPARK,
    HIDDEN,
    HYDRA,
    LLAMA,
    SLOTS,
    Tensors,
    speculators_config,
)
from tests.unit.draft.contract.methods import VOCABULARY, Directories, make_directories
from tests.unit.draft.contract.test_streams import REQUESTS, TIMEOUT_SECONDS, Answer, answer

LAYERS = 8


PEAGLE = speculators_config(
    speculators_model_type="peagle",
    mask_token_id=VOCABULARY - 1,
    transformer_layer_config=LLAMA | {"vocab_size": VOCABULARY},
)


def _parallel(is_drafted: Tensor) -> Tensors:
    """A P-EAGLE head that reads the embedding of a target with more tokens than those of the other drafts."""
    tensors = public_drafts.peagle(layers=1) | {"t2d": is_drafted}
    return {name: value for name, value in tensors.items() if name != "embed_tokens.weight"}


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return make_directories(tmp_path_factory.mktemp("deeper"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each shape."""
    root = tmp_path_factory.mktemp("drafts")
    is_drafted = torch.zeros(VOCABULARY, dtype=torch.bool)
    is_drafted[DRAFTED] = True
    eagle3 = public_drafts.eagle3() | {"t2d": is_drafted}
    config: dict[str, Any] = LLAMA | {"vocab_size": VOCABULARY}
    medusa = public_drafts.medusa(has_heads=False)
    return {
        "eagle3": public_drafts.write(root / "eagle3", config | {"draft_vocab_size": len(DRAFTED)}, eagle3),
        "eagle": public_drafts.write(root / "eagle", config, public_drafts.eagle1()),
        "peagle": public_drafts.write(root / "peagle", PEAGLE, _parallel(is_drafted)),
        "medusa": public_drafts.write(root / "medusa", {"version": "2"}, medusa),
        "hydra": public_drafts.write(root / "hydra", HYDRA, public_drafts.hydra(size=VOCABULARY), "hydra_lm_head.pt"),
        "dflash": public_drafts.write(root / "dflash", DFLASH | {"vocab_size": VOCABULARY}, public_drafts.block()),
        "dflash2": public_drafts.write(
            root / "dflash2", DFLASH2 | {"vocab_size": VOCABULARY}, public_drafts.second(size=VOCABULARY)
        ),
        "dspark": public_drafts.write(
            root / "dspark", DSPARK | {"vocab_size": VOCABULARY}, public_drafts.spark(size=VOCABULARY)
        ),
    }


def configured(target: Path, *settings: str) -> Configuration:
    """A configuration of a user, without a preset's methods."""
    common = [
        *(f"target.path={target}", "target.served_name=tiny", "target.compile=off", "target.kv.block_size=4"),
        *("target.kv.pool_bytes=8388608", "scheduler.max_sequences=8", "scheduler.max_step_tokens=128"),
        *("server.grpc_port=0", "server.http_port=0", "draft.controller=off", "draft.timeout_seconds=10"),
    ]
    return load_settings("cpu", [*common, *settings], {}).configuration


async def answers(configuration: Configuration) -> Sequence[Answer]:
    async with (
        deadline(TIMEOUT_SECONDS),
        LocalCluster(configuration) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        return await asyncio.gather(*(answer(client, message) for message in REQUESTS))


_ALONE: dict[Path, Sequence[Answer]] = {}


async def answers_alone(target: Path) -> Sequence[Answer]:
    """The answers of a target without drafts, which are computed once."""
    if target not in _ALONE:
        _ALONE[target] = await answers(configured(target, "draft.method=none"))
    return _ALONE[target]


def check_right_to_the_last_depth(
    drafted: Sequence[Answer], plain: Sequence[Answer], *, per_step: int, least_distinct: int
) -> None:
    """Check that texts are equal, and that steps of a greedy and a sampled answer give `per_step` tokens each.

    The sampled answer must have `least_distinct` tokens that differ: a text that repeats itself proves nothing.
    """
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    greedy, sampled = drafted[4], drafted[5]  # they have no penalties
    for one in (greedy, sampled):
        steps = len(one.tokens) - one.accepted
        assert steps <= 2 + len(one.tokens) // per_step
    assert len(set(sampled.tokens)) >= least_distinct


@pytest.mark.parametrize(
    ("draft", "place"),
    [
        ("eagle3", "target"),
        pytest.param("eagle3", "drafter", marks=pytest.mark.slow),
        pytest.param("peagle", "target", marks=pytest.mark.slow),
        ("peagle", "drafter"),
        ("eagle", "target"),
        ("medusa", "target"),
        ("hydra", "target"),
        ("dflash", "target"),
        ("dflash2", "drafter"),
        pytest.param("dflash2", "target", marks=pytest.mark.slow),
        pytest.param("dspark", "target", marks=pytest.mark.slow),
        ("dspark", "drafter"),
    ],
)
async def test_a_public_draft_changes_no_token(
    draft: str, place: str, deeper: Directories, drafts: dict[str, Path]
) -> None:
    plain = await answers_alone(deeper.target)
    configuration = configured(deeper.target, f"draft.path={drafts[draft]}", f"draft.placement={place}")

    drafted = await answers(configuration)

    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.drafted > 0 for one in drafted)
    assert with_implied_settings(configuration).target.evidence.fusion == (
        str(drafts[draft]) if place == "drafter" else None
    )


@pytest.mark.parametrize("place", ["target", "drafter"])
async def test_a_head_with_ends_of_its_own_changes_no_token_of_gemma(place: str, tmp_path: Path) -> None:
    target = tiny_tokenizer.byte_level(tmp_path / "target")
    tiny.save(target, gemma3(vocab_size=VOCABULARY))
    own = {"embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))}
    tensors = {name: value for name, value in public_drafts.eagle3().items() if name != "t2d"} | own
    config = LLAMA | {"vocab_size": VOCABULARY, "draft_vocab_size": len(DRAFTED)}
    draft = public_drafts.write(tmp_path / "draft", config, tensors)
    plain = await answers(configured(target, "draft.method=none"))

    drafted = await answers(configured(target, f"draft.path={draft}", f"draft.placement={place}"))

    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert all(one.drafted > 0 for one in drafted)


@pytest.fixture(scope="module")
def successors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose layers add nothing, so that the token before decides alone, and a DSpark drafter that knows it.

    The drafter's Markov head is the target's head on the normalised embedding; its own vectors are zero.
    """
    root = tmp_path_factory.mktemp("successors")
    target = make_directories(root, num_hidden_layers=LAYERS).target
    weights = load_file(target / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    weights["lm_head.weight"] *= 20.0  # few tokens are probable, as after training
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tensors = public_drafts.spark(size=VOCABULARY, confidence="none")
    tensors["norm.weight"] = torch.zeros(HIDDEN)
    tensors["markov_head.markov_w1.weight"] = norm(
        weights["model.embed_tokens.weight"].float(), weights["model.norm.weight"].float(), 1e-6
    )
    tensors["markov_head.markov_w2.weight"] = weights["lm_head.weight"].float()
    config = DSPARK | {"vocab_size": VOCABULARY, "markov_rank": HIDDEN, "enable_confidence_head": False}
    return target, public_drafts.write(root / "dspark", config, tensors)


@pytest.mark.parametrize("place", ["target", pytest.param("drafter", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("candidates", "nodes"), [(1, SLOTS), (3, 12)], ids=["chain", "tree"])
async def test_a_block_drafter_that_knows_the_target_is_right_in_every_slot(
    candidates: int, nodes: int, place: str, successors: tuple[Path, Path]
) -> None:
    """Greedy and sampled: each slot is conditioned on the token before it, with the noise of its own position."""
    target, draft = successors
    drawn = [f"draft.path={draft}", "draft.block.weights=float32", f"draft.block.candidates={candidates}"]
    drawn.append(f"draft.placement={place}")
    plain = await answers_alone(target)

    drafted = await answers(configured(target, *drawn, f"draft.max_nodes={nodes}", f"draft.max_depth={SLOTS}"))

    check_right_to_the_last_depth(drafted, plain, per_step=SLOTS + 1, least_distinct=SLOTS + 1)


@pytest.fixture(scope="module")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target with one distribution for all positions, and a P-EAGLE head that computes it in each of five slots.

    All of the target's embeddings are one vector and its layers add nothing. The head's feature is this vector, beside
    mask tokens too, and its layer adds nothing either.
    """
    root = tmp_path_factory.mktemp("memoryless")
    target = make_directories(root, num_hidden_layers=LAYERS).target
    weights = load_file(target / "model.safetensors")
    vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(torch.float32)
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    weights["model.embed_tokens.weight"].copy_(vector.expand_as(weights["model.embed_tokens.weight"]))
    weights["lm_head.weight"] *= 20.0  # few tokens are probable, as after training
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tensors = {name: value for name, value in public_drafts.peagle(layers=1).items() if name not in ("d2t", "t2d")}
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value.zero_()
    tensors |= {
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        "fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, 2 * HIDDEN)], dim=1),
        "mask_hidden": vector.repeat(3).view(1, 1, -1),
        "norm.weight": weights["model.norm.weight"].float(),
        "lm_head.weight": weights["lm_head.weight"].float(),
    }
    config = PEAGLE | {"draft_vocab_size": VOCABULARY, "norm_before_residual": False}
    return target, public_drafts.write(root / "peagle", config, tensors)


@pytest.mark.parametrize(("candidates", "nodes"), [(1, 5), (3, 12)], ids=["chain", "tree"])
async def test_a_parallel_model_that_knows_the_target_is_right_in_every_slot(
    candidates: int, nodes: int, memoryless: tuple[Path, Path], tmp_path: Path
) -> None:
    """A PARD model is a copy of the target: a mask token's embedding is that of all tokens."""
    target, _ = memoryless
    draft = tmp_path / "pard"
    shutil.copytree(target, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"pard_token": VOCABULARY - 1}))
    drawn = [f"draft.path={draft}", "draft.model.device=cpu", "draft.model.compile=off", "draft.placement=drafter"]
    drawn += [f"draft.model.candidates={candidates}", "draft.model.kv.pool_bytes=4194304"]
    plain = await answers_alone(target)

    drafted = await answers(configured(target, *drawn, f"draft.max_nodes={nodes}", "draft.max_depth=5"))

    check_right_to_the_last_depth(drafted, plain, per_step=6, least_distinct=3)


@pytest.mark.parametrize(
    ("candidates", "nodes", "place"),
    [(1, 5, "target"), (3, 12, "target"), (3, 12, "drafter")],
    ids=["chain", "tree", "tree elsewhere"],
)
async def test_a_parallel_head_that_knows_the_target_is_right_in_every_slot(
    candidates: int, nodes: int, place: str, memoryless: tuple[Path, Path]
) -> None:
    """Greedy and sampled: the last slot of the one pass is as right as the first, with the noise of its position."""
    target, draft = memoryless
    drawn = [f"draft.path={draft}", "draft.eagle.weights=float32", f"draft.eagle.candidates={candidates}"]
    drawn.append(f"draft.placement={place}")
    plain = await answers_alone(target)

    drafted = await answers(configured(target, *drawn, f"draft.max_nodes={nodes}", "draft.max_depth=5"))

    check_right_to_the_last_depth(drafted, plain, per_step=6, least_distinct=3)
