"""A corpus that every machine has: the source text of the running interpreter's standard library, as JSON lines.

``python -m engine.data.stdlib_corpus --output corpus.jsonl`` writes ``{"text": ..., "path": ...}`` a file, in sorted
order: the same interpreter always gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.data.aside import written_aside

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path below ``root``, text) of every Python file, in sorted order.

    Files that cannot be read as Python source are left out: the library's tests hold some in broken encodings.
    """
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _NOT_THE_LIBRARY)
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                try:
                    with tokenize.open(path) as stream:
                        text = stream.read()
                except (OSError, SyntaxError, UnicodeDecodeError):
                    continue
                if text.strip():
                    yield path.relative_to(root).as_posix(), text


def write_corpus(root: Path, output: Path, max_bytes: int | None = None) -> tuple[int, int]:
    """Write the sources below ``root`` to ``output``, stopping before the file gets larger than ``max_bytes``.

    Returns the numbers of documents and of bytes written. Raises ValueError when not one file was.
    """
    num_documents = num_bytes = 0
    with written_aside(output) as stream:
        for path, text in sources(root):
            line = json.dumps({"text": text, "path": path}).encode() + b"\n"
            if max_bytes is not None and num_bytes + len(line) > max_bytes:
                break
            stream.write(line)
            num_documents += 1
            num_bytes += len(line)
        if not num_documents:
            limit = "" if max_bytes is None else f" that fits {max_bytes} bytes"
            raise ValueError(f"there is no Python source below {root}{limit}")
    return num_documents, num_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; prints one JSON object. Exit code 0, 1 when there is nothing to write, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.data.stdlib_corpus", description="Write Python's standard library as JSON lines."
    )
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    parser.add_argument("--max-bytes", type=int, help="stop before the file gets larger than this")
    options = parser.parse_args(arguments)
    try:
        num_documents, num_bytes = write_corpus(Path(sysconfig.get_path("stdlib")), options.output, options.max_bytes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"documents": num_documents, "bytes": num_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
