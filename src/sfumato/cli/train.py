"""`sfumato train` and `sfumato resume`: training under a recipe's budget."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sfumato import config, recipes
from sfumato.accounting import formats
from sfumato.accounting.mechanism import Accountant
from sfumato.cli import options, output
from sfumato.errors import InputError
from sfumato.reporting.wording import who_guesses
from sfumato.run_folder.ledger import MOST_LOST

if TYPE_CHECKING:
    from sfumato.planning.claims import Guarantee
    from sfumato.run_folder.record import Result
    from sfumato.training.trainer import Repeated


def train(
    recipe: str,
    *,
    epsilon: float | None = None,
    epsilon_per_person: float | None = None,
    images_per_person: int | None = None,
    delta: float | None = None,
    set_: options.Set = None,
    output_: Path | None = None,
    data_root: Path | None = None,
    device: str = "auto",
    accountant: Accountant | None = None,
    calibrate_: Accountant | None = None,
    non_private: bool = False,
    dry_run: bool = False,
    resume_: bool = False,
    max_lost: options.Share = MOST_LOST,
    budget: Path | None = None,
    repeat_: Annotated[int | None, typer.Option(min=1, max=1000)] = None,
    seeds: str | None = None,
    trust: options.Trust = None,
    no_cache: options.NoCache = False,
    json_: bool = False,
) -> None:
    """Trains a classifier under the recipe's privacy budget.

    Args:
        epsilon: Target epsilon of one image: smaller is more private.
        epsilon_per_person: Target epsilon for each person, all images of hers; needs --images-per-person.
        images_per_person: At most so many training images of one person; the rest is left out.
        output_: The run folder; default: runs/<recipe>-<time>.
        calibrate_: The least noise for the target by this accountant, not the recipe's.
        non_private: The same recipe without privacy, to show its price.
        dry_run: Shows every choice, epsilon and the time to expect; trains nothing.
        resume_: Goes on with the run in --output, or begins it; without: the newest.
        repeat_: So many private runs, whose epsilons add up; the same goes on.

    Example:
        sfumato train image-folder --data-root xrays --epsilon 3 --output runs/xrays
    """
    if epsilon is not None and epsilon_per_person is not None:
        raise InputError("--epsilon is for each image, --epsilon-per-person for each person. Give one of them.")
    privacy: dict[str, Any] = {"target_epsilon": epsilon, "delta": delta, "accountant": accountant}
    privacy["max_images_per_person"] = images_per_person
    if epsilon_per_person is not None:
        privacy |= {"target_epsilon": epsilon_per_person, "unit": "person"}
    name, parsed, trusted = asked(recipe, privacy, set_, data_root, trust, calibrate_)
    numbers = None if seeds is None else options.parse_seeds(seeds)
    several = repeat_ is not None or numbers is not None
    again: dict[str, Any] = {"data_root": data_root, "device": device, "non_private": non_private, "trust": trusted}
    again |= {"budget": budget}

    from sfumato.run_folder import launch
    from sfumato.training.trainer import refuse_repeats, repeat
    from sfumato.training.trainer import train as run_training

    if dry_run:
        if several:
            refuse_repeats(parsed, repeat_, numbers)
        if numbers is not None:  # the first of these runs
            parsed = recipes.recipe_of(parsed, {"run.seed": numbers[0]})
        _show_plan(parsed, again, json_)
        if repeat_ is not None and not json_:
            output.say(f"so for each of {repeat_} runs: their epsilons add up")
        return

    folder = output_ or (launch.newest_unfinished(name) if resume_ and not several else launch.new_folder(name))
    again |= {"max_lost": max_lost} | ({"resume": True} if resume_ else {})
    if several:
        with output.interruptible(*([] if output_ else ["--output", str(folder)]), kept="everything is kept"):
            repeated = repeat(parsed, folder, times=repeat_, seeds=numbers, **again)
            output.answer(repeated, json_, _show_repeated)
        return
    if resume_ and output_ is None:
        output.note(f"going on with {folder}")
    command = resume_command(folder, trusted, device, no_cache, max_lost)
    with output.interruptible(command=command, kept="everything is kept"):
        result = run_training(parsed, folder, **again)
    output.answer(result, json_, lambda result: show_result(result, trusted))


def resume(
    run: Path,
    *,
    data_root: Path | None = None,
    device: str = "auto",
    max_lost: options.Share = MOST_LOST,
    budget: Path | None = None,
    trust: options.Trust = None,
    no_cache: options.NoCache = False,
    json_: bool = False,
) -> None:
    """Goes on with an interrupted run; one that is complete shows its result again.

    Example:
        sfumato resume runs/xrays
    """
    from sfumato.training.trainer import resume as go_on

    command = resume_command(run, trust or [], device, no_cache, max_lost, data_root)
    with output.interruptible(command=command, kept="everything is kept"):
        result = go_on(run, data_root=data_root, device=device, max_lost=max_lost, budget=budget, trust=trust or ())
    output.answer(result, json_, lambda result: show_result(result, trust or []))


def _show_repeated(found: "Repeated") -> None:
    for run in found.runs:
        output.say(f"{run.run}: held-out accuracy {output.per_cent(run.accuracy)}")
    spread = "" if found.accuracy_spread is None else f", standard deviation {100 * found.accuracy_spread:.2f} points"
    output.say(f"mean {output.per_cent(found.accuracy)} of {len(found.runs)} runs{spread}")
    guarantee = found.runs[0]
    if not guarantee.holds or found.epsilon_together is None:
        output.say(f"not private: {guarantee.why_not_private}")
        return
    one, all_ = map(formats.epsilon_text, (guarantee.epsilon, found.epsilon_together))
    delta = formats.delta_text(guarantee.delta)
    output.say(
        f"epsilon {one} of one run; {all_} of all {len(found.runs)} together, at delta {delta} for {guarantee.unit}"
    )


def asked(
    recipe: str,
    privacy: Mapping[str, Any],
    assignments: list[str] | None,
    data_root: Path | None,
    trust: list[str] | None,
    calibrated_by: Accountant | None = None,
) -> tuple[str, config.Recipe, list[str]]:
    """The name of a recipe, the recipe under the command line's options, and the modules that these trust.

    Args:
        privacy: What options say of the budget; None: nothing.
    """
    name, values = recipes.read(recipe)
    given = {key: value for key, value in privacy.items() if value is not None}
    if given and "privacy" not in values and "target_epsilon" not in given:
        raise InputError(
            f"privacy.{next(iter(given))} has no meaning without a budget: this recipe has no [privacy] section. Give "
            "--epsilon too."
        )
    for key, value in given.items():
        config.put(values, f"privacy.{key}", value)
    for assignment in assignments or []:
        config.set_value(values, assignment)
    if data_root is not None and config.dotted(values).get("data.name") == "folder":
        values["data"]["path"] = str(data_root)
    if calibrated_by is not None:
        calibrate(values, calibrated_by)
    parsed = config.parse(values)
    return name, parsed, _trusted(parsed, assignments or [], trust or [])


def calibrate(values: dict[str, Any], accountant: Accountant) -> None:
    """Takes a recipe's printed noise out, so that it is solved for under an accountant.

    Raises:
        InputError: If there is no target to meet, or batch and steps are not both given.
    """
    given = config.dotted(values)
    if given.get("privacy.target_epsilon") is None:
        raise InputError("the recipe has no target epsilon for --calibrate to meet. Give --epsilon, or leave it out.")
    if None in (given.get(f"training.{key}") for key in ("batch_size", "num_steps")):
        raise InputError(
            "--calibrate solves for the noise alone. Leave it out, or give --set training.batch_size=B --set "
            "training.num_steps=T."
        )
    config.put(values, "privacy.noise_multiplier", None)
    config.put(values, "privacy.accountant", accountant)


def _trusted(recipe: config.Recipe, assignments: list[str], trust: list[str]) -> list[str]:
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


def _show_plan(parsed: config.Recipe, given: dict[str, Any], json_: bool) -> None:
    from sfumato.data import loading as datasets
    from sfumato.json_record import finite, pick
    from sfumato.planning.claims import claims
    from sfumato.planning.resolve import resolve, resolve_without_privacy
    from sfumato.run_folder import launch
    from sfumato.training.trainer import expected_seconds

    data_root, non_private = given["data_root"], given["non_private"]
    asked = parsed.model_copy(update={"privacy": None}) if non_private else parsed
    listed = datasets.list_for(asked, data_root, output.note)
    listed.report_first()
    held_out, num_held_out = listed.judged_by(datasets.is_judged_on_test(asked))
    plan = (resolve_without_privacy if non_private else resolve)(parsed, listed.facts)
    launch.require_room([dataclasses.replace(plan, budget=given["budget"])])
    seconds = expected_seconds(plan, listed.facts, num_held_out, given["device"], given["trust"])
    mechanism = plan.mechanism
    claimed = claims(plan, mechanism)
    facts = claimed.as_json() | pick(mechanism, "batch_size", "sampling_prob", "num_steps", "num_examples")
    facts |= {
        "noise_multiplier": finite(mechanism.noise_multiplier),
        "expected_seconds": seconds,
        "classes": listed.classes,
        "held_out": held_out,
        "num_held_out": num_held_out,
        "recipe": plan.recipe.model_dump(mode="json", exclude_none=True),
        "choices": [vars(choice) for choice in plan.choices],
        "warnings": plan.warnings,
        "tip": plan.tip,
    }
    if json_:
        output.print_json(facts)
        return
    chosen = [f"chosen: {choice.key} = {choice.value} ({choice.why})" for choice in plan.choices]
    for line in [*config.to_toml(plan.recipe).split("\n"), *chosen]:
        output.say(line)
    for warning in plan.warnings:
        output.warn(warning)
    if plan.tip is not None and not any(plan.tip in warning for warning in plan.warnings):
        output.note(f"tip: {plan.tip}")
    if plan.private:
        _show_guarantee(claimed)
    else:
        output.say(f"not private: {plan.why_not_private}")
    privacy = plan.recipe.privacy
    what = "people" if privacy is not None and privacy.person_sampling == "persons" else "images"
    what += " and canaries" if plan.recipe.audit.canaries else ""
    size = f"{mechanism.num_steps} updates of about {mechanism.batch_size} of {mechanism.num_examples} {what}"
    output.say(f"{size}; about {seconds / 60:.1f} minutes here")


def _show_guarantee(guarantee: "Guarantee") -> None:
    if not guarantee.holds:
        return
    how = str(guarantee.accountant).upper()
    if guarantee.epsilon_rdp is not None and guarantee.accountant != "rdp":
        how += f"; by RDP {formats.epsilon_text(guarantee.epsilon_rdp)}"
    epsilon, delta = formats.epsilon_text(guarantee.epsilon), formats.delta_text(guarantee.delta)
    output.say(f"epsilon {epsilon} at delta {delta} for the contribution of {guarantee.unit} replaced by zero ({how})")
    if guarantee.epsilon_image is not None:
        output.say(f"epsilon {formats.epsilon_text(guarantee.epsilon_image)} for one image alone")
    elif guarantee.max_images_per_person is not None and not guarantee.of_persons:
        of_person, images = formats.epsilon_text(guarantee.epsilon_person), guarantee.max_images_per_person
        output.say(f"epsilon {of_person} for all of up to {images} images of one person")
    if guarantee.attacker is not None:
        output.say(who_guesses(guarantee.attacker, of_persons=guarantee.of_persons))


def show_result(result: "Result", trust: list[str]) -> None:
    """What a run reached and what it promises."""
    shares = (result.accuracy, result.accuracy_last, result.balanced_accuracy, result.majority_rate)
    accuracy, last, balanced, majority = map(output.per_cent, shares)
    low, high = map(output.per_cent, result.accuracy_interval or (None, None))
    accuracies = f"held-out accuracy {accuracy} ({low} to {high}; last weights {last}), balanced {balanced}"
    output.say(f"{accuracies}; always the most frequent answer: {majority}")
    output.print_augtest(result.test_views, result.accuracy_augtest_vote, result.accuracy_augtest_mean)
    if result.holds:
        _show_guarantee(result)
        if result.num_lost:
            lost = f"{result.num_lost} of {result.num_steps} updates were lost in crashes"
            output.say(f"{lost}: they count for epsilon, and the model has {result.num_applied}")
    else:
        output.say(f"not private: {result.why_not_private}")
    output.say(f"certificate {Path(result.run) / 'privacy.json'}")
    output.say(f"report      {Path(result.run) / 'report.html'}")
    output.say(f"use it      sfumato predict {shlex.join([result.run, *trust_options(trust)])} IMAGE...")


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
