"""The learner of a run, beside what its parts promise by themselves: models that draw random numbers."""

import pytest
import torch
from torch import nn

from sfumato.config import DataConfig, parse
from sfumato.data import loading as datasets
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.randomness import derived
from sfumato.training.learner import Learner
from sfumato.training.step import draw


def drops(channels, num_classes, **options):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64 * channels, num_classes))


class Update:
    """Sums of one update by learners that cut it into microbatches in their own way."""

    def __init__(self, augmult):
        self.dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
        self.recipe = {
            "data": {"name": "digits"},
            "model": {"name": f"{__name__}:drops"},
            "augmentation": {"kind": "flip" if augmult else "none", "augmult": augmult},
            "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        }

    def sum(self, microbatch_size, model_key):
        training = {"batch_size": 16, "num_steps": 2, "microbatch_size": microbatch_size, "engine": "graph"}
        plan = resolve(parse({**self.recipe, "training": training}), self.dataset.facts)
        learner = Learner(plan, self.dataset, torch.device("cpu"), trust=[__name__])
        view, model = derived(bytes(32), "views"), derived(bytes(32), model_key)
        learner.initialise(derived(bytes(32), "weights").uint64(1))
        indices = torch.arange(3, 40, 2).numpy()
        randomness = draw(plan.mechanism, indices, learner.views, view, model)
        grad_sum, _ = learner.collect(randomness, 1)
        return torch.cat([value.flatten() for value in grad_sum.values()])


@pytest.mark.parametrize("augmult", [0, 2])
def test_what_a_model_draws_in_an_update_follows_from_the_update_s_key_however_it_is_cut_into_microbatches(augmult):
    update = Update(augmult)
    whole = update.sum(32, "a key")
    assert whole.norm() > 0
    assert torch.equal(update.sum(32, "a key"), whole)
    assert (update.sum(5, "a key") - whole).norm() < 1e-5 * whole.norm()
    assert (update.sum(32, "another") - whole).norm() > 0.1 * whole.norm()


def test_ordinary_training_takes_a_batch_whole_though_standardised_weights_are_kept_for_it():
    dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
    model = {"name": "wide_resnet", "options": {"depth": 16, "width": 4}}  # 2.7 million weights, few values an image
    plan = resolve(parse({"data": {"name": "digits"}, "model": model, "training": {"num_steps": 2}}), dataset.facts)
    assert Learner(plan, dataset, torch.device("cpu")).microbatch_size == 128


def test_a_run_does_not_go_on_with_a_model_whose_code_changed():
    """The recipe names a module, whose code may be another one by then."""
    dataset = datasets.load(DataConfig(name="digits"), None, lambda text: None)
    plan = resolve(parse({"data": {"name": "digits"}, "training": {"num_steps": 2}}), dataset.facts)
    learner = Learner(plan, dataset, torch.device("cpu"))
    word = derived(bytes(32), "weights").uint64(1)
    learner.initialise(word)
    state = learner.state.state_dict()
    learner.initialise(word, state=state)
    weights = state["model"]
    name = next(iter(weights))
    for changed in ({**weights, name: torch.zeros(3)}, {key: weights[key] for key in list(weights)[1:]}):
        with pytest.raises(InputError, match="its code changed since the run began"):
            learner.initialise(word, state={**state, "model": changed})
