"""Where the run's actors live: Ray placement groups, with bundles in the order of nodes and devices."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_core.config import SkyRLConfig
from skyrl_core.errors import PlacementError
from skyrl_core.runtime.cluster import RayCluster

logger = logging.getLogger(__name__)

# A local cluster cannot grow; a short wait covers a predecessor whose resources are still being released.
_LOCAL_PATIENCE_SECONDS = 10.0


class Slot:
    """One bundle of a placement group, with the share of it that one actor of a role takes."""

    __slots__ = ("bundle", "group", "share")

    def __init__(self, group: PlacementGroup, bundle: int, share: float) -> None:
        self.group = group
        self.bundle = bundle
        self.share = share

    def actor_options(self, device: str) -> dict[str, Any]:
        """Ray options that put an actor here. An actor that asks for nothing would land anywhere, so each takes a
        fraction of the CPU, and of the GPU where there is one."""
        options: dict[str, Any] = {
            "num_cpus": self.share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }
        if device == "cuda":
            options["num_gpus"] = self.share
        return options


class Placement:
    """The slots of every role, ranks in order. Plain and picklable, so that it can pass through a task."""

    __slots__ = ("device", "engines", "groups", "policy", "ref")

    def __init__(
        self, device: str, policy: list[Slot], ref: list[Slot], engines: list[Slot], groups: list[PlacementGroup]
    ) -> None:
        self.device = device
        self.policy = policy
        self.ref = ref
        self.engines = engines
        self.groups = groups

    def remove(self) -> None:
        """Give the bundles back; actors in them die."""
        for group in self.groups:
            remove_placement_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    roles: tuple[str, ...]
    bundles: int


def resolve_device(requested: str) -> str:
    """`auto` is CUDA when the cluster has a GPU, else the CPU."""
    if requested != "auto":
        return requested
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


def create_placement(config: SkyRLConfig, cluster: RayCluster, *, training: bool = True) -> Placement:
    """Reserve bundles for every role and wait until they are there; for an evaluation alone only the engines'.

    On a CPU, SkyRL's `num_gpus` keys count ranks: one bundle {CPU: 1} each. On GPUs a bundle is {GPU: 1, CPU: 1}.
    `colocate_all` shares one set of bundles between trainer and engines; otherwise engines have their own, and policy
    and reference share theirs unless `colocate_policy_ref` is off.

    Raises:
        PlacementError: the bundles did not become ready within `trainer.placement.timeout_seconds`; says what was
            requested and what the cluster has.
    """
    device = resolve_device(config.trainer.placement.device)
    timeout = config.trainer.placement.timeout_seconds if cluster.can_grow else _LOCAL_PATIENCE_SECONDS
    slots: dict[str, list[Slot]] = {}
    groups: list[PlacementGroup] = []
    try:
        for request in _requests(config, training):
            group = _reserve(request, device, timeout)
            groups.append(group)
            order = _bundle_order(group, request.bundles, device)
            # Fractions of 0.2 leave room for trainer, reference, critic and engine on one device.
            share = 0.2 if len(request.roles) > 1 else 1.0
            for role in request.roles:
                slots[role] = [Slot(group, bundle, share) for bundle in order]
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise
    sizes = _role_sizes(config)
    return Placement(
        device,
        slots.get("policy", [])[: sizes["policy"]],
        slots.get("ref", [])[: sizes["ref"]],
        slots["engines"][: sizes["engines"]],
        groups,
    )


def resources_needed(config: SkyRLConfig, device: str, *, training: bool = True) -> dict[str, float]:
    """What all bundles of a run ask of the cluster, by Ray's names of resources."""
    bundles = sum(request.bundles for request in _requests(config, training))
    return {name: float(count * bundles) for name, count in _bundle(device).items()}


def _bundle(device: str) -> dict[str, int]:
    return {"GPU": 1, "CPU": 1} if device == "cuda" else {"CPU": 1}


def _role_sizes(config: SkyRLConfig) -> dict[str, int]:
    place = config.trainer.placement
    return {
        "policy": place.policy_num_nodes * place.policy_num_gpus_per_node,
        "ref": place.ref_num_nodes * place.ref_num_gpus_per_node,
        "engines": config.generator.inference_engine.num_engines,
    }


def _requests(config: SkyRLConfig, training: bool) -> list[_Request]:
    place, sizes = config.trainer.placement, _role_sizes(config)
    engines = _Request(roles=("engines",), bundles=sizes["engines"])
    if not training:
        return [engines]
    uses_reference = config.trainer.algorithm.use_kl_loss or config.trainer.algorithm.use_kl_in_reward
    trainer_roles = ["policy", "ref"] if uses_reference else ["policy"]
    if place.colocate_all:
        bundles = max(sizes[role] for role in (*trainer_roles, "engines"))
        return [_Request(roles=(*trainer_roles, "engines"), bundles=bundles)]
    if place.colocate_policy_ref:
        return [_Request(roles=tuple(trainer_roles), bundles=max(sizes[role] for role in trainer_roles)), engines]
    return [*(_Request(roles=(role,), bundles=sizes[role]) for role in trainer_roles), engines]


def _reserve(request: _Request, device: str, timeout: float) -> PlacementGroup:
    bundle = _bundle(device)
    group = placement_group([bundle] * request.bundles, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        total, available = ray.cluster_resources(), ray.available_resources()
        remove_placement_group(group)
        has = ", ".join(f"{name}: {total.get(name, 0):g} ({available.get(name, 0):g} free)" for name in sorted(bundle))
        wants = ", ".join(f"{name}: {count * request.bundles:g}" for name, count in sorted(bundle.items()))
        raise PlacementError(
            f"no room for {'+'.join(request.roles)} after {timeout:g} s: requested {request.bundles} bundle(s) "
            f"({wants}), the cluster has {has}. Ask for fewer ranks (trainer.placement.*, "
            "generator.inference_engine.num_engines), add nodes, or stop what holds the rest."
        ) from None
    return group


def _bundle_order(group: PlacementGroup, bundles: int, device: str) -> Sequence[int]:
    """Bundle numbers sorted by node and device, as seen from inside each: neighbouring ranks get neighbouring GPUs.

    Ray numbers bundles as requested, not by where they landed.
    """
    if bundles == 1:
        return [0]
    options = {"num_cpus": 0.01, "num_gpus": 0.01 if device == "cuda" else 0, "max_retries": 3}
    probes = [
        _where_am_i.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
            **options,
        ).remote()
        for index in range(bundles)
    ]
    places = ray.get(probes)
    return sorted(range(bundles), key=lambda index: (*places[index], index))


@ray.remote
def _where_am_i() -> tuple[str, int]:
    context = ray.get_runtime_context()
    devices = [int(device) for device in context.get_accelerator_ids().get("GPU", [])]
    return context.get_node_id(), min(devices, default=0)
