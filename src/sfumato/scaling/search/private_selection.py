"""A search whose every trial is a real private run, and whose product is the best one's weights
(Papernot and Steinke 2022).

The number of trials is drawn once and stays secret, as do all trials but the one that is published:
they lie in a folder that only the owner may enter, under names that say nothing of their order, and
are deleted when the search ends. What is published is the same whatever that number was, times
included, but for what the kernel keeps of each file (docs/tan.md).
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from sfumato import config, randomness
from sfumato.accounting.selection import Selection
from sfumato.config import Recipe, ResolvedRecipe
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.budgets import selection_of
from sfumato.randomness import Stream, Streams
from sfumato.run_folder import files, key_file
from sfumato.run_folder.files import read_json, write_atomically
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import Result
from sfumato.run_folder.weights_file import parts
from sfumato.scaling.search.publication import set_times, write_anew
from sfumato.scaling.search.space import STEPS, Range, Settings, Space, apply, possible
from sfumato.scaling.search.trials import work

SECRET, SELECTED, FACTS = "secret", "selected", "paid-search.json"
# In the secret folder, beside the key. Trials have a folder of their own: the links of the secret
# folder would count them.
IMAGES, TRIALS = "images", "trials"


@dataclasses.dataclass(frozen=True)
class Trials:
    """What a search does with trials.

    Attributes:
        train: Trains a recipe privately in a folder, or goes on there.
        score: How many of the scoring images a finished run judges right; one image moves it by at
            most 1.
        fingerprint: HMAC under a key of all images that trials see, those that score among them.
        report: Writes the page about a run into its folder.
        verify: The result of a published run, once its claims are found to be those of its ledger
            and recipe.
    """

    train: Callable[[ResolvedRecipe, Path], object]
    score: Callable[[Path], int]
    fingerprint: Callable[[bytes], str]
    report: Callable[[Path], object]
    verify: Callable[[Path], Result]


def paid_recipe(recipe: Recipe, space: Space, selection: Selection) -> Recipe:
    """The recipe of every trial but for its settings: its budget covers the whole search.

    Raises:
        InputError: If the trials could not all have one and the same budget.
    """
    if STEPS in space.choices:
        raise InputError(
            f"--paid: every trial must have one and the same budget, but other {STEPS} change it. "
            "Take it out of the space."
        )
    if recipe.privacy is None:
        raise InputError(
            "--paid spends a privacy budget, but this recipe has none. Give it a [privacy] section, or --epsilon E."
        )
    if recipe.run.seed is not None:
        raise InputError("--paid: run.seed makes every trial public, so none is private. Leave it out.")
    if recipe.run.keep_key:
        raise InputError("--paid publishes no key, so run.keep_key would keep none. Leave it out.")
    if recipe.run.log is not None:
        raise InputError(
            "--paid publishes no log, since it would tell of trials that nobody may see. Leave out run.log."
        )
    values = recipe.model_dump()
    values["privacy"] |= {
        "selected_from": selection.mean,
        "selection_shape": selection.shape,
        "score_noise": selection.score_noise,
    }
    if selection.score_noise is not None:
        values["data"]["split"] = "train"  # the validation split scores
    return config.parse(values)


def paid_search(recipe: ResolvedRecipe, space: Space, folder: Path, trials: Trials) -> Result:
    """Draws how many trials there are, makes them, and keeps the best alone; called again, it goes
    on.

    Guarantee: the folder ``selected`` satisfies the epsilon of its certificate, which covers the
    selection, if the number of trials, the other trials and the running time stay secret: each
    trial's settings are drawn independently from one distribution, no trial is given up or judged
    early, the number is not capped, and scores look at public images alone, or at held-out private
    ones through the noise that the certificate counts. One score alone is published, with the run
    that it selected. The published files bear the time of the search's start, and nothing in them
    depends on the run's place among the trials.

    Args:
        recipe: Resolved from `paid_recipe`'s: what every trial has in common.
        space: What settings are drawn from, evenly.
        folder: Of the search: new, empty or its own. It is for its owner alone: the kernel keeps
            times that cannot be set.
        trials: What makes and compares them.

    Returns:
        The selected run's result, and its ``score``, noise included.

    Raises:
        InputError: If the folder holds something else, the images changed since the search began,
            another process makes it, or the published run claims another thing than its ledger and
            recipe give.
    """
    where = {"data": {"path"}}  # the images are known by their fingerprint, and their place is nobody's business
    identity = randomness.digest({"recipe": recipe.model_dump(mode="json", exclude=where), "space": space.as_json()})
    secret, selected = folder / SECRET, folder / SELECTED
    with _claimed(folder, identity) as start:
        if not selected.exists():
            folder.chmod(0o700)
            streams = _begin(secret, identity, trials)
            score, best = _best(recipe, space, streams, secret / TRIALS, trials)
            public = secret / TRIALS / SELECTED  # under its later name, which the report bears
            shutil.rmtree(public, ignore_errors=True)
            write_anew(best, public, selected, score)
            trials.report(public)
            os.rename(public, selected)
        _refuse_another_budget(selected, recipe, space)
        result = trials.verify(selected)
        if result.score is None:
            raise InputError(f"{selected / 'result.json'} is damaged: it has no score. Restore it from a copy.")
        if secret.exists():
            set_times(selected, start)
            key_file.delete_key(secret)
            shutil.rmtree(secret)
        os.utime(folder, ns=(start, start))
        return result.model_copy(update={"run": str(selected)})


def _refuse_another_budget(selected: Path, recipe: ResolvedRecipe, space: Space) -> None:
    """The published recipe is one of the search's, but for what the space may change."""
    now = config.releasing_keys(config.parse(config.read(selected / "recipe.toml")))
    for key, value in config.releasing_keys(recipe).items():
        section = key.split(".")[0]
        if section in ("data", "privacy", "training") and key not in space.choices and now.get(key) != value:
            raise InputError(
                f"{selected / 'recipe.toml'} has {key} = {now.get(key)!r}, this search {value!r}: "
                "it was altered, or is another's. Restore it from a copy."
            )


@contextlib.contextmanager
def _claimed(folder: Path, identity: str) -> Iterator[int]:
    """Makes a folder the search's own, since what lies there under its names is later deleted.

    Yields the search's start in nanoseconds: when its first file was written, and so known again
    after a crash.
    """
    facts = folder / FACTS
    if folder.is_dir():
        files.refuse_links(folder)
    if not facts.exists() and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} holds what no paid search made. Choose another --output.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with facts.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another process makes the search in {folder}. Wait for it to end, or stop it first."
            ) from None
        if facts.stat().st_size == 0:
            file.write(json.dumps({"identity": identity}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if read_json(facts) != {"identity": identity}:
            raise InputError(
                f"{folder} holds a search of another recipe or space. Give what it was begun "
                "with, or another --output: both then add up."
            )
        yield facts.stat().st_mtime_ns


def _begin(secret: Path, identity: str, trials: Trials) -> Streams:
    """The search's own key, drawn once: the number of trials, their settings and the noise of their
    scores follow from it.

    They follow from the images, too, so that no other images meet the same. The fingerprint is on
    disk before the first trial; it stays secret, and is deleted with the key.
    """
    (secret / TRIALS).mkdir(mode=0o700, parents=True, exist_ok=True)
    secret.chmod(0o700)
    if not (secret / key_file.KEY_FILE).exists():
        key_file.write_key(secret, randomness.new_key())
    key = key_file.read_key(secret)
    images, kept = trials.fingerprint(hmac.digest(key, b"images of the search", "sha256")), secret / IMAGES
    if not kept.exists():
        write_atomically(kept, images.encode(), 0o600)
    if not hmac.compare_digest(kept.read_bytes(), images.encode()):
        raise InputError(
            "the images changed since this search began (one that trains, scores or tests was "
            "added, removed, altered, relabelled or reordered): going on would compare trials on "
            "other images. Restore the images, or search anew with another --output; both "
            "searches then add up."
        )
    return Streams(key, {"search": identity, "images": images}, {})


def _best(recipe: ResolvedRecipe, space: Space, streams: Streams, folder: Path, trials: Trials) -> tuple[int, Path]:
    """Makes all trials and returns the best one's score, noise included, and its folder."""
    selection = _selection(recipe)
    best: tuple[int, Path] | None = None
    for index in range(selection.draw(_uniform(streams.stream("number of trials")))):
        trial = folder / bytes(streams.stream("name", index).bytes(8)).hex()
        _train_in_one_session(apply(recipe, draw(recipe, space, streams.stream("settings", index))), trial, trials)
        score = trials.score(trial)
        if selection.score_noise is not None:
            score += _score_noise(streams, index, score, trial, selection.score_noise)
        if best is None or score > best[0]:
            best = score, trial
    assert best is not None, "there is at least one trial"
    return best


def _train_in_one_session(recipe: ResolvedRecipe, trial: Path, trials: Trials) -> None:
    """Makes a trial, anew if its updates were drawn afresh on the way.

    That happens where it was cut short and went on in another environment. Nothing of it has been
    released, so making it anew costs nothing; kept, it would be the one trial with other releases
    than the rest, and would tell when it was made.
    """
    trials.train(recipe, trial)
    while sum(line["kind"] == "session" for line in Ledger.open(trial / "ledger.jsonl").lines) > 1:
        discarded = trial.with_name("discarded")
        shutil.rmtree(discarded, ignore_errors=True)
        os.rename(trial, discarded)  # at once: half a run could not go on
        trials.train(recipe, trial)


def _score_noise(streams: Streams, index: int, score: int, trial: Path, stddev: float) -> int:
    """Gaussian noise for a score, rounded before it is added: its last bits would tell of what it
    was added to.

    It follows from the score and the trial's weights, too, as deterministic signatures derive their
    nonces (RFC 6979): in two copies of a search neither two scores nor two trials meet one noise,
    which would give their difference away.
    """
    # Without the header, whose order changes from one writing to the next.
    _, tensors = parts((trial / "model.safetensors").read_bytes())
    weights = hashlib.sha256(tensors).hexdigest()
    of_this = dataclasses.replace(streams, context={**streams.context, "score": score, "weights": weights})
    return round(stddev * _gaussian(of_this.stream("score", index)))


def draw(recipe: ResolvedRecipe, space: Space, stream: Stream) -> Settings:
    """Settings drawn evenly from a space, again until they are possible.

    Raises:
        InputError: If none seem to be.
    """
    for _ in range(10_000):
        settings: Settings = {}
        for key, choices in space.choices.items():
            uniform = _uniform(stream)
            settings[key] = (
                choices[int(uniform * len(choices))] if isinstance(choices, list) else _between(choices, uniform)
            )
        try:
            if possible(apply(recipe, settings), recipe.training.batch_size):
                return settings
        except InputError:
            continue
    raise InputError("--paid: the space offers no possible settings. Look for choices that contradict each other.")


def refuse_untrainable_choices(recipe: ResolvedRecipe, space: Space, facts: Facts, trust: Collection[str] = ()) -> None:
    """Tries what may be drawn before anything is: a trial that cannot be made would end the search,
    and tell when it came.

    Keys of one section are tried together, a range at its ends. Networks of the registry are built
    without memory; those of trusted modules are built, and held to the laws of training and of
    evaluation on made-up images.

    Args:
        recipe: As for `paid_search`.
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
            try:
                trial = apply(recipe, settings)
            except InputError:  # never drawn
                continue
            if not possible(trial, recipe.training.batch_size):
                continue
            try:
                _refuse_untrainable(trial, facts, trust, of_model=section in ("", "model"))
            except InputError as error:
                shown = ", ".join(f"{key} = {value!r}" for key, value in settings.items())
                raise InputError(
                    f"--paid: no trial could be made{' with ' + shown if shown else ''}: {error}"
                ) from None


def _refuse_untrainable(trial: ResolvedRecipe, facts: Facts, trust: Collection[str], of_model: bool) -> None:
    import torch

    from sfumato.clipping.model_check import require_private
    from sfumato.evaluation.row_independence import require_rows_apart
    from sfumato.models import registry
    from sfumato.planning.resolve import resolve

    resolve(trial, facts)
    if not of_model:
        return
    imported = registry.imported_module(trial.model.name) is not None
    with contextlib.nullcontext() if imported else torch.device("meta"):
        model = registry.build(
            trial.model.name,
            image_size=facts.image_size,
            channels=facts.channels,
            num_classes=facts.num_classes,
            options=trial.model.options,
            fix=trial.model.fix,
            seed=0,
            trust=trust,
        )
    if imported:
        row = torch.zeros(1, facts.channels, facts.image_size, facts.image_size)
        require_private(model, row)
        require_rows_apart(model, row)


def _between(range: Range, uniform: float) -> float:
    if range.log:
        return math.exp(math.log(range.low) + uniform * (math.log(range.high) - math.log(range.low)))
    if isinstance(range.low, int) and isinstance(range.high, int):
        return range.low + int(uniform * (range.high - range.low + 1))
    return range.low + uniform * (range.high - range.low)


def _uniform(stream: Stream) -> float:
    """In [0, 1), of 53 bits."""
    return int(stream.uint64(1)[0] >> 11) / 2**53


def _gaussian(stream: Stream) -> float:
    """Standard normal, by Box and Muller."""
    radius, angle = 1 - _uniform(stream), _uniform(stream)
    return math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)


def expected_cost(recipe: ResolvedRecipe, space: Space) -> dict[str, Any]:
    """Views that the search is expected to differentiate; what it really did is secret. Averaged
    over drawn settings.
    """
    batch_size, expected = recipe.training.batch_size, _selection(recipe).mean
    streams = Streams(randomness.key_from_seed(0), {}, {})
    count = 200
    drawn = [apply(recipe, draw(recipe, space, streams.stream("settings", i))) for i in range(count)]
    mean = sum(work(settings, batch_size, 1) for settings in drawn) / count
    return {"search_views": mean * expected, "search_fraction": mean * expected / work(recipe, batch_size, 1)}


def _selection(recipe: ResolvedRecipe) -> Selection:
    found = selection_of(recipe.privacy)
    if found is None:
        raise InputError("--paid: nothing is selected under this recipe. Set privacy.selected_from.")
    return found
