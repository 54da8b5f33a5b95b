"""Our own networks in every order and normalisation: the fast engine against the loop over single images."""

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.models import build
from tests.clipping.problems import cross_entropy as loss_fn

ORDERS = ("activation-norm", "norm-activation")
NETWORKS = [("small_cnn", {"width": 4, "order": order}) for order in ORDERS] + [
    ("wide_resnet", {"depth": 10, "width": 1, "groups": 4, "order": order, "weight_standardization": standardized})
    for order in ORDERS
    for standardized in (True, False)
]


@pytest.mark.parametrize(
    ("name", "options"),
    NETWORKS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_the_clipped_sum_is_that_of_a_loop_over_images(name, options):
    model = build(name, image_size=12, channels=3, num_classes=4, options=options, seed=3).double()
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(5, 2, 3, 12, 12, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (5,), generator=generator)
    graph, reference = (
        clipped_grad(model, loss_fn, clipping_norm=1.0, augmult=2, microbatch_size=3, engine=engine)(inputs, targets)
        for engine in ("graph", "reference")
    )
    torch.testing.assert_close(graph.grad_norms, reference.grad_norms, rtol=1e-9, atol=0)
    size = torch.stack([value.norm() for value in reference.grad_sum.values()]).norm()
    assert size > 0.1
    for parameter, value in reference.grad_sum.items():
        assert (graph.grad_sum[parameter] - value).norm() <= 1e-9 * size, parameter


@pytest.mark.parametrize("name", ["small_cnn", "wide_resnet"])
def test_the_order_changes_what_the_network_computes_and_not_its_parameters(name):
    one, other = (
        build(name, image_size=12, channels=3, num_classes=4, options={"order": order}, seed=3) for order in ORDERS
    )
    inputs = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    weights = [torch.nn.utils.parameters_to_vector(model.parameters()) for model in (one, other)]
    assert torch.equal(*weights) and (one(inputs) - other(inputs)).abs().max() > 1e-2
