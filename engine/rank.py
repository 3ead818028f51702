"""What a rank process runs: meet the others, build, restore, train, end.

The agent forks it from a warm parent and calls ``main``; ``engine/torchrun.py`` calls ``run`` for plain ``torchrun``.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.agent_link import AgentLink
from engine.failure import failure_record
from engine.groups import CollectiveError, build_groups
from engine.planning.layout import check_legal
from engine.planning.messages import EXIT_FAILURE, EXIT_OK, Ended, RankLaunch
from engine.precision import configure_device
from engine.telemetry import Telemetry
from engine.train import Outcome, Trainer


def meeting_store(launch: RankLaunch) -> Store:
    """Connect to the store in which this generation meets; its prefix carries the generation, so no other comes in."""
    try:
        client = TCPStore(
            launch.meeting.host,
            launch.meeting.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=launch.collective_timeout_s),
        )
    except RuntimeError as error:
        raise CollectiveError(f"no meeting store at {launch.meeting.host}:{launch.meeting.port}: {error}") from error
    return PrefixStore(launch.meeting.prefix, client)


def run(launch: RankLaunch, store: Store, link: AgentLink, telemetry: Telemetry) -> Outcome:
    """Train in the generation that ``launch`` describes. Raises whatever goes wrong."""
    check_legal(launch.layout, launch.run)
    device = torch.device(launch.device)
    configure_device(device, launch.num_threads)
    telemetry.phase("meeting")
    groups = build_groups(
        launch.layout,
        launch.rank,
        store,
        device,
        bind_address=launch.bind_address,
        timeout_s=launch.collective_timeout_s,
    )
    telemetry.lap("meet")
    trainer = Trainer(launch, groups, link, telemetry, device)
    outcome = trainer.run()
    # Nobody closes its sockets while a peer still waits for the last collective.
    groups.world.barrier()
    return outcome


def main(launch: RankLaunch) -> int:
    """Entry point of a rank process under an agent. Returns the exit code."""
    link = AgentLink.connect(launch)
    telemetry = Telemetry(launch, link, torch.device(launch.device))
    telemetry.timings["start"] = max(0.0, time.time() - launch.launched_at)
    telemetry.phase("starting")
    try:
        outcome = run(launch, meeting_store(launch), link, telemetry)
    except Exception as error:
        stepped = telemetry.step > launch.start_step
        link.send(
            failure_record(error, rank=launch.rank, generation=launch.generation, step=telemetry.step, stepped=stepped)
        )
        link.close()
        return EXIT_FAILURE
    telemetry.phase("ended")
    telemetry.close()
    link.send(Ended(rank=launch.rank, step=outcome.step, complete=outcome.complete))
    link.close()
    return EXIT_OK
