"""What a search still has to try: a pure function of what has finished, so that any worker can work
it out.

Every place in a search is a slot, known by its name. The agenda grows as slots finish; it is
complete when all that it names have.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import numpy as np

from sfumato.config import ResolvedRecipe
from sfumato.errors import InputError
from sfumato.searching.options import SearchOptions
from sfumato.searching.result import Stage
from sfumato.searching.space import Group, Settings, Space, apply, proposals

Sampler = Literal["greedy", "tpe", "random"]
Kind = Literal["baseline", "candidate", "law"]
LEVEL = 0.95
# Candidates that err at most so many times as often as the current settings tell how runs spread.
_ALIKE = 1.25


@dataclasses.dataclass(frozen=True)
class Slot:
    """One trial to make.

    Attributes:
        kind: The recipe as it is; settings that are tried; or the best ones at one of the batch
            sizes of the prediction.
        label: Unique among those of its kind.
        settings: What differs from the recipe; None lets the sampler choose.
        batch_size: Of the simulation.
        seeds: One run for each.
    """

    kind: Kind
    label: str
    settings: Settings | None
    batch_size: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """What it is known by; groups may have any name, so that a label does not tell the kind."""
        return f"{self.kind}: {self.label}"


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


@dataclasses.dataclass(frozen=True)
class Agenda:
    """Slots to be finished, and what the finished ones have shown.

    Attributes:
        slots: All so far, in order.
        stages: Those that are decided: groups of the greedy order, or the whole of a sampler's trials.
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

    def agenda(self, finished: Mapping[str, Outcome]) -> Agenda:
        """The trials of the search itself, then the runs that its prediction rests on."""
        agenda = self._greedy(finished) if self.sampler == "greedy" else self._sampled(finished)
        if not agenda.complete:
            return agenda
        law = self.law_slots(agenda.settings)
        complete = all(slot.name in finished for slot in law)
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
            Slot("law", f"batch {size}", settings, size, seeds)
            for size in (smallest, 2 * smallest, 4 * smallest, 8 * smallest)
        ]

    def _slot(self, kind: Kind, label: str, settings: Settings | None) -> Slot:
        return Slot(kind, label, settings, self.batch_size, self.seeds)

    def _greedy(self, finished: Mapping[str, Outcome]) -> Agenda:
        """One group after another, each on top of what has counted as a gain (Sander et al. 2022,
        Table 2).
        """
        slots = [self._slot("baseline", "the recipe", {})]
        stages: list[Stage] = []
        settings: Settings = {}
        if slots[0].name not in finished:
            return Agenda(slots, stages, settings, False)
        accuracies = accuracies_of(finished[slots[0].name])
        groups = self.space.groups
        for number, group in enumerate(groups):
            share = (self.trials - len(slots)) // (len(groups) - number)
            candidates, untried = proposals(self.recipe, group, settings, share, self.num_examples)
            tried = [self._slot("candidate", f"{group.name}/{i}", candidate) for i, candidate in enumerate(candidates)]
            slots += tried
            if any(slot.name not in finished for slot in tried):
                return Agenda(slots, stages, settings, False)
            found = gain(accuracies, [finished[slot.name].accuracies for slot in tried])
            if found.counts and found.best is not None:
                settings, accuracies = candidates[found.best], accuracies_of(finished[tried[found.best].name])
            stages.append(_stage(group.name, found, settings, _of_group(group, candidates), _of_group(group, untried)))
        return Agenda(slots, stages, settings, True)

    def _sampled(self, finished: Mapping[str, Outcome]) -> Agenda:
        """The recipe's own settings, and what the sampler draws."""
        tried = [self._slot("candidate", f"sample/{i}", None) for i in range(1, self.trials)]
        slots = [self._slot("baseline", "the recipe", {}), *tried]
        if any(slot.name not in finished for slot in slots):
            return Agenda(slots, [], {}, False)
        found = gain(accuracies_of(finished[slots[0].name]), [finished[slot.name].accuracies for slot in tried])
        drawn = [finished[slot.name].settings for slot in tried]
        settings = drawn[found.best] if found.counts and found.best is not None else {}
        return Agenda(slots, [_stage(self.sampler, found, settings, drawn, [])], settings, True)

    def as_json(self) -> dict[str, Any]:
        """What all workers of one study must agree on."""
        facts = {name: getattr(self, name) for name in ("sampler", "prune", "trials", "batch_size")}
        facts |= {"num_examples": self.num_examples, "data": self.data, "seeds": list(self.seeds)}
        return {**facts, "recipe": self.recipe.model_dump(mode="json"), "space": self.space.as_json()}


def plan_search(recipe: ResolvedRecipe, options: SearchOptions, num_examples: int) -> Search:
    """Fills in what was left open, and refuses what cannot be searched.

    Raises:
        InputError: Naming what and why.
    """
    sampler, seeds, space = options.sampler, tuple(options.seeds), options.space_for(recipe)
    _refuse_recipe(recipe)
    if sampler not in get_args(Sampler):
        raise InputError(f"--sampler {sampler!r} is not known. Known are {', '.join(get_args(Sampler))}.")
    if sampler == "greedy" and options.prune:
        raise InputError(
            "--prune gives up trials that fall behind those before, but the greedy order "
            "compares whole groups. Use --sampler tpe or random."
        )
    whole = recipe.training.batch_size
    batch_size = min(whole, max(16, whole // 64)) if options.batch_size is None else options.batch_size
    if not 1 <= batch_size <= whole:
        raise InputError(
            f"--batch-size must lie between 1 and the recipe's own {whole}, not {batch_size}: a "
            "simulation is the cheaper run."
        )
    if not seeds or len(set(seeds)) != len(seeds):
        raise InputError(
            "--seeds must name each seed once: equal seeds give equal runs, which say nothing about the spread."
        )
    for key, choices in space.choices.items():
        if isinstance(choices, list):
            _refuse_impossible(recipe, key, choices)
        elif sampler == "greedy":
            raise InputError(
                f"{key} is a range, which the greedy order cannot try value by value. List "
                "values, or use --sampler tpe or random."
            )
    return Search(
        recipe,
        space,
        cast(Sampler, sampler),
        sampler != "greedy" if options.prune is None else options.prune,
        int(options.trials),
        batch_size,
        seeds,
        num_examples,
        options.data,
    )


def _refuse_recipe(recipe: ResolvedRecipe) -> None:
    privacy = recipe.privacy
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


def _refuse_impossible(recipe: ResolvedRecipe, key: str, choices: list[Any]) -> None:
    """Refuses a key of which no value is possible."""
    reasons = []
    for value in choices:
        try:
            apply(recipe, {key: value})
        except InputError as error:
            reasons.append(str(error))
    if len(reasons) == len(choices):
        raise InputError(f"the space offers no possible value of {key}: {reasons[0]}")


def _of_group(group: Group, listed: list[Settings]) -> list[Settings]:
    """Of settings, what a group is about."""
    return [{key: value for key, value in settings.items() if key in group.choices} for settings in listed]


def _stage(name: str, found: "Gain", settings: Settings, tried: list[Settings], untried: list[Settings]) -> Stage:
    facts = dataclasses.asdict(found)
    return Stage(name=name, **facts, counts=found.counts, settings=dict(settings), tried=tried, untried=untried)


def accuracies_of(outcome: Outcome) -> tuple[float, ...]:
    """Of an outcome that was not given up, one for each seed."""
    assert outcome.accuracies is not None, "what a search starts from is never given up"
    return outcome.accuracies


@dataclasses.dataclass(frozen=True)
class Gain:
    """The best of some candidates against the current settings.

    Attributes:
        best: Which candidate; None without any.
        gain: Its mean accuracy less that of the current settings.
        needed: What chance alone exceeds in fewer than 5 of 100 searches like this; None where one
            seed leaves the spread unknown.
    """

    best: int | None
    gain: float
    needed: float | None

    @property
    def counts(self) -> bool:
        return self.best is not None and self.gain > (self.needed or 0.0)


def gain(current: Sequence[float], candidates: Sequence[Sequence[float] | None]) -> Gain:
    """Compares accuracies of the same seeds; seeds share initial weights and noise, so that their
    common level cancels.

    The spread is that of what is left of accuracies after settings and seeds (a two-way analysis of
    variance), over the current settings and the candidates that err at most a quarter more often:
    settings that fail spread more, and say nothing about those that do not. The bound on a
    difference is Student's t, shared among all candidates (Bonferroni), for the best one was
    picked.

    Args:
        current: Accuracy for each seed.
        candidates: The same for each candidate; None for one that was given up.
    """
    level = float(np.mean(current))
    means = [-math.inf if accuracies is None else float(np.mean(accuracies)) for accuracies in candidates]
    if not means or max(means) == -math.inf:
        return Gain(None, 0.0, None)
    best = int(np.argmax(means))
    compared = [i for i, mean in enumerate(means) if 1 - mean <= _ALIKE * (1 - level)] or [best]
    table = np.array([current, *(candidates[i] for i in compared)], dtype=np.float64)
    rows, seeds = table.shape
    if seeds < 2:
        return Gain(best, means[best] - level, None)
    rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    freedom = (rows - 1) * (seeds - 1)
    variance = float((rest**2).sum()) / freedom
    from scipy.stats import t

    bound = float(t.ppf(1 - (1 - LEVEL) / len(candidates), freedom))
    return Gain(best, means[best] - level, bound * math.sqrt(2 * variance / seeds))
