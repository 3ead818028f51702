"""A small model as parameter descriptions only, cut like the engine cuts it, and ranks that are threads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.boxes import Box
from engine.checkpoint.load import LoadResult, load_checkpoint
from engine.checkpoint.pieces import Piece, flat_pieces
from engine.checkpoint.save import SaveResult, save_checkpoint
from engine.parameters import ParameterSpec, Segment
from engine.planning.config import CheckpointConfig, CorpusConfig, ModelConfig, RunConfig, TrainConfig
from engine.planning.layout import Layout

MODEL = ModelConfig(
    num_layers=5,
    hidden_size=16,
    num_attention_heads=8,
    num_key_value_heads=4,
    ffn_hidden_size=24,
    vocab_size=43,
    max_sequence_length=32,
    vocab_padding_multiple=8,
)
RUN = RunConfig(
    model=MODEL,
    data=CorpusConfig(path="corpus"),
    train=TrainConfig(sequence_length=16, global_batch_size=8, train_steps=100),
    checkpoint=CheckpointConfig(directory="checkpoints"),
)
KINDS = {"weight": torch.float32, "exp_avg_sq": torch.bfloat16}


def segment(name: str, shape: tuple[int, ...], dim: int | None, tp: int, of: int, row: int = 0) -> Segment:
    """Part ``tp`` of ``of`` equal parts along ``dim``; all of it when ``dim`` is None."""
    offset, size = [0] * len(shape), list(shape)
    if dim is not None:
        size[dim] = shape[dim] // of
        offset[dim] = tp * size[dim]
    return Segment(name, shape, tuple(offset), tuple(size), row, "normal")


def parameter(*segments: Segment, **flags: bool) -> ParameterSpec:
    rows = sum(s.size[0] for s in segments) if segments[0].size else 0
    shape = (rows, *segments[0].size[1:]) if segments[0].size else ()
    return ParameterSpec(shape=shape, segments=segments, **flags)


def embedding(tp: int, of: int, owned: bool) -> ParameterSpec:
    """Rows shared out; the rows from ``vocab_size`` on are padding and no segment covers them."""
    rows = MODEL.padded_vocab_size(of) // of
    real = max(0, min(rows, MODEL.vocab_size - tp * rows))
    shape = (MODEL.vocab_size, MODEL.hidden_size)
    segments = (Segment("embedding", shape, (tp * rows, 0), (real, shape[1]), 0, "normal"),) if real else ()
    return ParameterSpec((rows, shape[1]), segments, shared_embedding=True, owned=owned)


def stage_parameters(layout: Layout, tp: int, pp: int) -> Iterator[ParameterSpec]:
    """The local parameters of one (tp, pp) place."""
    of, h, hd = layout.tp, MODEL.hidden_size, MODEL.attention_head_dim
    if pp == 0:
        yield embedding(tp, of, owned=True)
    for layer in layout.layers_of_stage(pp, MODEL.num_layers):
        name = f"layers.{layer}"
        yield parameter(segment(f"{name}.norm", (h,), None, tp, of), tp_replicated=True)
        heads = (MODEL.num_attention_heads * hd, MODEL.kv_heads * hd, MODEL.kv_heads * hd)
        yield parameter(
            *stacked([segment(f"{name}.{x}", (n, h), 0, tp, of) for x, n in zip("qkv", heads, strict=True)])
        )
        yield parameter(segment(f"{name}.projection", (h, heads[0]), 1, tp, of))
        ffn = MODEL.ffn_hidden_size
        yield parameter(*stacked([segment(f"{name}.{x}", (ffn, h), 0, tp, of) for x in ("gate", "up")]))
        yield parameter(segment(f"{name}.down", (h, ffn), 1, tp, of))
        yield parameter(segment(f"{name}.experts", (3, 4, 8), 2, tp, of))
    if pp == layout.pp - 1:
        yield parameter(segment("final_scale", (), None, tp, of), tp_replicated=True)
        if layout.pp > 1:
            yield embedding(tp, of, owned=False)


def stacked(segments: list[Segment]) -> list[Segment]:
    out, row = [], 0
    for s in segments:
        out.append(Segment(s.name, s.global_shape, s.offset, s.size, row, s.init))
        row += s.size[0]
    return out


@cache
def values_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The global tensor ``name``: random bits of no NaN, the same for everybody."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pieces_of(layout: Layout, rank: int, uneven: bool = False) -> list[Piece]:
    """The state of one rank, NaN everywhere: its flat ZeRO-1 range over all local parameters, padding included.

    ``uneven``: the ranges differ in length and the last replica's is empty when there are more than two.
    """
    at = layout.coordinates(rank)
    specs = list(stage_parameters(layout, at.tp, at.pp))
    sizes = [max(1, torch.Size(s.shape).numel()) for s in specs]
    total = sum(sizes)
    if uneven and layout.dp > 1:
        shares = [d + 1 for d in range(layout.dp)]
        if layout.dp > 2:
            shares[-1] = 0
        cuts = [total * sum(shares[:d]) // sum(shares) for d in range(layout.dp + 1)]
    else:
        each = -(-total // layout.dp)
        cuts = [d * each for d in range(layout.dp + 1)]
    low, high = cuts[at.dp], cuts[at.dp + 1]
    found = []
    for kind, dtype in KINDS.items():
        flat = torch.full((high - low,), float("nan"), dtype=dtype)
        start = 0
        for spec, size in zip(specs, sizes, strict=True):
            first, last = max(low, start), min(high, start + size)
            if first < last:
                owned = spec.owned and not (spec.tp_replicated and at.tp > 0)
                found += flat_pieces(kind, spec, flat[first - low : last - low], first - start, owned=owned)
            start += size
    return found


def filled(pieces: list[Piece]) -> list[Piece]:
    """Give the pieces the values of their global tensors."""
    for piece in pieces:
        piece.data.copy_(values_of(piece.name, piece.global_shape, piece.dtype)[piece.box.slices])
    return pieces


def assert_right(pieces: list[Piece]) -> None:
    """Every piece holds exactly its part of the global tensor."""
    for piece in pieces:
        expected = values_of(piece.name, piece.global_shape, piece.dtype)[piece.box.slices]
        assert torch.equal(piece.data, expected), f"{piece.name} {piece.box}"


class ThreadGroup:
    """A group whose members are threads of this process: what ``engine.checkpoint`` needs of a Group."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def all_gather(self, output: Tensor, source: Tensor) -> ThreadGroup:
        self._board[self.rank] = source
        self._barrier.wait(timeout=30)
        output.copy_(torch.cat(self._board))
        self._barrier.wait(timeout=30)
        return self

    def wait(self) -> None:
        """``all_gather`` has done everything."""


def run_threads(world: int, fn: Callable[[int, ThreadGroup], Any]) -> list[Any]:
    """Call ``fn(rank, group)`` in ``world`` threads; returns what each returned, or the exception it raised."""
    board: list[Any] = [None] * world
    barrier = threading.Barrier(world)
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank, ThreadGroup(rank, board, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def good(results: list[Any]) -> list[Any]:
    """The results of ranks none of which raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def save_all(directory: Path, layout: Layout, states: list[list[Piece]], step: int = 10, generation: int = 1) -> Path:
    """Save every rank's pieces from one thread a rank; returns the checkpoint's directory."""

    def save(rank: int, group: ThreadGroup) -> SaveResult:
        return save_checkpoint(
            states[rank],
            directory,
            group,  # type: ignore[arg-type]
            job="job",
            generation=generation,
            step=step,
            run=RUN,
            layout=layout,
        )

    results = good(run_threads(len(states), save))
    assert len({(r.directory, r.num_bytes) for r in results}) == 1
    return results[0].directory


def load_all(directory: Path, states: list[list[Piece]]) -> list[Any]:
    """Load every rank's pieces, one thread a rank; returns a LoadResult or an exception for each."""

    def load(rank: int, group: ThreadGroup) -> LoadResult:
        return load_checkpoint(states[rank], directory, group)  # type: ignore[arg-type]

    return run_threads(len(states), load)


def whole(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Piece:
    """A piece that is a whole global tensor, NaN everywhere."""
    return Piece(name, shape, dtype, Box.whole(shape), torch.full(shape, float("nan"), dtype=dtype))
