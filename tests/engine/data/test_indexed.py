"""The .bin/.idx pair: the bytes of Megatron-Core, round trips, atomic writing, and unsound pairs refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.indexed import CorpusError, CorpusWriter, IndexedCorpus, describe, token_dtype
from engine.planning.corpus import CorpusSummary, check_corpus

# Written by IndexedDatasetBuilder of megatron-core 0.16.1 for the documents below.
DOCUMENTS = [[1, 2, 3], [4], [5, 6]]
MEGATRON_UINT16 = (
    "4d4d4944494458000001000000000000000803000000000000000400000000000000030000000100000002000000"
    "0000000000000000060000000000000008000000000000000000000000000000010000000000000002000000000000000300000000000000"
)
# The same with a fourth document of two sequences, [7] and [8, 9, 10].
MEGATRON_CUT = (
    "4d4d494449445800000100000000000000080500000000000000050000000000000003000000010000000200000001000000"
    "030000000000000000000000060000000000000008000000000000000c000000000000000e0000000000000000000000000000000100"
    "000000000000020000000000000003000000000000000500000000000000"
)


def write(prefix: Path, documents=DOCUMENTS, dtype=np.uint16) -> Path:
    with CorpusWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_writes_the_very_bytes_of_megatron_core(tmp_path):
    write(tmp_path / "c")
    assert (tmp_path / "c.idx").read_bytes().hex() == MEGATRON_UINT16
    assert (tmp_path / "c.bin").read_bytes() == np.array([1, 2, 3, 4, 5, 6], "<u2").tobytes()


def test_reads_documents_that_megatron_cut_into_sequences(tmp_path):
    (tmp_path / "c.idx").write_bytes(bytes.fromhex(MEGATRON_CUT))
    (tmp_path / "c.bin").write_bytes(np.arange(1, 11, dtype="<u2").tobytes())
    corpus = IndexedCorpus(tmp_path / "c")
    assert corpus.summary == CorpusSummary(num_documents=4, num_sequences=5, num_tokens=10, dtype="uint16")
    assert [corpus.document(i).tolist() for i in range(4)] == [*DOCUMENTS, [7, 8, 9, 10]]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65_535), max_size=20), min_size=1, max_size=20), st.sampled_from([2, 4]))
def test_documents_survive_a_round_trip(tmp_path_factory, documents, width):
    if not any(documents):
        documents = [[0]]
    prefix = write(tmp_path_factory.mktemp("c") / "c", documents, np.uint16 if width == 2 else np.int32)
    corpus = IndexedCorpus(prefix)
    assert [corpus.document(i).tolist() for i in range(corpus.summary.num_documents)] == documents
    assert corpus.tokens.tolist() == [token for document in documents for token in document]
    assert describe(prefix).max_id == max(max(document, default=0) for document in documents)


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(257, "uint16"), (65_499, "uint16"), (65_500, "uint16"), (65_536, "uint16"),
                             (65_537, "int32"), (70_000, "int32")],
)  # fmt: skip
def test_the_type_holds_the_highest_id(tmp_path, vocab_size, name):
    dtype = token_dtype(vocab_size)
    assert dtype.name == name
    write(tmp_path / "c", [[0, vocab_size - 1]], dtype)
    assert IndexedCorpus(tmp_path / "c").document(0).tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("ids", [[65_536], [-1]])
def test_an_id_that_does_not_fit_is_an_error_not_another_id(tmp_path, ids):
    with pytest.raises(ValueError, match="do not fit uint16"):
        write(tmp_path / "c", [[1], ids])
    assert list(tmp_path.iterdir()) == []


def test_the_reader_needs_no_torch(tmp_path):
    prefix = write(tmp_path / "c")
    code = f"import sys, engine.data.indexed as i; i.IndexedCorpus({str(prefix)!r}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_check_needs_neither_numpy_nor_torch(tmp_path):
    prefix = write(tmp_path / "c")
    code = (
        f"import sys; from engine.planning.corpus import check_corpus; print(check_corpus({str(prefix)!r}).num_tokens,"
        "'numpy' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "6 False False\n"


# Writing


def test_an_error_while_writing_leaves_nothing_and_keeps_the_older_pair(tmp_path):
    write(tmp_path / "old", [[9, 9]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="no more"), CorpusWriter(tmp_path / "old", np.uint16) as writer:
        writer.add_document([1])
        raise RuntimeError("no more")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_a_corpus_without_tokens_is_not_written(tmp_path, documents):
    with pytest.raises(CorpusError, match=r"c\.bin is not written"):
        write(tmp_path / "c", documents)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_pair_replaces_the_older_one(tmp_path):
    write(tmp_path / "c", [[9, 9]])
    old = IndexedCorpus(tmp_path / "c")
    write(tmp_path / "c")
    assert IndexedCorpus(tmp_path / "c").summary.num_tokens == 6
    assert old.tokens.tolist() == [9, 9], "a reader of the older pair keeps it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write(tmp_path / "nowhere" / "c")


# Refusing, both by the cheap check before a job is taken and by the reader


def refused(prefix: Path, *words: str) -> None:
    for look in (check_corpus, IndexedCorpus):
        with pytest.raises(CorpusError) as caught:
            look(prefix)
        for word in ("data.path", *words):
            assert word in str(caught.value)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path, suffix):
    write(tmp_path / "c")
    (tmp_path / f"c.{suffix}").unlink()
    refused(tmp_path / "c", f"c.{suffix} does not exist")


def test_a_path_with_its_ending_gets_a_hint(tmp_path):
    write(tmp_path / "c")
    refused(tmp_path / "c.bin", "c.bin.idx does not exist", "give the prefix")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_of_0_bytes_is_named(tmp_path, suffix):
    write(tmp_path / "c")
    (tmp_path / f"c.{suffix}").write_bytes(b"")
    refused(tmp_path / "c", f"c.{suffix} is empty (0 bytes)")


@pytest.mark.parametrize("keep", range(1, 102))
def test_an_index_cut_anywhere_is_named(tmp_path, keep):
    write(tmp_path / "c")
    whole = (tmp_path / "c.idx").read_bytes()
    assert len(whole) == 102
    (tmp_path / "c.idx").write_bytes(whole[:keep])
    refused(tmp_path / "c", "c.idx is truncated")


@pytest.mark.parametrize("keep", [1, 2, 11])
def test_cut_tokens_are_named(tmp_path, keep):
    write(tmp_path / "c")
    whole = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(whole[:keep])
    refused(tmp_path / "c", "c.bin", "do not belong together", "truncated", f"the file has {keep}")


def test_halves_of_two_pairs_are_refused(tmp_path):
    write(tmp_path / "c")
    write(tmp_path / "d", [[1, 2, 3, 4], [5, 6, 7]])
    (tmp_path / "d.bin").rename(tmp_path / "c.bin")
    refused(tmp_path / "c", "c.bin", "c.idx", "do not belong together")


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"PK", "is not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "float32"),
        (17, b"\x63", "dtype code 99"),
        (18, b"\x04", "asks for 114"),
        (26, b"\x03", "too long"),
        (94, b"\x09", "documents end at sequence 9 of 3"),
    ],
)
def test_a_wrong_header_is_named(tmp_path, offset, value, words):
    write(tmp_path / "c")
    data = bytearray((tmp_path / "c.idx").read_bytes())
    data[offset : offset + len(value)] = value
    (tmp_path / "c.idx").write_bytes(data)
    refused(tmp_path / "c", "c.idx", words)


@pytest.mark.parametrize("offset", [34, 38, 46, 54, 70, 78])
def test_the_reader_refuses_damage_between_the_ends(tmp_path, offset):
    write(tmp_path / "c")
    data = bytearray((tmp_path / "c.idx").read_bytes())
    data[offset] ^= 0x40
    (tmp_path / "c.idx").write_bytes(data)
    with pytest.raises(CorpusError, match=r"c\.idx is damaged"):
        IndexedCorpus(tmp_path / "c")


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path / "c")
    real = Path.open

    def denied(path, *args, **kwargs):
        if path.name == "c.idx":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)  # the test may run as root, whom no mode stops
    refused(tmp_path / "c", "c.idx cannot be read: Permission denied")


def test_too_few_tokens_for_one_sample_are_refused(tmp_path):
    summary = check_corpus(write(tmp_path / "c"))
    assert summary.num_samples(5) == 1
    assert summary.num_samples(2) == 2
    with pytest.raises(CorpusError, match=r"6 tokens, one sample of train\.sequence_length 6 needs 7"):
        summary.num_samples(6)
