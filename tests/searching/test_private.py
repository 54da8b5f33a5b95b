"""Trials that are private runs: one budget, one published, nothing that tells how many there were."""

import hashlib
import json
import math
import os
import shutil
import stat
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from scipy import stats
from sfumato.searching.private_selection import _score_noise, draw, expected_cost, paid_recipe, paid_search
from tests.searching.made_up_trials import PUBLISHED, Trials, decay_of
from tests.searching.one_worker import made_up_search

from sfumato import config
from sfumato.accounting.accountants import epsilon
from sfumato.accounting.calibration import solve_noise_multiplier
from sfumato.accounting.mechanism import Mechanism
from sfumato.accounting.selection import Selection, epsilon_of_best
from sfumato.errors import InputError
from sfumato.randomness import Streams
from sfumato.run_folder.ledger import Ledger
from sfumato.searching.space import STEPS, Group, Range, Space

SPACE = Space((Group("g", {"optimizer.learning_rate": [1.0, 2.0, 4.0, 8.0], "ema.decay": Range(0.5, 0.9)}),))


def recipe(mean=6.0):
    return paid_recipe(made_up_search().recipe, SPACE, Selection(mean, 0.0))


def many_trials(folder, at_least=3):
    """Searches until one has that many trials."""
    for attempt in range(200):
        trials = Trials()
        result = paid_search(recipe(), SPACE, folder / str(attempt), trials)
        if len(trials.made) >= at_least:
            return folder / str(attempt), trials, result
    raise AssertionError("the number of trials is always small")


def test_the_best_trial_alone_is_left_and_nothing_tells_how_many_there_were(tmp_path):
    folder, trials, result = many_trials(tmp_path)
    assert decay_of(Path(result.run)) == max(decay for _, _, decay in trials.made)
    assert sorted(path.name for path in folder.iterdir()) == ["paid-search.json", "selected"]
    left = "".join(str(path) + path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
    assert not any(name in left for name, _, _ in trials.made)
    assert result.run == str(folder / "selected")


def test_a_killed_search_goes_on_with_the_same_trials_and_no_others(tmp_path):
    folder, whole, _ = None, None, None
    for attempt in range(200):
        folder = tmp_path / str(attempt)
        first = Trials(killed_at=2)
        try:
            paid_search(recipe(), SPACE, folder, first)
        except KeyboardInterrupt:
            whole = first
            break
    assert whole is not None
    secret = folder / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o700
    assert all(stat.S_IMODE((secret / name).stat().st_mode) == 0o600 for name in ("key",))
    second = Trials()
    paid_search(recipe(), SPACE, folder, second)
    assert second.made[:2] == first.made  # the same folders and settings
    assert len(second.made) > 2
    third = Trials()
    again = paid_search(recipe(), SPACE, folder, third)
    assert third.made == []
    assert decay_of(Path(again.run)) == max(decay for _, _, decay in second.made)


def test_a_crash_between_selecting_and_forgetting_loses_nothing_and_forgets(tmp_path):
    folder, trials, result = many_trials(tmp_path)
    secret = folder / "secret"
    secret.mkdir()
    (secret / "aabb").mkdir()
    assert paid_search(recipe(), SPACE, folder, Trials()) == result
    assert not secret.exists()


def test_another_search_in_the_same_folder_is_refused(tmp_path):
    killed = Trials(killed_at=0)
    with pytest.raises(KeyboardInterrupt):
        paid_search(recipe(), SPACE, tmp_path, killed)
    with pytest.raises(InputError, match="another recipe or space"):
        paid_search(recipe(7.0), SPACE, tmp_path, killed)


def test_the_number_of_trials_follows_its_distribution(tmp_path):
    """Logarithmic of mean 3: P[K = 1] by its closed form, within four standard errors over 200 searches."""
    counts = Counter()
    searches = 200
    for attempt in range(searches):
        trials = Trials()
        paid_search(recipe(3.0), SPACE, tmp_path / str(attempt), trials)
        counts[len(trials.made)] += 1
    gamma = Selection(3.0, 0.0).gamma
    one = (1 - gamma) / math.log(1 / gamma)
    assert abs(counts[1] / searches - one) < 4 * math.sqrt(one * (1 - one) / searches)
    assert max(counts) > 10  # never capped


def test_settings_are_drawn_evenly_and_independently():
    streams = Streams(bytes(32), {}, {})
    drawn = [draw(recipe(), SPACE, streams.stream("settings", i)) for i in range(2000)]
    rates = Counter(settings["optimizer.learning_rate"] for settings in drawn)
    assert all(abs(count / 2000 - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000) for count in rates.values())
    decays = [settings["ema.decay"] for settings in drawn]
    assert abs(sum(decays) / 2000 - 0.7) < 4 * 0.4 / math.sqrt(12 * 2000)
    assert 0.5 <= min(decays) < 0.51 and 0.89 < max(decays) < 0.9


@pytest.mark.parametrize(
    ("choices", "distribution"),
    [
        (Range(2, 5), stats.randint(2, 6)),  # whole numbers, both ends among them
        (Range(0, 0.8), stats.uniform(0, 0.8)),  # one end is not whole
        (Range(0.5, 4), stats.uniform(0.5, 3.5)),
        (Range(0.25, 16.0, log=True), stats.loguniform(0.25, 16.0)),
    ],
)
def test_a_range_is_drawn_from_evenly_to_both_ends(choices, distribution):
    """By the draw's own distribution: at the p-th part of all uniform numbers stands its p-quantile."""
    space, key = Space((Group("g", {"optimizer.learning_rate": choices}),)), "optimizer.learning_rate"
    streams = Streams(bytes(32), {}, {})
    drawn = np.sort([draw(recipe(), space, streams.stream("settings", i))[key] for i in range(1000)])
    for p in (0.05, 0.3, 0.55, 0.8, 0.95):
        below = np.searchsorted(drawn, distribution.ppf(p), side="right") / 1000
        assert below == pytest.approx(distribution.cdf(distribution.ppf(p)), abs=4 * math.sqrt(p * (1 - p) / 1000))
    least, most = distribution.support()
    assert least <= drawn[0] and drawn[-1] <= most and drawn[-1] - drawn[0] > 0.95 * (most - least)


def test_expected_cost_is_that_of_the_expected_number_of_trials():
    assert expected_cost(recipe(6.0), SPACE) == {"search_views": 6 * 512 * 60, "search_fraction": 6.0}


def test_the_noise_is_calibrated_to_the_whole_search():
    numbers = {"num_examples": 1437, "batch_size": 512, "num_steps": 60, "target_epsilon": 3.0, "delta": 1e-4}
    selection = Selection(6.0, 0.0)
    sigma = solve_noise_multiplier(**numbers, selection=selection)
    mechanism = Mechanism(1437, 512, sigma, 60)
    assert epsilon(mechanism, 1e-4, selection=selection).epsilon == epsilon_of_best(mechanism, 1e-4, selection) <= 3.0
    assert epsilon_of_best(mechanism.replace(noise_multiplier=0.998 * sigma), 1e-4, selection) > 3.0
    assert sigma > solve_noise_multiplier(**numbers)


def test_trials_of_another_budget_are_refused():
    with pytest.raises(InputError, match="one and the same budget"):
        paid_recipe(made_up_search().recipe, Space((Group("g", {STEPS: [30, 60]}),)), Selection(6.0, 0.0))
    seeded = made_up_search().recipe
    seeded = seeded.model_copy(update={"run": seeded.run.model_copy(update={"seed": 1})})
    with pytest.raises(InputError, match="run.seed"):
        paid_recipe(seeded, SPACE, Selection(6.0, 0.0))
    contradiction = Space((Group("g", {"optimizer.learning_rate": [-1.0]}),))
    with pytest.raises(InputError, match="no possible settings"):
        draw(recipe(), contradiction, Streams(bytes(32), {}, {}).stream("settings"))


def test_a_score_on_private_images_has_the_noise_that_is_paid_for_and_is_a_whole_number(tmp_path):
    """Two hundred searches of one trial that judges 1,000 images right: mean and spread of the published score."""
    one = paid_recipe(made_up_search().recipe, SPACE, Selection(1.0, 0.0, 20.0))
    assert one.data.split == "train"  # the validation split scores
    scores = []
    for attempt in range(200):
        scores.append(paid_search(one, SPACE, tmp_path / str(attempt), Trials(score=lambda where: 1000)).score)
    assert all(isinstance(score, int) for score in scores)
    mean = sum(scores) / 200
    spread = math.sqrt(sum((score - mean) ** 2 for score in scores) / 199)
    assert abs(mean - 1000) < 4 * 20 / math.sqrt(200)
    assert 20 * (1 - 4 / math.sqrt(400)) < spread < 20 * (1 + 4 / math.sqrt(400))  # rejects 2/3 and 3/2 of the scale


def test_a_finished_search_is_not_told_again_under_another_recipe(tmp_path):
    folder, trials, _ = many_trials(tmp_path, at_least=1)
    with pytest.raises(InputError, match="another recipe or space"):
        paid_search(recipe(7.0), SPACE, folder, trials)


@pytest.mark.parametrize("name", ["secret", "selected"])
def test_folders_that_no_search_made_are_left_alone(tmp_path, name):
    mine = tmp_path / name / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="no paid search made"):
        paid_search(recipe(), SPACE, tmp_path, Trials())
    assert mine.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == [name]


def test_a_selected_run_is_never_certified_for_fewer_steps_than_the_others_may_have_taken():
    from sfumato.data.catalogue import Facts
    from sfumato.planning.claims import claims
    from sfumato.planning.resolve import resolve

    stated = recipe()  # its noise, and no target
    stated = stated.model_copy(update={"privacy": stated.privacy.model_copy(update={"target_epsilon": None})})
    plan = resolve(stated, Facts(1437, 10, 8, 1))
    whole = claims(plan, plan.mechanism).epsilon
    assert claims(plan, plan.mechanism.replace(num_steps=5)).epsilon == whole
    assert claims(plan, plan.mechanism.replace(num_steps=75)).epsilon > whole


def test_what_is_secret_shows_nothing_while_trials_come_and_are_for_the_owner_alone(tmp_path):
    """By the links of a folder anyone who may look at it counts the folders in it; by its time and size, what else is
    made there.
    """
    for attempt in range(200):
        folder, seen = tmp_path / str(attempt), []

        class Watched(Trials):
            def train(self, trial, where):
                looked_at = (folder, folder / "secret")  # noqa: B023  (called before the next turn)
                seen.append(  # noqa: B023
                    [(stat.S_IMODE(s.st_mode), s.st_nlink, s.st_mtime_ns, s.st_size) for s in map(os.stat, looked_at)]
                )
                super().train(trial, where)

        paid_search(recipe(), SPACE, folder, Watched())
        assert all(modes == seen[0] for modes in seen)
        assert [state[0] for state in seen[0]] == [0o700, 0o700]
        if len(seen) > 5:
            return
    raise AssertionError("the number of trials is always small")


def test_a_folder_that_stood_open_is_closed_before_the_first_trial(tmp_path):
    folder = tmp_path / "search"
    folder.mkdir(mode=0o755)
    with pytest.raises(KeyboardInterrupt):
        paid_search(recipe(), SPACE, folder, Trials(killed_at=0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)  # as a copy may have been made
    with pytest.raises(KeyboardInterrupt):
        paid_search(recipe(), SPACE, folder, Trials(killed_at=0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_all_that_is_published_bears_the_time_of_the_start_after_crashes_too(tmp_path, monkeypatch):
    def times(folder):
        return {path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}

    def killed(*arguments, **options):
        raise KeyboardInterrupt

    for crash in ("write_anew", "set_times", "os.rename", "key_file.delete_key", "shutil.rmtree"):
        folder = tmp_path / crash
        with monkeypatch.context() as patch:
            patch.setattr(f"sfumato.searching.private_selection.{crash}", killed)
            with pytest.raises(KeyboardInterrupt):
                paid_search(recipe(), SPACE, folder, Trials())
        start = (folder / "paid-search.json").stat().st_mtime_ns
        result = paid_search(recipe(), SPACE, folder, Trials())
        assert result.run == str(folder / "selected") and not (folder / "secret").exists()
        assert times(folder) == {start}
        paid_search(recipe(), SPACE, folder, Trials())  # told again
        assert times(folder) == {start}


def test_what_is_published_holds_no_time_no_environment_and_nothing_for_the_owner_alone(tmp_path):
    folder, _, result = many_trials(tmp_path, at_least=1)
    selected = folder / "selected"
    assert {path.name for path in selected.iterdir()} == PUBLISHED
    assert (selected / "report.html").read_text() == "selected"
    assert result.seconds is None and result.images_per_second is None
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"abacus" not in content and b"12.3" not in content and b"45.6" not in content
    ledger = Ledger.open(selected / "ledger.jsonl")  # whole, and what the others state of it is true
    facts = json.loads((selected / "privacy.json").read_text())
    assert (facts["ledger_head"], facts["ledger_lines"]) == (ledger.head, len(ledger.lines))
    published = config.parse(config.read(selected / "recipe.toml"))
    with safe_open(selected / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["sfumato"])["ledger_head"] == ledger.head
        assert file.get_tensor("weights").tolist() == pytest.approx(
            [published.optimizer.learning_rate, published.ema.decay]
        )


def test_the_same_weights_and_facts_are_the_same_bytes(tmp_path):
    """The library writes metadata in an order that changes from one call to the next."""
    trials, written = Trials(score=lambda where: 1), set()
    one = paid_recipe(made_up_search().recipe, SPACE, Selection(1.0, 0.0))
    space = Space((Group("g", {"ema.decay": [0.5]}),))
    for attempt in range(12):
        paid_search(one, space, tmp_path / str(attempt), trials)
        written.add((tmp_path / str(attempt) / "selected" / "model.safetensors").read_bytes())
    assert len(written) == 1


@pytest.mark.parametrize("kept", [True, False], ids=["the same images", "other images"])
def test_a_search_goes_on_with_the_same_images_alone(tmp_path, kept):
    killed = Trials(killed_at=1)
    for attempt in range(200):
        folder = tmp_path / str(attempt)
        try:
            paid_search(recipe(), SPACE, folder, killed)
            killed.made.clear()
        except KeyboardInterrupt:
            break
    again = Trials(images=b"images" if kept else b"imagez")
    if kept:
        paid_search(recipe(), SPACE, folder, again)
        assert again.made[0] == killed.made[0]
    else:
        with pytest.raises(InputError, match="the images changed since this search began") as refusal:
            paid_search(recipe(), SPACE, folder, again)
        assert "\n" not in str(refusal.value) and again.made == []
        # Kept so that only the owner can confirm anything by it.
        assert stat.S_IMODE((folder / "secret" / "images").stat().st_mode) == 0o600
        assert (folder / "secret" / "images").read_text() not in (folder / "paid-search.json").read_text()


def test_the_fingerprint_is_on_disk_before_the_first_trial_whatever_crash_came_before(tmp_path, monkeypatch):
    def killed(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            "sfumato.searching.private_selection.write_atomically", killed
        )  # after the key, before the fingerprint
        with pytest.raises(KeyboardInterrupt):
            paid_search(recipe(), SPACE, tmp_path / "search", Trials())
    assert (tmp_path / "search" / "secret" / "key").exists() and not (
        tmp_path / "search" / "secret" / "images"
    ).exists()

    class Watched(Trials):
        def train(self, trial, where):
            assert (tmp_path / "search" / "secret" / "images").exists()
            super().train(trial, where)

    paid_search(recipe(), SPACE, tmp_path / "search", Watched(images=b"others"))


def published_noise(folder, key, score, images=b"images", decay=0.5):
    """The noise of a search of one trial under a key."""
    one = paid_recipe(made_up_search().recipe, SPACE, Selection(1.0, 0.0, 20.0))
    space = Space((Group("g", {"ema.decay": [decay]}),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sfumato.randomness.new_key", lambda: key)
        found = paid_search(one, space, folder, Trials(score=lambda where: score, images=images)).score
    shutil.rmtree(folder)
    return found - score


@pytest.mark.parametrize(
    "other", [{"score": 101}, {"images": b"imagez"}, {"decay": 0.6}], ids=["score", "images", "settings"]
)
def test_no_two_scores_meet_one_noise(tmp_path, other):
    """Forty keys: equal where nothing differs, and else without relation (the difference has variance 2 S^2)."""
    same, differences = {"score": 100}, []
    for number in range(40):
        key = hashlib.sha256(bytes([number])).digest()
        noise = published_noise(tmp_path / "a", key, **same)
        if number < 5:
            assert published_noise(tmp_path / "b", key, **same) == noise  # the same release when a search goes on
        differences.append(published_noise(tmp_path / "c", key, **{**same, **other}) - noise)
    spread = math.sqrt(sum(value**2 for value in differences) / 40)
    assert 20 * math.sqrt(2) * (1 - 4 / math.sqrt(80)) < spread < 20 * math.sqrt(2) * (1 + 4 / math.sqrt(80))


def test_no_two_trials_meet_one_noise_though_their_scores_are_equal(tmp_path):
    """Two copies of a search, and a trial of the one whose weights came out otherwise: equal noise would tell whether
    the scores are equal.
    """
    streams = Streams(bytes(32), {"search": "x", "images": "y"}, {})
    noises = []
    for weights in range(40):
        save_file({"weights": torch.tensor([weights])}, tmp_path / "model.safetensors")
        noises.append(_score_noise(streams, 0, 100, tmp_path, 20.0))
    assert len(set(noises)) > 20


def test_a_trial_whose_updates_were_drawn_afresh_on_the_way_is_made_anew(tmp_path):
    """It would have other releases than the others, and tell when it was made."""
    trials = Trials(sessions=lambda number: 2 if number == 1 else 1)
    one = paid_recipe(made_up_search().recipe, SPACE, Selection(1.0, 0.0))
    paid_search(one, SPACE, tmp_path / "search", trials)
    assert len(trials.made) == 2 and trials.made[0] == trials.made[1]  # the same settings
    assert [
        line["session"]
        for line in Ledger.open(tmp_path / "search" / "selected" / "ledger.jsonl").lines
        if line["kind"] == "session"
    ] == [0]


def test_one_process_at_a_time_makes_a_search(tmp_path):
    class Twice(Trials):
        def train(self, trial, where):
            with pytest.raises(InputError, match="another process"):
                paid_search(recipe(), SPACE, tmp_path / "search", Trials())
            super().train(trial, where)

    paid_search(recipe(), SPACE, tmp_path / "search", Twice())


def test_a_search_whose_images_lie_elsewhere_now_is_the_same_and_no_file_tells_where(tmp_path):
    def at(path):
        found = recipe()
        return found.model_copy(update={"data": found.data.model_copy(update={"path": path})})

    with pytest.raises(KeyboardInterrupt):
        paid_search(at("/here"), SPACE, tmp_path / "search", Trials(killed_at=0))
    paid_search(at("/there"), SPACE, tmp_path / "search", Trials())


@pytest.mark.parametrize(("key", "value"), [("keep_key", True), ("log", "csv")])
def test_a_kept_key_and_a_log_of_trials_are_refused(key, value):
    kept = made_up_search().recipe
    kept = kept.model_copy(update={"run": kept.run.model_copy(update={key: value})})
    with pytest.raises(InputError, match=f"run.{key}"):
        paid_recipe(kept, SPACE, Selection(6.0, 0.0))


@pytest.mark.parametrize(
    "name", ["secret/key", "secret/trials/aabb", "paid-search.json", "selected/result.json", "secret"]
)
def test_a_search_folder_with_a_link_is_refused_before_anything_is_touched(tmp_path, name):
    target, folder = tmp_path / "precious", tmp_path / "search"
    target.write_text("precious\n")
    os.utime(target, ns=(5, 5))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(target)
    before = sorted(folder.rglob("*"))
    with pytest.raises(InputError, match="symbolic link"):
        paid_search(recipe(), SPACE, folder, Trials())
    assert target.read_text() == "precious\n" and target.stat().st_mtime_ns == 5 and sorted(folder.rglob("*")) == before


def test_what_lies_in_a_key_s_place_and_is_no_key_is_left_as_it_is(tmp_path):
    folder, target = tmp_path / "search", tmp_path / "precious"
    paid_search(recipe(), SPACE, folder, Trials())
    target.write_text("x" * 65)
    (folder / "secret").mkdir()
    os.link(target, folder / "secret" / "key")
    with pytest.raises(InputError, match="is not the key that this run wrote"):
        paid_search(recipe(), SPACE, folder, Trials())
    assert target.read_text() == "x" * 65


@pytest.mark.parametrize("altered", ["result", "recipe", "verdict"])
def test_a_finished_search_is_verified_before_it_is_told_again(tmp_path, altered):
    paid_search(recipe(), SPACE, tmp_path, Trials())
    selected, trials = tmp_path / "selected", Trials()
    if altered == "result":
        (selected / "result.json").write_text("{}")
    elif altered == "recipe":
        text = (selected / "recipe.toml").read_text()
        (selected / "recipe.toml").write_text(text.replace("selected_from = 6.0", "selected_from = 1.0"))
        assert (selected / "recipe.toml").read_text() != text
    else:

        def refuse(where):
            raise InputError(f"{where} was altered")

        trials.verify = refuse
    with pytest.raises(
        InputError, match={"result": "is damaged", "recipe": "selected_from", "verdict": "was altered"}[altered]
    ):
        paid_search(recipe(), SPACE, tmp_path, trials)
