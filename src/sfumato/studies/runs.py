"""One run of a sweep, in its own folder, where it is gone on with after a kill."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from sfumato import config, randomness
from sfumato.config import Recipe
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset
from sfumato.errors import InputError
from sfumato.randomness import digest
from sfumato.reporting.page import write_report
from sfumato.run_folder import record
from sfumato.run_folder.files import machine_faults, read_json, write_atomically
from sfumato.run_folder.ledger import is_in_use
from sfumato.run_folder.record import Metrics, PrivateMetrics, Result
from sfumato.run_folder.session import data_digest
from sfumato.searching.work import Key
from sfumato.searching.worker import Begun, Worker
from sfumato.studies.grid import Settings
from sfumato.studies.plan import Look, Planned, Reached, Run
from sfumato.training.loop import Looks, Progress
from sfumato.training.trainer import Trainer

PLACE_FILE = ".place"


def work(
    planned: Planned,
    folder: Path,
    url: str,
    data_root: Path | None,
    device: str,
    trust: Collection[str],
    report: Callable[[str], None],
) -> tuple[dict[Key, Reached], dict[Key, list[Begun]]]:
    """Makes runs until all are made, by whomever: what each reached, and where it was begun."""
    maker = Maker(planned, folder, data_root=data_root, device=device, trust=trust, report=report)
    study = f"sweep {planned.digest()[:16]}"
    with Worker[Run, Reached](planned, url, study, report, place=place_of(folder), is_anew=maker.is_anew) as worker:
        worker.run(maker)
        maker.look_at_images()
        return worker.finished(), worker.begun()


class Maker:
    """Makes the runs of a sweep below one folder.

    Args:
        planned: The sweep.
        folder: Of the sweep.
        data_root, device, trust: See `sfumato.train`.
        report: Takes lines about data and waiting.
    """

    def __init__(
        self,
        planned: Planned,
        folder: Path,
        *,
        data_root: Path | None,
        device: str,
        trust: Collection[str],
        report: Callable[[str], None],
    ) -> None:
        import torch

        self.planned, self.folder, self.report = planned, folder, report
        self._data_root, self._device, self._trust = data_root, device, trust
        self._threads = torch.get_num_threads()
        self._trainer: tuple[str, Trainer] | None = None
        self._seen: set[str] = set()

    def __call__(self, number: int, settings: Settings, run: Run, watch: Callable[[int, float], None]) -> Reached:
        """Trains a run, or goes on with it, and says what it reached."""
        import torch

        # Going on with a run restores its threads, which would stay.
        torch.set_num_threads(self._threads)
        place, plan, steps = self.folder / run.name, self.planned.plan_of(run), self.planned.steps_of(run)
        self._wait_for(place)
        cell = self.planned.cells[run.cells[-1]]
        result = self._trainer_of(plan.recipe, cell.facts).run_plan(
            plan,
            place,
            resume=place.is_dir() and any(place.iterdir()),
            looks=Looks(frozenset(steps), training_images=True),
        )
        write_report(place)
        return Reached(run.settings, result.num_steps, looks_at(place, result, steps), result.held_out)

    def look_at_images(self) -> None:
        """Loads what no run of this process did: a sweep that is finished answers for the images that it was begun
        with, and for no others.
        """
        for cell in self.planned.cells:
            if self._identity(cell.plan.recipe) not in self._seen:
                self._trainer_of(cell.plan.recipe, cell.facts)

    def is_anew(self, run: Run) -> bool:
        """Whether a run has no folder here: it never had one, or somebody took it away with all that it had released.
        It has one afterwards.
        """
        place = self.folder / run.name
        with machine_faults(place):
            anew = not place.exists()
            place.mkdir(parents=True, exist_ok=True)
        return anew

    def _trainer_of(self, recipe: Recipe, facts: Facts) -> Trainer:
        """With the images of this recipe; those of the last one are kept."""
        identity = self._identity(recipe)
        if self._trainer is None or self._trainer[0] != identity:
            self._trainer = None  # two data sets may not fit
            dataset = loading.load_for(recipe, self._data_root, self.report)
            if dataset.facts != facts:
                raise InputError("the images changed since the sweep was planned. Restore them, or begin a new sweep.")
            stated = config.shareable(recipe).data.model_dump(mode="json")  # wherever they lie
            refuse_other_images(self.folder, digest([stated, loading.images_per_person(recipe)]), dataset)
            self._seen.add(identity)
            progress = Progress(message=self.report)
            self._trainer = identity, Trainer(dataset, device=self._device, trust=self._trust, progress=progress)
        return self._trainer[1]

    def _identity(self, recipe: Recipe) -> str:
        """Of what is loaded for it."""
        return digest([recipe.data.model_dump(mode="json"), loading.images_per_person(recipe)])

    def _wait_for(self, place: Path) -> None:
        """A worker that gave no sign for long may train there still; two never do."""
        if is_in_use(place / "ledger.jsonl"):
            self.report(f"another process trains in {place}: waiting for it to end")
            while is_in_use(place / "ledger.jsonl"):
                time.sleep(0.5)


def refuse_other_images(folder: Path, identity: str, dataset: Dataset) -> None:
    """Notes in a sweep's folder, for its owner alone, which images it was begun with; later ones must be the same.

    Of cells on other images none could be compared. A plain digest would tell whoever sees it which images they are.

    Args:
        identity: Of what the recipe says of them.

    Raises:
        InputError: If they are others.
    """
    path = folder / f".images-{identity[:16]}"
    if not path.exists():
        key = randomness.new_key()
        noted = json.dumps({"key": key.hex(), "digest": data_digest(key, dataset)})
        part = folder / f".{secrets.token_hex(4)}.part"
        write_atomically(part, noted.encode(), 0o600)
        with contextlib.suppress(FileExistsError):  # of several workers the first one notes them
            os.link(part, path)
        part.unlink()
    facts = read_json(path)
    if facts["digest"] != data_digest(bytes.fromhex(facts["key"]), dataset):
        raise InputError(
            f"{folder} was begun with other images. Give those (--data-root), or another --output for a new sweep."
        )


def looks_at(place: Path, result: Result, steps: Sequence[int]) -> tuple[Look, ...]:
    """What a finished run reached after each of these steps; the last of them stands for its end."""
    lines = {line.step: line for line in record.read_lines(place / record.METRICS_FILE, Metrics)}
    missing = [step for step in steps[:-1] if step not in lines]
    if missing:
        raise InputError(
            f"{place / record.METRICS_FILE} says nothing of step {missing[0]}, where a sweep looks: the run was begun "
            "by something else, or the file is damaged. Begin anew with another --output."
        )
    before = [Look(accuracy=lines[step].accuracy, accuracy_last=lines[step].accuracy_last) for step in steps[:-1]]
    return (*before, Look(accuracy=result.accuracy, accuracy_last=result.accuracy_last))


def train_accuracy(place: Path, step: int) -> float | None:
    """On training images after a step; None where it was not noted here."""
    path = place / record.PRIVATE_METRICS_FILE
    lines = record.read_lines(path, PrivateMetrics) if path.exists() else []
    return next((line.train_accuracy for line in lines if line.step == step), None)


def place_of(folder: Path) -> str:
    """What this folder of a sweep is known by in a storage: its runs are gone on with in it alone.

    A copy of it is another folder, where runs that go on may release what the first one never did.
    """
    path = folder / PLACE_FILE
    if not path.exists():
        part = folder / f".{secrets.token_hex(4)}.part"
        part.write_text(secrets.token_hex(8), encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # of several workers the first one names it
            os.link(part, path)
        part.unlink()
    return f"{path.read_text(encoding='utf-8')}-{path.stat().st_ino}"
