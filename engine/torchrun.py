"""Train under plain ``torchrun``, without agents or controller.

    torchrun --nproc-per-node 4 -m engine.torchrun --config run.yaml --tp 2 --dp 2

The configuration is a ``RunConfig`` in YAML. The run resumes from the newest complete checkpoint in its directory, in
whatever layout that was saved, so a restarted or resized ``torchrun`` job goes on where it was. Each start is a
generation of its own, as under agents.

Exit codes of a rank: 0 when the run is complete, 2 when configuration, layout or data are wrong, 1 for everything else.
What went wrong is one line on stderr; only errors that nobody foresaw come as tracebacks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.agent_link import AgentLink
from engine.checkpoint.catalog import newest
from engine.checkpoint.errors import CheckpointError
from engine.checkpoint.fence import newest_claim
from engine.failure import categorise
from engine.groups import CollectiveError
from engine.planning.config import RunConfig
from engine.planning.layout import Layout, illegal_reasons
from engine.planning.messages import GenerationStart, Meeting, RankLaunch, RestorePoint
from engine.rank import run
from engine.telemetry import Telemetry


class _Start(BaseModel):
    """What rank 0 found in the directory of the checkpoints, for all ranks."""

    generation: int
    restore: RestorePoint | None


def _degree(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return int(text)


def _told(error: Exception) -> list[str]:
    """One line for each thing that is wrong, with its field."""
    if isinstance(error, ValidationError):
        return [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()]
    return [str(error)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train under torchrun.")
    parser.add_argument("--config", required=True, type=Path, help="YAML file with model, data, train, checkpoint")
    parser.add_argument("--tp", type=_degree, default=1, help="tensor-parallel degree")
    parser.add_argument("--pp", type=_degree, default=1, help="pipeline stages")
    parser.add_argument("--dp", type=_degree, default=None, help="replicas; what is left of the world when not given")
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="peak of one device, for MFU")
    return parser.parse_args()


def _store() -> Store:
    """The store of this torchrun attempt. The agent hosts it, or rank 0 does when the agent does not."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0 and not hosted,
        timeout=timedelta(seconds=600),
        wait_for_workers=False,
    )
    # The agent's store outlives an attempt, so the attempt is part of the prefix.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"everstep/{attempt}", store)


def _own_address() -> str:
    """The address of this host that the master's host is reached from."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, *_, address = socket.getaddrinfo(*master, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(address)
        return str(probe.getsockname()[0])


def _start(store: Store, rank: int, checkpoints: Path) -> _Start:
    """Rank 0 looks for the newest complete checkpoint and tells the others, so that all restore the same."""
    if rank == 0:
        found = newest(checkpoints)
        point = None
        if found is not None:
            point = RestorePoint(step=found.step, generation=found.generation, directory=str(found.directory))
        last = max(newest_claim(checkpoints), point.generation if point else 0)
        store.set("start", _Start(generation=last + 1, restore=point).model_dump_json())
    return _Start.model_validate_json(store.get("start"))


def main() -> int:
    """Entry point under torchrun; see the module's text for exit codes."""
    arguments = _arguments()
    if "RANK" not in os.environ:
        print("RANK is not set: start this with torchrun", file=sys.stderr)
        return 2
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dp = arguments.dp if arguments.dp is not None else max(1, world // (arguments.tp * arguments.pp))
    layout = Layout(tp=arguments.tp, pp=arguments.pp, dp=dp)
    reasons = []
    try:
        config = RunConfig.model_validate(yaml.safe_load(arguments.config.read_text()))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reasons += [f"{arguments.config}: {reason}" for reason in _told(error)]
    else:
        reasons += illegal_reasons(layout, config.model, config.train)
    if layout.world_size != world:
        reasons.append(f"{layout} needs {layout.world_size} ranks, torchrun started {world}")
    if reasons:
        # Every rank says so: torchrun ends the others as soon as one has ended.
        print("error: " + "; ".join(reasons), file=sys.stderr)
        return 2
    directory = Path(config.checkpoint.directory).resolve()
    store = _store()
    start = _start(store, rank, directory / "checkpoints")
    generation, restore = start.generation, start.restore
    launch = RankLaunch(
        job="torchrun",
        generation=generation,
        rank=rank,
        layout=layout,
        run=config,
        device=f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu",
        bind_address=_own_address(),
        meeting=Meeting(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]), prefix="everstep"),
        restore=restore,
        history=(GenerationStart(generation=generation, start_step=restore.step if restore else 0),),
        run_directory=str(directory),
        peak_flops=arguments.peak_tflops * 1e12,
        launched_at=time.time(),
    )
    link = AgentLink.connect(launch)
    telemetry = Telemetry(launch, link, torch.device(launch.device))
    try:
        outcome = run(launch, store, link, telemetry)
    except (ValueError, OSError, FloatingPointError, CheckpointError, CollectiveError) as error:
        print(f"error: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if categorise(error, stepped=telemetry.step > launch.start_step) == "user" else 1
    telemetry.close()
    if rank == 0:
        print(json.dumps({"step": outcome.step, "complete": outcome.complete, "timings_s": telemetry.timings}))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All that has to reach the disk is written and closed. The interpreter's own end would run the destructors of
    # gloo's groups while peers close their sockets; one run in some forty was seen to end with SIGABRT.
    os._exit(code)
