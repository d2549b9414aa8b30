"""The source of what is shipped, read, parsed and walked once for all tests of the house."""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

parse = cache(ast.parse)


@cache
def shipped(package: Path) -> dict[Path, str]:
    """The source of each module of a package, also behind the links to kernels and backends, each once."""
    return {
        Path(folder, name): Path(folder, name).read_text("utf-8")
        for folder, _, names in os.walk(package, followlinks=True)
        for name in sorted(names)
        if name.endswith(".py")
    }


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))
