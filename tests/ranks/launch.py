"""Scripts of this folder as processes of their own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


async def launch(
    script: str, *arguments: str, piped: bool = False, quiet: bool = False
) -> asyncio.subprocess.Process:
    """Start a script; `piped`: with pipes to its standard input and output; `quiet`: without its errors."""
    pipe = asyncio.subprocess.PIPE if piped else None
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name(script)),
        *arguments,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.DEVNULL if quiet else None,
        env={
            "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}",
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
    )
