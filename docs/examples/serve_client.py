"""A conversation with `asynchicache serve`, by OpenAI's client: the second turn computes what is new only."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

COMMAND = [str(Path(sys.executable).parent / "asynchicache"), "serve", "--port", "0", "--threads", "1"]


@contextmanager
def server() -> Iterator[str]:
    """A server with the tiny model; yields its address, and ends with SIGTERM."""
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip()
        process.terminate()
        process.communicate()
        print(f"the server ended with status {process.returncode}")


def talk(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")
    messages = [{"role": "system", "content": "You are a small model with random weights. " * 4}]
    for question in ("What did I ask?", "And before that?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=32, temperature=0
        )
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(f"{cached} of {answer.usage.prompt_tokens} prompt tokens came from the cache")
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    stream = client.completions.create(
        model="tiny", prompt="A cache keeps ", max_tokens=16, stream=True, extra_body={"cache_salt": "mine"}
    )
    *_, last = stream
    print(f"the streamed answer ended because of its {last.choices[0].finish_reason}")
    client.close()


with server() as address:
    talk(address)
