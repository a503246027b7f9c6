"""Blocking calls from async code: limits, replacements for hanging threads, errors as they are."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from skyrl_core.generators.blocking import BlockingPool, TimeLimitError


def _in_pool(pool: BlockingPool, *functions: Callable[[], Any]) -> list[Any]:
    async def scene() -> list[Any]:
        with pool:
            return await asyncio.gather(*(pool.run(function) for function in functions), return_exceptions=True)

    return asyncio.run(scene())


def _raiser(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def test_results_come_back_in_order():
    assert _in_pool(BlockingPool(3, 60), *(lambda n=n: n * n for n in range(50))) == [n * n for n in range(50)]


def test_no_more_threads_than_workers_and_all_of_them_when_needed():
    together = threading.Barrier(3)
    threads: set[int] = set()

    def meet() -> None:
        threads.add(threading.get_ident())
        together.wait()

    _in_pool(BlockingPool(3, 60), *([meet] * 9))
    assert len(threads) == 3


def test_a_calls_own_errors_arrive_as_they_are():
    errors = _in_pool(BlockingPool(2, 60), _raiser(KeyError("a")), _raiser(TimeoutError("mine")), lambda: "fine")
    assert repr(errors) == "[KeyError('a'), TimeoutError('mine'), 'fine']"
    assert type(errors[1]) is TimeoutError


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), StopIteration(4), GeneratorExit()])
def test_what_would_end_the_event_loop_becomes_an_ordinary_error(error: BaseException):
    (outcome,) = _in_pool(BlockingPool(1, 60), _raiser(error))
    assert isinstance(outcome, RuntimeError)
    assert type(error).__name__ in str(outcome)


def test_hanging_calls_end_by_the_limit_and_the_others_still_run():
    release = threading.Event()
    outcomes = _in_pool(BlockingPool(2, 0.2), release.wait, release.wait, release.wait, lambda: 1, lambda: 2)
    release.set()
    assert [type(outcome) for outcome in outcomes[:3]] == [TimeLimitError] * 3
    assert str(outcomes[0]) == "took longer than 0.2 s"
    assert outcomes[3:] == [1, 2]


def test_a_call_that_returns_after_its_limit_harms_nobody():
    release, returned = threading.Event(), threading.Event()

    def late() -> str:
        release.wait()
        returned.set()
        return "late"

    async def scene() -> list[Any]:
        with BlockingPool(1, 0.2) as pool:
            outcome = await asyncio.gather(pool.run(late), return_exceptions=True)
            release.set()
            await asyncio.to_thread(returned.wait)
            return [*outcome, *[await pool.run(lambda n=n: n) for n in range(3)]]

    late_outcome, *rest = asyncio.run(scene())
    assert isinstance(late_outcome, TimeLimitError)
    assert rest == [0, 1, 2]


def test_threads_end_with_the_pool():
    threads: set[threading.Thread] = set()
    _in_pool(BlockingPool(4, 60), *([lambda: threads.add(threading.current_thread())] * 8))
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
        assert thread.daemon


def test_without_workers_calls_run_where_they_are_made():
    assert _in_pool(BlockingPool(0, 60), threading.get_ident, _raiser(ValueError("x")))[0] == threading.get_ident()
