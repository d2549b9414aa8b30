"""Load the model to serve: a tiny model with random weights, or a checkpoint folder."""

from __future__ import annotations

import logging
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from transformers import PreTrainedModel

from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.checkpoint_files import (
    check_vocabulary,
    read_model,
    read_tokenizer,
    refusal,
)
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.serve.tokenizers import (
    ByteTokenizer,
    CheckpointTokenizer,
    Conversation,
    Tokenizer,
)
from asynchicache.integrations.transformers.chat import LongTemplateError, bounded
from asynchicache.integrations.transformers.demo_model import build_demo_model
from asynchicache.integrations.transformers.forward import vocabulary_of

TINY = "tiny"

_BYTES = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and defaults.

    Attributes:
        name: model name for clients.
        model: the model, in evaluation mode.
        stop_ids: tokens that end a text.
        context: most positions of the model.
        temperature, top_p: the checkpoint's recommended values, or OpenAI's defaults.
        folder: of the checkpoint, as it was given; None: there is none.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    context: int
    temperature: float = 1.0
    top_p: float = 1.0
    folder: Path | None = None

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(_text_config(self.model).vocab_size)


def load_tiny(seed: int) -> LoadedModel:
    """Return the model of `asynchicache demo`: Qwen3.5 with random weights and one token per byte."""
    model, config = build_demo_model(seed)
    tokenizer = ByteTokenizer(config.vocab_size)
    return LoadedModel(TINY, model, tokenizer, frozenset(), config.max_position_embeddings)


def load_checkpoint(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    as_bytes: bool = False,
    template: Path | None = None,
) -> LoadedModel:
    """Load a checkpoint in the format of `save_pretrained`. Nothing is downloaded.

    Args:
        folder: the checkpoint's folder; of a model for text and images too, of which text is served.
        dtype: dtype of the weights, or `auto` for that of the file.
        device: torch device of the model.
        as_bytes: use one token per byte instead of the checkpoint's tokenizer.
        template: file with a chat template that replaces the tokenizer's.

    Raises:
        ConfigError: the folder has no model or tokenizer, or they cannot be loaded.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {str(folder)!r} is no checkpoint: give a folder with config.json and weights, "
            f"as save_pretrained writes them, or {TINY!r}"
        )
    model = read_model(folder, dtype).to(torch.device(device)).eval()
    defaults = model.generation_config
    try:
        stop_ids = _stop_ids(model)
        temperature = 1.0 if defaults.temperature is None else float(defaults.temperature)
        top_p = 1.0 if defaults.top_p is None else float(defaults.top_p)
    except (TypeError, ValueError) as error:
        raise refusal(
            folder / "generation_config.json", error, "mend the field, or delete the file"
        ) from error
    return LoadedModel(
        name=folder.resolve().name,
        model=model,
        tokenizer=_byte_tokenizer(model) if as_bytes else _tokenizer(folder, model, template, stop_ids),
        stop_ids=stop_ids,
        context=_context(folder, model),
        temperature=temperature,
        top_p=top_p,
        folder=folder,
    )


def _context(folder: Path, model: PreTrainedModel) -> int:
    """Return the most positions; for models without a limit, a million."""
    positions = int(getattr(_text_config(model), "max_position_embeddings", 0) or 1 << 20)
    if positions < 1:
        raise refusal(
            folder / "config.json", f"max_position_embeddings is {positions}", "set how many tokens it takes"
        )
    return positions


def _byte_tokenizer(model: PreTrainedModel) -> ByteTokenizer:
    vocabulary = _text_config(model).vocab_size
    if not _BYTES <= vocabulary <= ByteTokenizer.MAX_VOCABULARY:
        raise ConfigError(
            f"--tokenizer bytes needs a vocabulary of {_BYTES} to {ByteTokenizer.MAX_VOCABULARY}; "
            f"the model's has {vocabulary}"
        )
    return ByteTokenizer(vocabulary)


def _tokenizer(
    folder: Path, model: PreTrainedModel, template: Path | None, stop_ids: frozenset[int]
) -> CheckpointTokenizer:
    """
    Raises:
        ConfigError: there is none, or it or its chat template does not fit.
    """
    found = read_tokenizer(folder)
    vocabulary = _text_config(model).vocab_size
    check_vocabulary(folder, found, vocabulary)
    own = folder / "chat_template.jinja"
    file = template or (own if own.is_file() else folder / "tokenizer_config.json")
    try:
        text = None if template is None else template.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise refusal(file, error, "give --chat-template a file of text") from error
    tokenizer = CheckpointTokenizer(found, text, stop_ids)
    if (template or own.is_file()) and not (text or found.chat_template):
        raise refusal(file, "the chat template is empty", _MEND)
    if text or found.chat_template:
        _check_template(tokenizer, file, vocabulary)
    return tokenizer


_MEND = "mend it, or give another with --chat-template FILE"
_PLAIN = ({"role": "user", "content": "Hello."},)
_TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}


def _check_template(tokenizer: CheckpointTokenizer, file: Path, vocabulary: int) -> None:
    """Render a turn as a client would send it; with a tool for templates that refuse chats without one.

    Raises:
        ConfigError: the template cannot be used.
    """

    def rendered(*tools: Any) -> str:
        with bounded(), _little():
            return tokenizer.render(Conversation(_PLAIN, tools))

    try:
        try:
            text = rendered()
        except ApiError:
            text = rendered(_TOOL)
    except ApiError as error:
        cause = error.__cause__
        line = f"line {cause.lineno}: " if isinstance(cause, TemplateSyntaxError) else ""
        why = (
            str(cause) or f"one operation takes more than {_MOST_MEMORY >> 20} MiB"
        )  # a MemoryError has no words
        raise refusal(file, f"{line}the chat template renders no plain turn: {why}", _MEND) from error
    if len(text) > _MOST_TEXT:
        why = f"the chat template renders a plain turn to {len(text):,} characters"
        raise refusal(file, why, _MEND)
    tokens = tokenizer.encode_rendered(text)
    if not tokens:
        raise refusal(file, "the chat template renders a plain turn to nothing", _MEND)
    if max(tokens) >= vocabulary:
        why = f"the chat template writes token {max(tokens)}, but vocab_size of config.json is {vocabulary}"
        raise refusal(file, why, "take tokenizer and weights from one checkpoint")


@contextmanager
def _little() -> Iterator[None]:
    """Bound what single operations of a template take, such as `'x' * 10**10`: while a server starts, nothing
    else in its process needs memory.

    Raises:
        MemoryError, LongTemplateError: a template takes more memory, or time.
    """

    def end(number: int, frame: object) -> None:
        raise LongTemplateError(f"it computes for more than {_MOST_SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard, used + _MOST_MEMORY) if limit != resource.RLIM_INFINITY]
    is_main = threading.current_thread() is threading.main_thread()  # others get no signals
    handler = signal.signal(signal.SIGVTALRM, end) if is_main else None
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        # More than once: Jinja drops what is raised while it compiles constants, and computes them again.
        signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS if is_main else 0, 0.1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        if is_main:
            signal.signal(signal.SIGVTALRM, handler)


_MOST_MEMORY = 256 << 20
_MOST_SECONDS = 5  # of the processor
_MOST_TEXT = 1 << 20


def _stop_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-text tokens of the model's generation config and model config, as far as the model
    can write them."""
    configs = (model.generation_config, _text_config(model))
    named = {token for config in configs for token in _ids(getattr(config, "eos_token_id", None))}
    known = frozenset(token for token in named if 0 <= token < vocabulary_of(model))
    if named > known:
        _log.warning(
            "eos_token_id names %s, beyond the model's %d token ids: it ends no answer",
            ", ".join(map(str, sorted(named - known))),
            vocabulary_of(model),
        )
    return known


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _ids(value: Any) -> Iterator[int]:
    ids = [value] if isinstance(value, int) else value or ()
    for token in ids:
        if not isinstance(token, int):
            raise TypeError(f"eos_token_id {value!r} is no token id")
        yield token
