"""Whether what commands show to people can be read in 80 columns."""

import re
from collections import Counter
from io import StringIO

from rich.console import Console, RenderableType


def shown(view: RenderableType, width: int) -> list[str]:
    written = StringIO()
    Console(file=written, width=width).print(view)
    return written.getvalue().splitlines()


def letters(lines: list[str]) -> Counter[str]:
    """All but what tables are drawn with: a long path may be folded, but no letter of it is lost."""
    return Counter(re.sub(r"[\s\u2500-\u257f]", "", "".join(lines)))


def figures(lines: list[str]) -> Counter[str]:
    """Cells that begin with a digit, whole: a number and its unit."""
    cells = (cell.strip() for line in lines for cell in re.split("[│┃]|  +", line))
    return Counter(cell for cell in cells if re.match(r"\d[\d.,]*( [KM]?i?B| us| ms|%|$)", cell))


def assert_readable(view: RenderableType) -> None:
    narrow, wide = shown(view, 80), shown(view, 400)
    assert [line for line in narrow if "…" in line or len(line) > 80] == []
    assert letters(narrow) == letters(wide)
    assert not figures(wide) - figures(narrow)
