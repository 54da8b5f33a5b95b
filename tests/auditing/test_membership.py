"""The membership audit: parallel models are the product's own runs, and a claim that holds is not refuted."""

import copy
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sfumato.accounting import accountants
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import parallel_models, toy_task
from sfumato.auditing.membership import Audit, AuditCache, audit_membership
from sfumato.auditing.parallel_models import Models, Stopped, cross_entropy
from sfumato.auditing.toy_task import SHARE, TARGETS, Setting, ToyTask, choose, distance, settings_of
from sfumato.clipping import clipped_grad
from sfumato.data.images import ImageSet
from sfumato.data.sampling import poisson_batch
from sfumato.data.views import Views
from sfumato.errors import InputError
from sfumato.models.small import LeNet
from sfumato.randomness import derived, key_from_seed
from sfumato.training import step as step_module
from sfumato.training.step import draw

SIDE = 12
KEYS = [key_from_seed(seed) for seed in range(3)]
TOOK = [True, False, True]


def made_up_task(count=20, num_steps=(5,), side=SIDE):
    """Digits of noise: each class is brighter than the one before."""
    generator = torch.Generator().manual_seed(0)

    def images(number):
        labels = torch.arange(number) % 10
        pixels = torch.randint(0, 100, (number, 1, side, side), generator=generator) + 15 * labels[:, None, None, None]
        return ImageSet(pixels.to(torch.uint8), labels, labels >= 0, (0.13,), (0.31,))

    return ToyTask(images(count), toy_task.candidates(images(20)), 8, num_steps)


@functools.cache
def network(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LeNet(10, image_size=SIDE).to(dtype)


def an_audit(num_models=40, epsilon=4.0, **changes):
    return Audit(made_up_task(), network(), epsilon, 0.05, num_models, **changes)


def models_of(mechanism, target="blank", clipping_norm=1.41, **changes):
    """At first half of the examples' gradients are longer than the clipping norm."""
    setting = Setting(target, 0.5, clipping_norm, mechanism.num_steps)
    return Models(made_up_task(), setting, network(torch.float64), mechanism, **changes)


@dataclasses.dataclass
class InDouble:
    """Views in the type that the network computes in."""

    views: Views

    def with_labels(self, *arguments):
        inputs, labels = self.views.with_labels(*arguments)
        return inputs.double(), labels


def alone(models, key, took, fixed=None):
    """One model by the product's step, written as a loop. Where z takes no part it is as an unreadable image."""
    own, mechanism = copy.deepcopy(network(torch.float64)), models.mechanism
    norm, views = models.step.grad_fn.clipping_norm, models.views
    grad_fn = clipped_grad(own, cross_entropy, clipping_norm=norm, augmult=views.augmult)
    step = step_module.PrivateStep(grad_fn, mechanism, InDouble(views))
    images = made_up_task().with_target("blank")
    images = dataclasses.replace(images, readable=torch.tensor([True] * (len(images) - 1) + [took]))
    parameters = dict(own.named_parameters())
    for number in range(1, mechanism.num_steps + 1):
        indices = poisson_batch(mechanism, derived(key, "sampling", number)) if fixed is None else fixed[number - 1]
        view, model = derived(key, "augmentation", number), derived(key, "model", number)
        grad_sum, _ = step.collect(images, parameters, draw(indices, views, view, model))
        gradient = step.release(
            torch.cat([grad.flatten() for grad in grad_sum.values()]), derived(key, "noise", number)
        )
        values = list(parameters.values())
        vector_to_parameters(parameters_to_vector(values).detach() - 0.5 * gradient, values)
    return parameters


@pytest.mark.parametrize("augmult, fixed", [(0, False), (0, True), (2, False)])
def test_a_model_among_others_is_the_products_own_run_with_its_key(augmult, fixed):
    batches = [np.array([0, 5, 20]), np.arange(12), np.array([], dtype=np.int64)] if fixed else None
    models = models_of(Mechanism(21, 8, 0.5, 3), augmult=augmult, fixed_batches=batches)
    found = models.train(KEYS, TOOK)
    for number, (key, took) in enumerate(zip(KEYS, TOOK, strict=True)):
        for name, value in alone(models, key, took, batches).items():
            torch.testing.assert_close(found[name][number], value, rtol=0, atol=1e-5)
    begin = dict(network(torch.float64).named_parameters())
    assert max(float((found[name] - value).abs().max().detach()) for name, value in begin.items()) > 1e-2


def test_models_are_the_same_whoever_trains_beside_them(monkeypatch):
    """As on a GPU: 512 and more, their noise by several threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    models = models_of(Mechanism(21, 8, 0.5, 2), augmult=0)
    keys, took = [key_from_seed(seed) for seed in range(520)], [True, False] * 260
    few = models.trained_losses(keys[500:], took[500:])
    monkeypatch.setitem(parallel_models._LEAST_MODELS, "cpu", 512)
    monkeypatch.setitem(parallel_models._EXAMPLES_AT_ONCE, "cpu", 2**10)
    assert models.trained_losses(keys, took)[500:] == pytest.approx(few, rel=1e-9)


@pytest.mark.parametrize("fixed_batches", [False, True])
def test_a_sound_step_is_not_accused(fixed_batches):
    found = an_audit(epsilon=1.0, fixed_batches=fixed_batches).run(0.99)
    assert found.violated is False and found.target_epsilon == 1
    assert found.num_games == 80 and found.num_models == 40 and found.models_per_second > 0
    assert fixed_batches or 0.99 < found.nominal_epsilon <= 1


def test_noise_that_is_missing_is_caught(monkeypatch):
    monkeypatch.setattr(step_module, "with_noise", lambda total, *given: total)
    assert an_audit(epsilon=1.0, fixed_batches=True).run(0.9).violated


def test_with_fixed_batches_the_claim_is_gaussian_over_the_updates_with_z():
    audit = Audit(made_up_task(num_steps=(40,)), network(), 2.0, 0.05, 40, fixed_batches=True)
    setting = Setting("blank", 0.5, 1.0, 40)
    with_z = sum(20 in batch for batch in audit.batches(setting))
    claim = audit.claim(setting)
    assert 1 < with_z < 40 and claim.num_steps == with_z
    mu = math.sqrt(with_z) / audit.mechanism(setting).noise_multiplier
    assert accountants.epsilon(claim, 0.05).epsilon == pytest.approx(epsilon_gaussian(mu, 0.05), rel=1e-6)
    assert audit.batches(setting)[0].tolist() == audit.batches(setting)[0].tolist()
    assert an_audit().batches(setting) is None and an_audit().claim(setting) == an_audit().mechanism(setting)


def test_fixed_batches_without_z_are_refused_before_anything_is_trained(tmp_path, monkeypatch):
    audit = an_audit(fixed_batches=True)
    monkeypatch.setattr(audit, "batches", lambda setting: 5 * [np.arange(20)])
    with pytest.raises(InputError, match="no batch has z"):
        audit.run(0.9, tmp_path / "audit")
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["settings.json"]


def test_the_same_audit_again_finds_the_same_and_another_one_is_refused(tmp_path):
    """Where some models are gone, as after an interrupt, those alone are trained anew."""
    folder, scores = tmp_path / "audit", []
    first = an_audit().run(0.9, folder, lambda *games: scores.append(games[0]))
    assert len(set(scores[0])) == 80  # each model has randomness of its own
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600} and not list(folder.glob("*.lock"))
    again = an_audit().run(0.9, folder)
    assert again.bounds == first.bounds and again.auc == first.auc and again.split_seed == first.split_seed
    assert first.models_per_second > 0 and again.models_per_second is None
    min(folder.glob("models-*.json")).unlink()
    part = an_audit().run(0.9, folder, lambda *games: scores.append(games[0]))
    assert part.models_per_second > 0 and (scores[0] != scores[1]).sum() == 16
    with pytest.raises(InputError, match=r"other settings \(epsilon\)"):
        an_audit(epsilon=1.0).run(0.9, folder)


def test_models_of_another_mechanism_architecture_or_data_are_another_audit(tmp_path):
    AuditCache(tmp_path, an_audit()._settings(0.9))
    task, net = made_up_task(), network()
    deeper = torch.nn.Sequential(*net, torch.nn.Tanh())
    for key, changed in {
        "batch_size": (dataclasses.replace(task, batch_size=9), net),
        "num_steps": (dataclasses.replace(task, num_steps=(6,)), net),
        "num_examples, images": (dataclasses.replace(task, images=task.with_target("noise")), net),
        "network": (task, deeper),
    }.items():
        with pytest.raises(InputError, match=rf"other settings \({key}\)"):
            AuditCache(tmp_path, Audit(*changed, 4.0, 0.05, 40)._settings(0.9))


@pytest.mark.parametrize("name, words", [("thesis.tex", "no membership audit"), ("settings.json", "other settings")])
def test_a_folder_of_something_else_is_left_alone(tmp_path, name, words):
    (tmp_path / name).write_text('{"editor.tabSize": 4}')
    tmp_path.chmod(0o755)
    with pytest.raises(InputError, match=words):
        an_audit().run(0.9, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name] and tmp_path.stat().st_mode & 0o777 == 0o755


def test_models_of_one_setting_are_not_judged_as_another_s(tmp_path):
    """Whatever phase I finds when its files are gone: each file of phase II names its setting."""
    audit, cache, chosen = an_audit(), AuditCache(tmp_path, {}), settings_of([4])[:2]
    with ThreadPoolExecutor(1) as threads:
        found = [audit._many(setting, cache, threads) for setting in chosen]
        assert found[0] != found[1]
        assert [audit._many(setting, cache, threads) for setting in chosen] == found


@pytest.mark.parametrize("content", ["[1.0", "[1.0]"])
def test_a_damaged_file_of_losses_is_named(tmp_path, content):
    cache = AuditCache(tmp_path, {})
    (tmp_path / "models.json").write_text(content)
    with pytest.raises(InputError, match=r"models\.json is .*damaged"):
        cache.losses("models", 2, lambda: [0.0, 0.0])
    (tmp_path / "models.json").unlink()
    assert cache.losses("models", 2, lambda: [0.5, math.inf]) == cache.losses("models", 2, list) == [0.5, math.inf]


def test_what_another_process_trains_is_waited_for_and_taken_over_if_it_ends(tmp_path):
    cache, others = AuditCache(tmp_path, {}), AuditCache(tmp_path, {})

    def trained():
        assert others.losses("a", 2, list) is None  # while it is trained, as by another process
        return [0.5, 1.5]

    assert cache.losses("a", 2, trained) == [0.5, 1.5] == others.losses("a", 2, list)

    def dies():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.losses("b", 2, dies)
    assert others.losses("b", 2, lambda: [0.0, 0.0]) == [0.0, 0.0]


def shares(folder):
    an_audit().run(0.9, folder)


@pytest.mark.slow
def test_two_processes_share_one_audit_and_find_the_same(tmp_path):
    folder = tmp_path / "audit"
    other = multiprocessing.get_context("spawn").Process(target=shares, args=(folder,))
    other.start()
    while not (folder / "settings.json").exists():
        time.sleep(0.01)
        assert other.is_alive() or other.exitcode == 0
    found = an_audit().run(0.9, folder)
    other.join()
    again = an_audit().run(0.9, folder)
    assert other.exitcode == 0 and found.bounds == again.bounds and found.auc == again.auc


def test_training_ends_when_nobody_waits_for_it():
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Stopped):
        models_of(Mechanism(21, 8, 1.0, 2), stopped=stopped).train(KEYS, TOOK)


@pytest.mark.parametrize("means, stds", [((5, -2), (0.1, 4)), ((0, 0), (1, 2))])
def test_the_distance_is_half_the_integral_of_the_difference_of_both_densities(means, stds):
    both = list(zip(means, stds, strict=True))
    samples = [mean + std * np.array([-1.0, 1.0]) / math.sqrt(2) for mean, std in both]
    edges = sorted(mean + width * std for mean, std in both for width in (-9, -1, 0, 1, 9))
    one, other = (norm(*each).pdf for each in both)
    true, _ = quad(lambda x: abs(one(x) - other(x)) / 2, -60, 60, points=edges, limit=500)
    assert distance(*samples) == pytest.approx(true, abs=1e-6)
    assert distance(samples[0], samples[0]) == 0


@pytest.mark.parametrize("num_models", [300, 20_000])
def test_the_choice_finds_the_best_setting_and_keeps_to_its_share(num_models):
    best, rng, spent = Setting("7 as 8", 1.0, 1.0, 50), np.random.default_rng(0), []

    def train(tries):
        found = []
        for setting, _, more in tries:
            spent.append(2 * more)
            same = [getattr(setting, key) == getattr(best, key) for key in vars(best)]
            found.append((rng.normal(-0.3 * sum(same), 0.5, more).tolist(), rng.normal(0, 0.5, more).tolist()))
        return found

    setting, count, found = choose((50, 100), num_models, train)
    assert found > 0.5 and (setting == best or num_models < 20_000)  # few models choose by luck
    assert count == sum(spent) <= SHARE * 2 * num_models


def test_all_of_table_7_is_tried_and_too_few_models_choose_nothing():
    assert choose((50, 100), 50, None) == (settings_of((50, 100))[0], 0, None)
    found = {(each.learning_rate, each.clipping_norm, each.num_steps) for each in settings_of((50, 100))}
    assert found == set(itertools.product((0.1, 0.5, 1.0), (0.1, 1.0, 10.0), (50, 100)))
    task = made_up_task()
    assert TARGETS[0] == "blank" and not task.candidates["blank"][0].any()
    assert [task.candidates[target][1] for target in TARGETS] == [0, 0, 8, 7, 1]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"epsilon": math.nan}, "epsilon"),
        ({"num_models": 3}, "Play at least"),
        ({"num_models": 0}, "num_models must be"),
        ({"augmult": -1}, "augmult must be"),
        ({"num_examples": 70_000}, "num_examples must be"),
        ({"confidence": 1.0}, "confidence must lie"),
        ({"data_root": "/nowhere"}, "is missing"),
    ],
)
def test_settings_that_no_audit_has_are_refused_in_one_line(change, words):
    with pytest.raises(InputError, match=words) as refusal:
        audit_membership(**{"epsilon": 1.0, "num_models": 100, "data_root": os.devnull, **change})
    assert "\n" not in str(refusal.value)
