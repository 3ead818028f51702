"""What a preprocessing worker does: lines to token ids, bad lines to reasons."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.data.indexed import Ids, token_dtype
from engine.data.jsonl import EMPTY, BadLineError, Chunk, text_of
from engine.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class BadLine:
    """One line that is no document; ``line`` counts from 1, ``reason`` is a word of ``jsonl.py``."""

    line: int
    reason: str
    detail: str


@dataclass
class EncodedChunk:
    """The documents of some lines (each with its end-of-document id) and what was wrong with the other lines."""

    end: int
    documents: list[Ids] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    num_empty: int = 0


def chunk_encoder(tokenizer: str, text_key: str) -> Callable[[Chunk], EncodedChunk]:
    """A function that encodes chunks of lines with the tokenizer of this name or path."""
    # The worker is one of many processes already: no threads of the library's own below it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded = load_tokenizer(tokenizer)
    dtype = token_dtype(loaded.vocab_size)

    def encode(chunk: Chunk) -> EncodedChunk:
        encoded = EncodedChunk(chunk.end)
        for number, line in enumerate(chunk.lines, chunk.first_line):
            try:
                text = text_of(line, text_key)
            except BadLineError as error:
                if error.reason == EMPTY:
                    encoded.num_empty += 1
                else:
                    encoded.bad.append(BadLine(number, error.reason, str(error)))
                continue
            if text is not None:
                encoded.documents.append(np.array([*loaded.encode(text), loaded.eod], dtype=dtype))
        return encoded

    return encode
