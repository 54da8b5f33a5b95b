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
from sfumato.scaling.simulate import simulations
from sfumato.searching.options import SearchOptions
from sfumato.searching.result import Gain, Stage
from sfumato.searching.space import Settings, Space, apply, proposals

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
        finished: By the names of slots, whichever have.
        slots: All so far, in order.
        stages: Those that are decided: groups of the greedy order, or the whole of a sampler's trials.
        settings: The best so far.
        complete: Whether `slots` can grow no more.
    """

    finished: Mapping[str, Outcome]
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
        """The trials of the search itself, then the runs that its prediction rests on.

        Greedy: one group after another, each on top of what has counted as a gain (Sander et al. 2022, Table 2).
        Another sampler draws from the whole space.
        """
        best = self._slot("baseline", "the recipe", {})
        slots, stages, settings = [best], list[Stage](), Settings()
        groups = self.space.groups if self.sampler == "greedy" else {self.sampler: self.space.choices}
        for number, (name, group) in enumerate(groups.items()):
            share, untried = (self.trials - len(slots)) // (len(groups) - number), list[Settings]()
            if self.sampler == "greedy":
                candidates, untried = proposals(self.recipe, self.space, name, settings, share, self.num_examples)
                tried = [self._slot("candidate", f"{name}/{i}", each) for i, each in enumerate(candidates)]
            else:
                tried = [self._slot("candidate", f"sample/{i}", None) for i in range(1, share + 1)]
            slots += tried
            if any(slot.name not in finished for slot in slots):
                return Agenda(finished, slots, stages, settings, False)
            outcomes = [finished[slot.name] for slot in tried]
            found = gain(accuracies_of(finished[best.name]), [outcome.accuracies for outcome in outcomes])
            if found.counts and found.best is not None:
                best, settings = tried[found.best], outcomes[found.best].settings
            compared, left = (
                [{key: each[key] for key in each if key in group} for each in listed]
                for listed in ([outcome.settings for outcome in outcomes], untried)
            )
            reached = [each.accuracies and sum(each.accuracies) / len(each.accuracies) for each in outcomes]
            told: dict[str, Any] = {**dict(found), "name": name, "settings": settings, "accuracies": reached}
            stages.append(Stage(**told, tried=compared, untried=left))
        law = self.law_slots(settings)
        return Agenda(finished, [*slots, *law], stages, settings, all(slot.name in finished for slot in law))

    def law_slots(self, settings: Settings) -> list[Slot]:
        """Four batch sizes of the best settings, from which the accuracy at the reference is
        predicted.

        Their seeds are new ones: the accuracies that chose the settings are those of the luckiest.
        """
        reference = apply(self.recipe, settings).training.batch_size
        smallest = max(1, min(self.batch_size // 2, reference // 8))
        seeds = tuple(max(self.seeds) + 1 + i for i in range(max(3, len(self.seeds))))
        sizes = (smallest, 2 * smallest, 4 * smallest, 8 * smallest)
        return [Slot("law", f"batch {size}", settings, size, seeds) for size in sizes]

    def _slot(self, kind: Kind, label: str, settings: Settings | None) -> Slot:
        return Slot(kind, label, settings, self.batch_size, self.seeds)

    def as_json(self) -> dict[str, Any]:
        """What all workers of one study must agree on."""
        own = {"recipe": self.recipe.model_dump(mode="json"), "space": self.space.as_json(), "seeds": list(self.seeds)}
        return {**vars(self), **own}


def plan_search(recipe: ResolvedRecipe, options: SearchOptions, num_examples: int) -> Search:
    """Fills in what was left open, and refuses what cannot be searched.

    Raises:
        InputError: Naming what and why.
    """
    sampler, seeds, privacy = options.sampler, tuple(options.seeds), recipe.budget
    space, whole = options.space_for(recipe.training.num_steps), recipe.training.batch_size
    batch_size = min(whole, max(16, whole // 64)) if options.batch_size is None else options.batch_size
    simulations(recipe, batch_size, seeds)  # refuses what cannot be simulated
    ranges = [key for key, choices in space.choices.items() if not isinstance(choices, list)]
    for cannot_be, why in (
        (privacy.selected_from is not None, "the recipe has privacy.selected_from. Leave it out, or search by --paid."),
        (privacy.sampling != "poisson", "shuffled batches have no certificate. Take --set privacy.sampling=poisson."),
        (sampler not in get_args(Sampler), f"--sampler {sampler!r} is not known. Known are greedy, tpe, random."),
        (sampler == "greedy" and options.prune, "--prune is for --sampler tpe or random: greedy compares groups."),
        (sampler == "greedy" and ranges, f"{' and '.join(ranges)} is a range, for tpe and random. List values."),
    ):
        if cannot_be:
            raise InputError(why)
    prune = sampler != "greedy" if options.prune is None else options.prune
    numbers = (int(options.trials), batch_size, seeds, num_examples)
    return Search(recipe, space, cast(Sampler, sampler), prune, *numbers, options.data)


def accuracies_of(outcome: Outcome) -> tuple[float, ...]:
    """Of an outcome that was not given up, one for each seed."""
    assert outcome.accuracies is not None, "what a search starts from is never given up"
    return outcome.accuracies


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
    from scipy.stats import t

    level = float(np.mean(current))
    means = [-math.inf if accuracies is None else float(np.mean(accuracies)) for accuracies in candidates]
    if not means or max(means) == -math.inf:
        return Gain(best=None, gain=0.0, needed=None, counts=False)
    best = int(np.argmax(means))
    compared = [i for i, mean in enumerate(means) if 1 - mean <= _ALIKE * (1 - level)] or [best]
    table = np.array([current, *(candidates[i] for i in compared)], dtype=np.float64)
    rows, seeds = table.shape
    needed, found = None, means[best] - level
    if seeds > 1:
        rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
        freedom = (rows - 1) * (seeds - 1)
        variance = float((rest**2).sum()) / freedom
        bound = float(t.ppf(1 - (1 - LEVEL) / len(candidates), freedom))
        needed = bound * math.sqrt(2 * variance / seeds)
    return Gain(best=best, gain=found, needed=needed, counts=found > (needed or 0.0))
