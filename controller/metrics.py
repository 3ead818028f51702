"""What Prometheus scrapes: gauges read off the view at each scrape, and counters of what this controller saw happen.

Series of jobs that have ended vanish with the next scrape, because nothing about a job is remembered here.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.board import Board
from everstep.protocol.messages import Event, JobState

RECOVERY_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class ViewCollector(Collector):
    """Gauges of nodes and active jobs, and what agents count for a job by its events."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def describe(self) -> list[Metric]:
        """Nothing fixed: names come with the values."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The view as it stands."""
        view = self._board.view
        states = Tally(job.status.state for job in view.jobs.values() if job.status is not None)
        jobs = GaugeMetricFamily("everstep_jobs", "Jobs by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], states[state])
        yield jobs
        healthy = [name for name in view.nodes if view.healthy(name)]
        yield GaugeMetricFamily("everstep_nodes", "Registered healthy nodes.", value=len(healthy))
        devices = sum(len(view.nodes[name].devices) for name in healthy)
        yield GaugeMetricFamily("everstep_devices", "Devices of healthy nodes.", value=devices)
        step = GaugeMetricFamily("everstep_job_step", "Completed steps.", labels=["job"])
        loss = GaugeMetricFamily("everstep_job_loss", "Loss of the newest step.", labels=["job"])
        mfu = GaugeMetricFamily("everstep_job_mfu", "Model FLOPs utilization, mean of the ranks.", labels=["job"])
        generation = GaugeMetricFamily("everstep_job_generation", "Current generation.", labels=["job"])
        ranks_of = GaugeMetricFamily("everstep_job_ranks", "Ranks of the current plan.", labels=["job"])
        failures = CounterMetricFamily(
            "everstep_checkpoint_failures", "Saves that failed on all ranks.", labels=["job"]
        )
        for job in view.jobs.values():
            if not job.active or job.status is None:
                continue
            generation.add_metric([job.id], job.status.generation)
            step.add_metric([job.id], view.step_of(job))
            failures.add_metric([job.id], sum(event.kind == "save_failed" for event in job.events.values()))
            ranks_of.add_metric([job.id], job.plan.layout.world_size if job.plan else 0)
            ranks = view.ranks_of(job)
            losses = [(rank.step, rank.loss) for rank in ranks if rank.loss is not None]
            if losses:
                loss.add_metric([job.id], max(losses)[1])
            shares = [rank.mfu for rank in ranks if rank.mfu is not None]
            if shares:
                mfu.add_metric([job.id], sum(shares) / len(shares))
        yield from (step, loss, mfu, generation, ranks_of, failures)


class Metrics:
    """A registry of its own; ``count`` takes each event that this controller wrote."""

    def __init__(self, board: Board) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ViewCollector(board))
        self._recoveries = Counter(
            "everstep_recoveries", "Recoveries that reached their first step.", ["kind"], registry=self.registry
        )
        self._seconds = Histogram(
            "everstep_recovery_seconds",
            "From a fault to the first step after it.",
            ["kind"],
            buckets=RECOVERY_BUCKETS_S,
            registry=self.registry,
        )
        self._incidents = Counter("everstep_incidents", "Incidents by kind.", ["kind"], registry=self.registry)
        self._failures = Counter(
            "everstep_controller_job_failures",
            "Looks at a job that ended in an error of the controller.",
            registry=self.registry,
        )

    def count(self, event: Event) -> None:
        """Take in one event."""
        if event.kind == "recovered":
            self._recoveries.labels(event.data["kind"]).inc()
            self._seconds.labels(event.data["kind"]).observe(event.data["seconds"])
        elif event.kind == "incident":
            self._incidents.labels(event.data["kind"]).inc()

    def job_failed(self) -> None:
        """A look at a job ended in an error."""
        self._failures.inc()

    def text(self) -> bytes:
        """The exposition in Prometheus' text format."""
        return generate_latest(self.registry)
