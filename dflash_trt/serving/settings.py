"""What a model is told when it is loaded: its folder, and the parameters of its config.pbtxt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dflash_trt.errors import UsageError


class Settings:
    """The parameters of a model.

    Args:
        args: of `TritonPythonModel.initialize`.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        self.folder = Path(args["model_repository"])  # the model's own, in spite of its name
        self.model, self.version = args["model_name"], args["model_version"]
        parameters = json.loads(args["model_config"])["parameters"]
        self._values: dict[str, str] = {key: value["string_value"] for key, value in parameters.items()}

    def text(self, name: str) -> str:
        """Raises UsageError where the parameter is missing, as all below do."""
        if name not in self._values:
            raise self._wrong(name, "is missing")
        return self._values[name]

    def path(self, name: str) -> Path:
        """A folder, relative to the model's."""
        path = (self.folder / self.text(name)).resolve()
        if not path.is_dir():
            mend = "Move the repository and the bundle together, or write the repository again"
            raise self._wrong(name, f"leads to {path}, where there is no such folder", mend)
        return path

    def flag(self, name: str) -> bool:
        value = self.text(name)
        if value not in ("true", "false"):
            raise self._wrong(name, f'is "{value}", but must be "true" or "false"')
        return value == "true"

    def integer(self, name: str) -> int:
        value = self.text(name)
        if not value.isdecimal():
            raise self._wrong(name, f'is "{value}", but must be an integer >= 0')
        return int(value)

    def choice(self, name: str, *choices: str) -> str:
        value = self.text(name)
        if value not in choices:
            raise self._wrong(name, f'is "{value}", but must be one of {", ".join(choices)}')
        return value

    def _wrong(self, name: str, what: str, mend: str = "Mend it, or write the repository again") -> UsageError:
        where = f"{self.folder / 'config.pbtxt'}: parameter {name}"
        return UsageError(what, where=where, mend=mend)
