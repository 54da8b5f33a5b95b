"""A user's loss on many examples, so that none can tell what another's is.

PyTorch traces the loss of one example (its outputs for K views, its target) and that loss's gradient
to a graph, on shapes alone. A graph that holds only operations that raise no error and draw no
numbers, whatever their values, is then applied to all examples side by side (`torch.func.vmap`).
None of the user's code runs in it: it can neither catch an error, count, nor keep anything, and no
formula is chosen by values. The graph is traced anew for each call, since the loss may have been
changed between two of them.

Any other loss (it branches on values, holds a `try` or another library, has a backward pass of its
own) could keep something of one image for the next, in more places than any search finds. So it
needs its author's word that it does not (`pure`), and is called for one example after another.
"""

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.func import functionalize, grad_and_value, vmap
from torch.fx import GraphModule

from sfumato.clipping.loss_counts import counts_of
from sfumato.clipping.loss_graph import graph_of
from sfumato.clipping.loss_promise import is_promised
from sfumato.clipping.outputs import is_usual
from sfumato.clipping.protocol import Loss
from sfumato.errors import InputError
from sfumato.torch_internals import tree_flatten, tree_unflatten

# Losses (m,), and for each of the outputs the gradient of their sum; None for whole numbers.
LossesAndGradients = tuple[torch.Tensor, list[torch.Tensor | None]]
_graphs_of_pure: "weakref.WeakKeyDictionary[Any, dict[Any, GraphModule | None]]" = weakref.WeakKeyDictionary()
"""Of functions that are promised: they are the same for every engine, so they are traced once."""
_user_code = threading.RLock()
"""The code of users' losses is called by one thread at a time, whichever loss it is: they may share
what they keep.
"""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Outputs and targets of some structure, shapes and types."""

    leaves: tuple[Any, ...]  # what is no tensor, in its place
    structure: Any
    parts: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]  # of outputs, then of targets
    num_outputs: int
    views: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.parts, self.num_outputs, str(self.structure), tuple(map(repr, self.leaves)), self.views

    @property
    def floats(self) -> tuple[int, ...]:
        """The outputs that have a gradient."""
        return tuple(place for place in range(self.num_outputs) if self.parts[place][1].is_floating_point)

    def nested(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Outputs as the model returns them."""
        found = iter(tensors)
        return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in self.leaves], self.structure)


class _Tensor:
    """Stands for a tensor among what a model returns."""

    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()


class ExampleLosses:
    """One loss for each example, of that example's outputs and targets alone, and its gradients with
    respect to these outputs.

    A loss that compares rows (with their mean, with each other's targets, with their number) sees
    one example's views only. Where an example's outputs hold NaN or infinity (less than infinite may
    be meant: a masked class) it sees zeros: its loss is NaN.
    """

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self._is_pure = is_promised(loss_fn)
        self._kinds: dict[Any, _Kind] = {}  # that made-up images gave, as calls will
        self._graphs: dict[Any, GraphModule | None] = {}
        if self._is_pure and isinstance(loss_fn, types.FunctionType):
            self._graphs = _graphs_of_pure.setdefault(loss_fn, {})
        self._notes = self._is_closed = False

    def renew(self, targets: tuple[torch.Tensor, ...]) -> None:
        """For a new call: the loss may be another than at the last one. All is traced before a model
        sees a private image, which it may take a note of.

        Args:
            targets: As the call's will be, by shape and type.

        Raises:
            InputError: As `require`.
        """
        if not self._is_pure:
            self._graphs = {}
            wanted = tuple((target.shape[1:], target.dtype, target.device) for target in targets)
            for kind in self._kinds.values():
                if kind.parts[kind.num_outputs :] == wanted:
                    self._graph(kind)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Within, outputs are those of made-up images, of the kinds that calls will have; afterwards
        no loss is traced for any other.
        """
        self._notes, self._is_closed = True, False
        try:
            yield
        finally:
            self._notes, self._is_closed = False, True

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within, outputs are those of made-up images, of whatever kind."""
        was, self._is_closed = self._is_closed, False
        try:
            yield
        finally:
            self._is_closed = was

    def require(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> None:
        """Raises InputError where such a loss is neither a graph nor promised to be `pure`."""
        self._graph(_kind(outputs, targets, views))

    def __call__(self, outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> LossesAndGradients:
        """(m,) losses, each the mean over K views, and their gradients.

        Args:
            outputs: Any nesting of tensors (m, *shape of the model's output for K rows), without a
                gradient's history; what else is in it goes to the loss as it is.
            targets: Each (m, ...).
        """
        tensors = [leaf for leaf in tree_flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
        usual = is_usual(tensors)
        shown = [_where(usual, tensor, 0.0) if tensor.is_floating_point() else tensor for tensor in tensors]
        kind = _kind(outputs, targets, views)
        if self._notes:
            self._kinds[kind.key] = kind
        if self._is_closed and not self._is_pure and kind.key not in self._kinds:
            raise InputError(
                "the model returns for an image what it returned for no made-up one (another shape, or a number that "
                "is no tensor), so that loss_fn would be told of it. Return tensors, of one shape for all images."
            )
        graph = self._graph(kind)
        if graph is not None:
            with torch.no_grad():  # a network that the loss holds may have parameters that train elsewhere
                gradients, losses = vmap(graph)(*shown, *targets)
        else:
            gradients, losses = self._one_by_one(kind, shown, targets)
        found = iter(gradients)
        by_output = [next(found) if tensor.is_floating_point() else None for tensor in tensors]
        return _where(usual, losses, torch.nan), by_output

    def _loss(self, kind: _Kind, *parts: torch.Tensor) -> torch.Tensor:
        """The mean loss of one example's outputs and targets; copies, for a loss may write to what it
        is given.
        """
        rows = kind.nested(part.clone() for part in parts[: kind.num_outputs])
        repeated = (target.expand(kind.views, *target.shape).clone() for target in parts[kind.num_outputs :])
        loss: torch.Tensor = self._loss_fn(rows, *repeated).mean()
        return loss

    def _graph(self, kind: _Kind) -> GraphModule | None:
        with _user_code:
            if kind.key not in self._graphs:
                graph, reason = self._traced(kind)
                if graph is None and not self._is_pure:
                    raise InputError(
                        f"loss_fn cannot be written down as a graph ({reason}), so nothing shows that it keeps "
                        "nothing of one image for the next. Write it with operations on tensors alone (no .item(), "
                        "no `if` or `assert` on values), or, if it is a function of its arguments alone, promise so: "
                        "loss_fn = sfumato.clipping.pure(loss_fn), which is slower."
                    )
                self._graphs[kind.key] = graph
            return self._graphs[kind.key]

    def _traced(self, kind: _Kind) -> tuple[GraphModule | None, str]:
        """From one example's outputs and targets to gradients, of the outputs that have one, and the
        loss; or why the loss is no such graph.
        """
        made_up = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kind.parts]
        mean_loss = functools.partial(self._loss, kind)
        of_example = grad_and_value(mean_loss, argnums=kind.floats) if kind.floats else lambda *p: ((), mean_loss(*p))
        self._run_on(made_up, kind)  # what it computes once and for all (a table in a cache) holds numbers
        before = counts_of(self._loss_fn)
        try:
            # vmap writes to nothing unbatched; PyTorch takes no constants apart that are written to.
            graph, reason = graph_of(functionalize(of_example), made_up)
            if graph is None:
                graph, other = graph_of(of_example, made_up)
                reason = reason if "INTERNAL ASSERT" not in reason else other
        finally:
            self._run_on(made_up, kind)  # what it noted of the last call holds numbers again
        after = counts_of(self._loss_fn)
        changed = [name for name in after if before.get(name, after[name]) != after[name]]
        if changed:
            return None, f"it changes {changed[0]} when it is called: count outside of it"
        return graph, reason

    def _run_on(self, made_up: list[torch.Tensor], kind: _Kind) -> None:
        """Calls the loss on made-up numbers, for targets that it may take."""
        for fill in (torch.zeros_like, torch.ones_like):
            targets = map(fill, made_up[kind.num_outputs :])
            with contextlib.suppress(Exception), torch.no_grad():
                self._loss(kind, *made_up[: kind.num_outputs], *targets)

    def _one_by_one(
        self, kind: _Kind, shown: list[torch.Tensor], targets: tuple[torch.Tensor, ...]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        losses, gradients = [], [torch.zeros_like(tensor) for tensor in shown if tensor.is_floating_point()]
        with _user_code:
            for place in range(len(shown[0])):
                with torch.enable_grad():
                    own = [tensor[place].detach().requires_grad_(tensor.is_floating_point()) for tensor in shown]
                    loss = self._loss(kind, *own, *(target[place] for target in targets))
                    floats = [tensor for tensor in own if tensor.requires_grad]
                    found: tuple[torch.Tensor | None, ...] = (None,) * len(floats)
                    if floats and loss.requires_grad:
                        found = torch.autograd.grad(loss, floats, allow_unused=True)
                for gradient, of_example in zip(gradients, found, strict=True):
                    if of_example is not None:
                        gradient[place] = of_example
                losses.append(loss.detach())
        return gradients, torch.stack(losses)


def _kind(outputs: Any, targets: tuple[torch.Tensor, ...], views: int) -> _Kind:
    leaves, structure = tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parts = tuple((part.shape[1:], part.dtype, part.device) for part in (*tensors, *targets))
    named = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return _Kind(named, structure, parts, len(tensors), views)


def _where(condition: torch.Tensor, value: torch.Tensor, other: float) -> torch.Tensor:
    return torch.where(condition.view(-1, *[1] * (value.ndim - 1)), value, other)
