"""``everstep preprocess``: the pair is written, its faults are the user's, and nothing half is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

from everstep.cli.demo_corpus import prepare_corpus
from everstep.cli.engine_program import run_program
from everstep.cli.output import Output
from tests.cli.conftest import run_everstep


def corpus(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def test_a_corpus_is_written_and_summed_up(tmp_path):
    source = corpus(tmp_path / "a.jsonl", ["hello", "world!", ""])
    answer = run_everstep("preprocess", "--input", source, "--output", tmp_path / "a", "--tokenizer", "bytes", "--json")
    assert answer.code == 0
    assert (answer.json["documents"], answer.json["tokens"], answer.json["empty"]) == (2, 13, 1)
    assert (tmp_path / "a.bin").stat().st_size == 26 and (tmp_path / "a.idx").exists()


def test_bad_input_is_exit_code_2_and_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nno json\n')
    strict = ["--on-bad", "strict", "--output", tmp_path / "a", "--json"]
    answer = run_everstep("preprocess", "--input", tmp_path / "a.jsonl", "--tokenizer", "bytes", *strict)
    assert answer.code == 2 and "line 2" in answer.json["error"]
    missing = run_everstep("preprocess", "--input", tmp_path / "b.jsonl", "--tokenizer", "bytes", *strict)
    assert missing.code == 2 and "b.jsonl" in missing.json["error"]
    tokenizer = run_everstep("preprocess", "--input", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "no", *strict)
    assert tokenizer.code == 2 and "tokenizer" in tokenizer.json["error"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_an_interrupt_ends_the_engine_program_too(tmp_path):
    # Enough to take many times longer than it takes to see that the program has begun.
    source = corpus(tmp_path / "a.jsonl", ["word " * 2000] * 8_000)
    command = [sys.executable, "-m", "everstep.cli", "preprocess", "--input", source, "--output", tmp_path / "a"]
    with subprocess.Popen([*map(str, command), "--tokenizer", "bytes", "--workers", "1"]) as process:
        deadline = time.monotonic() + 20.0
        while not list(tmp_path.glob(".a.*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20.0) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_a_programs_lines_result_and_errors_come_back(tmp_path):
    seen = []
    source = corpus(tmp_path / "a.jsonl", ["hello"])
    arguments = ["--input", str(source), "--output", str(tmp_path / "a"), "--tokenizer", "bytes", "--progress-json"]
    code, last, errors = run_program("engine.data.preprocess", arguments, seen.append)
    assert (code, last, errors) == (0, seen[-1], "") and last["kind"] == "summary"
    code, last, errors = run_program("engine.data.preprocess", ["--nonsense"])
    assert (code, last) == (2, None) and "usage" in errors


def test_a_folder_of_the_same_name_does_not_hide_the_engine(tmp_path, monkeypatch):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise SystemExit(99)\n")
    monkeypatch.chdir(tmp_path)
    assert run_program("engine.data.stdlib_corpus", ["--help"])[0] == 0


def test_a_complete_corpus_is_used_again_and_a_damaged_one_is_not(tmp_path, monkeypatch):
    made = []

    def make(output, prefix):
        made.append(prefix)
        return {"documents": 1, "tokens": 2}

    monkeypatch.setattr("everstep.cli.demo_corpus._make", make)
    output = Output(as_json=False)
    prefix = tmp_path / "corpus" / "stdlib"
    assert not prepare_corpus(output, tmp_path).reused
    from everstep.cli.demo_corpus import _identity

    (prefix.parent / "stdlib.bin").write_bytes(b"12345678")
    (prefix.parent / "stdlib.idx").write_bytes(b"1234")
    record = {"identity": _identity(), "sizes": {".bin": 8, ".idx": 4}, "documents": 3, "tokens": 4}
    (prefix.parent / "stdlib.complete.json").write_text(json.dumps(record))
    found = prepare_corpus(output, tmp_path)
    assert (found.reused, found.documents, found.tokens) == (True, 3, 4)
    os.truncate(prefix.parent / "stdlib.bin", 7)
    assert not prepare_corpus(output, tmp_path).reused
    assert len(made) == 2
