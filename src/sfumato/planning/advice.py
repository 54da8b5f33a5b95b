"""What a plan says to its owner: too little signal, too large a delta."""

import dataclasses
import math
from collections.abc import Callable

from sfumato.accounting import formats, gaussian
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.config import Recipe
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.defaults import delta_default, fill_in
from sfumato.planning.solve import Budget, budget_of

MEASURED = 2_084
"""Signals up to here were tried: more images or a larger epsilon raised accuracy (docs/defaults.md has the table)."""
FEW_IMAGES = 1_000
"""Below, training with noise is warned about."""
LEAST_SIGNAL = 30
"""For each class but one: below, accuracy is hardly above chance (docs/defaults.md has the evidence)."""
_TRIES = 10
_WEAK = 20.0  # an epsilon beyond says nothing worth a warning's advice
_MOST_IMAGES = 10**9  # nobody has more


def advice_of_signal(mechanism: Mechanism, asked: Recipe, facts: Facts) -> tuple[list[str], str | None]:
    """Warnings where noise leaves little to learn, with what would help; and that alone, in numbers that are tried, or
    by measured tables. None: nothing is known to.
    """
    privacy, n, signal = asked.privacy, mechanism.num_examples, _signal(mechanism)
    assert privacy is not None
    needed, helps, text = LEAST_SIGNAL * (facts.num_classes - 1), [], None
    units = "people" if privacy.person_sampling == "persons" else "training images"
    if signal >= needed and n >= FEW_IMAGES:
        helps = ["more images", "a larger epsilon"] if signal < MEASURED else []
    elif signal >= needed:
        helps = [f"{FEW_IMAGES} or more {units}", "a larger epsilon"]
        text = f"{n} {units} are few for training with noise: expect a weak classifier"
    else:
        text = f"the noise drowns what {n} {units} teach: expect a classifier hardly better than chance"

        def larger(value: float, most: float, change: Callable[[float], tuple[Recipe, Facts]]) -> float | None:
            """The value times the least of some factors that gives the signal."""
            factors = (needed / max(signal, 1e-9) * 1.3**power for power in range(_TRIES))
            tried = (factor * value for factor in factors if factor * value <= most)
            return next((each for each in tried if _reaches(*change(each), needed)), None)

        def with_target(epsilon: float) -> tuple[Recipe, Facts]:
            other = privacy.model_copy(update={"target_epsilon": epsilon})
            return asked.model_copy(update={"privacy": other}), facts

        images = larger(n, _MOST_IMAGES, lambda n: (asked, dataclasses.replace(facts, num_examples=math.ceil(n))))
        target = larger(privacy.target_epsilon or math.inf, _WEAK, with_target)
        helps += [] if images is None else [f"{math.ceil(images)} {units}"]
        helps += [] if target is None else [f"an epsilon of {formats.epsilon_text(target)}"]
        helps = helps or ["a larger batch, more updates or less noise"]
    if text is not None and not asked.model.init_from:
        helps.append("a network that others trained (--set model.name=efficientnet_lite0)")
    if not helps:
        return [], None
    tip = f"What would help: {'; or '.join(helps)}. docs/defaults.md has accuracies by signal: here {signal:,.0f}."
    return ([] if text is None else [f"{text}. {tip}"]), tip


def _reaches(recipe: Recipe, facts: Facts, signal: float) -> bool:
    try:
        filled, _ = fill_in(recipe, facts)
    except InputError:  # it states what belongs to its own number of images
        return False
    return _allows(budget_of(filled, facts.num_examples), signal)


def _allows(budget: Budget, signal: float) -> bool:
    """Whether a budget allows a mechanism of that signal. One epsilon says so, where solving takes dozens: what the
    budget leaves open is set to what the signal needs.
    """
    signal *= 1.001  # noise is solved for in four digits
    match budget.noise_multiplier, budget.batch_size, budget.num_steps:
        case None, int() as batch_size, int() as num_steps:
            mechanism = budget.mechanism(noise_multiplier=batch_size * math.sqrt(num_steps) / signal)
        case (float() | int()) as sigma, None, int() as num_steps:
            batch_size = math.ceil(signal * sigma / math.sqrt(max(num_steps, 1)))
            if batch_size > budget.num_examples:
                return False
            mechanism = budget.mechanism(batch_size=batch_size)
        case (float() | int()) as sigma, int() as batch_size, most:
            num_steps = math.ceil((signal * sigma / batch_size) ** 2)
            if most is not None and num_steps > most:
                return False
            mechanism = budget.mechanism(num_steps=num_steps)
        case _:
            return False
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
    text, of_n = formats.delta_text(delta), f"1/N = {1 / num_examples:.3g}"
    if delta > 1 / num_examples:
        return [
            f"delta = {text} is more than {of_n}: publishing one {what} at random would satisfy it. Choose a smaller "
            "delta."
        ]
    if delta > 0.1 / num_examples:
        usual = formats.delta_text(delta_default(num_examples))
        return [f"delta = {text} is within a factor of ten of {of_n}: it should be well below. {usual} is the default."]
    return []
