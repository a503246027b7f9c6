"""Factories named as module:attribute: found, or refused with the key, the name and the reason."""

import pytest

from skyrl_core.errors import ConfigurationError
from skyrl_core.hooks import load_hook


def test_without_a_name_the_default_stands() -> None:
    assert load_hook(None, "hooks.tracker", dict) is dict


def test_a_name_is_imported() -> None:
    assert load_hook("collections:OrderedDict", "hooks.tracker", dict).__name__ == "OrderedDict"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:make", "cannot import no_such_module .ModuleNotFoundError"),
        ("collections:no_such_name", "collections has no no_such_name"),
        ("math:pi", "pi is not callable"),
    ],
)
def test_what_cannot_be_used_is_refused_with_key_and_reason(name: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"hooks.tracker={name}.*{reason}"):
        load_hook(name, "hooks.tracker", dict)
