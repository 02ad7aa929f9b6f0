"""Reading text: what is taken, what is left, what is held out, and what is said when it will not do."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.models import TaskError
from gossamer.models import corpus as module
from gossamer.models.corpus import is_held_out, load_corpus


def write(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def many(count: int) -> dict[str, bytes]:
    return {f"part{i % 3}/file{i:03}.txt": f"<{i:03}>".encode() * 20 for i in range(count)}


def files_in(text: np.ndarray) -> set[bytes]:
    return set(text.tobytes().replace(b"><", b"> <").split())


def test_standard_library_is_the_default() -> None:
    train, held_out = load_corpus([], 128)
    assert train.dtype == held_out.dtype == np.uint8
    assert train.size + held_out.size > 8_000_000
    assert 0.02 < held_out.size / (train.size + held_out.size) < 0.12
    everything = train.tobytes() + held_out.tobytes()
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert (stdlib / "argparse.py").read_bytes() in everything
    assert (stdlib / "asyncio" / "events.py").read_bytes() in everything
    assert b"\0" not in everything


def test_held_out_rule_is_sha256_modulo_20() -> None:
    for name in ("argparse.py", "asyncio/events.py", "email/mime/text.py", "tomllib/_re.py"):
        digest = hashlib.sha256(name.encode()).hexdigest()
        assert is_held_out(name) == (int(digest, 16) % 20 == 0)


def test_files_are_held_out_whole_and_by_name(tmp_path: Path) -> None:
    files = many(200)
    train, held_out = load_corpus([write(tmp_path, files)], 8)
    expected = {data[:5] for name, data in files.items() if is_held_out(name)}
    assert files_in(held_out) == expected
    assert files_in(train) == {data[:5] for data in files.values()} - expected
    assert train.size + held_out.size == sum(map(len, files.values()))


def test_machines_with_some_files_fewer_agree_about_the_rest(tmp_path: Path) -> None:
    files = many(200)
    fewer = {name: data for i, (name, data) in enumerate(files.items()) if i % 5}
    all_held_out = files_in(load_corpus([write(tmp_path / "a", files)], 8).held_out)
    some = load_corpus([write(tmp_path / "b", fewer)], 8)
    assert files_in(some.held_out) <= all_held_out
    assert not files_in(some.train) & all_held_out


def test_order_is_that_of_relative_paths_whatever_the_order_of_arguments(tmp_path: Path) -> None:
    first = write(tmp_path / "one", {"b.txt": b"BB" * 50, "d.txt": b"DD" * 50})
    second = write(tmp_path / "two", {"a.txt": b"AA" * 50, "c/x.txt": b"CC" * 50})
    there, back = load_corpus([first, second], 9), load_corpus([second, first], 9)
    assert np.concatenate(there).tobytes() == b"AA" * 50 + b"BB" * 50 + b"CC" * 50 + b"DD" * 50
    assert np.concatenate(back).tobytes() == np.concatenate(there).tobytes()


def test_few_files_hold_out_the_last_twentieth(tmp_path: Path) -> None:
    text = bytes(range(1, 201)) * 10
    train, held_out = load_corpus([write(tmp_path, {"a.txt": text}) / "a.txt"], 16)
    assert held_out.tobytes() == text[-100:]
    assert train.tobytes() == text[:-100]


def test_a_small_text_still_holds_out_one_window(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": b"x" * 40}) / "a.txt"
    assert [part.size for part in load_corpus([path], 16)] == [23, 17]


def test_a_lopsided_split_by_file_falls_back_to_the_cut(tmp_path: Path) -> None:
    files = many(200)
    heavy = next(name for name in files if is_held_out(name))
    files[heavy] = b"heavy " * 100_000
    train, held_out = load_corpus([write(tmp_path, files)], 8)
    assert held_out.size == (train.size + held_out.size) // 20


def named(held_out: bool, count: int) -> list[str]:
    """Names that the rule holds out, or does not."""
    names = (f"file{i:03}.txt" for i in range(100_000))
    return [name for name in names if is_held_out(name) == held_out][:count]


def test_what_is_not_text_counts_nothing_in_how_it_is_split(tmp_path: Path) -> None:
    heavy, *light = named(True, 2)
    picture, *others = named(False, 30)
    files = dict.fromkeys(others, b"x" * 1000) | {heavy: b"y" * 300_000}
    train, held_out = load_corpus([write(tmp_path / "a", {**files, picture: b"\0" * 3_000_000})], 128)
    assert held_out.size == (train.size + held_out.size) // 20, "of 329,000 bytes, 300,000 would be too much"
    assert bytes(train) + bytes(held_out) == b"".join(files[name] for name in sorted(files))
    files = dict.fromkeys(others, b"x" * 1000) | {light[0]: b"y" * 2000}
    train, held_out = load_corpus([write(tmp_path / "b", {**files, heavy: b"\0" * 300_000})], 128)
    assert bytes(held_out) == files[light[0]], "of 31,000 bytes, 2,000 are a sensible part"
    few = dict.fromkeys(others[:16], b"x" * 1000) | {light[0]: b"y" * 1000}
    train, held_out = load_corpus(
        [write(tmp_path / "c", {**few, **dict.fromkeys(others[16:], b"\0\0\0")})], 128
    )
    assert held_out.size == 17_000 // 20, "seventeen files are few"


def test_a_file_is_taken_once_however_many_paths_lead_to_it(tmp_path: Path) -> None:
    root = write(tmp_path / "d", many(200))
    expected = [part.tobytes() for part in load_corpus([root], 8)]
    for paths in ([root, root / "part1"], [root, root], [root, root / "part2/file002.txt"]):
        assert [part.tobytes() for part in load_corpus(paths, 8)] == expected


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"closed/a.txt": b"a" * 99, "open/b.txt": b"b" * 99})
    scan = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert np.concatenate(load_corpus([tmp_path], 8)).tobytes() == b"b" * 99, "one below it is passed over"
    with pytest.raises(TaskError, match=r"^cannot read data path .*closed: Permission denied$"):
        load_corpus([tmp_path / "closed"], 8)


def test_what_is_not_text_is_passed_over_in_folders(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "good.txt": b"good " * 20,
            "binary.bin": b"bad\0bad" * 9,
            "late.bin": b"bad" * 50_000 + b"\0",
            ".hidden": b"bad",
            ".git/config": b"bad",
            "empty.txt": b"",
        },
    )
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    assert np.concatenate(load_corpus([tmp_path], 8)).tobytes() == b"good " * 20


def test_a_file_that_cannot_be_read_is_passed_over_in_folders_and_named_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"good.txt": b"good " * 20, "bad.txt": b"bad " * 20})
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "bad.txt":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert np.concatenate(load_corpus([tmp_path], 8)).tobytes() == b"good " * 20
    with pytest.raises(TaskError, match=r"^cannot read data file .*bad\.txt: Permission denied$"):
        load_corpus([tmp_path / "bad.txt"], 8)


def test_mistakes_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"binary.bin": b"\0" * 99, "short.txt": b"abc", "empty.txt": b"", "none/.hidden": b"x"})
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        "missing": r"^data path .*missing does not exist: check its spelling$",
        "pipe": r"^data path .*pipe is neither a file nor a folder: ",
        "binary.bin": r"^cannot read data file .*binary\.bin: it is not text \(it holds NUL bytes\)",
        "none": r"^no text in .*none: name files or folders that contain some$",
        "short.txt/below": r"^cannot read data path .*below: Not a directory$",
        "empty.txt": r"^no text in .*empty\.txt: name files",
        "short.txt": r"short\.txt has 3 bytes of text, but a context of 16 needs at least 34: add text or",
    }.items():
        with pytest.raises(TaskError, match=message):
            load_corpus([tmp_path / path], 16)


def test_too_much_data_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.txt", "wb") as file:
        file.truncate(module.CORPUS_BYTES_MAX + 1)  # sparse: takes no disk
    with pytest.raises(TaskError, match="^more than 4 GiB of data: .* a different part on each node$"):
        load_corpus([tmp_path], 8)
