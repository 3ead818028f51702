"""Which line is a document, which is nothing, and which is bad: the table of jsonl.py."""

from __future__ import annotations

import json

import pytest

from engine.data.jsonl import BadLineError, chunks_of, text_of


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "plain"}\n', "plain"),
        (b'{"text": "no line end"}', "no line end"),
        (b'{"text": "CRLF"}\r\n', "CRLF"),
        (b'  {"text": "spaces around"}  \n', "spaces around"),
        (b'{"text": " kept "}\n', " kept "),
        (b'{"id": NaN, "text": "other keys do not matter", "n": null}\n', "other keys do not matter"),
        (b'{"text": "nul \\u0000 escaped"}\n', "nul \x00 escaped"),
        (b'{"text": "nul \x00 raw"}\n', "nul \x00 raw"),
        ('{"text": "\u2028 is no line end"}\n'.encode(), "\u2028 is no line end"),
        (b'{"text": "\\ud83d\\ude00"}\n', "\U0001f600"),
        (b"\n", None),
        (b" \t\r\n", None),
        (b"", None),
    ],
)
def test_good_and_blank_lines(line, text):
    assert text_of(line, "text") == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": ""}\n', "empty"),
        (b'{"text": " \\n\\t\xc2\xa0"}\n', "empty"),
        (b'{"text": "broken\n', "broken_json"),
        (b'{"text": "x"} trailing\n', "broken_json"),
        (b"[" * 100_000, "broken_json"),
        (b'{"n": ' + b"1" * 5000 + b', "text": "x"}', "broken_json"),
        (b"\x00\x00\x00\n", "broken_json"),
        (b'\xef\xbb\xbf{"text": "a mark within the file"}\n', "broken_json"),
        (b'{"text": "\xff"}\n', "invalid_utf8"),
        (b'{"text": "cut within a character \xe2\x9c', "invalid_utf8"),
        (b'{"text": "CESU \xed\xa0\x80"}', "invalid_utf8"),
        (b'"text"\n', "not_an_object"),
        (b"42\n", "not_an_object"),
        (b'["text"]\n', "not_an_object"),
        (b"null\n", "not_an_object"),
        (b'{"content": "x"}\n', "missing_key"),
        (b'{"text": null}\n', "null_text"),
        (b'{"text": 7}\n', "not_a_string"),
        (b'{"text": ["x"]}\n', "not_a_string"),
        (b'{"text": "half \\ud800 a pair"}\n', "invalid_unicode"),
    ],
)
def test_bad_lines_have_a_reason(line, reason):
    with pytest.raises(BadLineError) as caught:
        text_of(line, "text")
    assert caught.value.reason == reason
    assert str(caught.value)


@pytest.mark.parametrize("chunk_bytes", [1, 20, 1 << 20])
def test_chunks_hold_all_lines_with_their_numbers(tmp_path, chunk_bytes):
    lines = [json.dumps({"text": "x" * i}).encode() + b"\n" for i in range(30)] + [b"\n", b'{"text": "last"}']
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    chunks = list(chunks_of(path, chunk_bytes))
    assert [line for chunk in chunks for line in chunk.lines] == lines, "the mark at the start is gone"
    assert chunks[-1].end == path.stat().st_size
    number = 1
    for chunk in chunks:
        assert chunk.first_line == number
        number += len(chunk.lines)


def test_an_empty_file_has_no_chunks(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"")
    assert list(chunks_of(tmp_path / "x.jsonl", 10)) == []
