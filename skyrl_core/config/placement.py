"""`trainer.placement`: how many ranks each model gets, and which share devices."""

from typing import Literal

from pydantic import Field

from skyrl_core.config.section import Count, Positive, Section, ours


class PlacementConfig(Section):
    """`trainer.placement`. Without GPUs, the keys that count GPUs count ranks."""

    colocate_all: bool = Field(True, description="training and inference take turns on the same devices")
    colocate_policy_ref: bool = Field(True, description="policy and reference share devices when colocate_all is off")
    policy_num_nodes: Count = Field(1, description="nodes of the policy")
    policy_num_gpus_per_node: Count = Field(1, description="ranks of the policy on each node")
    critic_num_nodes: Count = Field(1, description="nodes of the critic")
    critic_num_gpus_per_node: Count = Field(1, description="ranks of the critic on each node")
    ref_num_nodes: Count = Field(1, description="nodes of the reference model")
    ref_num_gpus_per_node: Count = Field(1, description="ranks of the reference model on each node")
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description=ours("what a rank runs on; auto takes GPUs where the cluster has them")
    )
    timeout_seconds: Positive = Field(
        180.0, description=ours("longest wait for the cluster to grant the placement (SKYRL_RAY_PG_TIMEOUT_IN_S)")
    )

    @property
    def policy_ranks(self) -> int:
        return self.policy_num_nodes * self.policy_num_gpus_per_node

    @property
    def critic_ranks(self) -> int:
        return self.critic_num_nodes * self.critic_num_gpus_per_node

    @property
    def ref_ranks(self) -> int:
        return self.ref_num_nodes * self.ref_num_gpus_per_node
