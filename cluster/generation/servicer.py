"""The gRPC servicer of a coordinator: converts between protobuf and the generation service."""

# ruff: noqa: N802, ARG002 - names and signatures are the schema's

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from cluster.core.answer_format import OWN_FORMAT
from cluster.core.draft_origin import OriginCounts
from cluster.core.request import FinishReason, TokenLogprobs
from cluster.generation.events import Delta, Event, Finished, ServedModel, Started, VerifiedDraft
from cluster.generation.service import GenerationService
from cluster.wire.codec.answer_format import encode_call_format, encode_reasoning_format
from cluster.wire.origin_counts import encode_origins
from cluster.wire.request_values import traceparent_of
from pilotfish.v1 import common_pb2, generation_pb2, generation_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The public service. It raises Pilotfish errors, which `WireServer` maps to gRPC statuses."""

    def __init__(self, service: GenerationService, *, traces: bool = False) -> None:
        """`traces` says whether the `traceparent` in the metadata of calls is read, as the parent of a span."""
        self._service = service
        self._traces = traces

    def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Stream the answers. A cancelled call frees their memory."""
        if self._traces:
            request.traceparent = traceparent_of(context.invocation_metadata()) or request.traceparent
        return self.responses(request, context.time_remaining())

    async def responses(
        self, request: generation_pb2.GenerateRequest, seconds_left: float | None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """Yield the answers. Closing the iterator frees their memory. Raises the errors of `GenerationService`."""
        async with aclosing(self._service.generate(request, seconds_left)) as events:
            async for event in events:
                response = self._encode(event)
                response.lossy = not self._service.is_lossless
                yield response

    async def Abort(
        self,
        request: generation_pb2.AbortRequest,
        context: Context,
    ) -> generation_pb2.AbortResponse:
        """Abort a running request."""
        return generation_pb2.AbortResponse(aborted=self._service.abort(request.request_id, request.client))

    async def Tokenize(
        self,
        request: generation_pb2.TokenizeRequest,
        context: Context,
    ) -> generation_pb2.TokenizeResponse:
        """Convert a text or a conversation to token ids."""
        tokens = await self._service.tokenize(request)
        model = self._service.model()
        return generation_pb2.TokenizeResponse(
            token_ids=tokens,
            max_context_len=model.max_source_len or model.max_context_len,
            token_bytes=[self._service.token_bytes(token) for token in tokens] if request.return_bytes else (),
            token_pieces=map(self._service.token_piece, tokens) if request.return_pieces else (),
        )

    async def Detokenize(
        self,
        request: generation_pb2.DetokenizeRequest,
        context: Context,
    ) -> generation_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        return generation_pb2.DetokenizeResponse(text=await self._service.detokenize(request))

    async def ListModels(
        self,
        request: generation_pb2.ListModelsRequest,
        context: Context,
    ) -> generation_pb2.ListModelsResponse:
        """Return the served models."""
        return generation_pb2.ListModelsResponse(models=[_encode_model(one) for one in self._service.models()])

    async def GetModel(
        self,
        request: generation_pb2.GetModelRequest,
        context: Context,
    ) -> generation_pb2.GetModelResponse:
        """Return one model by name."""
        return generation_pb2.GetModelResponse(model=_encode_model(self._service.model(request.model)))

    def _encode(self, event: Event) -> generation_pb2.GenerateResponse:
        match event:
            case Started():
                return generation_pb2.GenerateResponse(started=self._encode_started(event))
            case Delta():
                return generation_pb2.GenerateResponse(delta=self._encode_delta(event), index=event.index)
            case Finished():
                finished = _encode_finished(event)
                finished.draft_method = self._service.draft_method
                return generation_pb2.GenerateResponse(finished=finished, index=event.index)

    def _encode_started(self, event: Started) -> generation_pb2.GenerationStarted:
        form = event.answer_format
        calls, reasoning = form.calls, form.reasoning
        return generation_pb2.GenerationStarted(
            request_id=event.request_id,
            model=event.model,
            seed=event.seed,
            prompt_tokens=event.prompt_tokens,
            prompt_token_ids=event.prompt,
            prompt_token_bytes=[self._service.token_bytes(token) for token in event.prompt],
            prompt_logprobs=[self._encode_logprobs(entry) for entry in event.prompt_logprobs],
            tool_format="" if calls is None else calls.name,
            reasoning_format="" if reasoning is None else reasoning.name,
            own_call_format=encode_call_format(calls) if calls is not None and calls.name == OWN_FORMAT else None,
            own_reasoning_format=encode_reasoning_format(reasoning)
            if reasoning is not None and reasoning.name == OWN_FORMAT
            else None,
            reasons=form.reasons,
            begins_in_reasoning=form.begins_in_reasoning,
            queue_seconds=event.queue_seconds,
            fingerprint=event.fingerprint,
        )

    def _encode_delta(self, delta: Delta) -> generation_pb2.GenerationDelta:
        return generation_pb2.GenerationDelta(
            text=delta.text,
            token_ids=delta.tokens,
            accepted_draft_tokens=delta.accepted,
            accepted_origins=encode_origins(delta.origins),
            drafted_tokens=delta.drafted,
            logprobs=[self._encode_logprobs(entry) for entry in delta.logprobs],
            token_bytes=[self._service.token_bytes(entry.token) for entry in delta.logprobs],
            drafts=() if delta.draft is None else (self._encode_draft(delta.draft),),
            token_texts=() if delta.draft is None else delta.draft.texts,
        )

    def _encode_draft(self, draft: VerifiedDraft) -> generation_pb2.VerifiedDraft:
        return generation_pb2.VerifiedDraft(
            token_ids=draft.tree.tokens,
            parents=draft.tree.parents,
            token_bytes=[self._service.token_bytes(token) for token in draft.tree.tokens],
            accepted=draft.accepted,
            committed_tokens=len(draft.texts),
            origins=encode_origins(draft.origins),
        )

    def _encode_logprobs(self, entry: TokenLogprobs) -> common_pb2.TokenLogprobs:
        return common_pb2.TokenLogprobs(
            token_id=entry.token,
            logprob=entry.logprob,
            top=[
                common_pb2.TopLogprob(token_id=token, logprob=logprob, token_bytes=self._service.token_bytes(token))
                for token, logprob in entry.top
            ],
            rank=entry.rank,
        )


def _encode_finished(event: Finished) -> generation_pb2.GenerationFinished:
    return generation_pb2.GenerationFinished(
        reason=_REASONS[event.reason],
        usage=_encode_usage(event),
        stop_string=event.stop_string,
        stop_token_id=event.stop_token,
        seed=event.seed,
    )


def _encode_usage(event: Finished) -> generation_pb2.Usage:
    usage = event.usage
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        drafted_tokens=usage.drafted_tokens,
        accepted_draft_tokens=usage.accepted_tokens,
        target_steps=usage.target_steps,
        resumed_tokens=usage.resumed_tokens,
        cached_tokens=usage.cached_tokens,
        accepted_prediction_tokens=event.accepted_prediction,
        rejected_prediction_tokens=event.rejected_prediction,
        max_tokens=event.reduced_max_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        accepted_by_origin=_encode_counts(usage.accepted_by_origin),
    )


def _encode_counts(counts: OriginCounts) -> common_pb2.OriginCounts:
    return common_pb2.OriginCounts(
        request=counts.request, earlier=counts.earlier, trained=counts.trained, forced=counts.forced
    )


def _encode_model(model: ServedModel) -> generation_pb2.Model:
    return generation_pb2.Model(
        id=model.name,
        created=model.created,
        max_context_len=model.max_context_len,
        vocabulary_size=model.vocabulary_size,
        draft_method=model.draft_method,
        lossy=not model.is_lossless,
        root=model.root,
        kind=generation_pb2.MODEL_KIND_ENCODER_DECODER
        if model.max_source_len
        else generation_pb2.MODEL_KIND_DECODER_ONLY,
        max_source_len=model.max_source_len,
        shares_between_keys=model.shares_between_keys,
        dequantized_from=model.dequantized_from,
    )
