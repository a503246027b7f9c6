"""The servers that the operations tests use are what they say."""

import httpx
import pytest

from tests.integration.operations.stack.conftest import S3
from tests.integration.operations.stack.services import s3_filesystem

pytestmark = pytest.mark.service


def test_prefect_keeps_its_record_in_postgresql(prefect_server: str, postgres: str) -> None:
    import asyncio

    import asyncpg

    async def tables() -> set[str]:
        connection = await asyncpg.connect(postgres.replace("+asyncpg", ""))
        try:
            rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        finally:
            await connection.close()
        return {row["tablename"] for row in rows}

    assert httpx.get(f"{prefect_server}/health").json() is True
    assert {"flow_run", "deployment", "automation"} <= asyncio.run(tables())


def test_the_s3_server_keeps_its_objects_over_a_restart_and_refuses_strangers(s3_stack: S3) -> None:
    s3_filesystem(s3_stack.environment).pipe_file(s3_stack.uri("kept"), b"content")
    with s3_stack.server.stopped():
        pass
    assert s3_filesystem(s3_stack.environment).cat_file(s3_stack.uri("kept")) == b"content"
    stranger = s3_filesystem({**s3_stack.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    with pytest.raises(PermissionError):
        stranger.cat_file(s3_stack.uri("kept"))
