"""What a search still has to try: a pure function of what has finished, so that any worker can work
it out.

Every place in a search is a slot, known by its kind and its name. The agenda grows as slots finish;
it is complete when all that it names have.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast, get_args

from sfumato.config import ResolvedRecipe
from sfumato.errors import InputError
from sfumato.scaling.search.significance import Gain, gain
from sfumato.scaling.search.space import Group, Range, Settings, Space, apply, proposals
from sfumato.scaling.search.work import Key

Sampler = Literal["greedy", "tpe", "random"]
Kind = Literal["baseline", "candidate", "law"]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One trial to make.

    Attributes:
        kind: The recipe as it is; settings that are tried; or the best ones at one of the batch
            sizes of the prediction.
        name: Unique among those of its kind.
        settings: What differs from the recipe; None lets the sampler choose.
        batch_size: Of the simulation.
        seeds: One run for each.
    """

    kind: Kind
    name: str
    settings: Settings | None
    batch_size: int
    seeds: tuple[int, ...]

    @property
    def key(self) -> Key:
        """What it is known by."""
        return self.kind, self.name

    def facts(self) -> dict[str, Any]:
        """What the storage says of a trial of it."""
        return {"settings_asked": self.settings, "batch_size": self.batch_size, "seeds": list(self.seeds)}

    @property
    def tests_views(self) -> bool:
        """Whether held-out images are also judged by several views (AugTest), as many as in
        training.
        """
        return self.kind == "law"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished trial found.

    Attributes:
        settings: That were tried.
        accuracies: Of the averaged weights on the validation split, for each seed; None for a trial
            that was given up.
        augtest: The same by the majority of several views, where that was measured.
    """

    settings: Settings
    accuracies: tuple[float, ...] | None
    augtest: tuple[float, ...] | None = None

    @property
    def score(self) -> float:
        """Mean over the seeds."""
        accuracies = accuracies_of(self)
        return sum(accuracies) / len(accuracies)

    def facts(self) -> dict[str, Any]:
        """What the storage keeps of it."""
        return {"accuracies": self.accuracies, "augtest": self.augtest}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One group of the greedy order, or the whole of a sampler's trials: what was best, and whether
    it counts.

    Attributes:
        name: Of the group.
        gain: Of the best over the settings so far.
        settings: After the stage.
        tried: What was compared, in order.
        untried: What a group has besides, for which there were too few trials.
    """

    name: str
    gain: Gain
    settings: Settings
    tried: list[Settings]
    untried: list[Settings]


@dataclasses.dataclass(frozen=True)
class Agenda:
    """Slots to be finished, and what the finished ones have shown.

    Attributes:
        slots: All so far, in order.
        stages: Those that are decided.
        settings: The best so far.
        complete: Whether `slots` can grow no more.
    """

    slots: list[Slot]
    stages: list[Stage]
    settings: Settings
    complete: bool


@dataclasses.dataclass(frozen=True)
class Search:
    """A search, as all its workers know it.

    Attributes:
        recipe: Of the expensive run, resolved.
        space: What may be changed.
        sampler: "greedy" takes the groups in order; the others are Optuna's.
        prune: Whether trials that fall behind are given up.
        trials: How many settings are tried, the recipe's own included.
        batch_size: Of the simulations.
        seeds: One run for each in every trial.
        num_examples: N of the expensive run.
        data: Name of the public images that are searched on; None for the recipe's own.
    """

    recipe: ResolvedRecipe
    space: Space
    sampler: Sampler
    prune: bool
    trials: int
    batch_size: int
    seeds: tuple[int, ...]
    num_examples: int
    data: str | None
    noun: ClassVar[str] = "search"

    @property
    def choices(self) -> dict[str, list[Any] | Range]:
        """What may be drawn."""
        return self.space.choices

    def offers(self, settings: Settings) -> bool:
        """Whether all of these may be drawn."""
        return self.space.holds(settings)

    def read(self, facts: Mapping[str, Any], *, given_up: bool) -> Outcome:
        """What a trial in the storage says it found.

        Others can write to a storage. What they claim to have found cannot be told from the truth, but settings that
        the search never offers, of the budget or of a module's name, would end in the final recipe.

        Raises:
            ValueError, KeyError, TypeError: If no trial of a search finds that.
        """
        accuracies, augtest = (None, None) if given_up else (tuple(facts["accuracies"]), facts["augtest"])
        outcome = Outcome(facts["settings"], accuracies, None if augtest is None else tuple(augtest))
        measured = (*(outcome.accuracies or ()), *(outcome.augtest or ()))
        known = isinstance(outcome.settings, dict) and self.space.holds(outcome.settings)
        if not known or not all(type(value) is float and 0 <= value <= 1 for value in measured):
            raise ValueError("not of a search")
        return outcome

    def fits(self, task: Slot, found: Outcome) -> bool:
        """Whether that can be of this slot."""
        if task.settings is not None and found.settings != task.settings:
            return False
        if task.settings is None and (found.settings.keys() != self.choices.keys() or not self.offers(found.settings)):
            return False
        if found.accuracies is None:
            return task.kind == "candidate"
        return all(len(values) == len(task.seeds) for values in (found.accuracies, found.augtest or found.accuracies))

    def agenda(self, finished: Mapping[Key, Outcome]) -> Agenda:
        """The trials of the search itself, then the runs that its prediction rests on."""
        agenda = self._greedy(finished) if self.sampler == "greedy" else self._sampled(finished)
        if not agenda.complete:
            return agenda
        law = self.law_slots(agenda.settings)
        complete = all(slot.key in finished for slot in law)
        return dataclasses.replace(agenda, slots=[*agenda.slots, *law], complete=complete)

    def law_slots(self, settings: Settings) -> list[Slot]:
        """Four batch sizes of the best settings, from which the accuracy at the reference is
        predicted.

        Their seeds are new ones: the accuracies that chose the settings are those of the luckiest.
        """
        reference = apply(self.recipe, settings).training.batch_size
        smallest = max(1, min(self.batch_size // 2, reference // 8))
        seeds = tuple(max(self.seeds) + 1 + i for i in range(max(3, len(self.seeds))))
        return [
            Slot("law", f"law/{size}", settings, size, seeds)
            for size in (smallest, 2 * smallest, 4 * smallest, 8 * smallest)
        ]

    def _slot(self, kind: Kind, name: str, settings: Settings | None) -> Slot:
        return Slot(kind, name, settings, self.batch_size, self.seeds)

    def _greedy(self, finished: Mapping[Key, Outcome]) -> Agenda:
        """One group after another, each on top of what has counted as a gain (Sander et al. 2022,
        Table 2).
        """
        slots = [self._slot("baseline", "baseline", {})]
        stages: list[Stage] = []
        settings: Settings = {}
        if slots[0].key not in finished:
            return Agenda(slots, stages, settings, False)
        accuracies = accuracies_of(finished[slots[0].key])
        groups = self.space.groups
        for number, group in enumerate(groups):
            share = (self.trials - len(slots)) // (len(groups) - number)
            candidates, untried = proposals(self.recipe, group, settings, share, self.num_examples)
            tried = [self._slot("candidate", f"{group.name}/{i}", candidate) for i, candidate in enumerate(candidates)]
            slots += tried
            if any(slot.key not in finished for slot in tried):
                return Agenda(slots, stages, settings, False)
            found = gain(accuracies, [finished[slot.key].accuracies for slot in tried])
            if found.counts and found.best is not None:
                settings, accuracies = candidates[found.best], accuracies_of(finished[tried[found.best].key])
            shown = [[_of_group(group, each) for each in some] for some in (candidates, untried)]
            stages.append(Stage(group.name, found, settings, *shown))
        return Agenda(slots, stages, settings, True)

    def _sampled(self, finished: Mapping[Key, Outcome]) -> Agenda:
        """The recipe's own settings, and what the sampler draws."""
        tried = [self._slot("candidate", f"sample/{i}", None) for i in range(1, self.trials)]
        slots = [self._slot("baseline", "baseline", {}), *tried]
        if any(slot.key not in finished for slot in slots):
            return Agenda(slots, [], {}, False)
        found = gain(accuracies_of(finished[slots[0].key]), [finished[slot.key].accuracies for slot in tried])
        drawn = [finished[slot.key].settings for slot in tried]
        settings = drawn[found.best] if found.counts and found.best is not None else {}
        return Agenda(slots, [Stage(self.sampler, found, settings, drawn, [])], settings, True)

    def as_json(self) -> dict[str, Any]:
        """What all workers of one study must agree on."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "space": self.space.as_json(),
            "sampler": self.sampler,
            "prune": self.prune,
            "trials": self.trials,
            "batch_size": self.batch_size,
            "seeds": list(self.seeds),
            "num_examples": self.num_examples,
            "data": self.data,
        }


def plan_search(
    recipe: ResolvedRecipe,
    space: Space,
    *,
    sampler: str,
    prune: bool | None,
    trials: int,
    batch_size: int | None,
    seeds: tuple[int, ...],
    num_examples: int,
    data: str | None,
) -> Search:
    """Fills in what was left open, and refuses what cannot be searched.

    Args:
        recipe: Resolved.

    Raises:
        InputError: Naming what and why.
    """
    privacy, training = recipe.privacy, recipe.training
    if privacy is None or not privacy.noise_multiplier:
        raise InputError(
            "a search simulates a private run, but this recipe has no budget. Give it a "
            "[privacy] section, or --epsilon E."
        )
    if privacy.selected_from is not None:
        raise InputError(
            "this recipe is itself selected from several private runs (privacy.selected_from). "
            "Leave that out, or search with --paid."
        )
    if privacy.sampling != "poisson":
        raise InputError(
            'the final run would have no certificate: its batches are shuffled. Set privacy.sampling = "poisson".'
        )
    if sampler not in get_args(Sampler):
        raise InputError(f"--sampler {sampler!r} is not known. Known are {', '.join(get_args(Sampler))}.")
    if sampler == "greedy" and prune:
        raise InputError(
            "--prune gives up trials that fall behind those before, but the greedy order "
            "compares whole groups. Use --sampler tpe or random."
        )
    if batch_size is None:
        batch_size = min(training.batch_size, max(16, training.batch_size // 64))
    if not 1 <= batch_size <= training.batch_size:
        raise InputError(
            f"--batch-size must lie between 1 and the recipe's own {training.batch_size}, not "
            f"{batch_size}: a simulation is the cheaper run."
        )
    if len(set(seeds)) != len(seeds):
        raise InputError(
            "--seeds must name each seed once: equal seeds give equal runs, which say nothing about the spread."
        )
    for key, choices in space.choices.items():
        if isinstance(choices, Range):
            if sampler == "greedy":
                raise InputError(
                    f"{key} is a range, which the greedy order cannot try value by value. List "
                    "values, or use --sampler tpe or random."
                )
            continue
        reasons = []
        for value in choices:
            try:
                apply(recipe, {key: value})
            except InputError as error:
                reasons.append(str(error))
        if len(reasons) == len(choices):
            raise InputError(f"the space offers no possible value of {key}: {reasons[0]}")
    return Search(
        recipe,
        space,
        cast(Sampler, sampler),
        sampler != "greedy" if prune is None else prune,
        trials,
        batch_size,
        seeds,
        num_examples,
        data,
    )


def _of_group(group: Group, settings: Settings) -> Settings:
    """Of settings, what a group is about."""
    return {key: value for key, value in settings.items() if key in group.choices}


def accuracies_of(outcome: Outcome) -> tuple[float, ...]:
    """Of an outcome that was not given up, one for each seed."""
    assert outcome.accuracies is not None, "what a search starts from is never given up"
    return outcome.accuracies
