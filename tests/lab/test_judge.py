"""The judge: a server of ours is right, careless ones are red, and rounding is no error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM

from asynchicache_lab.judge.caches import CACHES
from asynchicache_lab.judge.cases import CASES
from asynchicache_lab.judge.servers import Forks, JudgedAnswer, Place, Serve, Server
from asynchicache_lab.judge.trial import CacheTrial
from asynchicache_lab.judge.verdicts import References, Verdict, compare, judge, show
from integrations.serve.checkpoints import save_checkpoint

(OURS,) = (cache for cache in CACHES if cache.name == "serve")
ENGINES = Path(__file__).parents[1] / "engines"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("models")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in (*sys.path, str(ENGINES)) if path)
    }
    first = save_checkpoint(folder / "a", "llama", vocabulary=512)
    model = AutoModelForCausalLM.from_pretrained(first)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
    save_checkpoint(folder / "b", "llama", vocabulary=512)
    model.save_pretrained(folder / "b")
    return Place(Path(sys.executable), environment, "of a test", {"a": first, "b": folder / "b"})


@pytest.fixture(scope="module")
def forks(place: Place) -> Iterator[Forks]:
    with TemporaryDirectory(prefix="judge") as folder:
        forks = Forks(OURS.engine, place, Path(folder))
        yield forks
        forks.close()


def verdicts(place: Place, forks: Forks, folder: Path, cache: object, names: Sequence[str]) -> list[Verdict]:
    references = References(cache, place, forks, folder.parent / "references.json")
    cases = [case for case in CASES if case.name in names]
    return judge(CacheTrial(cache, place, forks, folder), cases, references, lambda life: None)


def test_a_server_of_ours_is_right_and_keeps_what_it_promised(
    place: Place, forks: Forks, tmp_path: Path
) -> None:
    names = ["warm", "cancelled", "tenants", "kill", "updated"]
    found = verdicts(place, forks, tmp_path, OURS, [*names, "adapter"])
    words = {each.case: each.word for each in found}
    assert words == dict.fromkeys(names, "ok") | {"adapter": "has no adapters"}
    assert all(each.served == each.promised > 0 for each in found if each.case in names), found


class Careless(Serve):
    """Forgets whose prompt it is, and takes names for weights."""

    def body(self, prompt: Sequence[int], new: int, salt: str | None, *, adapter: bool) -> tuple[str, dict]:
        return super().body(
            prompt, new, salt if salt and salt.startswith("reference") else None, adapter=False
        )

    def update(self, server: Server, model: Path) -> None:
        server.call("POST", "/update_weights", {"weight_version": "those of another model"})


def test_what_belongs_to_others_is_red_with_a_command_that_shows_it(
    place: Place, forks: Forks, tmp_path: Path
) -> None:
    """Its operator names the weights by hand, and does not change the name with them."""
    named = ('--config={"weight_version": "1", "host_bytes": "64MiB"}',)
    careless = OURS._replace(engine=Careless(), options=lambda folder: (*OURS.options(folder), *named))
    found = verdicts(place, forks, tmp_path, careless, ["tenants", "updated", "weights"])
    words = {each.case: each.word for each in found}
    assert words == {"tenants": "LEAK", "updated": "WRONG", "weights": "WRONG"}
    table = show(found, {"serve": "1"}, "judge {cache} --case {case}")
    assert "| weights | WRONG |" in table
    assert "    judge serve --case tenants" in table


def test_what_does_not_start_is_said_in_a_line(place: Place, forks: Forks, tmp_path: Path) -> None:
    broken = OURS._replace(options=lambda folder: ("--storage-option=nonsense",))
    with pytest.raises(Exception, match=r"does not start: .*nonsense"):
        verdicts(place, forks, tmp_path, broken, ["warm"])


RIGHT = JudgedAnswer(["5", "7"], [-1.0, -2.0], [{"5": -1.0, "6": -1.001}, {"7": -2.0, "8": -3.0}], 0)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "words"),
    [
        (["5", "7"], [-1.0, -2.0005], ""),
        (["6", "1"], [-1.0, -9.0], ""),  # a tie
        (["5", "8"], [-1.0, -2.0], "token 1 is 8, not 7, which leads by 1 nats"),
        (["5", "9"], [-1.0, -2.0], "leads by inf"),
        (["5", "7"], [-1.0, -2.1], "token 1 has a log probability that is off by 0.1"),
        (["5", "7"], [-1.0, float("nan")], "off by nan"),
    ],
)
def test_rounding_is_no_error(tokens: list[str], logprobs: list[float], words: str) -> None:
    found = compare(JudgedAnswer(tokens, logprobs, [], 4), RIGHT, 1e-3)
    assert words in found
    assert bool(words) == bool(found)
