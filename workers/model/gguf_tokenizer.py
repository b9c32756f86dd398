"""Completes the tokenizer that `transformers` makes of a GGUF file: it splits some vocabularies as it does GPT-2's.

What the keys mean is what llama.cpp does with them (`llama-vocab.cpp`): where a text is divided before pairs are
merged, whether a whole piece of it is looked up first, and which tokens are added. Some differ, as the models' original
tokenizers do: `deepseek-llm` divides numbers into digits, and `glm4` and `chatglm-bpe` look whole pieces up.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers

from workers.model.gguf_header import GgufModel

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_BY_CASE = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+", rf"{_BEFORE_WORD}{_UPPER}+{_LOWER}*"
_SIGNS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_BY_CASE[0]}|{_BY_CASE[1]}|\p{{N}}|{_SIGNS_AND_SLASHES}"
_GPT4O = rf"{_BY_CASE[0]}{_ENDINGS}?|{_BY_CASE[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with a case, as DeepSeek's first tokenizer lists them."""
_DEEPSEEK = (
    *(r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    *(r"\s+$", _HAN, r"\p{N}"),
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DIGITS_OF_THREE = "[0-9][0-9][0-9]"
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "gigachat",
        "a.x-4.0",
        "mellum",
    ): (_GPT2,),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"): (
        _LLAMA3,
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"): (
        _QWEN2,
    ),
    ("qwen35",): (_QWEN35,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): (_GPT4O,),
    ("deepseek-llm",): _DEEPSEEK,
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, _DIGITS_OF_THREE),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", _DIGITS_OF_THREE),
    ("bloom", "poro-chat", "gpt3-finnish"): (_BLOOM,),
    ("viking",): (_BLOOM, r"\p{N}"),
    ("seed-coder",): (rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ("minicpm5",): (r"\p{N}{1,3}", rf"{_ENDINGS}|{_WORDS}|\p{{N}}+|{_SIGNS}|{_SPACES}"),
}
"""Where texts are divided, one expression after another, by the values of `tokenizer.ggml.pre`."""
_BY_NAME = {name: expressions for names, expressions in _SPLITS.items() for name in names}
_NOT_BEGUN = ("glm4", "glm5", "chatglm-bpe", "minicpm5")
_LOOKED_UP = frozenset((*_NOT_BEGUN, "tekken", *next(names for names in _SPLITS if "llama3" in names)))
"""Names of pre-tokenizers whose pieces are looked up in the vocabulary before pairs are merged."""
_BEGUN = _LOOKED_UP.difference(_NOT_BEGUN)
"""Names of pre-tokenizers whose texts begin with the BOS token unless the file says otherwise."""
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
_SPACE = "\u2581"
_ADDED = (3, 4)
"""Types of tokens that are found in a text before it is divided: control tokens, and those that users defined."""
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that leave the white space after them."""
_TURN_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "[EOT]", "<end_of_utterance>")
) | {"<|return|>", "<|call|>"}
"""Tokens that end a turn or a message, by their texts."""


def complete_tokenizer(tokenizer: Any, reader: GgufModel) -> None:
    """Make the tokenizer of `transformers` divide texts as the one that the vocabulary of the file was made with.

    Raises `ValueError` for a way that is not known.
    """
    kind, architecture = _key(reader, "model"), str(reader.fields["general.architecture"].contents())
    if kind == _BYTE_LEVEL:
        name = str(_key(reader, "pre") or "default")
        if name not in _BY_NAME:
            raise ValueError(f"tokenizer.ggml.pre is {name!r}; it must be one of {', '.join(sorted(_BY_NAME))}")
        backend = tokenizer.backend_tokenizer
        parts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _BY_NAME[name]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
        backend.model.ignore_merges = name in _LOOKED_UP
        if name in _BEGUN and _key(reader, "add_bos_token") is None:
            tokenizer.add_bos_token = True
    elif kind == _SENTENCEPIECE and not architecture.startswith("gemma"):
        backend = tokenizer.backend_tokenizer
        is_prefixed = _key(reader, "add_space_prefix") is not False
        begins, ends = ([normalizers.Prepend(_SPACE)], [decoders.Strip(" ", 1, 0)]) if is_prefixed else ([], [])
        backend.normalizer = normalizers.Sequence([*begins, normalizers.Replace(" ", _SPACE)])
        backend.pre_tokenizer = None
        joined = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*joined, *ends])
        if architecture == "phi3":
            _strip_after_added(tokenizer, reader)


def _strip_after_added(tokenizer: Any, reader: GgufModel) -> None:
    """Let the tokens that Phi-3 added to its vocabulary, as `<|user|>`, take the white space after them."""
    kinds = zip(_key(reader, "tokens"), _key(reader, "token_type") or (), strict=False)
    added = [text for text, kind in kinds if kind in _ADDED and text not in _NOT_STRIPPED]
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken(text, rstrip=True, normalized=False, special=True) for text in added]
    )


def end_tokens(stated: int | list[int] | None, reader: GgufModel) -> list[int]:
    """The tokens that end generation: those that the configuration states, and those that end a turn or a message.

    Some files do not name the latter, as those of Phi-3; their texts tell them.
    """
    own = [stated] if isinstance(stated, int) else stated or []
    named = [token for token in (_key(reader, f"{name}_token_id") for name in ("eot", "eom")) if token is not None]
    texts = list(_key(reader, "tokens") or ())
    ends = _TURN_ENDS - {"<|end|>"} if "<|return|>" in texts else _TURN_ENDS  # there, it ends a part of a turn
    known = [token for token, text in enumerate(texts) if text in ends]
    return list(dict.fromkeys(int(token) for token in (*own, *named, *known)))


def _key(reader: GgufModel, name: str) -> Any:
    """The value of a key of the tokenizer; `None` without it."""
    field = reader.fields.get(f"tokenizer.ggml.{name}")
    return None if field is None else field.contents()
