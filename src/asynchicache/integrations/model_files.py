"""What the files of models and adapters hold, as names for keys: a folder keeps its name when it is trained
again, and copies on other machines have other times.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIGS = ("*config.json",)
_BLOCK, _SAMPLES = 4096, 1024  # about 4 MiB of a file whose tensors are not known
_WHOLE = 4 * _BLOCK  # a smaller tensor is read as a whole
_MAX_HEADER = 100 << 20  # of safetensors


def checkpoint_digest(folder: Path) -> str:
    """Identify the weights and the configuration in a folder; empty if there are none.

    Reading whole files would take minutes for large models, so a block of each tensor is read: training
    changes numbers all over a tensor.
    """
    found = [(file.name, file.stat().st_size, _sample(file)) for file in _files(folder, _WEIGHTS)]
    configs = [(file.name, _whole(file)) for file in _files(folder, _CONFIGS)]
    return hashlib.sha256(json.dumps([found, configs]).encode()).hexdigest()[:32] if found else ""


def adapter_digest(folder: Path) -> str:
    """Identify an adapter by all bytes of its weights and its configuration; empty if there are none."""
    files = [*_files(folder, _WEIGHTS), *_files(folder, _CONFIGS)]
    found = [(file.name, _whole(file)) for file in files]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32] if found else ""


def file_states(folder: Path) -> list[tuple[str, int, int, int, int]]:
    """What changes when a file of `adapter_digest` is written or replaced: name, size, times, inode."""
    stats = [(file.name, file.stat()) for file in [*_files(folder, _WEIGHTS), *_files(folder, _CONFIGS)]]
    return [(name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for name, one in stats]


def local_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a model or an adapter; None if it is not on this machine.

    Args:
        name: a folder, or the name of a repository that was downloaded.
        revision: of the repository.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # its own errors are of these kinds
        return None


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


def _whole(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _sample(file: Path) -> str:
    """Digest a block of each tensor; if the file does not say where they are, blocks spread over it."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        for start, length in _tensors(file) or _spread(file.stat().st_size):
            data.seek(start)
            digest.update(data.read(length))
    return digest.hexdigest()


def _spread(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, max(_BLOCK, size // _SAMPLES)):
        yield start, _BLOCK


def _tensors(file: Path) -> list[tuple[int, int]]:
    """Where to read: the header of a safetensors file, and a block in the middle of each of its tensors."""
    if file.suffix != ".safetensors":
        return []
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        if not 0 < length < min(_MAX_HEADER, file.stat().st_size):
            return []
        try:
            header = json.loads(data.read(length))
            spans = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
            return [(0, 8 + length), *(_block(8 + length + begin, end - begin) for begin, end in spans)]
        except (ValueError, KeyError, TypeError, AttributeError):
            return []


def _block(start: int, length: int) -> tuple[int, int]:
    return (start, length) if length <= _WHOLE else (start + (length - _BLOCK) // 2, _BLOCK)
