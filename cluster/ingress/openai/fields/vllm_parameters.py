"""The parameters that vLLM adds to OpenAI's requests, with vLLM's names and meanings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.ingress.openai.fields.types import MAX_INT32, MAX_UINT32, Seed, StrictModel, Text, Texts, UInt32, UInt32s


class VllmParameters(StrictModel):
    """Parameters of both endpoints that OpenAI's own API lacks."""

    seed: Seed | None = None
    """Any 64-bit integer, for all prompts of the request: answer `i` to a prompt has the seed plus `i`. Unset: one is
    drawn, and each answer has a seed of its own: choice `i` of the response has the drawn seed plus `i`. The response
    names the seed as an unsigned one, and the receipt of each choice its own."""
    use_beam_search: bool = False
    """Return the best answers of a beam search instead of samples."""
    length_penalty: float | None = None
    """Exponent of the length in the score of a beam search: log-probability ÷ (number of tokens ** length_penalty).
    Unset: the model's generation configuration, else 1."""
    early_stopping: Literal[True, False, "never"] | None = None
    """When a beam search (`use_beam_search`) ends, as in `transformers`. Unset: the model's generation configuration,
    else false."""
    request_id: Text | None = None
    """Names the request for `Abort`. Running requests have distinct names."""
    cache_salt: Text | None = None
    """Only requests with the same salt and the same API key share prefix-cache blocks."""
    priority: Annotated[int, Field(ge=-MAX_INT32 - 1, le=MAX_INT32)] = 0
    """Requests with a lower priority start earlier. Other values than 0 need `scheduler.policy: priority`."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    """0 and -1 keep all tokens."""
    min_p: float | None = None
    """Drop tokens less probable than this share of the most probable one."""
    repetition_penalty: float | None = None
    """Divide positive and multiply negative logits of tokens seen in prompt or answer."""
    allowed_token_ids: UInt32s = Field(default_factory=list)
    """Only these tokens are sampled; an empty list allows all."""
    bad_words: Texts = Field(default_factory=list)
    """Words that the answer never contains, nor longer words that begin with them, however tokens spell them. Inside of
    words they are allowed, except in scripts without spaces between words. Of MarianMT models, which have no
    `tokenizer.json`, only the usual spelling is excluded, alone and after a space."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    min_tokens: UInt32 | None = None
    """Fewest tokens of the answer; nothing ends it before."""
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_UINT32)] | None = None
    """Most tokens between `<think>` and `</think>`; then `</think>` is forced. -1: unbounded. No effect on models that
    do not think, and with a grammar."""
    stop_token_ids: UInt32s = Field(default_factory=list)
    """Tokens that end the answer."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """No effect: text is made of the bytes of the tokens, without added spaces."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the prompt. Unset: to text, not to conversations."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    """Keep this many tokens of a longer prompt; -1 keeps as many as fit beside `max_tokens`."""
    truncation_side: Literal["left", "right"] = "left"
    """The side of the prompt at which `truncate_prompt_tokens` removes tokens."""
    logprob_token_ids: UInt32s = Field(default_factory=list)
    """Tokens whose log-probabilities are reported instead of those of the most probable ones, if `logprobs` is set."""
    prompt_logprobs: UInt32 | None = None
    """Most probable tokens to report beside each token of the prompt. Not with `stream`; refused by encoder-decoder
    models."""
    return_token_ids: bool = False
    """Report the token ids of prompt and answer, and how many of the answer's are accepted draft tokens."""
    return_tokens_as_token_ids: bool = False
    """Name the tokens of log-probabilities `token_id:N`."""
    stream_interval: Annotated[int, Field(ge=1, le=MAX_UINT32)] = 1
    """Fewest new tokens of a streamed chunk; the first and the last chunk may have fewer."""
