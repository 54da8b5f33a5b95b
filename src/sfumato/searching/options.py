"""What a search is asked for, as one object."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.accounting.formats import note
from sfumato.config import DataConfig, Recipe, parse
from sfumato.data import loading
from sfumato.data.examples import Dataset
from sfumato.errors import InputError
from sfumato.recipes import recipe_of
from sfumato.run_folder.files import refuse_among_images
from sfumato.searching.space import Space, paper_space, read_space


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """What a search is asked for.

    Attributes:
        recipe: Of the expensive run; as in `sfumato.train`.
        trials: How many settings are tried; of a paid search, how many runs are made in the mean.
        output: The folder of the search; what an earlier call left there is gone on with.
        settings, data_root, device, trust: See `sfumato.train`.
        name: Of the recipe, for the text of the final one.
        space: What may be changed, or the TOML file that says so; default: the grid of Sander et
            al. (2022), for a paid search without other numbers of steps.
        sampler: "greedy" (one group after another), "tpe" or "random".
        prune: Give up trials that fall behind; with tpe and random.
        batch_size: Of the simulations; default: a 64th of the recipe's, at least 16.
        seeds: Each trial is one run for each.
        data: Search on this public data set instead; of a paid search, public images that score the runs.
        storage: "sqlite:///FILE" or "postgresql://..."; default: a file in ``output``.
        worker: Help with a search that may run elsewhere, too; writes no recipe.
        score_noise: Of a paid search without ``data``: noise on how many private validation images are judged right,
            its standard deviation in images.
        budget: Of a paid search: the file of the budget that it reserves what it spends in.
        report: Takes lines about trials; default: stderr.
    """

    recipe: Recipe | Mapping[str, Any] | str | Path
    trials: int | float
    output: Path | str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = "recipe"
    space: Space | Path | str | None = None
    sampler: str = "greedy"
    prune: bool | None = None
    batch_size: int | None = None
    seeds: Sequence[int] = (0, 1, 2)
    data: str | None = None
    storage: str | None = None
    worker: bool = False
    score_noise: float | None = None
    data_root: Path | str | None = None
    device: str = "auto"
    trust: Collection[str] = ()
    budget: Path | None = None
    report: Callable[[str], None] = note

    @property
    def root(self) -> Path | None:
        """Where the data lies."""
        return None if self.data_root is None else Path(self.data_root)

    def parsed(self) -> Recipe:
        """The recipe, whose search can be.

        Raises:
            InputError: If it cannot.
        """
        parsed = recipe_of(self.recipe, self.settings)
        if self.data is not None and self.data == parsed.data.name:
            raise InputError(f"--data {self.data} are the private images themselves. Name public ones.")
        refuse_among_images(Path(self.output), parsed.data, self.root)
        parsed.model.refuse_missing_weights()
        return parsed

    def space_for(self, steps: int | None) -> Space:
        """What may be changed; by default other numbers of steps, too, where those of the recipe are given."""
        if isinstance(self.space, Space):
            return self.space
        return paper_space(steps) if self.space is None else read_space(Path(self.space))

    def looked_at(self, recipe: Recipe) -> DataConfig:
        """The images of simulations: the validation split is held out, so that a final accuracy on test
        images says something.
        """
        if self.data is None:
            return recipe.data.model_copy(update={"split": "train"})
        return parse({"data": {"name": self.data, "split": "train"}}).data

    def load(self, recipe: Recipe) -> Dataset:
        """These images. A folder of private images is no place of public ones."""
        root = None if self.data is not None and recipe.data.name == "folder" else self.root
        return loading.load(self.looked_at(recipe), root, self.report, recipe.privacy)
