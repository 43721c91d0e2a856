"""Secrets: a pipeline file only names them; they are read from the environment or a file when needed."""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from dovetail.core.errors import PlanError

__all__ = ["Secret"]


class Secret(BaseModel):
    """The location of a password or token: ``{env: NAME}`` or ``{file: PATH}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    env: str | None = Field(None, description="The environment variable that holds it.")
    file: str | None = Field(None, description="The file that holds it; a trailing newline is ignored.")

    @model_validator(mode="before")
    @classmethod
    def _not_in_the_file(cls, given: Any) -> Any:
        if isinstance(given, str | int | float):
            raise ValueError(
                "A secret must not be in the file itself. Write {env: NAME} or {file: PATH} instead of its value."
            )
        return given

    @model_validator(mode="after")
    def _exactly_one(self) -> "Secret":
        if (self.env is None) == (self.file is None):
            raise ValueError("A secret is either {env: NAME} or {file: PATH}.")
        return self

    def where(self) -> str:
        """Its location, for messages."""
        return f"the environment variable {self.env}" if self.env is not None else f"the file {self.file}"

    def read(self) -> SecretStr:
        """Its value, which prints as stars; a `PlanError` if it does not exist."""
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
            raise PlanError(f"The secret in {self.file} cannot be read: {why}.", hint="Create the file.") from None
