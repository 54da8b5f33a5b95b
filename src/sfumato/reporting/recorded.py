"""What a run folder records and a report may show."""

import dataclasses
from pathlib import Path
from typing import Any

from sfumato import config
from sfumato.run_folder.files import JsonLines, read_json


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The public files of one run. The key, checkpoints and metrics_private.jsonl are never opened.

    Attributes:
        name: Of the folder.
        privacy: privacy.json, the certificate.
        result: result.json, or None while the run is unfinished.
        metrics: The lines of metrics.jsonl, by step.
        recipe: recipe.toml as nested dictionaries, without data.path.
    """

    name: str
    privacy: dict[str, Any]
    result: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    recipe: dict[str, Any]

    @property
    def is_private(self) -> bool:
        """Whether the certificate claims a finite epsilon; everything else is reported as no guarantee."""
        return self.privacy["private"] is True and self.privacy["epsilon"] is not None

    @property
    def classes(self) -> list[str]:
        """Class names in label order; empty where an unfinished run does not state them."""
        return self.result["classes"] if self.result else self.recipe.get("data", {}).get("classes", [])


def read_run(folder: Path) -> Recorded:
    """Reads the public files of a run.

    Raises:
        InputError: If the certificate or the recipe is missing or damaged.
    """
    result = folder / "result.json"
    recipe = config.read(folder / "recipe.toml")
    config.parse(recipe)  # a file that is no recipe is not shown
    recipe["data"].pop("path", None)  # nor where the images lie, whoever wrote that there
    return Recorded(
        name=folder.resolve().name,
        privacy=read_json(folder / "privacy.json"),
        result=read_json(result) if result.exists() else None,
        metrics=sorted(JsonLines(folder / "metrics.jsonl").read(), key=lambda line: line["step"]),
        recipe=recipe,
    )
