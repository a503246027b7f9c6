"""A group of actors fails as one, says which rank and why, and never hangs on a dead one."""

import os
import time
from collections.abc import Iterator

import pytest
import ray

from skyrl_core.errors import NonFiniteLossError, WorkerUnavailableError
from skyrl_core.runtime.actor_host import start_actor
from skyrl_core.runtime.cluster import RayCluster, ensure_ray
from skyrl_core.runtime.worker_group import WorkerGroup


class Rank:
    """Stands in for a worker: answers, raises, dies, or waits for a peer that never comes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def double(self, value: int) -> int:
        return 2 * value + self.rank

    def total(self, values: list[int]) -> int:
        return sum(values)

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise NonFiniteLossError(f"loss is nan on {self.rank}")
        time.sleep(300)

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(1)
        time.sleep(300)

    def lose_peer(self, rank: int) -> None:
        """What gloo does: the survivors' collective fails the moment their peer is gone."""
        if self.rank == rank:
            os._exit(1)
        raise RuntimeError("Connection closed by peer")

    def hang(self) -> None:
        time.sleep(300)


@pytest.fixture
def group(cluster: RayCluster) -> Iterator[WorkerGroup]:
    made = WorkerGroup("policy", [start_actor(f"{__name__}:Rank", rank, num_cpus=0.1) for rank in range(3)], 1)
    yield made
    made.kill()


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert group.call("double", 5) == [10, 11, 12]
    assert group.call("total", [1, 2, 3]) == [6, 6, 6]


def test_a_failing_worker_s_type_and_message_arrive_while_others_still_wait(group: WorkerGroup) -> None:
    with pytest.raises(NonFiniteLossError, match="loss is nan on 1"):
        group.call("fail_on", 1)


def test_a_dead_rank_is_named_while_others_still_wait(group: WorkerGroup) -> None:
    with pytest.raises(WorkerUnavailableError, match=r"policy rank 2 died during die_on\(\)"):
        group.call("die_on", 2)


def test_a_dead_rank_is_the_cause_even_when_its_peers_report_first(group: WorkerGroup) -> None:
    with pytest.raises(WorkerUnavailableError, match="policy rank 0 died"):
        group.call("lose_peer", 0)


def test_ranks_that_do_not_answer_are_named_after_the_time_limit(group: WorkerGroup) -> None:
    with pytest.raises(WorkerUnavailableError, match=r"policy rank 0, 1, 2 did not finish hang\(\) within 0.2 s"):
        group.call("hang", timeout=0.2)


def test_a_nested_call_neither_starts_nor_stops_ray(cluster: RayCluster) -> None:
    with ensure_ray("another") as inner:
        assert not inner.started
    assert ray.is_initialized()
