"""Lower bounds from one run: true where epsilon is known, and of canaries that touch nothing but N."""

import json
import math
import shutil
import stat
from fractions import Fraction
from math import comb

import jsonschema
import numpy as np
import pytest
import torch
from scipy.stats import binom

import sfumato
from sfumato import config
from sfumato.accounting.gaussian import mu_gaussian
from sfumato.auditing.one_run import audit_guesses, epsilon_of_guesses, num_guesses, power, probability, scores
from sfumato.data import loading
from sfumato.data.canaries import WithCanaries, canary_images
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.evaluation import trained
from sfumato.planning.resolve import resolve, resolve_without_privacy
from sfumato.randomness import Stream, Streams, new_key
from sfumato.run_folder import launch
from sfumato.training.learner import Learner
from sfumato.training.logs import Progress
from sfumato.training.step import draw
from tests.cli.test_audit import KEYS
from tests.cli.test_cli import call, json_of, refused
from tests.reporting.test_page import Page

DELTA = 1e-5


# What guesses show


@pytest.mark.parametrize("right", [1, 11])
def test_without_delta_guesses_are_as_right_as_those_of_randomised_response(right):
    """Odds 3 to 1 are epsilon ln 3; the tail in exact fractions."""
    tail = sum(comb(12, k) * Fraction(3, 4) ** k * Fraction(1, 4) ** (12 - k) for k in range(right, 13))
    assert probability(50, 12, right, math.log(3), 0.0) == pytest.approx(float(tail), rel=1e-12)


def test_delta_adds_what_the_theorem_says_by_brute_force():
    count, guesses, right, epsilon, delta = 40, 20, 15, 0.7, 1e-3
    mass = [float(binom.pmf(k, guesses, 1 / (1 + math.exp(-epsilon)))) for k in range(guesses + 1)]
    most = max(sum(mass[right - i : right]) / i for i in range(1, right + 1))
    expected = sum(mass[right:]) + 2 * count * delta * most
    assert probability(count, guesses, right, epsilon, delta) == pytest.approx(expected, rel=1e-9)


def test_the_example_of_the_paper_is_reproduced():
    """Steinke et al. (2023), Appendix D: 1,000 canaries, 75 of 100 guesses right, delta 1e-4, 95 %."""
    assert round(epsilon_of_guesses(1000, 100, 75, 1e-4, 0.05), 3) == 0.673


def test_randomised_response_is_accused_as_seldom_as_is_stated_and_no_looser_than_one_guess(epsilon=4.0, error=0.01):
    """It is the worst case: the chance of a bound above epsilon, summed over all that may be right. One right guess
    fewer accuses too often: no bound could be larger.
    """
    guesses = 300
    accused = [v for v in range(guesses + 1) if epsilon_of_guesses(guesses, guesses, v, 0.0, error) > epsilon]
    least, q = min(accused), 1 / (1 + math.exp(-epsilon))
    assert accused == list(range(least, guesses + 1))
    assert binom.sf(least - 1, guesses, q) <= error < binom.sf(least - 2, guesses, q)


@pytest.mark.parametrize("given_away", [5, 60])
def test_a_mechanism_that_gives_coins_away_with_probability_delta_is_not_accused_too_often(given_away):
    """Now and then it tells some of its coins, each with probability delta: that is (epsilon, delta), and accused too
    often where delta is left out. The error is the very one at which randomised response is accused.
    """
    count, epsilon, delta = 60, 1.0, 1e-4
    says_true, tells = 1 / (1 + math.exp(-epsilon)), count * delta / given_away
    error = float(binom.sf(51, count, says_true)) * 1.001

    def accused(assumed):
        """How often, in closed form: those that are told are right, the others as by randomised response."""
        least = min(v for v in range(count + 1) if epsilon_of_guesses(count, count, v, assumed, error) > epsilon)
        when_told = binom.sf(least - given_away - 1, count - given_away, says_true)
        return float(tells * when_told + (1 - tells) * binom.sf(least - 1, count, says_true))

    assert accused(delta) <= error < accused(0.0)


def gaussian_scores(rng, mu, count):
    took_part = rng.random(count) < 0.5
    return rng.normal(0, 1, count) + mu * took_part, took_part


def test_a_sound_gaussian_mechanism_is_not_accused_and_its_double_shows_more(epsilon=4.0):
    rng, bounds = np.random.default_rng(1), []
    for true in [epsilon] * 60 + [2.2 * epsilon] * 10:
        found = audit_guesses(*gaussian_scores(rng, mu_gaussian(true, DELTA), 2000), delta=DELTA)
        bounds.append(found.epsilon_lower_bound)
    sound, double = np.array(bounds[:60]), np.array(bounds[60:])
    assert (sound > epsilon).sum() <= 2  # 60 at 5 %; in truth far fewer
    assert np.median(sound) > 0.25 * epsilon and np.median(double) > sound.max()


def test_scores_that_know_nothing_show_something_as_seldom_as_is_stated():
    """Also where all are equal: which canaries are guessed may not depend on the coins."""
    rng = np.random.default_rng(3)
    for scored in (lambda: np.zeros(200), lambda: rng.normal(size=200), lambda: np.arange(200)):
        found = [audit_guesses(scored(), rng.random(200) < 0.5, delta=DELTA) for _ in range(200)]
        assert binom.sf(sum(each.epsilon_lower_bound > 0 for each in found) - 1, 200, 0.05) > 1e-3


def test_only_the_order_of_the_scores_matters_and_only_their_two_ends():
    rng = np.random.default_rng(4)
    values, took_part = gaussian_scores(rng, 1.0, 1000)
    found = audit_guesses(values, took_part, delta=DELTA)
    assert audit_guesses(np.exp(values), took_part, delta=DELTA).bounds == found.bounds
    order = np.argsort(values)
    flipped = took_part.copy()
    flipped[order[100:900]] ^= True  # a fifth is guessed
    assert audit_guesses(values, flipped, delta=DELTA).bounds == found.bounds
    bound = found.bounds[0]
    assert (bound.num_guesses, bound.num_right) == (200, bound.right_high + bound.right_low)
    assert bound.right_high == took_part[order[-100:]].sum() and bound.right_low == (~took_part[order[:100]]).sum()


def test_how_many_are_guessed_follows_from_their_number_alone():
    assert [num_guesses(count) for count in (1, 10, 41, 75, 200, 1000, 1009)] == [0, 10, 40, 40, 40, 200, 200]


def test_an_attacker_who_is_never_wrong_shows_what_power_says_and_one_canary_fewer_too_little():
    took_part = np.arange(1000) < 500
    found = audit_guesses(took_part.astype(float), took_part, delta=DELTA, nominal_epsilon=3.0)
    assert found.epsilon_lower_bound == found.power.perfect > 3 and found.violated and found.auc == found.advantage == 1
    # All 200 are right with probability q^200.
    without_delta = epsilon_of_guesses(1000, 200, 200, 0.0, 0.05)
    assert 1 / (1 + math.exp(-without_delta)) == pytest.approx(0.05 ** (1 / 200), rel=1e-6)
    needed = power(1000, 0.95, DELTA, 3.0).games_needed
    assert power(needed, 0.95, DELTA, None).perfect > 3 >= power(needed - 1, 0.95, DELTA, None).perfect


@pytest.mark.parametrize(
    "change, words",
    [
        ({"scores": [0.0] * 4, "took_part": [0, 1, 0, 1]}, "4 canaries at delta 1e-5 .* Train with 6 "),
        ({"scores": [0.0, math.nan] * 50}, "not a number"),
        ({"nominal_epsilon": math.inf}, "a number from 0 to"),
        ({"delta": 0.01, "confidence": 0.9999}, "nothing. Claim a smaller delta"),
    ],
)
def test_what_is_no_audit_is_refused(change, words):
    good = {"scores": list(range(100)), "took_part": [0, 1] * 50, "delta": DELTA}
    assert audit_guesses(**good).num_games == 100
    with pytest.raises(InputError, match=words):
        audit_guesses(**{**good, **change})


# Canaries among examples


RECIPE = {
    "data": {"name": "digits"},
    "model": {"name": "small_cnn", "options": {"width": 4}},
    "augmentation": {"kind": "none", "augmult": 0},
    "privacy": {"target_epsilon": 20.0, "delta": DELTA, "accountant": "rdp"},
    "training": {"batch_size": 256, "num_steps": 8, "engine": "graph", "microbatch_size": 64, "checkpoint_every": 3},
    "audit": {"canaries": 60},
}


def recipe(**changes):
    values = {section: dict(keys) for section, keys in RECIPE.items()}
    for key, value in changes.items():
        config.put(values, key.replace("__", "."), value)
    return config.parse(values)


@pytest.fixture(scope="module")
def digits():
    return loading.load(recipe().data, None, lambda line: None)


def canaries_of(dataset, count, num_classes=10):
    constants = {"mean": dataset.train.mean, "std": dataset.train.std, "image_size": 8, "stored_size": 8}
    return canary_images(count, num_classes, **constants)


def test_canaries_stand_behind_the_images_in_every_batch(digits):
    canaries = canaries_of(digits, 60)
    both = WithCanaries(digits.train, canaries, np.arange(60) % 2 == 0)
    count = len(digits.train)
    assert len(both) == count + 60
    indices = torch.tensor([count + 3, 5, count + 59, 0, count - 1, count])
    owners = [(canaries, i - count) if i >= count else (digits.train, i) for i in indices.tolist()]
    assert torch.equal(both.batch(indices), torch.cat([own.batch(torch.tensor([i])) for own, i in owners]))
    assert both.labels[indices].tolist() == [int(own.labels[i]) for own, i in owners]
    assert both.readable[indices].tolist() == [False, True, False, True, True, True]


def test_views_of_canaries_are_made_of_their_own_bits(digits):
    both = WithCanaries(digits.train, canaries_of(digits, 60), np.ones(60, bool))
    views, count = Views("crop_flip", 3, 2), len(digits.train)
    bits = np.random.default_rng(0).integers(0, 2**32, (len(both), 3), dtype=np.uint32)
    indices = torch.tensor([count + 1, 7, count + 40])
    together = views.make(both, indices, bits, torch.device("cpu"))
    alone = [views.make(both, indices[i : i + 1], bits, torch.device("cpu")) for i in range(3)]
    assert torch.equal(together, torch.cat(alone)) and together.shape[:2] == (3, 3)
    canary = views.make(both.canaries, torch.tensor([40]), bits[count:], torch.device("cpu"))
    assert torch.equal(together[2:], canary)


@pytest.mark.parametrize(
    "changes",
    [{}, {"augmentation__kind": "flip", "augmentation__augmult": 2}, {"model__trainable": "classifier"}],
    ids=["images", "views", "features"],
)
def test_a_canary_that_takes_no_part_contributes_zero_and_one_that_does_its_clipped_gradient(digits, changes):
    plan, streams = resolve(recipe(**changes), digits.facts), Streams(0)
    learner = Learner(plan, digits, torch.device("cpu"))

    def clipped_sum(took_part, indices):
        learner.initialise(np.zeros(1, np.uint64), took_part)
        randomness = draw(indices, learner.views, streams.stream("views"), streams.stream("model"))
        return learner.collect(randomness)[0]

    own, count = np.arange(40), len(digits.train)
    everybody = np.concatenate([own, np.arange(count, count + 60)])
    without = clipped_sum(np.zeros(60, bool), own)
    assert (len(learner.train), len(learner.drawn_from)) == (count, count + 60)  # accuracies: the former
    assert without.norm() > 1 and torch.equal(clipped_sum(np.zeros(60, bool), everybody), without)
    difference = clipped_sum(np.arange(60) == 7, everybody) - without
    assert 0.9 < float(difference.norm()) < 1 + 1e-4  # noise with a wrong label is clipped: its length is 1


# Canaries in a plan


def test_canaries_count_in_n_in_or_out_and_are_at_most_5_per_cent_of_it(digits):
    plan, without = resolve(recipe(), digits.facts), resolve(recipe(audit__canaries=0), digits.facts)
    assert plan.mechanism.num_examples == without.mechanism.num_examples + 60 == 1497
    assert plan.private and plan.mechanism.batch_size == without.mechanism.batch_size
    allowed = resolve(recipe(audit__canaries=75), digits.facts).mechanism.num_examples
    assert 75 / allowed <= 0.05 < 76 / (allowed + 1)
    with pytest.raises(InputError, match="at most 75 are allowed"):
        resolve(recipe(audit__canaries=76), digits.facts)


OF_PERSONS = {"privacy__unit": "person", "privacy__max_images_per_person": 2, "privacy__accountant": "pld"}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"run__seed": 3}, "public seed"),
        ({"privacy__target_epsilon": None, "privacy__noise_multiplier": 0}, "no noise was added"),
        ({"privacy__sampling": "shuffled"}, "shuffled"),
        (OF_PERSONS, "belong to no person"),
        ({"data__group_by": "group"}, "belong to no person"),
        ({"privacy__selected_from": 4.0}, "selected_from"),
        ({"audit__canaries": -1}, "canaries"),
    ],
)
def test_a_run_whose_claim_canaries_do_not_try_is_refused(digits, change, words):
    with pytest.raises(InputError, match=words):
        resolve(recipe(**change), digits.facts)


def test_ordinary_training_knows_of_no_canaries(digits):
    for asked in (recipe(), recipe().model_copy(update={"privacy": None})):
        with pytest.raises(InputError, match=r"Take --set audit.canaries=0"):
            resolve_without_privacy(asked, digits.facts)
    with pytest.raises(InputError, match=r"no \[privacy\] section"):
        resolve(recipe().model_copy(update={"privacy": None}), digits.facts)


# A run


class Stop(Exception):
    pass


def stops_at_five(facts):
    if facts.step == 5:
        raise Stop


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was stopped after a checkpoint, and went on with the same coins."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with pytest.raises(Stop):
        sfumato.train(recipe(), folder, progress=Progress(step=stops_at_five))
    before = (folder / launch.COINS_FILE).read_bytes()
    sfumato.train(recipe(), folder, resume=True, progress=Progress())
    assert (folder / launch.COINS_FILE).read_bytes() == before
    return folder


def test_coins_are_fair_and_for_the_owner_alone(tmp_path, run):
    assert stat.S_IMODE((run / launch.COINS_FILE).stat().st_mode) == 0o600
    (tmp_path / launch.COINS_FILE).parent.mkdir()
    tossed = launch.toss_coins(tmp_path, "0f" * 16, 4000, Stream(new_key()))
    assert abs(tossed.mean() - 0.5) < 0.04 and np.array_equal(launch.read_coins(tmp_path, "0f" * 16, 4000), tossed)


def test_no_public_file_tells_the_coins(run):
    bits = "".join("01"[coin] for coin in json.loads((run / launch.COINS_FILE).read_text())["took_part"])
    for path in run.iterdir():
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != 0o600:
            assert b"took_part" not in path.read_bytes() and bits.encode() not in path.read_bytes(), path


def test_a_certificate_counts_canaries_and_accuracies_do_not(run):
    claim, result = (json.loads((run / name).read_text()) for name in ("privacy.json", "result.json"))
    assert claim["num_examples"] == result["num_examples"] == 1497
    assert (claim["public_inputs"]["num_examples"], claim["public_inputs"]["num_canaries"]) == (1437, 60)
    assert claim["sampling_prob"] == 256 / 1497
    assert any("canaries.json" in line for line in claim["not_covered"])
    model = trained.load(run)
    accuracy = sfumato.evaluate(run, report=lambda line: None).accuracy
    assert result["accuracy"] == pytest.approx(accuracy) and len(scores(model, 60)) == 60


def test_a_run_that_was_audited_says_so_and_is_still_the_run_it_was(run):
    found = sfumato.audit_one_run(run, confidence=0.9)
    claim = json.loads((run / "privacy.json").read_text())
    stated = claim["audit"]
    assert found.nominal_epsilon == claim["epsilon"] and found.num_games == stated["num_canaries"] == 60
    assert stated["epsilon_lower_bound"] == found.epsilon_lower_bound and stated["confidence"] == 0.9
    took_part = launch.read_coins(run, claim["run_id"], 60)
    assert sum(stated["scores"]["members"]) == took_part.sum()
    assert sum(stated["scores"]["non_members"]) == (~took_part).sum()
    again = audit_guesses(scores(trained.load(run), 60), took_part, delta=DELTA, confidence=0.9)
    assert again.bounds == found.bounds
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert "What an attack showed" in page.text and f"{found.bounds[0].num_right} guesses were right" in page.text
    named = [name for name in page.attributes("id") if name]
    assert len(named) == len(set(named)) and "attack-title" in named
    sfumato.train(recipe(), run, resume=True, progress=Progress())
    assert json.loads((run / "privacy.json").read_text()) == claim
    assert not found.violated


def test_a_score_is_minus_the_loss_of_the_canary(run, digits):
    model = trained.load(run)
    images = canaries_of(digits, 60)
    with torch.no_grad():
        outputs = model.model(images.batch(torch.arange(60)))
    losses = torch.nn.functional.cross_entropy(outputs, images.labels, reduction="none")
    np.testing.assert_allclose(scores(model, 60), -losses.numpy(), rtol=1e-4, atol=1e-5)


def test_the_command_prints_the_contract_s_keys_keeps_its_schema_and_states_its_power(run, capsys):
    found = json_of(capsys, "audit", "one-run", run)
    assert KEYS <= found.keys() and found["audit"] == "one-run"
    schema = json.loads(call(capsys, "schema", "one-run-audit")[1])
    jsonschema.validate(found, schema)
    assert found == sfumato.audit_one_run(run).as_json()
    certificate = json.loads((run / "privacy.json").read_text())
    jsonschema.validate(certificate, json.loads(call(capsys, "schema", "certificate")[1]))
    status, out, err = call(capsys, "audit", "one-run", run, "--confidence", "0.9")
    assert (status, err) == (0, "") and "of 40 guesses are right" in out and "assumes nothing" in out
    assert out.count("power:") == 3 and "is not refuted; that is no proof of it" in out
    assert "confidence must lie" in refused(capsys, "audit", "one-run", run, "--confidence", "1")
    assert "cannot be read" in refused(capsys, "audit", "one-run", run / "owner")


def test_a_folder_that_cannot_be_audited_is_refused(run, tmp_path):
    inputs = json.loads((run / "privacy.json").read_text())["public_inputs"]
    for words, changes in {
        "is unfinished": {"status": "running"},
        "without canaries": {"public_inputs": {**inputs, "num_canaries": 0}},
        "claims no privacy": {"private": False, "epsilon": None, "why_not_private": "a seed"},
        "other weights": {"weights_sha256": "0" * 64},
    }.items():
        folder = shutil.copytree(run, tmp_path / words)
        path = folder / "privacy.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        with pytest.raises(InputError, match=words):
            sfumato.audit_one_run(folder)
    shared = shutil.copytree(run, tmp_path / "shared")
    (shared / launch.COINS_FILE).unlink()
    with pytest.raises(InputError, match="is not there"):
        sfumato.audit_one_run(shared)


def test_what_forty_canaries_show_is_not_called_out_of_reach():
    """At this delta more canaries show less: powers of two alone would miss it."""
    took_part = np.arange(40) < 20
    found = audit_guesses(took_part.astype(float), took_part, delta=1e-3, nominal_epsilon=2.4)
    assert found.violated and found.power.games_needed is not None
    assert power(found.power.games_needed, 0.95, 1e-3, None).perfect > 2.4
