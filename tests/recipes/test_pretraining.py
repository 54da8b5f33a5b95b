"""The papers' pre-trainings, against De et al. 2022, Appendix C.3."""

import pytest

from sfumato import config, recipes
from sfumato.cli.recipes import verified
from sfumato.data.catalogue import public_facts
from sfumato.planning.resolve import resolve

PRINTED = {
    "pretrain-imagenet32-wrn-28-10": ("imagenet32", 1_271_167, 0.3, 5e-5, 1024, 240_000),
    "pretrain-imagenet32-wrn-40-4": ("imagenet32", 1_271_167, 0.3, 5e-5, 1024, 240_000),
    "pretrain-cifar100-wrn-40-4": ("cifar100", 50_000, 0.1, 5e-4, 128, 100_000),
    "pretrain-imagenet-for-jft-nf-resnet50": ("imagenet", 1_271_167, 0.4, 1e-6, 1024, 10 * 1_271_167 // 1024 + 1),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_pre_training_holds_the_paper_s_numbers_and_claims_no_privacy(name):
    recipe = config.parse(config.read(recipes.find(f"de2022/{name}")))
    data, count, rate, decay, batch_size, steps = PRINTED[name]
    optimizer, training = recipe.optimizer, recipe.training
    assert (recipe.data.name, optimizer.learning_rate, optimizer.weight_decay) == (data, rate, decay)
    assert (training.batch_size, training.num_steps) == (batch_size, steps)
    assert (optimizer.momentum, training.label_smoothing, recipe.privacy) == (0.9, 0.0, None)
    assert (recipe.augmentation.kind, recipe.augmentation.augmult) == ("crop_flip", 1)
    facts = public_facts(recipe.data)
    assert facts.num_examples == count
    plan = resolve(recipe, facts)
    assert not plan.private and verified(f"de2022/{name}")["status"] == "not private"


def test_the_rates_of_cifar_100_fall_at_the_printed_iterations():
    optimizer = config.parse(config.read(recipes.find("de2022/pretrain-cifar100-wrn-40-4"))).optimizer
    assert (optimizer.schedule, optimizer.milestones, optimizer.gamma) == ("step", [50_000, 75_000], 0.1)
