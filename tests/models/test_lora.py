"""Low-rank updates: exact per-example gradients, and merged weights that compute the same without them."""

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from sfumato.models import build
from sfumato.models.lora import add_low_rank, merged_state_dict
from sfumato.models.trainable import classifier_name, freeze_statistics, select_trainable
from tests.clipping.problems import distance, norm

SHAPE = {"channels": 3, "num_classes": 7, "seed": 1}


class Own(nn.Module):
    """One layer in two places, one weight in two layers, strided, padded and grouped convolutions, and layers whose
    weights are read without a call (by an encoder in evaluation mode alone).
    """

    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(3, 8, 1, stride=2, padding=1, padding_mode="reflect"),
            nn.SiLU(),
            nn.Conv2d(8, 8, 1, groups=2),
            nn.Conv2d(8, 8, 3),
        )
        self.twice, self.one, self.other, self.read = (nn.Linear(8, 8) for _ in range(4))
        self.again = self.twice
        self.other.weight = self.one.weight
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, images):
        tokens = self.convs(images).flatten(2).transpose(1, 2)
        tokens = self.other(self.one(self.again(self.twice(tokens).tanh()))) @ self.read.weight
        return self.head(self.encoder(tokens).mean(1))


def made(name, size):
    torch.manual_seed(0)
    if name == "own":
        return Own()
    return build(name, image_size=size, options={"depth": 1} if name == "timm:test_vit" else {}, **SHAPE)


def network(name="timm:test_vit", size=32, rank=3):
    model = made(name, size)
    freeze_statistics(model)
    added = add_low_rank(model, rank, classifier_name(model, 7), torch.zeros(1, 3, size, size), seed=2)
    select_trainable(model, "lora", 7)
    return model, added


@torch.no_grad()
def moved(model):
    """As training leaves it: B is no longer zero, and no head is."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


NETWORKS = {
    "own": (32, {"convs.0", "twice"}),
    "timm:test_vit": (32, {f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}),
    "timm:test_resnet": (32, {"layer2.0.downsample.1", "layer3.0.conv1", "layer3.0.conv3", "layer3.0.downsample.1"}),
}


@pytest.mark.parametrize(("name", "size", "some"), [(name, *rest) for name, rest in NETWORKS.items()])
@torch.no_grad()
def test_merged_weights_compute_what_low_rank_updates_do_and_these_nothing_at_first(name, size, some):
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    plain = made(name, size).double().eval()
    model, added = network(name, size)
    assert some <= set(added) and (name != "own" or some == set(added))
    at_first = plain(images)
    torch.testing.assert_close(model.double().eval()(images), at_first, rtol=1e-9, atol=1e-9)
    moved(model)
    plain.load_state_dict(merged_state_dict(model))  # the same names and shapes: nothing of the updates is left
    torch.testing.assert_close(model(images), plain(images), rtol=1e-9, atol=1e-9)
    assert distance({"": plain(images)}, {"": at_first}) > 1e-3
    for layer in added:
        changed = plain.get_submodule(layer).weight - model.get_submodule(layer).weight
        assert torch.linalg.matrix_rank(changed.flatten(1), rtol=1e-9) == min(3, *changed.shape[:2])


def test_updates_are_scaled_by_alpha_over_rank():
    """So one learning rate suits every rank (Hu et al. 2022, Section 4.1)."""
    for rank in (2, 8):
        model, added = network(rank=rank)
        layer = model.get_submodule(added[0])
        nn.init.ones_(layer.lora_B)
        expected = 8 / rank * layer.lora_A.sum(0).expand_as(layer.weight)
        torch.testing.assert_close(layer.merged_weight() - layer.weight, expected, rtol=1e-3, atol=1e-5)
        assert layer.lora_A.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.2)


def test_updates_and_classifier_train_and_nothing_else():
    model, added = network()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.lora_{key}" for layer in added for key in "AB"} | {"head.weight", "head.bias"}


def sums(model, images, engine):
    grad_fn = clipped_grad(model, nn.CrossEntropyLoss(), clipping_norm=1.0, microbatch_size=4, engine=engine)
    out = grad_fn(images, torch.arange(len(images)) % 7)
    assert grad_fn.engine == engine
    return out.grad_sum


@pytest.mark.parametrize("name", ["own", "timm:test_vit"])
def test_the_fast_engine_s_clipped_sum_is_that_of_single_images(name):
    model, images = moved(network(name)[0]), torch.randn(3, 3, 32, 32, dtype=torch.float64)
    expected = sums(model, images, "reference")
    assert distance(sums(model, images, "graph"), expected) <= 1e-9 * norm(expected)


def test_a_network_without_such_layers_is_refused_in_one_line():
    with pytest.raises(InputError, match=r"calls no linear layer or 1 x 1 convolution .* model.trainable=classifier"):
        network("small_cnn")


class ReadsBeside(nn.Module):
    """Calls a layer, and uses its weight once more by itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, images):
        x = torch.relu(self.layer(images.flatten(1)))
        return self.head(x @ self.layer.weight)


def test_a_network_that_reads_a_weight_beside_its_layer_is_refused_and_one_that_does_not_is_as_it_was():
    with pytest.raises(InputError, match="reads the weight of a layer beside calling it"):
        add_low_rank(ReadsBeside(), 2, "head", torch.zeros(1, 1, 4, 4), seed=0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    assert add_low_rank(plain, 2, "3", torch.zeros(1, 1, 4, 4), seed=0) == ["1"] and plain.training
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in before.items())
    assert not plain[1].lora_B.any() and plain[1].lora_A.any()
