"""`sfumato search --paid`: the best of a secret number of private runs."""

import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from sfumato import config, randomness
from sfumato.cli import output
from sfumato.errors import InputError
from sfumato.reporting import formats
from sfumato.run_folder.ledger import Ledger


def refuse(given: dict[str, Any], sampler: str | None, data: str | None, score_noise: float | None) -> None:
    """Refuses what would void the accounting.

    Raises:
        InputError: Naming it, and why.
    """
    if sampler not in (None, "random"):
        raise InputError(
            f"--paid with --sampler {sampler}: trials must be drawn independently, and {sampler} looks at those "
            "before. Leave --sampler out."
        )
    why = {
        "--prune": "a trial that is given up early would tell of its score. ",
        "--storage": "others who read the storage would learn how many trials there are. ",
        "--worker": "others would learn how many trials there are. ",
        "--batch-size": "trials are whole private runs, not simulations. ",
        "--seeds": "a public seed would make every trial public. ",
    }
    for option, value in given.items():
        if value is not None and value is not False:
            raise InputError(f"--paid does not go with {option}: {why[option]}Leave it out.")
    if data is None and score_noise is None:
        raise InputError(
            "--paid compares trials by a score, and a score on private images is paid for by nobody. Name public "
            "images by --data, or add noise to "
            "it by --score-noise S, the standard deviation in images: a hundredth of the validation split costs little."
        )
    if data is not None and score_noise is not None:
        raise InputError(
            "--score-noise is for scores on private images, but --data names public ones. Leave one of them out."
        )
    if score_noise is not None and not score_noise > 0:
        raise InputError(
            f"--score-noise must be above 0, not {score_noise:g}: without noise the scores are paid for by nobody."
        )


def run(
    recipe: config.Recipe,
    space: Path | None,
    trials: int,
    data: str | None,
    score_noise: float | None,
    folder: Path,
    data_root: Path | None,
    device: str,
    trust: list[str],
) -> dict[str, Any]:
    """The whole search; says nothing that depends on how many trials there are."""
    from sfumato.accounting.selection import Selection
    from sfumato.data import loading as datasets
    from sfumato.data.digest import fingerprint
    from sfumato.evaluation.scores import judged_right, predict_each_alone, predict_logits
    from sfumato.evaluation.trained import load
    from sfumato.planning.resolve import resolve
    from sfumato.reporting.page import write_report
    from sfumato.run_folder.record import Result
    from sfumato.run_folder.verification import verify as verify_run
    from sfumato.scaling.search import private_selection as paid
    from sfumato.scaling.search.space import paper_space, read_space
    from sfumato.scaling.search.trials import searched_data
    from sfumato.training import loop
    from sfumato.training.interrupt import Interrupted, stop_on_sigterm

    plan = resolve(recipe, datasets.facts(recipe.data, data_root, output.note))
    choices = read_space(space) if space else _without_steps(paper_space(plan.recipe))
    shape = recipe.privacy.selection_shape if recipe.privacy else 0.0
    every = paid.paid_recipe(recipe, choices, Selection(float(trials), shape, score_noise))
    output.note(
        f"about {trials} private runs are expected; how many there will be is secret, so nothing more is said until "
        "the end"
    )
    dataset = datasets.load(every.data, data_root, output.note)
    if data is None:  # the validation split scores, and what is printed is measured on the test images
        scoring = dataset
        dataset = datasets.tested_on_test_images(scoring, every.data, data_root, output.note)
    else:
        scoring = public = datasets.load(
            searched_data(recipe, data), None if recipe.data.name == "folder" else data_root, output.note
        )
    judges = scoring.held_out_files  # in their places, unreadable ones too: their number is public
    if data is not None and (len(public.classes), public.shape) != (len(dataset.classes), dataset.shape):
        raise InputError(
            f"--data {data} has {len(public.classes)} classes of images {public.shape}, the recipe's images "
            f"{len(dataset.classes)} of "
            f"{dataset.shape}: no score compares them. Name public images of the same shape and classes."
        )
    plan = resolve(every, dataset.facts)
    if not plan.private:
        raise InputError(f"--paid: no trial would be private: {plan.why_not_private}. Correct the recipe.")

    paid.refuse_untrainable_choices(plan.recipe, choices, dataset.facts, trust)

    def train(trial: config.Recipe, where: Path) -> Result:
        return loop.train(
            resolve(trial, dataset.facts), dataset, where, device=device, resume=where.exists(), trust=trust
        )

    def score(where: Path) -> int:
        trained = load(where, trust)
        # What the score's noise covers is one image's own answer.
        predict = predict_logits if score_noise is None else predict_each_alone
        return judged_right(trained.objective.decision_logits(predict(trained.model, judges)), judges)

    def verify(where: Path) -> Result:
        published = resolve(config.parse(config.read(where / "recipe.toml")), dataset.facts)
        return verify_run(where, published, dataset, Ledger.open(where / "ledger.jsonl"))

    def fingerprint_of_all(key: bytes) -> str:
        return randomness.digest([fingerprint(dataset, key), fingerprint(scoring, key)])

    try:
        with stop_on_sigterm():
            result = paid.paid_search(
                plan.recipe, choices, folder, paid.Trials(train, score, fingerprint_of_all, write_report, verify)
            )
    except (Interrupted, KeyboardInterrupt):
        output.note(
            f"interrupted; everything is kept. Go on with the same command: {shlex.join(['sfumato', *sys.argv[1:]])}"
        )
        raise typer.Exit(1) from None
    selected = Path(result.run)
    return {
        "best": {"run": str(selected), "accuracy": min(max((result.score or 0.0) / len(judges), 0.0), 1.0)},
        "trials": None,
        "expected_trials": float(trials),
        "recipe": str(selected / "recipe.toml"),
        "storage": None,
        "search_data": data or "private",
        "private": result.private,
        "epsilon_final": result.epsilon,
        "epsilon_search_inclusive": result.epsilon,
        "delta": result.delta,
        "noise_multiplier": result.noise_multiplier,
        "predicted_accuracy": None,
        "held_out": result.held_out,
        "accuracy": result.accuracy,
        "test_accuracy": result.test_accuracy,
        "cost": paid.expected_cost(plan.recipe, choices),
    }


def _without_steps(space: Any) -> Any:
    """The paper's grid without other numbers of steps, which would be other budgets."""
    from sfumato.scaling.search.space import STEPS, Space

    return Space(tuple(group for group in space.groups if STEPS not in group.choices))


def show(found: dict[str, Any]) -> None:
    """The result in words."""
    output.say(
        f"selected {found['best']['run']}: {output.per_cent(found['best']['accuracy'])} on the images by which it was "
        "selected"
    )
    output.say(f"held-out accuracy {output.per_cent(found['accuracy'])}")
    output.say(
        f"epsilon {formats.epsilon(found['epsilon_search_inclusive'])} at delta {formats.delta(found['delta'])}, the "
        "search included (by RDP)"
    )
    output.say("not covered: the running time; how many trials there were must stay secret, and nothing here tells")
