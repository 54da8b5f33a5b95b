"""What float32 sums may be off by, where every rounding goes the same way."""

import pytest
import torch

from sfumato.clipping import clipped_grad
from sfumato.clipping.clip import are_exact, convolutions, products, roundings, unit
from sfumato.clipping.graph.rules import candidates
from sfumato.errors import InputError
from tests.clipping.test_autotune import on_a_gpu
from tests.clipping.test_rules import meet


def alike(rows, terms):
    """One level for each row; and a one before values whose squares are just too small to be rounded down beside it."""
    levels = 1 + torch.rand(20, rows, 1, generator=torch.Generator().manual_seed(terms))
    late = torch.full((1, rows, terms), 0.6**0.5 * 2**-12)
    late[:, :, 0] = 1.0
    return torch.cat([levels.expand(-1, -1, terms), late])


@pytest.mark.parametrize("block", [192, 384])
@pytest.mark.parametrize(("rows", "terms"), [(17, 1), (17, 192), (17, 193), (1, 3072), (17, 3072), (65, 3072)])
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
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "tf32"
    torch.backends.mkldnn.conv.fp32_precision = "none"
    torch.backends.fp32_precision = torch.backends.cudnn.fp32_precision = "none"


def test_products_that_pytorch_was_told_to_round_are_refused(settings):
    grad_fn = clipped_grad(torch.nn.Linear(2, 2), lambda outputs, targets: outputs.sum(1), clipping_norm=1.0)
    batch = torch.randn(3, 2), torch.zeros(3)
    grad_fn(*batch)
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        with pytest.raises(InputError, match=r"set_float32_matmul_precision"):
            grad_fn(*batch)
        assert not are_exact("matmul", torch.device("cuda"))
    torch.set_float32_matmul_precision("highest")
    grad_fn(*batch)


SWITCHES = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.mkldnn.conv)


@pytest.mark.parametrize("told", ["nothing", "no tf32", "tf32 for one kind of layer", "bf16 on a CPU"])
def test_convolutions_of_float32_are_exact_on_every_device_whatever_pytorch_was_told(told, settings):
    """And it is told the same afterwards. By default a GPU rounds them to TF32: a sum of other digits than the norm."""
    if told == "no tf32":
        torch.backends.cudnn.allow_tf32 = False
    elif told == "tf32 for one kind of layer":
        torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision = "tf32", "ieee"
    elif told == "bf16 on a CPU":
        torch.backends.mkldnn.conv.fp32_precision = "bf16"
    before = [switch.fp32_precision for switch in SWITCHES]
    seen = []

    class Watched(torch.nn.Conv2d):
        def forward(self, rows):
            seen.append([switch.fp32_precision for switch in SWITCHES] + [torch.backends.cudnn.allow_tf32])
            return super().forward(rows)

    model = torch.nn.Sequential(Watched(3, 4, 3), torch.nn.Flatten())
    grad_fn = clipped_grad(model, lambda outputs, targets: outputs.sum(1), clipping_norm=1.0, engine="graph")
    grad_fn(torch.randn(2, 3, 5, 5), torch.zeros(2))
    assert seen and all(
        set(switches[:3]) <= {"none", "ieee"} and not switches[3] and switches[2] == "ieee" for switches in seen
    )
    assert [switch.fp32_precision for switch in SWITCHES] == before


@pytest.mark.parametrize("told", [torch.backends, torch.backends.cudnn, None])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_a_gpu_rounds_to_tf32_only_where_it_is_asked_to(precision, told, settings):
    if told is not None:
        told.fp32_precision = "tf32"
    with convolutions(precision):
        assert are_exact("conv", torch.device("cuda")) == (precision == "float32")
        assert torch.backends.cudnn.allow_tf32 == (precision == "tf32")
        assert are_exact("conv", torch.device("cpu"))
    assert not are_exact("conv", torch.device("cuda"))  # as PyTorch has it by default


def test_convolutions_that_round_to_tf32_have_no_ghost_norms(settings):
    """A sum of other digits than those that were measured."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten()).double()
    rows = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    record, _ = meet(torch.ops.aten.conv2d.default, [rows, model[0].weight.detach(), None, [1, 1]], "weight", 1)
    gpu = on_a_gpu(record)
    for precision, fits in (("float32", True), ("tf32", False)):
        with convolutions(precision):
            assert ("conv_ghost" in candidates(gpu, "weight", 4)) == fits
            assert "conv_ghost" in candidates(record, "weight", 4)


@pytest.mark.parametrize("engine", ["auto", "func"])
def test_tf32_without_a_gpu_is_refused(engine):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten())
    grad_fn = clipped_grad(
        model, lambda outputs, targets: outputs.sum(1), clipping_norm=1.0, engine=engine, precision="tf32"
    )
    with pytest.raises(InputError, match='"tf32" needs a CUDA device, and this is "cpu". Take "float32"'):
        grad_fn(torch.randn(2, 3, 5, 5), torch.zeros(2))
