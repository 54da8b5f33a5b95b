"""A loss is called with one row at a time: rows cannot meet in it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from tests.clipping.problems import Made, clipped, cross_entropy, distance, gradients

ENGINES = ["reference", "func", "graph"]
# Any loss is called by one function, whichever the engine; "func" differentiates it inside of another vmap.


def problem(augmult=0):
    torch.manual_seed(0)
    views = (augmult,) if augmult else ()
    return nn.Linear(4, 3).double(), torch.randn(5, *views, 4).double(), torch.randint(3, (5,))


def made(loss_fn, engine, augmult=0):
    model, x, y = problem(augmult)
    grad_fn = clipped_grad(
        model, loss_fn, clipping_norm=0.3, augmult=augmult, engine=engine, microbatch_size=3, methods={}
    )
    return grad_fn, x, y


WEIGHT = torch.tensor([1.0, 2.0, 3.0]).double()


def focal(outputs, targets):
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses * (1 - (-losses).exp()) ** 2


def by_one_hot(outputs, targets):
    return (outputs.sigmoid() - F.one_hot(targets, 3)).square().sum(1)


def writes(outputs, targets):
    return cross_entropy(outputs.mul(1.0).mul_(2), targets)


def distilled(outputs, targets):
    return F.kl_div(outputs.log_softmax(1), outputs.detach().tanh().softmax(1), reduction="batchmean")


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # a loop over rows
@pytest.mark.parametrize(
    ("engine", "loss_fn"),
    [
        ("reference", nn.CrossEntropyLoss()),
        ("func", nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, reduction="sum")),
        ("func", by_one_hot),
        ("func", writes),
        ("graph", nn.CrossEntropyLoss()),
        ("graph", nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, reduction="sum")),
        ("graph", lambda outputs, targets: F.multi_margin_loss(outputs, targets)),
        ("graph", lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets)),
        ("graph", lambda outputs, targets: outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]),
        ("graph", focal),
        ("graph", by_one_hot),
        ("graph", writes),
        ("graph", distilled),
    ],
)
def test_losses_as_people_write_them_are_those_of_single_rows(engine, loss_fn):
    grad_fn, x, y = made(loss_fn, engine)
    out = grad_fn(x, y)
    model, _, _ = problem()
    losses = [loss_fn(model(x[i : i + 1]), y[i : i + 1]).item() for i in range(len(x))]
    assert out.losses.tolist() == pytest.approx(losses, rel=1e-9)
    assert distance(out.grad_sum, clipped(gradients(model, x, y, loss_fn=loss_fn), 0.3)) < 1e-9


@pytest.mark.parametrize(("engine", "augmult"), [("reference", 2), ("func", 2), ("graph", 0), ("graph", 2)])
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda outputs, targets: cross_entropy(outputs - 0.5 * outputs.mean(0), targets),
        lambda outputs, targets: cross_entropy(outputs, targets) / len(outputs),
        lambda outputs, targets: cross_entropy(outputs, targets) * (1 + (targets == targets[0]).double().mean()),
    ],
    ids=["centred", "divided by rows", "compares targets"],
)
def test_rows_cannot_meet_in_a_loss(loss_fn, engine, augmult):
    """Other examples, or other views, change nothing."""
    grad_fn, x, y = made(loss_fn, engine, augmult)
    whole = grad_fn(x, y)
    for i in range(len(x)):
        alone = grad_fn(x[i : i + 1], y[i : i + 1])
        assert alone.grad_norms.item() == pytest.approx(whole.grad_norms[i].item(), rel=1e-9)
        assert alone.losses.item() == pytest.approx(whole.losses[i].item(), rel=1e-9)


class Threshold(nn.Module):
    """Keeps a running mean of losses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, outputs, targets):
        losses = cross_entropy(outputs, targets)
        self.mean.mul_(0.9).add_(0.1 * losses.detach().mean())
        return losses * (losses.detach() > self.mean)


temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
REFUSED = {
    "of many values": (lambda outputs, targets: outputs, "gave \\(1, 3\\) for one row"),
    "no tensor": (lambda outputs, targets: 1.0, "gave float for one row"),
    "looks at values": (
        lambda outputs, targets: cross_entropy(outputs, targets) * (2 if outputs.sum() > 0 else 1),
        "torch.func.vmap does not take loss_fn",
    ),
    "keeps statistics": (Threshold(), "torch.func.vmap does not take loss_fn"),
    "draws": (
        lambda outputs, targets: cross_entropy(F.dropout(outputs), targets),
        "torch.func.vmap does not take loss_fn|draws",
    ),
    "trains": (lambda outputs, targets: cross_entropy(outputs * temperature, targets), "besides the model's output"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_loss_of_one_row_is_refused_with_its_reason(name):
    """Before any engine is tried."""
    loss_fn, message = REFUSED[name]
    grad_fn, x, y = made(loss_fn, "auto")
    with pytest.raises(InputError, match=message):
        grad_fn(x, y)


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_and_targets_may_be_several(engine):
    model, x, y = problem()
    two = Made(lambda self, x: {"logits": self.layer(x), "others": [self.layer(x).square(), None]}, layer=model)

    def loss(outputs, targets, shares):
        return cross_entropy(outputs["logits"], targets) + (outputs["others"][0] * shares).sum(1)

    shares = torch.rand(5, 3).double()
    out = clipped_grad(two, loss, clipping_norm=1e6, rescale_to_unit_norm=False, engine=engine)(x, y, shares)
    losses = loss(two(x), y, shares)
    torch.testing.assert_close(out.losses, losses.detach())
    true = torch.autograd.grad(losses.sum(), list(model.parameters()))
    torch.testing.assert_close(tuple(out.grad_sum.values()), true)


def test_a_loss_is_the_user_s_own_at_each_call():
    """Nothing of it is traced: a schedule of its settings counts."""
    settings = {"scale": 1.0}
    grad_fn, x, y = made(lambda outputs, targets: settings["scale"] * cross_entropy(outputs, targets), "graph")
    before = grad_fn(x, y).losses
    settings["scale"] = 2.0
    torch.testing.assert_close(grad_fn(x, y).losses, 2 * before)
