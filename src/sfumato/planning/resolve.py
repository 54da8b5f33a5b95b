"""From a recipe and the public numbers of a data set to the run that will happen."""

import dataclasses

from sfumato.accounting import printed
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection
from sfumato.config import AugmentationConfig, PrivacyConfig, Recipe
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.defaults import Choice, fill_in


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

    recipe: Recipe
    mechanism: Mechanism
    private: bool
    why_not_private: str | None
    choices: list[Choice]
    warnings: list[str]

    @property
    def delta(self) -> float:
        assert self.recipe.privacy is not None and self.recipe.privacy.delta is not None
        return self.recipe.privacy.delta

    @property
    def selection(self) -> Selection | None:
        """How this run is selected from others; None where nothing is selected."""
        return _selection(self.recipe.privacy)


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
    from sfumato.accounting import calibration

    recipe, choices = fill_in(recipe, facts)
    _refuse_impossible_views(recipe.augmentation, facts.image_size)
    n = facts.num_examples
    privacy, training, optimizer = recipe.privacy, recipe.training, recipe.optimizer
    warnings: list[str] = []
    assert optimizer.learning_rate is not None
    if optimizer.name != "sgd" and optimizer.learning_rate >= 0.1:
        warnings.append(
            f"optimizer.learning_rate = {optimizer.learning_rate:g} is a rate for sgd: {optimizer.name} moves every weight by about that much "
            "in each update. 0.01 is its default; set a smaller one."
        )
    if privacy is None:
        if training.norm_histogram_every is not None:
            raise InputError(
                "training.norm_histogram_every needs the gradient of each image, which training without a [privacy] section does not compute. "
                "Leave it out."
            )
        assert training.batch_size is not None and training.num_steps is not None
        mechanism = Mechanism(n, min(training.batch_size, n), 0.0, training.num_steps, "shuffled")
        return Plan(recipe, mechanism, False, "the recipe has no [privacy] section: this is ordinary training", choices, warnings)

    target, sigma, delta = privacy.target_epsilon, privacy.noise_multiplier, privacy.delta
    batch_size, num_steps = training.batch_size, training.num_steps
    assert delta is not None
    if delta > 1 / n:
        warnings.append(
            f"delta = {printed.delta(delta)} is more than 1/N = {1 / n:.3g}: publishing one image at random would satisfy it. Choose a smaller delta."
        )
    if target is None and sigma is None:
        raise InputError(
            "the recipe states no budget: give --epsilon E (smaller is more private; 1 is strong, 3 usual, 8 weak), or privacy.noise_multiplier."
        )
    if batch_size is not None and batch_size > n:
        raise InputError(f"training.batch_size = {batch_size} is more than the {n} training images. Choose a smaller one.")
    if privacy.max_images_per_person is not None and privacy.sampling == "shuffled":
        raise InputError('privacy.max_images_per_person needs privacy.sampling = "poisson": no epsilon is known for shuffled batches.')
    selection = _selection(privacy)
    _refuse_what_selection_does_not_cover(recipe, privacy)
    if target is not None and sigma == 0:
        raise InputError("noise_multiplier 0 has no finite epsilon, so it cannot meet a target_epsilon. Leave one of them out.")

    if target is not None:
        if sigma is None:
            assert batch_size is not None and num_steps is not None
            sigma = calibration.solve_noise_multiplier(
                batch_size=batch_size,
                num_steps=num_steps,
                num_examples=n,
                target_epsilon=target,
                delta=delta,
                accountant=privacy.accountant,
                selection=selection,
            )
            choices.append(Choice("privacy.noise_multiplier", sigma, f"the least noise within epsilon {printed.epsilon(target)}"))
        elif selection is not None:
            if batch_size is None or num_steps is None:
                raise InputError("for a run selected from others only the noise is solved for. Give training.batch_size and training.num_steps.")
            _refuse_overspent_selection(Mechanism(n, batch_size, sigma, num_steps), target, delta, selection)
        elif batch_size is None:
            assert num_steps is not None
            batch_size = calibration.solve_batch_size(
                num_steps=num_steps, noise_multiplier=sigma, num_examples=n, target_epsilon=target, delta=delta, accountant=privacy.accountant
            )
            choices.append(Choice("training.batch_size", batch_size, f"the largest batch within epsilon {printed.epsilon(target)}"))
        elif num_steps is None or cut_to_target:
            most = calibration.solve_num_steps(
                batch_size=batch_size, noise_multiplier=sigma, num_examples=n, target_epsilon=target, delta=delta, accountant=privacy.accountant
            )
            if num_steps is None:
                choices.append(Choice("training.num_steps", most, f"the most updates within epsilon {printed.epsilon(target)}"))
            elif num_steps > most:
                warnings.append(
                    f"only {most} of {num_steps} steps fit epsilon {printed.epsilon(target)}: the run stops there. "
                    "Raise the noise or the target for more."
                )
            num_steps = most if num_steps is None else min(num_steps, most)

    assert batch_size is not None and num_steps is not None and sigma is not None
    resolved = recipe.model_copy(
        update={
            "privacy": privacy.model_copy(update={"noise_multiplier": sigma}),
            "training": training.model_copy(update={"batch_size": batch_size, "num_steps": num_steps}),
        }
    )
    mechanism = Mechanism(n, batch_size, sigma, num_steps, privacy.sampling)
    reason = _why_not_private(resolved, mechanism)
    return Plan(resolved, mechanism, reason is None, reason, choices, warnings)


def _selection(privacy: PrivacyConfig | None) -> Selection | None:
    if privacy is None or privacy.selected_from is None:
        return None
    return Selection(privacy.selected_from, privacy.selection_shape, privacy.score_noise)


def _refuse_what_selection_does_not_cover(recipe: Recipe, privacy: PrivacyConfig) -> None:
    if privacy.score_noise is not None and (privacy.selected_from is None or recipe.data.split != "train"):
        raise InputError(
            "privacy.score_noise is for a run selected from others (privacy.selected_from) by images that it was not trained on "
            '(data.split = "train"). Leave it out, or set both.'
        )
    if privacy.selected_from is None:
        return
    if privacy.sampling != "poisson" or privacy.max_images_per_person is not None:
        what = "privacy.max_images_per_person" if privacy.max_images_per_person is not None else 'privacy.sampling = "shuffled"'
        raise InputError(f"no epsilon is known for a run selected from others (privacy.selected_from) with {what}. Leave one of them out.")


def _refuse_overspent_selection(mechanism: Mechanism, target: float, delta: float, selection: Selection) -> None:
    from sfumato.accounting.accountants import epsilon

    spent = epsilon(mechanism, delta, "rdp", selection).epsilon
    if spent > target:
        raise InputError(
            f"the best of {selection.mean:g} expected runs spends epsilon {printed.epsilon(spent)}, more than {printed.epsilon(target)}. "
            "Leave privacy.noise_multiplier out: it is then solved for."
        )


def without_privacy(plan: Plan) -> Plan:
    """The same run without clipping per example and without noise, to show the price of privacy.

    Batch, steps and learning rate stay; the mean gradient is bounded by the clipping norm,
    so that SGD's learning rate keeps its meaning. (Adam's steps have their own scale.)
    """
    recipe = plan.recipe
    if recipe.privacy is None:
        return plan
    optimizer = recipe.optimizer.model_copy(update={"max_grad_norm": recipe.privacy.clipping_norm})
    mechanism = plan.mechanism.replace(noise_multiplier=0.0, sampling="shuffled")
    training = recipe.training.model_copy(update={"norm_histogram_every": None})  # there are no gradients of single images
    plain = recipe.model_copy(update={"privacy": None, "optimizer": optimizer, "training": training})
    return dataclasses.replace(plan, recipe=plain, mechanism=mechanism, private=False, why_not_private="privacy was switched off by --non-private")


def _refuse_impossible_views(augmentation: AugmentationConfig, image_size: int) -> None:
    kind, augmult, padding = augmentation.kind, augmentation.augmult, augmentation.padding
    assert padding is not None
    if kind in ("rrc", "tan", "simclr") and augmult == 0:
        raise InputError(
            f'augmentation.kind = "{kind}" makes no views with augmult = 0. Set augmentation.augmult to 1 or more, or augmentation.kind to "none".'
        )
    if kind == "tan" and padding >= image_size:
        raise InputError(
            f"augmentation.padding = {padding} is too much for images of {image_size} pixels: reflected padding must be smaller than the image. "
            f"Choose at most {image_size - 1}, or leave it out."
        )


def _why_not_private(recipe: Recipe, mechanism: Mechanism) -> str | None:
    if recipe.run.seed is not None:
        return "its randomness comes from a public seed, so anyone can subtract the noise"
    if mechanism.noise_multiplier == 0:
        return "noise_multiplier is 0: no noise was added"
    if mechanism.sampling == "shuffled":
        return "its batches are shuffled, not Poisson-sampled, so the epsilon of Poisson sampling is not a guarantee for it"
    return None
