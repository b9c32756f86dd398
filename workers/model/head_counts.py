"""Checks whether a number of ranks can divide the heads of a model.

The module imports nothing, so that commands can check it at once.
"""

from __future__ import annotations


def ranks_that_divide(heads: int, kv_heads: int) -> list[int]:
    """The numbers of ranks that can divide attention, ascending.

    Each rank has as many query heads as any other. It has as many KV heads, too, or shares one of them with others,
    where there are more ranks than KV heads.
    """
    return [
        ranks
        for ranks in range(1, heads + 1)
        if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    ]
