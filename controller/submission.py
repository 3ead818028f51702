"""From what a user sent to a job: parsed, checked as far as can be before any device is taken, paths made absolute."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import yaml
from fastapi import Request
from pydantic import ValidationError

from controller.problem import FieldError, ProblemError, field_errors, invalid
from engine.planning.corpus import check_corpus
from engine.planning.layout import Layout, illegal_reasons
from engine.planning.search import legal_layouts
from everstep.protocol.messages import JobSpec

MAX_BODY_BYTES = 1 << 20
JSON_TYPES = ("application/json",)
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


async def read_body(request: Request) -> bytes:
    """The body of a request; raises ProblemError 413 before more than a spec's worth of it is held."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ProblemError(413, f"a job spec has at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


def parse_spec(body: bytes, content_type: str) -> JobSpec:
    """The spec in ``body``; raises ProblemError that names the field (422) or the type (415).

    YAML is slow to read: call in a thread.
    """
    kind = content_type.partition(";")[0].strip().lower()
    value: Any
    try:
        if kind in YAML_TYPES:
            value = yaml.safe_load(body)
        elif kind in JSON_TYPES:
            value = json.loads(body)
        else:
            raise ProblemError(415, f"send {JSON_TYPES[0]} or {YAML_TYPES[0]}, not {kind or 'nothing'}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise invalid([FieldError(field="", message=f"the body cannot be read: {error}")]) from error
    if not isinstance(value, dict):
        raise invalid([FieldError(field="", message=f"a job spec is an object, not {type(value).__name__}")])
    try:
        return JobSpec.model_validate(value)
    except ValidationError as error:
        raise invalid(field_errors(error, JobSpec)) from error


def check_spec(spec: JobSpec, data_root: Path) -> JobSpec:
    """The spec with absolute paths; raises ProblemError 422 for what cannot run. Reads files: call in a thread."""
    errors = []
    corpus = _below(data_root, spec.data.path)
    if corpus is None:
        errors.append(_outside("data.path", spec.data.path, data_root))
    else:
        try:
            check_corpus(corpus).num_samples(spec.train.sequence_length)
        except ValueError as error:
            message = str(error).removeprefix("data.path: ")
            errors.append(FieldError(field="data.path", message=message, value=spec.data.path))
    directory = _below(data_root, spec.checkpoint.directory)
    if directory is None:
        errors.append(_outside("checkpoint.directory", spec.checkpoint.directory, data_root))
    errors += _world_errors(spec)
    if errors:
        raise invalid(errors)
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"path": str(corpus)}),
            "checkpoint": spec.checkpoint.model_copy(update={"directory": str(directory)}),
        }
    )


def new_job_id(name: str) -> str:
    """The name with a short random suffix: job ids are never used twice."""
    return f"{name}-{secrets.token_hex(3)}"


def _below(root: Path, path: str) -> Path | None:
    """``path`` resolved, symbolic links included; None when it is not below ``root``."""
    base = root.resolve()
    try:
        resolved = (base / path).resolve()
    except (ValueError, OSError, RuntimeError):  # a NUL character, a name that is too long, a loop of links
        return None
    return resolved if resolved.is_relative_to(base) and resolved != base else None


def _outside(field: str, value: str, root: Path) -> FieldError:
    return FieldError(field=field, message=f"the path must lie below {root}", value=value)


def _world_errors(spec: JobSpec) -> list[FieldError]:
    """Whether any legal layout has between ``min_ranks`` and ``ranks`` ranks."""
    resources, run = spec.resources, spec.run_config()
    field = "resources.min_ranks"
    if isinstance(spec.layout, Layout):
        if spec.layout.world_size >= resources.min_ranks:
            return []
        message = f"layout {spec.layout} has {spec.layout.world_size} ranks, fewer than {resources.min_ranks}"
        return [FieldError(field=field, message=message, value=resources.min_ranks)]
    heads, layers, microbatches = run.model.num_attention_heads, run.model.num_layers, run.train.num_microbatches
    most_tp = max(tp for tp in range(1, heads + 1) if not illegal_reasons(Layout(tp=tp), run.model, run.train))
    largest = Layout(tp=most_tp, pp=layers, dp=microbatches)
    if largest.world_size >= resources.min_ranks and (
        resources.ranks is None or legal_layouts(run, resources.ranks, min_ranks=resources.min_ranks)
    ):
        return []
    upper = "more" if resources.ranks is None else f"at most {resources.ranks}"
    message = (
        f"no layout can run this on {resources.min_ranks} or {upper} ranks: {heads} attention heads and "
        f"{run.model.kv_heads} key/value heads allow tp up to {most_tp}, {layers} layers pp up to {layers}, "
        f"global_batch_size {run.train.global_batch_size} / micro_batch_size {run.train.micro_batch_size} "
        f"dp up to {microbatches}"
    )
    return [FieldError(field=field, message=message, value=resources.min_ranks)]
