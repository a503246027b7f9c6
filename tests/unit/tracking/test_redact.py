"""What leaves for a tracker holds no secrets."""

import pytest

from skyrl_core.tracking.redact import redacted


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "API_KEY",
        "openai_api_key",
        "password",
        "db_password",
        "secret",
        "client_secret",
        "hf_token",
        "auth_token",
        "token",
        "aws_secret_access_key",
        "credentials",
        "private-key",
        "Authorization",
    ],
)
def test_values_under_secret_names_are_hidden(name: str) -> None:
    assert redacted({"engine_init_kwargs": {name: "s3cr3t"}}) == {"engine_init_kwargs": {name: "[hidden]"}}


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens",
        "loss_reduction",
        "stop_token_ids",
        "tokenizer",
        "max_num_batched_tokens",
        "eos_token",
        "monkey",
        "keep",
    ],
)
def test_ordinary_names_stay(name: str) -> None:
    assert redacted({name: "value"}) == {name: "value"}


def test_passwords_in_addresses_are_hidden() -> None:
    config = {"servers": ("http://user:pw@host:8000/v1", "http://host:8000"), "path": "a@b"}
    assert redacted(config) == {
        "servers": ["http://[hidden]@host:8000/v1", "http://host:8000"],
        "path": "a@b",
    }


def test_numbers_and_absent_values_under_secret_names_stay() -> None:
    assert redacted({"token": None, "secret": 3, "password": ""}) == {"token": None, "secret": 3, "password": ""}
