"""The membership audit: models side by side are the product's own runs, and a claim that holds is not refuted."""

import copy
import dataclasses
import errno
import functools
import json
import math
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from sfumato.accounting import accountants
from sfumato.accounting.gaussian import epsilon_gaussian
from sfumato.accounting.mechanism import Mechanism
from sfumato.auditing import problem as problem_module
from sfumato.auditing.choice import SHARE, Setting, choose, distance, settings_of
from sfumato.auditing.kept import Kept
from sfumato.auditing.membership import Audit, _name, audit_membership
from sfumato.auditing.problem import TARGETS, Problem
from sfumato.auditing.side_by_side import Models, Product, Stopped
from sfumato.clipping import stacked as stacked_module
from sfumato.clipping.clip import Clip
from sfumato.data.images import ImageSet
from sfumato.data.sampling import poisson_batch
from sfumato.errors import InputError, MachineError
from sfumato.models.lenet import LeNet
from sfumato.randomness import Streams, key_from_seed
from sfumato.training import step as step_module
from sfumato.training.step import draw
from tests.system import of_the_system

SIDE = 12
KEYS = [key_from_seed(seed) for seed in range(3)]
TOOK = [True, False, True]


def made_up_problem(count=20, num_steps=(4,), side=SIDE):
    """Digits of noise: each class is brighter than the one before."""
    generator = torch.Generator().manual_seed(0)

    def images(number):
        labels = torch.arange(number) % 10
        pixels = torch.randint(0, 100, (number, 1, side, side), generator=generator)
        pixels = (pixels + 15 * labels[:, None, None, None]).to(torch.uint8)
        return ImageSet(pixels, labels, torch.ones(number, dtype=torch.bool), (0.13,), (0.31,))

    return Problem(images(count), problem_module.candidates(images(20)), 8, num_steps)


@functools.cache
def network(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LeNet(10, image_size=SIDE).to(dtype)


def an_audit(num_models=40, epsilon=4.0, **changes):
    return Audit(made_up_problem(), network(), epsilon, 0.05, num_models, **changes)


def alone(problem, product, mechanism, key, took, learning_rate, fixed=None):
    """One model by the product's step, written as a loop."""
    streams, step = Streams(key, {}, {}), product.step(mechanism)
    images = problem.with_target("blank", takes_part=took)
    parameters = {name: value.clone() for name, value in product.begin.items()}
    for number in range(1, mechanism.num_steps + 1):
        indices = poisson_batch(mechanism, streams.stream("sampling", number)) if fixed is None else fixed[number - 1]
        view, model = streams.stream("augmentation", number), streams.stream("random numbers inside the model", number)
        randomness = draw(mechanism, indices, product.views, view, model)
        grad_sum = product.collect(step, parameters, images, randomness)
        for name, grad in step.release(grad_sum, streams.stream("noise", number)).items():
            parameters[name] -= learning_rate * grad
    return parameters


@pytest.mark.parametrize("augmult, fixed", [(0, False), (0, True), (2, False)])
def test_a_model_among_others_is_the_products_own_run_with_its_key(augmult, fixed):
    problem, mechanism = made_up_problem(), Mechanism(21, 8, 0.5, 3)
    product = Product(network(torch.float64), 0.5, augmult)
    batches = [np.array([0, 5, 20]), np.arange(12), np.array([], dtype=np.int64)] if fixed else None
    models = Models(problem, "blank", product, mechanism, learning_rate=0.5, fixed_batches=batches)
    found = models.train(KEYS, TOOK)
    for number, (key, took) in enumerate(zip(KEYS, TOOK, strict=True)):
        true = alone(problem, product, mechanism, key, took, 0.5, batches)
        for name, value in true.items():
            torch.testing.assert_close(found[name][number], value, rtol=0, atol=1e-5)
    assert max(float((found[name] - value).abs().max()) for name, value in product.begin.items()) > 1e-2


def test_z_moves_a_model_exactly_where_it_is_drawn_and_takes_part():
    problem, mechanism = made_up_problem(), Mechanism(21, 8, 0.5, 1)
    with_it, without = [np.array([3, 20])], [np.array([3])]
    product = Product(network(torch.float64), 0.5)
    key = KEYS[:1]
    drawn, not_drawn = (
        Models(problem, "noise", product, mechanism, learning_rate=0.5, fixed_batches=batches)
        for batches in (with_it, without)
    )
    took, took_no_part = drawn.train(key, [True]), drawn.train(key, [False])
    for name, value in not_drawn.train(key, [True]).items():
        assert torch.equal(value, took_no_part[name])
    assert not torch.equal(took["9.weight"], took_no_part["9.weight"])


def test_the_noise_of_an_update_has_the_scale_of_the_claim():
    """An empty batch is noise alone: of standard deviation rate sigma / B."""
    mechanism = Mechanism(21, 8, 0.7, 1)
    product = Product(network(torch.float64), 0.1)
    batches = [np.array([], dtype=np.int64)]
    models = Models(made_up_problem(), "blank", product, mechanism, learning_rate=0.5, fixed_batches=batches)
    found = models.train(KEYS, TOOK)
    noise = torch.cat([(found[name] - value).flatten() for name, value in product.begin.items()])
    assert float(noise.std()) == pytest.approx(0.5 * 0.7 / 8, rel=5 / math.sqrt(2 * len(noise)))


@pytest.mark.parametrize("where", ["side by side", "in the product"])
def test_clipping_that_differs_from_the_products_ends_the_audit(where, monkeypatch):
    if where == "side by side":
        clip = stacked_module.Clip.__call__
        monkeypatch.setattr(stacked_module, "Clip", lambda *args: lambda norms: 2 * clip(_Clip(*args), norms))
    else:

        class Doubled(Clip):
            def __call__(self, norms):
                return 2 * super().__call__(norms)

        monkeypatch.setattr("sfumato.clipping.grad_fn.Clip", Doubled)
    models = an_audit().models(Setting("blank", 0.5, 0.1, 4))
    with pytest.raises(RuntimeError, match="differs from that of the product"):
        models.train(KEYS, TOOK)


_Clip = stacked_module.Clip


@pytest.mark.parametrize("fixed_batches", [False, True])
def test_a_sound_step_is_not_accused(fixed_batches):
    found = an_audit(epsilon=1.0, fixed_batches=fixed_batches).run(0.99)
    assert found.violated is False and found.target_epsilon == 1
    assert found.num_games == 80 and found.num_models == 40 and found.models_per_second > 0
    assert fixed_batches or 0.99 < found.nominal_epsilon <= 1


def test_noise_that_is_missing_is_caught(monkeypatch):
    monkeypatch.setattr(step_module, "add_noise", lambda total, stddev, stream: total)
    assert an_audit(epsilon=1.0, fixed_batches=True).run(0.9).violated


def test_with_fixed_batches_the_claim_is_gaussian_over_the_updates_with_z():
    audit = Audit(made_up_problem(num_steps=(40,)), network(), 2.0, 0.05, 40, fixed_batches=True)
    setting = Setting("blank", 0.5, 1.0, 40)
    with_z = sum(20 in batch for batch in audit.batches(setting))
    claim = audit.claim(setting)
    assert 1 < with_z < 40 and claim.num_steps == with_z
    mu = math.sqrt(with_z) / audit.mechanism(setting).noise_multiplier
    assert accountants.epsilon(claim, 0.05).epsilon == pytest.approx(epsilon_gaussian(mu, 0.05), rel=1e-6)
    assert audit.batches(setting)[0].tolist() == audit.batches(setting)[0].tolist()
    assert an_audit().batches(setting) is None and an_audit().claim(setting) == an_audit().mechanism(setting)


def test_an_interrupted_audit_goes_on_to_the_same_scores(tmp_path):
    """Keys outlive the interrupt, and are gone when the audit is done."""
    folder, audit = tmp_path / "audit", an_audit()
    kept = Kept(folder, audit._settings(0.9))
    keys = []

    def killed(given):
        keys.extend(given)
        raise KeyboardInterrupt

    first_of = f"models-{_name(settings_of([4])[0])}-0000000"
    with pytest.raises(KeyboardInterrupt):
        kept.losses(first_of, 16, killed)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600, 0o600]
    first = audit.run(0.9, folder)
    setting = Setting(**{name: value for name, value in dict(first.winner).items() if name != "distance"})
    assert _name(setting) in first_of
    expected = an_audit().models(setting).trained_losses(keys, [True] * 8 + [False] * 8)
    assert Kept(folder, audit._settings(0.9)).losses(first_of, 16, killed) == pytest.approx(expected, rel=1e-4)
    assert not list(folder.glob("*.keys"))
    again = an_audit().run(0.9, folder)
    assert again.bounds == first.bounds and again.auc == first.auc and again.split_seed == first.split_seed
    with pytest.raises(InputError, match=r"other settings \(epsilon\)"):
        an_audit(epsilon=1.0).run(0.9, folder)


def test_a_copy_under_another_name_is_neither_other_models_nor_their_keys(tmp_path):
    told, keys = [], []
    audit = an_audit()
    audit.run(0.9, tmp_path)
    one, other = sorted(tmp_path.glob("models-*.json"))[:2]
    kept = other.read_bytes()
    other.write_bytes(one.read_bytes())
    with pytest.raises(InputError, match="holds the models of another part. Delete it"):
        an_audit().run(0.9, tmp_path)
    other.write_bytes(kept)
    folder = Kept(tmp_path, audit._settings(0.9))

    def killed(given):
        keys.append(given)
        raise KeyboardInterrupt

    for name in ("first", "second"):
        with pytest.raises(KeyboardInterrupt):
            folder.losses(name, 16, killed)
        (tmp_path / "second.keys").write_bytes((tmp_path / "first.keys").read_bytes())
    assert len({key for part in keys for key in part}) == 32
    setting = settings_of([4])[0]
    audit.models(setting).trained_losses(keys[0], [True] * 16, told.append)
    assert sum(told) == 16 * setting.num_steps and max(told) <= 16  # each update is told of, not each part


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("words", encoding="utf-8")
    with pytest.raises(InputError, match="holds no membership audit"):
        an_audit().run(0.9, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_every_model_has_a_key_of_its_own(tmp_path):
    seen = []
    for folder in (None, tmp_path):
        kept = Kept(folder, {})
        for name in ("a", "b"):
            kept.losses(name, 8, lambda keys: seen.extend(keys) or [0.0] * len(keys))
    assert len(set(seen)) == len(seen) == 32 and {len(key) for key in seen} == {32}


def test_training_ends_when_nobody_waits_for_it():
    stopped = threading.Event()
    stopped.set()
    product = Product(network(), 1.0)
    models = Models(made_up_problem(), "blank", product, Mechanism(21, 8, 1.0, 2), learning_rate=1.0, stopped=stopped)
    with pytest.raises(Stopped):
        models.train(KEYS, TOOK)


@pytest.mark.parametrize("means, stds", [((0, 1), (1, 1)), ((0, 1), (1, 3)), ((5, -2), (0.1, 4)), ((0, 0), (1, 2))])
def test_the_distance_is_half_the_integral_of_the_difference_of_both_densities(means, stds):
    samples = [mean + std * np.array([-1.0, 1.0]) / math.sqrt(2) for mean, std in zip(means, stds, strict=True)]
    densities = [norm(mean, std).pdf for mean, std in zip(means, stds, strict=True)]
    edges = sorted(mean + width * std for mean, std in zip(means, stds, strict=True) for width in (-9, -1, 0, 1, 9))
    true, _ = quad(lambda x: abs(densities[0](x) - densities[1](x)) / 2, -60, 60, points=edges, limit=500)
    assert distance(*samples) == pytest.approx(true, abs=1e-6)
    assert distance(samples[0], samples[0]) == 0


@pytest.mark.parametrize("num_models", [300, 1000, 20_000])
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


def test_too_few_models_choose_nothing():
    setting, count, found = choose((50, 100), 50, None)
    assert setting == settings_of((50, 100))[0] and count == 0 and found is None


def test_all_of_table_7_is_tried():
    found = {(each.learning_rate, each.clipping_norm, each.num_steps) for each in settings_of((50, 100))}
    assert found == {
        (rate, clip, steps) for rate in (0.1, 0.5, 1.0) for clip in (0.1, 1.0, 10.0) for steps in (50, 100)
    }
    problem = made_up_problem()
    assert TARGETS[0] == "blank" and not problem.candidates["blank"][0].any()
    assert [problem.candidates[target][1] for target in TARGETS] == [0, 0, 8, 7, 1]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"delta": 0.0}, "delta must lie"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"num_models": 3}, "Play at least"),
        ({"num_models": 0}, "num_models must be"),
        ({"augmult": -1}, "augmult must be"),
        ({"num_steps": 0}, "num_steps must be"),
        ({"num_steps": 2.5}, "num_steps must be"),
        ({"num_examples": 0}, "num_examples must be"),
        ({"num_examples": 70_000}, "num_examples must be"),
        ({"confidence": 1.0}, "confidence must lie"),
        ({"data_root": "/nowhere"}, "is missing"),
        ({"num_examples": "100"}, "num_examples must be a whole number"),
        ({"epsilon": None}, "^epsilon must be a number"),
        ({"epsilon": Fraction(1)}, "^epsilon must be a number"),
        ({"fixed_batches": None}, "fixed_batches must be true or false"),
        ({"output": "a\0b"}, "output = .* is no path"),
        ({"output": "a" * 300}, "output = .* is no path"),
        ({"output": 3}, "output must be a path"),
        ({"num_models": True}, "num_models must be a whole number"),
    ],
)
def test_settings_that_no_audit_has_are_refused_in_one_line(change, words):
    with pytest.raises(InputError, match=words) as refusal:
        audit_membership(**{"epsilon": 1.0, "num_models": 100, "data_root": os.devnull, **change})
    assert "\n" not in str(refusal.value)


def test_models_of_one_setting_are_not_judged_as_another_s(tmp_path):
    """Whatever phase I finds when its files are gone: each file of phase II names its setting."""
    audit, kept = an_audit(), Kept(tmp_path, {})
    threads, chosen = ThreadPoolExecutor(1), settings_of([4])[:2]
    found = [audit._many(setting, kept, threads) for setting in chosen]
    assert found[0] != found[1]
    assert [audit._many(setting, kept, threads) for setting in chosen] == found
    threads.shutdown()


def test_an_audit_of_other_code_weights_or_candidates_does_not_go_on(tmp_path):
    audit = an_audit()
    Kept(tmp_path, audit._settings(0.9))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        others = LeNet(10, image_size=SIDE)
    with pytest.raises(InputError, match=r"other settings \(network\)"):
        Kept(tmp_path, Audit(made_up_problem(), others, 4.0, 0.05, 40)._settings(0.9))
    another = made_up_problem()
    another.candidates["blank"] = (another.candidates["noise"][0], 0)
    with pytest.raises(InputError, match=r"other settings \(candidates\)"):
        Kept(tmp_path, Audit(another, network(), 4.0, 0.05, 40)._settings(0.9))
    with pytest.raises(InputError, match=r"other settings \(code\)"):
        Kept(tmp_path, {**audit._settings(0.9), "code": "another"})


@pytest.mark.parametrize(
    "content", ['["x", 1.0]', "[null, 1.0]", "[[1.0], 2.0]", "[true, false]", "[1.0", "[1.0]", "{}"]
)
def test_a_damaged_file_of_losses_is_named(tmp_path, content):
    kept = Kept(tmp_path, {})
    for written in (content, f'{{"chunk": "models", "losses": {content}}}'):
        (tmp_path / "models.json").write_text(written)
        with pytest.raises(InputError, match="is damaged. Delete it"):
            kept.losses("models", 2, lambda keys: [0.0, 0.0])
    (tmp_path / "models.json").unlink()
    assert kept.losses("models", 2, lambda keys: [0.5, math.inf]) == kept.losses("models", 2, list) == [0.5, math.inf]


def test_what_another_process_trains_is_waited_for_and_taken_over_if_it_ends(tmp_path):
    kept, others, seen = Kept(tmp_path, {}), Kept(tmp_path, {}), []

    def trained(keys):
        seen.append(list(keys))
        assert others.losses("a", 2, list) is None  # while it is trained, as by another process
        return [0.5, 1.5]

    assert kept.losses("a", 2, trained) == [0.5, 1.5] == others.losses("a", 2, list)

    def dies(keys):
        seen.append(list(keys))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.losses("b", 2, dies)
    assert others.losses("b", 2, lambda keys: seen.append(list(keys)) or [0.0, 0.0]) == [0.0, 0.0]
    assert seen[1] == seen[2] != seen[0]


@pytest.mark.parametrize("left", [b"", bytes(40), bytes(64), bytes(96)])
def test_a_process_that_died_while_it_wrote_keys_trained_nothing_with_them(tmp_path, left):
    """After a power cut a file may have its length, and zeros in it."""
    seen = []
    (tmp_path / "settings.json").write_text(json.dumps({"split_seed": 1}))
    (tmp_path / "a.keys").write_bytes(left)
    Kept(tmp_path, {}).losses("a", 2, lambda keys: seen.extend(keys) or [0.0, 0.0])
    assert len(set(seen)) == 2 and bytes(32) not in seen and not list(tmp_path.glob("*.keys"))


def shares(folder):
    an_audit().run(0.9, folder)


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
    assert not list(folder.glob("*.keys"))


def test_fixed_batches_without_z_are_refused_before_anything_is_trained(tmp_path, monkeypatch):
    audit, mechanism = an_audit(fixed_batches=True), Mechanism(21, 8, 1.0, 4)
    monkeypatch.setattr(audit, "mechanism", lambda setting: mechanism)
    monkeypatch.setattr(audit, "batches", lambda setting: 4 * [np.arange(20)])
    with pytest.raises(InputError, match="no batch has z"):
        audit.run(0.9, tmp_path / "audit")
    assert [path.name for path in (tmp_path / "audit").iterdir()] == ["settings.json"]


def test_a_folder_that_is_refused_is_left_as_it_was(tmp_path):
    (tmp_path / "settings.json").write_text('{"editor.tabSize": 4}')
    (tmp_path / "models.json").write_text("[]")
    tmp_path.chmod(0o755)
    with pytest.raises(InputError, match="other settings"):
        Kept(tmp_path, {"epsilon": 1.0})
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_link_in_the_folder_is_refused_and_not_followed(tmp_path):
    words = tmp_path / "words"
    words.write_text("precious")
    kept = Kept(tmp_path / "audit", {})
    (tmp_path / "audit" / "models.keys").symlink_to(words)
    with pytest.raises(InputError, match="symbolic link"):
        Kept(tmp_path / "audit", {})
    with pytest.raises(MachineError):
        kept.losses("models", 2, lambda keys: [0.0, 0.0])
    assert words.read_text() == "precious"


def test_a_chunk_that_another_process_ends_while_this_one_opens_its_keys_is_read(tmp_path, monkeypatch):
    kept, others, opened = Kept(tmp_path, {}), Kept(tmp_path, {}), os.open

    def slow(path, *arguments):
        descriptor = opened(path, *arguments)
        if str(path).endswith("a.keys"):
            monkeypatch.setattr(os, "open", opened)
            assert others.losses("a", 2, lambda keys: [0.5, 1.5]) == [0.5, 1.5]
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    assert kept.losses("a", 2, lambda keys: pytest.fail("trained twice")) == [0.5, 1.5]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"epsilon": 1.0}', '{"epsilon": 1.0, "split_seed": -1}'])
def test_damaged_settings_are_said_to_be_damaged(tmp_path, content):
    Kept(tmp_path, {"epsilon": 1.0})
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(InputError, match=r"settings\.json is damaged. Restore it, or choose another --output"):
        Kept(tmp_path, {"epsilon": 1.0})


def test_a_folder_below_a_file_is_none(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(InputError, match="file is no folder. Choose another --output"):
        Kept(tmp_path / "file" / "below" / "audit", {})


def test_a_file_of_keys_with_another_name_elsewhere_is_left_as_it_is(tmp_path):
    kept, words = Kept(tmp_path / "audit", {}), tmp_path / "words"
    words.write_text("precious")
    (tmp_path / "audit" / "models.keys").hardlink_to(words)
    with pytest.raises(InputError, match="has another name elsewhere"):
        kept.losses("models", 2, lambda keys: [0.0, 0.0])
    assert words.read_text() == "precious"


def test_a_fault_of_the_disk_is_no_damage_of_a_file(tmp_path, monkeypatch):
    kept = Kept(tmp_path, {})
    kept.losses("models", 2, lambda keys: [0.0, 1.0])

    @of_the_system
    def fails(path):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as there:
        there.setattr(type(tmp_path), "read_bytes", fails)
        with pytest.raises(MachineError, match="cannot be read: Too many open files"):
            kept.losses("models", 2, list)
    assert kept.losses("models", 2, list) == [0.0, 1.0]


def test_models_of_another_mechanism_or_architecture_are_another_audit(tmp_path):
    audit = an_audit()
    Kept(tmp_path, audit._settings(0.9))
    problem = made_up_problem()
    for changed in (dataclasses.replace(problem, batch_size=9), dataclasses.replace(problem, num_steps=(5,))):
        with pytest.raises(InputError, match=r"other settings \((batch_size|num_steps)\)"):
            Kept(tmp_path, Audit(changed, network(), 4.0, 0.05, 40)._settings(0.9))
    other = copy.deepcopy(network())
    other[next(place for place, layer in enumerate(other) if isinstance(layer, (torch.nn.ReLU, torch.nn.Tanh)))] = (
        torch.nn.Sigmoid()
    )
    with pytest.raises(InputError, match=r"other settings \(network\)"):
        Kept(tmp_path, Audit(problem, other, 4.0, 0.05, 40)._settings(0.9))


def test_the_rate_is_that_of_what_was_trained_and_waiting_is_told(tmp_path):
    first = an_audit().run(0.9, tmp_path / "audit")
    said = []
    again = an_audit(report=said.append).run(0.9, tmp_path / "audit")
    assert first.models_per_second > 0 and again.models_per_second is None
    answers = iter([None, ([0.0], [1.0])])
    with ThreadPoolExecutor(1) as threads:
        assert an_audit(report=said.append)._each(lambda number: next(answers), [0], threads) == [([0.0], [1.0])]
    assert said[-1].startswith("waiting for another process, which trains 1 parts")
