"""How the tokens of an answer were drafted, in JSON (`return_drafts`)."""

from __future__ import annotations

from cluster.ingress.openai.formats import token_text
from cluster.ingress.openai.parsing.parts import Json
from cluster.wire.origin_counts import ORIGIN_NAMES
from pilotfish.v1 import generation_pb2


def report_drafts(delta: generation_pb2.GenerationDelta) -> Json:
    """Return the verified trees of a delta, and the text that became complete with each of its tokens."""
    return {"token_texts": list(delta.token_texts), "drafts": [_verified(draft) for draft in delta.drafts]}


def _verified(draft: generation_pb2.VerifiedDraft) -> Json:
    return {
        "token_ids": list(draft.token_ids),
        "texts": [token_text(text) for text in draft.token_bytes],
        "parents": list(draft.parents),
        "accepted": list(draft.accepted),
        "committed_tokens": draft.committed_tokens,
        "origins": [ORIGIN_NAMES.get(origin) for origin in draft.origins],
    }
