"""Spec files: what cannot be a spec is refused with file and line before anything is sent."""

from __future__ import annotations

import pytest

from everstep.cli.output import BadInput
from everstep.cli.spec_file import read_spec
from tests.cli.conftest import run_everstep


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: a\nmodel: [\n", "line 3"),
        ("- a\n- b\n", "not a mapping"),
        ("", "not a mapping"),
        ("name: a\ntrain:\n  lr: 1\n  lr: 2\n", "line 4: 'lr' was already given in line 3"),
        ("at: 2026-01-01\n", "not plain JSON"),
        ("lr: .nan\n", "not plain JSON"),
        ("a: !!python/object:os.system {}\n", "line 1"),
        (b"name: \xff\xfe\n", "not readable"),
        ("a: " + "[" * 3000 + "]" * 3000, "not readable"),
    ],
)
def test_what_is_no_spec(tmp_path, text, told):
    file = tmp_path / "spec.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=r"spec\.yaml") as error:
        read_spec(file)
    assert told in str(error.value)


def test_yaml_and_json_give_the_same(tmp_path):
    (tmp_path / "a.yaml").write_text("name: a\nbase: &b {x: 1}\ntrain:\n  <<: *b\n  lr: 1.0e-3\n")
    (tmp_path / "a.json").write_text('{"name": "a", "base": {"x": 1}, "train": {"x": 1, "lr": 0.001}}')
    assert read_spec(tmp_path / "a.yaml") == read_spec(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read_is_bad_input(tmp_path, name):
    answer = run_everstep("submit", tmp_path / name, "--url", "http://127.0.0.1:9")
    assert answer.code == 2 and str(tmp_path) in answer.stderr.replace("\n", "")
