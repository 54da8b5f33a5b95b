"""The one check of a model, its loss and an engine, before a private image is seen.

On made-up images in float64, at shifted parameters, the engine's sums and norms must be those of single images by plain
autograd on the user's own object, hooks and all, at several numbers, orders and places of rows; the same image must
give the same beside other images and after them; parameters and buffers must stay what they were. Then, once more in
the run's own precision, compilation and device, with a whole microbatch: each norm is that of the values that are
summed, which privacy rests on, and the sum is the one in float64.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sfumato.clipping.clip import convolutions
from sfumato.clipping.microbatch import count_saved
from sfumato.clipping.model_check import images_second, layer_findings
from sfumato.clipping.probe import made_up_images, made_up_targets, random_state_kept, temporary_values
from sfumato.clipping.protocol import Batch, Coefficient, Engine, Loss, example_losses, one_loss
from sfumato.clipping.random_layers import DrawShapes, KeyedDraws, draw_seeds, row_dims
from sfumato.errors import InputError, first_line, is_out_of_memory
from sfumato.models.trainable import ANY_NUMBER
from sfumato.torch_internals import tree_leaves, tree_map

_EXAMPLES = 3
# Of these, by number: one, two, three and four rows, in several orders and places.
_BATCHES = ((1,), (2, 0), (0, 2, 1), (1, 0, 2, 0))
# So many more are tried before a parameter is said to receive no gradient: of a mixture's experts one image
# reaches a few.
_MORE_IMAGES = 24
# How far an engine may lie from single images, relative to gradients of norm one, in float64 throughout or not.
_EXACT = {True: 1e-6, False: 1e-3}
# How far an image beside others may lie from itself alone, relative to the largest value.
_ALIKE = {True: 1e-7, False: 1e-2}
# How far the sum may lie from that in float64, relative to it. Rounding alone moves values across the kinks of ReLUs,
# a share p of them, and so gradients by about the root of p: WRN-16-4 by 1e-3 on some images, by 0.2 in bfloat16. One
# row of 128 that is wrong is more than the first.
_SUM = {"float32": 5e-3, "tf32": 0.1, "bf16": 0.3}
# Of a network that rounds more, how often that of plain autograd in the same precision, and what is refused anyway.
_PLAIN, _MOST = 1.5, 0.9
# How much longer the values that are summed may be than their norm.
_NORM = 1e-4
# Where rounding decides, a law is broken if it breaks with each of so many sets of images.
_TRIES = 3
# Shorter gradients than what may be clipped to at all count as none; of longer ones float32 holds no squares.
_SHORTEST, _LONGEST = 1e-12, 1e30
_REDRAWN = (
    "the model draws random numbers in its backward pass: a checkpointed part computes again "
    "what it drew before, with other numbers. Leave out the checkpointing, or the random "
    "numbers, in that part."
)


@dataclasses.dataclass(frozen=True)
class Expected:
    """What plain autograd on single made-up images gives.

    Attributes:
        seed: Of images and parameters.
        dtype: Of parameters and images: float64, or None: their own.
        exact: Whether all was computed in float64.
        batch: The examples.
        grads: One for each example: name of a trainable parameter -> gradient, in float32.
        norms, losses: (examples,).
        values_saved: Numbers that autograd keeps of one more row for the backward pass; those kept once, whatever the
            batch (standardised weights), are left out.
    """

    seed: int
    dtype: torch.dtype | None
    exact: bool
    batch: Batch
    grads: list[dict[str, torch.Tensor]]
    norms: torch.Tensor
    losses: torch.Tensor
    values_saved: int

    @property
    def usable(self) -> list[int]:
        """Examples with finite gradients."""
        return [i for i, norm in enumerate(self.norms.tolist()) if norm < _LONGEST and self.losses[i].isfinite()]

    def microbatch(self, size: int, views: int, row: torch.Tensor) -> Batch:
        """The usable examples again and again, in all places of a microbatch in the run's own precision."""
        usable = self.usable
        examples = torch.tensor([usable[i % len(usable)] for i in range(size)], device=row.device)
        places = torch.arange(views, device=row.device) % self.batch.weights.shape[1]
        weights = 1 / (places.bincount()[places] * self.batch.weights.shape[1])
        dtype = torch.float64 if row.dtype == torch.float64 else torch.float32
        batch = self.batch
        return dataclasses.replace(
            batch,
            inputs=batch.inputs[examples][:, places].to(row.dtype),
            targets=tuple(target[examples][:, places] for target in batch.targets),
            weights=weights.to(dtype).expand(size, views).contiguous(),
            is_real=batch.is_real.new_ones(size),
            seeds=None if batch.seeds is None else batch.seeds[examples][:, places],
        )


@dataclasses.dataclass(frozen=True)
class _Single:
    """One view alone: what plain autograd gives, what was drawn, and the parameters that no gradient came to."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor
    missing: set[str]
    shapes: list[tuple[int, ...]]
    exact: bool


class EngineCheck:
    """Holds a model, its loss and engines to plain autograd.

    Args:
        model: The user's own object, in the mode that it is used in.
        row: (1, ...): shape, type and device of an input; its values are not used.
        targets: (0, ...) each, likewise, of one view.
        views: K.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, targets: tuple[torch.Tensor, ...], views: int
    ) -> None:
        self.model, self.loss_fn, self.row, self.targets, self.all_views = model, loss_fn, row, targets, views
        self.views = min(views, 2)

    def expect(self, seed: int = 1, *, double: bool = True) -> Expected:
        """What gradients are, in float64 where the model runs there and that is not forbidden.

        Raises:
            InputError: If the model's rows are not computed one by one, or it keeps something of them.
        """
        for finding in layer_findings(self.model):
            raise InputError(str(finding))
        failure = "it gives no finite gradients"
        for only_pixels in (False, True):  # a model may have constants of another type, or ask for pixels
            for dtype in (torch.float64, None) if double else (None,):
                try:
                    found = self._expect(seed, dtype, only_pixels)
                except InputError:
                    raise
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    failure = first_line(error)
                    continue
                if len(found.usable) > 1:
                    return found
        where = f"the model or its loss fails on made-up images of shape {tuple(self.row.shape)}"
        raise InputError(f"{where}: {failure.rstrip('.')}. {ANY_NUMBER} So must loss_fn take one row.")

    def _expect(self, seed: int, dtype: torch.dtype | None, only_pixels: bool) -> Expected:
        row = self.row.to(dtype or self.row.dtype) if self.row.is_floating_point() else self.row
        images = made_up_images(_EXAMPLES, self.views, row, seed, only_pixels=only_pixels)
        seeds = draw_seeds(b"made up", torch.arange(_EXAMPLES, device=row.device), self.views)
        with random_state_kept(row), torch.enable_grad():
            with temporary_values(self.model, None, None), KeyedDraws(seeds[:1, :1]):
                before = _state(self.model)
                self.model(images[0, :1].to(self.row.dtype))  # tables that its code keeps get the type they will have
                self._refuse_changes(before)
            with temporary_values(self.model, dtype, seed):
                before = _state(self.model)
                with KeyedDraws(seeds[:1, :1]), count_saved() as saved:
                    outputs = self.model(images[0, :1])
                shapes = [tuple(leaf.shape) for leaf in _leaves(outputs)]
                if shapes and all(1 not in shape for shape in shapes):
                    raise InputError(f"for one image the model gives {shapes[0]}, and no row of it. {ANY_NUMBER}")
                targets = made_up_targets(_EXAMPLES, self.views, self.targets, outputs, seed)
                self._refuse_loss(outputs, targets)
                alone, grads = self._singles(images, targets, seeds)
                missing = set.intersection(*(single.missing for single in alone))
                for view in made_up_images(_MORE_IMAGES, 1, row, seed + 1, only_pixels=True) if missing else ():
                    missing &= self._single(view, targets, seeds[:1, :1], 0, {}).missing
                for name in sorted(missing):
                    raise InputError(
                        f"parameter '{name}' receives no gradient from the loss, so it would never be trained. "
                        "Freeze it by requires_grad_(False), or use it in the model's output."
                    )
                try:
                    draw_dims, saved_together = self._refuse_meeting(images, seeds, alone)
                except InputError as error:
                    raise InputError(f"{error}{images_second(self.model)}") from None
                again = self._single(images[0, :1], targets, seeds[:1, :1], 0, {})
                now, then = ([*single.outputs, single.loss] for single in (again, alone[0]))
                if max(map(_difference, now, then)) > 1e-2 * _ALIKE[alone[0].exact]:
                    raise InputError(
                        "the model or its loss gives the same image another result after other images: "
                        "it keeps something of them, which no noise covers. Make it a function of one image."
                    )
                self._refuse_changes(before)
        norms = torch.stack([_norm(mean.values()) for mean in grads])
        exact = dtype is not None and all(single.exact for single in alone)
        losses = torch.stack([single.loss for single in alone]).view(_EXAMPLES, self.views).mean(1)
        weights = images.new_full((_EXAMPLES, self.views), 1 / self.views, dtype=dtype or torch.float32)
        is_real = torch.ones(_EXAMPLES, dtype=torch.bool, device=row.device)
        batch = Batch(images, targets, weights, is_real, seeds if draw_dims else None, draw_dims)
        return Expected(
            seed, dtype, exact, batch, grads, norms, losses, max(1, (saved_together - saved[0]) // len(alone))
        )

    def refuse(self, engine: Engine, expected: Expected) -> None:
        """Raises InputError where an engine gives other sums, norms or losses than single images do."""
        for number in range(1 if expected.exact else _TRIES):
            if number:
                is_double = expected.dtype is not None
                expected = self.expect(expected.seed + 1, double=is_double)
            try:
                error = self._largest_error(engine, expected)
            except RuntimeError as failure:
                if expected.dtype is None or is_out_of_memory(failure):
                    raise
                # Types that are written into a graph met others.
                return self.refuse(engine, self.expect(expected.seed, double=False))
            if error <= _EXACT[expected.exact]:
                return None
        raise InputError(
            f"gives other gradients than plain autograd on single images, by {error:.2g} of their norm: a hook, a "
            "custom backward pass or a torch.no_grad region is lost, or rows depend on their place"
        )

    def refuse_in_run(
        self, engine: Engine, expected: Expected, coefficient: Coefficient, size: int, precision: str, compiles: bool
    ) -> None:
        """Raises InputError where an engine, as it will run, sums values that are longer than their norms, or whose sum
        is not that in float64.
        """
        for number in range(_TRIES):
            if number:
                expected = self.expect(expected.seed + 1)
            batch = expected.microbatch(size, self.all_views, self.row)
            usable, one = expected.usable, torch.zeros_like(batch.is_real)
            one[0] = True
            # A compiled graph is that of a whole microbatch.
            few = dataclasses.replace(batch, is_real=one).take(slice(size if compiles else 2))
            with self._values(expected, in_run=True), convolutions(precision):
                evaluated = engine.evaluate()
                out = engine.clipped_sum(coefficient, evaluated, batch)
                alone = engine.clipped_sum(coefficient, evaluated, few)
            factors = coefficient(out.grad_norms).double()
            of_each = [sum(factors[i :: len(usable)]) for i in range(len(usable))]
            true = _weighted_sum(expected.grads, of_each, usable)
            gap, norm = _norm(total - true[name] for name, total in out.grad_sum.items()), _norm(true.values())
            error = float((gap / norm.clamp(min=_SHORTEST)).nan_to_num(torch.inf))
            own = coefficient(alone.grad_norms[:1]).double() * alone.grad_norms[0]
            longer = float((_norm(alone.grad_sum.values()) / own.clamp(min=_SHORTEST) - 1).nan_to_num(torch.inf))
            is_low = not expected.exact or any(value.dtype.itemsize < 4 for value in self.model.parameters())
            if longer <= _NORM and error <= _SUM["bf16" if is_low else precision]:
                return
            if longer <= _NORM:  # a deep network of ReLUs rounds more: as much as plain autograd then
                plain = _weighted_sum(self._rounded(expected, precision), of_each, usable)
                rounded = _norm(plain[name] - total for name, total in true.items())
                if error <= min(_PLAIN * float(rounded / norm.clamp(min=_SHORTEST)), _MOST):
                    return
        what = f"the sum differs from that in float64 by {error:.2g} of it"
        if longer > _NORM:
            what = f"what is summed of one image is longer than its norm, by {longer:.2g} of it"
        raise InputError(f'rounds too much in precision "{precision}"{", compiled" if compiles else ""}: {what}')

    def _rounded(self, expected: Expected, precision: str) -> list[dict[str, torch.Tensor]]:
        """What plain autograd on single images gives in the run's own precision."""
        seeds = draw_seeds(b"made up", torch.arange(_EXAMPLES, device=self.row.device), self.views)
        low = torch.autocast(self.row.device.type, torch.bfloat16, enabled=precision == "bf16")
        with self._values(expected, in_run=True), torch.enable_grad(), convolutions(precision), low:
            return self._singles(expected.batch.inputs.to(self.row.dtype), expected.batch.targets, seeds)[1]

    def _singles(
        self, images: torch.Tensor, targets: tuple[torch.Tensor, ...], seeds: torch.Tensor
    ) -> tuple[list[_Single], list[dict[str, torch.Tensor]]]:
        """Every view of every example by itself, and each example's gradient."""
        alone, grads = [], []
        for i in range(_EXAMPLES):
            grads.append(dict[str, torch.Tensor]())
            for j in range(self.views):
                place = slice(j, j + 1)
                alone.append(self._single(images[i, place], targets, seeds[i : i + 1, place], i, grads[i]))
        return alone, grads

    @contextmanager
    def _values(self, expected: Expected, in_run: bool = False) -> Iterator[None]:
        """The model at the parameters that something is expected at; in its own precision where `in_run`."""
        dtype = None if in_run else expected.dtype
        with random_state_kept(self.row), temporary_values(self.model, dtype, expected.seed), torch.no_grad():
            yield

    def _largest_error(self, engine: Engine, expected: Expected) -> float:
        with self._values(expected):
            before = _state(self.model)
            evaluated = engine.evaluate()
            errors = [self._error(engine, evaluated, expected, list(batch)) for batch in _BATCHES]
            self._refuse_changes(before)
        return max(errors)

    def _error(self, engine: Engine, evaluated: Any, expected: Expected, examples: list[int]) -> float:
        """The largest difference between an engine and single images."""
        examples = [i for i in examples if i in expected.usable] or expected.usable[:1]
        norms, losses = expected.norms[examples], expected.losses[examples]
        batch = expected.batch.take(torch.tensor(examples, device=norms.device))
        # Every example counts alike, but those that a loss far from its kink leaves nothing but rounding of.
        floor = max(_SHORTEST, 1e-7 * float(expected.norms[expected.usable].max()))
        out = engine.clipped_sum(lambda norms: 1 / norms.clamp(min=floor), evaluated, batch)
        true = _weighted_sum(expected.grads, 1 / norms.clamp(min=floor), examples)
        gaps = (total.double() - true[name] for name, total in out.grad_sum.items())
        longer = (out.grad_norms.double() - norms) / norms.clamp(min=floor)
        if not expected.exact:  # a norm in float32 takes in what rounding may hide
            longer = torch.where(longer > 0, longer / 1000, longer)
        of_losses = (out.losses.double() - losses) / losses.abs().clamp(min=1)
        worst = [_norm(gaps) / len(examples), longer.abs().max(), of_losses.abs().max()]
        return float(torch.stack(worst).nan_to_num(torch.inf).max())

    def _single(
        self,
        view: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        seeds: torch.Tensor,
        example: int,
        mean: dict[str, torch.Tensor],
    ) -> _Single:
        """One view by plain autograd, as anybody would write it; adds its share to its example's ``mean`` gradient."""
        with KeyedDraws(seeds) as draws:
            outputs = self.model(view)
        kept = _leaves(outputs)
        loss = one_loss(self.loss_fn, outputs, [target[example : example + 1, 0] for target in targets])
        if loss.requires_grad:
            with KeyedDraws(None, refusal=_REDRAWN):
                loss.backward()
        missing = set()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    missing.add(name)
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                share = own.detach().float() / self.views  # eight digits are enough to compare
                mean[name] = mean[name].add_(share) if name in mean else share
            parameter.grad = None
        return _Single(kept, loss.detach().double(), missing, draws.shapes, not draws.narrow)

    def _refuse_loss(self, outputs: Any, targets: tuple[torch.Tensor, ...]) -> None:
        """Refuses a loss that is none of one row, or that torch.func.vmap does not take."""
        apart = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, outputs)
        if one_loss(self.loss_fn, apart, [target[:1, 0] for target in targets]).requires_grad:
            raise InputError(
                "loss_fn takes trainable parameters besides the model's output: their gradient "
                "would be lost. Use them in the model."
            )
        rows = tree_map(lambda leaf: leaf.detach().clone()[None] if isinstance(leaf, torch.Tensor) else leaf, outputs)
        weights = torch.ones(1, 1, device=self.row.device)
        try:
            example_losses(self.loss_fn, rows, tuple(target[:1, :1] for target in targets), weights)
        except RuntimeError as error:
            raise InputError(
                f"torch.func.vmap does not take loss_fn: {first_line(error)}. Write it with operations on tensors, of "
                "one row: no .item(), no `if` on values, no random numbers, no values kept."
            ) from error

    def _refuse_meeting(
        self, images: torch.Tensor, seeds: torch.Tensor, alone: list[_Single]
    ) -> tuple[tuple[int, ...], int]:
        """Compares rows side by side, the first one twice, with each row alone; returns which dimension of each draw
        counts rows, and how many numbers autograd keeps.
        """
        order = [*range(len(alone) - 1, -1, -1), 0]
        rows, seeds = images.flatten(0, 1)[order], seeds.reshape(-1, 1, 2)[order]
        shapes = alone[0].shapes
        dims: tuple[int, ...] = ()
        if any(single.shapes != shapes for single in alone):
            row_dims([()], [], 1)
        with torch.no_grad():
            if shapes:
                with DrawShapes() as draws:
                    self.model(rows)
                dims = row_dims(shapes, draws.shapes, len(rows))
        with KeyedDraws(seeds, dims), count_saved() as saved:
            together = _leaves(self.model(rows))
        for leaf, *own in zip(together, *(alone[i].outputs for i in order), strict=True):
            if not _rows_agree(leaf, own, _ALIKE[alone[0].exact]):
                raise InputError(
                    "the model gives an image in a batch other outputs than the image alone: its "
                    "rows depend on their place, their number or on each other, so per-example "
                    "gradients do not exist and no privacy guarantee holds. Make it an operation "
                    "on each image alone."
                )
        return dims, saved[0]

    def _refuse_changes(self, before: dict[str, str]) -> None:
        after = _state(self.model)
        name = next((name for name in before | after if before.get(name) != after.get(name)), None)
        if name is None:
            return
        path = name.rpartition(".")[0]
        modules = dict(self.model.named_modules())
        kind = type(modules.get(path, self.model)).__name__
        where = f"{kind} at '{path}'" if path else f"the model ({kind})"
        raise InputError(
            f"{where} changes '{name.rpartition('.')[2]}' during a forward pass, so statistics of private images would "
            "be kept without noise. Turn that off (for example track_running_stats=False), or set it before training."
        )


def _weighted_sum(grads: list[dict[str, torch.Tensor]], factors: Any, examples: list[int]) -> dict[str, torch.Tensor]:
    """Of these examples' gradients, each times its factor."""
    pairs = list(zip(factors, examples, strict=True))
    return {name: sum(factor * grads[i][name] for factor, i in pairs) for name in grads[0]}


def _norm(values: Any) -> torch.Tensor:
    return torch.stack([value.double().square().sum() for value in values]).sum().sqrt()


def _leaves(outputs: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _state(model: nn.Module) -> dict[str, str]:
    """What a model must not change, in a few figures for each parameter and buffer."""
    found = {f"{path}.training": str(module.training) for path, module in model.named_modules()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        values = values.double()
        found[name] = repr((tensor.shape, tensor.requires_grad, values.sum().item(), values.norm().item()))
    return found


def _rows_agree(together: torch.Tensor, alone: list[torch.Tensor], tolerance: float) -> bool:
    """Whether each row of a batch's output is that row's own output, or the same for whatever batch."""
    if together.shape == alone[0].shape:
        return all(_difference(together, own) <= tolerance for own in alone)
    grown = [dim for dim, (size, own) in enumerate(zip(together.shape, alone[0].shape, strict=False)) if size != own]
    return len(grown) == 1 and _difference(together, torch.cat(alone, grown[0])) <= tolerance


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if one.shape != other.shape:
        return float("inf")
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.double().nan_to_num(), other.double().nan_to_num()
    scale = one.abs().max().clamp(min=torch.finfo(torch.float32).tiny) if one.numel() else 1.0
    return float((one - other).abs().max() / scale) if one.numel() else 0.0
