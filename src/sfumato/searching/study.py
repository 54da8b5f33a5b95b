"""One study in one storage, on which any number of processes work. Claims, heartbeats and retries are Optuna's.

A slot of the agenda becomes a trial in the storage; whoever moves a trial from waiting to running makes it. A trial
whose process was killed gives no heartbeat: after `GRACE` seconds another process fails it, and it waits again.
"""

import contextlib
import datetime
import importlib.util
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import InputError, MachineError
from sfumato.searching.schedule import Agenda, Outcome, Search, Slot, accuracies_of
from sfumato.searching.space import Settings

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import URL

HEARTBEAT, GRACE = 10, 120
_GIVE = "give sqlite:///FILE or postgresql://USER@HOST/DATABASE."

Watch = Callable[[int, float], None]
# Settings, slot, watch(step, accuracy) -> what was found; raises InputError for a trial that is given up.
Evaluate = Callable[[Settings, Slot, Watch], Outcome]


class _Taken(Exception):
    """Another trial of the same slot counts."""


def work(
    search: Search, study: "Study", evaluate: Evaluate, report: Callable[[str], None], grace: int = GRACE
) -> Agenda:
    """Makes trials until the agenda is complete, whoever completes it.

    Args:
        evaluate: Makes a trial.
        report: Told of each that is finished, in one line.
        grace: As of `open_study`.
    """
    import optuna

    def objective(trial: "Trial") -> float:
        slot = _slot_of(trial, search, study)
        settings = _draw(search, trial) if slot.settings is None else slot.settings
        study._storage.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
        trial.set_user_attr("settings", settings)

        def watch(step: int, accuracy: float) -> None:
            trial.report(accuracy, step)
            if search.prune and slot.settings is None and trial.should_prune():
                raise InputError("fell behind")

        try:
            found = evaluate(settings, slot, watch)
        except InputError as reason:
            if slot.kind != "candidate":
                raise
            report(f"{slot.label}: given up, {reason}")
            raise optuna.TrialPruned from None
        accuracies = accuracies_of(found)
        trial.set_user_attr("accuracies", accuracies)
        trial.set_user_attr("augtest", found.augtest)
        score = sum(accuracies) / len(accuracies)
        in_words = " ".join(f"{key}={value}" for key, value in settings.items()) or "as the recipe is"
        report(f"{slot.label} {in_words}: {100 * score:.2f} %")
        return score

    while not (agenda := search.agenda(finished(study))).complete:
        trials = study.get_trials(deepcopy=False)
        live = {trial.user_attrs.get("slot") for trial in trials if trial.state.name != "FAIL"}
        missing = [slot.name for slot in agenda.slots if slot.name not in live]
        for name in missing:
            study.enqueue_trial({}, user_attrs={"slot": name})
        if missing or any(trial.state.name == "WAITING" for trial in trials):
            _make_one(study, objective, report)
        else:
            _fail_the_dead(study, grace)
            time.sleep(0.5)
    return agenda


def _slot_of(trial: "Trial", search: Search, study: "Study") -> Slot:
    """Of two processes that enqueue one slot the earlier trial counts; a trial that none enqueued was asked for where
    another process had just taken the last one.
    """
    slots = {slot.name: slot for slot in search.agenda(finished(study)).slots}
    name = trial.user_attrs.get("slot")
    trials = study.get_trials(deepcopy=False)
    live = [other.number for other in trials if other.user_attrs.get("slot") == name and other.state.name != "FAIL"]
    if name not in slots or min(live) < trial.number:
        raise _Taken
    return slots[name]


def _fail_the_dead(study: "Study", grace: int) -> None:
    """Fails trials whose process is gone. Optuna knows them by heartbeats that stopped; one that was killed before its
    first has no settings yet.
    """
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on what Optuna calls experimental
        optuna.storages.fail_stale_trials(study)
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "RUNNING" and "settings" not in trial.user_attrs and trial.datetime_start is not None:
            if (datetime.datetime.now() - trial.datetime_start).total_seconds() > grace:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)


def _make_one(study: "Study", objective: Callable[["Trial"], float], report: Callable[[str], None]) -> None:
    try:
        study.optimize(objective, n_trials=1, catch=(_Taken,))
    except (ValueError, AssertionError) as error:
        if isinstance(error, AssertionError):  # Optuna's own, where the storage did not take how the trial ended
            raise error.__context__ or error from None
        if "Cannot tell" not in str(error):  # so Optuna says that a trial was failed meanwhile
            raise
        report("others took this process for dead, and make its trial again")


def finished(study: "Study") -> dict[str, Outcome]:
    """What has been found, by slot: its first finished trial."""
    found: dict[str, Outcome] = {}
    for trial in study.get_trials(deepcopy=False):
        facts = trial.user_attrs
        if trial.state.name in ("COMPLETE", "PRUNED"):  # one that was given up has no accuracies
            accuracies, augtest = (facts.get(key) and tuple(facts[key]) for key in ("accuracies", "augtest"))
            found.setdefault(facts["slot"], Outcome(facts["settings"], accuracies, augtest))
    return found


def _draw(search: Search, trial: "Trial") -> Settings:
    settings: Settings = {}
    for key, choices in search.space.choices.items():
        if isinstance(choices, list):
            settings[key] = trial.suggest_categorical(key, choices)
        else:
            suggest: Any = trial.suggest_int if choices.is_whole else trial.suggest_float
            settings[key] = suggest(key, choices.low, choices.high, log=choices.log)
    return settings


@contextlib.contextmanager
def open_study(
    search: Search, url: "URL", name: str, heartbeat: int = HEARTBEAT, grace: int = GRACE
) -> Iterator["Study"]:
    """Begins a search's study, or goes on with it; several may share a storage.

    Args:
        url: As `parse_url` returns it.
        name: Of the study.
        heartbeat, grace: Seconds between two signs of life, and without one until a trial is made again.

    Raises:
        InputError: If the storage cannot be reached (a password in the URL is not repeated), or holds another search
            by that name.
        MachineError: If it stops answering within the block.
    """
    import optuna
    import sqlalchemy

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # each trial is reported by its worker
    study = None
    if url.get_backend_name() == "postgresql" and importlib.util.find_spec("psycopg") is None:
        raise InputError(f"--storage {url!r} needs a driver. Install it: pip install 'psycopg[binary]'.")
    with contextlib.ExitStack() as at_the_end:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on what Optuna calls experimental
                storage = _storage(url, heartbeat, grace)
                at_the_end.callback(storage.engine.dispose)
                at_the_end.callback(storage.remove_session)
                sampler = optuna.samplers.RandomSampler() if search.sampler == "random" else None  # else TPE
                study = optuna.create_study(
                    storage=storage, study_name=name, direction="maximize", load_if_exists=True, sampler=sampler
                )  # with its median pruner
            _agree(study, search, url)
            yield study
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            cause = error.__cause__ or error
            reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]
            if study is None:
                raise InputError(f"--storage {url!r} cannot be reached: {reason}. Start it, or {_GIVE}") from None
            what = f"the storage {url!r} stopped answering: {reason}"
            raise MachineError(f"{what}. Finished trials are kept: give the same command again.") from error


def _agree(study: "Study", search: Search, url: "URL") -> None:
    mine = search.as_json()
    if "search" not in study.user_attrs:
        study.set_user_attr("search", mine)
    theirs = study.user_attrs["search"]
    other = next((key for key in mine if theirs.get(key) != mine[key]), None)
    if other is not None:
        what = f"the study {study.study_name!r} in {url!r} was begun with another {other}"
        raise InputError(f"{what}. Give what it was begun with, or another --output or --storage.")


def _storage(url: "URL", heartbeat: int, grace: int) -> "RDBStorage":
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from sqlalchemy import event, exc

    is_file = url.get_backend_name() == "sqlite"
    text, again = url.render_as_string(hide_password=False), RetryHeartbeatStaleTrialCallback()
    # One process writes a file at a time: the others wait their turn.
    beside: dict[str, Any] = {"engine_kwargs": {"connect_args": {"timeout": 100}}} if is_file else {}
    beside |= {"heartbeat_interval": heartbeat, "grace_period": grace, "heartbeat_stale_trial_callback": again}
    for attempt in range(20):
        try:
            storage = RDBStorage(text, **beside)
            break
        except (exc.IntegrityError, exc.ProgrammingError, exc.OperationalError) as error:
            # Processes that start together make the same tables, and only the first succeeds at once.
            if attempt == 19 or (isinstance(error, exc.OperationalError) and "already exists" not in str(error)):
                raise
            time.sleep(0.2)
    if is_file:
        # Every transaction takes the file's lock when it begins. Python's driver begins one at the first write only:
        # two workers may then both read that a trial is waiting, and both take it.
        event.listen(storage.engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        storage.engine.dispose()  # connections made before
    return storage


def parse_url(text: str) -> "URL":
    """The URL of a storage, which does not show its password unless it is asked to.

    Raises:
        InputError: If it is none.
    """
    from sqlalchemy.engine import make_url

    kind = re.match(r"(sqlite|postgresql)(\+\w+)?://", text)
    if kind is None:  # its password is not repeated
        raise InputError(f"--storage {text.partition('://')[0]!r} is of no known kind: {_GIVE}")
    url = make_url(text)
    if kind[1] == "sqlite" and url.database in (None, "", ":memory:"):
        raise InputError(f"--storage {text} keeps nothing, since it names no file: {_GIVE}")
    # Releases of SQLAlchemy differ in the driver that "postgresql" means.
    return url if kind[1] == "sqlite" else url.set(drivername="postgresql+psycopg")


def url_in(folder: Path) -> "URL":
    """Of a search's own storage: a file in its folder, whatever signs the folder's name has."""
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=str(folder / "study.db"))
