"""A name of the settings of a target that its answers depend on: equal names, equal answers."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from cluster.core.config.target_section import TargetSection

_FIELDS = ("path", "revision", "load_format", "dtype", "quantization", "max_context_len", "acceptance")


def answer_version(target: TargetSection) -> str:
    """Return a name of the settings that answers depend on, 12 hexadecimal digits.

    Targets of one version continue each other's answers: with the rule `coupled`, exactly, up to rounding. Settings
    that change speed and memory alone are not in it, and drafts are not.
    """
    included: dict[str, Any] = dict.fromkeys(_FIELDS, True)
    included |= {target.acceptance: True, "kv": {"window", "sinks"}}
    values = json.dumps(target.model_dump(mode="json", include=included), sort_keys=True)
    return blake2b(values.encode(), digest_size=6).hexdigest()
