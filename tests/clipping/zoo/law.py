"""The law that every model keeps or is refused for, and the truth that it is compared with."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from tests.clipping.zoo.entry import Entry

ENGINES = ("auto", "graph", "func", "reference")
KEY = hashlib.sha256(b"a step").digest()
# Largest pixel of each image: ordinary ones, and extremes of what a file can hold.
SCALES = (1.0, 0.3, 20.0, 300.0, 1e-3, 1.0, 60.0, 3.0)
# Rows of the batches that are tried, in this order: odd and even numbers of examples.
BATCHES = ((0, 1, 2, 3, 4), tuple(range(8)), (3, 0), (2,))

Sums = dict[str, torch.Tensor]


@dataclasses.dataclass
class Outcome:
    """What came of one model under one engine.

    Attributes:
        engine: That was in use in the end.
        refused: The message of the refusal; empty if none.
        other_error: An exception of another type.
        moved: Largest move of a sum on removing one image, over the sensitivity.
        error: Largest distance of a sum from the loop's, over the root of the sum of squares of its terms.
        norm_error: Largest relative error of a norm.
        repeated: Whether the same batch gave the same bits again.
        changed: Names of what was not as before, of the model or the global random state.
        loop_fails: Whether plain autograd on single images fails.
    """

    engine: str = ""
    refused: str = ""
    other_error: str = ""
    moved: float = 0.0
    error: float = 0.0
    norm_error: float = 0.0
    repeated: bool = True
    changed: tuple[str, ...] = ()
    loop_fails: bool = False

    def broken(self) -> list[str]:
        """The parts of the law that are broken, each with its figure."""
        found = []
        if self.other_error:
            found.append(f"raises {self.other_error}")
        if self.changed:
            found.append(f"changed {', '.join(self.changed)}")
        if self.refused or self.other_error:
            return found
        if self.loop_fails:
            found.append("accepted, where plain autograd on single images fails")
        if not self.moved <= 1.001:
            found.append(f"one image moves the sum by {self.moved:.4g} times the sensitivity")
        if not self.error <= 1e-4:
            found.append(f"the sum is off by {self.error:.2g}")
        if not self.norm_error <= 1e-3:
            found.append(f"a norm is off by {self.norm_error:.2g}")
        if not self.repeated:
            found.append("the same batch gave another sum")
        return found


def pictures(shape: Sequence[int], augmult: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight images, or eight of K views, of mixed scales, and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(len(SCALES), *([augmult] if augmult else []), *shape, generator=generator) * 2 - 1
    return images * torch.tensor(SCALES).view(-1, *[1] * (images.ndim - 1)), torch.tensor([1, 0, 3, 2, 4, 1, 2, 0])


def loop(entry: Entry, images: torch.Tensor, targets: torch.Tensor) -> list[Sums]:
    """Each image's gradient: plain autograd on one view at a time, on the model as its author wrote it, fresh for every view."""
    gradients = []
    for image, target in zip(images, targets, strict=True):
        views = image if images.ndim > 1 + len(entry.shape) else image[None]
        total: Sums = {}
        for view in views:
            model, loss_fn = entry.make()
            loss_fn(model(view[None].clone()), target[None]).sum().backward()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    total[name] = total.get(name, 0) + gradient.detach() / len(views)
        gradients.append(total)
    return gradients


def norm(sums: Sums) -> float:
    return torch.stack([value.double().square().sum() for value in sums.values()]).sum().sqrt().item()


def distance(one: Sums, other: Sums) -> float:
    assert one.keys() == other.keys()
    return norm({name: one[name].double() - other[name].double() for name in one})


def clipped_total(gradients: Sequence[Sums], clipping_norm: float) -> tuple[Sums, float]:
    """The sum of clipped gradients, over C, and the root of the sum of the squares of its terms' norms."""
    scales = [min(1 / clipping_norm, 1 / max(norm(gradient), 1e-300)) for gradient in gradients]
    total = {name: sum(scale * gradient[name].double() for scale, gradient in zip(scales, gradients, strict=True)) for name in gradients[0]}
    return total, sum((scale * norm(gradient)) ** 2 for scale, gradient in zip(scales, gradients, strict=True)) ** 0.5


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that must be as it was, bit for bit."""
    found: dict[str, Any] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, value in tensors:
        found[name] = _bits(value)
        found[f"{name}.grad"] = _bits(value.grad)
        found[f"{name}.requires_grad"] = value.requires_grad
        if isinstance(value, nn.Parameter):
            found[f"{name}.identity"] = id(value)  # optimizers hold it
    for name, value in model.state_dict().items():
        found[f"state_dict {name}"] = _bits(value)
    for name, module in model.named_modules():
        found[f"{name}.training"] = module.training
    return found


def _bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, UninitializedTensorMixin):
        return type(value).__name__
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "left over from torch.func"  # reading it would crash
    return (value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes())


def try_law(entry: Entry, engine: str, augmult: int) -> Outcome:
    """Runs a model through an engine, with odd and even numbers of examples, and holds the outcome against the loop over single images."""
    outcome = Outcome()
    images, targets = pictures(entry.shape, augmult)
    ids = 1000 + 17 * torch.arange(len(images))

    def given(rows: list[int]) -> dict[str, Any]:
        return {"key": KEY, "example_ids": ids[rows]} if entry.draws else {}

    try:
        gradients = [] if entry.draws else loop(entry, images, targets)
    except Exception:
        outcome.loop_fails = True
        gradients = []
    # Three in four gradients are clipped.
    clipping_norm = max(sorted(map(norm, gradients))[1], 1e-6) if gradients else 0.5
    try:
        if entry.draws:
            gradients = drawn_loop(entry, images, targets, ids, augmult, clipping_norm)
    except InputError as refusal:
        outcome.refused = str(refusal)
        return outcome
    model, loss_fn = entry.make()
    for parameter in model.parameters():
        if not isinstance(parameter, UninitializedTensorMixin):
            parameter.grad = torch.full_like(parameter, 7.0)
    before, random_state = state(model), torch.get_rng_state()
    try:
        # Microbatches of eight: nothing is filled up, so that the engine sees the numbers of rows that are given.
        grad_fn = clipped_grad(
            model,
            loss_fn,
            clipping_norm=clipping_norm,
            augmult=augmult,
            engine=engine,
            microbatch_size=8,
            methods={"memory_format": "contiguous"},
        )

        def of(rows: Sequence[int]) -> Any:
            rows = list(rows)
            return grad_fn(images[rows], targets[rows], **given(rows))

        seen = {rows: of(rows) for rows in (*BATCHES, BATCHES[1][::-1])}
        for rows, out in seen.items():
            for left_out in rows if len(rows) > 1 else ():
                rest = of([row for row in rows if row != left_out])
                outcome.moved = max(outcome.moved, distance(out.grad_sum, rest.grad_sum) / grad_fn.sensitivity)
            if gradients:
                _compare(outcome, out, [gradients[row] for row in rows], clipping_norm)
        again = of(BATCHES[0])
        first = seen[BATCHES[0]]
        same = all(torch.equal(value, again.grad_sum[name]) for name, value in first.grad_sum.items())
        outcome.repeated = same and torch.equal(first.grad_norms, again.grad_norms)
        outcome.engine = grad_fn.engine
    except InputError as refusal:
        outcome.refused = str(refusal)
    except Exception as error:
        outcome.other_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    after = state(model)
    outcome.changed = tuple(name for name in before | after if before.get(name) != after.get(name))
    if not torch.equal(random_state, torch.get_rng_state()):
        outcome.changed += ("the global random state",)
    return outcome


def _compare(outcome: Outcome, out: Any, gradients: list[Sums], clipping_norm: float) -> None:
    total, size = clipped_total(gradients, clipping_norm)
    if out.grad_sum.keys() != total.keys():
        outcome.error = float("inf")
        return
    outcome.error = max(outcome.error, distance(out.grad_sum, total) / max(size, 1e-6))
    for measured, gradient in zip(out.grad_norms.tolist(), gradients, strict=True):
        true = norm(gradient)
        outcome.norm_error = max(outcome.norm_error, abs(measured - true) / max(true, 1e-3 * clipping_norm))


def drawn_loop(
    entry: Entry, images: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor, augmult: int, clipping_norm: float, key: bytes = KEY
) -> list[Sums]:
    """Each image's gradient where random numbers are drawn: the engine "reference" alone with that image, on a fresh model, unclipped."""
    gradients = []
    for row in range(len(images)):
        model, loss_fn = entry.make()
        grad_fn = clipped_grad(model, loss_fn, clipping_norm=1e9, augmult=augmult, engine="reference", rescale_to_unit_norm=False)
        alone = [row]
        gradients.append(grad_fn(images[alone], targets[alone], key=key, example_ids=ids[alone]).grad_sum)
    return gradients
