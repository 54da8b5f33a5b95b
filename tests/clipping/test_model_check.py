"""What a model's layers say of private training, and what a repair by group norm leaves."""

import re
import threading

import pytest
import torch
from torch import nn

from sfumato.clipping import clipped_grad, findings, fix_groupnorm, require_private
from sfumato.errors import InputError
from tests.clipping.problems import Do, Made

ROWS = torch.zeros(2, 4, 8, 8)


def built(layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.Flatten(), nn.LazyLinear(3)).eval()
    model(ROWS)
    return model.train()


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.BatchNorm2d(8), "BatchNorm2d at '1' mixes examples"),
        (nn.BatchNorm2d(8, track_running_stats=False), "mixes examples"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8)), "BatchNorm2d at '1.1' mixes examples"),
        (nn.InstanceNorm2d(8, track_running_stats=True), "InstanceNorm2d at '1' keeps statistics"),
    ],
)
def test_layers_that_mix_or_keep_are_named_with_a_remedy(layer, says):
    model = built(layer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    (found,) = findings(model, ROWS)
    assert says in str(found) and found.remedy
    with pytest.raises(InputError, match=says.split(" at ")[0]):
        require_private(model, ROWS)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()) and model.training


class Frozen(nn.BatchNorm2d):
    """As fine-tuning keeps it."""

    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.Dropout(0.5), Frozen(8), nn.Identity()])
def test_what_keeps_examples_apart_passes(layer):
    model, before = built(layer), torch.get_rng_state()
    assert findings(model, ROWS) == []
    assert torch.equal(before, torch.get_rng_state())


UNUSED = Made(lambda self, x: self.used(x) + self.cut(x).detach(), used=nn.Linear(8, 3), cut=nn.Linear(8, 3))
COMPLEX = Made(lambda self, x: (x * self.weight).real, weight=torch.randn(8, dtype=torch.complex64))
NO_DERIVATIVE = nn.Sequential(nn.Linear(8, 8), Do(lambda x: torch.special.gammainc(x.abs() + 0.5, x.new_ones(()))))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (UNUSED, "'weight' that receives no gradient"),
        (COMPLEX, "complex trainable parameter 'weight'"),
        (nn.Linear(8, 3).requires_grad_(False), "has no trainable parameter"),
        (nn.Sequential(nn.Linear(8, 3), nn.Embedding(4, 4, sparse=True)), "sparse gradients, .* Set sparse=False"),
        (nn.LazyLinear(3), "gets its shape from the first images"),
        (NO_DERIVATIVE, "an operation without a derivative"),
    ],
)
def test_parameters_that_nothing_can_be_done_with_are_named(model, says):
    assert re.search(says, str(findings(model, torch.zeros(2, 8))[0]))


def test_a_model_that_cannot_be_copied_or_fails_at_that_size_is_refused_in_one_line():
    locked = nn.Linear(8, 3)
    locked.lock = threading.Lock()
    for model, says in (
        (locked, "cannot be copied"),
        (nn.Linear(9, 3), r"fails on images of shape \(8,\).*image_size"),
    ):
        with pytest.raises(InputError, match=says):
            findings(model, torch.zeros(2, 8))


def test_a_layer_is_named_and_not_what_holds_it():
    assert [finding.path for finding in findings(nn.Sequential(nn.Sequential(COMPLEX)), torch.zeros(2, 8))] == ["0.0"]


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False), nn.SyncBatchNorm(8)])
def test_a_fixed_model_passes(layer):
    model = built(layer)
    assert findings(fix_groupnorm(model), ROWS) == []


def test_the_fix_keeps_the_affine_weights_and_what_is_frozen():
    layer = nn.BatchNorm2d(8)
    nn.init.normal_(layer.weight)
    layer.bias.requires_grad_(False)
    fixed = fix_groupnorm(nn.Sequential(layer))[0]
    assert isinstance(fixed, nn.GroupNorm) and torch.equal(fixed.weight, layer.weight)
    assert fixed.weight.requires_grad and not fixed.bias.requires_grad


@pytest.mark.parametrize(("channels", "groups"), [(64, 16), (16, 8), (6, 3), (7, 1), (2, 1)])
def test_groups_are_as_many_as_divide_the_channels_up_to_sixteen_and_leave_two_to_each(channels, groups):
    assert fix_groupnorm(nn.Sequential(nn.BatchNorm2d(channels)))[0].num_groups == groups


class Activated(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


def test_an_activation_inside_is_kept_and_a_layer_used_twice_stays_one():
    shared = Activated(8)
    fixed = fix_groupnorm(nn.Sequential(shared, shared))
    assert fixed[0] is fixed[1]
    assert (fixed(torch.randn(2, 8, 4, 4)) >= 0).all()


@pytest.mark.parametrize("gathered", [False, True])
def test_parameters_that_torch_shards_over_processes_are_refused_before_anything_is_computed(gathered):
    """Gathered ones would end the process."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        inner = fully_shard(nn.Linear(256, 8), mesh=init_device_mesh("cpu", (1,)))
        model = nn.Sequential(nn.Flatten(), inner, nn.Linear(8, 3))
        if gathered:
            inner.unshard()
        (found,) = findings(model, ROWS)
        assert found.path == "1" and "sharded over processes" in found.reason
        with pytest.raises(InputError, match="sharded over processes"):
            clipped_grad(model, nn.CrossEntropyLoss(), clipping_norm=1.0)(ROWS, torch.zeros(2, dtype=torch.int64))
    finally:
        distributed.destroy_process_group()
