"""The learner of a run, and the random numbers of each update: from fresh bytes, or from a public seed alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from sfumato.accounting.mechanism import Mechanism
from sfumato.config import DataConfig, parse
from sfumato.data.loading import load
from sfumato.data.views import Views
from sfumato.planning.resolve import resolve
from sfumato.randomness import Stream, Streams, derived
from sfumato.training.learner import Learner
from sfumato.training.outcome import warning_of_chance
from sfumato.training.step import Draws, draw
from tests.data.conftest import quiet, refused


def drops(channels, num_classes, **options):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * channels, num_classes))


@pytest.fixture(scope="module")
def digits():
    return load(DataConfig(name="digits"), None, quiet)


def plan_of(digits, training=None, **sections):
    values = {"data": {"name": "digits"}, "training": {"num_steps": 2, **(training or {})}, **sections}
    return resolve(parse(values), digits.facts)


@pytest.mark.parametrize("augmult", [0, 2])
def test_what_a_model_draws_in_an_update_follows_from_the_update_s_key_however_it_is_cut_into_microbatches(
    digits, augmult, set_threads
):
    sections = {
        "model": {"name": f"{__name__}:drops"},
        "augmentation": {"kind": "flip" if augmult else "none", "augmult": augmult},
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
    }

    def summed(microbatch_size, model_key):
        training = {"batch_size": 16, "microbatch_size": microbatch_size, "engine": "graph"}
        plan = plan_of(digits, training, **sections)
        learner = Learner(plan, digits, torch.device("cpu"), trust=[__name__])
        learner.initialise(derived(bytes(32), "weights").uint64(1))
        view, model = derived(bytes(32), "views"), derived(bytes(32), model_key)
        randomness = draw(np.arange(3, 40, 2), learner.views, view, model)
        return learner.collect(randomness)[0]

    whole = summed(32, "a key")
    for size, threads in ((32, 1), (5, 1), (5, 2)):  # methods are chosen by their time: the last bits are not said
        set_threads(threads)
        assert (summed(size, "a key") - whole).norm() < 1e-5 * whole.norm()
    assert (summed(32, "another") - whole).norm() > 0.1 * whole.norm()


def test_ordinary_training_takes_a_batch_whole_though_standardised_weights_are_kept_for_it(digits):
    model = {"name": "wide_resnet", "options": {"depth": 16, "width": 4}}  # 2.7 million weights, few values an image
    assert Learner(plan_of(digits, model=model), digits, torch.device("cpu")).microbatch_size == 128


def test_a_run_does_not_go_on_with_a_model_whose_code_changed(digits):
    """The recipe names a module, whose code may be another one by then."""
    learner = Learner(plan_of(digits), digits, torch.device("cpu"))
    word = derived(bytes(32), "weights").uint64(1)
    learner.initialise(word)
    state = learner.state.state_dict()
    learner.initialise(word, state=state)
    weights = state["model"]
    name = next(iter(weights))
    for changed in ({**weights, name: torch.zeros(3)}, {key: weights[key] for key in list(weights)[1:]}):
        refused("its code changed since the run", learner.initialise, word, state={**state, "model": changed})


MECHANISM, VIEWS, EVERY = Mechanism(400, 100, 1.0, 5), Views("flip", 2, 0), np.arange(400)


def draws(seed=None, mechanism=MECHANISM):
    return Draws(mechanism, VIEWS, Streams(seed))


def bits(drawn, release):
    randomness = drawn.of_update(release)
    return randomness.indices.tobytes(), randomness.view_bits[EVERY].tobytes(), randomness.model_key


def test_no_two_updates_share_a_bit_even_where_one_is_repeated():
    """A release that a crash lost is drawn anew, and so is every other in a copy of the run."""
    seen = [bits(drawn, release) for drawn in (draws(), draws()) for release in (1, 1, 2)]
    for parts in zip(*seen, strict=True):
        assert len(set(parts)) == len(seen)
    one = draws()
    words = [Stream(one.noise_key(release)).uint64(64) for release in (1, 1, 2)]
    assert abs(np.unpackbits((words[0] ^ words[1]).view(np.uint8)).mean() - 0.5) < 0.05
    assert abs(np.unpackbits((words[0] ^ words[2]).view(np.uint8)).mean() - 0.5) < 0.05


def test_runs_of_one_seed_share_views_dropout_and_noise_whatever_their_batch():
    """Common random numbers."""
    one, other = draws(3), draws(3, MECHANISM.replace(batch_size=40))
    a, b = one.of_update(1), other.of_update(1)
    assert (a.view_bits[EVERY] == b.view_bits[EVERY]).all() and a.model_key == b.model_key
    assert set(b.indices) < set(a.indices)
    assert one.noise_key(1) == other.noise_key(1)


@pytest.mark.parametrize("seed", [None, 5])
def test_shuffled_batches_visit_every_example_once_an_epoch(seed):
    drawn = draws(seed, MECHANISM.replace(sampling="shuffled"))
    epoch = np.concatenate([drawn.of_update(release).indices for release in range(1, 5)])
    assert sorted(epoch) == list(range(400))
    assert list(drawn.of_update(5).indices) != list(epoch[:100])


@pytest.mark.parametrize(
    ("balanced", "only_class", "classes", "says"),
    [
        (0.59, None, "ab", "59.00 % is not above chance, 50.00 %"),
        (0.61, None, "ab", None),
        (0.32, None, "abcd", "32.00 % is not above chance, 25.00 %"),
        (0.9, 1, "ab", "names one class alone, b"),
    ],
)
def test_a_model_that_has_learned_nothing_that_shows_is_said_so(balanced, only_class, classes, says):
    """Of 100 images, within two standard deviations of chance: 10 points of 2 classes, 8.7 of 4."""
    labels = torch.arange(100) % len(classes)
    learner = SimpleNamespace(held_out=SimpleNamespace(labels=labels), objective=SimpleNamespace(is_multilabel=False))
    scores = SimpleNamespace(averaged=SimpleNamespace(balanced_accuracy=balanced), only_class=only_class)
    said = warning_of_chance(learner, classes, scores)
    assert said is None if says is None else says in said
