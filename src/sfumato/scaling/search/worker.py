"""Any number of processes that work on one study, none of which is needed.

A slot of the agenda becomes a trial in the storage; whoever moves a trial from waiting to running,
which the storage lets one worker do, makes it. A worker shows that it lives by a number that it
keeps raising. A trial whose number stands still is failed, and its slot tried again; what its
worker finishes later is not counted.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sfumato.errors import InputError
from sfumato.scaling.search.schedule import Agenda, Key, Outcome, Search, Slot, accuracies_of
from sfumato.scaling.search.space import Settings
from sfumato.scaling.search.storage import answers, close_storage, open_storage, shown

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial


class GivenUp(Exception):
    """A trial that fell behind, or settings that cannot be trained; its message says which."""


# Trial number, settings, slot, watch(step, accuracy) -> what was found.
Evaluate = Callable[[int, Settings, Slot, Callable[[int, float], None]], Outcome]


class Worker:
    """One process of a study.

    Args:
        search: What is searched.
        url: Of the storage.
        study_name: Several studies may share a storage.
        note: Told what happens, one line at a time.
        beat_seconds: How often it shows that it lives.
        patience_seconds: After so long without a sign, another worker's trial is taken from it.

    Raises:
        InputError: If the storage cannot be reached or holds another search by that name.
    """

    def __init__(
        self,
        search: Search,
        url: str,
        study_name: str,
        note: Callable[[str], None] = lambda text: None,
        beat_seconds: float = 10.0,
        patience_seconds: float = 120.0,
    ) -> None:
        import optuna

        self.search, self.url, self.note = search, url, note
        self.beat_seconds, self.patience_seconds = beat_seconds, patience_seconds
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.storage = open_storage(url)
        sampler = optuna.samplers.RandomSampler() if search.sampler == "random" else optuna.samplers.TPESampler()
        pruner = optuna.pruners.MedianPruner() if search.prune else optuna.pruners.NopPruner()
        self.study = optuna.create_study(
            storage=self.storage,
            study_name=study_name,
            direction="maximize",
            load_if_exists=True,
            sampler=sampler,
            pruner=pruner,
        )
        self.study_id = self.storage.get_study_id_from_name(study_name)
        self._signs: dict[int, tuple[Any, float]] = {}  # of each trial: its last sign, and when it was first seen
        try:
            self._agree(shown(url))
        except BaseException:
            close_storage(self.storage)
            raise

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        close_storage(self.storage)

    def _agree(self, url: str) -> None:
        mine = self.search.as_json()
        if "search" not in self.study.user_attrs:
            self.study.set_user_attr("search", mine)
        theirs = self.study.user_attrs["search"]
        for key in mine:
            if theirs.get(key) != mine[key]:
                raise InputError(
                    f"the study {self.study.study_name!r} in {url} was begun with another "
                    f"{key}{_difference(theirs.get(key), mine[key])}. Give what it was begun with "
                    "to go on with it, or another --output or --storage to begin anew."
                )

    def run(self, evaluate: Evaluate) -> Agenda:
        """Works until the agenda is complete, whoever completes it.

        Args:
            evaluate: Makes a trial.
        """
        with answers(self.url):
            return self._run(evaluate)

    def _run(self, evaluate: Evaluate) -> Agenda:
        while True:
            trials = self._trials()
            finished, agenda = self._checked(trials)
            if agenda.complete:
                return agenda
            self._enqueue([slot for slot in agenda.slots if slot.key not in finished], trials)
            trial = self._claim()
            if trial is not None:
                self._make(trial, evaluate)
            elif not self._fail_the_dead():
                time.sleep(min(1.0, self.beat_seconds))

    def finished(self) -> dict[Key, Outcome]:
        """What has been found, by slot."""
        return self._checked(self._trials())[0]

    def _checked(self, trials: "list[FrozenTrial]") -> tuple[dict[Key, Outcome], Agenda]:
        """What has been found and what follows from it, once all that is read is found to be of
        this search.

        Others can write to a storage. What they claim to have found cannot be told from the truth,
        but settings that the search never offers, of the budget or of a module's name, would end in
        the final recipe.
        """
        try:
            finished = finished_outcomes(trials)
            if all(self._may_be(outcome) for outcome in finished.values()):
                agenda = self.search.agenda(finished)
                slots = {slot.key: slot for slot in agenda.slots}
                if all(self._is_of(slots.get(_key(trial)), trial, finished) for trial in trials):
                    return finished, agenda
        except (InputError, KeyError, TypeError, ValueError, AssertionError):
            pass  # what this search itself has written gives none of them
        raise self._altered()

    def _altered(self) -> InputError:
        return InputError(
            f"the study {self.study.study_name!r} in {shown(self.url)} holds a trial that is none "
            "of this search: somebody altered it. Begin anew with another --output or --storage."
        )

    def _may_be(self, outcome: Outcome) -> bool:
        measured = (*(outcome.accuracies or ()), *(outcome.augtest or ()))
        known = isinstance(outcome.settings, dict) and self.search.space.holds(outcome.settings)
        return known and all(type(value) is float and 0 <= value <= 1 for value in measured)

    def _is_of(self, slot: Slot | None, trial: "FrozenTrial", finished: dict[Key, Outcome]) -> bool:
        facts = trial.user_attrs
        if slot is None or (facts["settings_asked"], facts["batch_size"], facts["seeds"]) != (
            slot.settings,
            slot.batch_size,
            list(slot.seeds),
        ):
            return False
        outcome = finished.get(slot.key)
        if outcome is None:
            return True
        if outcome.settings != slot.settings if slot.settings is not None else not self._offers(outcome.settings):
            return False
        if outcome.accuracies is None:
            return slot.kind == "candidate"
        return all(
            len(values) == len(slot.seeds) for values in (outcome.accuracies, outcome.augtest or outcome.accuracies)
        )

    def _offers(self, settings: Settings) -> bool:
        space = self.search.space
        return settings.keys() == space.choices.keys() and space.holds(settings)

    def _trials(self) -> "list[FrozenTrial]":
        return sorted(self.storage.get_all_trials(self.study_id, deepcopy=False), key=lambda trial: trial.number)

    def _enqueue(self, slots: list[Slot], trials: "list[FrozenTrial]") -> None:
        """Makes a trial for every slot without one; two workers may both do so, then the later
        trial is dropped.
        """
        live = {_key(trial) for trial in trials if _is_live(trial)}
        drawn = {
            _key(trial): trial.params for trial in trials if trial.params and self.search.space.holds(trial.params)
        }
        for slot in slots:
            if slot.key not in live:
                facts = {
                    "kind": slot.kind,
                    "slot": slot.name,
                    "settings_asked": slot.settings,
                    "batch_size": slot.batch_size,
                }
                self.study.enqueue_trial(drawn.get(slot.key, {}), user_attrs={**facts, "seeds": list(slot.seeds)})

    def _claim(self) -> "FrozenTrial | None":
        """The first waiting trial, now this worker's."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        trials = self._trials()
        self._checked(trials)
        first: dict[Key, int] = {}
        for trial in trials:
            if _is_live(trial):
                first.setdefault(_key(trial), trial.number)
        for trial in trials:
            if trial.state == TrialState.WAITING:
                with contextlib.suppress(UpdateFinishedTrialError):
                    if first[_key(trial)] != trial.number:
                        self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                    elif self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                        return trial
        return None

    def _make(self, frozen: "FrozenTrial", evaluate: Evaluate) -> None:
        import optuna
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        facts = frozen.user_attrs
        slot = Slot(facts["kind"], facts["slot"], facts["settings_asked"], facts["batch_size"], tuple(facts["seeds"]))

        def settle(state: TrialState, value: float | None = None, **found: Any) -> None:
            # Failed by others meanwhile: their trial counts, not this one.
            with contextlib.suppress(UpdateFinishedTrialError):
                for name, facts in found.items():
                    self.storage.set_trial_user_attr(frozen._trial_id, name, facts)
                self.storage.set_trial_state_values(frozen._trial_id, state, None if value is None else [value])

        with self._beating(frozen._trial_id):
            try:
                trial = optuna.trial.Trial(self.study, frozen._trial_id)
                settings = self._draw(trial) if slot.settings is None else slot.settings
                if slot.settings is None and not self._offers(settings):
                    raise self._altered()
                trial.set_user_attr("settings", settings)

                def watch(step: int, accuracy: float) -> None:
                    trial.report(accuracy, step)
                    if self.search.prune and slot.settings is None and trial.should_prune():
                        raise GivenUp("fell behind")

                found = evaluate(frozen.number, settings, slot, watch)
            except GivenUp as reason:
                if slot.kind != "candidate":
                    settle(TrialState.FAIL)
                    raise InputError(str(reason)) from None
                self.note(f"{slot.name}: given up, {reason}")
                settle(TrialState.PRUNED)
            except BaseException:
                settle(TrialState.FAIL)  # to be made again
                raise
            else:
                accuracies = accuracies_of(found)
                mean = sum(accuracies) / len(accuracies)
                settle(TrialState.COMPLETE, mean, accuracies=accuracies, augtest=found.augtest)
                self.note(f"{slot.name} {_written(settings)}: {100 * mean:.2f} %")

    def _draw(self, trial: "Trial") -> Settings:
        settings: Settings = {}
        try:
            for key, choices in self.search.space.choices.items():
                if isinstance(choices, list):
                    settings[key] = trial.suggest_categorical(key, choices)
                elif isinstance(choices.low, int) and isinstance(choices.high, int):
                    settings[key] = trial.suggest_int(key, choices.low, choices.high, log=choices.log)
                else:
                    settings[key] = trial.suggest_float(key, choices.low, choices.high, log=choices.log)
        except ValueError:  # another trial drew that key from other values
            raise self._altered() from None
        return settings

    @contextlib.contextmanager
    def _beating(self, trial_id: int) -> Iterator[None]:
        """Shows that this trial's worker lives, from a thread of its own."""
        from optuna.exceptions import UpdateFinishedTrialError

        ended = threading.Event()
        self.storage.set_trial_user_attr(trial_id, "worker", self.name)

        def beat() -> None:
            count = 0
            while not ended.wait(self.beat_seconds):
                count += 1
                try:
                    self.storage.set_trial_user_attr(trial_id, "beat", count)
                except UpdateFinishedTrialError:
                    return
                except (
                    Exception
                ) as error:  # a server that is away for a moment; if it stays away, the end of the trial says so
                    self.note(f"the storage did not answer ({type(error).__name__}); trying again")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _fail_the_dead(self) -> bool:
        """Fails trials of workers that are gone; returns whether there were any."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        found = False
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and self._is_dead(trial):
                with contextlib.suppress(UpdateFinishedTrialError):
                    self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                    self.note(f"{trial.user_attrs['slot']}: its worker is gone; it is made again")
                    found = True
        return found

    def _is_dead(self, trial: "FrozenTrial") -> bool:
        host, _, rest = trial.user_attrs.get("worker", "").rpartition(":")[0].rpartition(":")
        if host == socket.gethostname() and rest.isdecimal() and not _is_running(int(rest)):
            return True
        # By this process's own clock, so that clocks need not agree.
        sign, now = trial.user_attrs.get("beat"), time.monotonic()
        if self._signs.get(trial._trial_id, (object(), 0.0))[0] != sign:
            self._signs[trial._trial_id] = (sign, now)
        return now - self._signs[trial._trial_id][1] > self.patience_seconds


def finished_outcomes(trials: "list[FrozenTrial]") -> dict[Key, Outcome]:
    """The first finished trial of each slot."""
    from optuna.trial import TrialState

    outcomes: dict[Key, Outcome] = {}
    for trial in trials:
        facts = trial.user_attrs
        if trial.state == TrialState.COMPLETE:
            augtest = None if facts["augtest"] is None else tuple(facts["augtest"])
            outcomes.setdefault(_key(trial), Outcome(facts["settings"], tuple(facts["accuracies"]), augtest))
        elif trial.state == TrialState.PRUNED:
            outcomes.setdefault(_key(trial), Outcome(facts["settings"], None))
    return outcomes


def _key(trial: "FrozenTrial") -> Key:
    return trial.user_attrs["kind"], trial.user_attrs["slot"]


def _is_live(trial: "FrozenTrial") -> bool:
    from optuna.trial import TrialState

    return trial.state != TrialState.FAIL


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _written(settings: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "as the recipe is"


def _difference(theirs: Any, mine: Any) -> str:
    """Names the first key that differs, or shows two short values."""
    if isinstance(theirs, dict) and isinstance(mine, dict):
        changed = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
        return f" ({', '.join(changed[:3])})"
    return f" ({theirs!r}, not {mine!r})"
