"""A background save beside training over NCCL: page-locked copies, and collectives of its own over gloo."""

from __future__ import annotations

import time

import torch

from engine.checkpoint.boxes import Box
from engine.checkpoint.host_copy import HostCopy
from engine.checkpoint.pieces import Piece
from engine.planning.layout import Layout
from tests.engine.test_saving import files_of, saving, train_ahead
from tests.harness import run_ranks
from tests.training import tiny_run, train


def _copy(rank, store, num_bytes):
    device = torch.device("cuda:0")
    whole = torch.arange(num_bytes // 4, device=device, dtype=torch.float32).view(4, -1)
    pieces = [
        Piece("weight/x", tuple(whole.shape), torch.float32, Box((i, 0), (1, whole.shape[1])), whole[i : i + 1])
        for i in range(4)
    ]
    expected = whole.cpu()
    copy = HostCopy(pieces)
    copy.take()
    began = time.monotonic()
    taken = copy.take()
    seconds = time.monotonic() - began
    whole.zero_()
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([piece.data for piece in taken]), expected)
    locked = all(piece.data.is_pinned() for piece in taken)
    copy.close()
    return locked, num_bytes / seconds / 1e9


def test_the_copy_is_page_locked_and_holds_the_values_of_its_moment():
    ((locked, gigabytes_per_s),) = run_ranks(1, _copy, 2 << 30)
    print(f"{gigabytes_per_s:.1f} GB/s")
    assert locked


def test_a_background_save_holds_the_state_of_its_step(corpus, tmp_path):
    """The next step is over before a byte is written; the bytes are those of a synchronous save."""
    layout = Layout(dp=2)
    for name, asynchronous in (("apart", True), ("along", False)):
        config = saving(tiny_run(corpus, tmp_path / name, train_steps=7), save_interval=3, asynchronous=asynchronous)
        if asynchronous:
            run_ranks(2, train_ahead, config, layout, "cuda")
        else:
            train(config, layout, device="cuda")
    found = [files_of(tmp_path / name / "checkpoints") for name in ("apart", "along")]
    assert len(found[0]) == 3 * 3 + 1
    assert found[0] == found[1]
