"""How many heads of a model its ranks hold, and whether they can divide them.

The module imports no other one of Pilotfish, so that commands can check it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any


def stated_counts(values: Mapping[str, Any], ranks: int) -> tuple[int, int]:
    """Query heads and KV heads by a model's `config.json`; one for each rank if it does not state them."""
    heads = int(values.get("num_attention_heads") or values.get("n_head") or ranks)
    return heads, kv_heads_of(values.get, heads)


def kv_heads_of(stated: Callable[[str], Any], heads: int) -> int:
    """KV heads of a model with so many query heads.

    `stated` returns what its configuration says of a name, and `None` of what it does not say.
    """
    if stated("model_type") not in ("falcon", "gpt_bigcode"):
        return int(stated("num_key_value_heads") or heads)
    if stated("new_decoder_architecture"):
        return int(stated("num_kv_heads") or heads)
    return 1 if stated("multi_query") in (None, True) else heads


def ranks_that_divide(heads: int, kv_heads: int) -> list[int]:
    """The numbers of ranks that can divide attention, ascending.

    Each rank has as many KV heads as any other, and the query heads that read them. Where there are more ranks than KV
    heads, as many ranks share each of them, and divide the query heads that read it: a rank may have one more than
    another.
    """
    return [
        ranks
        for ranks in range(1, heads + 1)
        if (heads % ranks == 0 if kv_heads % ranks == 0 else ranks % kv_heads == 0)
    ]


def most_held(heads: int, kv_heads: int, ranks: int) -> dict[str, Fraction]:
    """The part of each matrix of attention that the rank with most heads holds, by the name of its layer.

    `ranks` is one of `ranks_that_divide`.
    """
    queries, keys = Fraction(-(-heads // ranks), heads), Fraction(1, min(ranks, kv_heads))
    return {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}


def describe_shared_heads(heads: int, kv_heads: int, ranks: int) -> str | None:
    """In words, how ranks share KV heads; `None` if they share none, or cannot divide the heads."""
    if ranks <= kv_heads or ranks not in ranks_that_divide(heads, kv_heads):
        return None
    least, most = heads // ranks, -(-heads // ranks)
    own = f"{most}" if least == most else f"{least} or {most}"
    begin = f"{ranks} ranks hold {kv_heads} KV heads, each on {ranks // kv_heads} of them: a rank has {own}"
    counted = "" if least == most else f"; memory is counted for {most}"
    return f"{begin} of {heads} query heads{counted}"
