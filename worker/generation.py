"""The ranks of one generation of one job on this node: start them, end them, prove that they are gone, tell it all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM, Signals

import structlog

from engine.planning.messages import RankLaunch, StopRequest
from everstep.protocol.messages import Device, NodeOutcome, Placement, Plan
from worker.local_rank import LocalRank
from worker.rank_lines import RankLines
from worker.state_dir import StateDir
from worker.warm_client import Ending, WarmParentHandle, WarmParentLost

_GRACE_S = 2.0
_LAST_WORDS_S = 0.25
_STUBBORN_S = 5.0

log = structlog.get_logger()


@dataclass(frozen=True)
class Site:
    """What every generation on this node shares."""

    node: str
    incarnation: str
    host: str
    devices: tuple[Device, ...]
    state: StateDir
    lines: RankLines
    silence_limit_s: float
    num_threads: int
    publish: Callable[[NodeOutcome], None]
    beat: Callable[[], None]


def tell_never_started(plan: Plan, site: Site) -> None:
    """Say that nothing of a generation is here, because it was over before it began here: its devices are free."""
    site.publish(
        NodeOutcome(
            job=plan.job,
            generation=plan.generation,
            node=site.node,
            incarnation=site.incarnation,
            exits=(),
            all_gone=True,
        )
    )


class LocalGeneration:
    """One generation here. ``warm`` forks its ranks and is the only one that signals them."""

    def __init__(self, plan: Plan, placement: Placement, site: Site, warm: WarmParentHandle) -> None:
        self.plan = plan
        self._site = site
        self._warm = warm
        self._changed = asyncio.Condition()
        self._started_at: float | None = None
        self._stop_began_at: float | None = None
        self._stop_ended_at: float | None = None
        self._kill_began_at: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        state = site.state
        start_step = plan.restore.step if plan.restore else 0
        self.ranks = [
            LocalRank(
                job=plan.job,
                generation=plan.generation,
                rank=rank,
                device=device,
                log=state.rank_log(plan.job, plan.generation, rank),
                rank_file=state.rank_file(plan.job, plan.generation, rank),
                start_step=start_step,
                since=time.time(),
            )
            for rank, device in zip(placement.ranks, placement.devices, strict=True)
        ]

    @property
    def all_gone(self) -> bool:
        """Whether every rank has ended and nothing is left of its session."""
        return all(rank.exit is not None and rank.gone for rank in self.ranks)

    async def start(self) -> None:
        """Fork all ranks; those that cannot be forked are recorded as lost."""
        self._started_at = time.time()
        try:
            for rank in self.ranks:
                rank.log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            # A full disk must not end the agent and, with it, other jobs.
            for rank in self.ranks:
                rank.record_loss(0, type(error).__name__, str(error), time.time())
        else:
            await asyncio.gather(*(self._fork(rank) for rank in self.ranks))
        log.info(
            "ranks started",
            job=self.plan.job,
            generation=self.plan.generation,
            pids={rank.rank: rank.pid for rank in self.ranks},
        )
        self._publish()
        self._site.beat()

    async def _fork(self, rank: LocalRank) -> None:
        self._site.lines.expect(rank)
        device = self._site.devices[rank.device]
        plan = self.plan
        launch = RankLaunch(
            job=plan.job,
            generation=plan.generation,
            rank=rank.rank,
            layout=plan.layout,
            run=plan.run,
            device="cpu" if device.kind == "cpu" else f"cuda:{device.index}",
            bind_address=self._site.host,
            meeting=plan.meeting,
            restore=plan.restore,
            history=plan.history,
            run_directory=plan.run_directory,
            agent_socket=str(self._site.state.socket),
            agent_silence_limit_s=self._site.silence_limit_s,
            peak_flops=device.peak_flops,
            num_threads=self._site.num_threads,
            launched_at=time.time(),
        )

        def started(pid: int) -> None:
            rank.pid = pid
            rank.forked.set()

        try:
            await self._warm.fork(
                launch=launch.model_dump_json(),
                log=rank.log,
                rank_file=rank.rank_file,
                started=started,
            )
        except WarmParentLost as error:
            rank.record_loss(rank.pid or 0, "WarmParentLost", str(error), time.time())

    def find(self, pid: int) -> LocalRank | None:
        """The rank with this pid, if it is one of these and not gone (its pid may be used again then)."""
        return next((rank for rank in self.ranks if rank.pid == pid and not rank.gone), None)

    def rank_ended(self, rank: LocalRank, ending: Ending) -> None:
        """The warm parent has reaped this rank."""
        self._spawn(self._note_end(rank, ending))

    async def _note_end(self, rank: LocalRank, ending: Ending) -> None:
        if rank.line is not None:
            # What it said last may still be on its way to us.
            await asyncio.wait([rank.line], timeout=_LAST_WORDS_S)
        rank.record_end(ending, self._kill_began_at)
        assert rank.exit is not None
        log.info("rank ended", job=rank.job, generation=rank.generation, rank=rank.rank, cause=rank.exit.cause)
        await self._note_change()

    def rank_gone(self, rank: LocalRank) -> None:
        """Nothing is left of this rank's session."""
        rank.gone = True
        rank.rank_file.unlink(missing_ok=True)
        if rank.exit is not None:
            self._spawn(self._note_change())

    def lost(self, reason: str) -> None:
        """The warm parent died and took the ranks along; that nothing is left of them is known already."""
        now = time.time()
        for rank in self.ranks:
            if rank.exit is None and rank.pid is not None:
                rank.record_loss(rank.pid, "WarmParentLost", reason, now)
            rank.gone = True
            rank.rank_file.unlink(missing_ok=True)
        self._spawn(self._note_change())

    async def _note_change(self) -> None:
        if self.all_gone and self._stop_began_at is not None and self._stop_ended_at is None:
            self._stop_ended_at = time.time()
        if self.all_gone:
            for rank in self.ranks:
                self._site.lines.forget(rank)
        self._publish()
        self._site.beat()
        async with self._changed:
            self._changed.notify_all()

    def request_save(self) -> None:
        """Ask the ranks to save at the next step border and end."""
        if self._stop_began_at is None:
            self._stop_began_at = time.time()
            for rank in self.ranks:
                self._site.lines.ask_to_stop(rank, StopRequest(save=True))

    def kill(self) -> None:
        """SIGKILL every rank that still runs; their state is on disk."""
        self._signal(SIGKILL)

    def begin_terminate(self) -> None:
        """SIGTERM now, SIGKILL after the grace period, in the background."""
        if self._kill_began_at is None:
            self._spawn(self.terminate())

    async def terminate(self) -> None:
        """SIGTERM, then SIGKILL to those that outlast the grace period; returns when nothing is left."""
        self._signal(SIGTERM)
        if not await self._gone_within(_GRACE_S):
            self._signal(SIGKILL)
            await self.wait_gone()

    async def wait_gone(self) -> None:
        """Return when nothing is left. A process that even SIGKILL does not end holds this up, with a warning."""
        while not await self._gone_within(_STUBBORN_S):
            log.warning(
                "ranks do not go",
                job=self.plan.job,
                generation=self.plan.generation,
                pids=[rank.pid for rank in self.ranks if not rank.gone],
            )

    async def _gone_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.all_gone)
        except TimeoutError:
            return False
        return True

    def _signal(self, number: Signals) -> None:
        now = time.time()
        self._stop_began_at = self._stop_began_at or now
        self._kill_began_at = self._kill_began_at or now
        self._warm.kill([rank.pid for rank in self.ranks if rank.pid and rank.exit is None], number)

    def outcome(self) -> NodeOutcome:
        """How it stands; exits in the order in which they happened."""
        exits = sorted((rank.exit for rank in self.ranks if rank.exit is not None), key=lambda item: item.at)
        first = next((rank for rank in self.ranks if rank.rank == 0), None)
        return NodeOutcome(
            job=self.plan.job,
            generation=self.plan.generation,
            node=self._site.node,
            incarnation=self._site.incarnation,
            exits=tuple(exits),
            all_gone=self.all_gone,
            run_complete=first is not None and first.ended is not None and first.ended.complete,
            stop_began_at=self._stop_began_at,
            stop_ended_at=self._stop_ended_at,
            started_at=self._started_at,
        )

    def _publish(self) -> None:
        self._site.publish(self.outcome())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("ending ranks failed", job=self.plan.job, generation=self.plan.generation, exc_info=error)
