"""Turn the exception that ended a rank into a record that says whose fault it is.

Categories: ``user`` (the job cannot run anywhere as it is written: no node is to blame), ``collective`` (a peer went
away or could not do its part of a save or a load: the fault is elsewhere), ``numerics``, ``checkpoint`` (a damaged one:
go further back), ``memory``, ``internal``.
"""

from __future__ import annotations

import time
import traceback

import torch

from engine.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from engine.groups import CollectiveError
from engine.planning.corpus import CorpusError
from engine.planning.messages import Failure, FailureCategory

_USER_ERRORS = (CheckpointMismatch, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)


def categorise(error: BaseException, *, stepped: bool) -> FailureCategory:
    """The category of ``error``. ``stepped``: this generation had completed a step before.

    Settings, paths and code of the job are known to work once a step has completed; before that, an error of those
    kinds would come back on every node. What is wrong in the corpus comes back at the same step, whenever that is.
    """
    if isinstance(error, CollectiveError):
        return "collective"
    if isinstance(error, CheckpointDamaged):
        return "checkpoint"
    if isinstance(error, CheckpointError) and error.elsewhere and not isinstance(error, CheckpointMismatch):
        return "collective"
    if isinstance(error, CorpusError):
        return "user"
    if isinstance(error, FloatingPointError):
        return "numerics"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return "memory"
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError):
        return "internal" if stepped else "user"
    if isinstance(error, _USER_ERRORS) and not stepped:
        return "user"
    return "internal"


def failure_record(error: BaseException, *, rank: int, generation: int, step: int, stepped: bool) -> Failure:
    """The exception record that a rank leaves."""
    damaged = error.file if isinstance(error, CheckpointDamaged) else None
    return Failure(
        rank=rank,
        generation=generation,
        category=categorise(error, stepped=stepped),
        error=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        step=step,
        at=time.time(),
        file=str(damaged) if damaged is not None else None,
    )
