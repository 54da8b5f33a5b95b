"""`sfumato plan`: three of batch size, steps, noise and epsilon give the fourth."""

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
    from sfumato.scaling.plan import plan as solve

    facts = solve(num_examples, delta, accountant, **given)
    if json_:
        output.print_json(facts)
    else:
        _show(facts)


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
