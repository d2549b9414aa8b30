"""Options that several backends have alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from asynchicache.backends.file.backend import FileOptions
from asynchicache.backends.hf3fs.options import Hf3fsOptions
from asynchicache.errors import ConfigError

KINDS = pytest.mark.parametrize("kind", [FileOptions, Hf3fsOptions])


@KINDS
@pytest.mark.parametrize(
    ("written", "meant"), [("~/pages", "{home}/pages"), ("./~/pages", "~/pages"), ("a/~", "a/~")]
)
def test_a_path_begins_at_home_where_it_says_so(
    kind: type[FileOptions | Hf3fsOptions],
    written: str,
    meant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    more = {"metadata": "/var/names"} if kind is Hf3fsOptions else {}
    assert kind.of({"path": written, **more}).path == Path(meant.format(home=tmp_path))


@KINDS
def test_the_home_of_nobody_is_refused(kind: type[FileOptions | Hf3fsOptions]) -> None:
    with pytest.raises(ConfigError, match=r"path='~no-such-user/pages' begins with the home of a user"):
        kind.of({"path": "~no-such-user/pages"})
