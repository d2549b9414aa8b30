"""Answer a request: tokenize the prompt, generate, and send the reply."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from msgspec import structs
from starlette.types import Send

from asynchicache.errors import BusyError, CacheError
from asynchicache.histograms import Histogram
from asynchicache.integrations.serve.answering import Answer, AnswerSet, Wanted
from asynchicache.integrations.serve.attaching import ServedStorage
from asynchicache.integrations.serve.guidance import Guide, SchemaConstraint
from asynchicache.integrations.serve.messages import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    token_ids,
)
from asynchicache.integrations.serve.problems import CLIENT_LEFT, ApiError, overloaded, refusal, stopping
from asynchicache.integrations.serve.replies import STREAM_END, AnswerPiece, Choice, Reply, Usage, server_sent
from asynchicache.integrations.serve.tokenizers import Tokenizer
from asynchicache.integrations.transformers.admission import MAX_RUNNING, MAX_WAITING
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.integrations.transformers.sampling import Sampling
from asynchicache.planner.hints import MAX_REPEATS, CacheHint
from asynchicache.storage.breaker import BreakerState

T = TypeVar("T")
Role: TypeAlias = Literal["both", "prefill", "decode"]

_log = logging.getLogger(__name__)

_LONGEST_WAIT = 60
_PAST = 0.9  # weight of earlier requests in the moving average of service time


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model, as clients see it.

    Attributes:
        name: the model's name for clients.
        tokenizer: converts between text and token ids.
        vocabulary: number of token ids.
        stop_ids: tokens that end an answer.
        context: most tokens of a prompt and its answer together.
        answer_tokens: default limit on the answer of a chat.
        temperature, top_p: defaults of requests.
        folder: of the checkpoint, as it was given; None: there is none.
        choices: most answers of one request.
        role: what the server does; see `ServeSettings`.
        wait_seconds: see `ServeSettings`.
    """

    name: str
    tokenizer: Tokenizer
    vocabulary: int
    stop_ids: frozenset[int]
    context: int
    answer_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    folder: Path | None = None
    choices: int = MAX_RUNNING + MAX_WAITING
    role: Role = "both"
    wait_seconds: float = 30.0

    def is_called(self, name: str) -> bool:
        """Whether a request may name the model so: by its name, or by its folder, as other servers do."""
        folders = () if self.folder is None else (self.folder, self.folder.absolute())
        return name == self.name or PurePath(name) in folders


class Answered(NamedTuple):
    """What an answer took: tokens, and seconds to the first one."""

    usage: Usage
    first_token_seconds: float

    def __str__(self) -> str:
        usage = self.usage
        return (
            f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached; "
            f"{usage.completion_tokens} generated, the first after {self.first_token_seconds:.3f} s"
        )


@dataclass(slots=True, eq=False)
class RequestCounts:
    """Results of requests since the server started.

    Attributes:
        answered: requests that were answered.
        cancelled: requests whose client left before the end, or that were cancelled by a shutdown.
        refused: requests that got an error, by HTTP status; 500 and above is the server's fault.
        prompt_tokens, cached_tokens, completion_tokens: tokens of answered requests.
    """

    answered: int = 0
    cancelled: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, usage: Usage) -> None:
        self.answered += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.completion_tokens

    def refuse(self, error: ApiError) -> None:
        if error.status == CLIENT_LEFT:
            self.cancelled += 1
            return
        self.refused[error.status] = self.refused.get(error.status, 0) + 1


class Api:
    """Answers requests with one model.

    Args:
        model: an open model; the caller closes it.
        storage: of the server, which may not be attached yet.
        records: a trace is recorded, which tells conversations by what their templates repeat.

    Attributes:
        counts: results of requests.
        first_token: time to first token.
        stopping: set it to refuse new requests.
    """

    def __init__(
        self, model: PrefixCachedModel, served: ServedModel, storage: ServedStorage, *, records: bool = False
    ) -> None:
        self.model = model
        self.storage = storage
        self.served = served
        self.counts = RequestCounts()
        self.first_token = Histogram()
        self.stopping = False
        # Pages of attention can be resumed anywhere.
        self._asks_repeats = records or any(not pool.per_token for pool in model.spec.pools)
        self._guide = Guide(served.tokenizer, served.vocabulary, served.stop_ids)
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._seconds = 1.0
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def answer(
        self,
        request: GenerationRequest,
        reply_type: type[Reply],
        send: Send,
        *,
        traceparent: str | None = None,
    ) -> Answered:
        """Answer a request on its connection; returns what it took, for the access log.

        Args:
            send: the ASGI connection.
            traceparent: the W3C header of the client's span.

        Raises:
            ApiError: the request is refused; no part of a response was sent.
        """
        with self._working():
            self._check(request)
            prompts = await self.prompts(request)
            if self.served.role == "prefill":
                request = _prompts_only(request)
                prompts = [(tokens, _repeated(hint, len(tokens))) for tokens, hint in prompts]
            async with AsyncExitStack() as stack:
                answers = await self._begin_all(stack, request, prompts, traceparent)
                reply = self._reply(request, reply_type)
                problem = None
                if request.stream:
                    problem = await _stream(answers, reply, send)
                else:
                    await _send_whole(answers, reply, send)
                answered = Answered(answers.usage, answers.first_token_seconds)
                self._count(answered, problem)
                return answered

    def storage_state(self) -> Literal["ok", "full", "unavailable", "none"]:
        """`unavailable`: it is not open yet, or the breaker of a pool is; requests are served without it.
        `full`: its medium takes no more."""
        pools = self.model.cache.statistics().storage.values()
        if not pools:
            return "unavailable" if self.storage.name else "none"
        if not all(pool.breaker is BreakerState.CLOSED for pool in pools):
            return "unavailable"
        return "full" if any(pool.full for pool in pools) else "ok"

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    def close(self) -> None:
        self._texts.shutdown(wait=False)

    def _count(self, answer: Answered, problem: ApiError | None) -> None:
        if problem is not None:
            self.counts.refuse(problem)
            return
        self.counts.add(answer.usage)
        self.first_token.observe(answer.first_token_seconds)

    def _check(self, request: GenerationRequest) -> None:
        if self.stopping:
            raise stopping()
        if request.model is not None and not self.served.is_called(request.model):
            raise unknown_model(request.model, self.served.name)

    async def prompts(self, request: GenerationRequest) -> list[tuple[list[int], CacheHint]]:
        """Return the token ids of each prompt, and its hint for the cache."""
        if isinstance(request, ChatRequest):
            return [await self._in_thread(partial(self._encoded_chat, request))]
        if not isinstance(request, CompletionRequest):
            raise TypeError(f"{type(request).__name__} has no prompt")
        return [(await self._prompt_tokens(prompt), request.hint) for prompt in request.prompts()]

    def _encoded_chat(self, request: ChatRequest) -> tuple[list[int], CacheHint]:
        tokenizer, conversation, hint = self.served.tokenizer, request.conversation(), request.hint
        tokens = tokenizer.encode_chat(conversation)
        if self._asks_repeats and not hint.repeats:
            hint = replace(hint, repeats=tokenizer.repeated(conversation, tokens))
        return tokens, hint

    async def _prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return token_ids(prompt, self.served.vocabulary)
        return await self._in_thread(partial(self.served.tokenizer.encode, prompt))

    async def _begin_all(
        self,
        stack: AsyncExitStack,
        request: GenerationRequest,
        prompts: Sequence[tuple[list[int], CacheHint]],
        traceparent: str | None,
    ) -> AnswerSet:
        """Start all answers; `stack` ends them."""
        choices, most = request.n or 1, self.served.choices
        if len(prompts) * choices > most:
            raise ApiError(
                f"{len(prompts)} prompts with {choices} answers each are more than the {most} that run and "
                "wait together: send fewer at once, or raise --max-waiting",
                param="n" if choices > most else "prompt",
            )
        begun = []
        for tokens, hint in prompts:
            for number in range(choices):
                constraint = await self._constraint(request)
                answer = self._begin(request, tokens, hint, number, traceparent, constraint)
                begun.append(await stack.enter_async_context(answer))
        return AnswerSet(begun, choices)

    async def _constraint(self, request: GenerationRequest) -> SchemaConstraint | None:
        if request.schema is None:
            return None
        field = "tool_choice" if request.extras.calls else "response_format"
        return await self._in_thread(partial(self._guide.json, request.schema, field))

    def _begin(
        self,
        request: GenerationRequest,
        tokens: list[int],
        hint: CacheHint,
        number: int,
        traceparent: str | None,
        constraint: SchemaConstraint | None,
    ) -> Answer:
        """Start a generation, or queue it; `number`: which of the choices it is."""
        served, likely = self.served, request.likely
        stop_ids = frozenset[int]() if request.ignore_eos else served.stop_ids
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        new_tokens = self._new_tokens(request, len(tokens))
        told = request.kv_transfer_params
        computed = len(tokens) if told is None or told.durable is None else told.durable
        try:
            generation = self.model.generate(
                tokens,
                max_new_tokens=max(new_tokens, 1),  # the model has computed it with the prompt
                sampling=self._sampling(request, number),
                salt=request.cache_salt,
                hint=hint,
                stop_token_ids=stop_ids,
                traceparent=traceparent,
                logprobs=None if likely is None else min(likely, served.vocabulary),
                prompt_logprobs=echo and likely is not None,
                constraint=constraint,
                until=computed if served.role == "decode" else 0,
                seconds=served.wait_seconds,
                durable=served.role != "both",
            )
        except BusyError as error:
            raise overloaded(f"{error}: try again later", self._retry_after()) from error
        wanted = Wanted(request.stops, stop_ids, echo, answer=new_tokens > 0, calls=request.extras.calls)
        return Answer(generation, served.tokenizer, tokens, wanted)

    def _new_tokens(self, request: GenerationRequest, prompt: int) -> int:
        """Return the most tokens to generate after a prompt of `prompt` tokens."""
        room = self.served.context - prompt
        wanted = min(self.served.answer_tokens, max(room, 1)) if request.limit is None else request.limit
        if max(wanted, 1) > room:
            raise ApiError(
                f"the prompt has {prompt} tokens and {wanted} are to be generated, together more than the "
                f"{self.served.context} that there is room for: shorten the prompt, or lower max_tokens",
                code="context_length_exceeded",
            )
        return wanted

    def _sampling(self, request: GenerationRequest, number: int) -> Sampling:
        temperature = self.served.temperature if request.temperature is None else request.temperature
        top_p = self.served.top_p if request.top_p is None else request.top_p
        # OpenAI allows negative seeds. Equal seeds would draw equal choices.
        seed = None if request.seed is None else (request.seed + number) % 2**64
        return Sampling(temperature=temperature, top_p=top_p, top_k=max(request.top_k or 0, 0), seed=seed)

    def _reply(self, request: GenerationRequest, reply_type: type[Reply]) -> Reply:
        return reply_type(uuid.uuid4().hex, int(time.time()), self.served.name, request.extras)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread: tokenizing a long text would block the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, call)

    @contextmanager
    def _working(self) -> Iterator[None]:
        began = time.monotonic()
        self._busy += 1
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:  # the client left, or the server is stopping
            self.counts.cancelled += 1
            raise
        else:
            self._seconds = _PAST * self._seconds + (1 - _PAST) * (time.monotonic() - began)
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    def _retry_after(self) -> int:
        """Estimate the seconds until a current request ends: the average service time."""
        return min(math.ceil(self._seconds), _LONGEST_WAIT)


def _prompts_only(request: GenerationRequest) -> GenerationRequest:
    """What a prefill is asked: the prompts, each once, with no answer."""
    asked = structs.replace(
        request, n=None, stream=None, max_tokens=0, max_completion_tokens=None, response_format=None
    )
    if isinstance(asked, CompletionRequest):
        return structs.replace(asked, echo=None, logprobs=None)
    return structs.replace(asked, logprobs=None, top_logprobs=None, tool_choice=None)


def _repeated(hint: CacheHint, prompt: int) -> CacheHint:
    """A hint that says too that a decoder asks for the prompt again, all of it."""
    return replace(hint, repeats=(*hint.repeats[: MAX_REPEATS - 1], prompt))


def unknown_model(name: str | None, known: str) -> ApiError:
    """Return the error for a model that this server does not serve."""
    message = f"model {name!r} is not served here: this server has {known!r} (GET /v1/models)"
    return ApiError(message, status=404, param="model", code="model_not_found")


async def _send_whole(answers: AnswerSet, reply: Reply, send: Send) -> None:
    came: list[list[AnswerPiece]] = [[] for _ in range(len(answers))]
    whole: dict[int, Choice] = {}
    async with aclosing(answers.pieces()) as pieces:
        async for number, piece in pieces:
            if isinstance(piece, AnswerPiece):
                came[number].append(piece)
            else:
                scores = [score for one in came[number] for score in one.scores]
                whole[number] = ("".join(one.text for one in came[number]), scores, piece)
    body = reply.whole([whole[number] for number in range(len(answers))], answers.usage)
    await _start(send, b"application/json", len(body))
    await send({"type": "http.response.body", "body": body})


async def _stream(answers: AnswerSet, reply: Reply, send: Send) -> ApiError | None:
    """Send server-sent events. The status goes out with the first token, so earlier failures can set it.

    Returns:
        the error of a failure after that, which was sent as an event; None on success.
    """
    async with aclosing(_chunks(answers, reply)) as chunks:
        first = await anext(chunks)
        await _start(send, b"text/event-stream; charset=utf-8")
        await _send_part(send, first)
        try:
            async for chunk in chunks:
                await _send_part(send, chunk)
        except (CacheError, RuntimeError) as error:  # too late for a status
            _log.exception("the model failed in the middle of an answer")
            problem = refusal(error)
            await send({"type": "http.response.body", "body": server_sent(problem.body())})
            return problem
    await send({"type": "http.response.body", "body": reply.used(answers.usage) + STREAM_END})
    return None


async def _chunks(answers: AnswerSet, reply: Reply) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of all answers, the first one when the first token has come."""
    begun, left = False, len(answers)
    async with aclosing(answers.pieces()) as pieces:
        async for number, piece in pieces:
            usage = answers.usage if reply.extras.usage_always or not isinstance(piece, AnswerPiece) else None
            data = b"" if begun else b"".join(reply.opening(one, usage) for one in range(left))
            begun = True
            if isinstance(piece, AnswerPiece):
                yield data + reply.piece(number, piece, usage)
            else:
                left -= 1
                yield data + reply.closing(number, piece, usage, last=not left)


async def _start(send: Send, kind: bytes, length: int | None = None) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_part(send: Send, data: bytes) -> None:
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
