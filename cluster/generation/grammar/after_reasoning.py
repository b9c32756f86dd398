"""The grammar of an answer behind what the model thinks before it."""

from __future__ import annotations

from cluster.core.answer_format import AnswerFormat
from cluster.core.grammar import Grammar, GrammarKind, lark_source
from cluster.generation.grammar.tool_calls import Specials, text_before, written

_LINE_ENDS = r"/\n{0,2}/"


def after_reasoning(grammar: Grammar, form: AnswerFormat, specials: Specials, *, is_call: bool) -> Grammar:
    """Return the grammar of an answer that may think before it matches `grammar`, in the form of its model.

    Where the prompt ends within reasoning, the answer begins with reasoning; else the model decides whether it thinks.
    `is_call`: the grammar is that of calls of tools, in front of which the model does not open its content. Returns the
    grammar itself where the model writes neither reasoning nor an opening of its content.
    """
    reasoning = form.reasoning
    if reasoning is None or not (reasoning.reasons or reasoning.answer_opening):
        return grammar
    attribute, body = text_before(reasoning.closing, specials)
    opening = "" if form.begins_in_reasoning else f"{_LINE_ENDS} {written(reasoning.written_opening, specials)}"
    thought = f"{opening} thought {_LINE_ENDS} {written(reasoning.after_closing, specials)}"
    before = f"({thought})" if form.begins_in_reasoning else f"({thought})?"
    content = "" if is_call else written(reasoning.answer_opening, specials)
    lines = (
        f"start: {before} {content} answer",
        f"thought{attribute}: {body}",
        f"answer: %lark {{\n{lark_source(grammar)}\n}}",
    )
    return Grammar(GrammarKind.GRAMMAR, "\n".join(lines))
