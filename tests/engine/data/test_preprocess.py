"""JSON lines to .bin/.idx: odd lines, policies, equal results for any number of workers, all or nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.data.encode import BadLine
from engine.data.indexed import IndexedCorpus
from engine.data.preprocess import Progress, preprocess
from engine.data.tokenizer import ByteTokenizer, load_tokenizer

LARGE = "All of five megabytes. " * 228_000

# (line, text that comes out, reason when it is bad); the first document is empty and the last line is cut off.
LINES: list[tuple[bytes, str | None, str | None]] = [
    (b'\xef\xbb\xbf{"text": ""}\n', None, None),
    (b"\n", None, None),
    (b'"text"\n', None, "not_an_object"),
    (b"42\n", None, "not_an_object"),
    (b'["text"]\n', None, "not_an_object"),
    (b'{"text": "first"}\n', "first", None),
    (b'{"content": "wrong key"}\n', None, "missing_key"),
    (b'{"text": null}\n', None, "null_text"),
    (b'{"text": "broken\n', None, "broken_json"),
    (b'{"text": "CRLF"}\r\n', "CRLF", None),
    (b"\r\n", None, None),
    (b'{"text": "\xff\xfe"}\n', None, "invalid_utf8"),
    (b'{"text": "nul \\u0000 and \x00"}\n', "nul \x00 and \x00", None),
    (json.dumps({"text": LARGE}).encode() + b"\n", LARGE, None),
    (b'{"text": " \\t "}\n', None, None),
    (b'{"text": "\\ud800"}\n', None, "invalid_unicode"),
    ('{"text": "naïve ✓"}\n'.encode(), "naïve ✓", None),
    (b'{"text": "cut o', None, "broken_json"),
]
GOOD = [text for _, text, _ in LINES if text is not None]
BAD = [(number, reason) for number, (_, _, reason) in enumerate(LINES, start=1) if reason is not None]


@pytest.fixture
def odd(tmp_path) -> Path:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"".join(line for line, _, _ in LINES))
    return path


def outputs(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".jsonl" and path.suffix != ".json")


def command(directory: Path, *extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.data.preprocess", "--output", "out", "--progress-json", *extra],
        cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("num_workers", [1, 4])
def test_good_lines_come_out_in_order_and_bad_ones_are_told(tmp_path, odd, num_workers):
    bad: list[BadLine] = []
    progress: list[Progress] = []
    summary = preprocess(
        odd, str(tmp_path / "out"), "bytes",
        num_workers=num_workers, on_bad_line=bad.append, on_progress=progress.append,
    )  # fmt: skip
    corpus = IndexedCorpus(tmp_path / "out")
    tokenizer = ByteTokenizer()
    documents = [corpus.document(i) for i in range(corpus.summary.num_documents)]
    assert [tokenizer.decode(document.tolist()) for document in documents] == GOOD
    assert all(document[-1] == tokenizer.eod and tokenizer.eod not in document[:-1] for document in documents)
    assert [(line.line, line.reason) for line in bad] == BAD
    assert summary.documents == len(GOOD)
    assert summary.tokens == corpus.summary.num_tokens == sum(len(text.encode()) + 1 for text in GOOD)
    assert summary.empty == 2
    assert summary.bad["not_an_object"] == 3
    assert sum(summary.bad.values()) == len(BAD)
    assert progress[-1] == Progress(odd.stat().st_size, odd.stat().st_size, summary.documents, summary.tokens)


def test_the_number_of_workers_does_not_show(tmp_path):
    source = tmp_path / "many.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {i} " * (i % 50 + 1)}) + "\n" for i in range(6000)))
    for num_workers in (1, 4):
        preprocess(source, str(tmp_path / f"out{num_workers}"), "bytes", num_workers=num_workers)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"out1.{suffix}").read_bytes() == (tmp_path / f"out4.{suffix}").read_bytes()


def test_strict_ends_at_the_first_bad_line(tmp_path, odd):
    process = command(tmp_path, "--input", str(odd), "--tokenizer", "bytes", "--on-bad", "strict", "--workers", "2")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "line 3: not_an_object" in errors
    assert json.loads(out.splitlines()[-1])["kind"] == "error"
    assert outputs(tmp_path) == []


def test_strict_takes_blank_and_empty_lines(tmp_path):
    source = tmp_path / "x.jsonl"
    source.write_bytes(b'{"text": ""}\n\n{"text": "good"}\n')
    assert preprocess(source, str(tmp_path / "out"), "bytes", on_bad="strict").documents == 1


@pytest.mark.parametrize(
    "content", [b"".join(line for line, text, _ in LINES if text is None), b"", b"\n\n", b'{"text": ""}\n']
)
def test_no_good_line_is_an_error_without_files(tmp_path, content):
    source = tmp_path / "x.jsonl"
    source.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.jsonl holds no document"):
        preprocess(source, str(tmp_path / "out"), "bytes", num_workers=2)
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("size", [65_499, 65_500, 65_536, 70_000])
def test_the_highest_id_of_large_vocabularies_survives(tmp_path, size):
    vocabulary = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, size)}}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None,
        "post_processor": None, "decoder": None, "truncation": None, "padding": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<|endoftext|>"}}))  # fmt: skip
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": f"w1 w{size - 1} w{size - 2}"}) + "\n")
    summary = preprocess(tmp_path / "x.jsonl", str(tmp_path / "out"), str(tmp_path / "t.json"))
    assert load_tokenizer(tmp_path / "t.json").vocab_size == summary.vocab_size == size
    assert IndexedCorpus(tmp_path / "out").document(0).tolist() == [1, size - 1, size - 2, 0]
    assert summary.dtype == ("uint16" if size <= 65_536 else "int32")


def test_the_command_reports_lines_of_json(tmp_path, odd):
    process = command(tmp_path, "--input", str(odd), "--tokenizer", "bytes", "--workers", "2")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    events = [json.loads(line) for line in out.splitlines()]
    assert [(event["line"], event["reason"]) for event in events if event["kind"] == "bad_line"] == BAD
    assert [event["bytes_done"] for event in events if event["kind"] == "progress"][-1] == odd.stat().st_size
    assert events[-1]["kind"] == "summary"
    assert events[-1]["documents"] == len(GOOD)
    assert all(f"line {number}: {reason}" in errors for number, reason in BAD)
    assert outputs(tmp_path) == ["out.bin", "out.idx"]


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (("--input", "missing.jsonl", "--tokenizer", "bytes"), 1, "missing.jsonl"),
        (("--input", "odd.jsonl", "--tokenizer", "missing.json"), 1, "tokenizer: missing.json cannot be read"),
        (("--input", "odd.jsonl", "--tokenizer", "odd.jsonl"), 1, "odd.jsonl is no tokenizer file"),
        (("--input", "odd.jsonl", "--tokenizer", "bytes", "--output", "no/where"), 1, "no such directory: 'no'"),
        (("--input", "odd.jsonl", "--tokenizer", "bytes", "--workers", "0"), 2, "--workers"),
        (("--input", "odd.jsonl", "--tokenizer", "bytes", "--on-bad", "ignore"), 2, "--on-bad"),
    ],
)
def test_wrong_use_is_told_by_name(tmp_path, extra, code, words):
    (tmp_path / "odd.jsonl").write_bytes(b'{"text": "x"}\n\xff\n')
    process = command(tmp_path, *extra)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert words in errors
    assert outputs(tmp_path) == []


# Being killed


@pytest.fixture
def at_work(tmp_path):
    """A run of four workers on an input that takes far longer than the test, its pids, and where it writes."""
    os.mkfifo(tmp_path / "endless.jsonl")
    process = command(tmp_path, "--input", "endless.jsonl", "--tokenizer", "bytes", "--workers", "4")
    feeder = subprocess.Popen(
        [sys.executable, "-c", "with open('endless.jsonl', 'w') as f:\n while True: f.write('{\"text\": \"x\"}\\n')"],
        cwd=tmp_path, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        events = (json.loads(line) for line in process.stdout)
        pids = next(event["pids"] for event in events if event["kind"] == "workers")
        next(event for event in events if event["kind"] == "progress")
        yield process, pids, tmp_path
    finally:
        for one in (process, feeder):
            one.kill()
            one.communicate()


def test_a_killed_worker_is_an_error_within_seconds(at_work):
    process, pids, directory = at_work
    os.kill(pids[2], signal.SIGKILL)
    begin = time.monotonic()
    out, errors = process.communicate(timeout=20)
    assert time.monotonic() - begin < 10
    assert process.returncode == 3
    assert f"worker process {pids[2]} died by signal 9" in errors
    assert json.loads(out.splitlines()[-1])["kind"] == "error"
    assert all(gone(pid) for pid in pids)
    assert outputs(directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(at_work, number):
    process, pids, directory = at_work
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert all(gone(pid) for pid in pids)
    assert outputs(directory) == []


def test_a_killed_run_leaves_no_worker_and_no_final_name(at_work):
    process, pids, directory = at_work
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    assert all(name.endswith(".aside") for name in outputs(directory))
