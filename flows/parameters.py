"""Parameters that flows share, as the UI's forms and `prefect deployment run` check them.

Prefect shows a parameter's description from the flow's docstring only.
"""

from typing import Annotated

from pydantic import Field

ConfigFile = Annotated[
    str | None,
    Field(examples=["deployments/configs/arithmetic.yaml"]),
]

Override = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*=[\s\S]*$")]

Overrides = Annotated[
    tuple[Override, ...],
    Field(examples=[["trainer.epochs=2", "trainer.run_name=trial-7"]]),
]
