"""`rejection` and `block` sample from the target's distribution, whatever is drafted; wrong variants are detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.core.drafting import DraftDistribution
from cluster.core.tree import TokenTree
from tests.support.models.drawn_drafts import NO_DRAFT, TABLES, Draft, Drafter, Drawing, WithSharedNoise, write
from tests.support.models.enumerable import BAR, SETTINGS, VOCABULARY, p_value
from workers.sampling import residual as residual_module
from workers.sampling.acceptance import Accepted, AcceptanceRule, RootPosition
from workers.sampling.noise import gumbel
from workers.sampling.rules import block as block_module
from workers.sampling.rules import rejection as rejection_module
from workers.sampling.rules.block import Block
from workers.sampling.rules.rejection import Rejection

SEEDS = 4000
CHAIN, TREE = (1, 1, 1), (3, 2, 1)

CASES: list[tuple[str, AcceptanceRule, Drafter]] = [
    ("plain", Rejection(), NO_DRAFT),
    ("temperature", Rejection(), Drawing(TABLES["similar"], CHAIN)),
    ("top-k", Rejection(), Drawing(TABLES["unrelated"], TREE)),
    ("top-p", Rejection(), Drawing(TABLES["opposite"], TREE)),
    ("penalties", Rejection(), Drawing(TABLES["equal"], TREE)),
    ("min-p", Rejection(), WithSharedNoise(TABLES["similar"])),
    ("plain", Block(), Drawing(TABLES["similar"], CHAIN)),
    ("temperature", Block(), Drawing(TABLES["equal"], CHAIN)),
    ("top-k", Block(), Drawing(TABLES["unrelated"], CHAIN)),
    ("penalties", Block(), Drawing(TABLES["opposite"], CHAIN)),
    ("top-p", Block(), Drawing(TABLES["similar"], TREE)),
    ("min-p", Block(), WithSharedNoise(TABLES["similar"])),
]
