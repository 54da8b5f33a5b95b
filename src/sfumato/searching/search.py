"""A whole search, from a recipe to the recipe of the one private run."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sfumato.config import DataConfig, Recipe, ResolvedRecipe, parse
from sfumato.data import loading
from sfumato.errors import InputError
from sfumato.planning.classifiers import with_updates_alone
from sfumato.planning.resolve import resolve
from sfumato.recipes import recipe_of
from sfumato.reporting.lines import note
from sfumato.run_folder.files import refuse_among_images, write_atomically, write_json
from sfumato.run_folder.record import Result
from sfumato.scaling.simulate import simulated
from sfumato.searching import final_recipe as final
from sfumato.searching.result import SearchResult
from sfumato.searching.schedule import Outcome, Search, Slot, plan_search
from sfumato.searching.space import Settings, Space, apply, paper_space, possible, read_space
from sfumato.searching.study import Watch, file_in, file_of, finished, open_study, shown, work
from sfumato.training import loop
from sfumato.training.interrupt import stop_on_sigterm
from sfumato.training.trainer import Trainer

# Trains a recipe and returns its result; is told each step with a held-out accuracy.
Train = Callable[[ResolvedRecipe, Watch], Result]


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
            raise InputError(
                f"--data {self.data} are the private images themselves. Name other, public images, or leave --data out."
            )
        refuse_among_images(Path(self.output), parsed.data, self.root)
        parsed.model.refuse_missing_weights()
        return with_updates_alone(parsed, "search")

    def space_for(self, recipe: ResolvedRecipe) -> Space:
        """What may be changed."""
        if isinstance(self.space, Space):
            return self.space
        return paper_space(recipe) if self.space is None else read_space(Path(self.space))


def search(recipe: Recipe | Mapping[str, Any] | str | Path, trials: int, **options: Any) -> SearchResult:
    """Searches hyper-parameters by cheap simulations, and writes one recipe for the single private
    run.

    Args:
        recipe: Of the expensive run; as in `sfumato.train`.
        trials: How many settings are tried.
        options: As `SearchOptions` takes them; ``output`` is needed.

    Returns:
        What search.json holds.

    Raises:
        InputError: If the search cannot be.
        Interrupted, KeyboardInterrupt: Every finished trial is kept; the same call goes on.
    """
    return search_by(SearchOptions(recipe, trials, **options))


def search_by(options: SearchOptions) -> SearchResult:
    """As `search`."""
    parsed, folder, report = options.parsed(), Path(options.output), options.report
    url = options.storage or file_in(folder)
    refuse_among_images(file_of(url) or folder, parsed.data, options.root)
    if (folder / "ledger.jsonl").exists():
        raise InputError(f"{folder} is a run's folder. Name a folder for the search by --output.")
    plan = resolve(parsed, loading.facts(parsed.data, options.root, report))
    looked_at = searched_data(plan.recipe, options.data)
    wanted = plan_search(
        plan.recipe,
        options.space_for(plan.recipe),
        sampler=options.sampler,
        prune=options.prune,
        trials=int(options.trials),
        batch_size=options.batch_size,
        seeds=tuple(options.seeds),
        num_examples=plan.mechanism.num_examples,
        data=options.data,
    )
    dataset = loading.load(looked_at, public_root(options, parsed), report, loading.images_per_person(parsed))
    trainer = Trainer(dataset, device=options.device, trust=options.trust)
    # What a trial leaves is in the storage; weights of simulations are not private, and nobody needs them.
    weights = folder / "owner"
    weights.mkdir(mode=0o700, parents=True, exist_ok=True)

    def train(recipe: ResolvedRecipe, watch: Watch) -> Result:
        def step(facts: loop.StepFacts) -> None:
            if facts.evaluated and facts.accuracy is not None:
                watch(facts.step, facts.accuracy)

        with tempfile.TemporaryDirectory(dir=weights) as run:
            return trainer.run(recipe, Path(run) / "run", progress=loop.Progress(step=step))

    def evaluate(settings: Settings, slot: Slot, watch: Watch) -> Outcome:
        return simulate_settings(wanted, looked_at, settings, slot, train, watch)

    with stop_on_sigterm(), open_study(wanted, url, options.name) as study:
        agenda = work(wanted, study, evaluate, report)
        outcomes = finished(study)
    shutil.rmtree(weights, ignore_errors=True)  # what killed workers left, too
    path = None if options.worker else folder / "recipe.toml"
    found = final.summary(wanted, agenda, outcomes, storage=shown(url), path=None if path is None else str(path))
    if path is not None:
        write_atomically(path, final.as_toml(wanted, agenda, found, options.name).encode())
        write_json(folder / "search.json", found.as_json())
    return found


def simulate_settings(
    search: Search, data: DataConfig, settings: Settings, slot: Slot, train: Train, watch: Watch
) -> Outcome:
    """One trial: the same settings simulated with each seed, on images that are held apart from the training images.

    Raises:
        optuna.TrialPruned: If it is given up: such settings cannot be trained, or ``watch`` raised it.
    """
    import optuna

    try:
        recipe = apply(search.recipe, settings)
        if not possible(recipe, search.num_examples):
            raise optuna.TrialPruned("these settings contradict each other")
        if slot.kind == "law":  # held-out images are also judged by as many views as in training (AugTest)
            recipe = apply(recipe, {"augmentation.test_views": recipe.augmentation.augmult})
        if not search.prune:  # nobody looks at a trial before its end
            recipe = apply(recipe, {"training.evaluate_every": recipe.training.num_steps})
        recipe = recipe.model_copy(update={"data": data})
        # Whether a trial falls behind is judged by its first seed.
        watches = [watch, *([lambda step, accuracy: None] * (len(slot.seeds) - 1))]
        results = [
            train(simulated(recipe, slot.batch_size, seed), each)
            for seed, each in zip(slot.seeds, watches, strict=True)
        ]
    except InputError as error:
        raise optuna.TrialPruned(str(error)) from None
    voted = [result.accuracy_augtest_vote for result in results if result.accuracy_augtest_vote is not None]
    with_views = tuple(voted) if len(voted) == len(results) else None
    return Outcome(settings, tuple(result.accuracy for result in results), with_views)


def searched_data(recipe: Recipe, public: str | None) -> DataConfig:
    """The images of simulations: the validation split is held out, so that a final accuracy on test
    images says something.

    Args:
        recipe: Of the expensive run.
        public: A named data set in place of the recipe's own.
    """
    if public is None:
        return recipe.data.model_copy(update={"split": "train"})
    return parse({"data": {"name": public, "split": "train"}}).data


def public_root(options: SearchOptions, recipe: Recipe) -> Path | None:
    """Where the images that are searched on lie: a folder of private images is no place of public ones."""
    return None if options.data is not None and recipe.data.name == "folder" else options.root
