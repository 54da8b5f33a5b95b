"""The forward and the backward pass: what every site gives to the per-example gradients of its
weights.

The forward pass runs the graph with every weight detached, so the backward pass computes gradients
of data alone. At each site the output's gradient is caught as it passes, and a rule (`rules/`)
makes of it and of the operation's inputs that site's part of the per-example gradients, written out
or as norms alone.
"""

import dataclasses
import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from sfumato.clipping.clip import one_thread
from sfumato.clipping.graph.autotune import fastest
from sfumato.clipping.graph.export import Traced
from sfumato.clipping.graph.rules import GHOSTS, METHODS, SUMS, candidates, normalization, worth_trying
from sfumato.clipping.graph.rules.site import MaterializedGrads, PerExampleGrads, SiteRecord, named_args
from sfumato.clipping.graph.weights import Weights
from sfumato.clipping.protocol import Batch, Loss, example_losses
from sfumato.clipping.random_layers import KeyedDraws
from sfumato.torch_internals import arguments_of, linear, quick_dilation, tree_map

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# Operations that refuse tensors of two types, though no weight may be among them.
_PRODUCTS = tuple(
    f"aten.{name}" for name in "linear conv matmul bmm mm addmm baddbmm einsum scaled_dot_product".split()
)


@dataclasses.dataclass
class Passes:
    """Both passes of one model and loss, and by which methods each site is computed.

    Attributes:
        ghosts: For each weight, the methods that write nothing out and may be used.
        methods: See `GraphEngine`.
        low: The type that images and weights are rounded to where they meet, and all that follows
            up to the model's output; None: none. Parameters, derived weights, losses, norms,
            coefficients and sums stay in float32.
        settled: Methods that were seen to fit their site.
        examples: Of the largest microbatch so far, which memory must hold.
    """

    traced: Traced
    loss_fn: Loss
    ghosts: dict[str, tuple[str, ...]]
    methods: dict[str, str]
    low: torch.dtype | None
    settled: set[str] = dataclasses.field(default_factory=set)
    examples: int = 0

    def forget(self, memory_format: str) -> None:
        """Leaves all methods open, but for the order of images in memory."""
        self.methods, self.settled = {"memory_format": memory_format}, set()

    def __call__(
        self, weights: Weights, batch: Batch, measures: bool = False
    ) -> tuple[dict[str, PerExampleGrads], torch.Tensor]:
        """What the sites contribute to each weight, and the (m,) losses."""
        if len(batch.inputs) > self.examples:
            self.examples = len(batch.inputs)
            self.settled.clear()
        one = _Pass(self, weights, batch, measures)
        examples, views = batch.inputs.shape[:2]
        with torch.enable_grad():
            outputs = one.forward()
            losses = example_losses(self.loss_fn, outputs, batch.targets, batch.weights)
            leaves = [leaf for _, leaf in one.per_row] + one.firsts
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        one.firsts.clear()  # their hooks hold the pass, which holds them: neither would be freed at once
        for (weight, _), gradient in zip(one.per_row, gradients, strict=False):
            if gradient is not None:
                # One image may lie in many of the operation's rows, one after another: tokens, windows.
                rows = gradient.view(examples, -1, *weights.values[weight].shape).sum(1)
                one.add(weight, MaterializedGrads(rows))
        for weight, value in weights.values.items():  # whose use does not reach the loss
            if weight not in one.per_example_grads:
                one.add(weight, MaterializedGrads(value.new_zeros(examples, *value.shape)))
        return one.per_example_grads, losses.detach()

    def method(self, record: SiteRecord, argument: str, weights: Weights, measures: bool) -> str:
        """The name of the method for a site's weight, settled when it is first asked for."""
        key, weight = f"{record.site.name}.{argument}", record.site.weight_of[argument]
        if key not in self.settled:
            fitting = candidates(record, argument, self.examples)
            names = [name for name in fitting if name not in GHOSTS or name in self.ghosts[weight]]
            # A method of another model's record could be silently wrong here.
            if self.methods.get(key) not in names:
                names = worth_trying(names, record, argument)
                is_open = measures and len(names) > 1
                self.methods[key] = fastest(names, record, argument, weights) if is_open else names[0]
            self.settled.add(key)
        return self.methods[key]


class _Pass:
    """One forward pass, whose sites fill `per_example_grads` on the way back."""

    def __init__(self, passes: Passes, weights: Weights, batch: Batch, measures: bool) -> None:
        self._passes, self._weights, self._batch, self._measures = passes, weights, batch, measures
        self._low = passes.low if batch.weights.dtype != torch.float64 else None
        self.per_example_grads: dict[str, PerExampleGrads] = {}
        self.firsts: list[torch.Tensor] = []  # the first outputs that depend on a weight: the backward pass may stop
        self.per_row: list[tuple[str, torch.Tensor]] = []  # weights that every row has a copy of

    def forward(self) -> Any:
        """What the model returns, (rows, *shape for one row) each."""
        traced, methods = self._passes.traced, self._passes.methods
        values: dict[Node, Any] = {}
        for node, value in self._weights.shared.items():
            values[node] = self._lowered(value.detach() if isinstance(value, torch.Tensor) else value)
        rows = self._lowered(self._batch.inputs.flatten(0, 1))
        if "memory_format" in methods:
            rows = rows.contiguous(memory_format=MEMORY_FORMATS[methods["memory_format"]])
        values[traced.input] = rows
        kept = {*traced.outputs, *self._weights.shared}
        for node, done in traced.last_uses.items():
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = self._call(node, args, kwargs)
            del args, kwargs
            for other in done:  # no later operation takes it
                if other not in kept:
                    del values[other]
        for node, layout in traced.outputs.items():
            output = values[node] if self._low is None else values[node].float()
            values[node] = layout.by_example(output, len(rows), 1)
        return traced.output(values)

    def add(self, weight: str, per_example: PerExampleGrads) -> None:
        """One more site's part of a weight's gradients."""
        before: Any = self.per_example_grads.get(weight)  # ghost norms do not add up
        self.per_example_grads[weight] = per_example if before is None else before + per_example

    def _call(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation; at a site, its output's gradient is caught."""
        site = self._passes.traced.sites.get(node)
        if self._low is not None and (site is not None or str(node.target).startswith(_PRODUCTS)):
            args, kwargs = tree_map(self._lowered, (args, kwargs))
        if site is None:
            with self._draws if node in self._passes.traced.random else nullcontext():  # none may be drawn by place
                return computed(node, args, kwargs)
        named = named_args(node, args, kwargs)
        if normalization.can_be_per_row(site, named):
            value, leaves = normalization.per_row(site, named)
            for argument, leaf in leaves.items():
                self.per_row.append((site.weight_of[argument], leaf))
            return value
        if normalization.has_statistics(site, named):
            value, named = normalization.with_statistics(site, named)
        else:
            value = computed(node, args, kwargs)
        if not value.is_floating_point():  # a comparison, say: no gradient passes
            return value
        if not value.requires_grad:
            value = value.detach().requires_grad_()
            self.firsts.append(value)
        held = [named]
        for name, arg in named.items():
            if isinstance(arg, torch.Tensor):
                named[name] = arg.detach()
        method = self._passes.methods.get(f"{site.name}.weight", "conv_ghost")
        is_wanted = site.weight_of.get("weight") in self._weights.directions and method == "conv_ghost"
        outputs = [value.detach() if is_wanted else None]  # kept only for who may want it

        def catch(grad: torch.Tensor) -> None:
            examples, views = self._batch.inputs.shape[:2]
            with torch.no_grad():
                record = SiteRecord(site, examples, views, held.pop(), grad, outputs.pop())
                for argument, weight in site.weight_of.items():
                    name = self._passes.method(record, argument, self._weights, self._measures)
                    with one_thread(grad.numel()) if name in SUMS else nullcontext():
                        self.add(weight, METHODS[name](record, argument))

        value.register_hook(catch)
        return value

    @functools.cached_property
    def _draws(self) -> KeyedDraws:
        seeds = self._batch.seeds
        return KeyedDraws(None if seeds is None else seeds.reshape(-1, 1, 2), self._batch.draw_dims)

    def _lowered(self, value: Any) -> Any:
        is_float = self._low is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self._low) if is_float else value


def computed(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation gives: three of them take a CPU half the time, or less, that PyTorch lets them take. Weights
    need no gradient. What is being compiled is of another type, and left alone.
    """
    first = args[0] if args else None
    if type(first) is not torch.Tensor or first.device.type != "cpu":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.target is torch.ops.aten.linear.default and not args[1].requires_grad:
        return Linear.apply(*arguments_of(node.target, args, kwargs).values())
    if node.target is torch.ops.aten.conv2d.default:
        given = arguments_of(node.target, args, kwargs)
        dilation = quick_dilation(given["weight"].shape[2:], given["dilation"], first.device)
        return node.target(**given | {"dilation": dilation})
    if node.target is torch.ops.aten.max_pool2d.default and first.ndim == 4 and first.is_contiguous():
        return MaxPool2d.apply(*arguments_of(node.target, args, kwargs).values())
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Linear(torch.autograd.Function):
    """`aten.linear`; see `sfumato.torch_internals.linear`."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return linear(grads[0], ctx.saved_tensors[0].T), None, None


class MaxPool2d(torch.autograd.Function):
    """`aten.max_pool2d`, values and gradients bit for bit, in half to a fifth of its time on a CPU: that looks at one
    number after another, and where channels are last at many at once.
    """

    @staticmethod
    def forward(ctx: Any, maps: torch.Tensor, *window: Any) -> torch.Tensor:
        last = maps.contiguous(memory_format=torch.channels_last)
        pooled, places = torch.ops.aten.max_pool2d_with_indices(last, *window)
        ctx.save_for_backward(maps, places)
        ctx.window = window
        return pooled.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        maps, places = ctx.saved_tensors
        grad = torch.ops.aten.max_pool2d_with_indices_backward(grads[0], maps, *ctx.window, places)
        return grad, *[None] * len(ctx.window)
