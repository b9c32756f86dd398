"""Routing: which coordinator a new request goes to. Pure functions of the state of one ingress.

A coordinator that has seen the beginning of a prompt probably still stores its keys and values, so the request needs
less computation there. Against that stands the load. Both are counted in blocks of prompt to compute, and the request
goes where the sum is least. A request stays with its coordinator until it ends or the coordinator is lost.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b

from cluster.core.errors import ModelChanged
from cluster.core.ids import scoped_salt
from cluster.core.membership import Member
from pilotfish.v1 import generation_pb2

BLOCK_BYTES = 128
"""Bytes of a request's input in one block: about 32 tokens."""
MAX_BLOCKS = 512
"""Most blocks of one prompt that are compared; what follows does not matter for routing."""
MEMORY_BLOCKS = 1 << 16
"""Most blocks in the memory of one ingress."""
RUNNING_BLOCKS = 4
"""Load of a request that decodes, in blocks of prompt that could be computed in the time that it costs others."""
STALLED_SECONDS = 3.0
"""A coordinator that ends no step for longer has probably lost its target, in seconds. Ordinary steps are shorter."""
WAITING_BLOCKS = 16
"""Load of a sequence in a coordinator's queue, whose prompt is another ingress's, in blocks."""


def is_stalled(coordinator: Member) -> bool:
    """Whether the requests of a coordinator should go elsewhere, as if it were lost."""
    return coordinator.load.stalled_seconds > STALLED_SECONDS


def prefix_hashes(request: generation_pb2.GenerateRequest, *, shares_between_keys: bool = False) -> tuple[bytes, ...]:
    """Return one hash per block of the input: equal hashes mean equal inputs up to the end of the block.

    The salt and the client are part of every hash, because requests that differ in them share nothing. The last block
    may be short. `shares_between_keys`: see `ServerSection.sharing_between_keys`.
    """
    kind, content = _content(request)
    salt = scoped_salt(request.client, request.cache_salt, shares_between_keys=shares_between_keys)
    digest = blake2b(salt.encode(), digest_size=8, key=kind).digest()
    hashes = []
    for start in range(0, min(len(content), MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        digest = blake2b(content[start : start + BLOCK_BYTES], digest_size=8, key=digest).digest()
        hashes.append(digest)
    return tuple(hashes)


class PrefixMemory:
    """Which coordinators were sent which prefixes. Bounded: the blocks that were used least recently are dropped."""

    def __init__(self, max_blocks: int = MEMORY_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._seen: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def matches(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks each coordinator was sent before; coordinators without any are left out."""
        counts: dict[str, int] = {}
        for count, digest in enumerate(hashes):
            going_on = [name for name in self._seen.get(digest, ()) if counts.get(name, 0) == count]
            if not going_on:
                break
            counts.update(dict.fromkeys(going_on, count + 1))
        return counts

    def missing(self, hashes: Sequence[bytes], coordinator: str) -> int:
        """Return how many blocks of a prompt a coordinator was not sent before."""
        return len(hashes) - self.matches(hashes).get(coordinator, 0)

    def record(self, hashes: Sequence[bytes], coordinator: str, present: Collection[str]) -> None:
        """Record that a coordinator is sent these blocks. Removes coordinators that are not `present`."""
        for digest in reversed(hashes):  # the first block of a prompt is the one to drop last
            others = (name for name in self._seen.get(digest, ()) if name != coordinator and name in present)
            self._seen[digest] = (coordinator, *others)
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max_blocks:
            self._seen.popitem(last=False)


def compatible(coordinators: Sequence[Member], earlier: str) -> Sequence[Member]:
    """Return the coordinators whose answers are those of the coordinator with the id `earlier`."""
    version = _version(earlier)
    return [view for view in coordinators if not version or _version(view.id) in ("", version)]


def continuing(coordinators: Sequence[Member], earlier: str) -> Sequence[Member]:
    """Return the coordinators that can continue a stream of the coordinator with the id `earlier`.

    That are all if it is empty, or has no version. A coordinator without a version continues every stream. Raises
    `ModelChanged` if there are coordinators of other versions only.
    """
    found = compatible(coordinators, earlier)
    if coordinators and not found:
        raise ModelChanged("the answer cannot be continued: another model or other settings are served by now")
    return found


def choose(
    hashes: Sequence[bytes],
    coordinators: Sequence[Member],
    in_flight: Mapping[str, int],
    memory: PrefixMemory,
    excluded: Collection[str] = (),
    preferred: str = "",
) -> Member | None:
    """Return the coordinator with the least work to do before the first token; `None` if all are excluded or drain.

    A resumed request goes to the `preferred` coordinator, if it is present: it may still hold the request's tokens.
    A stalled coordinator is chosen only if all are stalled. `in_flight` is the load of this ingress's own requests by
    coordinator, in blocks. Among equals, every ingress chooses the same coordinator for the same first block.
    """
    matches = memory.matches(hashes)
    first = hashes[0] if hashes else b""

    def cost(view: Member) -> tuple[bool, bool, float, bytes]:
        # The report is some time old and includes this ingress's requests, which are counted at once.
        reported = RUNNING_BLOCKS * view.load.running + WAITING_BLOCKS * view.load.waiting
        load = max(in_flight.get(view.id, 0), reported) + view.load.kv_usage
        missing = len(hashes) - matches.get(view.id, 0)
        tie = blake2b(view.id.encode(), digest_size=8, key=first).digest()
        return is_stalled(view), view.id != preferred, missing + load, tie

    accepting = (view for view in coordinators if view.id not in excluded and not view.is_draining)
    return min(accepting, key=cost, default=None)


def _version(coordinator: str) -> str:
    """Return the version of its answers in the id of a coordinator, before the last colon; empty if there is none.

    A stream goes on at coordinators of its version only. The rest of an id is distinct for each start of a coordinator,
    because a new one has stored nothing.
    """
    return coordinator.rpartition(":")[0]


def _content(request: generation_pb2.GenerateRequest) -> tuple[bytes, bytes]:
    """Return the kind of the input, and its beginning as bytes."""
    longest = MAX_BLOCKS * BLOCK_BYTES
    match request.WhichOneof("input"):
        case "token_ids":
            return b"tokens", array("I", request.token_ids.ids[: longest // 4]).tobytes()
        case "chat":
            content = bytearray(_offered(request.chat))
            for part in _chat_parts(request.chat):
                content += part[:longest].encode() + b"\0"
                if len(content) > longest:
                    break
            return b"chat", bytes(content)
        case _:
            return b"text", request.text[:longest].encode()


def _offered(chat: generation_pb2.ChatInput) -> bytes:
    """Return a hash of the tools, which templates show in front of most messages.

    They are longer than the blocks of one prompt can be, so the messages would not count. The template's variables do
    not count: a client may change them from one turn to the next, which leaves most of many prompts as it was.
    """
    digest = blake2b(digest_size=16)
    for text in chat.tools:
        digest.update(text.encode() + b"\0")
    return digest.digest()


def _chat_parts(chat: generation_pb2.ChatInput) -> Iterator[str]:
    for message in chat.messages:
        yield message.role
        yield message.name
        yield message.content or "\n".join(message.content_parts)
        yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield call.arguments
