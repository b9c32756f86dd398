"""The page that lists every parameter of OpenAI's API and of vLLM, and what this server does with it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cluster.generation.answer_count import INCOMPATIBLE_WITH_BEAMS
from cluster.ingress.openai.fields.unsupported import Unsupported
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest, Parameters

_NO_EFFECT = "No effect: "
OWN = frozenset({"early_stopping", "max_draft_tokens", "return_drafts", "speculation"})
"""Parameters that neither OpenAI nor vLLM has."""
_GRAMMARS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_OWN_NAMES = {"grammar": _GRAMMARS, "thinking": ("thinking_token_budget",), "logprobs": ("logprobs", "top_logprobs")}
"""The parameters of a field of the generation service, where their names differ from its own."""
_NOT_WITH_BEAMS = "Refused with `use_beam_search`."
_WITH_BEAMS = {
    **{name: _NOT_WITH_BEAMS for field in INCOMPATIBLE_WITH_BEAMS for name in _OWN_NAMES.get(field, (field,))},
    **dict.fromkeys(("stop", "stream"), _NOT_WITH_BEAMS),
    "temperature": "With `use_beam_search`, 0 or 1.",
    "tool_choice": "With `use_beam_search`, `auto` or `none`.",
}
"""What a beam search takes of a parameter. It follows the model's own probabilities; all its answers end at once."""
_HEAD = """# Parameters

What the HTTP API does with every parameter of OpenAI's API and of vLLM. This page is generated from the code by
`make pages`.

- **served**: the parameter has its usual meaning.
- **no effect**: every value is accepted; the answer does not depend on it.
- **neutral only**: values without effect are accepted, any other is refused with the reason.
- **refused**: any value but `null` is refused with the reason.

A field that neither OpenAI nor vLLM has is ignored. The response names it in the header `x-ignored-fields`, and in
`x-misspelt-fields` with the parameter that was probably meant (`temprature=temperature`).
`limits.unknown_fields: refuse` refuses it instead. Refusals have status 400, those of parameters that are not served
the code `unsupported_parameter`.
"""


def page() -> str:
    """Return the page, in Markdown."""
    sections = (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest))
    return "\n".join([_HEAD, *(line for path, model in sections for line in _section(path, model))]).rstrip() + "\n"


def _section(path: str, model: type[Parameters]) -> Iterator[str]:
    rows = {
        name: _served(" ".join([field.description or "", _WITH_BEAMS.get(name, "")]))
        for name, field in model.model_fields.items()
    }
    rows |= {name: _unsupported(parameter) for name, parameter in model.unsupported.items()}
    yield from (f"## `POST {path}`", "", "| parameter | | |", "|---|---|---|")
    for name, (status, note) in sorted(rows.items()):
        yield f"| `{name}`{' (Pilotfish)' if name in OWN else ''} | {status} | {note} |"
    yield ""


def _served(description: str) -> tuple[str, str]:
    note = " ".join(description.split())
    if note.startswith(_NO_EFFECT):
        return "no effect", note.removeprefix(_NO_EFFECT)
    return "served", note


def _unsupported(parameter: Unsupported) -> tuple[str, str]:
    if not parameter.neutral:
        return "refused", parameter.reason
    values = ", ".join(f"`{json.dumps(value)}`" for value in parameter.neutral)
    return "neutral only", f"{values}: {parameter.reason}"
