"""Error responses, in the shape of OpenAI's errors."""

from __future__ import annotations

import re

import msgspec
from starlette.responses import Response

from asynchicache.errors import CapacityError, ClosedError, InvalidTokensError, UsageError

CLIENT_LEFT = 499
"""nginx's status for a client that closed its connection; for metrics only, never received."""


_MOST_LOGGED = 200
_LONG = 40
_LONGEST_FIELD = 80
_QUOTED = re.compile(r"""(?<!\w)(['"`])((?:\\.|(?!\1).)*)(?:\1|\Z)""", re.DOTALL)
"""Words in quotes, as repr writes them; cut ones have no second quote. An apostrophe begins none."""


class ApiError(UsageError):
    """Raised when a request is refused or fails; says why, and what to change.

    Args:
        message: text for people; names the value and the rule.
        param: path of the invalid field, such as `messages[0].role`.
        code: machine-readable code, such as `context_length_exceeded`.
        retry_after: seconds after which a retry may succeed.
        rule: what the log says in place of the message; without anything that a client sent.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        rule: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self._rule = rule

    @property
    def logged(self) -> str:
        """The field and the rule, for the log: one bounded line, without anything long that a client sent."""
        words = self._rule or _QUOTED.sub(_shortened, str(self))
        if self.param is not None and self.param not in words:
            words = f"{self.param}: {words}"
        if self.param is not None and len(self.param) > _LONGEST_FIELD:  # it may be a prompt
            words = words.replace(self.param, "...")
        words = "".join(one if one.isprintable() else "?" for one in words)
        return words if len(words) <= _MOST_LOGGED else f"{words[: _MOST_LOGGED - 3]}..."

    def body(self) -> bytes:
        """`{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`"""
        error = {"message": str(self), "type": self._type(), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body(), self.status, headers, "application/json")

    def _type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def _shortened(found: re.Match[str]) -> str:
    return found[0] if len(found[2]) < _LONG else f"{found[1]}...{found[1]}"


def overloaded(message: str, retry_after: int) -> ApiError:
    """Return the error for a full queue or a lack of memory."""
    return ApiError(message, status=429, code="rate_limit_exceeded", retry_after=retry_after)


def crowded(most: int) -> ApiError:
    """Return the error for too many connections."""
    message = f"more than {most:,} clients are connected: try again later, or raise --max-connections"
    return ApiError(message, status=503, code="too_many_connections", retry_after=1)


def stopping() -> ApiError:
    """Return the error for a server that is shutting down."""
    return ApiError("the server is shutting down; try another", status=503, code="stopping", retry_after=1)


def broken() -> ApiError:
    """Return the error for an internal failure; details are only in the log."""
    return ApiError("the server failed; its log says why", status=500, code="internal_error")


def refusal(error: Exception) -> ApiError:
    """Convert an error of the library or of the model to an `ApiError`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        return overloaded(f"there is no room for this request now: {error}", 1)
    if isinstance(error, InvalidTokensError):
        return ApiError(str(error), param="prompt")
    return stopping() if isinstance(error, ClosedError) else broken()
