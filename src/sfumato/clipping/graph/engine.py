"""The fast engine: one forward and one backward pass, per-example gradients only where weights meet images.

The model is traced to a graph of operations (`capture`). The forward pass runs it with every
weight detached, so that the backward pass computes gradients with respect to data alone. At
each site the output's gradient is caught as it passes, and a rule (`rules/`) makes of it and
of the operation's inputs that site's part of the per-example gradients, written out or as
norms alone. `derived` carries them from weights to parameters.
"""

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils._pytree import tree_map

from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.graph.clip import Totals
from sfumato.clipping.graph.compile import CompiledPass, Tensors
from sfumato.clipping.graph.export import module_path
from sfumato.clipping.graph.guards import guard, is_recording
from sfumato.clipping.graph.losses import ExampleLosses
from sfumato.clipping.graph.rules import (
    GHOSTS,
    METHODS,
    MaterializedGrads,
    PerExampleGrads,
    SiteRecord,
    candidates,
    named_args,
    normalization,
    worth_trying,
)
from sfumato.clipping.graph.sites import trace
from sfumato.clipping.graph.weights import Weights, evaluate_weights
from sfumato.clipping.norms import at_least_float32
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss

# A method this many times slower than the best so far is not tried again.
_HOPELESS = 1.5
# Seconds of a pass that methods are tried in: long enough for their order to be that of a whole microbatch.
_TRIAL_SECONDS = 0.2
# What a method's time counts. Gradients that are written out take memory for each example, and those of a whole microbatch
# leave the processor's cache, while a ghost norm's one weight gradient then costs each example less.
# One grouped convolution holds them in the library's own order besides.
_PRICES = {name: 1.0 if name in GHOSTS else 1.3 for name in METHODS} | {"grouped": 1.4}
# So often passes are compiled: changes of the clipping norm, of the number of targets, of the loss's settings together.
_COMPILATIONS = 8
# How far losses and their gradients may lie from those of the loss as it is now: rounding, in float32 and bfloat16.
_LOSSES, _LOW_LOSSES = 1e-4, 2e-2
# So often each memory format is timed.
_TRIAL_ROUNDS = 3

# What images and weights are rounded to where they meet; None leaves them as they are.
LOW_PRECISIONS = {"float32": None, "bf16": torch.bfloat16}
MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """A place where a weight meets images, and how its per-example gradients are had.

    Attributes:
        module: The module's dotted path; empty for the model itself.
        operation: PyTorch's name for the operation.
        argument: Which of its arguments is the weight.
        parameters: Names of the trainable parameters that the weight is computed from.
        kind: See `sfumato.clipping.graph.parametrization.Group`.
        method: See `sfumato.clipping.graph.rules.METHODS`; "per_row" where the forward pass keeps rows apart by itself.
    """

    module: str
    operation: str
    argument: str
    parameters: tuple[str, ...]
    kind: str
    method: str


# Operations that refuse tensors of two types.
_PRODUCTS = tuple(f"aten.{name}" for name in ("linear", "conv", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "scaled_dot_product"))


class GraphEngine(Engine):
    """Sums clipped per-example gradients of one model; see `sfumato.clipping.clipped_grad`.

    Attributes:
        methods: "<site>.<argument>" -> name of the method that computes it, and
            "memory_format" -> that of the images. Chosen by measurement on made-up images
            unless the memory format is given; then methods not given follow a fixed rule. They
            decide speed and memory, and how the result is rounded.
        compiles: As given.

    Args:
        precision: "bf16" rounds images and weights where they meet, and all that follows up to the model's
            output. Parameters, derived weights, losses, norms, coefficients and sums stay in float32.
        compiles: Whether a microbatch becomes one compiled graph.
    """

    parallel = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        row: torch.Tensor,
        methods: dict[str, str] | None = None,
        precision: str = "float32",
        compiles: bool = False,
    ) -> None:
        self.low = LOW_PRECISIONS[precision]
        self.model, self.losses = model, ExampleLosses(loss_fn)
        self.traced = trace(model, row)
        known_methods = {"memory_format"} | {f"{site.name}.{argument}" for site in self.traced.sites.values() for argument in site.weight_of}
        self.methods = {key: name for key, name in (methods or {}).items() if key in known_methods}
        self.measures = self.methods.get("memory_format") not in MEMORY_FORMATS
        self.settled: set[str] = set()  # methods that were seen to fit their site
        self.examples = 0  # of the largest microbatch so far, which memory must hold
        num_sites = Counter(weight for site in self.traced.sites.values() for weight in site.weight_of.values())
        # GhostGrads norms do not add up over sites, and pulling back needs rows, or moments where there is a closed form.
        ghosts: dict[str, tuple[str, ...]] = {"parameter": tuple(GHOSTS), "standardized": ("conv_ghost",), "general": ()}
        self.ghosts = {weight: ghosts[group.kind] if num_sites[weight] == 1 else () for group in self.traced.groups for weight in group.weights}
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.compiles = compiles
        # For each coefficient and kind of batch. A loss that goes on changing is left to single operations in the end.
        self._compiled: dict[Any, CompiledPass] = {}
        self._compilations_left = _COMPILATIONS
        self._fixed: Weights | None = None
        self._num_fixed, self._lock, self._compiling = 0, threading.Lock(), threading.Lock()

    def site_reports(self) -> list["SiteReport"]:
        """Every place where a weight meets images, in the order of the forward pass."""
        group_of = {weight: group for group in self.traced.groups for weight in group.weights}
        return [
            SiteReport(
                module=module_path(site.node),
                operation=site.operation,
                argument=argument,
                parameters=self.traced.capture.sources[weight],
                kind=group_of[weight].kind,
                method=self.methods.get(f"{site.name}.{argument}", "per_row"),
            )
            for site in self.traced.sites.values()
            for argument, weight in site.weight_of.items()
        ]

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`."""
        if len(batch.inputs) > self.examples:
            self.examples = len(batch.inputs)
            self.settled.clear()
        one_pass = self._compiled_pass if self.compiles else self._pass
        norms, losses, *sums = one_pass(coefficient, self._weights(), batch)
        return ClippedGrad(dict(zip(self._names, _apart(sums), strict=True)), norms, losses)

    @property
    def rounds_by(self) -> float:  # type: ignore[override]
        """See `sfumato.clipping.protocol.Engine`."""
        return 0.3 if self.low is not None else 0.02 if self.compiles else 0.0

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """See `sfumato.clipping.protocol.Engine`."""
        held = self.low, self.compiles
        self.low, self.compiles = None, False
        try:
            yield
        finally:
            self.low, self.compiles = held

    @contextmanager
    def parameters_fixed(self) -> Iterator[None]:
        """See `sfumato.clipping.protocol.Engine`."""
        with self._lock:
            self._num_fixed += 1
        try:
            yield
        finally:
            with self._lock:  # several threads may be inside
                self._num_fixed -= 1
                if not self._num_fixed:
                    self._fixed = None

    @contextmanager
    def parameters_free(self) -> Iterator[None]:
        """See `sfumato.clipping.protocol.Engine`."""
        with self._lock:
            num_fixed, self._num_fixed, self._fixed = self._num_fixed, 0, None
        try:
            yield
        finally:
            with self._lock:
                self._num_fixed, self._fixed = self._num_fixed + num_fixed, None

    def _weights(self) -> Weights:
        weights = self._fixed or evaluate_weights(self.traced, self.traced.capture.state(self.model))
        with self._lock:
            if self._num_fixed:
                self._fixed = weights
        return weights

    def _compiled_pass(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """The same as `_pass`. The weights stay outside the graph unless autograd's record of them is needed in it."""
        weights_of: Callable[[Sequence[torch.Tensor]], Weights]
        if any(group.kind == "general" for group in self.traced.groups):
            state = self.traced.capture.state(self.model)
            tensors, nodes = list(state.values()), list(state)
            weights_of = lambda tensors: evaluate_weights(self.traced, dict(zip(nodes, tensors, strict=True)))  # noqa: E731
        elif weights.need_record:  # a closed form no longer holds
            return self._pass(coefficient, weights, batch)
        else:
            tensors, weights_of = weights.apart()
        of_batch = batch.tensors
        key = coefficient, len(batch.targets), batch.seeds is None
        if key not in self._compiled and not self._compilations_left:
            return self._pass(coefficient, weights, batch)
        with self._compiling:  # several threads may be here
            if key not in self._compiled:
                self._compilations_left -= 1
                self._pass(coefficient, weights, batch)  # settles the methods
                batch_of, start = batch.like, len(of_batch)

                def of_tensors(*tensors: torch.Tensor) -> Tensors:
                    return self._pass(coefficient, weights_of(tensors[start:]), batch_of(tensors[:start]))

                self._compiled[key] = CompiledPass(of_tensors)
            compiled = self._compiled[key]
            compiled.prepare(*of_batch, *tensors)
        results, holds = compiled(*of_batch, *tensors)
        count = 2 + len(self._names)
        if not holds:
            return self._pass(coefficient, weights, batch)
        if not self._is_the_loss(results[1], results[count:], batch):
            with self._compiling:
                if self._compiled.get(key) is compiled:
                    del self._compiled[key]
            return self._pass(coefficient, weights, batch)
        return results[:count]

    def _is_the_loss(self, losses: torch.Tensor, seen: Tensors, batch: Batch) -> bool:
        """Whether the loss, applied anew, gives what it gave in a compiled pass: its settings may have changed since.

        Args:
            losses: (m,), of the compiled pass.
            seen: What the loss was given there, and its gradients with respect to that.
        """
        nodes, tolerance = list(self.traced.outputs), _LOSSES if self.low is None else _LOW_LOSSES
        with torch.enable_grad():
            outputs = [value.detach().requires_grad_(value.is_floating_point()) for value in seen[: len(nodes)]]
            given = self.traced.capture.output(dict(zip(nodes, outputs, strict=True)))
            again = self.losses(given, batch.targets, batch.inputs.shape[1])
            gradients = _gradients(again, outputs)
        pairs = [(losses, again.detach()), *zip(seen[len(nodes) :], gradients, strict=True)]
        return all(_agree(one, other, tolerance) for one, other in pairs)

    def _pass(self, coefficient: Coefficient, weights: Weights, batch: Batch) -> Tensors:
        """Norms, losses and each parameter's clipped sum; in a compiled graph also what `_is_the_loss` looks at."""
        per_example_grads, losses, seen = _backward(self, weights, batch)
        with torch.no_grad():
            totals = Totals(weights, per_example_grads)
            norms = totals.norms()
            finite = norms.isfinite() & losses.isfinite()
            coefficients = torch.where(batch.is_real & finite, coefficient(norms), 0.0)
            # Where all is finite, a coefficient of zero is enough to leave an example out.
            sums = totals.clipped_sums(coefficients, None if guard(finite.all()) else finite)
        return norms, losses, *(sums[name] for name in self._names), *seen

    def choose_methods(self, batch: Batch) -> None:
        """Tries the memory formats, and for each of them the methods of every site, on a part of a made-up microbatch."""
        self.examples = len(batch.inputs)
        if not self.measures:
            return
        weights = self._weights()
        few = batch.first(2)
        self._forget("contiguous")
        _backward(self, weights, few)
        some = batch.first(max(2, int(2 * _TRIAL_SECONDS / self._seconds(weights, few))))
        methods = {}
        for memory_format in MEMORY_FORMATS if some.inputs.ndim == 5 else ["contiguous"]:
            self._forget(memory_format)
            _backward(self, weights, some)
            methods[memory_format] = self.methods
        seconds = dict.fromkeys(methods, float("inf"))
        for _ in range(_TRIAL_ROUNDS if len(methods) > 1 else 0):  # taking turns: a busy moment meets them all
            for memory_format, self.methods in methods.items():
                seconds[memory_format] = min(seconds[memory_format], self._seconds(weights, some))
        self.methods = methods[min(seconds, key=seconds.__getitem__)]
        self.measures = False

    def _forget(self, memory_format: str) -> None:
        self.methods = {"memory_format": memory_format}
        self.settled = set()

    def _seconds(self, weights: Weights, batch: Batch) -> float:
        start = _now(batch.inputs)
        self._pass(torch.zeros_like, weights, batch)
        return _now(batch.inputs) - start


def _apart(sums: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same in float32 at least, none sharing memory with another or with itself.

    Autograd gives one tensor to both parameters of a + b, and one number to all values of a sum: noise that is
    added to one in place would be added to the others, or fail.
    """
    apart: list[torch.Tensor] = []
    seen: set[int] = set()
    for total in map(at_least_float32, sums):
        is_repeated = any(size > 1 and not step for size, step in zip(total.shape, total.stride(), strict=True))
        apart.append(total.clone(memory_format=torch.contiguous_format) if is_repeated or total.data_ptr() in seen else total)
        seen.add(apart[-1].data_ptr())
    return apart


def _gradients(losses: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of losses with respect to what they were computed from; zero where they do not depend on it."""
    floats = [output for output in outputs if output.requires_grad]
    if not floats or not losses.requires_grad:
        return [torch.zeros_like(output) for output in outputs]
    found = iter(torch.autograd.grad(losses.sum(), floats, materialize_grads=True, retain_graph=True))
    return [next(found) if output.requires_grad else torch.zeros_like(output) for output in outputs]


def _agree(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    """Whether each row of two tensors is the same to rounding, relative to its own length and to the longest's."""
    one, other = (value.reshape(len(value), -1).double() for value in (one, other))
    lengths, errors = other.norm(dim=1), (one - other).norm(dim=1)
    return bool((errors <= tolerance * (lengths + lengths.max())).all())


def _backward(
    engine: GraphEngine,
    weights: Weights,
    batch: Batch,
) -> tuple[dict[str, PerExampleGrads], torch.Tensor, list[torch.Tensor]]:
    """Both passes: what the sites contribute to each weight, the (m,) losses and what the loss saw.

    The last is for graphs that are being compiled, else empty: the model's outputs, (m, ...) each, and the gradients
    with respect to them.
    """
    traced, (examples, views) = engine.traced, batch.inputs.shape[:2]
    draws = KeyedDraws(None if batch.seeds is None else batch.seeds.reshape(-1, 1, 2), engine.draw_dims)
    per_example_grads: dict[str, PerExampleGrads] = {}
    firsts: list[torch.Tensor] = []  # the first outputs that depend on a weight: where the backward pass may stop
    outputs_of: dict[str, torch.Tensor] = {}
    per_row: list[tuple[str, torch.Tensor]] = []  # weights that every row has a copy of

    def call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        site = traced.sites.get(node)
        if engine.low is not None and str(node.target).startswith(_PRODUCTS):  # they take one type only
            args, kwargs = tree_map(lowered, (args, kwargs))
        if site is None:
            with draws if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) else nullcontext():
                return node.target(*args, **kwargs)  # type: ignore[operator]
        named = named_args(node, args, kwargs)
        if normalization.can_be_per_row(site, named):
            value, leaves = normalization.per_row(site, named)
            per_row.extend((site.weight_of[argument], leaf) for argument, leaf in leaves.items())
            return value
        if normalization.has_statistics(site, named):
            value, named = normalization.with_statistics(named)
        else:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if not value.is_floating_point():  # a comparison, say: no gradient passes
            return value
        if not value.requires_grad:
            value = value.detach().requires_grad_()
            firsts.append(value)
        held = [{name: _detached(arg) for name, arg in named.items()}]
        if site.weight_of.get("weight") in weights.directions and engine.methods.get(f"{site.name}.weight", "conv_ghost") == "conv_ghost":
            # Kept only for who may want it.
            outputs_of[site.name] = value.detach()

        def catch(grad: torch.Tensor) -> None:
            with torch.no_grad():
                _collect(engine, weights, SiteRecord(site, examples, views, held.pop(), grad, outputs_of.pop(site.name, None)), per_example_grads)

        value.register_hook(catch)
        return value

    def lowered(value: Any) -> Any:
        is_float = engine.low is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(engine.low) if is_float else value

    with torch.enable_grad():
        values = {node: lowered(_detached(value)) for node, value in weights.shared.items()}
        rows = lowered(batch.inputs.flatten(0, 1))
        if "memory_format" in engine.methods:
            rows = rows.contiguous(memory_format=MEMORY_FORMATS[engine.methods["memory_format"]])
        values[traced.capture.input] = rows
        kept = {*traced.capture.outputs, *weights.shared}
        traced.capture.data.run(values, keep=kept.__contains__, call=call)
        for node, layout in traced.outputs.items():
            values[node] = layout.by_example(values[node] if engine.low is None else values[node].float(), examples, views)
        outputs = traced.capture.output(values)
        ends = [values[node] for node in traced.outputs] if is_recording() else []
        del values
        losses = engine.losses(outputs, batch.targets, views)
        del outputs
        seen = [*(end.detach() for end in ends), *_gradients(losses, ends)]
        gradients = torch.autograd.grad(losses.sum(), [*(leaf for _, leaf in per_row), *firsts], allow_unused=True)
    for (weight, _), gradient in zip(per_row, gradients, strict=False):
        if gradient is not None:
            # One image may lie in many of the operation's rows, one after another: tokens, windows.
            _add(per_example_grads, weight, MaterializedGrads(gradient.view(examples, -1, *weights.values[weight].shape).sum(1)))
    for weight, value in weights.values.items():  # whose use does not reach the loss
        if weight not in per_example_grads:
            per_example_grads[weight] = MaterializedGrads(torch.zeros(examples, *value.shape, dtype=value.dtype, device=value.device))
    return per_example_grads, losses.detach(), seen


def _collect(engine: GraphEngine, weights: Weights, record: SiteRecord, per_example_grads: dict[str, PerExampleGrads]) -> None:
    for argument, weight in record.site.weight_of.items():
        key = f"{record.site.name}.{argument}"
        if key not in engine.settled:
            names = [name for name in candidates(record, argument, engine.examples) if name not in GHOSTS or name in engine.ghosts[weight]]
            # A method of another model's record could be silently wrong here.
            if engine.methods.get(key) not in names:
                names = worth_trying(names, record, argument)
                engine.methods[key] = _fastest(names, record, argument, weights, weight) if engine.measures and len(names) > 1 else names[0]
            engine.settled.add(key)
        _add(per_example_grads, weight, METHODS[engine.methods[key]](record, argument))


def _add(per_example_grads: dict[str, PerExampleGrads], weight: str, per_example: PerExampleGrads) -> None:
    before = per_example_grads.setdefault(weight, per_example)
    if before is not per_example:
        assert isinstance(before, MaterializedGrads) and isinstance(per_example, MaterializedGrads)  # ghost norms do not add up
        per_example_grads[weight] = before + per_example


def _fastest(names: list[str], record: SiteRecord, argument: str, weights: Weights, weight: str) -> str:
    """Times the methods on these very tensors: gradients, norms and weighted sum together."""
    coefficients = torch.ones(record.examples, device=record.grad.device)

    def seconds(name: str) -> float:
        start = _now(record.grad)
        per_example = METHODS[name](record, argument)
        if weight in weights.directions:
            per_example.moments(weights.directions[weight], weights.values[weight])  # type: ignore[attr-defined]
        else:
            per_example.square_norms()
        per_example.weighted_sum(coefficients, None)
        return _now(record.grad) - start

    took: dict[str, float] = {}
    for name in names:
        first = seconds(name)
        took[name] = first if took and first > _HOPELESS * min(took.values()) else min(first, seconds(name))
    return min(took, key=lambda name: took[name] * _PRICES[name])


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _now(on: torch.Tensor) -> float:
    if on.is_cuda:
        torch.cuda.synchronize(on.device)
    # A thread that computes alone measures its own work, whatever else the machine does.
    return time.thread_time() if not on.is_cuda and torch.get_num_threads() == 1 else time.perf_counter()
