"""Real text for tests: part of the running interpreter's standard library, tokenised once a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

VOCAB_SIZE = 1003


def _engine(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a .bin/.idx pair made from Python source text with a BPE vocabulary of 1003 entries."""
    directory = tmp_path_factory.mktemp("corpus")
    text, tokenizer, prefix = directory / "text.jsonl", directory / "tokenizer.json", directory / "tokens"
    _engine("engine.data.stdlib_corpus", "--output", str(text), "--max-bytes", "2000000")
    _engine(
        "engine.data.tokenizer", "train", "--input", str(text), "--vocab-size", str(VOCAB_SIZE),
        "--output", str(tokenizer), "--max-bytes", "500000",
    )  # fmt: skip
    _engine(
        "engine.data.preprocess", "--input", str(text), "--output", str(prefix), "--tokenizer", str(tokenizer),
        "--workers", "1",
    )  # fmt: skip
    assert Path(f"{prefix}.idx").stat().st_size > 0
    return str(prefix)
