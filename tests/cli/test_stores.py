"""`verify` and `clear` on stores that were written, damaged and killed for real."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asynchicache.backends.file.folder import StoreFolder
from asynchicache.backends.file.segments import ENTRY_BYTES
from asynchicache.cli.doctor import check_store
from asynchicache.cli.main import main
from asynchicache.cli.options import DoctorOptions
from asynchicache.types import Outcome
from storage.file_stores import SLOT_BYTES, SLOTS_AT, backend_at, bench_at, open_bench

PAGES = 6


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Pages 0 to 5 of `kv`, of which 5 was deleted, and one of `mamba`."""

    async def write() -> None:
        async with backend_at(tmp_path / "store") as backend:
            bench, other = await open_bench(backend), await open_bench(backend, "mamba")
            await bench.put(bench.keys(*range(PAGES)), range(PAGES))
            await bench.engine.delete(bench.keys(5))
            await other.put(other.keys(1), [0])

    asyncio.run(write())
    return tmp_path / "store"


def flip(folder: Path, name: str, offset: int) -> None:
    (path,) = folder.glob(f"kv-*/{name}")
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def outcomes(store: Path) -> list[Outcome]:
    async def read() -> list[Outcome]:
        async with bench_at(store) as bench:
            return await bench.get(bench.keys(*range(PAGES)), range(PAGES))

    return asyncio.run(read())


def test_a_whole_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run(capsys, "verify", str(store))

    assert code == 0
    assert {name: result[name] for name in ("pages", "corrupt", "orphaned", "repaired")} == {
        "pages": PAGES,
        "corrupt": 0,
        "orphaned": 0,
        "repaired": 0,
    }
    assert result["bytes"] == sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "offset",
    [
        SLOTS_AT + 2 * SLOT_BYTES + 100,  # the page
        2 * ENTRY_BYTES + 8,  # its name
        2 * ENTRY_BYTES + 58,  # its checksum
    ],
)
def test_damage_is_found_and_repaired(store: Path, offset: int, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store, "00000.pages", offset)
    code, result = run(capsys, "verify", str(store))
    assert (code, result["pages"], result["corrupt"], result["repaired"]) == (1, PAGES - 1, 1, 0)
    assert "slot 2" in str(result["problems"])

    code, result = run(capsys, "verify", str(store), "--repair")
    assert (code, result["corrupt"], result["repaired"]) == (0, 1, 1)

    code, result = run(capsys, "verify", str(store))
    assert (code, result["pages"], result["corrupt"]) == (0, PAGES - 1, 0)
    hit = Outcome.HIT
    assert outcomes(store) == [hit, hit, Outcome.MISS, hit, hit, Outcome.MISS]


def test_a_damaged_manifest(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store, "pool.json", 0)
    code, result = run(capsys, "verify", str(store))
    assert (code, result["corrupt"], result["pages"]) == (1, 1, 1)

    code, result = run(capsys, "verify", str(store), "--repair")
    assert (code, result["corrupt"], result["repaired"], result["unread"]) == (1, 1, 1, 1)
    code, result = run(capsys, "verify", str(store))
    assert (code, result["corrupt"], result["unread"]) == (1, 0, 1)
    assert (result["pages"], len(result["pools"])) == (1, 2)
    assert "has no pool.json" in str(result["problems"])
    assert outcomes(store) == [Outcome.HIT] * 5 + [Outcome.MISS]
    code, result = run(capsys, "verify", str(store))
    assert (code, result["pages"], result["unread"], result["problems"]) == (0, PAGES, 0, [])


@pytest.mark.parametrize("text", ["", "{", "{}", "garbage"])
def test_a_damaged_manifest_is_named_beside_the_other_pools(
    text: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (manifest,) = store.glob("kv-*/pool.json")
    manifest.write_text(text)

    code, found = run(capsys, "ls", str(store))

    assert code == 1
    assert [(one["pool"], one["pages"], one["state"]) for one in found["pools"]] == [
        ("", 0, "damaged"),
        ("mamba", 1, "unknown"),
    ]
    assert f"{manifest} is damaged" in found["pools"][0]["problem"]
    assert main(["ls", str(store)]) == 1
    assert "--repair` removes it" in capsys.readouterr().out.replace("\n", " ")
    assert main(["gc", str(store)]) == 1
    assert "pool.json is damaged" in capsys.readouterr().err
    assert f"{manifest} is damaged" in check_store(DoctorOptions(store=str(store))).detail


def test_a_pool_without_one_page_that_holds_is_repaired_too(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for slot in range(PAGES):
        flip(store, "00000.pages", SLOTS_AT + slot * SLOT_BYTES)
    assert run(capsys, "verify", str(store), "--repair")[1]["repaired"] == PAGES - 1
    code, result = run(capsys, "verify", str(store))
    assert (code, result["corrupt"], result["problems"]) == (0, 0, [])
    assert outcomes(store) == [Outcome.MISS] * PAGES


@pytest.mark.parametrize(
    "damage",
    [
        {"pool": "kw"},
        {"fingerprint": "00" * 32},
        {"slot_bytes": 9192},
        {"slot_bytes": 3 * 4096},
        {"page_bytes": 5001},
        {"checksum": "0" * 16},
        {"checksum": ""},
    ],
)
def test_a_manifest_that_says_something_else_costs_no_page(
    damage: dict[str, object], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (manifest,) = store.glob("kv-*/pool.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | damage))
    assert run(capsys, "verify", str(store))[0] == 1
    assert manifest.exists()

    code, result = run(capsys, "verify", str(store), "--repair")
    assert (code, result["corrupt"] == result["repaired"], manifest.exists()) == (1, True, False)
    assert outcomes(store) == [Outcome.HIT] * 5 + [Outcome.MISS]
    assert run(capsys, "verify", str(store))[0] == 0


def test_what_a_pool_without_a_manifest_takes_is_counted_and_can_be_cleared(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (lost,) = store.glob("kv-*")
    (lost / "pool.json").unlink()
    folder = StoreFolder(store, read_only=True)
    assert lost in folder.pools()  # what the folder's bound counts
    folder.close()
    assert run(capsys, "clear", str(store), "--pool", "kv")[1]["pools"] == []
    assert lost.name in run(capsys, "clear", str(store), "--everything")[1]["pools"]
    assert not lost.exists()


def test_pages_that_were_cut_off(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pages,) = store.glob("kv-*/00000.pages")
    pages.write_bytes(pages.read_bytes()[: SLOTS_AT + 3 * SLOT_BYTES])
    code, result = run(capsys, "verify", str(store))
    assert (code, result["pages"], result["corrupt"]) == (1, 4, 2)


def test_a_store_whose_names_cannot_be_read(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pages,) = store.glob("kv-*/00000.pages")
    pages.unlink()
    pages.mkdir()
    assert main(["verify", str(store)]) == 1
    assert f"{pages} cannot be opened: it is no file" in capsys.readouterr().err


def test_a_store_that_is_open(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def verify_while_open() -> int:
        async with backend_at(store):
            return main(["verify", str(store)])

    assert asyncio.run(verify_while_open()) == 1
    assert "is open already" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["verify"], ["clear", "--everything"]])
def test_a_folder_without_a_store_is_left_alone(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert main([command[0], str(tmp_path), *command[1:]]) == 1
    assert main([command[0], str(tmp_path / "nowhere"), *command[1:]]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert "thesis.tex" in capsys.readouterr().err


def test_clear_removes_one_pool(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = run(capsys, "clear", str(store), "--pool", "kv")

    assert code == 0
    assert [str(name)[:3] for name in result["pools"]] == ["kv-"]  # type: ignore[attr-defined]
    assert run(capsys, "verify", str(store))[1]["pages"] == 1


def test_clear_says_what_there_is_where_nothing_fits(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", str(store), "--pool", "kvv"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("nothing to clear", "kv-", "mamba-"))
    _, result = run(capsys, "clear", str(store), "--fingerprint", "ab12")
    assert (result["pools"], result["bytes"]) == ([], 0)
    assert result["kept"] == sorted(path.name for path in store.glob("*-*"))
    assert main(["clear", str(store), "--everything"]) == 0
    assert main(["clear", str(store), "--everything"]) == 0
    assert "none is there" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "say what to clear"),
        (["--everything", "--pool", "kv"], "more"),
        (["--fingerprint", "kv"], "must be hexadecimal"),
    ],
)
def test_clear_must_be_told_what(
    store: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["clear", str(store), *flags])

    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_people_get_a_table(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store, "00000.pages", 8)
    assert main(["verify", str(store)]) == 1
    assert "the name of slot 0 is damaged" in capsys.readouterr().out
    assert main(["clear", str(store), "--everything"]) == 0
    assert "mamba-" in capsys.readouterr().out


def test_brackets_in_names_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a[" / "b]"

    async def write() -> None:
        async with bench_at(path) as bench:
            await bench.put(bench.keys(1), [0])

    asyncio.run(write())
    (pool,) = path.glob("kv-*")
    manifest = json.loads((pool / "pool.json").read_text())
    (pool / "pool.json").write_text(json.dumps(manifest | {"pool": "[/kv]"}))

    assert main(["verify", str(path)]) == 1
    assert "pool.json is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("verify",), ("verify", "--repair"), ("clear", "--everything")])
def test_an_empty_folder_does_not_become_a_store(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path)]) == 1
    assert "holds no file store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_everything_includes_what_has_a_damaged_manifest(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = sorted(path.name for path in store.glob("*-*"))
    (manifest,) = store.glob("kv-*/pool.json")
    manifest.write_text("{}")

    assert main(["clear", str(store), "--pool", "kv"]) == 1
    assert "pool.json is damaged" in capsys.readouterr().err
    code, cleared = run(capsys, "clear", str(store), "--everything")
    assert (code, cleared["pools"]) == (0, pools)
    assert [path.name for path in store.glob("*-*")] == []
