"""Every method of every rule against the ordinary gradient of each example alone."""

import dataclasses
import math
import weakref

import pytest
import torch
from torch import nn
from torch.fx import Graph

from sfumato.clipping.graph.compile import _recording as recording
from sfumato.clipping.graph.export import trace
from sfumato.clipping.graph.rows import Layout
from sfumato.clipping.graph.rules import METHODS, candidates, worth_trying
from sfumato.clipping.graph.rules.convolution import GhostGrads
from sfumato.clipping.graph.rules.normalization import has_statistics, with_statistics
from sfumato.clipping.graph.rules.site import Direction, GradSite, MaterializedGrads, SiteRecord, named_args

ROWS_FIRST = Layout(dim=0, outer=1, inner=1)
EXAMPLES = 4

CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "one_by_one": {"kernel_size": 1},
    "one_by_one_strided": {"kernel_size": 1, "stride": 2},
    "one_by_one_padded": {"kernel_size": 1, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "patches": {"kernel_size": (3, 2), "stride": (3, 2), "padding": (0, 1)},
    "pixels_left_over": {"kernel_size": 2, "stride": 3},
    "uneven": {"kernel_size": (1, 3), "stride": (2, 1), "padding": (0, 1)},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
    "same": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "same_even": {"kernel_size": (2, 4), "padding": "same"},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "border_wider_than_kernel": {"kernel_size": 2, "padding": 4, "stride": 3},
    "taps_beyond_the_image": {"kernel_size": 3, "padding": 8, "dilation": 8},
    "grouped": {"kernel_size": 3, "groups": 2, "stride": 2},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1, "dilation": 2},
}

# No pixel is seen at two positions.
APART = {
    "one_by_one",
    "one_by_one_strided",
    "one_by_one_padded",
    "patches",
    "pixels_left_over",
    "border_wider_than_kernel",
}


def meet(operation, args, weight_name, views, seed=0, non_contiguous=False):
    """A site of an operation whose first argument is made of rows, and each example's true gradient of a weight."""
    generator = torch.Generator().manual_seed(seed)
    graph = Graph()
    names = [argument.name for argument in operation._schema.arguments]
    nodes = [graph.placeholder(names[i]) if isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args)]
    node = graph.call_function(operation, tuple(nodes))
    weight = args[names.index(weight_name)]
    weight_of = {weight_name: weight_name}
    output = operation(*args)
    grad = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    if non_contiguous:
        grad = grad.transpose(0, -1).contiguous().transpose(0, -1)
    site = GradSite(node, weight_of, {names[0]: ROWS_FIRST}, ROWS_FIRST)
    record = SiteRecord(site, EXAMPLES, views, named_args(node, args, {}), grad)
    true = []
    for i in range(EXAMPLES):
        rows = slice(i * views, (i + 1) * views)
        own = weight.clone().requires_grad_()
        own_args = [args[0][rows].contiguous(), *(own if arg is weight else arg for arg in args[1:])]
        true.append(torch.autograd.grad(operation(*own_args), own, grad[rows].contiguous())[0])
    return record, torch.stack(true)


def assert_contribution(per_example, true):
    """Norms, sums and moments are those of the true per-example gradients, (m, *weight)."""
    if true.dtype == torch.float32:
        size = true.flatten(1).double().norm(dim=1)
        torch.testing.assert_close(per_example.square_norms()[0].sqrt().double(), size, rtol=1e-5, atol=1e-5)
        if hasattr(per_example, "written_out"):
            assert (per_example.written_out() - true).flatten(1).double().norm(dim=1).lt(1e-5 * (1 + size)).all()
        total = per_example.weighted_sum(torch.ones(len(true)))
        assert (total - true.sum(0)).norm() < 1e-5 * (1 + size.sum())
        return
    flat = true.flatten(1)
    squares, error = per_example.square_norms()
    torch.testing.assert_close(squares, flat.square().sum(1), rtol=1e-9, atol=1e-12)
    assert (error >= 0).all()
    if hasattr(per_example, "written_out"):
        torch.testing.assert_close(per_example.written_out(), true, rtol=1e-9, atol=1e-10)
    coefficients = torch.tensor([0.5, 0.0, 2.0, 1.0]).double()
    expected = (coefficients[:, None] * flat).sum(0).view(true.shape[1:])
    torch.testing.assert_close(per_example.weighted_sum(coefficients), expected, rtol=1e-9, atol=1e-10)
    if hasattr(per_example, "moments") and true.ndim > 2:
        rows = true.flatten(2)
        directions = torch.randn(rows.shape[1:], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        moments = per_example.moments(Direction(directions, torch.ones(rows.shape[1:]).double()))
        torch.testing.assert_close(moments.squares, rows.square().sum(2), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(moments.plain, rows.sum(2), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(moments.along, (rows * directions).sum(2), rtol=1e-9, atol=1e-10)


def convolution(name, memory_format, dtype=torch.float64):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = nn.Conv2d(4, 8, **CONVOLUTIONS[name]).to(dtype)
    padding = layer.padding if isinstance(layer.padding, str) else list(layer.padding)
    weight = layer.weight.detach().contiguous(memory_format=memory_format)
    operation = torch.ops.aten.conv2d.padding if isinstance(padding, str) else torch.ops.aten.conv2d.default

    def args(rows):
        return [
            rows.contiguous(memory_format=memory_format),
            weight,
            layer.bias.detach(),
            list(layer.stride),
            padding,
            list(layer.dilation),
            layer.groups,
        ]

    return operation, args


# The order of images in memory, views, whether gradients lie in one piece, and the type; the harder way on all kinds.
_PLAIN = (torch.contiguous_format, 1, False, torch.float64)
_OTHER = (torch.channels_last, 3, True, torch.float64)
_COARSE = (torch.channels_last, 1, False, torch.float32)
KINDS = [(name, *_OTHER) for name in CONVOLUTIONS]
KINDS += [(name, *_PLAIN) for name in ("plain", "strided", "patches", "grouped")]
KINDS += [(name, *_COARSE) for name in ("plain", "dilated", "grouped")]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("name", "memory_format", "views", "non_contiguous", "dtype"), KINDS)
def test_every_method_for_convolutions(name, memory_format, views, non_contiguous, dtype):
    operation, args = convolution(name, memory_format, dtype)
    rows = torch.randn(EXAMPLES * views, 4, 9, 7, generator=torch.Generator().manual_seed(2), dtype=dtype)
    for argument in ("weight", "bias"):
        record, true = meet(operation, args(rows), argument, views, non_contiguous=non_contiguous)
        methods = candidates(record, argument, EXAMPLES)
        in_one_group = {"unfold", "conv_ghost"} | ({"patch_ghost"} if name in APART else set())
        assert argument == "bias" or set(methods) == {"loop", "grouped"} | (
            in_one_group if CONVOLUTIONS[name].get("groups", 1) == 1 else set()
        )
        for method in [*methods, "vmap"] if not isinstance(CONVOLUTIONS[name].get("padding"), str) else methods:
            assert_contribution(METHODS[method](record, argument), true)


@pytest.mark.parametrize("name", ["strided", "grouped"])
def test_memory_that_was_not_written_is_not_read(name):
    """Fresh tensors are filled with NaN."""
    operation, args = convolution(name, torch.channels_last)
    rows = torch.randn(EXAMPLES * 3, 4, 9, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    record, true = meet(operation, args(rows), "weight", 3)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for method in candidates(record, "weight", EXAMPLES):
            assert_contribution(METHODS[method](record, "weight"), true)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "examples_at_once"), [("uneven", 3), ("dilated", 1), ("taps_beyond_the_image", 3)])
def test_patches_of_a_few_examples_at_a_time(name, examples_at_once, monkeypatch):
    """The last part may be smaller."""
    operation, args = convolution(name, torch.channels_last)
    record, true = meet(operation, args(torch.randn(EXAMPLES * 3, 4, 9, 7, dtype=torch.float64)), "weight", 3)
    values = record.args["weight"][0].numel() * record.example_grad()[0, :, 0].numel()
    monkeypatch.setattr("sfumato.clipping.graph.rules.convolution._AT_ONCE", examples_at_once * values)
    assert_contribution(METHODS["unfold"](record, "weight"), true)


@pytest.mark.parametrize(("name", "per_block"), [("plain", 1), ("strided", 3), ("depthwise", 3)])
def test_large_written_out_gradients_lie_in_blocks(name, per_block, monkeypatch):
    """Four of one example each, or one of three and one of one: nothing but memory shows it."""
    operation, args = convolution(name, torch.contiguous_format)
    record, true = meet(operation, args(torch.randn(EXAMPLES * 3, 4, 9, 7, dtype=torch.float64)), "weight", 3)
    values = record.args["weight"].numel()
    monkeypatch.setattr("sfumato.clipping.graph.rules.convolution._BLOCK", per_block * values)
    for most, blocks in ((EXAMPLES * values, 1), (EXAMPLES * values - 1, -(-EXAMPLES // per_block))):
        monkeypatch.setattr("sfumato.clipping.graph.rules.convolution._MAX_IN_ONE", most)
        for method in {"loop", "grouped", "unfold"} & {*candidates(record, "weight", EXAMPLES)}:
            per_example = METHODS[method](record, "weight")
            assert (
                len({row.untyped_storage().data_ptr() for row in per_example.blocks})
                == len(per_example.blocks)
                == blocks
            )
            assert_contribution(per_example, true)
    with recording():
        assert len(METHODS["loop"](record, "weight").blocks) == 1


def test_blocks_make_no_difference():
    generator = torch.Generator().manual_seed(4)
    rows, directions, coefficients = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 5, 3, 2, 2), (5, 12), (7,))
    )
    one, several = MaterializedGrads(rows), MaterializedGrads(*rows.split(3))
    direction = Direction(directions, directions)
    for of_one, of_several in (
        (one.weighted_sum(coefficients), several.weighted_sum(coefficients)),
        (one.square_norms()[0], several.square_norms()[0]),
        *zip(one.moments(direction)[:3], several.moments(direction)[:3], strict=True),
        (rows, several.written_out()),
        (2 * rows, (several + several).written_out()),
        (2 * rows, (several + one).written_out()),
    ):
        torch.testing.assert_close(of_several, of_one, rtol=1e-12, atol=1e-12)
    assert len((several + several).blocks) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_memory_held_before_is_in_no_sum(monkeypatch, dtype):
    """Memory that is taken unfilled is full of others' numbers."""
    unfilled = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *given, **named: unfilled(*given, **named).fill_(torch.nan))
    rows, coefficients = torch.randn(7, 5, 300, dtype=dtype), torch.randn(7, dtype=dtype)
    true = torch.einsum("m,m...->...", coefficients, rows)
    for blocks in ([rows], rows.split(3)):
        torch.testing.assert_close(MaterializedGrads(*blocks).weighted_sum(coefficients), true)


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero_channel"])
@pytest.mark.parametrize("views", [1, 3])
def test_the_share_along_a_weight_is_read_off_the_output(views, zero, monkeypatch):
    """And computed anew where a channel of zeros makes that impossible."""
    operation, args = convolution("strided", torch.contiguous_format)
    rows = torch.randn(EXAMPLES * views, 4, 9, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    arguments = args(rows)
    directions = torch.nn.functional.normalize(arguments[1].flatten(1))
    arguments[1][0] *= 0.0 if zero else -1.0
    record, true = meet(operation, arguments, "weight", views)
    record = dataclasses.replace(record, output=operation(*arguments))
    convolved, calls = GhostGrads._convolved, []
    monkeypatch.setattr(GhostGrads, "_convolved", lambda self, *args: calls.append(1) or convolved(self, *args))
    moments = METHODS["conv_ghost"](record, "weight").moments(Direction(directions, arguments[1]))
    torch.testing.assert_close(moments.along, (true.flatten(2) * directions).sum(2), rtol=1e-9, atol=1e-10)
    assert len(calls) == 1 + zero  # one for the plain sums


def test_the_share_along_a_weight_is_uncertain_where_a_bias_hides_it():
    """The output, from which that share is read, is then nothing but rounding."""
    generator = torch.Generator().manual_seed(2)
    rows = 1 + 1e-3 * torch.randn(EXAMPLES, 4, 9, 7, generator=generator)
    weight = 1 + 1e-3 * torch.randn(8, 4, 1, 1, generator=generator)
    settings = [[1, 1], [0, 0], [1, 1], 1]
    bias = -torch.ops.aten.conv2d.default(rows, weight, None, *settings).mean((0, 2, 3))
    record, true = meet(torch.ops.aten.conv2d.default, [rows, weight, bias, *settings], "weight", 1)
    record = dataclasses.replace(record, output=torch.ops.aten.conv2d.default(rows, weight, bias, *settings))
    directions = torch.nn.functional.normalize(weight.flatten(1))
    moments = METHODS["conv_ghost"](record, "weight").moments(Direction(directions, weight))
    along = torch.einsum("mophw,mihw->moi", record.grad[:, :, None].double(), rows.double()) * directions.double()
    assert ((moments.along - along.sum(2)).abs() <= moments.of_along).all()
    assert (moments.of_along > 1e-6 * record.grad.flatten(2).norm(dim=2)).all()


@pytest.mark.parametrize(("method", "kept"), [("conv_ghost", True), ("conv_ghost", False), ("loop", False)])
def test_what_is_known_of_channels_is_as_wrong_as_is_said_at_most(method, kept):
    """Of images of one grey level each, and weights that are all alike: every rounding goes the same way."""
    generator = torch.Generator().manual_seed(2)
    levels, weight = (
        1 + torch.rand(EXAMPLES, 1, 1, 1, generator=generator),
        1 + torch.rand(8, 1, 1, 1, generator=generator),
    )
    arguments = [
        levels.expand(-1, 300, 6, 6).contiguous(),
        weight.expand(-1, 300, 3, 3).contiguous(),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        1,
    ]
    record, _ = meet(torch.ops.aten.conv2d.default, arguments, "weight", 1)
    record = dataclasses.replace(record, output=torch.ops.aten.conv2d.default(*arguments) if kept else None)
    directions = torch.nn.functional.normalize(arguments[1].flatten(1))
    per_example = METHODS[method](record, "weight")
    if method == "conv_ghost":  # all values of a channel's gradient are one
        rows = (record.grad.double().sum((2, 3)) * levels.double()[:, :, 0, 0])[:, :, None].expand(
            -1, -1, directions.shape[1]
        )
    else:  # what was written out is what is summed
        rows = per_example.written_out().double().flatten(2)
    moments, exact = (
        per_example.moments(Direction(directions, arguments[1])),
        (rows.square().sum(2), rows.sum(2), (rows * directions.double()).sum(2)),
    )
    for value, truth, error in zip(moments[:3], exact, moments[3:], strict=True):
        assert ((value - truth).abs() <= error).all()


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_in_one_and_three_dimensions(dims, views):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(EXAMPLES * views, 4, *(5, 6, 4)[:dims], generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 2, *(3, 2, 2)[:dims], generator=generator, dtype=torch.float64)
    operation = getattr(torch.ops.aten, f"conv{dims}d").default
    record, true = meet(operation, [rows, weight, None, [2] * dims, [1] * dims, [1] * dims, 2], "weight", views)
    assert set(candidates(record, "weight", EXAMPLES)) == {"loop", "grouped"}
    for method in ("loop", "grouped"):
        assert_contribution(METHODS[method](record, "weight"), true)


@pytest.mark.parametrize(
    ("positions", "features", "views"),
    # How inner products are had depends on all of them.
    [
        ((), 4, 1),
        ((), 4, 3),
        ((2, 3), 4, 3),
        ((7,), 150, 1),
        ((8,), 150, 1),
        ((9,), 150, 3),
        ((17,), 128, 1),
        ((17,), 127, 1),
        ((40,), 128, 1),
        ((41,), 128, 1),
        ((64,), 128, 1),
    ],
)
def test_every_method_for_linear_layers(positions, features, views):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(EXAMPLES * views, *positions, features, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(3, features, generator=generator).double(), torch.randn(3, generator=generator).double()
    divided = ["ghost_at_once"] if 1 < math.prod(positions) * views < 64 else []  # else both are the same
    for argument, methods in (("weight", ["rows", "ghost", *divided]), ("bias", ["bias"])):
        record, true = meet(torch.ops.aten.linear.default, [rows, weight, bias], argument, views)
        assert set(candidates(record, argument, EXAMPLES)) == set(methods)
        for method in [*methods, "vmap"]:
            assert_contribution(METHODS[method](record, argument), true)


@pytest.mark.parametrize(
    ("memory_format", "views"), [(torch.contiguous_format, 1), (torch.channels_last, 3)], ids=["contiguous", "last"]
)
@pytest.mark.parametrize("norm", ["group_norm", "layer_norm", "layer_norm_2d", "instance_norm", "rms_norm"])
def test_scale_and_shift_of_norms(norm, views, memory_format):
    generator = torch.Generator().manual_seed(2)
    rows = (2 + torch.randn(EXAMPLES * views, 4, 3, 5, generator=generator, dtype=torch.float64)).contiguous(
        memory_format=memory_format
    )
    shape = {"layer_norm": (5,), "layer_norm_2d": (3, 5), "rms_norm": (5,)}.get(norm, (4,))
    weight, bias = torch.randn(shape, generator=generator).double(), torch.randn(shape, generator=generator).double()
    operation, args = {
        "group_norm": (torch.ops.aten.group_norm.default, [rows, 2, weight, bias, 1e-5, False]),
        "layer_norm": (torch.ops.aten.layer_norm.default, [rows, [5], weight, bias, 1e-5, False]),
        "layer_norm_2d": (torch.ops.aten.layer_norm.default, [rows, [3, 5], weight, bias, 1e-5, False]),
        "instance_norm": (
            torch.ops.aten.instance_norm.default,
            [rows, weight, bias, None, None, True, 0.1, 1e-5, False],
        ),
        "rms_norm": (torch.ops.aten.rms_norm.default, [rows, [5], weight, 1e-5]),
    }[norm]
    for argument in ["weight"] if norm == "rms_norm" else ["weight", "bias"]:
        record, true = meet(operation, args, argument, views)
        assert candidates(record, argument, EXAMPLES) == ["affine"]
        for method in ("affine", "vmap"):
            assert_contribution(METHODS[method](record, argument), true)
        with_own = norm in ("group_norm", "layer_norm", "layer_norm_2d")
        assert has_statistics(record.site, record.args) == with_own
        assert not has_statistics(record.site, record.args | {"input": rows.bfloat16()})
        if with_own:
            output, with_them = with_statistics(record.site, record.args)
            torch.testing.assert_close(output, operation(*args))
            assert_contribution(METHODS["affine"](dataclasses.replace(record, args=with_them), argument), true)


@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (1, 4), (3, 1), (3, 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_layout_gives_every_example_its_own_rows(dim, outer, inner):
    examples, views = 3, 2
    owner = torch.arange(examples).repeat_interleave(views).repeat_interleave(inner).repeat(outer)
    tensor = owner.unsqueeze(1 - dim).expand((len(owner), 5) if dim == 0 else (5, len(owner)))
    apart = Layout(dim, outer, inner).by_example(tensor, examples, views)
    assert apart.shape[1 + dim] == outer * views * inner
    for i in range(examples):
        assert (apart[i] == i).all()


def test_capture_names_every_meeting_of_a_network():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    sites = trace(model, torch.zeros(1, 3, 6, 6)).sites.values()
    assert [site.weight_of for site in sites] == [
        {"weight": f"{number}.weight", "bias": f"{number}.bias"} for number in (0, 1, 4)
    ]


def test_the_memory_of_ghost_norms_is_judged_for_a_whole_microbatch():
    """However few examples the methods are tried on."""
    operation, args = convolution("plain", torch.contiguous_format)
    record, _ = meet(operation, args(torch.randn(EXAMPLES, 4, 9, 7, dtype=torch.float64)), "weight", 1)
    assert "conv_ghost" in candidates(record, "weight", EXAMPLES)
    assert "conv_ghost" not in candidates(record, "weight", 2**26)
    record, _ = meet(torch.ops.aten.linear.default, [torch.randn(EXAMPLES, 5, 4), torch.randn(3, 4), None], "weight", 1)
    assert "ghost" in candidates(record, "weight", EXAMPLES)
    assert "ghost" not in candidates(record, "weight", 2**26)


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize(("size", "spares"), [(3, True), (16, False)])
def test_gradients_are_not_written_out_where_a_ghost_norm_needs_far_less_memory(size, spares, views):
    """Whatever the clock says on a few images: 64 x 64 x 9 numbers for each image, or the inner products of its few
    pixels.
    """
    rows, weight = torch.randn(EXAMPLES * views, 64, size, size), torch.randn(64, 64, 3, 3)
    record, true = meet(torch.ops.aten.conv2d.default, [rows, weight, None, [1, 1], [1, 1], [1, 1], 1], "weight", views)
    names = candidates(record, "weight", EXAMPLES)
    assert {"loop", "grouped", "unfold"} < {*names}
    assert worth_trying(names, record, "weight") == (["conv_ghost"] if spares else names)
    without = [name for name in names if name != "conv_ghost"]  # a weight at several places has no ghost norm
    assert worth_trying(without, record, "weight") == without


def test_a_ghost_norm_keeps_no_output():
    """It would be as large as the gradient; what the closed form wants of it is a few numbers for each channel."""
    operation, args = convolution("plain", torch.contiguous_format)
    record, _ = meet(operation, args(torch.randn(EXAMPLES, 4, 9, 7, dtype=torch.float64)), "weight", 1)
    output = operation(*args(record.args["input"]))
    dies = weakref.ref(output)
    per_example = METHODS["conv_ghost"](dataclasses.replace(record, output=output), "weight")
    del output
    assert dies() is None and per_example.square_norms()[0].isfinite().all()
