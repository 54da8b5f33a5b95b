"""`sfumato plan`: three of batch size, steps, noise and epsilon give the fourth."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato.accounting import formats
from sfumato.accounting.attacker import Attacker
from sfumato.accounting.mechanism import Accountant
from sfumato.cli import options, output
from sfumato.errors import InputError, refusing
from sfumato.json_record import pick
from sfumato.reporting.wording import of_attacker, who_guesses

if TYPE_CHECKING:
    from sfumato.config import ResolvedRecipe
    from sfumato.data.catalogue import Facts
    from sfumato.scaling.cost import Price
    from sfumato.scaling.plan import Plan


@dataclasses.dataclass(frozen=True)
class _OfRecipe:
    """What a recipe says besides the numbers that `sfumato.plan` takes.

    Attributes:
        views: Of each image, that are differentiated.
        target: Where all numbers are given.
        why_not_private: Why a run would not be; None: it would.
        run: What it trains with, and on images of which public numbers.
    """

    views: int = 1
    learning_rate: float | None = None
    target: float | None = None
    why_not_private: str | None = None
    run: "tuple[ResolvedRecipe, Facts] | None" = None


def plan(
    *,
    num_examples: int | None = None,
    delta: float | None = None,
    batch_size: int | None = None,
    num_steps: int | None = None,
    noise_multiplier: float | None = None,
    epsilon: str | None = None,
    images_per_person: int | None = None,
    recipe: str | None = None,
    accountant: Accountant = "pld",
    table: Annotated[bool, typer.Option("--table/--no-table")] = False,
    throughput: float | None = None,
    devices: int = 1,
    bandwidth: float | None = None,
    reading: float | None = None,
    price: float | None = None,
    more_data: float | None = None,
    plot: Path | None = None,
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Solves for the one of --batch-size, --num-steps, --noise-multiplier and --epsilon that is
    left out. Beside --epsilon alone, batch and steps are those that `train` takes.

    Args:
        num_examples: N, the number of training images.
        batch_size: The expected batch qN.
        num_steps: Number of updates.
        noise_multiplier: sigma.
        epsilon: Target epsilon; never exceeded. Several, as 1,2,3, are planned one by one.
        images_per_person: Every epsilon is for a person with so many images at most, each drawn by itself; else for
            one image. (Where people are drawn, N is their number, and this is left out.)
        recipe: Takes every number from this recipe instead.
        table: Lists runs of the same total amount of noise: batch against noise, batch against steps.
        throughput: Views a second of one device: gives hours.
        devices: Devices that share the work.
        bandwidth: GB a second between devices: counts the reduction of gradients and their noise, which is timed on
            this machine; needs --recipe.
        reading: GB a second of one device's share of the disk: counts the reading of stored images; needs --recipe.
        price: Of an hour and device: gives the cost.
        more_data: Says what this many times as many images buy.
        plot: Draws epsilon against sigma around this run (.svg, .png or .pdf).

    Example:
        sfumato plan --num-examples 50000 --epsilon 1,3,8
    """
    from sfumato.scaling import equal_noise as trade
    from sfumato.scaling.plan import plan as solve

    targets, beside = _targets(epsilon), _OfRecipe()
    numbers: dict[str, Any] = {"num_examples": num_examples, "delta": delta, "images_per_person": images_per_person}
    numbers |= {"batch_size": batch_size, "num_steps": num_steps, "noise_multiplier": noise_multiplier}
    costs = {"--throughput": throughput, "--bandwidth": bandwidth, "--reading": reading, "--price": price}
    asks_more = recipe or table or plot or more_data or any(costs.values()) or devices != 1
    if len(targets) > 1 and asks_more:
        raise InputError(
            "several epsilons are planned with --num-examples, without --recipe, --table, --plot, --more-data, "
            f"--devices, {', '.join(costs)}. Give one --epsilon with these."
        )
    if recipe is not None:
        if targets or any(value is not None for value in numbers.values()):
            raise InputError("--recipe states every number itself. Leave out the others, or leave out --recipe.")
        numbers, beside = _numbers_of(recipe)
        accountant = numbers["accountant"]
    elif num_examples is None:
        raise InputError(
            "--num-examples is needed: N, the public number of training images. Give it, or --recipe NAME."
        )
    machines = _price(costs, devices, beside, trust or [])
    each: list[float | None] = [*targets] or [None]
    plans = [solve(**{"accountant": accountant, "epsilon": target} | numbers) for target in each]
    if len(plans) > 1:
        output.answer({"plans": [plan.as_json() for plan in plans]}, json_, lambda facts: _show_several(plans))
        return
    found, mechanism = plans[0], plans[0].mechanism
    if found.images_per_person is not None and (table or plot is not None):
        raise InputError("--table and --plot are for the epsilon of one image. Leave out --images-per-person.")
    if table and not found.noise_multiplier:
        raise InputError("--table trades noise, but there is none: sigma is 0.")
    facts = _facts(beside, found, recipe) | machines.of(mechanism)
    moved = pick(machines, "num_parameters", "noise_seconds_per_million")
    facts |= {name: value or None for name, value in moved.items()}
    if table:
        facts["table"] = trade.table(mechanism, found.delta, accountant, machines, beside.learning_rate)
    if more_data is not None:
        facts["more_data"] = trade.with_more_data(mechanism, found.delta, more_data, accountant)
    if plot is not None:
        from sfumato.scaling.plots import draw_plan

        draw_plan(mechanism, found.delta, plot)
    output.answer(facts, json_, _show)


def _price(costs: dict[str, float | None], devices: int, beside: _OfRecipe, trust: list[str]) -> "Price":
    """What options say of the machines, and a recipe of what they move: --bandwidth alone asks PyTorch for that."""
    from sfumato.scaling import cost

    for option, value in costs.items():
        if value is not None and not 1e-12 <= value <= 1e12:
            raise InputError(f"{option} must lie between 1e-12 and 1e12, not {value}. Correct it.")
        if value is not None and costs["--throughput"] is None:
            raise InputError(f"{option} needs --throughput, the views a second of one device. Give it too.")
        if value is not None and option in ("--bandwidth", "--reading") and beside.run is None:
            raise InputError(f"{option} needs --recipe, which says what is moved. Give it, or leave {option} out.")
    if not 1 <= devices <= 1e12:
        raise InputError(f"--devices must lie between 1 and 1e12, not {devices}. Correct it.")
    moved: dict[str, Any] = {}
    if beside.run is not None:
        recipe, facts = beside.run
        moved["image_bytes"] = facts.channels * recipe.data.stored_size(facts.image_size) ** 2
        if costs["--bandwidth"] is not None:
            moved["num_parameters"] = cost.num_trainable(recipe, facts, trust)
            moved["noise_seconds_per_million"] = cost.noise_seconds_per_million()
    throughput, bandwidth, reading, per_hour = costs.values()
    return cost.Price(beside.views, throughput, devices, per_hour, bandwidth, reading, **moved)


def _targets(text: str | None) -> list[float]:
    with refusing("--epsilon takes a number, or several with commas between them", "Correct it.", ValueError):
        return [] if text is None else [float(part) for part in text.split(",")]


def _show_several(plans: "list[Plan]") -> None:
    for plan in plans:
        output.say(
            f"epsilon {formats.epsilon_text(plan.epsilon)}  sigma {plan.noise_multiplier:<8.4g} "
            f"B {plan.batch_size:>7}  steps {plan.num_steps:>7}  ({plan.num_epochs:.1f} epochs)"
        )
    output.say(f"for {plans[0].unit} of {plans[0].num_examples}, at delta {formats.delta_text(plans[0].delta)}")
    for warning in dict.fromkeys(warning for plan in plans for warning in plan.warnings):
        output.warn(warning)


def _numbers_of(recipe: str) -> tuple[dict[str, Any], _OfRecipe]:
    """What `sfumato.plan` takes, of a recipe whose data set has a public N."""
    from sfumato import recipes
    from sfumato.data import catalogue as facts
    from sfumato.planning.resolve import resolve

    parsed = recipes.recipe_of(recipe, {})
    privacy, training = parsed.privacy, parsed.training
    if privacy is None:
        raise InputError(f"recipe {recipe} has no [privacy] section, so there is nothing to plan.")
    if privacy.selected_from is not None:
        raise InputError(
            f"recipe {recipe} is one of several private runs (privacy.selected_from). `sfumato "
            f"train {recipe} --dry-run` shows its epsilon."
        )
    known = facts.public_facts(parsed.data)
    if known is None:
        raise InputError(
            f"recipe {recipe} does not fix the number of images. Use `sfumato train {recipe} --dry-run` with your data."
        )
    plan = resolve(parsed, known, cut_to_target=False)
    sizes = pick(training, "batch_size", "num_steps") | pick(privacy, "noise_multiplier")
    numbers = sizes | {
        "num_examples": known.num_examples,
        **pick(privacy, "delta", "accountant"),
        "epsilon": None if None not in sizes.values() else privacy.target_epsilon,  # what all printed numbers spend
        "images_per_person": privacy.max_images_per_person if privacy.unit == "person" else None,
    }
    views, rate = max(1, parsed.augmentation.augmult or 0), parsed.optimizer.learning_rate
    return numbers, _OfRecipe(views, rate, privacy.target_epsilon, plan.why_not_private, (plan.recipe, known))


def _facts(beside: _OfRecipe, found: "Plan", recipe: str | None) -> dict[str, Any]:
    """What is printed of one plan."""
    from sfumato.accounting.attacker import attacker

    facts, why_not = found.as_json(), beside.why_not_private
    if why_not is not None:  # as `train --dry-run` gives it
        by = ("epsilon", "epsilon_rdp", "epsilon_pld", "epsilon_image")
        facts |= {f"{name}_if_private": facts[name] for name in by} | dict.fromkeys(by)
        each = "each epsilon here is that of Poisson sampling with secret noise"
        facts["warnings"].insert(0, f"recipe {recipe} is not private: {why_not}; {each}")
    if beside.target is not None and found.noise_multiplier and (facts["epsilon"] or 0.0) > beside.target:
        facts["warnings"].append(
            f"that is more than privacy.target_epsilon = {formats.epsilon_text(beside.target)}: `sfumato "
            "train` stops before it is spent"
        )
    told = attacker(found.mechanism).as_json() if why_not is None else None
    return {**facts, "private": why_not is None, "why_not_private": why_not, "attacker": told}


def _show(facts: dict[str, Any]) -> None:
    private, of_image = facts["private"], facts["images_per_person"] is None
    ending = "" if private else "_if_private"
    epsilon, of_one = (formats.epsilon_text(facts[name + ending]) for name in ("epsilon", "epsilon_image"))
    by_rdp, by_pld = (
        "-" if facts[name + ending] is None else formats.epsilon_text(facts[name + ending])
        for name in ("epsilon_rdp", "epsilon_pld")
    )
    promised = f"{epsilon} at delta {formats.delta_text(facts['delta'])} ({facts['accountant']})"
    rows = [("epsilon", promised)]
    if not private:
        rows = [("not private", facts["why_not_private"]), ("if it were: epsilon", promised)]
    rows.append(("by RDP / PLD", f"{by_rdp} / {by_pld}"))
    if facts["attacker"] is not None:
        told = Attacker(**facts["attacker"])
        rows += [("an attacker", who_guesses(told, of_persons=not of_image)), ("in detail", of_attacker(told))]
    by_tan = f"{formats.epsilon_text(facts['epsilon_tan'])}  never part of a certificate"
    rows += [
        ("by TAN, a guide", by_tan) if of_image else ("of one image alone", of_one),
        ("noise multiplier", f"{facts['noise_multiplier']:.4g}"),
        (
            "batch size",
            f"{facts['batch_size']} expected, of {facts['num_examples']} (q = {facts['sampling_prob']:.4g})",
        ),
        ("steps", f"{facts['num_steps']} ({facts['num_epochs']:.1f} epochs)"),
        ("signal to noise", f"{facts['snr_per_step'] or 0:.4g} a step, {facts['snr'] or 0:.4g} in all"),
        ("overcharge", "-" if facts["overcharge"] is None else output.per_cent(facts["overcharge"])),
    ]
    for share in (10, 1) if facts["overcharge"] is not None else ():
        size = facts[f"batch_size_overcharge_{share}_percent"]
        from_there = f"from a batch of about {size} on, steps and eta as they are" if size else "at no batch up to N"
        rows.append((f"  below {share} %", from_there))
    if facts["half_batch_costs"] is not None:
        costs = f"half the batch and half of sigma cost {output.per_cent(facts['half_batch_costs'])} more epsilon"
        rows.append(("half the compute", costs))
    if facts["hours"] is not None:
        rows.append(("time", f"{facts['hours']:.2f} hours, {facts['device_hours']:.2f} device-hours"))
        rows += [] if facts["cost"] is None else [("cost", f"{facts['cost']:.2f} in the currency of --price")]
        parts = [f"{name} {part:.3g} s" for name, part in facts["update_seconds"].items() if part is not None]
        rows += [("bound by", f"{facts['bound_by']}; of an update: {', '.join(parts)}")] if parts[1:] else []
    if facts["num_parameters"] is not None:
        speed = f"noise of a million takes this machine {facts['noise_seconds_per_million']:.3g} s"
        rows.append(("parameters", f"{facts['num_parameters']} that train; {speed}"))
    whose = "one image's contribution" if of_image else f"the contribution of {facts['unit']}"
    rows.append(("relation", f"{whose} replaced by zero, N fixed and public (as add-or-remove)"))
    if "more_data" in facts:
        more = facts["more_data"]
        spent, delta = formats.epsilon_text(more["epsilon"]), formats.delta_text(more["delta"])
        rows.append(("with more images", f"{more['num_examples']}: epsilon {spent} at delta {delta}"))
    for name, value in rows:
        output.say(f"{name:<20}{value}")
    for row in facts.get("table", []):
        rate = "" if row["learning_rate"] is None else f"  rate {row['learning_rate']:g}"
        hours = "" if row["hours"] is None else f"  {row['hours']:.2f} h"
        output.say(
            f"{row['kind']}  B {row['batch_size']:>7}  sigma {row['noise_multiplier']:<8.4g} S "
            f"{row['num_steps']:>7}{rate}  "
            f"epsilon {formats.epsilon_text(row['epsilon'])}  {row['num_epochs']:.1f} epochs{hours}"
        )
    for warning in facts["warnings"]:
        output.warn(warning)
