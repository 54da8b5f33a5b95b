"""What float32 sums may be off by, where every rounding goes the same way."""

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.clipping.numerics import are_exact, products, roundings, unit
from sfumato.errors import InputError


def alike(rows, terms):
    """One level for each row; and a one before values whose squares are just too small to be rounded down beside it."""
    levels = 1 + torch.rand(20, rows, 1, generator=torch.Generator().manual_seed(terms))
    late = torch.full((1, rows, terms), 0.6**0.5 * 2**-12)
    late[:, :, 0] = 1.0
    return torch.cat([levels.expand(-1, -1, terms), late])


@pytest.mark.parametrize("block", [128, 192, 384])
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 65])
@pytest.mark.parametrize("terms", [1, 64, 192, 193, 768, 3072])
def test_no_term_of_a_product_is_rounded_more_often_than_is_said(rows, terms, block):
    values = alike(rows, terms)
    exact = values.double() @ values.double().transpose(1, 2)
    for given in (values, values.transpose(1, 2).contiguous().transpose(1, 2)):
        error = (products(given, given.transpose(1, 2), block) - exact).abs()
        assert (error <= roundings(terms, block) * unit(values) * exact).all()


@pytest.mark.parametrize("terms", [1, 64, 1000, 40_000])
def test_sums_of_pytorch_itself_keep_to_the_same_bound(terms):
    values = alike(3, terms)
    for sums in (values.sum(2), values[:, None].sum(3)[:, 0], torch.linalg.vecdot(values, torch.ones_like(values))):
        assert ((sums - values.double().sum(2)).abs() <= roundings(terms) * unit(values) * values.double().sum(2)).all()


def test_products_of_few_roundings_are_those_of_float64():
    left, right = torch.randn(3, 5, 300, dtype=torch.float64), torch.randn(3, 300, 4, dtype=torch.float64)
    torch.testing.assert_close(products(left, right), left @ right)
    assert not products(left[:, :, :0], right[:, :0]).any()
    assert [roundings(terms, 128) for terms in (0, 1, 128, 129, 1280)] == [0, 2, 129, 130, 138]


@pytest.fixture
def settings():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.mkldnn.conv.fp32_precision = "none"


def test_products_that_pytorch_was_told_to_round_are_refused(settings):
    grad_fn = clipped_grad(torch.nn.Linear(2, 2), lambda outputs, targets: outputs.sum(1), clipping_norm=1.0)
    batch = torch.randn(3, 2), torch.zeros(3)
    grad_fn(*batch)
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        with pytest.raises(InputError, match=r'set_float32_matmul_precision\("highest"\)'):
            grad_fn(*batch)
        assert not are_exact("matmul", torch.device("cuda"))
    torch.set_float32_matmul_precision("highest")
    grad_fn(*batch)


def test_ghost_norms_of_convolutions_need_convolutions_that_round_to_float32(settings):
    """On a GPU they do so only if asked to: a sum of other digits than those that were measured."""
    assert not are_exact("conv", torch.device("cuda"))
    torch.backends.cudnn.allow_tf32 = False
    assert are_exact("conv", torch.device("cuda"))
    model, method = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()), {"0:conv2d.weight": "conv_ghost"}

    grad_fn = clipped_grad(
        model,
        lambda outputs, targets: outputs.sum(1),
        clipping_norm=1.0,
        methods={"memory_format": "contiguous"} | method,
    )
    for precision, fits in (("none", True), ("bf16", False), ("ieee", True)):  # told so between two batches, too
        torch.backends.mkldnn.conv.fp32_precision = precision
        grad_fn(torch.randn(2, 3, 5, 5), torch.zeros(2))
        assert (grad_fn.methods["0:conv2d.weight"] == "conv_ghost") == fits
