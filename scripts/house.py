"""What `make house` runs: the size and shape of `src/asynchicache`, counted, as a table.

`house_trace.py` adds what one page's way through the cache enters, in a process of its own. `--root` counts
another checkout, so that two states of the project can be compared.
"""
# ruff: noqa: S603, T201  # it runs our own scripts, and prints for people

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "asynchicache"
PACKAGES = ("planner", "controller", "transfer", "storage", "tree")
"""Packages whose arrows are counted; one that a checkout lacks is left out."""

_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}

Imports = Mapping[str, set[str]]
"""By module: the modules of the package that it imports at module level."""


def modules_of(root: Path) -> dict[str, Path]:
    """Every module of the package by name, also those behind the links to `kernels/` and `backends/`."""
    source = root / "src"
    paths = [
        Path(folder, name)
        for folder, _, names in os.walk(source / PACKAGE, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    return {_module_name(path.relative_to(source)): path for path in sorted(paths)}


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def code_lines(source: str) -> int:
    """Lines with code on them: no blank ones, no comments, no docstrings (those of attributes included)."""
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in _NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - strings)


def imports_of(modules: Mapping[str, ast.Module]) -> Imports:
    """Imports at module level, those under `if TYPE_CHECKING` included.

    `from package import module` leads to both, because the package's `__init__` has to have run;
    `import package.module as name` leads to the module alone.
    """
    return {
        name: {found for node in _module_level(tree) for found in _imported(node, modules)} - {name}
        for name, tree in modules.items()
    }


def _module_level(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from _module_level(node)


def _imported(node: ast.AST, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return
    yield from (name for name in names if name in modules)


def circles_of(imports: Imports) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {name: _reached(name, imports) for name in imports}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, imports: Imports) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = imports[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def shared_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Names that several classes or aliases of types have, and the modules of those; `_Batch` and `Batch` are
    one name.

    Classes inside functions do not count.
    """
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in _module_level(tree):
            name = node.name if isinstance(node, ast.ClassDef) else _alias(node)
            if name:
                homes[name.lstrip("_")].append(module)
    return {name: homes[name] for name in sorted(homes) if len(homes[name]) > 1}


def _alias(node: ast.AST) -> str:
    """The name that a statement gives to a type, such as `Advance = Callable[[int], None]`; else empty."""
    match node:
        case ast.AnnAssign(target=ast.Name(name), annotation=ast.Name("TypeAlias")):
            return name
        case ast.Assign(targets=[ast.Name(name)], value=ast.Subscript()) if not name.isupper():
            return name if name.lstrip("_")[:1].isupper() else ""
    return ""


def arrows_in(package: str, imports: Imports) -> tuple[int, int]:
    """Modules of a package, and the imports among them; `__init__` modules do not count."""
    prefix = f"{PACKAGE}.{package}."
    inside = {name for name in imports if name.startswith(prefix)}
    return len(inside), sum(len(imports[name] & inside) for name in inside)


def count(root: Path, *, details: bool) -> dict[str, object]:
    """The figures of a checkout by name, in the order of the table."""
    paths = modules_of(root)
    sources = {name: path.read_text() for name, path in paths.items()}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    imports = imports_of(trees)
    circles, shared = circles_of(imports), shared_names(trees)
    figures: dict[str, object] = {
        "files": len(sources),
        "lines": sum(len(source.splitlines()) for source in sources.values()),
        "lines of code": sum(map(code_lines, sources.values())),
        "import circles": len(circles),
        "class names for two or more things": len(shared),
    }
    for package in PACKAGES:
        files, arrows = arrows_in(package, imports)
        if files:
            figures[f"{package}: modules, imports among them"] = f"{files}, {arrows}"
    if details:
        figures["circles"] = circles
        figures["shared class names"] = shared
    return figures


def trace(root: Path, *, details: bool) -> dict[str, object]:
    """What `house_trace.py` finds with the package of that checkout."""
    command = [sys.executable, str(HERE / "house_trace.py"), *(["--details"] if details else [])]
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, object] = json.loads(run.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Count the size and shape of the source.")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout to count")
    parser.add_argument("--details", action="store_true", help="also list circles, names, functions, frames")
    parser.add_argument("--no-trace", action="store_true", help="read the source only, run nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    figures = count(options.root, details=options.details)
    if not options.no_trace:
        figures |= trace(options.root, details=options.details)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if isinstance(value, dict | list):
            print(f"\n{name}:\n{json.dumps(value, indent=2)}")
        else:
            print(f"{name:44} {value}")


if __name__ == "__main__":
    main()
