"""The lists of a target's layers in drafts' configurations, and the hidden states that each list names.

Hidden state 0 is the embedding, and hidden state i + 1 the output of layer i, which is the input of layer i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.model.formats.checkpoint import Checkpoint

INPUTS = "eagle_aux_hidden_state_layer_ids"
"""A list of hidden states by their own numbers: layers whose inputs are read. In a nested section, SGLang reads
outputs."""
_OUTPUTS = ("target_layer_ids", "dspark_target_layer_ids")
"""Lists of layers whose outputs are read, and -1 for the embedding."""
UNSETTLED = "layer_ids"
"""A list that vLLM alone reads, as layers whose inputs are read."""
LIST_KEYS = frozenset((INPUTS, *_OUTPUTS))
"""The lists that `named_taps` reads."""


def named_taps(config: Checkpoint) -> tuple[int, ...]:
    """The hidden states that the lists of a configuration name; empty without a list.

    Raises `ModelLoadError` for lists of different hidden states, and for the output of the target's last layer.
    """
    found: dict[str, tuple[int, ...]] = {}
    inputs = listed(config, INPUTS)
    if inputs is not None:
        found[INPUTS] = inputs
    for key in _OUTPUTS:
        outputs = config.numbers(key, least=-1)
        if outputs is not None:
            _check_last(config, key, outputs)
            found[key] = tuple(one + 1 for one in outputs)
    first = next(iter(found), "")
    for key, taps in found.items():
        if taps != found[first]:
            config.refuse(key, f"it must name the hidden states of {first}: {list(found[first])}")
    return found.get(first, ())


def listed(config: Checkpoint, key: str) -> tuple[int, ...] | None:
    """The numbers of a list. An empty one, as NVIDIA writes it, says nothing. Raises `ModelLoadError`."""
    return None if config.config.get(key) == [] else config.numbers(key)


def refuse_unsettled(config: Checkpoint, key: str, method: str) -> None:
    """Raise `ModelLoadError` for a list without one agreed meaning, with the setting of `method` for each reading."""
    inputs = listed(config, key)
    if inputs is None:
        return
    why, other = ("vLLM alone reads it", "") if key == UNSETTLED else ("engines disagree on it", " (SGLang)")
    config.refuse(
        key,
        f"{why}: set draft.{method}.taps to {list(inputs)} if it numbers the layers whose inputs are read (vLLM), or "
        f"to {[one + 1 for one in inputs]} if their outputs are{other}",
    )


def _check_last(config: Checkpoint, key: str, outputs: Sequence[int]) -> None:
    if config.config.get("num_target_layers") is None:
        return
    last = config.count("num_target_layers") - 1
    if outputs[-1] >= last:
        config.refuse(
            key,
            f"its layers must be below the target's last one, {last}: trainers disagree on whether that one's output "
            f"is read before or after the final norm",
        )
