"""JSON lines to a ``.bin``/``.idx`` pair, in parallel, all or nothing.

``python -m engine.data.preprocess --input X.jsonl --output PREFIX --tokenizer FILE|bytes``

The result depends on input and tokenizer alone, not on the number of workers. Lines are judged by the table in
``jsonl.py``. Bad lines are counted and listed on stderr; ``--on-bad strict`` ends at the first one.

Exit codes: 0 the pair is written; 1 the input, the tokenizer or the output is at fault; 2 bad usage; 3 a worker process
died or failed; 130 and 143 ended by SIGINT and SIGTERM. After any but 0 no file is left and an older pair is untouched.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from engine.data.encode import BadLine, EncodedChunk, chunk_encoder
from engine.data.indexed import CorpusWriter, token_dtype
from engine.data.jsonl import Chunk, chunks_of
from engine.data.pool import OrderedPool, WorkerError
from engine.data.tokenizer import load_tokenizer

_CHUNK_BYTES = 1 << 18
_LISTED_BAD_LINES = 1000
_PROGRESS_INTERVAL_S = 0.5

OnBad = Literal["skip", "strict"]


@dataclass(frozen=True)
class Progress:
    """How far a run is; bytes are those of the input."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Summary:
    """What a run did. ``bad`` counts bad lines by reason, ``empty`` the documents without text."""

    output: str
    documents: int
    tokens: int
    dtype: str
    vocab_size: int
    empty: int
    bad: dict[str, int]
    seconds: float


def preprocess(
    source: Path,
    output: str,
    tokenizer: str,
    *,
    text_key: str = "text",
    num_workers: int = 1,
    on_bad: OnBad = "skip",
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_bad_line: Callable[[BadLine], None] = lambda bad: None,
    on_workers: Callable[[list[int]], None] = lambda pids: None,
) -> Summary:
    """Encode the documents of ``source`` into ``output.bin`` and ``output.idx``, each ended by the tokenizer's eod.

    ``on_progress`` is called after each piece of input, ``on_bad_line`` for each bad line in order, ``on_workers`` once
    with the process ids of the workers. Raises ValueError (bad input, unknown tokenizer, no documents, a bad line under
    ``strict``), OSError (files) and WorkerError; then no file is left.
    """
    begin = time.monotonic()
    loaded = load_tokenizer(tokenizer)
    dtype = token_dtype(loaded.vocab_size)
    total = source.stat().st_size
    num_empty = 0
    bad: Counter[str] = Counter()
    with (
        CorpusWriter(output, dtype) as writer,
        OrderedPool[Chunk, EncodedChunk](num_workers, chunk_encoder, tokenizer, text_key) as pool,
    ):
        on_workers(pool.pids)
        for encoded in pool.map(chunks_of(source, _CHUNK_BYTES)):
            for line in encoded.bad:
                if on_bad == "strict":
                    raise ValueError(f"{source} line {line.line}: {line.reason}: {line.detail}")
                bad[line.reason] += 1
                on_bad_line(line)
            for document in encoded.documents:
                writer.add_document(document)
            num_empty += encoded.num_empty
            on_progress(Progress(encoded.end, total, writer.num_documents, writer.num_tokens))
        if not writer.num_documents:
            raise ValueError(
                f"{source} holds no document: {bad.total()} bad lines {dict(bad)}, {num_empty} without text"
            )
    return Summary(
        output=output,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        dtype=dtype.name,
        vocab_size=loaded.vocab_size,
        empty=num_empty,
        bad=dict(bad),
        seconds=round(time.monotonic() - begin, 3),
    )


class _Console:
    """Progress and summary on stdout, bad lines and errors on stderr."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._next_progress = 0.0
        self._num_bad = 0

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """One line on stdout when lines of JSON are wanted."""
        if self._as_json:
            print(json.dumps({"kind": kind, **values}), flush=True)

    def workers(self, pids: list[int]) -> None:
        """Which processes work."""
        self.event("workers", {"pids": pids})

    def progress(self, progress: Progress) -> None:
        """Twice a second, and at the end of the input."""
        now = time.monotonic()
        if now >= self._next_progress or progress.bytes_done == progress.bytes_total:
            self._next_progress = now + _PROGRESS_INTERVAL_S
            self.event("progress", asdict(progress))

    def bad_line(self, bad: BadLine) -> None:
        """The first thousand."""
        self._num_bad += 1
        if self._num_bad <= _LISTED_BAD_LINES:
            print(f"line {bad.line}: {bad.reason}: {bad.detail}", file=sys.stderr)
            self.event("bad_line", asdict(bad))
        elif self._num_bad == _LISTED_BAD_LINES + 1:
            print("further bad lines are counted only", file=sys.stderr)

    def summary(self, summary: Summary) -> None:
        """The last line."""
        self.event("summary", asdict(summary))
        if not self._as_json:
            print(
                f"{summary.output}: {summary.documents} documents, {summary.tokens} {summary.dtype} tokens in "
                f"{summary.seconds} s; {summary.empty} without text, bad lines: {summary.bad or 'none'}"
            )

    def error(self, text: str) -> None:
        """The last line of a run that failed."""
        self.event("error", {"error": text})
        print(f"error: {text}", file=sys.stderr)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's text for exit codes."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.preprocess", description="Turn JSON lines into a .bin/.idx pair."
    )
    parser.add_argument("--input", required=True, type=Path, help="JSON lines, one document each")
    parser.add_argument("--output", required=True, help="prefix: PREFIX.bin and PREFIX.idx are written")
    parser.add_argument("--tokenizer", required=True, help="'bytes' or a tokenizer JSON file")
    parser.add_argument("--text-key", default="text", help="key of the text in each object")
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    parser.add_argument("--on-bad", choices=("skip", "strict"), default="skip", help="strict ends at a bad line")
    parser.add_argument("--progress-json", action="store_true", help="progress and summary as lines of JSON on stdout")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error("--workers must be at least 1")
    # Both become exceptions, so that what was written aside is removed and the workers end.
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)
    console = _Console(options.progress_json)
    try:
        summary = preprocess(
            options.input,
            options.output,
            options.tokenizer,
            text_key=options.text_key,
            num_workers=options.workers,
            on_bad=options.on_bad,
            on_progress=console.progress,
            on_bad_line=console.bad_line,
            on_workers=console.workers,
        )
    except (ValueError, OSError) as error:
        console.error(str(error))
        return 1
    except WorkerError as error:
        console.error(str(error))
        return 3
    console.summary(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
