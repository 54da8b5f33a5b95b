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
from sfumato.run_folder.ledger import MOST_LOST

if TYPE_CHECKING:
    from sfumato.planning.claims import Claims
    from sfumato.run_folder.record import Result


def train(
    recipe: options.Recipe,
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon of one image: smaller is more private.")] = None,
    epsilon_per_person: Annotated[
        float | None,
        typer.Option(help="Target epsilon for each person, all images of hers; needs --images-per-person."),
    ] = None,
    images_per_person: options.ImagesPerPerson = None,
    delta: options.Delta = None,
    set_: options.Set = None,
    output_folder: options.Output = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    accountant: Annotated[Accountant | None, typer.Option(help="pld (tighter) or rdp.")] = None,
    calibrate_by: Annotated[
        Accountant | None,
        typer.Option("--calibrate", help="The least noise for the target by this accountant, not the recipe's."),
    ] = None,
    non_private: Annotated[
        bool, typer.Option("--non-private", help="The same recipe without privacy, to show its price.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Shows every choice, epsilon and the time to expect; trains nothing.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Goes on with the run in --output, or begins it; without: the newest."),
    ] = False,
    max_lost: options.MaxLost = MOST_LOST,
    times: Annotated[
        int | None,
        typer.Option(
            "--repeat", min=1, max=1000, help="So many private runs, whose epsilons add up; the same goes on."
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="One run for each, such as 0..4: to compare, not private.")] = None,
    trust: options.Trust = None,
    no_cache: options.NoCache = False,
    json_: options.Json = False,
) -> None:
    """Trains a classifier under the recipe's privacy budget."""
    name, values = recipes.read(recipe)
    if epsilon is not None and epsilon_per_person is not None:
        raise InputError("--epsilon is for each image, --epsilon-per-person for each person. Give one of them.")
    override(
        values,
        epsilon=epsilon if epsilon_per_person is None else epsilon_per_person,
        unit=None if epsilon_per_person is None else "person",
        images_per_person=images_per_person,
        delta=delta,
        accountant=accountant,
        assignments=set_ or [],
        data_root=data_root,
    )
    if calibrate_by is not None:
        calibrate(values, calibrate_by)
    parsed = config.parse(values)
    trusted = trusted_modules(parsed, set_ or [], trust or [])

    if dry_run:
        if times is not None or seeds is not None:
            parsed = _one_of_them(parsed, times, seeds)
        _show_plan(parsed, data_root, device, non_private, trusted, json_)
        if times is not None and not json_:
            output.say(f"so for each of {times} runs: their epsilons add up")
        return

    from sfumato.run_folder import launch
    from sfumato.training.trainer import train as run_training

    again: dict[str, Any] = {"data_root": data_root, "device": device, "non_private": non_private, "trust": trusted}
    again["max_lost"] = max_lost
    if times is not None or seeds is not None:
        folder = output_folder or launch.new_folder(name)
        with output.interruptible(*([] if output_folder else ["--output", str(folder)]), kept="everything is kept"):
            _repeat(parsed, folder, times, seeds, again | ({"resume": True} if resume else {}), json_)
        return
    folder = output_folder or (launch.newest_unfinished(name) if resume else launch.new_folder(name))
    if resume and output_folder is None:
        output.note(f"going on with {folder}")
    with output.interruptible(
        command=resume_command(folder, trusted, device, no_cache, max_lost), kept="everything is kept"
    ):
        result = run_training(parsed, folder, resume=resume, **again)
    output.answer(result, json_, lambda result: show_result(result, trusted))


def _one_of_them(recipe: config.Recipe, times: int | None, seeds: str | None) -> config.Recipe:
    """The first of the runs that `_repeat` would train."""
    from sfumato.training.repeated import refuse_repeats

    named = None if seeds is None else options.parse_seeds(seeds)
    refuse_repeats(recipe, times, named)
    return recipe if named is None else recipes.recipe_of(recipe, {"run.seed": named[0]})


def _repeat(
    recipe: config.Recipe, folder: Path, times: int | None, seeds: str | None, again: dict[str, Any], json_: bool
) -> None:
    from sfumato.training.repeated import repeat

    found = repeat(recipe, folder, times=times, seeds=None if seeds is None else options.parse_seeds(seeds), **again)
    if json_:
        output.print_json(found.as_json())
        return
    for run in found.runs:
        output.say(f"{run.run}: held-out accuracy {output.per_cent(run.accuracy)}")
    spread = "" if found.accuracy_spread is None else f", standard deviation {100 * found.accuracy_spread:.2f} points"
    output.say(f"mean {output.per_cent(found.accuracy)} of {len(found.runs)} runs{spread}")
    guarantee = found.runs[0].guarantee
    if guarantee is None or found.epsilon_together is None:
        output.say(f"not private: {found.runs[0].why_not_private}")
        return
    one, all_, delta = (
        formats.epsilon_text(guarantee.epsilon),
        formats.epsilon_text(found.epsilon_together),
        formats.delta_text(guarantee.delta),
    )
    output.say(
        f"epsilon {one} of one run; {all_} of all {len(found.runs)} together, at delta {delta} for {guarantee.unit}"
    )


def override(
    values: dict[str, Any],
    *,
    epsilon: float | None,
    delta: float | None,
    accountant: str | None,
    assignments: list[str],
    data_root: Path | None,
    unit: str | None = None,
    images_per_person: int | None = None,
) -> None:
    """Applies the command line's options to a recipe's values."""
    for option, key, value in (
        ("--epsilon", "target_epsilon", epsilon),
        ("--epsilon-per-person", "unit", unit),
        ("--images-per-person", "max_images_per_person", images_per_person),
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


def asked(
    recipe: str,
    *,
    epsilon: float | None,
    delta: float | None,
    assignments: list[str] | None,
    data_root: Path | None,
    trust: list[str] | None,
) -> tuple[str, config.Recipe, list[str]]:
    """The name of a recipe, the recipe under the command line's options, and the modules that these trust."""
    name, values = recipes.read(recipe)
    override(values, epsilon=epsilon, delta=delta, accountant=None, assignments=assignments or [], data_root=data_root)
    parsed = config.parse(values)
    return name, parsed, trusted_modules(parsed, assignments or [], trust or [])


def calibrate(values: dict[str, Any], accountant: Accountant) -> None:
    """Takes a recipe's printed noise out, so that it is solved for under an accountant.

    Raises:
        InputError: If there is no target to meet, or batch and steps are not both given.
    """
    privacy = values.get("privacy", {})
    if privacy.get("target_epsilon") is None:
        raise InputError(
            "--calibrate solves for the noise of a target epsilon, and this recipe has none. Give --epsilon, or leave "
            "--calibrate out."
        )
    if None in (values.get("training", {}).get(key) for key in ("batch_size", "num_steps")):
        raise InputError(
            "--calibrate solves for the noise, and batch and steps are not both given. Set training.batch_size and "
            "training.num_steps."
        )
    privacy.pop("noise_multiplier", None)
    privacy["accountant"] = accountant


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
    from sfumato.training.trainer import expected_seconds

    facts_of_data = datasets.facts(parsed.data, data_root, output.note, datasets.images_per_person(parsed))
    plan = (resolve_without_privacy if non_private else resolve)(parsed, facts_of_data)
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
        _show_guarantee(claimed)
    else:
        output.say(f"not private: {plan.why_not_private}")
    privacy = plan.recipe.privacy
    what = "people" if privacy is not None and privacy.person_sampling == "persons" else "images"
    what += " and canaries" if plan.recipe.audit.canaries else ""
    output.say(
        f"{mechanism.num_steps} updates of about {mechanism.batch_size} of "
        f"{mechanism.num_examples} {what}; about {seconds / 60:.1f} minutes here"
    )


def _show_guarantee(claimed: "Claims") -> None:
    guarantee = claimed.guarantee
    if guarantee is None:
        return
    how = guarantee.accountant.upper()
    if claimed.epsilon_rdp is not None and guarantee.accountant != "rdp":
        how += f"; by RDP {formats.epsilon_text(claimed.epsilon_rdp)}"
    epsilon, delta = formats.epsilon_text(guarantee.epsilon), formats.delta_text(guarantee.delta)
    output.say(f"epsilon {epsilon} at delta {delta} for {guarantee.unit} replaced by zero ({how})")
    if guarantee.image is not None:
        output.say(f"epsilon {formats.epsilon_text(guarantee.image)} for one image alone")
    elif guarantee.person is not None and not guarantee.of_persons:
        of_person, images = guarantee.person
        output.say(f"epsilon {formats.epsilon_text(of_person)} for all of up to {images} images of one person")
    if guarantee.attacker is not None:
        whose = "one person" if guarantee.of_persons else "one image"
        output.say(
            f"who has to say whether {whose} took part, at even odds, is right at most "
            f"{formats.per_cent_at_most(guarantee.attacker.accuracy)} of the time"
        )


def show_result(result: "Result", trust: list[str]) -> None:
    """What a run reached and what it promises."""
    balanced, majority = output.per_cent(result.balanced_accuracy), output.per_cent(result.majority_rate)
    low, high = map(output.per_cent, result.accuracy_interval or (None, None))
    output.say(
        f"held-out accuracy {output.per_cent(result.accuracy)} ({low} to {high}; last weights "
        f"{output.per_cent(result.accuracy_last)}), balanced {balanced}; always naming the "
        f"largest class: {majority}"
    )
    output.print_augtest(result.test_views, result.accuracy_augtest_vote, result.accuracy_augtest_mean)
    if result.guarantee is not None:
        _show_guarantee(result)
        _show_lost(result)
    else:
        output.say(f"not private: {result.why_not_private}")
    output.say(f"certificate {Path(result.run) / 'privacy.json'}")
    output.say(f"report      {Path(result.run) / 'report.html'}")
    output.say(f"use it      sfumato predict {shlex.join([result.run, *trust_options(trust)])} IMAGE...")


def _show_lost(result: "Result") -> None:
    if result.num_lost:
        output.say(
            f"{result.num_lost} of {result.num_steps} updates were lost in crashes: they count for epsilon, and the "
            f"model has {result.num_applied}"
        )


def resume_command(
    run: Path, trust: list[str], device: str, no_cache: bool, max_lost: float, data_root: Path | None = None
) -> list[str]:
    """Goes on with a run, as words."""
    words = ["sfumato", "resume", str(run), *trust_options(trust)]
    words += ["--data-root", str(data_root)] if data_root is not None else []
    words += ["--device", device] if device != "auto" else []
    words += ["--max-lost", f"{max_lost:g}"] if max_lost != MOST_LOST else []
    return [*words, "--no-cache"] if no_cache else words


def trust_options(trust: list[str]) -> list[str]:
    """--trust for each module."""
    return [word for module in trust for word in ("--trust", module)]
