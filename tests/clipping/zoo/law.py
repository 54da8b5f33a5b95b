"""The law that every model keeps or is refused for, and the truth that it is compared with."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from sfumato.clipping import clipped_grad
from sfumato.errors import InputError
from tests.clipping.problems import FIXED, clipped, cross_entropy, distance, norm
from tests.clipping.zoo import functions, harmless, hooks, mixing, random_layers, state
from tests.clipping.zoo.entry import SHAPE, Entry

ENTRIES = [entry for kind in (mixing, state, hooks, functions, random_layers, harmless) for entry in kind.ENTRIES]
BY_NAME = {entry.name: entry for entry in ENTRIES}

KEY = hashlib.sha256(b"a step").digest()
# Largest pixel of each image: ordinary ones, and extremes of what a file can hold.
SCALES = (1.0, 0.3, 20.0, 300.0, 1e-3, 1.0, 60.0, 3.0)
# Which images the batches hold that are tried, in this order: odd and even numbers.
BATCHES = ((0, 1, 2, 3, 4), (7, 6, 5, 4, 3, 2, 1, 0), (3, 0), (2,))
QUICK = ((3, 0, 4, 2, 1), (0, 6))
AFTER_A_STEP = (6, 2, 5, 4, 0)
IDS = 1000 + 17 * torch.arange(len(SCALES))

Sums = dict[str, torch.Tensor]
# (image, whether after a step) -> its gradient.
Truth = dict[tuple[int, bool], Sums]


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
        changed: Names of what was not as before, of the model or the global random state.
        loop_fails: Whether plain autograd on single images fails.
    """

    engine: str = ""
    refused: str = ""
    other_error: str = ""
    moved: float = 0.0
    error: float = 0.0
    norm_error: float = 0.0
    changed: tuple[str, ...] = ()
    loop_fails: bool = False

    def broken(self) -> list[str]:
        """The parts of the law that are broken, each with its figure."""
        ran = not (self.refused or self.other_error)
        found = {
            f"raises {self.other_error}": self.other_error,
            f"changed {', '.join(self.changed)}": self.changed,
            "accepted, where plain autograd on single images fails": ran and self.loop_fails,
            f"one image moves the sum by {self.moved:.4g} times the sensitivity": ran and not self.moved <= 1.001,
            f"the sum is off by {self.error:.2g}": ran and not self.error <= 1e-4,
            # The engine adds to a norm what roundings could have hidden.
            f"a norm is off by {self.norm_error:.2g}": ran and not self.norm_error <= 1e-3,
        }
        return [what for what, is_broken in found.items() if is_broken]


def pictures(augmult: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight images, or eight of K views, of mixed scales, and labels."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(len(SCALES), *([augmult] if augmult else []), *SHAPE, generator=generator) * 2 - 1
    return images * torch.tensor(SCALES).view(-1, *[1] * (images.ndim - 1)), torch.tensor([1, 0, 3, 2, 4, 1, 2, 0])


def take_a_step(model: nn.Module) -> None:
    """Moves the trainable parameters, the same way for every copy of a model: zeros hide what lies before them."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, UninitializedTensorMixin):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def loop(entry: Entry, views: torch.Tensor, target: torch.Tensor, stepped: bool) -> Sums:
    """An image's gradient: plain autograd on the model as its author wrote it, fresh for every view.

    Args:
        views: (K, ...): each alone in a pass.
        stepped: Whether the parameters are those after `take_a_step`.
    """
    total: Sums = {}
    for view in views.split(1):
        model = entry.make()
        if stepped:
            take_a_step(model)
        cross_entropy(model(view.clone()), target).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total[name] = total.get(name, 0) + gradient.detach() / len(views)
    return total


def drawn_loop(entry: Entry, images: torch.Tensor, targets: torch.Tensor) -> Truth:
    """The same where random numbers are drawn: the engine "reference" on a model of its own, one image at a time."""
    model, augmult = entry.make(), images.shape[1] if images.ndim > 1 + len(SHAPE) else 0
    unclipped = {"clipping_norm": 1e9, "rescale_to_unit_norm": False}
    grad_fn = clipped_grad(model, cross_entropy, augmult=augmult, engine="reference", **unclipped)

    def of(row: int) -> Sums:
        return grad_fn(images[[row]], targets[[row]], key=KEY, example_ids=IDS[[row]]).grad_sum

    gradients = {(row, False): of(row) for row in BATCHES[1]}
    take_a_step(model)
    return gradients | {(row, True): of(row) for row in AFTER_A_STEP}


def state(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that must be as it was, bit for bit."""
    found: dict[str, Any] = {}
    for name, value in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        found[name] = _bits(value)
        found[f"{name}.grad"] = _bits(value.grad)
        found[f"{name}.requires_grad"] = value.requires_grad
        if isinstance(value, nn.Parameter):
            found[f"{name}, its identity"] = id(value)  # optimizers hold it
    for name, value in model.state_dict().items():
        found[f"{name} in state_dict"] = _bits(value)
    for name, module in model.named_modules():
        found[f"{name}.training"] = module.training
    return found


def _bits(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, UninitializedTensorMixin):
        return type(value).__name__
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "left over from torch.func"  # reading it would crash
    return (value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes())


@functools.cache
def _truth(entry: Entry, augmult: int) -> Truth:
    """What is right."""
    images, targets = pictures(augmult)
    if entry.draws:
        return drawn_loop(entry, images, targets)
    wanted = [(row, False) for row in BATCHES[1]] + [(row, True) for row in AFTER_A_STEP]
    views = images if augmult else images[:, None]
    return {(row, stepped): loop(entry, views[row], targets[row : row + 1], stepped) for row, stepped in wanted}


def try_law(
    entry: Entry,
    engine: str,
    augmult: int,
    microbatch_size: int = 8,
    compile: bool = False,
    batches: Sequence[Sequence[int]] = BATCHES,
) -> Outcome:
    """Holds what an engine makes of a model, with odd and even numbers of examples, against single images."""
    outcome = Outcome()
    images, targets = pictures(augmult)
    random_state = torch.get_rng_state()
    try:
        truth: Truth | None = _truth(entry, augmult)
    except Exception as error:
        truth, outcome.loop_fails = None, not (entry.draws and isinstance(error, InputError))
    torch.set_rng_state(random_state)
    # Most gradients are clipped.
    clipping_norm = max(sorted(norm(truth[row, False]) for row in BATCHES[1])[1], 1e-6) if truth else 0.5
    model = entry.make()
    for parameter in model.parameters():
        if not isinstance(parameter, UninitializedTensorMixin):
            parameter.grad = torch.full_like(parameter, 7.0)
    before = state(model)

    def of(rows: Sequence[int]) -> Any:
        given = {"key": KEY, "example_ids": IDS[list(rows)]} if entry.draws else {}
        return grad_fn(images[list(rows)], targets[list(rows)], **given)

    try:
        grad_fn = clipped_grad(
            model,
            cross_entropy,
            clipping_norm=clipping_norm,
            augmult=augmult,
            engine=engine,
            microbatch_size=microbatch_size,
            methods=FIXED,
            compile=compile,
        )
        seen = {tuple(rows): of(rows) for rows in batches}
        for rows, out in seen.items():
            rest = of(rows[:1] + rows[2:]) if len(rows) > 1 else out
            outcome.moved = max(outcome.moved, distance(out.grad_sum, rest.grad_sum) / grad_fn.sensitivity)
        outcome.changed = changed(before, model, random_state)
        take_a_step(model)
        before = state(model)
        results = [(rows, False, out) for rows, out in seen.items()] + [(AFTER_A_STEP, True, of(AFTER_A_STEP))]
        if truth:
            outcome.error, outcome.norm_error = _errors(truth, results, clipping_norm)
        outcome.engine = grad_fn.engine
    except InputError as refusal:
        outcome.refused = str(refusal)
    except Exception as error:
        outcome.other_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    outcome.changed = tuple(dict.fromkeys(outcome.changed + changed(before, model, random_state)))
    return outcome


def changed(before: dict[str, Any], model: nn.Module, random_state: torch.Tensor) -> tuple[str, ...]:
    """Names of what is no longer as it was."""
    after = state(model)
    names = tuple(name for name in before | after if before.get(name) != after.get(name))
    return names if torch.equal(random_state, torch.get_rng_state()) else (*names, "the global random state")


def _errors(truth: Truth, results: Sequence[tuple[Sequence[int], bool, Any]], clipping_norm: float) -> list[float]:
    """The largest error of a sum, and of a norm, over (images, whether after a step, what came out)."""
    error = norm_error = 0.0
    for rows, stepped, out in results:
        gradients = [{name: value.double() for name, value in truth[row, stepped].items()} for row in rows]
        total = clipped(gradients, clipping_norm)
        size = sum(min(1, norm(gradient) / clipping_norm) ** 2 for gradient in gradients) ** 0.5
        if out.grad_sum.keys() != total.keys():
            return [float("inf"), float("inf")]
        error = max(error, distance(out.grad_sum, total) / max(size, 1e-6))
        for measured, gradient in zip(out.grad_norms.tolist(), gradients, strict=True):
            true = norm(gradient)
            norm_error = max(norm_error, abs(measured - true) / max(true, 1e-3 * clipping_norm))
    return [error, norm_error]
