"""When the demo kills and when it starts again: driven by what the service tells, each once."""

from __future__ import annotations

import pytest

from engine.planning.layout import Layout
from everstep.cli.demo_faults import FaultPlan, FaultScript
from everstep.cli.demo_spec import SAVE_INTERVAL, demo_spec
from everstep.client import Generation, JobDetail
from everstep.protocol.messages import JobSpec, JobState


def job(step: int, generation: int = 1, start_step: int = 0, state: JobState = JobState.RUNNING) -> JobDetail:
    return JobDetail(
        id="demo-1",
        name="demo",
        state=state,
        generation=generation,
        submitted_at=0.0,
        step=step,
        train_steps=150,
        spec=JobSpec.model_validate(demo_spec("demo", 150, "run")),
        plan=Generation(generation=generation, layout=Layout(), start_step=start_step, created_at=0.0),
        run_directory="/run",
    )


def test_kill_then_restart_each_once():
    script = FaultScript(FaultPlan(kill_step=54, run_on=18))
    looks = [
        job(0, state=JobState.STARTING),
        job(53),
        job(55),
        job(56),  # not seen dead yet
        job(56, state=JobState.RECOVERING),
        job(50, 2, 50, JobState.RECOVERING),
        job(51, 2, 50),
        job(67, 2, 50),
        job(68, 2, 50),
        job(70, 2, 50),
        job(90, 3, 88),
    ]
    assert [script.move(look) for look in looks] == [None, None, "kill", *[None] * 5, "restart", None, None]


@pytest.mark.parametrize("steps", [60, 61, 100, 150, 151, 300, 1000])
def test_the_kill_loses_steps_and_leaves_time_to_grow(steps):
    plan = FaultPlan.for_steps(steps)
    assert 0.3 * steps < plan.kill_step < 0.42 * steps
    assert plan.kill_step % SAVE_INTERVAL != 0
    assert plan.kill_step + plan.run_on < 0.6 * steps


def test_the_demo_starts_as_tp2_pp2_dp2_with_two_to_five_million_parameters():
    spec = JobSpec.model_validate(demo_spec("demo", 150, "run"))
    assert spec.layout == Layout(tp=2, pp=2, dp=2)
    model = spec.model
    attention = model.hidden_size * model.attention_head_dim * 2 * (model.num_attention_heads + model.kv_heads)
    blocks = model.num_layers * (attention + 3 * model.hidden_size * model.ffn_hidden_size)
    assert 2e6 < blocks + 2 * model.vocab_size * model.hidden_size < 5e6
