"""A search whose every trial is a real private run, and whose product is the best one's weights
(Papernot and Steinke 2022).

The number of trials is drawn once and stays secret, as do all trials but the one that is published: they lie in the
folder `owner`, under random names, and are deleted when the search ends.
"""

import contextlib
import itertools
import json
import math
import random
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from sfumato import config, randomness
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.selection import Selection
from sfumato.config import Recipe, ResolvedRecipe
from sfumato.data import loading
from sfumato.data.catalogue import Facts
from sfumato.data.examples import Dataset, dataset_digest
from sfumato.errors import InputError, naming
from sfumato.evaluation.scores import judged_right, predict_each_alone, predict_logits
from sfumato.evaluation.trained import load
from sfumato.json_record import pick
from sfumato.planning.resolve import Plan, resolve
from sfumato.planning.solve import selection_of
from sfumato.reporting.page import write_report
from sfumato.run_folder import budget as budgets
from sfumato.run_folder import launch
from sfumato.run_folder.certificate import OTHER_RUNS, OUTSIDE
from sfumato.run_folder.files import lock, read_json, refuse_links, write_atomically, write_json
from sfumato.run_folder.record import RESULT_FILE, BudgetClaim, Result, read
from sfumato.scaling.simulate import try_network
from sfumato.searching.options import SearchOptions
from sfumato.searching.result import Cost, PrivateSearchResult, Selected
from sfumato.searching.space import STEPS, Range, Settings, Space, apply, possible, views_of
from sfumato.training.process import Interrupted, stop_on_sigterm
from sfumato.training.trainer import Trainer

FACTS, SELECTED = "paid-search.json", "selected"
OWNER, TRIALS, PROGRESS = "owner", "trials", "progress.json"
PUBLISHED = ("recipe.toml", "privacy.json", "ledger.jsonl", "metrics.jsonl", "model.safetensors", RESULT_FILE)
"""Of the selected run; besides, a report is written."""
# Trains a resolved recipe privately in a folder; or, with ``resume``, goes on there.
Train = Callable[..., Result]
# How many of the scoring images a finished run judges right; one image moves it by at most 1.
Score = Callable[[Path], int]


def private_search(options: SearchOptions) -> PrivateSearchResult:
    """Makes a secret number of private runs and publishes the best; its epsilon covers the search.

    Guarantee: `paid_search`. Nothing is said that depends on how many runs there are.

    Args:
        options: The recipe's budget is that of the whole search. Scores look at the public images of ``data``, or have
            a positive ``score_noise``; exactly one of both is given.

    Raises:
        InputError: If the search cannot be.
        Interrupted, KeyboardInterrupt: What is finished is kept; the same call goes on.
    """
    noise = options.score_noise
    if (options.data is None) == (noise is None) or not (noise is None or noise > 0):
        raise InputError(
            "--paid compares trials by a score: on public images, by --data, or on held-out private ones, by "
            "--score-noise S above 0 (in images; a hundredth of the split costs little). Give one of them."
        )
    parsed, report, trust = options.parsed(), options.report, options.trust
    space = options.space_for(None)  # other numbers of steps would be other budgets
    shape = parsed.privacy.selection_shape if parsed.privacy else 0.0
    every = paid_recipe(parsed, space, Selection(float(options.trials), shape, noise))
    report(f"about {options.trials:g} private runs are expected; how many is secret: no more is said until the end")
    dataset, scoring = _load(options, parsed, every)
    judges = scoring.held_out_files  # in their places, unreadable ones too: their number is public
    plan = resolve(every, dataset.facts)
    if not plan.private:
        raise InputError(f"--paid: no trial would be private: {plan.why_not_private}. Correct the recipe.")
    refuse_untrainable_choices(plan.recipe, space, dataset.facts, trust)
    trainer = Trainer(dataset, device=options.device, trust=trust)

    def score(where: Path) -> int:
        trained = load(where, trust)
        # What the score's noise covers is one image's own answer.
        predict = predict_logits if noise is None else predict_each_alone
        return judged_right(trained.objective.decision_logits(predict(trained.model, judges)), judges)

    images = randomness.digest([dataset_digest(each) for each in (dataset, scoring)])
    with stop_on_sigterm():
        result = paid_search(plan, space, Path(options.output), images, trainer.run, score, options.budget)
    assert result.epsilon is not None and result.delta is not None, "every trial is private"
    return PrivateSearchResult(
        best=Selected(run=result.run, accuracy=min(max((result.score or 0.0) / len(judges), 0.0), 1.0)),
        expected_trials=float(options.trials),
        recipe=str(Path(result.run) / "recipe.toml"),
        search_data=options.data or "private",
        epsilon_final=result.epsilon,
        epsilon_search_inclusive=result.epsilon,
        cost=expected_cost(plan.recipe, space, float(options.trials)),
        **pick(result, "private", "delta", "noise_multiplier", "held_out", "accuracy", "test_accuracy"),
    )


def _load(options: SearchOptions, parsed: Recipe, every: Recipe) -> tuple[Dataset, Dataset]:
    """The images of all trials, and those by which they are compared."""
    listed = loading.list_images(every.data, options.root, options.report, every.privacy)
    dataset = listed.load()
    if options.data is None:  # the validation split scores, and what is printed is measured on the test images
        return listed.load(on_test=True), dataset
    scoring = options.load(parsed)
    ours, theirs = ((len(each.classes), each.train.shape) for each in (dataset, scoring))
    if ours != theirs:
        raise InputError(
            f"--data {options.data} has {theirs[0]} classes of images {theirs[1]}, the recipe {ours[0]} of {ours[1]}. "
            "Name public images of the same shape and classes."
        )
    return dataset, scoring


def paid_recipe(recipe: Recipe, space: Space, selection: Selection) -> Recipe:
    """The recipe of every trial but for its settings: its budget covers the whole search.

    Raises:
        InputError: If the trials could not all have one and the same budget.
    """
    for cannot_be, why in (
        (STEPS in space.choices, f"all trials have one and the same budget, and other {STEPS} change it. Search none."),
        (recipe.privacy is None, "it spends a privacy budget, but this recipe has none. Give --epsilon E."),
        (recipe.run.seed is not None, "run.seed makes every trial public, so none is private. Leave it out."),
        (recipe.run.log is not None, "run.log would tell of trials that nobody may see. Leave it out."),
    ):
        if cannot_be:
            raise InputError(f"--paid: {why}")
    values = recipe.model_dump()
    values["privacy"] |= {"selected_from": selection.mean, "selection_shape": selection.shape}
    values["privacy"]["score_noise"] = selection.score_noise
    if selection.score_noise is not None:
        values["data"]["split"] = "train"  # the validation split scores
    return config.parse(values)


def paid_search(
    plan: Plan,
    space: Space,
    folder: Path,
    images: str,
    train: Train,
    score: Score,
    budget: Path | None = None,
) -> Result:
    """Draws how many trials there are, makes them, and keeps the best alone; called again, it goes
    on.

    Guarantee: the folder ``selected`` satisfies the epsilon of its certificate, which covers the
    selection, if the number of trials, the other trials and the running time stay secret: each
    trial's settings are drawn independently from one distribution, no trial is given up or judged
    early, the number is not capped, and scores look at public images alone, or at held-out private
    ones through the noise that the certificate counts. One score alone is published, with the run
    that it selected.

    Args:
        plan: Of `paid_recipe`'s: what every trial has in common.
        space: What settings are drawn from, evenly.
        folder: Of the search: new, empty or its own.
        images: Digest of all that trials see, those that score among them.
        budget: The file in which what all trials spend is reserved before the first; a search that was begun keeps its
            reservation.

    Returns:
        The selected run's result, and its ``score``, noise included.

    Raises:
        InputError: If the folder holds something else, the images changed since the search began, or
            another process makes it.
    """
    where = {"data": {"path"}}  # the images are known by their digest, and their place is nobody's business
    named: dict[str, Any] = {"recipe": plan.recipe.model_dump(mode="json", exclude=where), "space": space.as_json()}
    owner, selected = folder / OWNER, folder / SELECTED
    if budget is not None:
        named["budget"] = budgets.read(budget).stated.budget_id
        line = launch.run_line(plan).model_copy(update={"budget": named["budget"], "recipe_sha256": None})
        spent = epsilon(plan.mechanism, plan.delta, selection=plan.selection).epsilon
        if not (folder / FACTS).exists():  # before anything is written
            budgets.read(budget).require([line], spent)
    with _claimed(folder, randomness.digest(named)):
        if not selected.exists():
            run_id, planned = _drawn(plan.recipe, space, owner, images)
            claim = None
            if budget is not None:
                claim = budgets.reserve(budget, line.model_copy(update={"run_id": run_id}), spent)
            best, points = _best(plan.recipe, planned, owner, train, score)
            publish(best, owner / SELECTED, selected, points, claim)
        shutil.rmtree(owner, ignore_errors=True)
        return read(selected / RESULT_FILE, Result).model_copy(update={"run": str(selected)})


@contextlib.contextmanager
def _claimed(folder: Path, identity: str) -> Iterator[None]:
    """Makes a folder the search's own, and this process the one that makes it."""
    facts = folder / FACTS
    refuse_links(folder)
    if not facts.exists() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} holds what no paid search made. Choose another --output.")
    folder.mkdir(parents=True, exist_ok=True)
    with facts.open("a+", encoding="utf-8") as file:
        if not lock(file.fileno(), facts):
            raise InputError(f"another process makes the search in {folder}. Wait for it to end, or stop it first.")
        if facts.stat().st_size == 0:
            file.write(json.dumps({"identity": identity}) + "\n")
            file.flush()
        if read_json(facts) != {"identity": identity}:
            what = f"{folder} holds a search of another recipe or space"
            raise InputError(f"{what}. Give what it was begun with, or another --output: both then add up.")
        yield


def _drawn(recipe: ResolvedRecipe, space: Space, owner: Path, images: str) -> tuple[str, dict[str, Settings]]:
    """The search's id in a budget, and the settings of every trial, by its name: drawn once, on disk before the first
    trial begins.
    """
    path, generator = owner / "selection.json", random.SystemRandom()
    if not path.exists():
        owner.mkdir(mode=0o700, exist_ok=True)
        count = _selection(recipe).draw(generator.random())
        trials = {secrets.token_hex(8): draw(recipe, space, generator) for _ in range(count)}
        write_json(path, {"run_id": secrets.token_hex(16), "images": images, "trials": trials}, 0o600)
    facts = read_json(path)
    if facts["images"] != images:
        raise InputError(
            "the images changed since this search began (of those that train, score or test). Restore them, or search "
            "anew with another --output; both searches then add up."
        )
    return facts["run_id"], facts["trials"]


def _best(
    recipe: ResolvedRecipe, trials: dict[str, Settings], owner: Path, train: Train, score: Score
) -> tuple[Path, int]:
    """Makes all trials and returns the best one's folder, and its score, noise included.

    On disk is how far it is: the scores of finished trials, noise included; and the trial that was stopped with a
    checkpoint, and so lost nothing.
    """
    path, noise = owner / PROGRESS, _selection(recipe).score_noise
    progress = read_json(path) if path.exists() else {"scores": {}, "stopped": None}
    scores: dict[str, int] = progress["scores"]

    def stopped(name: str | None) -> None:
        progress["stopped"] = name
        write_json(path, progress, 0o600)

    for name, settings in trials.items():
        if name in scores:
            continue
        trial = owner / TRIALS / name
        # All trials must be alike. One that was killed lost updates, and is made anew: nobody saw it.
        if trial.exists() and progress["stopped"] != name and not (trial / RESULT_FILE).exists():
            shutil.rmtree(trial)
        stopped(None)
        try:
            while train(apply(recipe, settings), trial, resume=trial.exists()).num_lost:
                shutil.rmtree(trial)
        except Interrupted:
            stopped(name)
            raise
        points = score(trial)
        if noise is not None:
            # Of whole numbers, so that no last bits tell what the noise was added to.
            points += round(random.SystemRandom().gauss(0.0, noise))
        before = max(scores, key=scores.__getitem__, default=None)
        scores[name] = points
        stopped(None)
        if before is not None:
            shutil.rmtree(owner / TRIALS / (name if points <= scores[before] else before))
    best = max(scores, key=scores.__getitem__)
    return owner / TRIALS / best, scores[best]


def publish(trial: Path, place: Path, selected: Path, score: int, claim: BudgetClaim | None) -> None:
    """Copies the public files of a finished run, without its day and its times. (The ledger of a run that is selected
    tells nothing of its launches.)

    Args:
        trial: The run.
        place: Where the copy is made; it has the name under which it will be found.
        selected: Where it is then found, whole.
        score: By which the run was selected.
        claim: What its certificate says of a budget.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name in PUBLISHED:
        if (trial / name).exists():  # a run without steps measures nothing
            write_atomically(place / name, (trial / name).read_bytes())
    told = {**read_json(trial / "privacy.json"), "finished_on": None}
    if claim is not None:
        lines = [OUTSIDE if line == OTHER_RUNS else line for line in told["not_covered"]]
        told |= {"budget": claim.as_json(), "not_covered": lines}
    write_json(place / "privacy.json", told)
    untold = {"run": str(selected), "score": score, "images_per_second": None, "seconds": None}
    write_json(place / RESULT_FILE, {**read_json(trial / RESULT_FILE), **untold})
    write_report(place)
    place.rename(selected)


def _selection(recipe: ResolvedRecipe) -> Selection:
    found = selection_of(recipe.privacy)
    assert found is not None, "paid_recipe has set it"
    return found


def draw(recipe: ResolvedRecipe, space: Space, generator: random.Random) -> Settings:
    """Settings drawn evenly from a space, again until they are possible.

    Raises:
        InputError: If none seem to be.
    """
    for _ in range(10_000):
        settings = {key: _one_of(choices, generator) for key, choices in space.choices.items()}
        if possible(recipe, settings, recipe.training.batch_size) is not None:
            return settings
    raise InputError("--paid: the space offers no possible settings. Look for choices that contradict each other.")


def _one_of(choices: list[Any] | Range, generator: random.Random) -> Any:
    if isinstance(choices, list):
        return generator.choice(choices)
    if choices.log:
        return math.exp(generator.uniform(math.log(choices.low), math.log(choices.high)))
    if choices.is_whole:
        return generator.randint(int(choices.low), int(choices.high))
    return generator.uniform(choices.low, choices.high)


def refuse_untrainable_choices(recipe: ResolvedRecipe, space: Space, facts: Facts, trust: Collection[str] = ()) -> None:
    """Tries what may be drawn before anything is: a search that stops at one of its trials could not go on.

    Keys of one section are tried together, a range at its ends.

    Args:
        recipe: Of the plan that `paid_search` takes.
        space: What settings are drawn from.
        facts: The public numbers of the images.
        trust: Modules that may be imported for a model, each by its full name.

    Raises:
        InputError: Naming the settings and why they cannot be trained.
    """
    sections: dict[str, dict[str, list[Any]]] = {"": {}}
    for key, choices in space.choices.items():
        sections.setdefault(key.split(".")[0], {})[key] = choices.ends() if isinstance(choices, Range) else choices
    for section, values in sections.items():
        for combination in itertools.product(*values.values()):
            settings = dict(zip(values, combination, strict=True))
            trial = possible(recipe, settings, recipe.training.batch_size)
            if trial is None:  # never drawn
                continue
            shown = ", ".join(f"{key} = {value!r}" for key, value in settings.items()) or "the recipe's own settings"
            with naming(f"--paid: no trial could be made with {shown}"):
                resolve(trial, facts)
                if section in ("", "model"):
                    try_network(trial, facts, trust)


def expected_cost(recipe: ResolvedRecipe, space: Space, mean: float) -> Cost:
    """Views that so many trials are expected to differentiate; what a search really did is secret. Averaged over drawn
    settings.
    """
    batch_size, generator = recipe.training.batch_size, random.Random(0)
    drawn = [views_of(apply(recipe, draw(recipe, space, generator)), batch_size) for _ in range(200)]
    views = sum(drawn) / len(drawn) * mean
    return Cost(search_views=views, search_fraction=views / views_of(recipe, batch_size))
