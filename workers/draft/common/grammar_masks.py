"""What a sequence's grammar allows at the first places of a draft, as masks of a module's candidates."""

from __future__ import annotations

import torch

from cluster.core.drafting import NextTokens
from workers.sampling.allowed_tokens import AllowedTokens


def allowed_at(known: NextTokens, depth: int) -> AllowedTokens | None:
    """What is allowed at a depth of a draft, from 0; `None` where nothing is known."""
    if depth > len(known.forced) or not (allowed := known.mask()):
        return None
    if depth == len(known.forced):
        return AllowedTokens(torch.frombuffer(bytearray(allowed), dtype=torch.bool))
    mask = torch.zeros(len(allowed), dtype=torch.bool)
    mask[known.forced[depth]] = True
    return AllowedTokens(mask)
