"""The user's pages name what exists: every setting of a job, every command, every option of the commands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from engine.planning.layout import Layout
from everstep.cli.main import app
from everstep.protocol.messages import JobSpec

ROOT = Path(__file__).parents[2]


def settings_of(model: type[BaseModel]) -> set[str]:
    names = set()
    for name, field in model.model_fields.items():
        names.add(name)
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            names |= settings_of(field.annotation)
    return names


def test_every_setting_of_a_job_is_described():
    page = (ROOT / "docs" / "job-spec.md").read_text()
    missing = {n for n in settings_of(JobSpec) | settings_of(Layout) if not re.search(rf"\b{n}\b", page)}
    assert not missing


def test_every_command_is_described():
    page = (ROOT / "docs" / "cli.md").read_text()
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"| `{command.name or command.callback.__name__}" in page


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
    for path in re.findall(r"`((?:engine|everstep|controller|worker)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
