"""Other people's clients, unchanged: every request is answered, and what they report is true."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integrations.serve.checkpoints import ending_as_its_tokenizer, save_checkpoint

CLIENTS = json.loads(Path(os.environ["ASYNCHICACHE_CLIENTS"]).read_text())
HERE = Path(__file__).parent
TOKEN = "the-token-of-an-operator"
SECONDS = 400
MEMORY = '{"device_bytes": "64MiB", "host_bytes": "128MiB"}'


class Served(NamedTuple):
    """A server in a process of its own.

    Attributes:
        url: where it listens.
        model: the checkpoint's folder, which benchmarks send as the model's name.
    """

    url: str
    model: Path

    def counted(self, kind: str) -> int:
        """Tokens of answered requests so far, from `/metrics`."""
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        found = re.search(rf'^asynchicache_serve_tokens_total{{kind="{kind}"}} (\S+)$', text, re.MULTILINE)
        assert found, text
        return int(float(found[1]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = ending_as_its_tokenizer(save_checkpoint(tmp_path_factory.mktemp("served") / "model"))
    # Greedy by default: a client takes an answer for rejected if its first token, by chance, ends the text.
    defaults = folder / "generation_config.json"
    defaults.write_text(json.dumps(json.loads(defaults.read_text()) | {"temperature": 0.001}))
    return folder


@contextmanager
def serving(model: Path, *flags: str | Path) -> Iterator[Served]:
    """A server that is killed at the end, with whatever it has not written."""
    command = [
        *(sys.executable, "-m", "asynchicache", "serve", "--model", model),
        *("--port", "0", "--config", MEMORY, *flags),
    ]
    environment = os.environ | {"ASYNCHICACHE_ADMIN_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Served(process.stdout.readline().split()[-1], model)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model) as server:
        yield server


def ran(client: str, arguments: Sequence[str | Path], where: Path, **variables: str) -> str:
    """What a client of an environment prints; it must end with 0."""
    found = CLIENTS[client]
    done = subprocess.run(
        [found["python"], *arguments],
        env=found["environment"] | variables,
        cwd=where,
        timeout=SECONDS,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def number(name: str, output: str) -> float:
    found = re.search(rf"^\s*{re.escape(name)}:?\s+([\d.]+)", output, re.MULTILINE)
    assert found, output
    return float(found[1])


VLLM_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""The script `vllm` of the build for CPUs does not start: it looks for metadata of another name."""


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_vllm_bench_serve_with_logprobs(served: Served, tmp_path: Path, backend: str, endpoint: str) -> None:
    flags = (
        f"--backend {backend} --base-url {served.url} --endpoint {endpoint} --model {served.model} "
        "--dataset-name random --random-input-len 64 --random-output-len 8 --num-prompts 4 --logprobs 3 "
        "--ignore-eos"
    )
    output = ran("vllm", ["-c", VLLM_BENCH_SERVE, *flags.split()], tmp_path)
    assert number("Successful requests", output) == 4
    assert number("Failed requests", output) == 0
    assert number("Total generated tokens", output) == 32


@pytest.mark.parametrize("backend", ["sglang-oai", "sglang-oai-chat"])
def test_sglang_bench_serving_reports_what_was_cached(served: Served, tmp_path: Path, backend: str) -> None:
    before = served.counted("cached")
    command = (
        f"-m sglang.bench_serving --backend {backend} --base-url {served.url} --model {served.model} "
        "--dataset-name generated-shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 3 "
        "--gsp-system-prompt-len 64 --gsp-question-len 16 --gsp-output-len 6 --max-concurrency 1 "
        "--cache-report"
    )
    output = ran("sglang", command.split(), tmp_path)
    assert number("Successful requests", output) == 6
    reported = number("Total cached tokens", output)
    assert 0 < reported <= served.counted("cached") - before, "its warm-up is no part of the report"
    assert number("Device", output) == reported


def test_sglang_conversations_in_rounds(served: Served, tmp_path: Path) -> None:
    before = served.counted("cached")
    output = ran("sglang", [HERE / "sglang_multiturn.py", served.url, served.model], tmp_path)
    turns = json.loads(output.splitlines()[-1])
    for answer in chain.from_iterable(turns):
        assert (answer["success"], answer["error"], answer["generated_len"]) == (True, "", 8), answer
    for earlier, later in pairwise(turns):
        for was, now in zip(earlier, later, strict=True):
            assert was["cached_tokens"] < now["cached_tokens"] <= now["prompt_len"]
    told = sum(answer["cached_tokens"] for answer in chain.from_iterable(turns))
    assert told == served.counted("cached") - before


@pytest.mark.parametrize("flags", ["", "--send-conversation-id"])
def test_vllm_benchmark_serving_multi_turn(served: Served, tmp_path: Path, flags: str) -> None:
    """Conversations as people shared them: what the model answers is not what the next turn repeats."""
    told = "a cache keeps what a model has computed, and brings it back before it is needed"
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}: {told}"} for n in range(6)]
    names = [f"conversation-{n}{flags}" for n in range(3)]
    given = [{"id": name, "messages": [{"role": "user", "content": name}, *turns[1:]]} for name in names]
    (tmp_path / "given.json").write_text(json.dumps(given))
    command = (
        f"{CLIENTS['multi_turn']} --input-file given.json --model {served.model} --url {served.url} "
        f"--num-clients 2 --limit-min-tokens 6 --limit-max-tokens 6 --no-early-stop "
        f"--stats-json-output told.json {flags}"
    )
    before = served.counted("cached")
    output = ran("vllm", command.split(), tmp_path)
    requests = json.loads((tmp_path / "told.json").read_text())
    assert sorted((each["conversation_id"], each["input_num_turns"]) for each in requests) == sorted(
        (name, length) for name in names for length in (1, 3, 5)
    ), output
    assert served.counted("cached") > before


def test_multi_round_qa_before_and_after_a_kill(model: Path, tmp_path: Path) -> None:
    """The script of vLLM's production-stack and LMCache; what it asks again after SIGKILL is in the store."""
    load = (
        f"{CLIENTS['multi_round_qa']} --model {model} --num-users 3 --num-rounds 3 --qps 3 --time 8 "
        "--shared-system-prompt 100 --user-history-prompt 60 --answer-len 8 --request-with-user-id"
    )
    cached = []
    for run in ("first", "again"):
        with serving(model, "--storage-path", tmp_path / "pages") as server:
            flags = f"--base-url {server.url}/v1 --output {run}.csv"
            output = ran("packages", [*load.split(), *flags.split()], tmp_path)
            cached.append(server.counted("cached") / server.counted("prompt"))
        with (tmp_path / f"{run}.csv").open() as table:
            answers = list(csv.DictReader(table))
        assert len(answers) > 3, output
        assert {float(answer["generation_tokens"]) for answer in answers} == {8.0}
    assert cached[0] < 0.9 < cached[1], cached


def test_what_sglang_bench_multiturn_does_between_its_rates(served: Served, tmp_path: Path) -> None:
    """It posts to /flush_cache by `requests`, which takes the token from ~/.netrc."""
    ask = {"prompt": "a cache keeps what a model has computed " * 4, "max_tokens": 1}
    host = served.url.removeprefix("http://").partition(":")[0]
    (tmp_path / ".netrc").write_text(f"machine {host} login operator password {TOKEN}")
    call = f"import requests; print(requests.post('{served.url}/flush_cache').status_code)"
    hits = []
    for _ in range(2):
        for _ in range(2):
            answer = requests.post(f"{served.url}/v1/completions", json=ask, timeout=60).json()
            hits.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert ran("packages", ["-c", call], tmp_path, HOME=str(tmp_path)).split()[-1] == "200"
    assert hits[0] == hits[2] == 0
    assert hits[1] == hits[3] > 0


def test_lm_eval_scores_choices_as_the_model_does(served: Served, tmp_path: Path) -> None:
    """Several prompts a request, with the scores of their tokens."""
    choices = ["a model has computed", "and brings it back", "before it is needed"]
    questions = [{"question": f"a cache keeps what {n}", "choices": choices, "answer": n} for n in range(3)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "tiny.yaml").write_text(
        f"task: tiny\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/questions.jsonl}}\n"
        'test_split: train\noutput_type: multiple_choice\ndoc_to_text: "{{question}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n'
    )
    model_args = (
        f"model={served.model},base_url={served.url}/v1/completions,tokenizer={served.model},"
        "tokenizer_backend=huggingface,num_concurrent=1,max_retries=1"
    )
    command = (
        f"-m lm_eval run --model local-completions --model_args {model_args} --tasks tiny --batch_size 4 "
        f"--include_path {tmp_path} --log_samples --output_path {tmp_path}/out"
    )
    ran("packages", command.split(), tmp_path, HF_HOME=str(tmp_path))
    (log,) = (tmp_path / "out").rglob("samples_tiny_*.jsonl")
    model = AutoModelForCausalLM.from_pretrained(served.model)
    for sample in map(json.loads, log.read_text().splitlines()):
        for choice, ((told, _),) in zip(choices, sample["resps"], strict=True):
            assert float(told) == pytest.approx(
                likelihood(model, served.model, sample["doc"]["question"], f" {choice}"), abs=1e-2
            )


def likelihood(model: torch.nn.Module, folder: Path, context: str, continuation: str) -> float:
    """What transformers alone says."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens, begin = tokenizer(context + continuation)["input_ids"], len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(float(rows[place - 1, tokens[place]]) for place in range(begin, len(tokens)))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(served: Served, tmp_path: Path, path: str) -> None:
    command = (
        f"-m guidellm run --backend kind=openai_http,target={served.url},request_format={path} "
        f"--tokenizer kind=huggingface_auto,model={served.model} --profile kind=synchronous "
        "--data kind=synthetic_text,prompt_tokens=64,output_tokens=8 --constraint kind=max_requests,count=4 "
        "--output kind=json,path=result.json --disable-progress"
    )
    ran("packages", command.split(), tmp_path)
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0)


def test_openai_sync_and_async(served: Served, tmp_path: Path) -> None:
    given = json.loads(ran("packages", [HERE / "openai_calls.py", served.url], tmp_path).splitlines()[-1])
    (whole,) = given["whole"]
    assert given["again"] == [whole]
    assert given["async"] == [whole] * 4
    assert given["n"] == given["streamed"]
    assert given["n"][0] == whole != given["n"][1]
    assert given["stop"] == "stop"
    assert (given["tools"], len(given["prompts"]), given["echo"]) == (1, 2, ["a cache"])
    assert len(given["logprobs"]) == 8
    assert given["json_schema"][0] in {'"page"', '"state"'}
    assert given["tool_choice"] == ["look", '{"at":"sky"}']
