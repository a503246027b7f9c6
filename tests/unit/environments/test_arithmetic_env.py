"""The arithmetic environment's rewards, by hand."""

import pytest

from skyrl_core.environments.arithmetic import ArithmeticEnv


def answer(text: str, truth: str = "46") -> tuple[float, float]:
    env = ArithmeticEnv(extras={"reward_spec": {"method": "rule", "ground_truth": truth}})
    output = env.step(text)
    assert output["done"] is True
    assert output["observations"] == []
    assert output["metadata"] == {}
    return output["reward"], env.get_metrics()["format"]


@pytest.mark.parametrize(
    ("text", "reward", "form"),
    [
        ("06,04;46", 1.0, 1.0),
        ("06,04;47", 0.0, 1.0),
        ("99,99;46", 1.0, 1.0),
        ("46", 0.0, 0.0),
        (";46", 1.0, 0.0),
        ("06,04;46;47", 0.0, 0.0),
        ("06,04;47;46", 1.0, 0.0),
        ("06,04;046", 1.0, 1.0),
        (" 06,04;46\n", 1.0, 1.0),
        ("06,04;4 6", 0.0, 0.0),
        ("06,04;-46", 0.0, 0.0),
        ("06,04;", 0.0, 0.0),
        ("06,04;4６", 0.0, 0.0),
        ("", 0.0, 0.0),
        (";" + "4" * 5000, 0.0, 0.0),
    ],
)
def test_what_follows_the_last_semicolon_counts(text: str, reward: float, form: float) -> None:
    assert answer(text) == (reward, form)


def test_a_sum_of_zero_is_written_as_any_number_of_zeros() -> None:
    assert answer("00,00;0", "0") == (1.0, 1.0)
    assert answer("00,00;00", "0") == (1.0, 1.0)
    assert answer("00,00;", "0") == (0.0, 0.0)


@pytest.mark.parametrize(
    "extras", [{}, {"reward_spec": "46"}, {"reward_spec": {}}, {"reward_spec": {"ground_truth": 46}}]
)
def test_a_row_without_a_sum_is_an_error_of_that_row(extras: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"reward_spec\.ground_truth must be a text of decimal digits"):
        ArithmeticEnv(extras=extras)
