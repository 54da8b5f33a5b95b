"""`sfumato train`: trains under a recipe's budget."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato import config, recipes
from sfumato.accounting.mechanism import Accountant
from sfumato.cli import options, output
from sfumato.errors import InputError
from sfumato.reporting import formats

if TYPE_CHECKING:
    from sfumato.planning.claims import Guarantee
    from sfumato.run_folder.record import Result


def train(
    context: typer.Context,
    recipe: options.Recipe,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon: smaller is more private.")] = None,
    delta: options.Delta = None,
    set_: options.Set = None,
    output_folder: Annotated[
        Path | None, typer.Option("--output", help="The run folder; default: runs/<recipe>-<time>.")
    ] = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    accountant: Annotated[Accountant | None, typer.Option(help="pld (tighter) or rdp.")] = None,
    non_private: Annotated[
        bool, typer.Option("--non-private", help="The same recipe without privacy, to show its price.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Shows every choice, epsilon and the time to expect; trains nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Goes on with the run in --output, or the newest unfinished one.")
    ] = False,
    trust: options.Trust = None,
    no_cache: options.NoCache = False,
    json_: options.Json = False,
) -> None:
    """Trains a classifier under the recipe's privacy budget."""
    if no_cache:
        from sfumato.data import cache

        context.with_resource(cache.switched_off())
    name, values = recipes.read(recipe)
    override(values, epsilon=epsilon, delta=delta, accountant=accountant, assignments=set_ or [], data_root=data_root)
    parsed = config.parse(values)
    trusted = trusted_modules(parsed, set_ or [], trust or [])

    if dry_run:
        _show_plan(parsed, data_root, device, non_private, trusted, json_)
        return

    from sfumato.run_folder import session
    from sfumato.training.interrupt import Interrupted
    from sfumato.training.trainer import train as run_training

    folder = output_folder or (session.newest_unfinished(name) if resume else session.new_folder(name))
    if resume and output_folder is None:
        output.note(f"going on with {folder}")
    try:
        result = run_training(
            parsed,
            folder,
            data_root=data_root,
            device=device,
            non_private=non_private,
            resume=resume,
            trust=trusted,
        )
    except Interrupted as interrupted:
        command = _resume_command(
            recipe, epsilon, delta, set_ or [], folder, data_root, accountant, non_private, device, trusted
        )
        command += " --no-cache" if no_cache else ""
        output.note(f"{interrupted}; everything is kept. Go on with: {command}")
        raise typer.Exit(1) from None
    if json_:
        output.print_json(result.as_json())
    else:
        _show_result(result, trusted)


def override(
    values: dict[str, Any],
    *,
    epsilon: float | None,
    delta: float | None,
    accountant: str | None,
    assignments: list[str],
    data_root: Path | None,
) -> None:
    """Applies the command line's options to a recipe's values."""
    for option, key, value in (
        ("--epsilon", "target_epsilon", epsilon),
        ("--delta", "delta", delta),
        ("--accountant", "accountant", accountant),
    ):
        if value is not None:
            if "privacy" not in values and option != "--epsilon":
                raise InputError(
                    f"{option} has no meaning without a budget: this recipe has no [privacy] "
                    "section. Give --epsilon too."
                )
            values.setdefault("privacy", {})[key] = value
    for assignment in assignments:
        config.set_value(values, assignment)
    if data_root is not None and values.get("data", {}).get("name") == "folder":
        values["data"]["path"] = str(data_root)


def trusted_modules(recipe: config.Recipe, assignments: list[str], trust: list[str]) -> list[str]:
    """The modules that the command line names: by --trust, and in a model's name that was itself
    typed there.

    A recipe file is not enough, since somebody else may have written it.
    """
    typed = any(assignment.partition("=")[0].strip() == "model.name" for assignment in assignments)
    if not typed or recipe.model.name is None:
        return trust
    from sfumato.models.registry import imported_module

    module = imported_module(recipe.model.name)
    return trust if module is None or module in trust else [*trust, module]


def _show_plan(
    parsed: config.Recipe, data_root: Path | None, device: str, non_private: bool, trust: list[str], json_: bool
) -> None:
    from sfumato.data import loading as datasets
    from sfumato.json_record import finite
    from sfumato.planning.claims import claims
    from sfumato.planning.resolve import resolve, resolve_without_privacy
    from sfumato.training.estimate import expected_seconds
    from sfumato.training.loop import refuse_large_groups

    facts_of_data = datasets.facts(parsed.data, data_root, output.note)
    plan = (resolve_without_privacy if non_private else resolve)(parsed, facts_of_data)
    if plan.recipe.privacy is not None and plan.recipe.privacy.max_images_per_person is not None:
        refuse_large_groups(plan, datasets.largest_group(parsed.data, data_root))
    seconds = expected_seconds(plan, facts_of_data, device, trust)
    mechanism = plan.mechanism
    claimed = claims(plan, mechanism)
    facts = {
        **claimed.as_json(),
        "noise_multiplier": finite(mechanism.noise_multiplier),
        "batch_size": mechanism.batch_size,
        "sampling_prob": mechanism.sampling_prob,
        "num_steps": mechanism.num_steps,
        "num_examples": mechanism.num_examples,
        "expected_seconds": seconds,
        "recipe": plan.recipe.model_dump(mode="json", exclude_none=True),
        "choices": [{"key": choice.key, "value": choice.value, "why": choice.why} for choice in plan.choices],
        "warnings": plan.warnings,
    }
    if json_:
        output.print_json(facts)
        return
    for line in config.to_toml(plan.recipe).split("\n"):
        output.say(line)
    for choice in plan.choices:
        output.say(f"chosen: {choice.key} = {choice.value} ({choice.why})")
    for warning in plan.warnings:
        output.warn(warning)
    if plan.private:
        epsilon, by_rdp = formats.epsilon_text(facts["epsilon"]), formats.epsilon_text(facts["epsilon_rdp"])
        output.say(f"epsilon {epsilon} at delta {formats.delta_text(plan.delta)} ({facts['accountant']}; RDP {by_rdp})")
        _show_attacker(claimed.guarantee)
    else:
        output.say(f"not private: {plan.why_not_private}")
    output.say(
        f"{mechanism.num_steps} updates of about {mechanism.batch_size} of "
        f"{mechanism.num_examples} images; about {seconds / 60:.1f} minutes here"
    )


def _show_attacker(guarantee: "Guarantee | None") -> None:
    if guarantee is not None and guarantee.attacker is not None:
        output.say(
            "who has to say whether one image took part, at even odds, is right at most "
            f"{formats.per_cent_at_most(guarantee.attacker.accuracy)} of the time"
        )


def _show_result(result: "Result", trust: list[str]) -> None:
    balanced, majority = output.per_cent(result.balanced_accuracy), output.per_cent(result.majority_rate)
    output.say(
        f"held-out accuracy {output.per_cent(result.accuracy)} (last weights "
        f"{output.per_cent(result.accuracy_last)}), balanced {balanced}; always naming the "
        f"largest class: {majority}"
    )
    output.print_augtest(result.test_views, result.accuracy_augtest_vote, result.accuracy_augtest_mean)
    if (guarantee := result.guarantee) is not None:
        epsilon, by_rdp = formats.epsilon_text(guarantee.epsilon), formats.epsilon_text(result.epsilon_rdp)
        output.say(
            f"epsilon {epsilon} at delta {formats.delta_text(guarantee.delta)}, one image "
            f"replaced by zero (RDP {by_rdp})"
        )
        _show_attacker(guarantee)
    else:
        output.say(f"not private: {result.why_not_private}")
    output.say(f"certificate {Path(result.run) / 'privacy.json'}")
    output.say(f"report      {Path(result.run) / 'report.html'}")
    output.say(f"use it      sfumato predict {shlex.join([result.run, *trust_options(trust)])} IMAGE...")


def _resume_command(
    recipe: str,
    epsilon: float | None,
    delta: float | None,
    assignments: list[str],
    folder: Path,
    data_root: Path | None,
    accountant: str | None,
    non_private: bool,
    device: str,
    trust: list[str],
) -> str:
    words = ["sfumato", "train", recipe]
    for option, value in (
        ("--epsilon", epsilon),
        ("--delta", delta),
        ("--accountant", accountant),
        ("--data-root", data_root),
    ):
        if value is not None:
            words += [option, str(value)]
    for assignment in assignments:
        words += ["--set", assignment]
    words += ["--non-private"] if non_private else []
    words += ["--device", device] if device != "auto" else []
    words += trust_options(trust)
    return shlex.join([*words, "--output", str(folder), "--resume"])


def trust_options(trust: list[str]) -> list[str]:
    """--trust for each module."""
    return [word for module in trust for word in ("--trust", module)]
