"""From a recipe and the public numbers of a data set to the run that will happen."""

import dataclasses
from pathlib import Path
from typing import Any

from sfumato.accounting import formats
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.calibration import Unknown
from sfumato.accounting.gaussian import refuse_beyond_reach
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection
from sfumato.config import FilledRecipe, Recipe, ResolvedRecipe, parse_resolved
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.advice import advice_of_signal, warnings_of_delta
from sfumato.planning.defaults import Choice, fill_in
from sfumato.planning.solve import Budget, budget_of, selection_of, solve

ORDINARY = "this is ordinary training, without a budget and without noise"
MOST_IMAGES_TOGETHER = 256
"""Of a person who is drawn (`sfumato.data.views.People`)."""
_CANARIES_ONE_IN = 20
# Rates of SGD without privacy, over 1 - momentum (docs/defaults.md).
_STEADY, _STEADY_ON_FEATURES = 0.25, 320.0
_SOLVED: dict[Unknown, tuple[str, str]] = {
    "noise_multiplier": ("privacy.noise_multiplier", "the least noise"),
    "batch_size": ("training.batch_size", "the largest batch"),
    "num_steps": ("training.num_steps", "the most updates"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe in which every value is set, and what it means for privacy.

    Attributes:
        recipe: Resolved: enough to run again.
        mechanism: The public numbers of the run.
        why_not_private: Why the run cannot carry a certificate; None: it can.
        choices: What was filled in, and why.
        warnings: Lines the user should read.
        tip: What would raise accuracy, from public numbers alone; None: nothing is known to.
        budget: The file of the budget that it is reserved in, with other plans; None: none is named.
    """

    recipe: ResolvedRecipe
    mechanism: Mechanism
    why_not_private: str | None
    choices: list[Choice] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    tip: str | None = None
    budget: Path | None = None

    @property
    def private(self) -> bool:
        """Whether the run can carry a certificate."""
        return self.why_not_private is None

    @property
    def delta(self) -> float:
        """Of a recipe with a budget."""
        return self.recipe.budget.delta

    @property
    def evaluate_every(self) -> int:
        """Steps from one evaluation to the next; the last step is evaluated anyway."""
        return self.recipe.training.evaluate_every or max(self.mechanism.num_steps // 10, 1)

    @property
    def selection(self) -> Selection | None:
        """How this run is selected from others; None where nothing is selected."""
        return selection_of(self.recipe.privacy)


def resolve(recipe: Recipe, facts: Facts, *, cut_to_target: bool = True) -> Plan:
    """Fills in what the recipe leaves out and calibrates it to its budget.

    With a target, the one of noise_multiplier, num_steps and batch_size that is left out
    is solved for and never exceeds the target; with none left out the number of steps is
    cut to what the target allows.

    Args:
        recipe: As it was given.
        facts: The public numbers of its data set.
        cut_to_target: False keeps printed steps that exceed the target, to verify a table.

    Raises:
        InputError: If the budget is impossible or incomplete.
    """
    asked, facts, choices = _drawn(recipe, _with_canaries(recipe, facts))
    filled, others = fill_in(asked, facts)
    choices += others
    _refuse_impossible(filled, facts)
    warnings = _warnings_of_numbers(filled, facts.num_examples)
    if filled.privacy is None:
        resolved = parse_resolved(filled.model_dump())
        training, n = resolved.training, facts.num_examples
        mechanism = Mechanism(n, min(training.batch_size, n), 0.0, training.num_steps, "shuffled")
        return Plan(resolved, mechanism, ORDINARY, choices, warnings)
    budget = budget_of(filled, facts.num_examples)
    mechanism, solved_for = solve(budget)
    if budget.target_epsilon is not None:
        within = formats.epsilon_text(budget.target_epsilon)
        if solved_for is not None:
            key, why = _SOLVED[solved_for]
            why = f"{why} within epsilon {within} for each {filled.privacy.unit}"
            choices.append(Choice(key, getattr(mechanism, solved_for), why))
        elif budget.selection is not None:
            _refuse_overspent(mechanism, budget, budget.selection, budget.target_epsilon)
        elif cut_to_target and (cut := _cut(mechanism, budget, budget.target_epsilon)) != mechanism:
            warnings.append(
                f"only {cut.num_steps} of {mechanism.num_steps} steps fit epsilon {within}: the run stops there. Raise "
                "the noise or the target for more."
            )
            mechanism = cut
    few, tip = advice_of_signal(mechanism, asked, facts)
    warnings += few
    mechanism = mechanism.replace(sampling=filled.privacy.sampling)
    values: dict[str, Any] = filled.model_dump()
    values["privacy"]["noise_multiplier"] = mechanism.noise_multiplier
    values["training"] |= {"batch_size": mechanism.batch_size, "num_steps": mechanism.num_steps}
    resolved = parse_resolved(values)
    reason = why_not_private(resolved, mechanism)
    if reason is None:
        refuse_beyond_reach(mechanism, budget.delta)
    _refuse_canaries_without_claim(resolved, reason)
    return Plan(resolved, mechanism, reason, choices, warnings, tip)


def _with_canaries(recipe: Recipe, facts: Facts) -> Facts:
    """The public numbers with the canaries among N, in or out: one that takes no part keeps its place and
    contributes zero, as an image that cannot be read does.

    Raises:
        InputError: If there are too many, or the recipe's claim is not that of one example.
    """
    count, privacy, n = recipe.audit.canaries, recipe.privacy, facts.num_examples
    if not count:
        return facts
    of_persons = recipe.data.group_by is not None or (privacy is not None and privacy.unit == "person")
    most = n // (_CANARIES_ONE_IN - 1)
    for why_not, text in (
        (privacy is None, "is to try the claim of a private run, and this recipe has no [privacy] section"),
        (of_persons, "is for an epsilon of one image: canaries belong to no person (data.group_by, privacy.unit)"),
        (
            selection_of(privacy) is not None,
            "does not fit privacy.selected_from: which run is published would depend on the canaries' coins",
        ),
        (count > most, f"is more than 5 % of all examples: beside {n} images at most {most} are allowed"),
    ):
        if why_not:
            raise InputError(f"audit.canaries = {count} {text}. Take --set audit.canaries=0, or fewer of them.")
    return dataclasses.replace(facts, num_examples=n + count)


def _refuse_canaries_without_claim(recipe: Recipe, why_not_private: str | None) -> None:
    if recipe.audit.canaries and why_not_private is not None:
        raise InputError(
            f"audit.canaries = {recipe.audit.canaries} is to try the claim of a private run, and this one makes none: "
            f"{why_not_private}. Take --set audit.canaries=0."
        )


def _drawn(recipe: Recipe, facts: Facts) -> tuple[Recipe, Facts, list[Choice]]:
    """What each update draws where the unit is a person, filled in; and N, on which every default and
    epsilon depend, as the number of people where people are drawn.

    Raises:
        InputError: If nobody says who the people are, or they cannot be drawn.
    """
    privacy = recipe.privacy
    if privacy is None or privacy.unit != "person":
        return recipe, facts, []
    with_views = bool(recipe.augmentation.augmult) or recipe.augmentation.kind not in (None, "none")
    nobody_says = facts.num_people is None
    drawn, limit = privacy.person_sampling, privacy.max_images_per_person or 0
    choices = []
    if drawn is None:
        drawn = "images" if with_views or nobody_says else "persons"
        why = "views, or nobody says who is who"
        why = "far less noise for the same epsilon" if drawn == "persons" else why
        choices.append(Choice("privacy.person_sampling", drawn, why))
        recipe = recipe.model_copy(update={"privacy": privacy.model_copy(update={"person_sampling": drawn})})
    if recipe.data.name == "folder" and not recipe.data.group_by:
        raise InputError(
            "an epsilon for each person needs to know whose each image is: give data.group_by, for example --set "
            "data.group_by=group, a column of labels.csv, data.group_by=PatientID of DICOM files, or --set "
            "'data.group_by=/(p[0-9]+)_', read from each path."
        )
    if drawn == "images":
        return recipe, facts, choices
    for is_so, text in (
        (nobody_says, "needs to know whose each image is. Give data.group_by, for a folder"),
        (with_views, "takes each image as it is. Leave augmentation out, or draw images"),
        (limit > MOST_IMAGES_TOGETHER, f"takes at most {MOST_IMAGES_TOGETHER} images of each person, not {limit}"),
    ):
        if is_so:
            raise InputError(f'privacy.person_sampling = "persons" {text}.')
    return recipe, dataclasses.replace(facts, num_examples=facts.num_people or 0), choices


def _refuse_impossible(recipe: FilledRecipe, facts: Facts) -> None:
    """Raises InputError for views that cannot be made, updates of no weights, and for what does not fit the budget or
    its absence.
    """
    views, privacy, size = recipe.augmentation, recipe.privacy, facts.image_size
    if recipe.model.trainable == "lora" and recipe.model.init_from is None and recipe.model.init_recipe is None:
        raise InputError(
            'model.trainable = "lora" updates weights that are given, and none are: what is frozen would stay random. '
            "Give --set model.init_from=RUN-OR-FILE, or take --set model.trainable=all."
        )
    if facts.is_multilabel:
        beside = {
            "data.class_proportions": recipe.data.class_proportions is not None,
            "training.label_smoothing": recipe.training.label_smoothing > 0,
            "audit.canaries": recipe.audit.canaries > 0,
            "privacy.score_noise": privacy is not None and privacy.score_noise is not None,
        }
        for key, is_set in beside.items():
            if is_set:
                raise InputError(f"{key} is for images of one class each, and these have several labels. Leave it out.")
    if views.kind in ("rrc", "tan", "simclr") and views.augmult == 0:
        raise InputError(
            f'augmentation.kind = "{views.kind}" makes no views with augmult = 0. Take --set '
            "augmentation.augmult=1 or more, or --set augmentation.kind=none."
        )
    if views.kind == "tan" and views.padding >= size:
        raise InputError(
            f"augmentation.padding = {views.padding} mirrors more than images of {size} pixels have. Choose at most "
            f"{size - 1}, or leave it out."
        )
    if privacy is None:
        if recipe.training.norm_histogram_every is not None:
            raise InputError(
                "training.norm_histogram_every needs the gradient of each image, which training without a [privacy] "
                "section does not compute. Leave it out."
            )
        return
    if privacy.target_epsilon is None and privacy.noise_multiplier is None:
        raise InputError(
            "the recipe states no budget: give --epsilon E (smaller is more private; 1 is strong, 3 usual, 8 weak), or "
            "privacy.noise_multiplier."
        )
    is_selected = privacy.selected_from is not None
    if privacy.score_noise is not None and not (is_selected and recipe.data.split == "train"):
        raise InputError(
            "privacy.score_noise is for a run selected from others (privacy.selected_from) by images that it was not "
            'trained on (data.split = "train"). Leave it out, or set both.'
        )
    each = {
        "privacy.selected_from": is_selected,
        "privacy.max_images_per_person": privacy.max_images_per_person is not None,
        'privacy.sampling = "shuffled"': privacy.sampling == "shuffled",
    }
    if sum(each.values()) > 1:
        names = " with ".join(name for name, is_set in each.items() if is_set)
        raise InputError(f"no epsilon is known for {names}. Leave one of them out.")


def _warnings_of_numbers(recipe: FilledRecipe, n: int) -> list[str]:
    optimizer, privacy = recipe.optimizer, recipe.privacy
    warnings = [] if recipe.model.missing_weights is None else [recipe.model.missing_weights]
    if optimizer.name != "sgd" and optimizer.learning_rate >= 0.1:
        warnings.append(
            f"optimizer.learning_rate = {optimizer.learning_rate:g} is a rate for sgd: {optimizer.name} moves every "
            "weight by about that much in each update. 0.01 is its default; set a smaller one."
        )
    if privacy is None:
        return warnings
    if recipe.data.group_by is not None and privacy.unit == "image":
        warnings.append(
            "epsilon is for one image, though data.group_by says whose each is: for a person's, set privacy.unit and "
            "privacy.max_images_per_person (--epsilon-per-person E --images-per-person K)."
        )
    return warnings + warnings_of_delta(privacy.delta, n, "person" if privacy.person_sampling == "persons" else "image")


def _refuse_overspent(mechanism: Mechanism, budget: Budget, selection: Selection, target: float) -> None:
    spent = epsilon(mechanism, budget.delta, "rdp", selection).epsilon
    if spent > target:
        raise InputError(
            f"the best of {selection.mean:g} expected runs spends epsilon {formats.epsilon_text(spent)}, more than "
            f"{formats.epsilon_text(target)}. Leave privacy.noise_multiplier out: it is then solved for."
        )


def _cut(mechanism: Mechanism, budget: Budget, target: float) -> Mechanism:
    """At most so many steps that what the accountant certifies for them is within the target.

    The true epsilon grows with the steps; a certified one may, where one accountant gives up, be
    larger for fewer.
    """
    if not mechanism.num_steps:
        return mechanism
    most, _ = solve(dataclasses.replace(budget, num_steps=None))
    found = min(mechanism, most, key=lambda each: each.num_steps)
    while found.num_steps and epsilon(found, budget.delta, budget.accountant).epsilon > target:
        found = found.replace(num_steps=found.num_steps - max(1, found.num_steps // 100))
    return found


def resolve_without_privacy(recipe: Recipe, facts: Facts) -> Plan:
    """The same network, batch and steps without clipping of single images and without noise, to show what privacy
    costs, at a rate that suits it (docs/defaults.md). A recipe that states no budget gives the same.

    Raises:
        InputError: As `resolve`.
    """
    _refuse_canaries_without_claim(recipe, ORDINARY)
    privacy = recipe.privacy
    if privacy is None:
        return resolve(recipe, facts)
    changes: dict[str, Any] = {}
    if privacy.target_epsilon is None and privacy.noise_multiplier is None:
        changes["target_epsilon"] = 8.0  # any does: batch and steps do not follow from it
    if privacy.unit == "person":  # ordinary training counts images
        changes |= {"unit": "image", "person_sampling": None}
    plan = resolve(recipe.model_copy(update={"privacy": privacy.model_copy(update=changes)}), facts)
    optimizer, training = plan.recipe.optimizer, plan.recipe.training
    choices = [each for each in plan.choices if not each.key.startswith("privacy.")]
    if optimizer.name == "sgd":
        steady = _STEADY if plan.recipe.model.features == "raw" else _STEADY_ON_FEATURES
        rate = float(f"{steady * (1 - optimizer.momentum):.2g}") or steady
        choices = [each for each in choices if each.key != "optimizer.learning_rate"]
        choices.append(Choice("optimizer.learning_rate", rate, "of ordinary training with gradients of norm 1 at most"))
        optimizer = optimizer.model_copy(update={"learning_rate": rate, "max_grad_norm": 1.0})
    values = {
        "privacy": None,
        "optimizer": optimizer,
        "training": training.model_copy(update={"norm_histogram_every": None}),  # of single images
    }
    ordinary = plan.recipe.model_copy(update=values)
    return Plan(
        ordinary,
        plan.mechanism.replace(noise_multiplier=0.0, sampling="shuffled"),
        ORDINARY,
        choices,
        _warnings_of_numbers(ordinary, facts.num_examples),
    )


def why_not_private(recipe: Recipe, mechanism: Mechanism) -> str | None:
    """Why a run claims nothing; None: it can carry a certificate."""
    if recipe.privacy is None:
        return ORDINARY
    if recipe.run.seed is not None:
        return "its randomness comes from a public seed, so anyone can subtract the noise"
    if mechanism.noise_multiplier == 0:
        return "its noise is zero: no noise was added"
    if mechanism.sampling == "shuffled":
        return (
            "its batches are shuffled, not Poisson-sampled, so the epsilon of Poisson sampling is not a guarantee for "
            "it"
        )
    return None
