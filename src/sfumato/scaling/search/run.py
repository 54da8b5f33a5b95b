"""A whole search, from a recipe to the recipe of the one private run."""

import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sfumato.config import Recipe, ResolvedRecipe
from sfumato.data import loading
from sfumato.errors import InputError
from sfumato.planning.classifiers import with_updates_alone
from sfumato.planning.resolve import resolve
from sfumato.recipes import recipe_of
from sfumato.reporting.lines import note
from sfumato.run_folder.files import refuse_among_images, refuse_links, write_atomically, write_json
from sfumato.run_folder.record import Result
from sfumato.scaling.search import final_recipe as final
from sfumato.scaling.search.result import SearchResult
from sfumato.scaling.search.schedule import plan_search
from sfumato.scaling.search.space import Space, paper_space, read_space
from sfumato.scaling.search.storage import file_in, file_of, shown
from sfumato.scaling.search.trials import evaluator, searched_data
from sfumato.scaling.search.worker import Worker
from sfumato.training import loop
from sfumato.training.interrupt import stop_on_sigterm
from sfumato.training.trainer import Trainer


def search(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    trials: int,
    *,
    output: Path | str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    name: str = "recipe",
    space: Space | Path | str | None = None,
    sampler: str = "greedy",
    prune: bool | None = None,
    batch_size: int | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    data: str | None = None,
    storage: str | None = None,
    worker: bool = False,
    data_root: Path | str | None = None,
    device: str = "auto",
    trust: Collection[str] = (),
    report: Callable[[str], None] = note,
) -> SearchResult:
    """Searches hyper-parameters by cheap simulations, and writes one recipe for the single private
    run.

    Args:
        recipe: Of the expensive run; as in `sfumato.train`.
        trials: How many settings are tried.
        output: The folder of the search; what an earlier call left there is gone on with.
        name: Of the recipe, for the text of the final one.
        space: What may be changed, or the TOML file that says so; default: the grid of Sander et
            al. (2022).
        sampler: "greedy" (one group after another), "tpe" or "random".
        prune: Give up trials that fall behind; with tpe and random.
        batch_size: Of the simulations; default: a 64th of the recipe's, at least 16.
        seeds: Each trial is one run for each.
        data: Search on this public data set instead.
        storage: "sqlite:///FILE", "journal:FILE" or "postgresql://..."; default: a file in
            ``output``.
        worker: Help with a search that may run elsewhere, too; writes no recipe.
        settings, data_root, device, trust: See `sfumato.train`.
        report: Takes lines about trials; default: stderr.

    Returns:
        What search.json holds.

    Raises:
        InputError: If the search cannot be.
        Interrupted, KeyboardInterrupt: Every finished trial is kept; the same call goes on.
    """
    parsed = recipe_of(recipe, settings)
    folder, root = Path(output), None if data_root is None else Path(data_root)
    if data is not None and data == parsed.data.name:
        raise InputError(
            f"--data {data} are the private images themselves. Name other, public images, or leave --data out."
        )
    refuse_among_images(folder, parsed.data, root)
    if storage is not None and (file := file_of(storage)) is not None:
        refuse_among_images(file, parsed.data, root)
    if (folder / "ledger.jsonl").exists():
        raise InputError(f"{folder} is a run's folder. Name a folder for the search by --output.")
    parsed.model.refuse_missing_weights()
    parsed = with_updates_alone(parsed, "search")
    plan = resolve(parsed, loading.facts(parsed.data, root, report))
    looked_at = searched_data(plan.recipe, data)
    choices = (
        space if isinstance(space, Space) else paper_space(plan.recipe) if space is None else read_space(Path(space))
    )
    wanted = plan_search(
        plan.recipe,
        choices,
        sampler=sampler,
        prune=prune,
        trials=trials,
        batch_size=batch_size,
        seeds=tuple(seeds),
        num_examples=plan.mechanism.num_examples,
        data=data,
    )
    # A folder of private images is no place of public ones.
    public_root = None if data is not None and parsed.data.name == "folder" else root
    limit = loading.images_per_person(parsed)
    trainer = Trainer(loading.load(looked_at, public_root, report, limit), device=device, trust=trust)
    trials_folder = folder / ".sfumato-trials"
    refuse_links(folder)
    trials_folder.mkdir(parents=True, exist_ok=True)
    url = storage or file_in(folder)

    def train(recipe: ResolvedRecipe, name: str, watch: Callable[[int, float], None]) -> Result:
        def step(facts: loop.StepFacts) -> None:
            if facts.evaluated and facts.accuracy is not None:
                watch(facts.step, facts.accuracy)

        # What a trial leaves is in the storage; weights of simulations are not private, and nobody
        # needs them.
        with tempfile.TemporaryDirectory(prefix=f"trial-{name}-", dir=trials_folder) as run:
            return trainer.run(recipe, Path(run) / "run", progress=loop.Progress(step=step))

    with stop_on_sigterm(), Worker(wanted, url, name, report) as crew:
        crew.run(evaluator(wanted, looked_at, train))
        finished = crew.finished()
    agenda = wanted.agenda(finished)
    shutil.rmtree(trials_folder, ignore_errors=True)  # what killed workers left: weights that are not private
    path = None if worker else folder / "recipe.toml"
    found = final.summary(wanted, agenda, finished, storage=shown(url), path=None if path is None else str(path))
    if path is not None:
        write_atomically(path, final.as_toml(wanted, agenda, found, name).encode())
        write_json(folder / "search.json", found.as_json())
    return found
