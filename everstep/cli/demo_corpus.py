"""The demo's corpus: the source text of Python's standard library as a ``.bin``/``.idx`` pair, made once and kept."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.cli.engine_program import run_program
from everstep.cli.output import OperationFailed, Output
from everstep.cli.preprocess import preprocess_corpus

VOCAB_SIZE = 4096
CORPUS_PATH = "corpus/stdlib"
"""Prefix of the pair below the data root."""
_TOKENIZER_BYTES = 8_000_000  # enough text for 4096 merges, trained in two seconds


@dataclass(frozen=True)
class Corpus:
    """What is there: the pair's prefix, its documents and tokens, and whether it was there already."""

    prefix: Path
    documents: int
    tokens: int
    reused: bool


def prepare_corpus(output: Output, data_root: Path) -> Corpus:
    """Make the corpus below ``data_root``, or find it complete from an earlier time.

    A record is written last, with the sizes of the files, so what an interrupted run left is made anew. Two commands at
    a time wait for each other. Raises OperationFailed when a program of the engine fails.
    """
    prefix = data_root / CORPUS_PATH
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(prefix.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = _complete_record(prefix)
        reused = record is not None
        if record is None:
            record = _make(output, prefix)
        return Corpus(prefix, int(record["documents"]), int(record["tokens"]), reused)
    finally:
        os.close(lock)


def _record_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".complete.json")


def _identity() -> dict[str, Any]:
    """What the corpus depends on: another interpreter has another library."""
    return {"python": platform.python_version(), "vocab_size": VOCAB_SIZE, "tokenizer_bytes": _TOKENIZER_BYTES}


def _sizes(prefix: Path) -> dict[str, int]:
    return {suffix: Path(f"{prefix}{suffix}").stat().st_size for suffix in (".bin", ".idx")}


def _complete_record(prefix: Path) -> dict[str, Any] | None:
    """The record of a complete corpus that this interpreter made; None when there is none."""
    try:
        record: dict[str, Any] = json.loads(_record_path(prefix).read_text())
        sizes = _sizes(prefix)
    except (FileNotFoundError, ValueError):
        return None
    return record if record.get("identity") == _identity() and record.get("sizes") == sizes else None


def _make(output: Output, prefix: Path) -> dict[str, Any]:
    _record_path(prefix).unlink(missing_ok=True)
    text, tokenizer = Path(f"{prefix}.jsonl"), prefix.with_name("tokenizer.json")
    with output.console.status("writing the standard library's source as JSON lines"):
        _run("engine.data.stdlib_corpus", "--output", str(text))
    with output.console.status(f"training a byte-pair tokenizer with {VOCAB_SIZE} tokens"):
        limits = ("--vocab-size", str(VOCAB_SIZE), "--max-bytes", str(_TOKENIZER_BYTES))
        _run("engine.data.tokenizer", "train", "--input", str(text), "--output", str(tokenizer), *limits)
    summary = preprocess_corpus(output, text, prefix, str(tokenizer))
    record = {
        "identity": _identity(),
        "sizes": _sizes(prefix),
        "documents": summary["documents"],
        "tokens": summary["tokens"],
    }
    aside = _record_path(prefix).with_suffix(".aside")
    aside.write_text(json.dumps(record))
    aside.replace(_record_path(prefix))
    return record


def _run(module: str, *arguments: str) -> None:
    code, _, errors = run_program(module, arguments)
    if code != 0:
        raise OperationFailed(f"{module} ended with code {code}: {errors}")
