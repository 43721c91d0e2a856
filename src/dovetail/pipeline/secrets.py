"""Secrets: named in a pipeline file, never in it; read from the environment or a file when they are needed."""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from dovetail.errors import PlanError

__all__ = ["Secret"]


class Secret(BaseModel):
    """Where a password or token is: ``{env: NAME}`` or ``{file: PATH}``.

    Examples
    --------
    >>> Secret.model_validate({"env": "PGPASSWORD"})
    Secret(env='PGPASSWORD', file=None)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(None, description="The environment variable that holds it.")
    file: str | None = Field(None, description="The file that holds it; a newline at its end does not count.")

    @model_validator(mode="before")
    @classmethod
    def _not_in_the_file(cls, given: Any) -> Any:
        if isinstance(given, str | int | float):
            raise ValueError(
                "A secret must not stand in the file itself. Write {env: NAME} or {file: PATH} instead of its value."
            )
        return given

    @model_validator(mode="after")
    def _exactly_one(self) -> "Secret":
        if (self.env is None) == (self.file is None):
            raise ValueError("A secret is either {env: NAME} or {file: PATH}.")
        return self

    def where(self) -> str:
        """What to call it in a message."""
        return f"the environment variable {self.env}" if self.env is not None else f"the file {self.file}"

    def read(self) -> SecretStr:
        """Its value, which prints as stars.

        Raises
        ------
        PlanError
            If it is not there.
        """
        if self.env is not None:
            value = os.environ.get(self.env)
            if not value:
                raise PlanError(f"The environment has no variable {self.env}, which holds a secret.", hint="Set it.")
            return SecretStr(value)
        assert self.file is not None
        try:
            return SecretStr(Path(self.file).expanduser().read_text(encoding="utf-8").removesuffix("\n"))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise PlanError(f"The secret in {self.file} cannot be read: {why}.", hint="Make the file.") from None
