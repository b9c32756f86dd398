"""The metrics of several coordinators as one text in Prometheus' format."""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "replica"
"""The label that tells the coordinators apart."""


def merged(expositions: Mapping[str, bytes]) -> bytes:
    """Return the samples of all coordinators, with the id of each as a label, grouped by family as the format demands.

    `expositions` maps ids to texts.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, exposition in expositions.items():
        family = ""
        for line in exposition.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = headers.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, name))
    lines = [line for family in headers | samples for line in (*headers.get(family, ()), *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, name: str) -> str:
    """Add the label to a sample: `name{labels} value` or `name value`."""
    value = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    brace, space = sample.find("{"), sample.find(" ")
    if brace < 0 or space < brace:
        return f'{sample[:space]}{{{LABEL}="{value}"}}{sample[space:]}'
    return f'{sample[: brace + 1]}{LABEL}="{value}",{sample[brace + 1 :]}'
