"""``everstep checkpoint convert``: what the engine's program wrote is summed up, its faults are the user's."""

from __future__ import annotations

import json

from engine.checkpoint.verify import verify
from tests.cli.conftest import run_everstep
from tests.engine.checkpoint.small_models import checkpoint_of, contents, gpt2


def convert(source, target, kind_from, kind_to, *options):
    return run_everstep("checkpoint", "convert", source, target, "--from", kind_from, "--to", kind_to, *options)


def test_out_and_in_again(tmp_path):
    checkpoint = checkpoint_of(gpt2(), tmp_path / "checkpoint")
    out = convert(checkpoint, tmp_path / "hf", "everstep", "hf", "--json", "--dtype", "fp32")
    assert out.code == 0 and out.json["files"] == 2 and out.json["output"] == str(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "gpt2"
    back = convert(tmp_path / "hf", tmp_path / "step-000000000.g0", "hf", "everstep")
    assert back.code == 0 and "parameters" in back.stdout
    assert verify(tmp_path / "step-000000000.g0") == []
    before = contents(tmp_path / "hf")
    again = convert(checkpoint, tmp_path / "hf", "everstep", "hf", "--json")
    assert again.code == 2 and "--overwrite" in again.json["error"]
    halves = convert(
        checkpoint, tmp_path / "hf", "everstep", "hf", "--json",
        "--overwrite", "--dtype", "bf16", "--max-shard-size", "50KB",
    )  # fmt: skip
    assert halves.code == 0 and halves.json["files"] > 3 and contents(tmp_path / "hf").keys() != before.keys()


def test_what_cannot_be_is_exit_code_2(tmp_path):
    nowhere = convert(tmp_path / "no", tmp_path / "out", "everstep", "hf", "--json")
    assert nowhere.code == 2 and "manifest.json" in nowhere.json["error"]
    assert convert(tmp_path / "no", tmp_path / "out", "hf", "dcp").code == 2
    pickled = convert(tmp_path / "no", tmp_path / "out", "dcp", "everstep", "--json")
    assert pickled.code == 2 and "--trust-pickle" in pickled.json["error"]
    assert list(tmp_path.iterdir()) == []
