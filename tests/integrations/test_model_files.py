"""Digests of checkpoints and adapters: of what the files hold, not of where and when they were written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asynchicache.integrations.model_files import adapter_digest, checkpoint_digest, local_folder


def trained(folder: Path, *, changed: str = "", name: str = "model.safetensors", config: str = "{}") -> Path:
    """Write a checkpoint; a short training has changed one number in a hundred of the tensor `changed`."""
    folder.mkdir()
    chance = torch.Generator().manual_seed(1)
    tensors = {
        part: torch.rand(size, generator=chance)
        for part, size in {"large": (2000, 512), "norm": (512,)}.items()
    }
    if changed:
        tensors[changed].view(-1)[::100] += 1
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text(str(folder))
    for file in folder.iterdir():
        os.utime(file, ns=(0, 0))
    return folder


@pytest.mark.parametrize("digest", [checkpoint_digest, adapter_digest])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_another_training_of_equal_size_and_time_is_told_apart(
    digest: object, name: str, tmp_path: Path
) -> None:
    assert callable(digest)
    first = trained(tmp_path / "first", name=name)
    copied = Path(shutil.copytree(first, tmp_path / "copy", copy_function=shutil.copy))
    others = [
        trained(tmp_path / "large", name=name, changed="large"),
        trained(tmp_path / "norm", name=name, changed="norm"),
        trained(tmp_path / "config", name=name, config='{"rope_theta": 1}'),
    ]
    assert digest(first) == digest(copied)
    assert len({digest(folder) for folder in (first, *others)}) == 4


def test_a_file_that_says_nothing_about_its_tensors_is_sampled_all_over(tmp_path: Path) -> None:
    versions = set()
    for number, offset in enumerate((0, 3_000_000, 9_999_999)):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = bytearray(10_000_000)
        weights[offset - 99_999 if offset else 0 : offset + 1] = bytes([7]) * (100_000 if offset else 1)
        (folder / "model.safetensors").write_bytes(weights)
        versions.add(checkpoint_digest(folder))
    assert len(versions) == 3


def test_nothing_is_no_content(tmp_path: Path) -> None:
    assert checkpoint_digest(tmp_path) == adapter_digest(tmp_path) == ""
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder(str(tmp_path / "nobody/nothing")) is None
    assert local_folder("not a name!") is None
