"""Calls of the `openai` package, sync and async; prints what they gave. Runs where the clients are installed.

Usage: openai_calls.py URL
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI, OpenAI, OpenAIError

CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "a cache keeps what a model has computed"}],
    "max_tokens": 8,
    "temperature": 1,
    "seed": 4,
    "extra_body": {"ignore_eos": True},
}
SEEN = {"type": "object", "properties": {"at": {"enum": ["sky"]}}, "required": ["at"]}
SEEN |= {"additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SEEN}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["page", "state"]}}}


def calls(client: OpenAI) -> dict[str, Callable[[], object]]:
    chat, completions = client.chat.completions, client.completions

    def text(**options: Any) -> list[str | None]:
        return [choice.message.content for choice in chat.create(**CHAT | options).choices]

    def completed(**options: Any) -> list[str]:
        return [choice.text for choice in completions.create(model="model", **options).choices]

    def called() -> list[str]:
        options: Any = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        (call,) = chat.create(**CHAT | options).choices[0].message.tool_calls or ()
        return [call.function.name, call.function.arguments]

    def streamed() -> list[str]:
        parts = ["", ""]
        for chunk in chat.create(**CHAT, n=2, stream=True):
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
        return parts

    def scores() -> list[float]:
        told = chat.create(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert told is not None
        return [one.logprob for one in told.content or ()]

    return {
        "whole": text,
        "again": text,
        "n": lambda: text(n=2),
        "streamed": streamed,
        "stop": lambda: chat.create(**CHAT, stop=[(text()[0] or "")[3:5]]).choices[0].finish_reason,
        "tools": lambda: len(text(tools=[TOOL], tool_choice="auto")),
        "logprobs": scores,
        "prompts": lambda: completed(prompt=["a", [5, 6]], max_tokens=2),
        "echo": lambda: completed(prompt="a cache", max_tokens=0, echo=True),
        "json_schema": lambda: text(response_format=SCHEMA),
        "tool_choice": called,
    }


async def together(url: str) -> list[str | None]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(4)))
        return [answer.choices[0].message.content for answer in answers]


def main(url: str) -> None:
    given: dict[str, object] = {"async": asyncio.run(together(url))}
    for name, call in calls(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)).items():
        try:
            given[name] = call()
        except OpenAIError as error:
            given[name] = f"refused: {error}"
    print(json.dumps(given))


if __name__ == "__main__":
    main(sys.argv[1])
