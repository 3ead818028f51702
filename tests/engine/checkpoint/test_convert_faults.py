"""Conversions of what is damaged, foreign or in the way: refused with a text, and nothing half is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.convert import main, size_bytes
from engine.checkpoint.errors import CheckpointDamaged
from engine.checkpoint.export_huggingface import export_huggingface
from engine.checkpoint.import_huggingface import import_huggingface
from engine.checkpoint.manifest import read_manifest
from engine.checkpoint.verify import verify
from tests.engine.checkpoint.small_models import checkpoint_of, contents, gpt2, llama, weights_of


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoint_of(llama(), tmp_path / "checkpoint")


@pytest.fixture
def exported(checkpoint, tmp_path):
    export_huggingface(checkpoint, tmp_path / "hf")
    return tmp_path / "hf"


def alter(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_every_altered_weight_of_a_source_is_found(checkpoint, tmp_path):
    stored = read_manifest(checkpoint).boxes_by_tensor()
    for name in weights_of(llama()):
        [(file, entry)] = stored[f"weight/{name}"]
        for at in (entry.start, entry.start + entry.num_bytes - 1, entry.checksums_start):
            alter(checkpoint / file, at)
            with pytest.raises(CheckpointDamaged, match=re.escape(f"weight/{name} ")):
                export_huggingface(checkpoint, tmp_path / "out")
            alter(checkpoint / file, at)
    assert names(tmp_path) == ["checkpoint"]
    export_huggingface(checkpoint, tmp_path / "out")


def test_a_source_that_lacks_something_is_refused(checkpoint, tmp_path):
    [shard] = checkpoint.glob("shard-*")
    good = shard.read_bytes()
    for change in (lambda: os.truncate(shard, len(good) - 1), lambda: shard.unlink()):
        change()
        with pytest.raises(CheckpointDamaged, match="shard-00000"):
            export_huggingface(checkpoint, tmp_path / "out")
        shard.write_bytes(good)
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        export_huggingface(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]


def test_twice_into_one_directory_is_refused_and_overwrite_replaces_it(checkpoint, exported, tmp_path):
    before = contents(exported)
    with pytest.raises(FileExistsError, match="--overwrite"):
        export_huggingface(checkpoint, exported, dtype="bf16")
    assert contents(exported) == before
    export_huggingface(checkpoint, exported, dtype="bf16", max_shard_bytes=50_000, overwrite=True)
    assert "model.safetensors" not in names(exported) and "model.safetensors.index.json" in names(exported)
    assert names(tmp_path) == ["checkpoint", "hf"]
    (tmp_path / "empty").mkdir()
    export_huggingface(checkpoint, tmp_path / "empty", overwrite=True)
    assert contents(tmp_path / "empty") == before


def test_overwrite_replaces_nothing_but_its_own_kind(checkpoint, exported, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "link").symlink_to(exported)
    for target in (tmp_path / "home", checkpoint, tmp_path / "link", tmp_path / "home" / "letter"):
        with pytest.raises(FileExistsError, match="is no model"):
            export_huggingface(checkpoint, target, overwrite=True)
    with pytest.raises(FileExistsError, match="is no checkpoint"):
        import_huggingface(exported, exported, overwrite=True)
    assert names(tmp_path) == ["checkpoint", "hf", "home", "link"]
    import_huggingface(exported, checkpoint, overwrite=True)
    assert verify(checkpoint) == []


def test_an_overwrite_that_fails_leaves_the_old_directory(checkpoint, exported, tmp_path):
    before = contents(exported)
    [(file, entry)] = read_manifest(checkpoint).boxes_by_tensor()["weight/final_norm.weight"]
    alter(checkpoint / file, entry.start)
    with pytest.raises(CheckpointDamaged):
        export_huggingface(checkpoint, exported, overwrite=True)
    assert contents(exported) == before and names(tmp_path) == ["checkpoint", "hf"]


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGTERM])
def test_an_export_that_is_ended_in_the_middle_leaves_nothing_that_looks_finished(tmp_path, ended_by):
    checkpoint = checkpoint_of(llama(num_layers=60, hidden_size=96, ffn_hidden_size=256), tmp_path / "checkpoint")
    command = [sys.executable, "-m", "engine.checkpoint.convert", "--from", "everstep", "--to", "hf"]
    with subprocess.Popen([*command, "--max-shard-size", "20KB", str(checkpoint), str(tmp_path / "hf")]) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".hf.*/model-00003-*")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(ended_by)
        assert process.wait(20) == (-signal.SIGKILL if ended_by == signal.SIGKILL else 128 + signal.SIGTERM)
    assert not (tmp_path / "hf").exists()
    left = list(tmp_path.glob(".hf.*"))
    assert len(left) == (ended_by == signal.SIGKILL)
    assert not list(tmp_path.glob(".hf.*/*.json"))
    export_huggingface(checkpoint, tmp_path / "hf")


def test_pickles_are_refused(exported, tmp_path):
    (exported / "model.safetensors").rename(exported / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickles \(pytorch_model\.bin\)"):
        import_huggingface(exported, tmp_path / "out")
    (exported / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        import_huggingface(exported, tmp_path / "out")


def test_weights_that_are_not_those_of_the_config_are_named(exported, tmp_path):
    path = exported / "model.safetensors"
    state = load_file(path)
    changed = dict(state)
    del changed["model.norm.weight"]
    changed["model.layers.0.self_attn.q_norm.weight"] = torch.ones(12)
    changed["lm_head.weight"] = torch.ones(1024, 48)
    changed["model.embed_tokens.weight"] = torch.ones(1003, 48, dtype=torch.int64)
    save_file(changed, path)
    with pytest.raises(ValueError) as refused:
        import_huggingface(exported, tmp_path / "out")
    for expected in ("norm.weight: is missing", "q_norm", "(1024, 48)", "torch.int64"):
        assert expected in str(refused.value)
    assert names(tmp_path) == ["checkpoint", "hf"]


@pytest.mark.parametrize("at", [3, 2000, -1])
def test_a_safetensors_file_that_is_cut_off_is_refused(exported, tmp_path, at):
    path = exported / "model.safetensors"
    os.truncate(path, at % path.stat().st_size)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        import_huggingface(exported, tmp_path / "out")


def test_headers_that_lie_are_refused(exported, tmp_path):
    path = exported / "model.safetensors"
    raw = path.read_bytes()
    for old, new in ((b'"F32"', b'"F64"'), (b'"F32"', b'"X99"'), (b"[0,", b"[-4,"), (b'"dtype"', b'"dtypo"')):
        path.write_bytes(raw.replace(old, new, 1)[: len(raw)].ljust(len(raw), b"\0"))
        with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
            import_huggingface(exported, tmp_path / "out")
    path.write_bytes(b"\xff" * 8 + raw[8:])
    with pytest.raises(CheckpointDamaged, match="header"):
        import_huggingface(exported, tmp_path / "out")


def test_an_index_may_name_nothing_but_files_beside_it(checkpoint, tmp_path):
    export_huggingface(checkpoint, tmp_path / "hf", max_shard_bytes=100_000)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for file in ("../secret.safetensors", "/etc/passwd", "weights.bin", 3):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "lm_head.weight": file}}))
        with pytest.raises(ValueError, match="weight_map"):
            import_huggingface(tmp_path / "hf", tmp_path / "out")
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "nobody": "model-00001-of-00008.safetensors"}}))
    with pytest.raises((ValueError, CheckpointDamaged), match=r"nobody|model-00001"):
        import_huggingface(tmp_path / "hf", tmp_path / "out")


def test_a_tied_model_with_another_head_is_refused_and_with_the_same_is_taken(tmp_path):
    export_huggingface(checkpoint_of(llama(tie_embeddings=True), tmp_path / "checkpoint"), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    state = load_file(path)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, path)
    import_huggingface(tmp_path / "hf", tmp_path / "out")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        import_huggingface(tmp_path / "hf", tmp_path / "out2")


def test_old_gpt2_directories_without_prefix_and_with_buffers_are_read(tmp_path):
    export_huggingface(checkpoint_of(gpt2(), tmp_path / "checkpoint"), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 40, 40).tril()
    old["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(old, path)
    import_huggingface(tmp_path / "hf", tmp_path / "out")
    export_huggingface(tmp_path / "out", tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == {
        f"transformer.{name}" for name in old if ".attn.bias" not in name and "masked" not in name
    }


def test_values_beyond_fp16_are_refused(tmp_path):
    from engine.checkpoint.initial_checkpoint import write_initial_checkpoint

    weights = weights_of(llama())
    weights["final_norm.weight"][3] = 1e5
    (tmp_path / "checkpoint").mkdir()
    write_initial_checkpoint(tmp_path / "checkpoint", llama(), weights.items(), job="test")
    with pytest.raises(ValueError, match=r"fp16: model\.norm\.weight"):
        export_huggingface(tmp_path / "checkpoint", tmp_path / "hf", dtype="fp16")
    assert names(tmp_path) == ["checkpoint"]


def test_exit_codes_and_lines(checkpoint, tmp_path, capsys):
    everstep_to_hf = ["--from", "everstep", "--to", "hf", "--progress-json"]
    assert main([*everstep_to_hf, str(checkpoint), str(tmp_path / "hf")]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["progress"] * (len(lines) - 1) + ["summary"]
    assert lines[0]["bytes_done"] == 0 and lines[-2]["bytes_done"] == lines[-2]["bytes_total"]
    assert lines[-1]["tensors"] == 21 and lines[-1]["files"] == 2
    assert main([*everstep_to_hf, str(checkpoint), str(tmp_path / "hf")]) == 1
    assert main([*everstep_to_hf, str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1])["kind"] == "error" and "nowhere" in output.err
    for wrong in (
        ["--from", "hf", "--to", "dcp"],
        ["--from", "hf", "--to", "everstep", "--dtype", "bf16"],
        ["--from", "everstep", "--to", "dcp", "--max-shard-size", "1GB"],
        ["--from", "everstep", "--to", "hf", "--max-shard-size", "large"],
        ["--from", "everstep", "--to", "hf", "--trust-pickle"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([*wrong, "a", "b"])
        assert ended.value.code == 2


def test_sizes():
    assert [size_bytes(text) for text in ("7", "64KB", "200 MB", "5gb")] == [7, 64_000, 200_000_000, 5_000_000_000]
    for text in ("", "0", "-1", "5TB", "1.5GB"):
        with pytest.raises(ValueError, match="size"):
            size_bytes(text)
