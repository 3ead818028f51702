"""Checkpoints against torch.distributed.checkpoint (DCP): stall, total time of a save, loads, bytes read.

The state is fp32 matrices of 1024 x 1024 with both moments, about ``--mib`` MiB, cut by rows over two ranks on this
machine; both sides hold the same boxes and sync what they write. *Stall*: how long a background save keeps the caller.
*Save*: until the checkpoint is complete, in the foreground. *Load*: into the same boxes, into columns on two ranks, and
into rows on four. The two sides take turns, the first round is not counted, and each ratio is ours / DCP's of the
median over rounds of the slowest rank. Files are in the page cache when they are loaded. DCP runs at its best number of
threads of 1, 2 and 4, found by one save each, and keeps one stager for all background saves.

    python benchmarks/checkpoint.py [--mib 512] [--rounds 5] [--directory DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.report import header, last_line
from engine.agent_link import AgentLink
from engine.checkpoint.boxes import Box
from engine.checkpoint.catalog import directory_name
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.pieces import Piece
from engine.checkpoint.save import save_checkpoint
from engine.groups import Groups, build_groups
from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.layout import Layout
from engine.planning.messages import Meeting, RankLaunch
from engine.saving import CheckpointSaver

SIDE = 1024
THREADS = (1, 2, 4)
RUN = RunConfig(
    model=ModelConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, ffn_hidden_size=64, vocab_size=8, max_sequence_length=8
    ),
    data=CorpusConfig(path="none"),
    train=TrainConfig(sequence_length=8, global_batch_size=1, train_steps=1),
    checkpoint=CheckpointConfig(directory="none", keep=1),
)


def names(mib: int) -> list[str]:
    """Of the tensors, 4 MiB each."""
    return [f"{kind}/matrix.{i}" for i in range(mib // 12) for kind in ("weight", "exp_avg", "exp_avg_sq")]


class State:
    """One rank's part of the state, cut along ``axis``, as pieces and as DTensors over the same memory."""

    def __init__(self, rank: int, world: int, axis: int, mib: int, fill: bool) -> None:
        mesh = init_device_mesh("cpu", (world,))
        size = [SIDE, SIDE]
        size[axis] //= world
        offset = [0, 0]
        offset[axis] = rank * size[axis]
        box = Box(tuple(offset), tuple(size))
        self.pieces = []
        self.tensors: dict[str, Any] = {}
        generator = torch.Generator().manual_seed(1)
        for name in names(mib):
            data = torch.randn(SIDE, SIDE, generator=generator)[box.slices].clone() if fill else torch.zeros(size)
            self.pieces.append(Piece(name, (SIDE, SIDE), torch.float32, box, data))
            self.tensors[name] = DTensor.from_local(data, mesh, [Shard(axis)], run_check=False)

    def num_bytes(self) -> int:
        """Of this rank's part."""
        return sum(p.data.nbytes for p in self.pieces)


def timed(call: Callable[[], Any]) -> float:
    """Seconds, started together."""
    dist.barrier()
    began = time.monotonic()
    call()
    return time.monotonic() - began


def writer(directory: Path, threads: int) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(directory, thread_count=threads, sync_files=True)


def emptied(directory: Path, rank: int) -> Path:
    """``directory`` without what an earlier round left, on all ranks."""
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
    dist.barrier()
    return directory


def saves(rank: int, root: Path, groups: Groups, mib: int, rounds: int) -> dict[str, Any]:
    """Rounds of saves on two ranks; leaves ``ours`` and ``dcp`` behind for the loads."""
    state = State(rank, 2, 0, mib, fill=True)
    launch = RankLaunch(
        job="benchmark",
        generation=1,
        rank=rank,
        layout=groups.layout,
        run=RUN,
        device="cpu",
        meeting=Meeting(host="none", port=1, prefix="none"),
        run_directory="none",
    )
    link = AgentLink(None, 1.0)
    saver = CheckpointSaver(launch, root / "ours-behind", groups.checkpoint, link, state.pieces)
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def ours(step: int, directory: Path) -> None:
        about = {"job": "benchmark", "generation": 1, "step": step, "run": RUN, "layout": groups.layout}
        save_checkpoint(state.pieces, directory, groups.world, **about)  # type: ignore[arg-type]

    def theirs(directory: Path, threads: int) -> None:
        dcp.save(state.tensors, storage_writer=writer(directory, threads))

    choice = torch.zeros(len(THREADS))
    for i, threads in enumerate(THREADS):
        choice[i] = timed(lambda threads=threads: theirs(emptied(root / "dcp", rank), threads))
    dist.all_reduce(choice, dist.ReduceOp.MAX)
    best = THREADS[int(choice.argmin())]

    found: dict[str, list[float]] = {name: [] for name in ("our_stall", "dcp_stall", "our_save", "dcp_save")}
    for step in range(1, rounds + 2):
        found["our_stall"].append(timed(lambda step=step: saver.save(step, {})))
        saver.wait()

        behind = emptied(root / "dcp-behind", rank)
        futures: list[Any] = []
        found["dcp_stall"].append(
            timed(
                lambda behind=behind, futures=futures: futures.append(
                    dcp.async_save(state.tensors, storage_writer=writer(behind, best), async_stager=stager)
                )
            )
        )
        futures[0].result()

        directory = emptied(root / "ours", rank)
        found["our_save"].append(timed(lambda step=step, directory=directory: ours(step, directory)))
        directory = emptied(root / "dcp", rank)
        found["dcp_save"].append(timed(lambda directory=directory: theirs(directory, best)))
    saver.close()
    stager.close()
    return {**found, "threads": best, "step": step, "num_bytes": state.num_bytes()}


def loads(
    rank: int, root: Path, groups: Groups, mib: int, rounds: int, step: int, axis: int, check: bool
) -> dict[str, Any]:
    """Rounds of loads by the ranks of ``groups``, cut along ``axis``."""
    world = groups.world.size
    state = State(rank, world, axis, mib, fill=False)
    expected = [p.data for p in State(rank, world, axis, mib, fill=True).pieces] if check else []
    found: dict[str, list[float]] = {"ours": [], "dcp": []}
    read = needed = 0

    def ours() -> None:
        nonlocal read, needed
        result = load_checkpoint(state.pieces, root / "ours" / directory_name(step, 1), groups.world)
        read, needed = result.bytes_read, result.bytes_needed

    def right() -> bool:
        same = all(torch.equal(p.data, e) for p, e in zip(state.pieces, expected, strict=False))
        for piece in state.pieces:
            piece.data.zero_()
        return same

    for _ in range(rounds + 1):
        found["ours"].append(timed(ours))
        assert right(), "what we loaded is not what was saved"
        found["dcp"].append(timed(lambda: dcp.load(state.tensors, storage_reader=dcp.FileSystemReader(root / "dcp"))))
        assert right(), "what DCP loaded is not what was saved"
    return {**found, "read": read, "needed": needed}


def _rank(pipe: Any, rank: int, world: int, meeting: str, work: Callable[..., Any], root: Path, args: tuple[Any, ...]):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}-dcp", rank=rank, world_size=world)
    store = FileStore(f"{meeting}-ours", world)
    store.set_timeout(timedelta(seconds=60))
    groups = build_groups(Layout(dp=world), rank, store, torch.device("cpu"), bind_address="127.0.0.1", timeout_s=300)
    pipe.send(work(rank, root, groups, *args))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # past the destructors of process groups


def on_ranks(world: int, work: Callable[..., Any], root: Path, *args: Any) -> list[dict[str, Any]]:
    """What ``work`` returned on each of ``world`` processes."""
    context = multiprocessing.get_context("spawn")
    meeting = str(root / f"meeting-{time.monotonic_ns()}")
    pipes = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        context.Process(target=_rank, args=(theirs, rank, world, meeting, work, root, args), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    return [pipe.recv() for pipe in pipes]


def slowest(results: list[dict[str, Any]], name: str) -> float:
    """Median over rounds, without the first, of the slowest rank's seconds."""
    return statistics.median([max(each) for each in zip(*(r[name] for r in results), strict=True)][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the state (default 512)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--directory", type=Path, default=None, help="where to write (default: a temporary one)")
    arguments = parser.parse_args()
    mib, rounds = arguments.mib, arguments.rounds
    facts = header("torch")
    root = Path(tempfile.mkdtemp(prefix="everstep-checkpoint-", dir=arguments.directory))
    try:
        saved = on_ranks(2, saves, root, mib, rounds)
        step = saved[0]["step"]
        read = {
            name: on_ranks(world, loads, root, mib, rounds, step, axis, True)
            for name, world, axis in (("same", 2, 0), ("columns", 2, 1), ("four", 4, 0))
        }
    finally:
        shutil.rmtree(root)
    seconds = {name: slowest(saved, name) for name in ("our_stall", "dcp_stall", "our_save", "dcp_save")}
    for name, results in read.items():
        seconds |= {f"our_load_{name}": slowest(results, "ours"), f"dcp_load_{name}": slowest(results, "dcp")}
    print(f"state: {sum(r['num_bytes'] for r in saved) / 2**20:.0f} MiB; DCP at {saved[0]['threads']} threads")
    ratios = {}
    for name in ("stall", "save", "load_same", "load_columns", "load_four"):
        ours, theirs = seconds[f"our_{name}"], seconds[f"dcp_{name}"]
        ratios[name] = ours / theirs
        print(f"{name:13} ours {ours:7.3f} s   DCP {theirs:7.3f} s   ratio {ours / theirs:.3f}")
    last_line(
        {
            "stall_ratio": round(ratios["stall"], 4),
            "save_ratio": round(ratios["save"], 4),
            "load_same_ratio": round(ratios["load_same"], 4),
            "load_other_ratio": round(max(ratios["load_columns"], ratios["load_four"]), 4),
            "read_amplification": round(
                max(sum(r["read"] for r in results) / sum(r["needed"] for r in results) for results in read.values()), 4
            ),
            "dcp_threads": saved[0]["threads"],
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "machine": facts,
        }
    )


if __name__ == "__main__":
    main()
