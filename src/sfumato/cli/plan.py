"""`sfumato plan`: three of batch size, steps, noise and epsilon give the fourth."""

import math
from typing import Annotated, Any

import typer

from sfumato.accounting.mechanism import Accountant
from sfumato.cli import output
from sfumato.errors import InputError
from sfumato.reporting import formats


def plan(
    num_examples: Annotated[int | None, typer.Option(help="N, the number of training images.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta; default: the largest power of ten below 1/N.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="The expected batch qN.")] = None,
    num_steps: Annotated[int | None, typer.Option(help="Number of updates.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="sigma.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon; never exceeded.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Takes every number from this recipe instead.")] = None,
    accountant: Annotated[Accountant, typer.Option(help="pld (tighter) or rdp.")] = "pld",
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Solves for the one of --batch-size, --num-steps, --noise-multiplier and --epsilon that is left out."""
    given: dict[str, Any] = {"batch_size": batch_size, "num_steps": num_steps, "noise_multiplier": noise_multiplier, "epsilon": epsilon}
    if recipe is not None:
        if any(value is not None for value in (*given.values(), num_examples, delta)):
            raise InputError("--recipe states every number itself. Leave out the others, or leave out --recipe.")
        num_examples, delta, given, accountant = _numbers_of(recipe)
    if num_examples is None:
        raise InputError("--num-examples is needed: N, the public number of training images. Give it, or --recipe NAME.")
    facts = solve(num_examples, delta, accountant, **given)
    if json_:
        output.print_json(facts)
    else:
        _show(facts)


def solve(
    num_examples: int,
    delta: float | None,
    accountant: Accountant,
    *,
    batch_size: int | None,
    num_steps: int | None,
    noise_multiplier: float | None,
    epsilon: float | None,
) -> dict[str, Any]:
    """The numbers of a plan, one of the last four solved for."""
    from sfumato.accounting import accountants, calibration, tan
    from sfumato.accounting.mechanism import Mechanism
    from sfumato.config import delta_default

    given = {"batch_size": batch_size, "num_steps": num_steps, "noise_multiplier": noise_multiplier, "epsilon": epsilon}
    left_out = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if len(left_out) != 1:
        verb = "all are given" if not left_out else f"{', '.join(left_out)} are left out"
        raise InputError(f"three of --batch-size, --num-steps, --noise-multiplier and --epsilon give the fourth, but {verb}. Leave out exactly one.")
    if num_examples < 1:
        raise InputError(f"--num-examples must be at least 1, not {num_examples}.")
    delta = delta_default(num_examples) if delta is None else delta
    if not 0 < delta < 1:
        raise InputError(f"--delta must lie between 0 and 1, not {delta:g}. A power of ten below 1/N is usual.")
    budget: dict[str, Any] = {"num_examples": num_examples, "target_epsilon": epsilon, "delta": delta, "accountant": accountant}
    if noise_multiplier is None:
        assert batch_size is not None and num_steps is not None
        noise_multiplier = calibration.solve_noise_multiplier(batch_size=batch_size, num_steps=num_steps, **budget)
    elif num_steps is None:
        assert batch_size is not None
        num_steps = calibration.solve_num_steps(batch_size=batch_size, noise_multiplier=noise_multiplier, **budget)
    elif batch_size is None:
        assert num_steps is not None
        batch_size = calibration.solve_batch_size(num_steps=num_steps, noise_multiplier=noise_multiplier, **budget)
    assert batch_size is not None and num_steps is not None
    mechanism = Mechanism(num_examples, batch_size, noise_multiplier, num_steps)
    spent = accountants.epsilon(mechanism, delta, accountant)
    warnings = [f"delta = {delta:g} is more than 1/N = {1 / num_examples:.3g}. Choose a smaller one."] if delta > 1 / num_examples else []
    if 0 < noise_multiplier < 0.5:
        warnings.append("below sigma = 0.5 no budget is meaningful: take a larger batch with more noise (TAN, Figure 2)")
    elif 0 < noise_multiplier < 2:
        warnings.append("below sigma = 2 a budget is overcharged: a larger batch with as much more noise spends less (TAN, Figure 2)")
    if spent.note:
        warnings.append(spent.note)

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "epsilon": finite(spent.epsilon),
        "epsilon_rdp": finite(spent.epsilon_rdp),
        "epsilon_pld": finite(spent.epsilon_pld),
        "epsilon_tan": finite(tan.epsilon_tan(mechanism, delta)),
        "delta": delta,
        "accountant": spent.accountant,
        "noise_multiplier": noise_multiplier,
        "batch_size": batch_size,
        "num_examples": num_examples,
        "sampling_prob": mechanism.sampling_prob,
        "num_steps": num_steps,
        "num_epochs": num_steps * mechanism.sampling_prob,
        "snr_per_step": finite(tan.snr_per_step(mechanism)),
        "snr": finite(tan.snr(mechanism)),
        "overcharge": finite(tan.overcharge(mechanism, delta, spent.epsilon)),
        "warnings": warnings,
    }


def _numbers_of(recipe: str) -> tuple[int, float | None, dict[str, Any], Accountant]:
    """N, delta, the four quantities and the accountant of a recipe whose data set has a public N."""
    from sfumato import config
    from sfumato.cli.train import find_recipe
    from sfumato.data import facts

    _, values = find_recipe(recipe)
    parsed = config.parse(values)
    if parsed.privacy is None:
        raise InputError(f"recipe {recipe} has no [privacy] section, so there is nothing to plan.")
    known = facts.public_facts(parsed.data)
    if known is None:
        raise InputError(f"recipe {recipe} does not fix the number of images. Use `sfumato train {recipe} --dry-run` with your data.")
    privacy, training = parsed.privacy, parsed.training
    given: dict[str, Any] = {
        "batch_size": training.batch_size,
        "num_steps": training.num_steps,
        "noise_multiplier": privacy.noise_multiplier,
        "epsilon": privacy.target_epsilon,
    }
    if None not in given.values():
        given["epsilon"] = None  # what the printed numbers spend
    return known.num_examples, privacy.delta, given, privacy.accountant


def _show(facts: dict[str, Any]) -> None:
    rows = [
        ("epsilon", f"{formats.epsilon(facts['epsilon'])} at delta {facts['delta']:g} ({facts['accountant']})"),
        (
            "by RDP / PLD",
            f"{formats.epsilon(facts['epsilon_rdp'])} / {'-' if facts['epsilon_pld'] is None else formats.epsilon(facts['epsilon_pld'])}",
        ),
        ("by TAN, a guide", f"{formats.epsilon(facts['epsilon_tan'])}  never part of a certificate"),
        ("noise multiplier", f"{facts['noise_multiplier']:.4g}"),
        ("batch size", f"{facts['batch_size']} expected, of {facts['num_examples']} (q = {facts['sampling_prob']:.4g})"),
        ("steps", f"{facts['num_steps']} ({facts['num_epochs']:.1f} epochs)"),
        ("signal to noise", f"{facts['snr_per_step'] or 0:.4g} a step, {facts['snr'] or 0:.4g} in all"),
        ("overcharge", "-" if facts["overcharge"] is None else output.per_cent(facts["overcharge"])),
    ]
    for name, value in rows:
        print(f"{name:<18}{value}")
    print("relation          one image's contribution replaced by zero, N fixed and public (as add-or-remove)")
    for warning in facts["warnings"]:
        output.warn(warning)
