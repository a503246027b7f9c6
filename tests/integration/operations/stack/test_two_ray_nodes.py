"""A run on two Ray nodes that know nothing of the store: ranks on both, credentials with the run, Ray left up."""

import json
import subprocess
import sys
import uuid
from collections.abc import Callable

import pytest
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.e2e.conftest import RUN, Project
from tests.integration.operations.stack.conftest import S3, RayNodes
from tests.integration.operations.stack.services import SECRET_KEY, s3_filesystem
from tests.integration.operations.stack.test_runs_on_s3 import prefect_record

pytestmark = pytest.mark.service

TWO = ["trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.ref_num_gpus_per_node=2"]
TWO += ["generator.inference_engine.num_engines=2", "trainer.max_training_steps=2", "trainer.ckpt_interval=2"]

# Ray remembers where its dead actors lived.
WHERE = """
import json, logging, ray
ray.init(log_to_driver=False, logging_level=logging.CRITICAL)
from ray._private.state import actors
print(json.dumps({
    "actors": {actor["Name"]: [actor["State"], actor["Address"]["IPAddress"]] for actor in actors().values()},
    "nodes": sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]),
    "free": ray.available_resources().get("CPU"),
}))
"""


def test_ranks_live_on_both_nodes_and_ray_stays_up_without_them(
    new_project: Callable[[], Project], ray_cluster: RayNodes, s3_stack: S3, prefect_server: str
) -> None:
    project = new_project()
    # Neither this program nor the nodes have the store's credentials: a block on the Prefect server has.
    project.environment |= ray_cluster.environment
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        Secret(value=s3_stack.environment).save("team-store", _sync=True)
    block = "flow.store_block=team-store"
    root = s3_stack.uri(uuid.uuid4().hex)
    output = project.run(RUN, *TWO, block, f"trainer.ckpt_path={root}")
    assert [line.step for line in project.metrics("k")] == [0, 1, 2]
    saved = s3_filesystem(s3_stack.environment).find(f"{root}/k/global_step_2/policy")
    assert [name.rpartition("/")[2] for name in saved if "rank_" in name] == [
        "rank_00000_of_00002.safetensors",
        "rank_00001_of_00002.safetensors",
    ]

    environment = {**project.environment, **ray_cluster.environment}
    answer = subprocess.run([sys.executable, "-c", WHERE], env=environment, capture_output=True, text=True, timeout=120)
    seen = json.loads(answer.stdout.strip().splitlines()[-1])
    ranks = {name: place for name, place in seen["actors"].items() if name.startswith("policy-")}
    assert sorted(ranks.values()) == [["DEAD", "127.0.0.2"], ["DEAD", "127.0.0.3"]]
    # Ranks are numbered by node, and engines lie where the ranks do.
    assert len({address for name, (_, address) in seen["actors"].items() if name.startswith("engine-")}) == 2
    assert seen["nodes"] == ["127.0.0.2", "127.0.0.3"]
    assert seen["free"] == 2.0

    logs = {path.name: path.read_text(errors="replace") for path in ray_cluster.folder.rglob("*.*") if path.is_file()}
    assert any(name.startswith("runtime_env_agent") and "Creating runtime env" in logs[name] for name in logs)
    listing = project.run("--json", block, f"trainer.ckpt_path={root}", command="checkpoints")
    assert f'"path": "{root}/k/global_step_2"' in listing
    assert SECRET_KEY not in output + listing + prefect_record(prefect_server) + "".join(logs.values())
