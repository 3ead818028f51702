"""Stand-ins for the engine: small rank programs, chosen by the last part of the launch's run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.agent_link import AgentLink
from engine.planning.messages import EXIT_FAILURE, CheckpointCommitted, Ended, Failure, Progress, RankLaunch, SaveFailed


def main(launch: RankLaunch) -> int:
    print(f"rank {launch.rank} begins, entered {time.time()}", flush=True)
    link = AgentLink.connect(launch)
    return PROGRAMS[Path(launch.run_directory).name](launch, link)


def _progress(launch: RankLaunch, link: AgentLink, step: int) -> None:
    link.send(Progress(rank=launch.rank, phase="stepping", step=step, at=time.time(), loss=1.0 / (step + 1)))


def steps(launch: RankLaunch, link: AgentLink) -> int:
    """Step until asked to stop; rank 0 commits a checkpoint at step 3."""
    step = launch.start_step
    while link.stop_requested is None:
        step += 1
        _progress(launch, link, step)
        if step == 3 and launch.rank == 0:
            link.send(
                CheckpointCommitted(
                    step=step, generation=launch.generation, directory="/state/3", num_bytes=10, seconds=0.1
                )
            )
        time.sleep(0.02)
    link.send(Ended(rank=launch.rank, step=step, complete=False))
    link.close()
    return 0


def completes(launch: RankLaunch, link: AgentLink) -> int:
    _progress(launch, link, 1)
    link.send(Ended(rank=launch.rank, step=1, complete=True))
    link.close()
    return 0


def full_disk(launch: RankLaunch, link: AgentLink) -> int:
    """Rank 0 tells of a failed save, then all go on."""
    if launch.rank == 0:
        link.send(
            SaveFailed(
                step=4,
                generation=launch.generation,
                errno=28,
                file="/state/4/shard-00001.safetensors",
                reason="No space left on device",
                failures_in_a_row=2,
            )
        )
    return steps(launch, link)


def raises(launch: RankLaunch, link: AgentLink) -> int:
    """Rank 1 fails with a record at step 7, the others go on."""
    if launch.rank != 1:
        return steps(launch, link)
    _progress(launch, link, 7)
    print("about to fail", flush=True)
    link.send(
        Failure(
            rank=1,
            generation=launch.generation,
            category="user",
            error="ValueError",
            message="no such file",
            traceback="Traceback ...",
            step=7,
            at=time.time(),
        )
    )
    return EXIT_FAILURE


def escapes(launch: RankLaunch, link: AgentLink) -> int:
    """Rank 1 lets an exception out."""
    if launch.rank == 1:
        raise RuntimeError("out of the entry")
    return steps(launch, link)


def exits(launch: RankLaunch, link: AgentLink) -> int:
    """Rank 1 ends with an exit code of its own."""
    if launch.rank == 1:
        sys.exit(37)
    return steps(launch, link)


def segfaults(launch: RankLaunch, link: AgentLink) -> int:
    """Rank 1 dies of a signal of its own."""
    if launch.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    return steps(launch, link)


def stubborn(launch: RankLaunch, link: AgentLink) -> int:
    """Ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return steps(launch, link)


def family(launch: RankLaunch, link: AgentLink) -> int:
    """Starts a child in its session, one that left its session, and one of a fork without exec."""
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    if os.fork() == 0:
        os.setpgid(0, 0)
        while True:
            time.sleep(1)
    return steps(launch, link)


PROGRAMS: dict[str, Callable[[RankLaunch, AgentLink], int]] = {
    program.__name__: program
    for program in (steps, completes, full_disk, raises, escapes, exits, segfaults, stubborn, family)
}
