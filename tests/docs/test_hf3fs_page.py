"""The page on 3FS names every option, and the defaults that it shows are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import fields

from asynchicache.backends.hf3fs.options import Hf3fsOptions

PAGE = (Path(__file__).parents[2] / "docs/howto/hf3fs.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", PAGE, re.MULTILINE))


def test_every_option_is_on_the_page_with_its_default() -> None:
    defaults = {
        "path": "required",
        "metadata": "required",
        "metadata_options": "none",
        "capacity_bytes": "1 GiB",
        "fractions": "`1.0` for each",
        "io": "`posix`",
        "buffer_bytes": "32 MiB",
    }
    options = Hf3fsOptions(Path("/3fs"), metadata="/var/names")
    for field in fields(Hf3fsOptions):
        value = getattr(options, field.name)
        shown = f"`{str(value).lower()}`" if isinstance(value, bool) else f"{value:g}" if value == 5 else None
        assert ROWS[field.name] == defaults.get(field.name, shown or str(value))
