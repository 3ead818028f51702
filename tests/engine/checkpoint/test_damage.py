"""Damaged checkpoints and checkpoints of other models are refused on every rank, with the file or the difference."""

import json
import zlib

import pytest
import torch

from engine.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from engine.checkpoint.load import load_checkpoint
from engine.checkpoint.manifest import manifest_bytes, parse_manifest, read_manifest
from engine.checkpoint.verify import verify
from engine.failure import categorise
from engine.planning.config import RunConfig
from engine.planning.layout import Layout
from tests.engine.checkpoint.synthetic import RUN, filled, load_all, pieces_of, run_threads, save_all, whole

LAYOUT = Layout(tp=2, dp=2)


@pytest.fixture
def checkpoint(tmp_path):
    return save_all(tmp_path, LAYOUT, [filled(pieces_of(LAYOUT, rank)) for rank in range(4)])


def truncate_to_nothing(shard):
    shard.write_bytes(b"")


def cut_ten_bytes(shard):
    shard.write_bytes(shard.read_bytes()[:-10])


def flip_a_bit(shard):
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 16
    shard.write_bytes(raw)


def flip_a_bit_of_the_checksums(shard):
    raw = bytearray(shard.read_bytes())
    raw[-3] ^= 1
    shard.write_bytes(raw)


def zero_the_second_half(shard):
    raw = shard.read_bytes()
    shard.write_bytes(raw[: len(raw) // 2].ljust(len(raw), b"\0"))


def delete(shard):
    shard.unlink()


def a_directory_instead(shard):
    shard.unlink()
    shard.mkdir()


DAMAGES = [
    truncate_to_nothing,
    cut_ten_bytes,
    flip_a_bit,
    flip_a_bit_of_the_checksums,
    zero_the_second_half,
    delete,
    a_directory_instead,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_shard_is_named_on_every_rank_and_by_verify(checkpoint, damage):
    shard = checkpoint / "shard-00002.safetensors"
    damage(shard)
    for layout in (LAYOUT, Layout(), Layout(pp=2)):
        results = load_all(checkpoint, [pieces_of(layout, rank) for rank in range(layout.world_size)])
        for result in results:
            assert isinstance(result, CheckpointDamaged), result
            assert result.file == str(shard)
    found = verify(checkpoint)
    assert found and {d.file for d in found} == {str(shard)}


def test_swapped_shards_are_found(checkpoint):
    one, two = (checkpoint / f"shard-0000{rank}.safetensors" for rank in (1, 3))
    aside = checkpoint / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    for result in load_all(checkpoint, [pieces_of(LAYOUT, rank) for rank in range(4)]):
        assert isinstance(result, CheckpointDamaged) and result.file in (str(one), str(two))
    assert {d.file for d in verify(checkpoint)} == {str(one), str(two)}


def test_missing_and_cut_shards_are_found_before_anything_is_written(checkpoint):
    delete(checkpoint / "shard-00003.safetensors")
    pieces = pieces_of(Layout(), 0)
    assert isinstance(load_all(checkpoint, [pieces])[0], CheckpointDamaged)
    assert all(torch.isnan(piece.data).all() for piece in pieces)


def test_a_file_that_is_not_needed_by_a_rank_still_stops_that_rank(checkpoint):
    """All ranks raise when one cannot load: nobody trains on while others have failed."""
    flip_a_bit(checkpoint / "shard-00000.safetensors")
    results = load_all(checkpoint, [pieces_of(LAYOUT, rank) for rank in range(4)])
    assert {type(r) for r in results} == {CheckpointDamaged} and len({str(r) for r in results}) == 1


def edited(checkpoint, edit):
    """The manifest with ``edit`` applied to its text, and the seal made right again."""
    body = edit(json.loads((checkpoint / "manifest.json").read_text()))
    body.pop("manifest_crc32")
    text = json.dumps(body, separators=(",", ":")).encode()[:-1]
    return text + b',"manifest_crc32":"%08x"}\n' % zlib.crc32(text)


def with_version(value):
    value["format_version"] = 2
    return value


def with_box_outside(value):
    value["files"]["shard-00000.safetensors"]["boxes"][0]["offset"][0] += 1000
    return value


def with_range_outside(value):
    value["files"]["shard-00000.safetensors"]["boxes"][0]["start"] += 10**9
    return value


def with_path_outside(value):
    value["files"]["../../etc/passwd"] = value["files"].pop("shard-00000.safetensors")
    return value


def with_wrong_type(value):
    value["step"] = "many"
    return value


def with_missing_field(value):
    del value["tensors"]
    return value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda c: b"", "no JSON"),
        (lambda c: b"step 10 was here\n", "no JSON"),
        (lambda c: b"\xff\xfe\x00" * 40, "no JSON"),
        (lambda c: b"[1, 2]", "no manifest"),
        (lambda c: b"{}", "no manifest"),
        (lambda c: (c / "manifest.json").read_bytes()[:-40], "no JSON"),
        (lambda c: (c / "manifest.json").read_bytes().replace(b'"step":10', b'"step":11'), "checksum"),
        (lambda c: (c / "manifest.json").read_bytes() + b"\n", "checksum"),
        (lambda c: edited(c, with_version), "format version 2"),
        (lambda c: edited(c, with_box_outside), "not inside"),
        (lambda c: edited(c, with_range_outside), "ends after"),
        (lambda c: edited(c, with_path_outside), "outside"),
        (lambda c: edited(c, with_wrong_type), "step"),
        (lambda c: edited(c, with_missing_field), "tensors"),
    ],
)
def test_a_damaged_manifest_is_named_with_the_reason(checkpoint, content, reason):
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(content(checkpoint))
    states = [pieces_of(LAYOUT, rank) for rank in range(4)]
    for result in load_all(checkpoint, states):
        assert isinstance(result, CheckpointDamaged)
        assert result.file == str(manifest) and reason in result.reason
    assert [d.file for d in verify(checkpoint)] == [str(manifest)]
    assert all(torch.isnan(piece.data).all() for pieces in states for piece in pieces)


def test_a_missing_manifest_is_named(checkpoint):
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"manifest.json: No such file"):
        read_manifest(checkpoint)


def test_a_box_that_no_file_has_is_named_with_its_tensor(checkpoint):
    def without_a_box(value):
        boxes = value["files"]["shard-00000.safetensors"]["boxes"]
        boxes[:] = [b for b in boxes if b["tensor"] != "weight/layers.0.q"]
        return value

    (checkpoint / "manifest.json").write_bytes(edited(checkpoint, without_a_box))
    (result,) = load_all(checkpoint, [pieces_of(Layout(), 0)])
    assert isinstance(result, CheckpointDamaged)
    assert "no stored box has weight/layers.0.q [0:8, 0:16]" in str(result)
    assert any("weight/layers.0.q" in str(d) for d in verify(checkpoint))


def test_the_manifest_reads_with_json_alone_and_says_what_it_is(checkpoint):
    plain = json.loads((checkpoint / "manifest.json").read_text())
    assert (plain["format"], plain["format_version"]) == ("everstep-checkpoint", 1)
    assert (plain["job"], plain["step"], plain["generation"], plain["consumed_samples"]) == ("job", 10, 1, 80)
    assert RunConfig.model_validate(plain["run"]) == RUN
    assert Layout.model_validate(plain["layout"]) == LAYOUT
    assert plain["tensors"]["weight/embedding"] == {"shape": [43, 16], "dtype": "float32"}
    entry = plain["files"]["shard-00001.safetensors"]["boxes"][0]
    assert {"tensor", "offset", "size", "start", "num_bytes", "chunk_bytes", "checksum"} <= entry.keys()


def test_fields_of_a_later_writer_of_this_version_are_ignored(checkpoint):
    def with_more(value):
        value["stable"] = True
        value["files"]["shard-00000.safetensors"]["compressed"] = False
        return value

    parsed = parse_manifest(edited(checkpoint, with_more), "manifest.json")
    assert parsed == read_manifest(checkpoint)
    assert parse_manifest(manifest_bytes(parsed), "manifest.json") == parsed


def test_another_model_is_refused_with_every_difference(checkpoint):
    pieces = [p for p in pieces_of(Layout(), 0) if "layers.3.norm" not in p.name and "final_scale" not in p.name]
    pieces += [whole(f"{kind}/final_scale", (2,), torch.float32) for kind in ("weight",)]
    pieces.append(whole("exp_avg_sq/final_scale", (), torch.float32))
    pieces.append(whole("weight/layers.9.norm", (16,)))
    results = load_all(checkpoint, [pieces, []])
    for result in results:
        assert isinstance(result, CheckpointMismatch)
        assert result.differences == (
            "exp_avg_sq/final_scale: dtype bfloat16 in the checkpoint, float32 in the model",
            "exp_avg_sq/layers.3.norm: in the checkpoint, not in the model",
            "weight/final_scale: shape () in the checkpoint, (2,) in the model",
            "weight/layers.3.norm: in the checkpoint, not in the model",
            "weight/layers.9.norm: not in the checkpoint",
        )
    assert all(torch.isnan(piece.data).all() for piece in pieces)


def test_a_rank_that_does_not_see_the_checkpoint_stops_all_and_is_to_blame(checkpoint, tmp_path):
    """A file system that is not mounted on one node must not make every checkpoint count as damaged."""

    def load(rank, group):
        return load_checkpoint(pieces_of(LAYOUT, rank), checkpoint if rank != 2 else tmp_path / "elsewhere", group)

    for rank, result in enumerate(run_threads(4, load)):
        assert type(result) is CheckpointError
        assert "manifest.json is not there for ranks [2], for others it is" in str(result)
        assert categorise(result, stepped=False) == ("internal" if rank == 2 else "collective")
