"""Features that are computed once: the same run as on images, kept between runs, and private like images."""

import dataclasses
import json

import pytest
import torch
from torch.nn import functional as F

from sfumato import config
from sfumato.clipping import clipped_grad
from sfumato.data import store
from sfumato.data.images import ImageSet
from sfumato.evaluation.trained import load as load_trained
from sfumato.models import build
from sfumato.models.layers import Classifier, UnitLinear
from sfumato.models.trainable import Backbone, classifier_name
from sfumato.run_folder.checkpoint import Checkpoints
from sfumato.training import features
from sfumato.training.features import features_of
from sfumato.training.trainer import train
from tests.clipping.problems import cross_entropy, distance
from tests.data.conftest import cache_home, quiet, refused  # noqa: F401  (a fixture for all)

CPU = torch.device("cpu")


def some_images(count=300, seed=0):
    pixels = torch.randint(0, 256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    readable = torch.arange(count) != 7
    return ImageSet(pixels, torch.arange(count) % 4, readable, (0.5,) * 3, (0.5,) * 3)


def backbone(seed=1):
    model = build("small_cnn", image_size=8, channels=3, num_classes=4, seed=seed)
    return Backbone(model, classifier_name(model, 4), torch.zeros(1, 3, 8, 8))


def test_features_are_what_the_network_makes_of_each_image_and_zeros_of_none():
    images = some_images()
    found = features_of(backbone(), images, CPU, quiet)
    with torch.no_grad():
        alone = torch.cat([backbone().eval()(images.batch(torch.tensor([i]))) for i in range(len(images))])
    alone[7] = 0
    torch.testing.assert_close(found.batch(torch.arange(len(images))), alone, rtol=1e-5, atol=1e-5)


def test_one_image_changes_no_other_image_s_features_by_a_bit():
    images = some_images()
    before = features_of(backbone(), images, CPU, quiet).batch(torch.arange(300))
    pixels = images.stored.clone()
    pixels[20] = 255
    changed = dataclasses.replace(images, stored=pixels)
    after = features_of(backbone(), changed, CPU, quiet).batch(torch.arange(300))
    others = torch.arange(300) != 20
    assert torch.equal(before[others], after[others]) and not torch.equal(before[20], after[20])


def test_always_as_many_images_lie_in_a_batch():
    """Libraries choose kernels by the number of rows, and kernels round differently."""
    rows, network = [], backbone()
    network.register_forward_pre_hook(lambda module, given: rows.append(len(given[0])))
    features_of(network, some_images(), CPU, quiet)
    assert set(rows[1:]) == {features.ROWS["cpu"]} and rows[0] == 8  # made-up ones first


def test_they_are_computed_once_for_the_same_weights_and_images(monkeypatch):
    computed = []
    rows = features._rows
    monkeypatch.setattr(features, "_rows", lambda *given: computed.append(1) or rows(*given))

    def count(*given):
        computed.clear()
        features_of(*given, CPU, quiet)
        return len(computed)

    assert count(backbone(), some_images()) > 1 and count(backbone(), some_images()) == 0
    assert count(backbone(seed=2), some_images()) > 1 and count(backbone(), some_images(seed=2)) > 1
    images = some_images()
    relabelled = dataclasses.replace(images, labels=images.labels.flip(0))
    assert count(backbone(), relabelled) == 0  # they do not depend on labels
    assert count(backbone(), images) == 0
    trained = backbone().requires_grad_(False)
    last = trained._model.get_submodule(trained._name).requires_grad_()
    count(trained, images)
    torch.nn.init.ones_(last.weight)
    assert count(trained, images) == 0  # nor on what is trained behind them


class Scaled(torch.nn.Module):
    """What it computes follows from a setting, a buffer that no state holds, and its code."""

    def __init__(self, scale=1.0, shift=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.body, self.fc = scale, torch.nn.Linear(3 * 64, 6), torch.nn.Linear(6, 4)
        self.register_buffer("shift", torch.tensor(shift), persistent=False)

    def forward(self, images):
        return self.fc(self.body(images.flatten(1)) * self.scale + self.shift)


@pytest.mark.parametrize("change", [{"scale": -1.0}, {"shift": 1.0}])
def test_features_of_another_setting_are_not_taken_from_the_cache(change):
    one, other = (features_of(frozen(net), some_images(), CPU, quiet) for net in (Scaled(), Scaled(**change)))
    assert not torch.allclose(one.stored, other.stored)


class Network(torch.nn.Module):
    """A classifier of so many features, and what is computed with it."""

    def __init__(self, compute, num_features=3 * 64):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.compute = torch.nn.Linear(num_features, 4), compute

    def forward(self, images):
        return self.compute(self.fc, images)


def frozen(network):
    return Backbone(network, "fc", torch.zeros(1, 3, 8, 8))


def steered(fc, images):
    """The classifier's weights, detached, say where to look (class activation maps)."""
    maps = torch.einsum("kc,nchw->nkhw", fc.weight.detach(), images).amax(1, keepdim=True)
    return fc((images * maps.sigmoid()).mean((2, 3)))


def test_features_that_the_classifier_s_weights_steer_are_not_computed_once():
    refused("is not the last thing", frozen, Network(steered, 3))


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


TAILS = [
    lambda values: 10 * values,
    lambda values: 0.5 * torch.tanh(values / 0.5),
    lambda values: values.clamp(-50, 50),
    lambda values: F.layer_norm(values, (4,)),
    Backwards.apply,
]


@pytest.mark.parametrize("tail", TAILS)
def test_what_follows_a_classifier_of_zeros_is_found(tail):
    """It vanishes or stays small there."""
    model, plain = (
        Network(lambda fc, images, end=end: end(fc(images.flatten(1)))) for end in (tail, torch.nn.Identity())
    )
    for value in [*model.parameters(), *plain.parameters()]:
        torch.nn.init.zeros_(value)
    refused("is not the last thing", frozen, model)
    assert not any(value.any() for value in model.parameters())  # as they were
    frozen(plain)


def standardised(fc, images):
    """Each image by its own pixels: a blank one gives NaN."""
    values = images.flatten(1)
    return fc((values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True))


def test_a_blank_image_ends_no_run_and_contributes_nothing():
    """Whether there is a model would say whether the image was there."""
    images = some_images()
    images.stored[30] = 0
    lines = []
    found = features_of(frozen(Network(standardised)), images, CPU, lines.append)
    assert not found.stored[30].isfinite().any() and found.stored[:30].isfinite().all()
    assert any("features of 1 of 300 images are not finite" in line for line in lines)
    torch.manual_seed(0)
    grad_fn = clipped_grad(Classifier(torch.nn.Linear(192, 4), "fc"), cross_entropy, clipping_norm=1.0)
    rows, labels = found.stored[28:33], images.labels[28:33]
    is_padding = torch.arange(5) == 2
    with_it, without = grad_fn(rows, labels), grad_fn(rows, labels, is_padding=is_padding)
    assert grad_fn.engine == "closed_form" and distance(with_it.grad_sum, without.grad_sum) == 0


def test_a_process_that_dies_leaves_what_it_has(monkeypatch):
    monkeypatch.setattr(features, "_PART", 64)
    parts = []
    rows = features._rows

    def dying(*given):
        parts.append(1)
        if len(parts) == 2 * 64 // features.ROWS["cpu"] + 1:
            raise KeyboardInterrupt
        return rows(*given)

    monkeypatch.setattr(features, "_rows", dying)
    with pytest.raises(KeyboardInterrupt):
        features_of(backbone(), some_images(), CPU, quiet)
    lines = []
    found = features_of(backbone(), some_images(), CPU, lines.append)
    assert "features of 172 images" in lines[0]
    monkeypatch.setattr(features, "_rows", rows)
    monkeypatch.setattr(store, "slot_of", lambda *given: None)
    assert torch.equal(found.stored, features_of(backbone(), some_images(), CPU, lines.append).stored)


@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float32), (False, torch.float64)])
@pytest.mark.parametrize("kind", [torch.nn.Linear, UnitLinear])
def test_the_closed_form_is_the_loop_over_single_examples(bias, dtype, kind):
    torch.manual_seed(0)
    layer = kind(40, 5, bias=bias).to(dtype)
    rows, labels = torch.randn(70, 40, dtype=dtype), torch.arange(70) % 5
    rows[3], rows[4], rows[5] = 0.0, float("nan"), 1e12
    model = Classifier(layer, "head.fc")
    closed, loop = (
        clipped_grad(model, cross_entropy, clipping_norm=1.0, engine=engine, microbatch_size=32)
        for engine in ("auto", "reference")
    )
    one, other = closed(rows, labels), loop(rows, labels)
    assert closed.engine == "closed_form" and list(one.grad_sum) == [name for name, _ in model.named_parameters()]
    torch.testing.assert_close(one.grad_norms[:3], other.grad_norms[:3])
    assert distance(one.grad_sum, other.grad_sum) < (1e-5 if dtype == torch.float32 else 1e-12)


def test_the_closed_form_is_for_plain_weights_of_the_features_own_type_in_float32_and_more():
    def engine_of(layer, rows, **options):
        grad_fn = clipped_grad(Classifier(layer, "fc"), cross_entropy, clipping_norm=1.0, **options)
        grad_fn(rows, torch.arange(6) % 5)
        return grad_fn.engine

    rows, layer = torch.randn(6, 40), torch.nn.Linear(40, 5)
    assert engine_of(layer, rows) == "closed_form"
    assert engine_of(layer, rows, precision="bf16") == "graph"
    assert engine_of(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(40, 5)), rows) == "graph"
    assert engine_of(torch.nn.Linear(40, 5).bfloat16(), rows.bfloat16()) != "closed_form"


def test_no_example_counts_for_more_than_one_in_the_closed_form():
    torch.manual_seed(0)
    model = Classifier(torch.nn.Linear(40, 5), "fc")
    grad_fn = clipped_grad(model, cross_entropy, clipping_norm=1e-3)
    for scale in (1e-30, 1e-3, 1.0, 1e10, 1e25, 3e38):
        rows = torch.randn(1, 40).clamp(-1, 1) * scale
        total = grad_fn(rows, torch.tensor([2])).grad_sum
        assert sum(value.square().sum() for value in total.values()).sqrt() <= 1.00001, scale


def squares(outputs, targets):
    return (outputs - targets[:, None]).square().sum(1)


@pytest.mark.parametrize(
    ("loss", "weight", "feature", "target", "clipping_norm", "bias"),
    [
        (cross_entropy, 52.2 / (3e18 * 16), 3e18, 0, 1e-12, True),
        (cross_entropy, 51.5 / (3e18 * 16), 3e18, 0, 1e-6, True),
        (squares, 0.0, 2e-23, 3e18, 1e-5, False),
        (squares, 0.0, 1e-22, 1e18, 1e-3, False),
    ],
)
def test_a_tiny_and_a_large_factor_are_clipped(loss, weight, feature, target, clipping_norm, bias):
    layer = torch.nn.Linear(16, 3, bias=bias)
    layer.weight.data.zero_()[0] = weight
    if bias:
        layer.bias.data.zero_()
    grad_fn = clipped_grad(Classifier(layer, "fc"), loss, clipping_norm=clipping_norm)
    total = grad_fn(torch.full((1, 16), feature), torch.tensor([target], dtype=torch.int64 if bias else None)).grad_sum
    assert grad_fn.engine == "closed_form"
    assert torch.linalg.vector_norm(torch.cat([value.flatten() for value in total.values()])) <= 1.00001


def recipe(**model):
    return {
        "data": {"name": "digits"},
        "model": {"name": "small_cnn", "trainable": "classifier", "features": "raw", **model},
        "privacy": {"target_epsilon": 3.0},
        "training": {"batch_size": 256, "num_steps": 5},
        "run": {"seed": 3},
    }


def test_a_run_on_features_ends_as_one_on_images(tmp_path):
    """With augmentation (one view, the image itself) nothing can be computed once."""
    values = {**recipe(), "privacy": {"noise_multiplier": 0}}
    on_features = train(values, tmp_path / "features")
    on_images = train(values | {"augmentation": {"kind": "none", "augmult": 1}}, tmp_path / "images")
    one, other = (load_trained(tmp_path / name).model.state_dict() for name in ("features", "images"))
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-5)
    assert on_features.num_parameters == on_images.num_parameters < 6000
    found = Checkpoints(tmp_path / "features/owner/checkpoints").newest()
    assert found is not None and found.facts["speed"]["engine"] == "closed_form"


def weights_of(folder, seed=3):
    train({**recipe(), "model": {"name": "small_cnn"}, "run": {"seed": seed}}, folder)
    return str(folder)


def test_weights_of_a_run_start_another_and_the_certificate_names_them(tmp_path):
    given = weights_of(tmp_path / "first")
    refused("pretrained_on", train, recipe(init_from=given), tmp_path / "second")
    result = train(recipe(init_from=given, pretrained_on="digits, five steps"), tmp_path / "second")
    certificate = json.loads((tmp_path / "second/privacy.json").read_text())
    assert "pre-training data: digits, five steps" in certificate["not_covered"]
    public = certificate["public_inputs"]
    assert public["pretrained_on"] == "digits, five steps" and len(public["init_sha256"]) == 64
    first, second = (load_trained(tmp_path / name).model.state_dict() for name in ("first", "second"))
    name = classifier_name(load_trained(tmp_path / "first").model, 10)
    for key, value in second.items():
        assert torch.equal(value, first[key]) != key.startswith(f"{name}.")
    kept = (tmp_path / "second/recipe.toml").read_text()
    assert given not in kept and given not in json.dumps(certificate)
    assert result.num_parameters < 6000


def test_weights_that_lack_what_would_stay_random_for_good_are_refused(tmp_path):
    tensors = load_trained(weights_of(tmp_path / "first")).model.state_dict()
    lacking = next(name for name in tensors if tensors[name].ndim == 4)
    torch.save({name: value for name, value in tensors.items() if name != lacking}, tmp_path / "w.pth")
    given = {"init_from": str(tmp_path / "w.pth"), "pretrained_on": "digits"}
    refused(f"lack {lacking}, which do not train", train, recipe(**given), tmp_path / "second")
    assert not (tmp_path / "second").exists()
    train(recipe(**given, trainable="all"), tmp_path / "third")


def test_a_repair_that_changes_what_weights_compute_is_refused(tmp_path):
    shape = {"image_size": 32, "channels": 1, "num_classes": 10, "seed": 0}
    torch.save(build("timm:test_resnet", **shape).state_dict(), tmp_path / "w.pth")
    given = {"name": "timm:test_resnet", "init_from": str(tmp_path / "w.pth"), "pretrained_on": "nothing"}
    values = recipe(**given) | {"data": {"name": "digits", "image_size": 32}}
    fixed = {**values, "model": values["model"] | {"fix": "groupnorm"}}
    refused("Leave model.fix out", train, fixed, tmp_path / "fixed")
    train(values, tmp_path / "frozen")


def test_other_weights_than_a_run_s_or_than_the_recipe_s_digest_says_are_refused(tmp_path):
    given, other = (weights_of(tmp_path / f"weights{seed}", seed) for seed in (3, 4))
    stated = recipe(pretrained_on="digits", init_from=given, init_sha256="0" * 64)
    refused("holds other weights", train, stated, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(recipe(pretrained_on="digits", init_from=given), tmp_path / "run")
    changed = recipe(pretrained_on="digits", init_from=other)
    refused(r"model\.init_sha256 was", train, changed, tmp_path / "run", resume=True)


def test_a_packaged_network_brings_its_weights_constants_and_what_trains():
    values = {"data": {"name": "cifar10"}, "model": {"name": "efficientnet_lite0"}}
    parsed = config.parse(values)
    assert (parsed.data.image_size, parsed.data.channels, parsed.data.mean) == (128, 3, [0.5] * 3)
    assert (parsed.model.init_from, parsed.model.trainable) == ("package", "classifier")
    assert "ImageNet" in parsed.model.pretrained_on
    values["data"] = {"name": "mnist", "image_size": 64}
    assert config.parse(values).data.image_size == 64


class Mixing(torch.nn.Module):
    """Its features are those of the whole batch, in evaluation mode too."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = torch.nn.Linear(64, num_classes)

    def forward(self, images):
        return self.head(images.flatten(1) - images.flatten(1).mean(0))


def test_features_that_depend_on_the_images_beside_are_refused(tmp_path):
    values = {**recipe(), "model": {"name": f"{__name__}:Mixing", "trainable": "classifier"}}
    refused("evaluation mode", train, values, tmp_path / "run", trust=[__name__])


def test_a_network_s_dropout_is_off_where_features_are_computed():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 4)).train()
    frozen = Backbone(model, "2", torch.zeros(1, 1, 8, 8))
    model.train()
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(frozen(images), images.flatten(1)) and model.training
