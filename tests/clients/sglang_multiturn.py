"""Conversations in rounds, sent and read by SGLang's own functions; prints what they tell of answers as JSON.

`bench_multiturn.py --api-format openai --enable-round-barrier` is a loop around these functions. They are in
SGLang's wheel, the script itself is in no package.

Usage: sglang_multiturn.py URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from sglang.benchmark.utils import get_tokenizer
from sglang.test.kits.cache_hit_kit import async_request_openai_chat_completions, gen_payload_openai

CLIENTS, ROUNDS, REQUEST, OUTPUT = 4, 3, 48, 8


async def converse(url: str, model: str) -> list[list[dict[str, Any]]]:
    tokenizer = get_tokenizer(model)

    def question(client: int, turn: int) -> dict[str, str]:
        begin = 7 * client + 31 * turn
        return {"role": "user", "content": tokenizer.decode([(begin + n) % 200 + 20 for n in range(REQUEST)])}

    async def ask(messages: list[dict[str, str]]) -> Any:
        payload = gen_payload_openai(messages, OUTPUT, model)
        return await async_request_openai_chat_completions(payload, f"{url}/v1/chat/completions")

    told: list[list[dict[str, Any]]] = []
    histories: list[list[dict[str, str]]] = [[] for _ in range(CLIENTS)]
    for turn in range(ROUNDS):
        for client, history in enumerate(histories):
            history.append(question(client, turn))
        answers = await asyncio.gather(*map(ask, histories))
        for history, answer in zip(histories, answers, strict=True):
            history.append({"role": "assistant", "content": answer.generated_text})
        names = ("success", "error", "prompt_len", "cached_tokens", "generated_len")
        told.append([{name: getattr(answer, name) for name in names} for answer in answers])
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(converse(*sys.argv[1:]))))
