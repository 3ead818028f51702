"""JSON lines as people really have them: which line is a document, which is nothing, which is bad and why.

=================================================  ==========================================================
line                                               is
=================================================  ==========================================================
nothing but white space                            ignored
an object whose text is empty or white space       ``empty``: skipped and counted, also under ``strict``
broken or truncated JSON, too deeply nested        bad: ``broken_json``
bytes that are not UTF-8                           bad: ``invalid_utf8``
JSON, but a string, a number, a list               bad: ``not_an_object``
an object without the key                          bad: ``missing_key``
``null`` at the key                                bad: ``null_text``
a number, a list, an object at the key             bad: ``not_a_string``
half of a surrogate pair in the text               bad: ``invalid_unicode``
=================================================  ==========================================================

A byte order mark at the start of the file, CRLF line ends and a last line without an end are fine. Control characters
in a text, NUL among them, are kept, escaped or not. Lines end at LF alone; numbers of lines start at 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BOM = b"\xef\xbb\xbf"
EMPTY = "empty"
_DECODER = json.JSONDecoder(strict=False)


class BadLineError(ValueError):
    """A line that is no document. ``reason`` is one of the words of this module's table."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of a file. ``end`` is the offset in the file, in bytes, behind them."""

    first_line: int
    lines: list[bytes]
    end: int


def chunks_of(path: Path, chunk_bytes: int) -> Iterator[Chunk]:
    """The lines of a file in chunks of about ``chunk_bytes`` (more when one line is longer)."""
    first_line, lines, size, end = 1, [], 0, 0
    with path.open("rb") as stream:
        for line in stream:
            end += len(line)
            text = line.removeprefix(BOM) if end == len(line) else line
            lines.append(text)
            size += len(text)
            if size >= chunk_bytes:
                yield Chunk(first_line, lines, end)
                first_line, lines, size = first_line + len(lines), [], 0
    if lines:
        yield Chunk(first_line, lines, end)


def text_of(line: bytes, key: str) -> str | None:
    """The text of one line, None for a line of white space; raises BadLineError (``EMPTY`` included)."""
    if not line.strip():
        return None
    try:
        # A last line that was cut within a character is both; broken JSON is what its owner would call it.
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise BadLineError("invalid_utf8", f"byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadLineError("broken_json", str(error)) from None
    if not isinstance(record, dict):
        raise BadLineError("not_an_object", f"a JSON {type(record).__name__}, not an object")
    if key not in record:
        raise BadLineError("missing_key", f"no key {key!r}")
    text = record[key]
    if text is None:
        raise BadLineError("null_text", f"{key!r} is null")
    if not isinstance(text, str):
        raise BadLineError("not_a_string", f"{key!r} is a {type(text).__name__}, not a string")
    if not text.strip():
        raise BadLineError(EMPTY, f"{key!r} holds no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLineError("invalid_unicode", f"character {error.start} of {key!r} is half a surrogate pair") from None
    return text
