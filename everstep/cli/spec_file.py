"""Reading a job spec from a YAML or JSON file, without judging its contents: the service does that."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from everstep.cli.output import BadInput


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML, but a key given twice is an error: the first value would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise BadInput(f"line {line}: {key!r} was already given in line {seen[key]}")
            seen[key] = line
        return super().construct_mapping(node, deep)


def read_spec(path: Path) -> dict[str, Any]:
    """The mapping in a YAML (or JSON, which is YAML) file; raises BadInput with file and line when there is none."""
    try:
        spec = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
        if not isinstance(spec, dict):
            raise BadInput("not a mapping of settings")
        json.dumps(spec, allow_nan=False)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadInput(f"{path}: {line}{error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{path}: not readable as YAML: {error}") from None
    except (TypeError, ValueError) as error:
        raise BadInput(f"{path}: not plain JSON values: {error}") from None
    return spec
