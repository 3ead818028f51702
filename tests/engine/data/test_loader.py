"""Samples and batches: the right tokens, the same in every layout, read ahead, and errors that reach the main loop."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from engine.data.indexed import CorpusError, CorpusWriter
from engine.data.loader import BatchLoader, CorpusSamples, SampleLog
from engine.data.order import samples_of_step
from engine.planning.config import TrainConfig
from engine.planning.layout import Layout
from tests.harness import run_ranks

SEQ = 8
VOCAB = 500


def train_config(**changes) -> TrainConfig:
    settings = {"sequence_length": SEQ, "global_batch_size": 8, "micro_batch_size": 2, "train_steps": 40, "seed": 3}
    return TrainConfig(**{**settings, **changes})


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, size=1003)


@pytest.fixture
def prefix(tmp_path, tokens):
    with CorpusWriter(tmp_path / "c", np.uint16) as writer:
        for document in np.split(tokens, [5, 5, 400, 401]):
            writer.add_document(document)
    return tmp_path / "c"


@pytest.fixture
def samples(prefix):
    return CorpusSamples(prefix, SEQ, vocab_size=VOCAB)


def test_samples_tile_the_concatenated_documents(samples, tokens):
    assert samples.num_samples == (1003 - 1) // SEQ == 125
    rows = samples.read(np.array([0, 7, 124]))
    assert rows.dtype == np.int64
    for row, k in zip(rows, (0, 7, 124), strict=True):
        assert np.array_equal(row, tokens[k * SEQ : k * SEQ + SEQ + 1])


def test_the_last_sample_may_end_with_the_last_token(tmp_path):
    with CorpusWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(2 * SEQ + 1))
    samples = CorpusSamples(tmp_path / "c", SEQ, vocab_size=VOCAB)
    assert samples.num_samples == 2
    assert samples.read(np.array([1]))[0, -1] == 2 * SEQ


def test_a_corpus_without_one_sample_is_refused(tmp_path):
    with CorpusWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document(np.arange(SEQ))
    with pytest.raises(CorpusError, match="8 tokens"):
        CorpusSamples(tmp_path / "c", SEQ, vocab_size=VOCAB)


def test_micro_batches_hold_the_places_of_the_order(samples, tokens):
    train = train_config()
    with BatchLoader(samples, train, Layout(), 0) as loader:
        for step in (0, 1, 2, 20):
            ids = samples_of_step(step, 8, 125, 3)
            batch = loader.step(step)
            assert len(batch) == 4
            for m, (inputs, targets) in enumerate(batch):
                assert inputs.dtype == targets.dtype == torch.int64
                assert inputs.shape == targets.shape == (2, SEQ)
                for row, k in enumerate(ids[2 * m : 2 * m + 2]):
                    assert inputs[row].tolist() == tokens[k * SEQ : k * SEQ + SEQ].tolist()
                    assert targets[row].tolist() == tokens[k * SEQ + 1 : k * SEQ + SEQ + 1].tolist()


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_replicas_together_run_the_same_micro_batches_whatever_dp_is(samples, dp):
    train = train_config()
    with BatchLoader(samples, train, Layout(), 0) as alone:
        expected = [batch.tokens.tolist() for batch in alone.step(5)]
        ids = alone.sample_ids(5).tolist()
    found, found_ids = [], []
    for rank in range(dp):
        with BatchLoader(samples, train, Layout(dp=dp), rank) as loader:
            found += [batch.tokens.tolist() for batch in loader.step(5)]
            found_ids += loader.sample_ids(5).tolist()
    assert found == expected
    assert found_ids == ids


def test_steps_may_come_in_any_order(samples):
    train = train_config()
    with BatchLoader(samples, train, Layout(), 0) as loader:
        straight = [loader.step(step)[0].tokens.tolist() for step in range(6)]
    with BatchLoader(samples, train, Layout(), 0) as loader:
        for step in (3, 4, 1, 5, 5, 0, 2):
            assert loader.step(step)[0].tokens.tolist() == straight[step]


def test_the_next_step_is_read_ahead_once(samples, monkeypatch):
    reads = []
    real = samples.read
    monkeypatch.setattr(samples, "read", lambda ids: (reads.append(threading.current_thread().name), real(ids))[1])
    with BatchLoader(samples, train_config(train_steps=3), Layout(), 0) as loader:
        for step in range(3):
            loader.step(step)
    assert len(reads) == 3, "nothing is read twice, nor beyond the last step"
    assert reads[0] == "MainThread"
    assert all(name.startswith("read-ahead") for name in reads[1:])


def test_an_id_outside_the_vocabulary_reaches_the_main_loop(prefix, tokens):
    samples = CorpusSamples(prefix, SEQ, vocab_size=VOCAB - 1)
    highest = {k for k in range(125) if VOCAB - 1 in tokens[k * SEQ : k * SEQ + SEQ + 1]}
    bad_step = next(step for step in range(1, 40) if highest & set(samples_of_step(step, 8, 125, 3).tolist()))
    with BatchLoader(samples, train_config(), Layout(), 0) as loader:
        for step in range(bad_step):
            loader.step(step)
        with pytest.raises(
            ValueError, match=r"data\.path: sample \d+ of .* has token id 499, model\.vocab_size is 499"
        ):
            loader.step(bad_step)


def test_a_loader_made_before_a_fork_works_after_it(samples):
    loader = BatchLoader(samples, train_config(), Layout(dp=2), 0)
    before = threading.active_count()

    def child(rank, store):
        batches = [loader.step(step)[0].tokens.tolist() for step in range(3)]
        loader.close()
        return batches

    first, second = run_ranks(2, child)
    assert first == second
    assert threading.active_count() == before
    loader.close()


def test_close_ends_the_thread(samples):
    before = threading.active_count()
    loader = BatchLoader(samples, train_config(), Layout(), 0)
    loader.step(0)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before


def test_the_sample_log_appends_whole_lines_over_restarts(tmp_path):
    for start in (0, 2):
        log = SampleLog(tmp_path / "samples.jsonl")
        for step in (start, start + 1):
            log.write(step, 1, np.array([step, 5, 1 << 40]))
            assert (tmp_path / "samples.jsonl").read_bytes().endswith(b"\n"), "a line is out when it is written"
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "dp": 1, "samples": [step, 5, 1 << 40]} for step in range(4)]
