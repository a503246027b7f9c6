"""The same job on two policy ranks, two reference ranks and two engines: it runs, learns alike, and survives a kill."""

import pytest

from tests.e2e.conftest import LAST_STEP, RUN, Project

TWO = [
    "trainer.placement.policy_num_gpus_per_node=2",
    "trainer.placement.ref_num_gpus_per_node=2",
    "generator.inference_engine.num_engines=2",
    "flow.ray_num_cpus=2",
]


@pytest.mark.slow
def test_two_ranks_and_two_engines_run_the_whole_job_and_heal(project: Project, uninterrupted: Project) -> None:
    fault = "update.between_minibatches@step=3,minibatch=0,rank=1:kill-self"
    output = project.run(RUN, *TWO, faults=fault)
    assert "policy rank" in output
    lines = project.metrics("k")
    assert [line.step for line in lines] == list(range(LAST_STEP + 1))
    # The start model's samples do not depend on how engines share them, and neither does the first update.
    one = uninterrupted.metrics("k")
    assert lines[0].metrics["eval/all/avg_score"] == one[0].metrics["eval/all/avg_score"]
    assert lines[1].metrics["reward/avg_raw_reward"] == one[1].metrics["reward/avg_raw_reward"]
    for name in ("policy/loss", "policy/grad_norm", "policy/kl", "policy/entropy"):
        assert lines[1].metrics[name] == pytest.approx(one[1].metrics[name], abs=1e-5)
