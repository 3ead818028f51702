"""From a corpus to the micro-batches of one replica, the next step always being read ahead."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.data.indexed import IndexedCorpus
from engine.data.order import samples_of_step
from engine.planning.config import TrainConfig
from engine.planning.corpus import CorpusError
from engine.planning.layout import Layout


class MicroBatch(NamedTuple):
    """What one forward pass takes: ``tokens`` and ``targets`` int64 [micro_batch, seq], targets one token ahead."""

    tokens: Tensor
    targets: Tensor


class CorpusSamples:
    """A corpus cut into samples: sample k is ``tokens[k * seq : (k + 1) * seq + 1]`` of the concatenated documents.

    Raises CorpusError (a ValueError) when the pair is not sound or does not hold one sample.
    """

    def __init__(self, path: str | Path, sequence_length: int, *, vocab_size: int) -> None:
        self._corpus = IndexedCorpus(path)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.num_samples = self._corpus.summary.num_samples(sequence_length)

    def read(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens [n, seq + 1] of ``samples`` [n]. Raises CorpusError when an id is outside the vocabulary."""
        offsets = samples[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens: npt.NDArray[np.int64] = self._corpus.tokens[offsets].astype(np.int64)
        bad = (tokens < 0) | (tokens >= self.vocab_size)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise CorpusError(
                f"data.path: sample {samples[row]} of {self._corpus.path} has token id {tokens[row, column]}, "
                f"model.vocab_size is {self.vocab_size}"
            )
        return tokens


class BatchLoader:
    """The micro-batches of replica ``dp_rank``, step by step.

    Micro-batch m of a step holds places ``m * micro_batch_size`` and on of the step's samples, in every layout; the
    layout only says which replica runs it. Start-up makes no thread, so a loader may exist before a fork; the thread
    that reads ahead starts with the first ``step``. Call ``close`` (or leave the ``with`` block) to end it.
    """

    def __init__(self, samples: CorpusSamples, train: TrainConfig, layout: Layout, dp_rank: int) -> None:
        self._samples = samples
        self._train = train
        microbatches = layout.microbatches_of_replica(dp_rank, train.num_microbatches)
        size = train.micro_batch_size
        self._places = slice(microbatches.start * size, microbatches.stop * size)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None

    def sample_ids(self, step: int) -> npt.NDArray[np.int64]:
        """The samples of this replica in ``step``, in the order in which they are consumed."""
        train = self._train
        ids = samples_of_step(step, train.global_batch_size, self._samples.num_samples, train.seed)
        return ids[self._places]

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of ``step`` (from 0), and the next step's reading begins.

        Any step may follow any other; only the next one is ready at once. Raises what reading it raised.
        """
        ahead, self._ahead = self._ahead, None
        batch = ahead[1].result() if ahead is not None and ahead[0] == step else self._read(step)
        if step + 1 < self._train.train_steps:
            self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return batch

    def close(self) -> None:
        """End the read-ahead thread; what it had read is dropped."""
        self._ahead = None
        self._reader.shutdown(cancel_futures=True)

    def _read(self, step: int) -> list[MicroBatch]:
        tokens = torch.from_numpy(self._samples.read(self.sample_ids(step)))
        return [
            MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            for rows in torch.split(tokens, self._train.micro_batch_size)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SampleLog:
    """Which samples each step consumed: one line ``{"step": s, "dp": d, "samples": [...]}`` per step and replica.

    ``s`` is the number of completed steps once this one is done, as in the metrics: the first line of a run says 1.

    One rank of a replica writes (tp 0 of the first stage), when the step is consumed and not when it is read ahead.
    Lines are appended whole, so a killed rank leaves whole lines and its successor goes on in the same file.
    """

    def __init__(self, path: str | Path) -> None:
        # The buffer is larger than any line: each flush is one write.
        self._file = Path(path).open("ab", buffering=1 << 22)  # noqa: SIM115  (open for as long as the rank trains)

    def write(self, step: int, dp_rank: int, samples: npt.NDArray[np.int64]) -> None:
        """Append the line of the step that made ``step`` completed steps."""
        line = json.dumps({"step": step, "dp": dp_rank, "samples": samples.tolist()}, separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
