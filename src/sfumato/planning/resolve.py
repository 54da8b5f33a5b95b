"""From a recipe and the public numbers of a data set to the run that will happen."""

import dataclasses

from sfumato.accounting import rounding
from sfumato.accounting.gaussian import refuse_beyond_reach
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection
from sfumato.config import (
    FilledPrivacy,
    PrivacyConfig,
    Recipe,
    ResolvedAugmentation,
    ResolvedRecipe,
    parse_resolved,
)
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning import canaries, classifiers
from sfumato.planning.advice import warnings_of_delta, warnings_of_signal
from sfumato.planning.budgets import budget_of, counted, selection_of
from sfumato.planning.defaults import Choice, fill_in
from sfumato.planning.solve import Solved, solve

ORDINARY = "this is ordinary training, without a budget and without noise"
MOST_IMAGES_TOGETHER = 256
"""Of a person who is drawn (`sfumato.data.views.People`)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe in which every value is set, and what it means for privacy.

    Attributes:
        recipe: Resolved: enough to run again.
        mechanism: The public numbers of the run.
        private: Whether the run can carry a certificate.
        why_not_private: The reason where it cannot.
        choices: What was filled in, and why.
        warnings: Lines the user should read.
    """

    recipe: ResolvedRecipe
    mechanism: Mechanism
    private: bool
    why_not_private: str | None
    choices: list[Choice]
    warnings: list[str]

    @property
    def delta(self) -> float:
        """Of a recipe with a budget."""
        return self.recipe.budget.delta

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
    asked, facts, drawn = _drawn(recipe, canaries.counted(recipe, facts))
    recipe, choices = fill_in(asked, facts)
    choices = [*drawn, *choices]
    _refuse_impossible_views(recipe.augmentation, facts.image_size)
    n = facts.num_examples
    privacy, training, optimizer = recipe.privacy, recipe.training, recipe.optimizer
    warnings = [] if recipe.model.missing_weights is None else [recipe.model.missing_weights]
    if optimizer.name != "sgd" and optimizer.learning_rate >= 0.1:
        warnings.append(
            f"optimizer.learning_rate = {optimizer.learning_rate:g} is a rate for sgd: "
            f"{optimizer.name} moves every weight by about that much in each update. 0.01 is its "
            "default; set a smaller one."
        )
    if privacy is None:
        if training.norm_histogram_every is not None:
            raise InputError(
                "training.norm_histogram_every needs the gradient of each image, which training "
                "without a [privacy] section does not compute. Leave it out."
            )
        ordinary = parse_resolved(recipe.model_dump())
        mechanism = Mechanism(n, min(ordinary.training.batch_size, n), 0.0, ordinary.training.num_steps, "shuffled")
        return Plan(
            ordinary,
            mechanism,
            False,
            ORDINARY,
            choices,
            warnings,
        )

    target, sigma, delta = privacy.target_epsilon, privacy.noise_multiplier, privacy.delta
    warnings += warnings_of_delta(delta, n, privacy.unit if privacy.person_sampling == "persons" else "image")
    if target is None and sigma is None:
        raise InputError(
            "the recipe states no budget: give --epsilon E (smaller is more private; 1 is "
            "strong, 3 usual, 8 weak), or privacy.noise_multiplier."
        )
    if training.batch_size is not None and training.batch_size > n:
        raise InputError(
            f"training.batch_size = {training.batch_size} is more than the {n} {counted(privacy)}. Choose a "
            "smaller one."
        )
    if privacy.max_images_per_person is not None and privacy.sampling == "shuffled":
        raise InputError(
            'privacy.max_images_per_person needs privacy.sampling = "poisson": no epsilon is known for shuffled '
            "batches."
        )
    selection = selection_of(privacy)
    _refuse_what_selection_does_not_cover(recipe, privacy)
    if target is not None and sigma == 0:
        raise InputError(
            "noise_multiplier 0 has no finite epsilon, so it cannot meet a target_epsilon. Leave one of them out."
        )

    budget = budget_of(recipe, n)
    mechanism, solved_for = solve(budget)
    if target is not None:
        if solved_for is not None:
            key, why = _SOLVED[solved_for]
            choices.append(
                Choice(
                    key,
                    getattr(mechanism, solved_for),
                    f"{why} within epsilon {rounding.epsilon_text(target)} for each {privacy.unit}",
                )
            )
        elif selection is not None:
            _refuse_overspent_selection(mechanism, target, delta, selection)
        elif cut_to_target and mechanism.num_steps > 0:
            most, _ = solve(dataclasses.replace(budget, num_steps=None))
            if mechanism.num_steps > most.num_steps:
                warnings.append(
                    f"only {most.num_steps} of {mechanism.num_steps} steps fit epsilon "
                    f"{rounding.epsilon_text(target)}: the run stops there. "
                    "Raise the noise or the target for more."
                )
                mechanism = most
            mechanism = _within(mechanism, target, privacy, warnings)
    warnings += warnings_of_signal(mechanism, asked, facts)
    mechanism = mechanism.replace(sampling=privacy.sampling)
    values = recipe.model_dump()
    values["privacy"]["noise_multiplier"] = mechanism.noise_multiplier
    values["training"] |= {"batch_size": mechanism.batch_size, "num_steps": mechanism.num_steps}
    resolved = parse_resolved(values)
    reason = why_not_private(resolved, mechanism)
    if reason is None:
        refuse_beyond_reach(mechanism, delta)
    canaries.refuse_without_claim(resolved, reason)
    return Plan(resolved, mechanism, reason is None, reason, choices, warnings)


def _drawn(recipe: Recipe, facts: Facts) -> tuple[Recipe, Facts, list[Choice]]:
    """What each update draws where the unit is a person, filled in; and N, on which every default and
    epsilon depend, as the number of people where people are drawn.

    Raises:
        InputError: If nobody says who the people are, or they cannot be drawn.
    """
    privacy = recipe.privacy
    if privacy is not None and privacy.unit == "person" and recipe.data.name == "folder" and not recipe.data.group_by:
        raise InputError(
            "an epsilon for each person needs to know whose each image is: give data.group_by, for example --set "
            "data.group_by=group, a column of labels.csv, or an expression that reads the person from a path, such as "
            "--set 'data.group_by=/(p[0-9]+)_'."
        )
    if privacy is None or privacy.unit != "person":
        return recipe, facts, []
    choices = []
    with_views = bool(recipe.augmentation.augmult) or recipe.augmentation.kind not in (None, "none")
    adds_up = recipe.model.releases_first
    if adds_up:
        classifiers.refuse_people_together(privacy)
    if privacy.person_sampling is None:
        drawn = "images" if with_views or facts.num_people is None or adds_up else "persons"
        why = "views, sums of all images, or nobody says who is who"
        why = "far less noise for the same epsilon" if drawn == "persons" else why
        choices.append(Choice("privacy.person_sampling", drawn, why))
        privacy = privacy.model_copy(update={"person_sampling": drawn})
        recipe = recipe.model_copy(update={"privacy": privacy})
    if privacy.person_sampling == "images":
        return recipe, facts, choices
    if facts.num_people is None:
        raise InputError(
            'privacy.person_sampling = "persons" needs to know whose each image is: give data.group_by, for a folder.'
        )
    if with_views:
        raise InputError(
            'privacy.person_sampling = "persons" takes each image as it is. Leave augmentation out, or draw images.'
        )
    if (privacy.max_images_per_person or 0) > MOST_IMAGES_TOGETHER:
        raise InputError(
            f"of a person who is drawn at most {MOST_IMAGES_TOGETHER} images count, not "
            f"{privacy.max_images_per_person}. Lower privacy.max_images_per_person, or set privacy.person_sampling = "
            '"images".'
        )
    return recipe, dataclasses.replace(facts, num_examples=facts.num_people), choices


def _within(mechanism: Mechanism, target: float, privacy: FilledPrivacy, warnings: list[str]) -> Mechanism:
    """At most so many steps that what the accountant certifies for them is within the target.

    The true epsilon grows with the steps; a certified one may, where one accountant gives up, be
    larger for fewer.
    """
    from sfumato.accounting.accountants import epsilon

    found = mechanism
    while found.num_steps and epsilon(found, privacy.delta, privacy.accountant).epsilon > target:
        found = found.replace(num_steps=found.num_steps - max(1, found.num_steps // 100))
    if found.num_steps < mechanism.num_steps:
        warnings.append(
            f"only {found.num_steps} of {mechanism.num_steps} steps are certified within epsilon "
            f"{rounding.epsilon_text(target)}."
        )
    return found


_SOLVED: dict[Solved, tuple[str, str]] = {
    "noise_multiplier": ("privacy.noise_multiplier", "the least noise"),
    "batch_size": ("training.batch_size", "the largest batch"),
    "num_steps": ("training.num_steps", "the most updates"),
}


def _refuse_what_selection_does_not_cover(recipe: Recipe, privacy: PrivacyConfig) -> None:
    if privacy.score_noise is not None and (privacy.selected_from is None or recipe.data.split != "train"):
        raise InputError(
            "privacy.score_noise is for a run selected from others (privacy.selected_from) by "
            "images that it was not trained on "
            '(data.split = "train"). Leave it out, or set both.'
        )
    if privacy.selected_from is None:
        return
    if privacy.sampling != "poisson" or privacy.max_images_per_person is not None:
        what = (
            "privacy.max_images_per_person"
            if privacy.max_images_per_person is not None
            else 'privacy.sampling = "shuffled"'
        )
        raise InputError(
            "no epsilon is known for a run selected from others (privacy.selected_from) with "
            f"{what}. Leave one of them out."
        )


def _refuse_overspent_selection(mechanism: Mechanism, target: float, delta: float, selection: Selection) -> None:
    from sfumato.accounting.accountants import epsilon

    spent = epsilon(mechanism, delta, "rdp", selection).epsilon
    if spent > target:
        raise InputError(
            f"the best of {selection.mean:g} expected runs spends epsilon "
            f"{rounding.epsilon_text(spent)}, more than {rounding.epsilon_text(target)}. Leave "
            "privacy.noise_multiplier out: it is then solved for."
        )


def resolve_without_privacy(recipe: Recipe, facts: Facts) -> Plan:
    """What the recipe's run is without privacy: of one with a budget the same batch, steps and rate;
    of one that states none, ordinary training.

    Raises:
        InputError: As `resolve`.
    """
    canaries.refuse_without_claim(recipe, ORDINARY)
    privacy = recipe.privacy
    if privacy is not None and privacy.target_epsilon is None and privacy.noise_multiplier is None:
        recipe = recipe.model_copy(update={"privacy": None})
    elif privacy is not None and privacy.unit == "person":  # ordinary training counts images
        images = {"unit": "image", "person_sampling": None}
        recipe = recipe.model_copy(update={"privacy": privacy.model_copy(update=images)})
    return _without_privacy(resolve(recipe, facts))


def _without_privacy(plan: Plan) -> Plan:
    """The same run without clipping per example and without noise, to show the price of privacy.

    Batch, steps and learning rate stay; the mean gradient is bounded by the clipping norm,
    so that SGD's learning rate keeps its meaning. (Adam's steps have their own scale.)
    """
    recipe = plan.recipe
    if recipe.privacy is None:
        return plan
    optimizer = recipe.optimizer.model_copy(update={"max_grad_norm": recipe.privacy.clipping_norm})
    mechanism = plan.mechanism.replace(noise_multiplier=0.0, sampling="shuffled", first_release_noise=None)
    training = recipe.training.model_copy(
        update={"norm_histogram_every": None}
    )  # there are no gradients of single images
    plain = recipe.model_copy(update={"privacy": None, "optimizer": optimizer, "training": training})
    return dataclasses.replace(
        plan,
        recipe=plain,
        mechanism=mechanism,
        private=False,
        why_not_private=ORDINARY,
    )


def _refuse_impossible_views(augmentation: ResolvedAugmentation, image_size: int) -> None:
    kind, augmult, padding = augmentation.kind, augmentation.augmult, augmentation.padding
    if kind in ("rrc", "tan", "simclr") and augmult == 0:
        raise InputError(
            f'augmentation.kind = "{kind}" makes no views with augmult = 0. Set augmentation.augmult to 1 or more, or '
            'augmentation.kind to "none".'
        )
    if kind == "tan" and padding >= image_size:
        raise InputError(
            f"augmentation.padding = {padding} is too much for images of {image_size} pixels: "
            f"reflected padding must be smaller than the image. Choose at most {image_size - 1}, "
            "or leave it out."
        )


def why_not_private(recipe: Recipe, mechanism: Mechanism) -> str | None:
    """Why a run claims nothing; None: it can carry a certificate."""
    if recipe.privacy is None:
        return ORDINARY
    if recipe.run.seed is not None:
        return "its randomness comes from a public seed, so anyone can subtract the noise"
    if mechanism.noise_multiplier == 0:
        return "noise_multiplier is 0: no noise was added"
    if mechanism.sampling == "shuffled":
        return (
            "its batches are shuffled, not Poisson-sampled, "
            "so the epsilon of Poisson sampling is not a guarantee for it"
        )
    return None
