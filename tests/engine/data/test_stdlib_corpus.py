"""The corpus that every machine has: sorted, the same each time, unreadable files left out, capped."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.data.stdlib_corpus import write_corpus


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "lib"
    files = {
        "b.py": b"b = 1\n",
        "a.py": "# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n".encode("latin-1"),
        "pkg/__init__.py": "x = '✓'\n".encode(),
        "pkg/empty.py": b" \n",
        "pkg/notes.txt": b"not Python\n",
        "test/bad_bytes.py": b"x = '\xff'\n",
        "test/bad_cookie.py": b"# coding: no-such-codec\n",
        "site-packages/other.py": b"y = 2\n",
        "__pycache__/c.py": b"z = 3\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def documents(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_readable_sources_in_sorted_order(library, tmp_path):
    count, size = write_corpus(library, tmp_path / "c.jsonl")
    found = documents(tmp_path / "c.jsonl")
    assert [document["path"] for document in found] == ["a.py", "b.py", "pkg/__init__.py"]
    assert "café" in found[0]["text"]
    assert found[2]["text"] == "x = '✓'\n"
    assert (count, size) == (3, (tmp_path / "c.jsonl").stat().st_size)


def test_the_cap_holds_and_too_small_a_cap_is_an_error(library, tmp_path):
    whole = write_corpus(library, tmp_path / "c.jsonl")[1]
    count, size = write_corpus(library, tmp_path / "d.jsonl", max_bytes=whole - 1)
    assert count == 2
    assert size == (tmp_path / "d.jsonl").stat().st_size < whole
    with pytest.raises(ValueError, match="no Python source below"):
        write_corpus(library, tmp_path / "e.jsonl", max_bytes=3)
    assert not (tmp_path / "e.jsonl").exists()


def test_the_command_gives_the_same_bytes_twice(tmp_path):
    for name in ("a", "b"):
        subprocess.run(
            [sys.executable, "-m", "engine.data.stdlib_corpus", "--output", f"{name}.jsonl", "--max-bytes", "300000"],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert len(documents(tmp_path / "a.jsonl")) > 5
