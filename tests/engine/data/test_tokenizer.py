"""Tokenizers: round trips, trained BPE, files that are none, and text that spells a special token."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.tokenizer import EOD_TOKEN, ByteTokenizer, FileTokenizer, load_tokenizer, texts_of, train_bpe

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "naïve café — ✓ 字", "tab\there\x00nul"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> FileTokenizer:
    return train_bpe(TEXTS, 290, tmp_path_factory.mktemp("t") / "t.json")


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eod]) == text
    assert tokenizer.vocab_size == 257


@given(text=st.text())
def test_trained_bpe_round_trips_any_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.vocab_size and i != bpe.eod for i in ids)


def test_training_merges_up_to_the_size_asked_for(bpe):
    assert bpe.vocab_size == 290
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_text_that_spells_the_end_of_a_document_is_text(bpe):
    ids = bpe.encode(f"a{EOD_TOKEN}b")
    assert bpe.eod not in ids
    assert bpe.decode(ids) == f"a{EOD_TOKEN}b"


def test_training_is_reproducible(tmp_path):
    train_bpe(TEXTS, 290, tmp_path / "a.json")
    train_bpe(iter(TEXTS), 290, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize(("texts", "size", "words"), [(TEXTS, 256, "vocab_size 256 is below 257"), ([], 300, "single")])
def test_impossible_training_is_refused(tmp_path, texts, size, words):
    with pytest.raises(ValueError, match=words):
        train_bpe(texts, size, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_document_token_can_be_named(tmp_path, bpe):
    vocabulary = {"[UNK]": 0, "a": 1, "<stop>": 2}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
        "decoder": None, "truncation": None, "padding": None, "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}}))  # fmt: skip
    assert FileTokenizer(path, "<stop>").eod == 2
    with pytest.raises(ValueError, match=r"t\.json has no end-of-document token"):
        FileTokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"no json", b"\xff\xfe\x00", b'{"model": 3}'])
def test_garbage_is_no_tokenizer(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.json is no tokenizer file"):
        load_tokenizer(tmp_path / "t.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.json cannot be read: No such file"):
        load_tokenizer(tmp_path / "missing.json")


def test_a_share_of_the_input_is_spread_over_it(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:05d}"}) + "\n" for i in range(1000)) + "broken\n")
    assert [int(text) for text in texts_of(path, "text")] == list(range(1000))
    some = [int(text) for text in texts_of(path, "text", max_bytes=path.stat().st_size // 10)]
    assert 95 <= len(some) <= 105
    assert all(sum(block * 100 <= i < block * 100 + 100 for i in some) in range(9, 13) for block in range(10))


def test_the_command(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def command(*extra):
        return subprocess.run(
            [sys.executable, "-m", "engine.data.tokenizer", "train", "--vocab-size", "280", *extra],
            capture_output=True, text=True, cwd=tmp_path,
        )  # fmt: skip

    done = command("--input", "x.jsonl", "--output", "t.json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["vocab_size"] == load_tokenizer(tmp_path / "t.json").vocab_size == 280
    failed = command("--input", "missing.jsonl", "--output", "u.json")
    assert failed.returncode == 1
    assert "missing.jsonl cannot be read" in failed.stderr
    assert not (tmp_path / "u.json").exists()
