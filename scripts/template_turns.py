"""What `python scripts/template_turns.py FOLDER...` prints: chats of ten turns over every chat template found
there, and what the prompt of each turn hit, with models of attention, of windows, and with states.

A prompt loses if it hits less than the whole pages, or with tails the tokens, that it has in common with the
prompt before. The server's own wrapper of tokenizers renders the chats, and says how much will be repeated;
an engine without a model fills the pages. It fails if a prompt loses, or if pages that a state or window
holds back are not explained by the template.
"""
# ruff: noqa: T201  # it prints for people

from __future__ import annotations

import argparse
import asyncio
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from asynchicache import CacheConfig, CacheHint, Coverage, HybridCache, ModelSpec, PoolSpec, TensorSpec
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.serve.tokenizers import CheckpointTokenizer, Conversation

ROOT = Path(__file__).parents[1]
TURNS = 10
WINDOW = 96
INVITATION = 16  # tokens; a template that does not repeat more of a prompt's end rewrites history
PAGES = (16, 64)
_TURN = "{% for m in messages %}<|{{ m.role }}|>"
_INVITE = "{% if add_generation_prompt %}<|assistant|>"
CARRIED: Mapping[str, str] = {
    "repeats all": _TURN + "{{ m.content }}<|end|>{% endfor %}" + _INVITE + "{% endif %}",
    "does not think": _TURN + "{{ m.content }}<|end|>{% endfor %}" + _INVITE + "<think></think>{% endif %}",
    "begins to think, and forgets it": _TURN
    + "{{ m.content }}<|end|>{% endfor %}"
    + _INVITE
    + "<think>\n{% endif %}",
    "reminds in the last message": _TURN
    + "{{ m.content }}{% if loop.last %} Be brief.{% endif %}<|end|>{% endfor %}"
    + _INVITE
    + "{% endif %}",
}
"""Templates for where none is found."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "What an article costs.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "string"}},
            "required": ["number"],
        },
    },
}


# Chats


def chats(kind: str, number: int) -> Iterator[tuple[Conversation, str]]:
    """A conversation before each answer, and the answer. The first question has `number` more words."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"Chat {number}. You sell bicycles, and look up what they cost."}
    ]
    for turn in range(TURNS):
        more = " please" * (number if turn == 0 else turn)
        messages.append({"role": "user", "content": f"What does article {turn * 37} cost in Delft{more}?"})
        messages += _answered(kind, turn)
    variables = {"enable_thinking": False} if kind == "nothink" else {}
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            conversation = Conversation(messages[:index], [_TOOL] if kind == "tools" else [], variables)
            yield conversation, message["content"]


def _answered(kind: str, turn: int) -> Iterator[dict[str, Any]]:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": f"It costs {turn * 111} euros, and is in stock.",
    }
    if kind == "thoughts":
        answer["reasoning_content"] = f"They want the price of {turn * 37}. I look it up."
    if kind == "tools":
        name = f"call{turn:05d}"
        function = {"name": "price", "arguments": {"number": str(turn * 37)}}
        called = [{"id": name, "type": "function", "function": function}]
        yield {"role": "assistant", "content": "", "tool_calls": called}
        yield {"role": "tool", "tool_call_id": name, "name": "price", "content": f"{turn * 111}"}
    yield answer


KINDS = ("plain", "thoughts", "nothink", "tools")


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, what the server says of its repetition, and the answer."""

    prompt: Sequence[int]
    repeats: tuple[int, ...]
    answer: Sequence[int]


def render(tokenizer: CheckpointTokenizer, kind: str, number: int) -> list[Turn]:
    """
    Raises:
        ApiError: the template refuses the chat.
    """
    turns = []
    for conversation, text in chats(kind, number):
        prompt = tokenizer.encode_chat(conversation)
        turns.append(Turn(prompt, tokenizer.repeated(conversation, prompt), tokenizer.encode(text)))
    return turns


# Tokenizers and templates


def templates(folders: Sequence[Path]) -> dict[str, str]:
    """Chat templates in folders by name: files `*.jinja` that read `messages`, each text once."""
    found: dict[str, str] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.jinja")):
            text = file.read_text("utf-8", "replace")
            if "messages" in text and text not in found.values():
                found[file.stem] = text
    return found | CARRIED


def trained() -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    """Three kinds of tokenizer, trained on the documentation."""
    texts = [file.read_text("utf-8") for file in sorted((ROOT / "docs").rglob("*.md"))]
    marks = [
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<think>",
        "</think>",
        "<|im_start|>",
        "<|im_end|>",
        "[INST]",
    ]
    for name, size in (("bytes", 4000), ("words", 8000), ("digits", 2000)):
        tokenizer = Tokenizer(models.BPE(byte_fallback=name == "words"))
        if name == "words":  # as Llama 2 and Gemma
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
            tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
            alphabet, special = [], [f"<0x{byte:02X}>" for byte in range(256)]
        else:
            splits = [pre_tokenizers.Digits(individual_digits=True)] if name == "digits" else []
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(False)])
            tokenizer.decoder = decoders.ByteLevel()
            alphabet, special = pre_tokenizers.ByteLevel.alphabet(), []
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=alphabet,
            special_tokens=[*special, *marks],
            show_progress=False,
            max_token_length=16,
        )
        tokenizer.train_from_iterator(texts, trainer)
        yield name, PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# An engine without a model


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of model, and a page size."""

    pools: str
    page: int
    tails: bool

    def __str__(self) -> str:
        return f"{self.pools}, pages of {self.page}{', tails' if self.tails else ''}"

    @property
    def exact(self) -> bool:
        """Whether a hit may end inside a page wherever prompts part."""
        return self.tails and self.pools != "window"

    def spec(self) -> ModelSpec:
        pools = [PoolSpec("kv", (TensorSpec("keys", (0,), (1,), "int8"),))]
        if self.pools == "window":
            swa = TensorSpec("keys", (1,), (1,), "int8")
            pools.append(PoolSpec("swa", (swa,), coverage=Coverage(-(-(WINDOW - 1) // self.page))))
        if self.pools == "hybrid":
            state = TensorSpec("state", (1,), (1,), "int8")
            pools.append(PoolSpec("mamba", (state,), coverage=Coverage(1), per_token=False))
        return ModelSpec(self.pools, self.page, 1 + (len(pools) > 1), tuple(pools))


CELLS = [
    Cell(pools, page, tails)
    for tails in (False, True)
    for pools in ("dense", "window", "hybrid")
    for page in PAGES
]


@dataclass(slots=True)
class Found:
    """What the turns of a cell hit."""

    turns: int = 0
    cached: int = 0
    prompt: int = 0
    lost: int = 0
    rewritten: int = 0
    unnamed: int = 0

    def add(self, other: Found) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


async def serve(cache: HybridCache, cell: Cell, turns: Sequence[Turn], salt: str) -> Found:
    found = Found()
    for number, turn in enumerate(turns):
        prompt, size = turn.prompt, cell.page
        hint = CacheHint(repeats=turn.repeats if cell.pools == "hybrid" else ())
        async with cache.request(prompt, salt=salt, hint=hint) as request:
            await request.load()
            hit = request.hit
            if number:
                before = turns[number - 1]
                same = min(common(before.prompt, prompt), len(prompt) - 1)
                found.turns += 1
                found.cached += hit.tokens
                found.prompt += len(prompt)
                found.lost += hit.tokens < (same if cell.exact else same - same % size)
                found.rewritten += same < len(before.prompt) - INVITATION
                found.unnamed += hit.tokens < hit.full_tokens and "template" not in hit.advice
            done = hit.tokens
            for end in sorted({*request.cuts, len(prompt)}):
                request.extend(end - done)
                await request.checkpoint(end)
                done = end
            if turn.answer:  # a call has no text
                request.extend(len(turn.answer))
                request.append(turn.answer)
            await request.checkpoint(len(prompt) + len(turn.answer), final=True)
    return found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


async def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = [Path(sysconfig.get_path("purelib")), ROOT / ".engines"]
    parser.add_argument("folders", nargs="*", type=Path, default=default, help="where templates are")
    parser.add_argument(
        "--tokenizer", action="append", type=Path, default=[], help="a folder; may be repeated"
    )
    parser.add_argument("--lengths", type=int, default=4, help="first questions of so many lengths")
    parser.add_argument("--vocabularies", type=int, default=3, help="without a folder: train so many")
    options = parser.parse_args(arguments)
    texts = templates([folder for folder in options.folders if folder.is_dir()])
    found_tokenizers = [(path.name, AutoTokenizer.from_pretrained(path)) for path in options.tokenizer]
    bad = 0
    for name, tokenizer in found_tokenizers or islice(trained(), options.vocabularies):
        rendered: dict[str, list[Turn]] = {}
        skipped: dict[str, list[str]] = {}
        for template, text in texts.items():
            wrapper = CheckpointTokenizer(tokenizer, text)
            for kind in KINDS:
                try:
                    for number in range(options.lengths):
                        rendered[f"{template} {kind} {number}"] = render(wrapper, kind, number)
                except ApiError as error:
                    skipped.setdefault(template, []).append(f"{kind} ({str(error)[:60]})")
        print(f"tokenizer {name}: {len(texts)} templates, {len(rendered)} chats of {TURNS} turns")
        for template, kinds in skipped.items():
            if len(kinds) == len(KINDS):
                print(f"  skipped: {template}: {kinds[0]}")
        for cell in CELLS:
            total = Found()
            slots = {pool.name: 60_000 for pool in cell.spec().pools}
            async with HybridCache.open(
                cell.spec(), CacheConfig(device_slots=slots, tails=cell.tails, host_ratio=0)
            ) as cache:
                for salt, turns in rendered.items():
                    one = await serve(cache, cell, turns, salt)
                    total.add(one)
                    if one.lost or one.unnamed:
                        print(
                            f"  {cell}: {salt}: {one.lost} turns lost, {one.unnamed} reasons name no template"
                        )
            print(
                f"  {cell}: {total.turns} prompts, {total.cached / max(total.prompt, 1):.1%} cached, "
                f"{total.lost} lost, {total.rewritten} with another history"
            )
            bad += total.lost + total.unnamed
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
