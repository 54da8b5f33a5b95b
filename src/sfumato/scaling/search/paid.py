"""A search whose every trial is a real private run, and whose product is the best one's weights (Papernot and Steinke 2022).

The number of trials is drawn once and stays secret, as do all trials but the one that is published: they lie in a folder that
only the owner may enter, under names that say nothing of their order, and are deleted when the search ends.
"""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfumato import config, randomness, run_folder
from sfumato.accounting.selection import Selection
from sfumato.config import Recipe
from sfumato.errors import InputError
from sfumato.randomness import Stream, Streams
from sfumato.run_folder import read_json, write_json
from sfumato.scaling.search.simulations import work
from sfumato.scaling.search.space import STEPS, Range, Settings, Space, apply, possible

SECRET, SELECTED, FACTS = "secret", "selected", "paid-search.json"

# Trains a recipe privately in a folder, or goes on there.
TrainPrivately = Callable[[Recipe, Path], dict[str, Any]]
# How many of the scoring images a finished run judges right.
Score = Callable[[Path], int]


def paid_recipe(recipe: Recipe, space: Space, selection: Selection) -> Recipe:
    """The recipe of every trial but for its settings: its budget covers the whole search.

    Raises:
        InputError: If the trials could not all have one and the same budget.
    """
    if STEPS in space.choices:
        raise InputError(f"--paid: every trial must have one and the same budget, but other {STEPS} change it. Take it out of the space.")
    if recipe.privacy is None:
        raise InputError("--paid spends a privacy budget, but this recipe has none. Give it a [privacy] section, or --epsilon E.")
    if recipe.run.seed is not None:
        raise InputError("--paid: run.seed makes every trial public, so none is private. Leave it out.")
    values = recipe.model_dump()
    values["privacy"] |= {"selected_from": selection.mean, "selection_shape": selection.shape, "score_noise": selection.score_noise}
    if selection.score_noise is not None:
        values["data"]["split"] = "train"  # the validation split scores
    return config.parse(values)


def paid_search(recipe: Recipe, space: Space, folder: Path, train: TrainPrivately, score: Score) -> dict[str, Any]:
    """Draws how many trials there are, makes them, and keeps the best alone; called again, it goes on.

    Guarantee: the folder ``selected`` satisfies the epsilon of its certificate, which covers the selection, if the number of
    trials, the other trials and the running time stay secret: each trial's settings are drawn independently from one
    distribution, no trial is given up or judged early, the number is not capped, and scores look at public images alone, or at held-out private ones
    through the noise that the certificate counts. One score alone is published, with the run that it selected.

    Args:
        recipe: Resolved from `paid_recipe`'s: what every trial has in common.
        space: What settings are drawn from, evenly.
        folder: Of the search.
        train: Makes one trial.
        score: Compares them, before noise.

    Returns:
        The selected run's result, and its ``score``, noise included.

    Raises:
        InputError: If the folder holds another search.
    """
    secret, selected = folder / SECRET, folder / SELECTED
    identity = randomness.digest({"recipe": recipe.model_dump(mode="json"), "space": space.as_json()})
    _claim(folder, identity)
    if not selected.exists():
        streams = _begin(secret, identity)
        privacy = recipe.privacy
        assert privacy is not None and privacy.selected_from is not None
        selection = Selection(privacy.selected_from, privacy.selection_shape, privacy.score_noise)
        best: tuple[int, Path] | None = None
        for index in range(selection.draw(_uniform(streams.stream("number of trials")))):
            trial = secret / bytes(streams.stream("name", index).bytes(8)).hex()
            train(apply(recipe, draw(recipe, space, streams.stream("settings", index))), trial)
            found = score(trial)
            if selection.score_noise is not None:
                found = round(found + selection.score_noise * _gaussian(streams.stream("score", index)))
            if best is None or found > best[0]:
                best = found, trial
        assert best is not None, "there is at least one trial"
        write_json(best[1] / "result.json", {**read_json(best[1] / "result.json"), "run": str(selected), "score": best[0]})
        os.rename(best[1], selected)
    if secret.exists():
        run_folder.delete_key(secret)
        shutil.rmtree(secret)
    return read_json(selected / "result.json")


def _claim(folder: Path, identity: str) -> None:
    """Makes a folder the search's own: what lies there under its names is later deleted."""
    facts = folder / FACTS
    if not facts.exists():
        if (folder / SECRET).exists() or (folder / SELECTED).exists():
            raise InputError(f"{folder} has a folder {SECRET} or {SELECTED} that no search made. Choose another --output.")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(facts, {"identity": identity})
    if read_json(facts).get("identity") != identity:
        raise InputError(f"{folder} holds a search of another recipe or space. Give what it was begun with, or another --output: both then add up.")


def _begin(secret: Path, identity: str) -> Streams:
    """The search's own key, drawn once: the number of trials and all their settings follow from it."""
    secret.mkdir(mode=0o700, exist_ok=True)
    if not (secret / run_folder.KEY_FILE).exists():
        run_folder.write_key(secret, randomness.new_key())
    return Streams(run_folder.read_key(secret), {"search": identity}, {})


def draw(recipe: Recipe, space: Space, stream: Stream) -> Settings:
    """Settings drawn evenly from a space, again until they are possible.

    Raises:
        InputError: If none seem to be.
    """
    for _ in range(10_000):
        settings: Settings = {}
        for key, choices in space.choices.items():
            uniform = _uniform(stream)
            settings[key] = choices[int(uniform * len(choices))] if isinstance(choices, list) else _between(choices, uniform)
        try:
            batch_size = recipe.training.batch_size
            assert batch_size is not None
            if possible(apply(recipe, settings), batch_size):
                return settings
        except InputError:
            continue
    raise InputError("--paid: the space offers no possible settings. Look for choices that contradict each other.")


def _between(range: Range, uniform: float) -> float:
    if range.log:
        return range.low * (range.high / range.low) ** uniform
    if isinstance(range.low, int) and isinstance(range.high, int):
        return range.low + int(uniform * (range.high - range.low + 1))
    return range.low + uniform * (range.high - range.low)


def _uniform(stream: Stream) -> float:
    """In [0, 1), of 53 bits."""
    return int(stream.uint64(1)[0] >> 11) / 2**53


def _gaussian(stream: Stream) -> float:
    """Standard normal, by Box and Muller. What it is added to must be rounded: its last bits would tell of what they were added to."""
    radius, angle = 1 - _uniform(stream), _uniform(stream)
    return math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)


def expected_cost(recipe: Recipe, space: Space) -> dict[str, Any]:
    """Views that the search is expected to differentiate; what it really did is secret. Averaged over drawn settings."""
    privacy, training = recipe.privacy, recipe.training
    assert privacy is not None and privacy.selected_from is not None and training.batch_size is not None
    streams = Streams(randomness.key_from_seed(0), {}, {})
    count = 200
    drawn = [apply(recipe, draw(recipe, space, streams.stream("settings", i))) for i in range(count)]
    mean = sum(work(settings, training.batch_size, 1) for settings in drawn) / count
    return {"search_views": mean * privacy.selected_from, "search_fraction": mean * privacy.selected_from / work(recipe, training.batch_size, 1)}
