"""What a plan says to its owner: too little signal, too large a delta."""

import dataclasses
import math
from typing import Any

from sfumato.accounting import gaussian, rounding
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.config import Recipe
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.budgets import budget_of, counted
from sfumato.planning.defaults import delta_default, fill_in
from sfumato.planning.solve import Budget

FEW_IMAGES = 1_000
"""Below, training with noise is warned about."""
LEAST_SIGNAL = 30
"""For each class but one: below, accuracy is hardly above chance (docs/defaults.md has the evidence)."""
_TRIES = 10
_WEAK = 20.0  # an epsilon beyond says nothing worth a warning's advice
_MOST_IMAGES = 10**9  # nobody has more


def warnings_of_signal(mechanism: Mechanism, asked: Recipe, facts: Facts) -> list[str]:
    """What to say where noise leaves little to learn, in numbers that would help, which are tried."""
    n, needed, privacy = mechanism.num_examples, LEAST_SIGNAL * (facts.num_classes - 1), asked.privacy
    assert privacy is not None
    units, signal = counted(privacy), _signal(mechanism)
    if signal >= needed:
        if n >= FEW_IMAGES:
            return []
        helps = [f"{FEW_IMAGES} or more", "a larger epsilon"]
        text = f"{n} {units} are few for training with noise: expect a weak classifier"
    else:
        helps = []

        def reaches(recipe: Recipe, facts: Facts) -> bool:
            try:
                filled, _ = fill_in(recipe, facts)
            except InputError:  # it states what belongs to its own number of images
                return False
            return _allows(budget_of(filled, facts.num_examples), needed)

        for factor in (needed / max(signal, 1e-9) * 1.3**power for power in range(_TRIES)):
            if factor * n > _MOST_IMAGES:
                break
            more = dataclasses.replace(facts, num_examples=math.ceil(factor * n))
            if reaches(asked, more):
                helps.append(f"{more.num_examples} {units}")
                break
        target = privacy.target_epsilon
        for factor in (needed / max(signal, 1e-9) * 1.3**power for power in range(_TRIES)):
            if target is None or factor * target > _WEAK:
                break
            larger = privacy.model_copy(update={"target_epsilon": factor * target})
            if reaches(asked.model_copy(update={"privacy": larger}), facts):
                helps.append(f"an epsilon of {rounding.epsilon_text(factor * target)}")
                break
        text = f"the noise drowns what {n} {units} teach: expect a classifier hardly better than chance"
        helps = helps or ["a larger batch, more updates or less noise"]
    if not asked.model.init_from:
        helps.append("a network that others trained (model.name = efficientnet_lite0)")
    return [f"{text}. What would help: {'; or '.join(helps)}."]


def _allows(budget: Budget, signal: float) -> bool:
    """Whether a budget allows a mechanism of that signal. One epsilon says so, where solving takes dozens: what the
    budget leaves open is set to what the signal needs.
    """
    from sfumato.accounting.accountants import epsilon

    signal *= 1.001  # noise is solved for in four digits
    n, batch_size, num_steps, sigma = budget.num_examples, budget.batch_size, budget.num_steps, budget.noise_multiplier
    match sigma, batch_size, num_steps:
        case None, int(), int():
            sigma = batch_size * math.sqrt(num_steps) / signal
        case float() | int(), None, int():
            batch_size = math.ceil(signal * sigma / math.sqrt(max(num_steps, 1)))
        case float() | int(), int(), _:
            most, num_steps = num_steps, math.ceil((signal * sigma / batch_size) ** 2)
            if most is not None and num_steps > most:
                return False
        case _:
            return False
    if batch_size > n:
        return False
    beside: dict[str, Any] = {
        "images_per_unit": budget.images_per_unit,
        "first_release_noise": budget.first_release_noise,
    }
    mechanism = Mechanism(n, batch_size, sigma, num_steps, **beside)
    # RDP, where there is one, takes milliseconds, and what it allows PLD allows.
    accountant: Accountant = "pld" if budget.images_per_unit > 1 else "rdp"
    target = math.inf if budget.target_epsilon is None else budget.target_epsilon
    return epsilon(mechanism, budget.delta, accountant, budget.selection).epsilon <= target


def _signal(mechanism: Mechanism) -> float:
    """The longest sum of clipped gradients over the noise that all updates add in its direction: B sqrt(T)
    / sigma, that is sqrt(2) N eta of Sander et al. (2022, Definition 3.1).
    """
    return math.sqrt(2) * mechanism.num_examples * gaussian.snr(mechanism)


def warnings_of_delta(delta: float, num_examples: int, what: str = "image") -> list[str]:
    """What to say of a delta that is no small fraction of 1/N."""
    if delta > 1 / num_examples:
        return [
            f"delta = {rounding.delta_text(delta)} is more than 1/N = {1 / num_examples:.3g}: publishing one "
            f"{what} at random would satisfy it. Choose a smaller delta."
        ]
    if delta > 0.1 / num_examples:
        return [
            f"delta = {rounding.delta_text(delta)} is within a factor of ten of 1/N = {1 / num_examples:.3g}: it "
            f"should be well below. {rounding.delta_text(delta_default(num_examples))} is the default."
        ]
    return []
