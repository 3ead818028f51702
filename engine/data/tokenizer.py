"""Tokenizers: bytes as they are, any ``tokenizers`` JSON file, and byte-level BPE trained on a corpus.

``python -m engine.data.tokenizer train --input X.jsonl --vocab-size N --output T.json`` trains one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.data.aside import written_aside
from engine.data.jsonl import BadLineError, chunks_of, text_of

EOD_TOKEN = "<|endoftext|>"
_KNOWN_EOD_TOKENS = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]")
_SMALLEST_BPE = 257


class Tokenizer(Protocol):
    """Text to token ids and back. Every id is below ``vocab_size``; ``eod`` ends a document."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    @property
    def eod(self) -> int:
        """The id that ends a document; ``encode`` never gives it."""

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without any special token."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""


class ByteTokenizer:
    """The 256 bytes of UTF-8 and an end-of-document id."""

    vocab_size = 257
    eod = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; end-of-document ids are left out, broken UTF-8 is replaced."""
        return bytes(i for i in ids if i != self.eod).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library from its JSON file.

    ``eod_token`` names the end-of-document token; when not given, the first of the usual names that the file has.
    Raises ValueError when the file is missing, is no tokenizer, or has no such token.
    """

    def __init__(self, path: str | Path, eod_token: str | None = None) -> None:
        try:
            self._tokenizer: HuggingFace = HuggingFace.from_str(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"tokenizer: {path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer: {path} is no tokenizer file: {error}") from None
        # Text that spells a special token is text: only we end documents.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        names = _KNOWN_EOD_TOKENS if eod_token is None else (eod_token,)
        found = [vocabulary[name] for name in names if name in vocabulary]
        if not found:
            raise ValueError(f"tokenizer: {path} has no end-of-document token ({', '.join(names)})")
        self.eod: int = found[0]
        self.vocab_size: int = max(vocabulary.values()) + 1

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, without any special token."""
        # The "fast" call leaves out the offsets of tokens in the text, a third of the time.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def load_tokenizer(name: str | Path, eod_token: str | None = None) -> Tokenizer:
    """The tokenizer ``bytes``, or the one of a JSON file. Raises ValueError."""
    return ByteTokenizer() if str(name) == "bytes" else FileTokenizer(name, eod_token)


def train_bpe(texts: Iterable[str], vocab_size: int, output: str | Path) -> FileTokenizer:
    """Train byte-level BPE on ``texts`` and write it to ``output`` (JSON, written aside and renamed).

    The vocabulary has at most ``vocab_size`` tokens: 256 bytes, the end-of-document token, then merges; fewer when the
    texts have no more pairs to merge. Raises ValueError when ``vocab_size`` is too small or there is no text.
    """
    if vocab_size < _SMALLEST_BPE:
        raise ValueError(f"vocab_size {vocab_size} is below {_SMALLEST_BPE}: 256 bytes and {EOD_TOKEN}")
    texts = iter(texts)
    first = next(texts, None)
    if first is None:
        raise ValueError("input: there is not a single text to train on")
    tokenizer = HuggingFace(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chain((first,), texts), trainer)
    with written_aside(Path(output)) as stream:
        stream.write(tokenizer.to_str().encode())
    return FileTokenizer(output, EOD_TOKEN)


def texts_of(path: str | Path, key: str, max_bytes: int | None = None) -> Iterator[str]:
    """The good texts of a JSON-lines file; with ``max_bytes``, about that much of it, spread evenly over the file.

    Raises ValueError when the file cannot be read.
    """
    path = Path(path)
    try:
        total = path.stat().st_size
        share = 1.0 if max_bytes is None else max_bytes / max(total, 1)
        seen = taken = 0
        for chunk in chunks_of(path, 1 << 16):
            for line in chunk.lines:
                seen += len(line)
                if taken > seen * share:
                    continue
                try:
                    text = text_of(line, key)
                except BadLineError:
                    continue
                if text is not None:
                    taken += len(line)
                    yield text
    except OSError as error:
        raise ValueError(f"input: {path} cannot be read: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; prints one JSON object. Exit code 0, 1 for bad input, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m engine.data.tokenizer", description="Train a tokenizer.")
    train = parser.add_subparsers(required=True).add_parser("train", help="byte-level BPE on a JSON-lines file")
    train.add_argument("--input", required=True, type=Path, help="JSON lines, one document each")
    train.add_argument("--output", required=True, type=Path, help="tokenizer file to write")
    train.add_argument("--vocab-size", required=True, type=int, help="most tokens that the vocabulary may have")
    train.add_argument("--text-key", default="text", help="key of the text in each object")
    train.add_argument("--max-bytes", type=int, help="train on about this much of the input, spread evenly over it")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    num_bytes = 0

    def counted() -> Iterator[str]:
        nonlocal num_bytes
        for text in texts_of(options.input, options.text_key, options.max_bytes):
            num_bytes += len(text.encode())
            yield text

    try:
        tokenizer = train_bpe(counted(), options.vocab_size, options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = round(time.monotonic() - begin, 3)
    print(json.dumps({"vocab_size": tokenizer.vocab_size, "text_bytes": num_bytes, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
