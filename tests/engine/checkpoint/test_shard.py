"""The shard files: valid safetensors, written without a second copy in memory."""

import resource
import zlib

import torch
from safetensors.torch import load_file

from engine.checkpoint.boxes import Box
from engine.checkpoint.checksums import chunk_bytes_of, chunk_checksums, num_chunks, pack, unpack
from engine.checkpoint.pieces import Piece
from engine.checkpoint.shard import plan_shard, write_shard
from tests.harness import run_ranks


def piece(name, box, dtype, shape=(100, 64)):
    return Piece(name, shape, dtype, box, (torch.randn(box.size) * 9).to(dtype))


def test_a_shard_is_valid_safetensors_and_the_entries_point_into_it(tmp_path):
    pieces = [
        piece("weight/a", Box((3, 0), (5, 64)), torch.bfloat16),
        piece("weight/a", Box((8, 0), (1, 7)), torch.bfloat16),
        piece("exp_avg/a", Box((3, 0), (5, 64)), torch.float32),
        piece("flags", Box((), ()), torch.bool, shape=()),
        piece("count", Box((2,), (3,)), torch.int64, shape=(9,)),
    ]
    path = tmp_path / "shard.safetensors"
    entry = write_shard(plan_shard(pieces, {"rank": "0"}), path)
    tensors = load_file(path)
    assert torch.equal(tensors["weight/a@8,0"], pieces[1].data)
    assert torch.equal(tensors["flags@"], pieces[3].data)
    assert tensors.keys() == {"weight/a@3,0", "weight/a@8,0", "exp_avg/a@3,0", "flags@", "count@2", "checksums"}
    raw = path.read_bytes()
    assert len(raw) == entry.num_bytes
    assert zlib.crc32(raw[: entry.header_bytes]) == entry.header_checksum
    assert len(entry.boxes) == len(pieces)
    for box in entry.boxes:
        (source,) = [p for p in pieces if p.name == box.tensor and p.box == box.box]
        data = raw[box.start : box.start + box.num_bytes]
        assert data == bytes(source.data.reshape(-1).view(torch.uint8).numpy())
        assert box.start % source.dtype.itemsize == 0
        table = raw[box.checksums_start : box.checksums_start + box.checksums_bytes]
        assert zlib.crc32(table) == box.checksum
        assert unpack(table) == chunk_checksums(memoryview(data), box.chunk_bytes)


def test_chunks_follow_rows():
    assert chunk_bytes_of((7, 4096), 4) == 2048  # an eighth of a row
    assert chunk_bytes_of((7, 1024), 4) == 1024  # a quarter: no smaller than 1 KiB
    assert chunk_bytes_of((900, 100), 4) == 400 * 163  # whole rows, about 64 KiB
    assert chunk_bytes_of((1_000_000,), 4) == chunk_bytes_of((), 4) == 65536
    assert chunk_bytes_of((2, 1_000_003), 2) == 2_000_006  # an odd row is not cut
    for size, itemsize in [((5, 3, 250), 2), ((3, 24), 8), ((2, 3 * 2048), 1)]:
        assert chunk_bytes_of(size, itemsize) % itemsize == 0
    assert num_chunks(0, 10) == 0 and num_chunks(1, 10) == 1 and num_chunks(20, 10) == 2
    assert unpack(pack([0, 1, 2**32 - 1])) == [0, 1, 2**32 - 1]


def _memory_of_a_large_save(rank, store, path):
    data = torch.ones(24 * 1024 * 1024)
    large = Piece("weight/x", (24576, 1024), torch.float32, Box.whole((24576, 1024)), data.view(24576, 1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_shard(plan_shard([large], {}), path)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_saving_96_mib_takes_no_second_copy(tmp_path):
    (grown_mib,) = run_ranks(1, _memory_of_a_large_save, tmp_path / "shard")
    assert grown_mib < 16
