"""Answers that are JSON of a schema: llguidance says which tokens may come next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.serve.tokenizers import CheckpointTokenizer, Tokenizer


class Guide:
    """Makes constraints for one tokenizer; the first one takes as long as reading the vocabulary.

    Args:
        vocabulary: number of token ids of the model.
        stop_ids: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_ids = stop_ids
        self._read: Any = None

    def json(self, schema: Mapping[str, Any] | bool, field: str) -> SchemaConstraint:
        """Return the constraint of a JSON schema.

        Args:
            schema: of the answer.
            field: of the request that asks for it, for errors.

        Raises:
            ApiError: llguidance is missing, or the schema or the tokenizer cannot be used.
        """
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise _refused(
                field,
                "needs a package that is not here: pip install 'asynchicache[guidance]', or leave it out",
            ) from error
        if not isinstance(self._tokenizer, CheckpointTokenizer):
            raise _refused(field, "needs a checkpoint's tokenizer, and this server reads bytes: leave it out")
        try:
            if self._read is None:
                self._read = self._tokenizer.for_guidance(self._vocabulary, self._stop_ids)
            # Without spaces, a model cannot write spaces until its limit.
            text = msgspec.json.encode(schema).decode()
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        except ValueError as error:
            raise _refused(field, f"is nothing to be held to: {error}") from error
        matcher = LLMatcher(self._read, grammar)
        if matcher.is_error():
            raise _refused(field, f"is nothing to be held to: {matcher.get_error()}")
        return SchemaConstraint(matcher)


class SchemaConstraint:
    """One answer within a schema; see `generation.TokenConstraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allow(self, logits: torch.Tensor) -> torch.Tensor:
        """
        Raises:
            RuntimeError: llguidance failed.
        """
        bias = bytearray(self._matcher.compute_logit_bias())
        if self._matcher.is_error():
            raise RuntimeError(f"llguidance: {self._matcher.get_error()}")
        allowed = torch.frombuffer(bias, dtype=torch.uint8)[: len(logits)].to(logits.device) > 0
        return logits.masked_fill(~allowed, -torch.inf)

    def take(self, token: int) -> bool:
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


def _refused(field: str, why: str) -> ApiError:
    return ApiError(f"{field} {why}", param=field, code="unsupported_value")
