"""Tokenization and detokenization with the files of a model directory."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import tokenizers

from cluster.core.answer_format import CallFormat, ReasoningFormat
from cluster.core.answer_format_rows import call_format, call_format_of, reasoning_format
from cluster.core.errors import ConfigurationError, InvalidRequest, Overloaded
from cluster.core.token_bytes import METASPACE, PieceToBytes, reader
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.chat_template import PLAIN, ChatTemplate, TemplateOptions
from cluster.generation.text.marian_vocabulary import MarianVocabulary, is_marian
from cluster.generation.text.response_template import NONE_OWN, Inexpressible, OwnFormats, own_formats
from cluster.generation.text.vocabulary import JsonVocabulary, Vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parsers:
    """The settings `tool_parser` and `reasoning_parser`: names of formats, `auto` or `none`."""

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def calls(self, template: ChatTemplate | None, own: OwnFormats = NONE_OWN) -> CallFormat:
        """Return how calls of tools are written: as the setting says, else as the model describes or shows it.

        A description of its own, `own`, counts before what the chat template shows.
        """
        seen = call_format_of("") if template is None else template.call_format
        if self.tool_parser == "auto" and own.calls is not None:
            return own.calls
        if self.tool_parser in ("auto", seen.name, *seen.names):
            return seen
        return call_format(self.tool_parser) or seen

    def reasoning(self, template: ChatTemplate | None, own: OwnFormats = NONE_OWN) -> ReasoningFormat | None:
        """Return how reasoning is written: as the setting says, else as the model describes or shows it, see `calls`.

        A description that knows no reasoning says nothing about it.
        """
        if self.reasoning_parser != "auto":
            return reasoning_format(self.reasoning_parser)
        seen = None if template is None else template.reasoning_format
        is_seen = seen is not None and seen.reasons
        return own.reasoning if own.reasoning is not None and (own.reasoning.reasons or not is_seen) else seen


BY_TEMPLATE = Parsers()
"""The formats that the chat template shows."""


class Tokenizer:
    """A vocabulary, its chat template and its end-of-sequence tokens. Thread-safe."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        piece_to_bytes: PieceToBytes,
        *,
        strips_first_space: bool = False,
        template: ChatTemplate | None = None,
        tool_template: ChatTemplate | None = None,
        eos_token_ids: tuple[int, ...] = (),
        file: Path | None = None,
        parsers: Parsers = BY_TEMPLATE,
        own_formats: OwnFormats = NONE_OWN,
    ) -> None:
        self.file = file
        """The `tokenizer.json` that was read. Grammars need it."""
        self._vocabulary = vocabulary
        self._piece_to_bytes = piece_to_bytes
        self._specials_in: dict[tuple[str, ...], Mapping[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        """The bytes of the tokens that were asked for; most answers use the same few thousand."""
        self._strips_first_space = strips_first_space
        self._template = template
        self._tool_template = tool_template or template
        """The template of conversations with tools."""
        self.call_format = parsers.calls(self._tool_template, own_formats)
        self.reasoning_format = parsers.reasoning(template, own_formats)
        self.eos_token_ids = eos_token_ids
        self.texts = TextExecutor()
        """Threads for work on texts of more than a few tokens."""
        self.longest_token_chars = vocabulary.longest_piece
        """Most characters of a token. A text has at least its length ÷ this number of tokens."""

    @classmethod
    def load(cls, directory: Path, parsers: Parsers = BY_TEMPLATE) -> Tokenizer:
        """Read `tokenizer.json`, or the files of a MarianMT model, and the other tokenizer files of a model directory.

        Raises `ConfigurationError` if a file is missing, unreadable or of an unknown kind.
        """
        vocabulary: Vocabulary
        file = directory / "tokenizer.json"
        if is_marian(directory):
            vocabulary = MarianVocabulary(directory)
            piece_to_bytes, strips_first_space = reader(METASPACE)
        else:
            vocabulary, decoder = _read_vocabulary(file)
            piece_to_bytes, strips_first_space = reader(decoder)
        settings = _read_json(directory / "tokenizer_config.json")
        special_tokens = _special_tokens(directory, settings)
        templates = {
            name: ChatTemplate(source, special_tokens)
            for name, source in _template_sources(directory, settings).items()
            if name in ("default", "tool_use")
        }
        return cls(
            vocabulary,
            piece_to_bytes,
            strips_first_space=strips_first_space,
            template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            eos_token_ids=_eos_token_ids(directory, vocabulary, special_tokens),
            file=file if file.is_file() else None,
            parsers=parsers,
            own_formats=_own_formats(directory, settings),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text that the model reads. Special tokens in the text become their ids."""
        return self._vocabulary.encode(text, add_special_tokens)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text as the model writes it, without added special tokens.

        A translation model reads one language and writes another, with other tokens.
        """
        return self._vocabulary.encode_answer(text)

    @property
    def has_json_vocabulary(self) -> bool:
        """Whether the vocabulary is that of a `tokenizer.json`."""
        return isinstance(self._vocabulary, JsonVocabulary)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def render_chat(
        self, messages: Sequence[Message], options: TemplateOptions = PLAIN, most_chars: int | None = None
    ) -> str:
        """Return a conversation as text, see `ChatTemplate.render`. Raises `InvalidRequest` (`messages`)."""
        if self._template is None:
            roles = [message.role for message in messages]
            raise InvalidRequest("messages", roles, "sent as a prompt instead: this model has no chat template")
        template = self._tool_template if options.tools and self._tool_template is not None else self._template
        return template.render(messages, options, most_chars)

    def encode_chat(self, messages: Sequence[Message], options: TemplateOptions = PLAIN) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        The template contains the special tokens, so none are added. Raises `InvalidRequest` (`messages`).
        """
        return self.encode(self.render_chat(messages, options), add_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, also for special tokens; empty for an unused id."""
        known = self._bytes.get(token)
        if known is not None:
            return known
        piece = self._vocabulary.piece(token)
        if piece is None:
            return b""
        found = self._bytes[token] = self._piece_to_bytes(piece)
        return found

    def token_piece(self, token: int) -> str:
        """Return the entry of the vocabulary for a token, as the tokenizer spells it; empty for an unused id."""
        return self._vocabulary.piece(token) or ""

    def special_tokens_in(self, texts: tuple[str, ...]) -> Mapping[str, int]:
        """Return the special tokens that are part of the texts of a format, by their text."""
        found = self._specials_in.get(texts)
        if found is None:
            pieces = ((self._vocabulary.piece(token) or "", token) for token in self._vocabulary.special_ids)
            found = {piece: token for piece, token in pieces if piece and any(piece in text for text in texts)}
            self._specials_in[texts] = found
        return found

    def is_special(self, token: int) -> bool:
        """Whether the token is a special token."""
        return token in self._vocabulary.special_ids

    def detokenizer(
        self, *, skip_special_tokens: bool = True, starts_text: bool = False, kept: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """Return a detokenizer for one answer. `starts_text` removes the first space if the tokenizer adds one.

        The special tokens `kept` are not skipped.
        """
        hidden = self._vocabulary.special_ids - kept if skip_special_tokens else frozenset[int]()
        return Detokenizer(self, hidden, starts_text and self._strips_first_space)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. Bytes that are not valid UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens, starts_text=True)
        return "".join([*(detokenizer.push(token) for token in tokens), detokenizer.flush()])


class Detokenizer:
    """Incremental detokenization. An incomplete character is held back until its last byte.

    All parts together equal `Tokenizer.decode` of all tokens, apart from the first space of a continuation.
    """

    __slots__ = ("_drop_space", "_hidden", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], drop_space: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._drop_space = drop_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now complete."""
        if token in self._hidden:
            return ""
        return self._first_space_dropped(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """Return the text held back, at the end. An incomplete character becomes U+FFFD."""
        return self._first_space_dropped(self._utf8.decode(b"", final=True))

    def _first_space_dropped(self, text: str) -> str:
        if not self._drop_space or not text:
            return text
        self._drop_space = False
        return text.removeprefix(" ")


def _read_vocabulary(path: Path) -> tuple[JsonVocabulary, Mapping[str, Any] | None]:
    """Return the vocabulary and the decoder of a `tokenizer.json`. Raises `ConfigurationError`."""
    try:
        source = path.read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"{path}: needed a tokenizer.json, found: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return JsonVocabulary(tokenizer), json.loads(source).get("decoder")


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: needed JSON, found: {error}") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens, as `bos_token`, that `transformers` gives to chat templates.

    Each is a string or an object with `content`. Settings without a list of added tokens are those of an older version,
    which wrote special tokens into a file of their own.
    """
    given = dict(settings)
    if "added_tokens_decoder" not in settings:
        given |= _read_json(directory / "special_tokens_map.json")
    more = given.get("extra_special_tokens")
    named = {key: value for key, value in given.items() if key.endswith("_token")}
    named |= more if isinstance(more, dict) else {}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: content for key, content in contents.items() if isinstance(content, str)}


def _template_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: from files of their own, else from the settings of tokenizer or processor."""
    own = directory / "chat_template.jinja"
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = (
        {"default": own, **{path.stem: path for path in more}} if own.is_file() else {path.stem: path for path in more}
    )
    found: dict[str, str] = {}
    for given in (_read_json(directory / "chat_template.json"), settings):
        source = given.get("chat_template")
        entries = source if isinstance(source, list) else [{"name": "default", "template": source}]
        named = ((entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict))
        found |= {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}
    return found | {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def _own_formats(directory: Path, settings: Mapping[str, Any]) -> OwnFormats:
    """Return the formats of a `response_template`. What no row describes is reported, and left to the chat template."""
    if settings.get("response_template") is None:
        return NONE_OWN
    try:
        return own_formats(settings["response_template"])
    except Inexpressible as reason:
        log.warning("%s: its response_template is not used, its chat template is: %s", directory.name, reason)
        return NONE_OWN


def _eos_token_ids(directory: Path, vocabulary: Vocabulary, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the generation settings, else of the model, else of the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    token = vocabulary.token(special_tokens.get("eos_token", ""))
    return () if token is None else (token,)


_P = ParamSpec("_P")
_T = TypeVar("_T")

LONG_CHARS = 64 * 1024
"""Characters from which on a text counts as long."""
MOST_CHARS = 32 * 1024 * 1024
"""Most characters of all texts that are worked on or wait. A single text may be longer."""
_SHORT_THREADS = 2


class TextExecutor:
    """Tokenizes and renders in threads. Long texts take turns in one thread, so that short ones need not wait for them.

    Threads suffice: the tokenizer computes without Python's lock, and templates give it up every few milliseconds.
    """

    def __init__(self, most_chars: int = MOST_CHARS) -> None:
        self._most_chars = most_chars
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "texts")
        self._long = ThreadPoolExecutor(1, "long-texts")
        self._chars = 0
        self._lock = threading.Lock()

    async def run(self, chars: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Return what `work` returns for a text of `chars` characters. Raises its errors.

        Raises `Overloaded` if too many characters wait already.
        """
        with self._lock:
            if self._chars and self._chars + chars > self._most_chars:
                raise Overloaded("too many long texts wait to be tokenized")
            self._chars += chars
        pool = self._long if chars >= LONG_CHARS else self._short
        future = pool.submit(work, *args, **kwargs)
        future.add_done_callback(lambda done: self._ended(done, chars))
        return await asyncio.wrap_future(future)

    def _ended(self, _: Future[_T], chars: int) -> None:
        with self._lock:
            self._chars -= chars
