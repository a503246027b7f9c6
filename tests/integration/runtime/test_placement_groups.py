"""Placement: what is asked for, in which order it stands, and what is said when there is no room."""

import pytest
from ray.util.placement_group import placement_group_table

from skyrl_core.config import SkyRLConfig, load_config
from skyrl_core.errors import PlacementError
from skyrl_core.runtime.cluster import RayCluster
from skyrl_core.runtime.placement import Placement, create_placement

CPU = "trainer.placement.device=cpu"


def place(cluster: RayCluster, *words: str, training: bool = True) -> Placement:
    return create_placement(config(*words), cluster, training=training)


def config(*words: str) -> SkyRLConfig:
    return load_config(None, [CPU, *words])


def bundles(placement: Placement) -> list[int]:
    return [len(placement_group_table(group)["bundles"]) for group in placement.groups]


def test_colocated_roles_share_one_bundle_a_rank(cluster: RayCluster) -> None:
    placement = place(
        cluster,
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.placement.ref_num_gpus_per_node=2",
        "generator.inference_engine.num_engines=2",
    )
    try:
        assert bundles(placement) == [2]
        assert [slot.bundle for slot in placement.policy] == [slot.bundle for slot in placement.engines]
        assert [slot.share for slot in (*placement.policy, *placement.ref, *placement.engines)] == [0.2] * 6
    finally:
        placement.remove()


def test_engines_apart_from_the_trainer_have_bundles_of_their_own(cluster: RayCluster) -> None:
    placement = place(cluster, "trainer.placement.colocate_all=false", "generator.inference_engine.num_engines=2")
    try:
        assert bundles(placement) == [1, 2]
        assert placement.engines[0].group != placement.policy[0].group == placement.ref[0].group
    finally:
        placement.remove()


def test_every_role_apart(cluster: RayCluster) -> None:
    placement = place(cluster, "trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=false")
    try:
        assert bundles(placement) == [1, 1, 1]
    finally:
        placement.remove()


def test_no_reference_bundle_without_a_kl_term(cluster: RayCluster) -> None:
    placement = place(
        cluster,
        "trainer.placement.colocate_all=false",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.algorithm.use_kl_loss=false",
    )
    try:
        assert bundles(placement) == [1, 1]
        assert placement.ref == []
    finally:
        placement.remove()


def test_an_evaluation_alone_reserves_engines_only(cluster: RayCluster) -> None:
    placement = place(cluster, training=False)
    try:
        assert bundles(placement) == [1]
        assert placement.policy == []
    finally:
        placement.remove()


def test_an_actor_takes_a_fraction_so_that_it_lands_in_its_bundle(cluster: RayCluster) -> None:
    placement = place(cluster)
    try:
        options = placement.policy[0].actor_options("cuda")
        assert (options["num_cpus"], options["num_gpus"]) == (0.2, 0.2)
        assert "num_gpus" not in placement.policy[0].actor_options("cpu")
    finally:
        placement.remove()


def test_more_bundles_than_the_cluster_has_is_an_error_with_requested_and_available(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_core.runtime.placement._LOCAL_PATIENCE_SECONDS", 0.5)
    words = [
        "trainer.placement.policy_num_gpus_per_node=9",
        "trainer.placement.ref_num_gpus_per_node=9",
        "generator.inference_engine.num_engines=9",
        "trainer.train_batch_size=9",
        "trainer.policy_mini_batch_size=9",
    ]
    with pytest.raises(PlacementError, match=r"requested 9 bundle\(s\) \(CPU: 9\), the cluster has CPU: 4") as raised:
        place(cluster, *words)
    assert "trainer.placement" in str(raised.value)
    # What was asked for in vain is given back; resources themselves are freed a moment later.
    assert [found["state"] for found in placement_group_table().values() if found["state"] != "REMOVED"] == []
