"""Any number of processes that work on one study, a search or a sweep, none of which is needed.

A slot of the agenda becomes a trial in the storage; whoever moves a trial from waiting to running,
which the storage lets one worker do, makes it. A worker shows that it lives by a number that it
keeps raising. A trial whose number stands still is failed, and its slot tried again; what its
worker finishes later is not counted.
"""

import contextlib
import functools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from sfumato.errors import InputError
from sfumato.scaling.search.space import Settings
from sfumato.scaling.search.storage import answers, close_storage, open_storage, shown
from sfumato.scaling.search.work import Agenda, F, Key, T, Work

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial


class GivenUp(Exception):
    """A trial that fell behind, or settings that cannot be trained; its message says which."""


class Begun(NamedTuple):
    """One trial that was begun.

    Attributes:
        place: Of the folder in which it was trained.
        anew: Whether nothing of its task lay there before.
    """

    place: str
    anew: bool


class Worker(Generic[T, F]):
    """One process of a study.

    Args:
        work: What is worked on.
        url: Of the storage.
        study_name: Several studies may share a storage.
        note: Told what happens, one line at a time.
        beat_seconds: How often it shows that it lives.
        patience_seconds: After so long without a sign, another worker's trial is taken from it.
        place: Of the folder in which it trains, where trials are gone on with there and nowhere else.
        is_anew: Whether nothing of a task lies there; what it makes there to know that another time, it makes first.

    Raises:
        InputError: If the storage cannot be reached or holds other work by that name.
    """

    def __init__(
        self,
        work: Work[T, F],
        url: str,
        study_name: str,
        note: Callable[[str], None] = lambda text: None,
        beat_seconds: float = 10.0,
        patience_seconds: float = 120.0,
        place: str = "",
        is_anew: Callable[[T], bool] = lambda task: True,
    ) -> None:
        import optuna

        self.is_anew = is_anew
        self.work, self.url, self.note, self.place = work, url, note, place
        self.beat_seconds, self.patience_seconds = beat_seconds, patience_seconds
        self.name = f"{_machine()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.storage = open_storage(url)
        sampler = optuna.samplers.RandomSampler() if work.sampler == "random" else optuna.samplers.TPESampler()
        pruner = optuna.pruners.MedianPruner() if work.prune else optuna.pruners.NopPruner()
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

    def __enter__(self) -> "Worker[T, F]":
        return self

    def __exit__(self, *error: object) -> None:
        close_storage(self.storage)

    def _agree(self, url: str) -> None:
        noun, mine = self.work.noun, self.work.as_json()
        if noun not in self.study.user_attrs:
            self.study.set_user_attr(noun, mine)
        theirs = self.study.user_attrs[noun]
        for key in mine:
            if theirs.get(key) != mine[key]:
                raise InputError(
                    f"the study {self.study.study_name!r} in {url} was begun with another "
                    f"{key}{_difference(theirs.get(key), mine[key])}. Give what it was begun with "
                    "to go on with it, or another --output or --storage to begin anew."
                )

    def run(self, evaluate: Callable[[int, Settings, T, Callable[[int, float], None]], F]) -> Agenda[T]:
        """Works until the agenda is complete, whoever completes it.

        Args:
            evaluate: Makes a trial: of its number, settings, slot and watch(step, accuracy), what was found.
        """
        with answers(self.url):
            return self._run(evaluate)

    def _run(self, evaluate: Callable[[int, Settings, T, Callable[[int, float], None]], F]) -> Agenda[T]:
        while True:
            trials = self._trials()
            finished, agenda = self._checked(trials)
            if agenda.complete:
                return agenda
            self._enqueue([slot for slot in agenda.slots if slot.key not in finished], trials)
            claimed = self._claim()
            if claimed is not None:
                self._make(*claimed, evaluate)
            elif not self._fail_the_dead():
                time.sleep(min(1.0, self.beat_seconds))

    def finished(self) -> dict[Key, F]:
        """What has been found, by slot."""
        return self._checked(self._trials())[0]

    def begun(self) -> dict[Key, list[Begun]]:
        """By slot, each trial that was begun, the one that counts last; those that were dropped before anybody took
        them are left out.
        """
        trials = self._trials()
        self._checked(trials)
        begun: dict[Key, list[Begun]] = {}
        for trial in sorted(trials, key=lambda trial: trial.state.name == "COMPLETE"):
            facts = trial.user_attrs
            if "place" in facts:
                begun.setdefault(_key(trial), []).append(Begun(facts["place"], facts.get("anew", True)))
        return begun

    def _checked(self, trials: "list[FrozenTrial]") -> tuple[dict[Key, F], Agenda[T]]:
        """What has been found and what follows from it, once all that is read is found to be of
        this work: others can write to a storage.
        """
        try:
            finished = self._finished(trials)
            agenda = self.work.agenda(finished)
            slots = {slot.key: slot for slot in agenda.slots}
            if all(self._is_of(slots.get(_key(trial)), trial, finished) for trial in trials):
                return finished, agenda
        except (InputError, KeyError, TypeError, ValueError, AssertionError):
            pass  # what this work itself has written gives none of them
        raise self._altered()

    def _finished(self, trials: "list[FrozenTrial]") -> dict[Key, F]:
        """The first finished trial of each slot."""
        from optuna.trial import TrialState

        found: dict[Key, F] = {}
        for trial in trials:
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                given_up = trial.state == TrialState.PRUNED
                found.setdefault(_key(trial), self.work.read(trial.user_attrs, given_up=given_up))
        return found

    def _altered(self) -> InputError:
        return InputError(
            f"the study {self.study.study_name!r} in {shown(self.url)} holds a trial that is none "
            f"of this {self.work.noun}: somebody altered it. Begin anew with another --output or --storage."
        )

    def _is_of(self, slot: T | None, trial: "FrozenTrial", finished: dict[Key, F]) -> bool:
        facts = trial.user_attrs
        if slot is None or any(facts[name] != value for name, value in slot.facts().items()):
            return False
        if type(facts.get("place", "")) is not str or type(facts.get("anew", True)) is not bool:
            return False
        found = finished.get(slot.key)
        return found is None or self.work.fits(slot, found)

    def _offers(self, settings: Settings) -> bool:
        return settings.keys() == self.work.choices.keys() and self.work.offers(settings)

    def _trials(self) -> "list[FrozenTrial]":
        return sorted(self.storage.get_all_trials(self.study_id, deepcopy=False), key=lambda trial: trial.number)

    def _enqueue(self, slots: list[T], trials: "list[FrozenTrial]") -> None:
        """Makes a trial for every slot without one; two workers may both do so, then the later
        trial is dropped.
        """
        live = {_key(trial) for trial in trials if _is_live(trial)}
        drawn = {_key(trial): trial.params for trial in trials if trial.params and self.work.offers(trial.params)}
        for slot in slots:
            if slot.key not in live:
                facts = {"kind": slot.kind, "slot": slot.name, **slot.facts()}
                self.study.enqueue_trial(drawn.get(slot.key, {}), user_attrs=facts)

    def _claim(self) -> "tuple[FrozenTrial, T] | None":
        """The first waiting trial, now this worker's, and its slot."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        trials = self._trials()
        slots = {slot.key: slot for slot in self._checked(trials)[1].slots}
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
                        return trial, slots[_key(trial)]
        return None

    def _make(
        self,
        frozen: "FrozenTrial",
        slot: T,
        evaluate: Callable[[int, Settings, T, Callable[[int, float], None]], F],
    ) -> None:
        import optuna
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        def settle(state: TrialState, value: float | None = None, **found: Any) -> None:
            # Failed by others meanwhile: their trial counts, not this one.
            with contextlib.suppress(UpdateFinishedTrialError):
                for name, facts in found.items():
                    self.storage.set_trial_user_attr(frozen._trial_id, name, facts)
                self.storage.set_trial_state_values(frozen._trial_id, state, None if value is None else [value])

        with self._beating(frozen._trial_id, slot):
            try:
                trial = optuna.trial.Trial(self.study, frozen._trial_id)
                settings = self._draw(trial) if slot.settings is None else slot.settings
                if slot.settings is None and not self._offers(settings):
                    raise self._altered()
                trial.set_user_attr("settings", settings)

                def watch(step: int, accuracy: float) -> None:
                    trial.report(accuracy, step)
                    if self.work.prune and slot.settings is None and trial.should_prune():
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
                settle(TrialState.COMPLETE, found.score, **found.facts())
                self.note(f"{slot.name} {_written(settings)}: {100 * found.score:.2f} %")

    def _draw(self, trial: "Trial") -> Settings:
        settings: Settings = {}
        try:
            for key, choices in self.work.choices.items():
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
    def _beating(self, trial_id: int, slot: T) -> Iterator[None]:
        """Shows that this trial's worker lives, from a thread of its own."""
        from optuna.exceptions import UpdateFinishedTrialError

        ended = threading.Event()
        self.storage.set_trial_user_attr(trial_id, "worker", self.name)
        if self.place:  # before anything of it is trained
            self.storage.set_trial_user_attr(trial_id, "anew", self.is_anew(slot))
            self.storage.set_trial_user_attr(trial_id, "place", self.place)

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
        if host == _machine() and rest.isdecimal() and not _is_running(int(rest)):
            return True
        # By this process's own clock, so that clocks need not agree.
        sign, now = trial.user_attrs.get("beat"), time.monotonic()
        if self._signs.get(trial._trial_id, (object(), 0.0))[0] != sign:
            self._signs[trial._trial_id] = (sign, now)
        return now - self._signs[trial._trial_id][1] > self.patience_seconds


def _key(trial: "FrozenTrial") -> Key:
    return trial.user_attrs["kind"], trial.user_attrs["slot"]


def _is_live(trial: "FrozenTrial") -> bool:
    from optuna.trial import TrialState

    return trial.state != TrialState.FAIL


@functools.cache
def _machine() -> str:
    """Where numbers of processes mean the same: this host since it was booted, and of several containers this one.

    Machines that were cloned, and containers, may have one host name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}/{space}"


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
