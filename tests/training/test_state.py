import copy
import math

import pytest
import torch
from torch import nn

from sfumato.config import parse
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError
from sfumato.planning.resolve import resolve
from sfumato.training.flat import require_one_type
from sfumato.training.state import Ema, State, learning_rate, warmed_up_decay


def recipe(**optimizer):
    asked = {
        "data": {"name": "digits"},
        "optimizer": {"learning_rate": 0.5, **optimizer},
        "ema": {"decay": [0.9, 0.5]},
        "training": {"num_steps": 9},
    }
    return resolve(parse(asked), Facts(1437, 10, 8, 1)).recipe


def test_ema_follows_the_papers_warm_up_once_per_update():
    values = [torch.tensor([float(x)]) for x in (3, -1, 4, 1, -5, 9, 2, 6)]
    parameters = {"w": torch.tensor([10.0])}
    ema = Ema(parameters, [0.3])
    expected = 10.0
    for step, value in enumerate(values, start=1):
        parameters["w"] = value
        ema.update(parameters, step)
        t = step - 1
        decay = min(0.3, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * float(value)
    assert float(ema.averages[0]["w"]) == pytest.approx(expected, rel=1e-6)


def test_the_warm_up_binds_for_a_whole_run_at_decay_0_9999():
    assert warmed_up_decay(0.9999, 1) == 0.1
    assert all(warmed_up_decay(0.9999, step) < 0.9999 for step in range(1, 2469))


ADAM = {"beta1": 0.8, "beta2": 0.95, "adam_epsilon": 1e-6}
OF_ADAM = {"betas": (0.8, 0.95), "eps": 1e-6}
NESTEROV, DAMPED = {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.9, "weight_decay": 0.1}
OPTIMIZERS = [
    *((options, torch.optim.SGD, options) for options in ({}, NESTEROV, DAMPED)),
    ({"name": "adam", **ADAM, "weight_decay": 0.1}, torch.optim.Adam, {**OF_ADAM, "weight_decay": 0.1}),
    ({"name": "adamw", **ADAM, "weight_decay": 0.1}, torch.optim.AdamW, {**OF_ADAM, "weight_decay": 0.1}),
    ({"name": "adamw", **ADAM}, torch.optim.AdamW, {**OF_ADAM, "weight_decay": 0.0}),
]


@pytest.mark.parametrize("given, kind, options", OPTIMIZERS)
def test_updates_are_the_optimizer_s_on_the_private_gradient_at_rates_that_warm_up(given, kind, options):
    model = nn.Linear(3, 2)
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    state = State(model, recipe(**given, warmup_steps=3))
    reference = kind(twin.parameters(), lr=0.5, **options)
    for step in range(1, 6):
        gradient = {name: torch.randn(value.shape) for name, value in model.named_parameters()}
        state.update(state.flat.join(gradient), step, step)
        for name, value in twin.named_parameters():
            value.grad = gradient[name]
        reference.param_groups[0]["lr"] = 0.5 * min(step, 3) / 3
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("given", [{}, NESTEROV, {"name": "adam", **ADAM}])
@pytest.mark.parametrize("done", [0, 4])
def test_a_state_goes_on_bit_for_bit_from_its_tensors(given, done):
    gradients, model = [{"weight": torch.randn(2, 3), "bias": torch.randn(2)} for _ in range(8)], nn.Linear(3, 2)
    whole, first = (State(copy.deepcopy(model), recipe(**given)) for _ in range(2))
    second = State(nn.Linear(3, 2), recipe(**given))
    for step in range(1, 8):
        if step == done + 1:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for state in (whole, second if step > done else first):
            state.update(state.flat.join(gradients[step]), step, step)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)
    if "adam" in given.get("name", ""):  # without it, the correction of the bias would start anew
        assert float(second.state_dict()["optimizer"]["step"]) == 7


class Two(nn.Module):
    """Two layers alike, which one's own code may name in another order one day."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(3, 3))


def test_a_state_is_taken_over_by_name():
    first, second = (State(Two(names), recipe(momentum=0.9)) for names in ("ab", "ba"))
    for step in (1, 2):
        first.update(torch.randn_like(first.mine), step, step)
    second.load_state_dict(first.state_dict())
    pairs = [(state.averages[0], state.optimizer.state[state.mine]["momentum_buffer"]) for state in (first, second)]
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(second.flat.split(other), first.flat.split(one), rtol=0, atol=0)


def test_parameters_of_two_types_are_refused():
    with pytest.raises(InputError, match="several types: .*'0.bias' is float32 and '1.bias' is float64"):
        require_one_type(dict(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()).named_parameters()))


def test_averaged_weights_are_used_inside_the_block_only():
    state = State(nn.Linear(3, 2), recipe())
    for step in range(1, 4):
        state.update(state.flat.join({"weight": torch.randn(2, 3), "bias": torch.randn(2)}), step, step)
    last = state.model.weight.clone()
    with state.averaged_weights():
        assert torch.equal(state.model.weight, state.flat.split(state.averages[0])["weight"])
    assert torch.equal(state.model.weight, last)


def rates(num_steps, **optimizer):
    config = recipe(learning_rate=2.0, **optimizer).optimizer
    return [learning_rate(config, step, num_steps) for step in range(1, num_steps + 1)]


def test_the_learning_rate_warms_up_then_stays_or_follows_a_cosine():
    assert rates(6, warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    cosine = rates(10, schedule="cosine")
    assert cosine[0] == 2.0 and cosine[5] == pytest.approx(1.0)
    assert rates(10, schedule="cosine", warmup_steps=2)[9] == pytest.approx(1 + math.cos(math.pi * 7 / 8))


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_learning_rate_falls_at_milestones_as_pytorch_s_does(warmup):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    falls = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.2)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        falls.step()
    expected[:warmup] = [1.0, 2.0][:warmup]
    assert rates(8, schedule="step", milestones=[3, 5], gamma=0.2, warmup_steps=warmup) == pytest.approx(expected)
