"""From a recipe to a finished run: load, resolve, train. The one way there, for the library and for
the command line; and how long it will take.

Also the same recipe several times: how far accuracy differs from run to run, and what all runs cost together.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato import config
from sfumato.accounting.accountants import epsilon_together
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset
from sfumato.data.images import ImageSet
from sfumato.data.objects import Given
from sfumato.errors import InputError
from sfumato.json_record import Record, finite
from sfumato.planning.resolve import Plan, resolve, resolve_without_privacy
from sfumato.randomness import Streams
from sfumato.recipes import name_of, recipe_of
from sfumato.reporting.page import write_report
from sfumato.run_folder import files, launch, ledger
from sfumato.run_folder.record import Result
from sfumato.run_folder.tested import TRAINED_ON_FILE
from sfumato.torch_internals import QuickProducts
from sfumato.training import loop
from sfumato.training.features import ROWS
from sfumato.training.learner import Learner, pick_device
from sfumato.training.logs import Progress, watching
from sfumato.training.step import draw
from sfumato.training.world import world_here

_EQUAL = "equal seeds give equal runs, which say nothing of the spread"


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains recipes, one after another, on a data set that is loaded once.

    Attributes:
        dataset: What the recipes name.
        device: "auto", "cpu", "cuda" ...
        trust: Modules that may be imported for a recipe's model, each by its full name.
        progress: Who watches, unless `run` is told otherwise.
    """

    dataset: Dataset
    device: str = "auto"
    trust: Collection[str] = ()
    progress: Progress = Progress()

    def run(self, recipe: config.Recipe, folder: Path, **options: Any) -> Result:
        """Resolves a recipe and trains it in a folder. See `run_plan`."""
        return self.run_plan(resolve(recipe, self.dataset.facts), folder, **options)

    def run_plan(self, plan: Plan, folder: Path, *, progress: Progress | None = None, **options: Any) -> Result:
        """The same of what is resolved already; ``options`` are those of `sfumato.training.loop.train`."""
        watches = progress or self.progress
        return loop.train(plan, self.dataset, folder, device=self.device, trust=self.trust, progress=watches, **options)


def train(
    recipe: config.Recipe | Mapping[str, Any] | str | Path,
    output: Path | str | None = None,
    *,
    epsilon: float | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    data: Any = None,
    test: Any = None,
    data_root: Path | str | None = None,
    device: str = "auto",
    non_private: bool = False,
    resume: bool = False,
    max_lost: float = ledger.MOST_LOST,
    budget: Path | str | None = None,
    trust: Collection[str] = (),
    progress: Progress | None = None,
) -> Result:
    """Trains a classifier under a recipe's budget and writes the run folder ``output``, its report included.

    Args:
        recipe: A recipe, its nested dictionaries, the name of a shipped one or the path of a TOML file.
        output: The run folder; with ``resume``, of the run to go on with. None: a new one in runs/.
        epsilon: The target; `privacy.target_epsilon` in a word.
        settings: What is set otherwise, such as {"privacy.unit": "person"}.
        data: Images and labels in the place of a folder: a pair (images, labels), of arrays or lists; a dataset whose
            items are (image, label); or one of Hugging Face's with the columns image and label. An image is an array
            (H, W) or (H, W, 3) of uint8, a PIL image, or a tensor (C, H, W) of uint8 or of numbers in [0, 1]; a label
            is a class's number or name. All are held in memory, at the size that the network takes. Classes are named
            by the object or by `data.classes`.
        test: The same, to be judged by. None: a part of ``data``, held out by a fixed hash of each index.
        data_root: Where the data lies; for named data sets default: $SFUMATO_DATA.
        device: "auto", "cpu", "cuda" ...
        non_private: The same recipe without privacy, to show its price.
        resume: Go on with the run in ``output``, or begin where nothing was begun; where its images lie may be left
            out, if the folder holds its owner's note. ``data`` is given again, and other images are refused.
        max_lost: The share of the plan's updates that crashes may cost the model before it is refused.
        budget: The file of a budget (`sfumato budget new`) that the run reserves its plan in, before its first release;
            what does not fit is refused. A run goes on with the budget that it was begun under.
        trust: Modules that may be imported for the recipe's model, each by its full name.
        progress: Who watches; what was chosen and every warning are messages. None: a live line on stderr.

    Returns:
        What result.json holds.

    Raises:
        InputError, MachineError, Interrupted: See `sfumato.training.loop.train`.
    """
    parsed = recipe_of(recipe, settings if epsilon is None else {**settings, "privacy.target_epsilon": epsilon})
    given = None if data is None else Given(data, test)
    if given is not None:
        parsed = parsed.model_copy(update={"data": given.stated(parsed.data)})
    if given is None and test is not None or given is not None and data_root is not None:
        raise InputError("test is given beside data, and data in the place of data_root. Leave one out.")
    if output is None and resume:
        raise InputError("a run to go on with is named by its folder: give output.")
    folder = launch.new_folder(name_of(recipe)) if output is None else Path(output)
    is_noted = resume and given is None and data_root is None and parsed.data.path is None
    noted = files.read_place(folder, files.DATA_ROOT_FILE) if is_noted else None
    root = noted or (None if data_root is None else Path(data_root))
    if root is not None:
        parsed = parsed.model_copy(update={"data": parsed.data.model_copy(update={"path": str(root)})})
    files.refuse_among_images(folder, parsed.data)  # before any image is read, as is what follows
    parsed.model.refuse_missing_weights()
    training = parsed.training
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(world_here(pick_device(device), training.rank_timeout, training.shard_state))
        watched = stack.enter_context(watching(progress if world.is_first else Progress()))
        with world.together():
            if noted is not None:
                watched.message(f"images of {noted}, as {folder / files.DATA_ROOT_FILE} says")
            plan, dataset = _loaded(parsed, root, given, non_private, watched)
            for choice in [] if resume else plan.choices:
                watched.message(f"chosen: {choice.key} = {choice.value} ({choice.why})")
            for warning in plan.warnings:
                watched.message(f"warning: {warning}")
        trainer = Trainer(dataset, device=device, trust=trust, progress=watched)
        plan = dataclasses.replace(plan, budget=None if budget is None else Path(budget))
        result = trainer.run_plan(plan, folder, resume=resume, max_lost=max_lost, world=world)
        if given is not None and world.is_first:  # of a folder its place is noted
            digests = dict.fromkeys(dataset.train.digests(), 1)
            files.write_json(folder / files.OWNER / TRAINED_ON_FILE, digests, mode=0o600)
        if plan.tip is not None:
            watched.message(f"tip: {plan.tip}")
        if world.is_first:
            write_report(folder)
    return result


def _loaded(
    recipe: config.Recipe, root: Path | None, given: Given | None, non_private: bool, watched: Progress
) -> tuple[Plan, Dataset]:
    """What will run, and its images."""
    resolved = resolve_without_privacy if non_private else resolve
    # A limit on each person's images, and images that score, belong to privacy: ordinary training knows of neither.
    loaded = recipe.model_copy(update={"privacy": None}) if non_private else recipe
    listed = loading.list_for(loaded, root, watched.message, given)
    resolved(recipe, listed.facts)  # before any image is decoded: a budget that is missing or impossible
    dataset = listed.load(loading.is_judged_on_test(loaded))
    return resolved(recipe, dataset.facts), dataset


def resume(
    run: Path | str,
    *,
    data: Any = None,
    test: Any = None,
    data_root: Path | str | None = None,
    device: str = "auto",
    max_lost: float = ledger.MOST_LOST,
    budget: Path | str | None = None,
    trust: Collection[str] = (),
    progress: Progress | None = None,
) -> Result:
    """Goes on with a run by what its folder says; one that is complete returns its result again.

    Args:
        run: The run folder, with its owner's notes of where images and weights lie.
        data, test: What the run was given, again.
        data_root: Where the images lie now, if not where the note says.
        budget: Where the file of its budget lies now, if not where the note says.
        device, max_lost, trust, progress: See `train`.

    Returns:
        What result.json holds.

    Raises:
        InputError, MachineError, Interrupted: See `sfumato.training.loop.train`.
    """
    folder = Path(run)
    path = folder / "recipe.toml"
    if not path.is_file():
        raise InputError(f"{folder} holds no run: there is no recipe.toml. Name the folder of a run.")
    values = config.read(path)
    weights = files.read_place(folder, files.INIT_FILE)
    if weights is not None:
        values.setdefault("model", {})["init_from"] = str(weights)
    how: dict[str, Any] = {"device": device, "max_lost": max_lost, "budget": budget, "trust": trust}
    return train(values, folder, data=data, test=test, data_root=data_root, resume=True, progress=progress, **how)


class Repeated(Record):
    """Runs that differ in their randomness alone.

    Attributes:
        accuracy: Mean over the runs.
        accuracy_spread: Standard deviation between runs; None of one run.
        epsilon_together: Of somebody who sees every run, at the delta of one; None where the runs are not
            private.
    """

    folder: str
    runs: list[Result]
    accuracy: float
    accuracy_spread: float | None
    epsilon_together: float | None

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "runs": [run.as_json() for run in self.runs]}


def repeat(
    recipe: config.Recipe | Mapping[str, Any] | str | Path,
    output: Path | str | None = None,
    *,
    times: int | None = None,
    seeds: Sequence[int] | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Repeated:
    """Trains a recipe several times, each in a folder of its own below ``output``. What an earlier call
    with the same output left is gone on with.

    Args:
        recipe: As `sfumato.train` takes it.
        output: Takes the run folders; None: a new one in runs/.
        times: So many runs, each with random numbers of its own: private ones, whose epsilons add up; or
        seeds: one run for each, its seed public: not private.
        settings, options: As `sfumato.train` takes them.

    Raises:
        InputError, MachineError, Interrupted: As `sfumato.train`.
    """
    refuse_repeats(recipe_of(recipe, settings), times, seeds)
    if "resume" in options:
        raise InputError("runs that are repeated go on by themselves: give the same command again, without --resume.")
    folder = launch.new_folder(name_of(recipe)) if output is None else Path(output)
    if any((folder / name).exists() for name in ("recipe.toml", ledger.LEDGER_FILE)):
        raise InputError(f"{folder} is a run's folder. Name a folder for several runs by --output.")
    numbers = range(1, (times or 0) + 1) if seeds is None else seeds
    named = {f"{'run' if seeds is None else 'seed'}-{number}": number for number in numbers}
    others = [path.parent.name for path in folder.glob(f"*/{ledger.LEDGER_FILE}") if path.parent.name not in named]
    if others:
        raise InputError(
            f"{folder} holds {max(others)} too, whose updates count for who sees the folder. Repeat as often as "
            "before, or name a new folder by --output."
        )
    runs = []
    for name, number in named.items():
        place = folder / name
        own = settings if seeds is None else {**settings, "run.seed": number}
        runs.append(train(recipe, place, settings=own, resume=place.is_dir() and any(place.iterdir()), **options))
    accuracies = [run.accuracy for run in runs]
    return Repeated(
        folder=str(folder),
        runs=runs,
        accuracy=statistics.fmean(accuracies),
        accuracy_spread=statistics.stdev(accuracies) if len(runs) > 1 else None,
        epsilon_together=_together(runs),
    )


def refuse_repeats(recipe: config.Recipe, times: int | None, seeds: Sequence[int] | None) -> None:
    """Refuses what `repeat` cannot repeat, before anything is looked at.

    Raises:
        InputError: Saying why.
    """
    if (times is None) == (seeds is None):
        raise InputError("runs are repeated by their number or by their seeds. Give --repeat or --seeds.")
    if seeds is not None:
        if not isinstance(seeds, Sequence) or not seeds or len(set(seeds)) != len(seeds):
            raise InputError(f"--seeds must name each seed once: {_EQUAL}.")
        return
    if type(times) is not int or not 1 <= times <= 1000:
        raise InputError(f"--repeat takes a number from 1 to 1000, not {times}.")
    if recipe.run.seed is not None:
        raise InputError(f"{_EQUAL}: leave run.seed out, or give --seeds.")
    if recipe.privacy is not None and recipe.privacy.selected_from is not None:
        raise InputError(
            "no epsilon is known for several runs that were each selected from others: leave out privacy.selected_from."
        )


def _together(runs: Sequence[Result]) -> float | None:
    """Epsilon of somebody who sees all runs."""
    one = runs[0]
    if not all(run.private for run in runs) or one.delta is None or one.accountant is None:
        return None
    if len({(run.num_examples, run.delta, run.unit) for run in runs}) > 1:
        raise InputError("the runs in this folder are of other images, so that no one epsilon covers them. Name a new.")
    mechanisms = [ledger.read(Path(run.run) / ledger.LEDGER_FILE).run.mechanism for run in runs]
    return finite(epsilon_together(mechanisms, one.delta, one.accountant).epsilon)


def expected_seconds(
    plan: Plan, facts: Facts, num_held_out: int, device: str = "auto", trust: Collection[str] = ()
) -> float:
    """Seconds of a run, all measured on random images: of its updates, its evaluations on so many held-out images, and
    the features of all images, where they are computed once.
    """
    learner = Learner(plan, _random_images(facts), pick_device(device), trust=trust)
    learner.initialise(np.zeros(1, dtype=np.uint64))
    size = min(learner.microbatch_size * learner.num_workers, facts.num_examples)
    streams = Streams()
    sums, updates = [], []  # a sum takes as long as its batch is large, an update does not
    for step in (1, 2, 3):
        view, model = streams.stream("view"), streams.stream("model")
        randomness = draw(np.arange(size) % 8, learner.views, view, model)
        start = time.perf_counter()
        grad_sum, _ = learner.collect(randomness)
        sums.append(time.perf_counter() - start)
        learner.state.update(learner.release(grad_sum, streams.stream("noise")), step, step)
        updates.append(time.perf_counter() - start - sums[-1])
    seconds = min(sums) / size * plan.mechanism.batch_size + min(updates)
    looks = math.ceil(plan.mechanism.num_steps / plan.evaluate_every)
    network, rows = learner.network, ROWS[learner.device.type]
    predictions = looks * 2 * num_held_out  # by last and averaged weights
    whole = seconds * plan.mechanism.num_steps
    whole += predictions * _seconds_of_one(network.trained, network.blank_examples(rows))
    if network.backbone is not None:
        whole += (facts.num_examples + num_held_out) * _seconds_of_one(network.backbone, network.blank(rows))
    return whole


@torch.inference_mode()
def _seconds_of_one(network: nn.Module, blank: torch.Tensor) -> float:
    """Of one of a batch."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        with QuickProducts():
            network(blank).sum().item()
        times.append(time.perf_counter() - start)
    return min(times) / len(blank)


def _random_images(facts: Facts) -> Dataset:
    shape = (8, facts.channels, facts.image_size, facts.image_size)
    classes = torch.arange(8) % facts.num_classes
    images = ImageSet(
        stored=torch.randint(0, 256, shape, dtype=torch.uint8),
        labels=torch.zeros(8, facts.num_classes, dtype=torch.int64) if facts.is_multilabel else classes,
        readable=torch.ones(8, dtype=torch.bool),
        mean=(0.5,) * facts.channels,
        std=(0.5,) * facts.channels,
        groups=None if facts.num_people is None else list("01234567"),
    )
    return Dataset("random", tuple(map(str, range(facts.num_classes))), images, images, "test")
