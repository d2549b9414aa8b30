"""Rolling upgrades: the last release and this version use one store at the same time, in two processes.

Neither reads the other's pages wrongly, both serve, and what one removes is its own.

The release comes from the history of this repository: its source is what its wheel holds.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from storage.redis_servers import RedisServer, redis_at

ROOT = Path(__file__).parents[2]
if not (ROOT / ".git").exists():
    pytest.skip("no git history here, from which the last release comes", allow_module_level=True)

pytestmark = [pytest.mark.engine("redis"), pytest.mark.engine("object")]

PROMPT = list(range(100, 120))
NEXT = [*PROMPT, 1]
STORED = {"STORAGE": len(PROMPT)}
REFUSED = re.compile(r"StorageFormatError: .* format (\d+); this version reads format (\d+)")


def git(*words: str) -> bytes:
    # A checkout of another user is fine: nothing of it is run but what this test names.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def released(folder: Path) -> str:
    """Unpack the last release of the changelog; its version."""
    found = re.search(r"^## (\d\S*) ", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    version = found[1]
    commits = git("tag", "--list", f"v{version}").decode().split()
    commits += git("log", "--format=%H", f"-S## {version} ", "--", "CHANGELOG.md").decode().split()[-1:]
    if not commits:
        pytest.skip(f"this clone's history does not reach back to {version}")
    packed = git("archive", commits[0], "src", "backends", "kernels", "tests/cache/engine.py")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return version


class Peer:
    """A process that runs `version_peer.py` with one version."""

    def __init__(self, root: Path) -> None:
        path = os.pathsep.join([str(root / "src"), str(root / "tests")])
        self._process = subprocess.Popen(
            [sys.executable, "-P", ROOT / "tests/storage/version_peer.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, verb: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([verb, *arguments]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def open(self, name: str, options: dict[str, Any]) -> None:
        assert self.ask("open", name, options) is None

    def serve(self, name: str, tokens: list[int] = PROMPT) -> dict[str, int]:
        """Hit tokens by tier; the process fails unless all bytes are right."""
        found = self.ask("serve", name, tokens)
        assert isinstance(found, dict), found
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0

    def kill(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Peer, Peer]]:
    """The last release, and this version."""
    folder = tmp_path_factory.mktemp("release")
    version = released(folder)
    with ExitStack() as stack:
        peers = Peer(folder), Peer(ROOT)
        for peer in peers:
            stack.callback(peer.kill)
        old, new = [peer.ask("source") for peer in peers]
        assert Path(old).is_relative_to(folder), f"{version} is not what runs"
        assert Path(new).is_relative_to(ROOT)
        yield peers
        for peer in peers:
            peer.close()


class Folders:
    """Stores in folders: of files, or of objects."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder

    def words(self, name: str) -> list[str]:
        """What names the store on the command line."""
        return [f"{self._folder / name}" if self._kind == "file" else f"file://{self._folder / name}"]

    def options(self, name: str) -> dict[str, Any]:
        option = "path" if self._kind == "file" else "url"
        return {"storage": self._kind, "storage_options": {option: self.words(name)[0]}}

    def content(self, name: str) -> dict[str, bytes]:
        files = (path for path in (self._folder / name).rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    def format(self, name: str) -> bytes:
        return (self._folder / name / "FORMAT").read_bytes()

    def forget_format(self, name: str) -> None:
        (self._folder / name / "FORMAT").unlink()


class Namespaces:
    """Stores in one Redis server."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._client = redis_at(server)

    def words(self, name: str) -> list[str]:
        return [self._server.url, "--option", f"namespace={name}"]

    def options(self, name: str) -> dict[str, Any]:
        return {"storage": "redis", "storage_options": {"url": self._server.url, "namespace": name}}

    def content(self, name: str) -> dict[str, bytes]:
        return {key.decode(): self._client.get(key) for key in self._client.scan_iter(f"{name}:*")}

    def format(self, name: str) -> bytes:
        return self._client.get(f"{name}:FORMAT")

    def forget_format(self, name: str) -> None:
        self._client.delete(f"{name}:FORMAT")


Stores = Folders | Namespaces


@pytest.fixture(params=["file", "object", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    if request.param != "redis":
        yield Folders(request.param, tmp_path)
        return
    with RedisServer(tmp_path) as server:
        yield Namespaces(server)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["release first", "this version first"])
def test_a_store_of_another_format_is_refused_unharmed_and_both_serve_side_by_side(
    versions: tuple[Peer, Peer], stores: Stores, order: tuple[int, int]
) -> None:
    first, second = (versions[number] for number in order)
    first.open("one", stores.options("one"))
    first.serve("one")
    first.ask("close", "one")
    second.open("two", stores.options("two"))
    before = stores.content("one")
    if stores.format("one") != stores.format("two"):
        check_refused(second, stores)
        assert stores.content("one") == before
    else:
        second.open("one", stores.options("one"))
        assert second.serve("one", NEXT) == STORED
        second.ask("close", "one")

    first.open("one", stores.options("one"))
    assert first.serve("one", NEXT) == STORED
    for start in range(200, 260, 20):
        prompt = list(range(start, start + len(PROMPT)))
        assert first.serve("one", prompt) == {}
        assert second.serve("two", [*prompt, 1]) == {}
    first.ask("close", "one")
    before = stores.content("one")
    assert second.ask("clear", "two") > 0
    second.ask("close", "two")
    assert stores.content("one") == before
    first.open("one", stores.options("one"))
    assert first.serve("one", NEXT) == STORED
    first.ask("close", "one")


def check_refused(peer: Peer, stores: Stores) -> None:
    found = REFUSED.match(peer.ask("open", "one", stores.options("one")))
    assert found is not None
    assert found[1] != found[2]
    for verb, *flags in (["ls"], ["verify"], ["verify", "--repair"], ["gc"], ["clear", "--everything"]):
        code, said = peer.ask("command", verb, *stores.words("one"), *flags)
        assert code != 0, said


def pages_in(stores: Stores) -> set[str]:
    return {name for name in stores.content("mixed") if "label" not in name}


@pytest.mark.parametrize("stores", ["object", "redis"], indirect=True)
def test_pages_of_both_in_one_place_are_never_taken_for_each_other(
    versions: tuple[Peer, Peer], stores: Stores
) -> None:
    """Its format was forgotten: Redis was full, or a rule deleted what was old."""
    formats = []
    for peer in versions:
        for name in ("writer", "reader"):
            peer.open(name, stores.options("mixed"))
        formats.append(stores.format("mixed"))
        stores.forget_format("mixed")

    apart = len(set(formats)) > 1
    for start in range(100, 180, 20):
        prompt = list(range(start, start + len(PROMPT)))
        first, second = versions if start % 40 else versions[::-1]
        assert first.serve("writer", prompt) == {}
        assert second.serve("writer", [*prompt, 1]) == ({} if apart else STORED)
        second.serve("writer", prompt)
        assert [peer.serve("reader", [*prompt, 2]) for peer in versions] == [STORED, STORED]

    if apart:
        both = pages_in(stores)
        assert versions[1].ask("clear", "writer") > 0
        left = pages_in(stores)
        assert left < both
        assert versions[0].ask("clear", "writer") == len(left) > 0
        assert not pages_in(stores)
    for peer in versions:
        assert peer.serve("writer", [7] * 20) == {}
        assert peer.serve("reader", [7] * 21) == STORED
        for name in ("writer", "reader"):
            peer.ask("close", name)
