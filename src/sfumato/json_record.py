"""What stands in a JSON file, as a type: the one place that says which keys there are."""

import math
from typing import Any

import pydantic


class Record(pydantic.BaseModel):
    """A JSON object with exactly these keys. Numbers are finite, and nothing is taken for what it
    is not.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def as_json(self) -> dict[str, Any]:
        """For a file, or for ``--json``."""
        return self.model_dump(mode="json")


def pick(source: object, *names: str) -> dict[str, Any]:
    """Attributes by their names, for a record that repeats them."""
    return {name: getattr(source, name) for name in names}


def finite(value: float | None) -> float | None:
    """JSON has no Infinity: None where there is no finite number."""
    return value if value is not None and math.isfinite(value) else None
