"""A search by private runs, whole: from a recipe to the best of a secret number of them."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sfumato import config, randomness
from sfumato.accounting.selection import Selection
from sfumato.data import loading
from sfumato.data.digest import fingerprint
from sfumato.errors import InputError
from sfumato.evaluation.scores import judged_right, predict_each_alone, predict_logits
from sfumato.evaluation.trained import load
from sfumato.planning.classifiers import with_updates_alone
from sfumato.planning.resolve import resolve
from sfumato.recipes import recipe_of
from sfumato.reporting.lines import note
from sfumato.reporting.page import write_report
from sfumato.run_folder.certificate import public_inputs
from sfumato.run_folder.files import refuse_among_images
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import Result
from sfumato.run_folder.verification import verify as verify_run
from sfumato.scaling.search import private_selection as selection
from sfumato.scaling.search.result import Cost, PrivateSearchResult, Selected
from sfumato.scaling.search.space import STEPS, Space, paper_space, read_space
from sfumato.scaling.search.trials import searched_data
from sfumato.training.interrupt import stop_on_sigterm
from sfumato.training.trainer import Trainer


def private_search(
    recipe: config.Recipe | Mapping[str, Any] | str | Path,
    expected_trials: float,
    *,
    output: Path | str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    space: Space | Path | str | None = None,
    data: str | None = None,
    score_noise: float | None = None,
    data_root: Path | str | None = None,
    device: str = "auto",
    trust: Collection[str] = (),
    report: Callable[[str], None] = note,
) -> PrivateSearchResult:
    """Makes a secret number of private runs and publishes the best; its epsilon covers the search.

    Guarantee: `sfumato.scaling.search.private_selection`. Nothing is said that depends on how many
        runs there are.

    Args:
        recipe: Of the runs, as in `sfumato.train`; its budget is that of the whole search.
        expected_trials: How many runs are made in the mean.
        output: The folder of the search; what an earlier call left there is gone on with.
        space: What may be changed, or the TOML file that says so; default: the grid of Sander et
            al. (2022) without other numbers of steps, which would be other budgets.
        data: Public images that score the runs; or
        score_noise: noise on the number of private validation images that are judged right, in
        images. settings, data_root, device, trust: See `sfumato.train`.
        report: Takes lines about what is loaded; default: stderr.

    Raises:
        InputError: If the search cannot be.
        Interrupted, KeyboardInterrupt: Everything is kept; the same call goes on.
    """
    refuse_scores(data, score_noise)
    parsed = recipe_of(recipe, settings)
    folder, root = Path(output), None if data_root is None else Path(data_root)
    refuse_among_images(folder, parsed.data)
    parsed.model.refuse_missing_weights()
    parsed = with_updates_alone(parsed, "search")
    plan = resolve(parsed, loading.facts(parsed.data, root, report))
    choices = (
        space
        if isinstance(space, Space)
        else _without_steps(paper_space(plan.recipe))
        if space is None
        else read_space(Path(space))
    )
    shape = parsed.privacy.selection_shape if parsed.privacy else 0.0
    every = selection.paid_recipe(parsed, choices, Selection(float(expected_trials), shape, score_noise))
    report(
        f"about {expected_trials:g} private runs are expected; how many there will be is secret, "
        "so nothing more is said until the end"
    )
    listed = loading.list_images(every.data, root, report)
    dataset = listed.load()
    if data is None:  # the validation split scores, and what is printed is measured on the test images
        scoring = dataset
        dataset = listed.load(on_test=True)
    else:
        scoring = loading.load(searched_data(parsed, data), None if parsed.data.name == "folder" else root, report)
        if (len(scoring.classes), scoring.shape) != (len(dataset.classes), dataset.shape):
            raise InputError(
                f"--data {data} has {len(scoring.classes)} classes of images {scoring.shape}, the "
                f"recipe's images {len(dataset.classes)} of {dataset.shape}: no score compares "
                "them. Name public images of the same shape and classes."
            )
    judges = scoring.held_out_files  # in their places, unreadable ones too: their number is public
    trainer = Trainer(dataset, device=device, trust=trust)
    plan = resolve(every, dataset.facts)
    if not plan.private:
        raise InputError(f"--paid: no trial would be private: {plan.why_not_private}. Correct the recipe.")
    selection.refuse_untrainable_choices(plan.recipe, choices, dataset.facts, trust)

    def train(trial: config.Recipe, where: Path) -> Result:
        return trainer.run(trial, where, resume=where.exists())

    def score(where: Path) -> int:
        trained = load(where, trust)
        # What the score's noise covers is one image's own answer.
        predict = predict_logits if score_noise is None else predict_each_alone
        return judged_right(trained.objective.decision_logits(predict(trained.model, judges)), judges)

    def verify(where: Path) -> Result:
        published = resolve(config.parse(config.read(where / "recipe.toml")), dataset.facts)
        return verify_run(where, published, public_inputs(published, dataset), Ledger.open(where / "ledger.jsonl"))

    def fingerprint_of_all(key: bytes) -> str:
        return randomness.digest([fingerprint(dataset, key), fingerprint(scoring, key)])

    trials = selection.Trials(train, score, fingerprint_of_all, write_report, verify)
    with stop_on_sigterm():
        result = selection.paid_search(plan.recipe, choices, folder, trials)
    selected = Path(result.run)
    if result.epsilon is None or result.delta is None:
        raise InputError(f"{selected} states no epsilon: it was altered. Restore the folder from a copy.")
    return PrivateSearchResult(
        best=Selected(run=str(selected), accuracy=min(max((result.score or 0.0) / len(judges), 0.0), 1.0)),
        trials=None,
        expected_trials=float(expected_trials),
        recipe=str(selected / "recipe.toml"),
        storage=None,
        search_data=data or "private",
        private=result.private,
        epsilon_final=result.epsilon,
        epsilon_search_inclusive=result.epsilon,
        delta=result.delta,
        noise_multiplier=result.noise_multiplier,
        predicted_accuracy=None,
        held_out=result.held_out,
        accuracy=result.accuracy,
        test_accuracy=result.test_accuracy,
        cost=Cost(**selection.expected_cost(plan.recipe, choices)),
    )


def refuse_scores(data: str | None, score_noise: float | None) -> None:
    """Refuses scores that nobody would pay for.

    Raises:
        InputError: Unless there is exactly one of public images and a positive noise.
    """
    if data is None and score_noise is None:
        raise InputError(
            "--paid compares trials by a score, and a score on private images is paid for by "
            "nobody. Name public images by --data, or add noise to it by --score-noise S, the "
            "standard deviation in images: a hundredth of the validation split costs little."
        )
    if data is not None and score_noise is not None:
        raise InputError(
            "--score-noise is for scores on private images, but --data names public ones. Leave one of them out."
        )
    if score_noise is not None and not score_noise > 0:
        raise InputError(
            f"--score-noise must be above 0, not {score_noise:g}: without noise the scores are paid for by nobody."
        )


def _without_steps(space: Space) -> Space:
    return Space(tuple(group for group in space.groups if STEPS not in group.choices))
