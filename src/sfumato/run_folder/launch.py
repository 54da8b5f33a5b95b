"""Starting a run: one that begins, or one that goes on from its newest checkpoint.

What a start writes comes in this order, so that one that is killed anywhere can be started again: the recipe and the
owner's notes; the ledger's first line; checkpoint 0, with all that is drawn once. The first release comes after that.
"""

import contextlib
import dataclasses
import datetime
import glob
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from sfumato import config
from sfumato.data.examples import Dataset, dataset_digest
from sfumato.errors import InputError, MachineError
from sfumato.json_record import Record
from sfumato.planning.resolve import Plan
from sfumato.randomness import Stream, digest
from sfumato.run_folder import budget as budgets
from sfumato.run_folder import files, record
from sfumato.run_folder.checkpoint import Checkpoint, Checkpoints
from sfumato.run_folder.files import OWNER, machine_faults, write_json
from sfumato.run_folder.ledger import LEDGER_FILE, MOST_LOST, Ledger, RunLine, new_run_line

_LAUNCH_FILE = f"{files.OWNER}/launch"
_IMAGES_FILE = f"{files.OWNER}/images_sha256"
_CHECKPOINT_SECONDS, _SEEN_WITHIN = 300.0, 60.0
_OR_ANEW = "or start a new run with another --output; the epsilons of both add up."


class Launch:
    """A run that may release updates.

    It has the lock of the ledger, which may lapse on a shared file system while this process is frozen. So it leaves
    an id in the folder as well, and looks for it before it writes anything there.

    Attributes:
        folder: The run folder.
        ledger: Open for appending.
        checkpoints: Those that were and will be written.
        checkpoint: Where to go on from; None at the very beginning.
        reserved: What the certificate says of the budget; None: there is none.
    """

    reserved: record.BudgetClaim | None = None
    _budget: Path | None = None

    def __init__(self, folder: Path, ledger: Ledger, checkpoints: Checkpoints, checkpoint: Checkpoint | None) -> None:
        self.folder, self.ledger, self.checkpoints, self.checkpoint = folder, ledger, checkpoints, checkpoint
        self._saved_at = self.checkpoint.num_releases if self.checkpoint else 0
        self._saved_when = time.monotonic()
        self._writer, self._writing = ThreadPoolExecutor(1, "checkpoint"), list[Future[None]]()  # one at most

    @property
    def run_id(self) -> str:
        return self.ledger.lines.run.run_id

    def take_over(self) -> None:
        """Once nothing is refused: whoever was here before writes nothing more, and there is room for a checkpoint."""
        files.write_atomically(self.folder / _LAUNCH_FILE, self.ledger.launch_id.encode(), 0o600)
        self.checkpoints.remove_room()
        if self.checkpoint is not None:
            self.checkpoints.hold_room()

    def reserve(self, budget: Path | None) -> None:
        """At each start, before its first release: makes sure that the plan is reserved in its budget, if it has one.

        Raises:
            InputError: As `sfumato.run_folder.budget.reserve`.
        """
        if budget is not None:
            self.reserved, self._budget = budgets.reserve(budget, self.ledger.lines.run), budget

    def append(self, step: int) -> None:
        """Counts a release: `Ledger.append`."""
        self.refuse_other()
        self.ledger.append(step)

    def refuse_other(self) -> None:
        """Before anything is written.

        Raises:
            MachineError: If another start took the folder over. What this one released is counted.
        """
        path = self.folder / _LAUNCH_FILE
        with machine_faults(path):
            found = path.read_text()
        if found != self.ledger.launch_id:
            self.ledger.close()
            raise MachineError(
                f"another start goes on with the run in {self.folder}, so this one writes nothing more there and ends."
            )

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint has all releases."""
        return self._saved_at == self.ledger.lines.num_releases

    def is_due(self, every: int | None = None) -> bool:
        """Whether a checkpoint is: after so many releases (None: a fiftieth of the plan), after five minutes, and after
        the last release; not while another is written.

        Raises:
            MachineError: If the last one could not be written.
        """
        count, num_steps = self.ledger.lines.num_releases, self.ledger.lines.run.num_steps
        is_time = time.monotonic() - self._saved_when > _CHECKPOINT_SECONDS
        is_far = count - self._saved_at >= (every or num_steps // 50)
        if all(each.done() for each in self._writing):
            self.settle()
        return not self.is_saved and (count == num_steps or (not self._writing and (is_far or is_time)))

    def save(self, state: dict[str, Any], step: int, facts: dict[str, Any], *, waits: bool = True) -> None:
        """Writes the checkpoint of the model's update ``step``, which all releases so far led to.

        Args:
            state: Of which nothing changes until it is written.
            step: Of the model.
            facts: What else is plain.
            waits: Until it is on the disk; else it is written while the run goes on.
        """
        self.settle()
        lines = self.ledger.lines
        found = Checkpoint(self.run_id, lines.count, lines.num_releases, step, state, facts)
        if waits:
            self.checkpoints.save(found, self.refuse_other)
        else:
            self._writing.append(self._writer.submit(self.checkpoints.save, found, self.refuse_other))
        self._saved_at, self._saved_when = lines.num_releases, time.monotonic()

    def settle(self) -> None:
        """Waits for the last checkpoint; raises what kept it from the disk, once."""
        while self._writing:
            self._writing.pop().result()

    def close(self) -> None:
        """Frees the folder, once what is being written is. A run that has released nothing gives its plan back."""
        self._writer.shutdown()
        with contextlib.closing(self.ledger):
            if self._budget is not None and self.ledger.is_open and not self.ledger.lines.num_releases:
                self.refuse_other()
                budgets.give_back(self._budget, self.ledger)


def start(folder: Path, line: RunLine, *, anonymous: bool = False, patience: float = 0.0) -> Launch:
    """Opens a run's ledger, and finds where to go on from.

    Args:
        folder: With what a run begins with, or left.
        line: What the first line of its ledger says, but for the id.
        anonymous: Lines do not say which start made them.
        patience: Seconds to wait for another process that works there.

    Raises:
        InputError: If another process works there, the ledger is of another plan, or it and the checkpoints disagree.
        MachineError: If it cannot be written.
    """
    ledger = Ledger(folder / LEDGER_FILE, anonymous=anonymous, patience=patience)
    checkpoints = Checkpoints(folder / files.OWNER / "checkpoints", ledger.launch_id)
    with ledger.closed_on_error():
        found, lines = checkpoints.newest(), None if ledger.is_new else ledger.lines
        if lines is not None:
            refuse_another_plan(lines.run, line, ledger.path)
        if found is None and lines is not None and lines.releases:
            raise InputError(
                f"{ledger.path} has releases and there is no checkpoint of them. Restore it from a copy, {_OR_ANEW}"
            )
        if found is not None and (lines is None or found.run_id != lines.run.run_id or found.num_lines > lines.count):
            raise InputError(
                f"{ledger.path} has fewer lines than the newest checkpoint, or is another run's: what was spent is not "
                f"known. Restore both from one copy, {_OR_ANEW}"
            )
        return Launch(folder, ledger, checkpoints, found)


def require_sight(folder: Path, launch_id: str | None) -> None:
    """Refuses a run folder in which a start that took it over is not to be seen. Other machines may see files late.

    Raises:
        InputError: After a minute.
    """
    path, until = folder / _LAUNCH_FILE, time.monotonic() + _SEEN_WITHIN
    while not path.is_file() or path.read_text() != launch_id:
        if time.monotonic() > until:
            raise InputError(
                f"{folder} is another folder here than in the first rank, and this rank may be the first after a "
                "restart. Name one by --output that all machines share."
            )
        time.sleep(0.2)


def begin(folder: Path, plan: Plan, dataset: Dataset, *, patience: float = 0.0) -> Launch:
    """Begins a run in a new folder, or in one where a start was cut short before checkpoint 0. Raises what `start` and
    `Launch.reserve` do.
    """
    plan = _with_budget(folder, plan)
    line = run_line(plan)
    files.make_folders(folder)
    started = start(folder, line, anonymous=plan.selection is not None, patience=patience)
    with started.ledger.closed_on_error():
        if started.checkpoint is not None:
            raise InputError(f"another start began the run in {folder} meanwhile. Go on with it: sfumato resume.")
        started.take_over()
        files.write_places(folder, plan.recipe, plan.budget)  # before the recipe, by which a run can be gone on with
        files.write_atomically(folder / "recipe.toml", config.to_toml(config.shareable(plan.recipe)).encode())
        files.write_atomically(folder / _IMAGES_FILE, dataset_digest(dataset).encode(), 0o600)
        if started.ledger.is_new:
            started.ledger.begin(line)
        started.reserve(plan.budget)
        return started


def go_on(
    folder: Path, plan: Plan, dataset: Dataset, max_lost: float = MOST_LOST, *, patience: float = 0.0
) -> Launch | None:
    """Goes on from the newest whole checkpoint. Releases after it are lost to the model, and stay counted.

    Args:
        folder: Of the run.
        plan: As when it began.
        dataset: The same images.
        max_lost: The share of the plan's updates that crashes may cost in all.
        patience: Seconds to wait for another process that works there.

    Returns:
        None where nothing was begun, or a start was cut short before there was anything to go on from.

    Raises:
        InputError: If the recipe or the images changed, the folder holds no run, or what `start` and `Launch.reserve`
            say.
        MachineError: If more updates were lost than allowed.
    """
    files.refuse_links(folder)
    if not (folder / LEDGER_FILE).exists():
        refuse_other_files(folder)
        return None
    refuse_changed_recipe(folder, plan)
    plan = _with_budget(folder, plan)
    started = start(folder, run_line(plan), anonymous=plan.selection is not None, patience=patience)
    found, ledger = started.checkpoint, started.ledger
    if found is None:
        ledger.close()
        return None
    with ledger.closed_on_error():
        noted = folder / _IMAGES_FILE
        if not noted.is_file() or noted.read_text() != dataset_digest(dataset):
            raise InputError(
                "the images changed since this run began (one was added, removed, altered, relabelled or reordered), "
                f"or {noted} is gone. Restore them, {_OR_ANEW}"
            )
        if plan.private:
            ledger.refuse_lost(found.step, max_lost)
        started.take_over()
        started.reserve(plan.budget)
        files.write_places(folder, plan.recipe, plan.budget)
        if not plan.private:
            ledger.cut_back(found.num_lines)
        return started


def _with_budget(folder: Path, plan: Plan) -> Plan:
    """With the budget that the owner's note says, where none is named."""
    return dataclasses.replace(plan, budget=plan.budget or files.read_place(folder, files.BUDGET_FILE))


def require_room(plans: Sequence[Plan]) -> None:
    """Refuses runs that do not fit the budget that they name, before anything is trained or written. Others may still
    take the room: `Launch.reserve` decides.

    Raises:
        InputError: As `sfumato.run_folder.budget.Budget.require`, or `run_line`.
    """
    if plans and plans[0].budget is not None:
        budgets.read(plans[0].budget).require([run_line(plan) for plan in plans])


def refuse_another_plan(stated: RunLine, expected: RunLine, path: Path) -> None:
    """recipe.toml can be edited or lost; the ledger's first line states what the epsilon is of.

    Raises:
        InputError: If the ledger was begun under another plan.
    """
    if expected.model_copy(update={"run_id": stated.run_id}) != stated:
        raise InputError(
            f"{path} was begun under another recipe, mechanism, budget (--budget FILE) or number of images: another "
            f"plan is another run. Give it as it was, {_OR_ANEW}"
        )


def run_line(plan: Plan) -> RunLine:
    """What a run of the plan states first, with a new id.

    Raises:
        InputError: If its budget cannot be read, or no epsilon is known for it beside other runs.
    """
    privacy = plan.recipe.privacy
    if plan.budget is not None and plan.selection is not None:
        raise InputError("no epsilon is known for a run selected from others, beside other runs. Leave --budget out.")
    return new_run_line(
        plan.mechanism,
        unit=privacy.unit if privacy is not None and plan.private else None,
        clipping_norm=None if privacy is None else privacy.clipping_norm,
        delta=None if privacy is None else privacy.delta,
        recipe_sha256=digest(config.releasing_keys(plan.recipe)),
        budget=None if plan.budget is None else budgets.read(plan.budget).stated.budget_id,
    )


def refuse_changed_recipe(folder: Path, plan: Plan) -> None:
    """Compares with the recipe on disk, speed and device aside.

    Raises:
        InputError: Naming the first key that changed.
    """
    path, now = folder / "recipe.toml", config.releasing_keys(plan.recipe)
    before = config.releasing_keys(config.parse(config.read(path))) if path.exists() else now
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise InputError(
                f"{key} was {before.get(key)!r} when this run began and is {now.get(key)!r} now. Give it as it was, "
                f"{_OR_ANEW}"
            )


def refuse_other_files(folder: Path) -> None:
    """Refuses a folder without a ledger that has more than what a start leaves before the ledger's first line."""
    if any((folder / files.OWNER / "checkpoints").glob("*.pt")):
        lost = folder / LEDGER_FILE
        raise InputError(f"{lost} is missing, so what was spent is not known. Restore it from a copy, {_OR_ANEW}")
    there = folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []
    for path in there:
        if path.name not in ("recipe.toml", files.OWNER) and not path.name.endswith(".part"):
            raise InputError(f"{folder} holds {path.name} and no run: nothing to resume. Name a run's folder.")


def is_under_torchrun() -> bool:
    """Whether torchrun started this process, as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def new_folder(name: str) -> Path:
    """runs/<recipe>-<UTC time>-<4 hex>.

    Raises:
        InputError: Under torchrun, whose processes would each make up a name, and another one after a restart.
    """
    if is_under_torchrun():
        raise InputError("under torchrun a folder is named, for all processes and restarts: give --output, --resume.")
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{name.replace('/', '-')}-{now}-{secrets.token_hex(2)}"


def newest_unfinished(name: str) -> Path:
    """The newest run of that recipe in runs/ that did not finish.

    Raises:
        InputError: If there is none.
    """
    runs = Path("runs").glob(f"{glob.escape(name.replace('/', '-'))}-????????T??????Z-????")
    # Neither a sweep nor a series of runs has a recipe of its own.
    unfinished = [path for path in runs if (path / "recipe.toml").exists() and not (path / "result.json").exists()]
    if not unfinished:
        raise InputError(
            f"there is no unfinished run of {name} in runs/. Name the folder by --output, or leave out --resume."
        )
    return max(unfinished, key=lambda path: path.stat().st_mtime)


COINS_FILE = f"{OWNER}/canaries.json"


class Coins(Record):
    """owner/canaries.json.

    Attributes:
        run_id: Whose they are.
        took_part: For each canary.
    """

    run_id: str
    took_part: list[bool]


def toss_coins(folder: Path, run_id: str, count: int, stream: Stream) -> np.ndarray:
    """Fair coins of a run that begins, written into its folder: (m,), bool."""
    took_part = (stream.uint64(count) >> np.uint64(63)).astype(bool)
    write_json(folder / COINS_FILE, Coins(run_id=run_id, took_part=took_part.tolist()).as_json(), 0o600)
    return took_part


def read_coins(folder: Path, run_id: str, count: int) -> np.ndarray:
    """(m,), bool: the coins of a run.

    Raises:
        InputError: If they are not there, or are another run's.
    """
    path = folder / COINS_FILE
    if not path.exists():
        raise InputError(
            f"{path} is not there: no copy for sharing says which canaries took part. Name the owner's own run folder."
        )
    found = record.read(path, Coins)
    if found.run_id != run_id or len(found.took_part) != count:
        raise InputError(f"{path} is another run's. Restore it from a copy.")
    return np.array(found.took_part, dtype=bool)
