"""The law that every engine is held to before it sees a private image.

On made-up images, whatever their number, order and scale: an engine's sum and norms are those of
a loop over single images by plain autograd on the model as the user wrote it; the same image gives
the same whatever passed before it, and whatever lies beside it; the model's parameters and buffers
are what they were.

The loop runs on the user's own object, hooks and all, with shifted parameters and in double
precision (`stand_in`): there, rounding that crosses the kink of a ReLU does not pass for a wrong
gradient. Random numbers inside the model are drawn by row (`draws`), so that the law covers them as
well.

What this cannot see: what depends on values or a number of calls that were not tried, and random
numbers of Python's or NumPy's that do not show in a result.
"""

import contextlib
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sfumato.clipping.agreement import difference, first_line, leaves, norm_of, rows_agree
from sfumato.clipping.checks import complex_findings, findings, random_state_kept
from sfumato.clipping.draws import DrawShapes, KeyedDraws, draw_seeds, row_dims
from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.made_up import made_up_images, made_up_targets
from sfumato.clipping.microbatch import count_saved
from sfumato.clipping.protocol import Batch, Loss, is_out_of_memory
from sfumato.clipping.stand_in import Place, Snapshot, has_accumulator_hooks, stand_in
from sfumato.errors import InputError
from sfumato.torch_internals import tree_leaves, tree_map, version

# Of four made-up examples, by number: alone, two in another order, an odd number of them.
BATCHES = ((1,), (2, 0), (3, 1, 0))
_SEED = 1
# What outputs may hold besides tensors.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
# Longer ones say nothing: float32 does not hold their squares.
_LONGEST = 1e30
# How far a row of a batch may lie from that row alone, and a second time from the first, relative
# to the largest value.
_ROWS = {True: 1e-7, False: 1e-2}
_AGAIN = {True: 1e-9, False: 1e-4}
# So many more are tried before a parameter is said to receive no gradient.
_MORE_IMAGES = 32
_REDRAWN = (
    "the model draws random numbers in its backward pass: a checkpointed part computes again "
    "what it drew before, with other numbers. Leave out the checkpointing, or the random "
    "numbers, in that part."
)


class BrokenLaw(InputError):
    """The model, or its loss, is not a function of one image at a time; the message says where."""


class _NothingFinite(BrokenLaw):
    """Too few made-up images gave finite gradients for anything to be checked."""


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the loop over single made-up images found.

    Attributes:
        double: Whether parameters and images were in double precision.
        exact: Whether all that the model computed of them was.
        images: (examples, views, ...).
        targets: Each (examples, ...).
        seeds: (examples, views, 2), of the random numbers inside the model.
        grads: One for each example: name of a trainable parameter -> mean gradient of its views.
        norms: (examples,) of these.
        losses: (examples,).
        draw_dims: For each draw inside the model, the dimension that counts rows.
        values_saved: Numbers that autograd keeps of one row for the backward pass.
    """

    double: bool
    exact: bool
    seed: int
    shifted: bool
    images: torch.Tensor
    targets: tuple[torch.Tensor, ...]
    seeds: torch.Tensor
    grads: list[dict[str, torch.Tensor]]
    norms: torch.Tensor
    losses: torch.Tensor
    draw_dims: tuple[int, ...]
    values_saved: int


@dataclasses.dataclass(frozen=True)
class _Single:
    """One view alone: outputs, loss, gradients and what was drawn."""

    outputs: list[torch.Tensor]
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    shapes: list[tuple[int, ...]]
    narrow: bool
    missing: frozenset[str]  # parameters that no gradient came to


class Law:
    """Holds a model, its loss and engines to the law.

    Args:
        model: The user's own object, in the mode that it is used in.
        row: (1, ...): shape, type and device of an input; its values are not used.
        targets: (0, ...) each, likewise.
        views: K of the made-up examples.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, targets: tuple[torch.Tensor, ...], views: int
    ) -> None:
        self.model, self.loss_fn, self.row, self.targets, self.all_views = model, loss_fn, row, targets, views
        # Odd where all batches have an odd number of views, so that numbers of rows of both kinds
        # are tried.
        self.views = views if views <= 2 else 2 + views % 2
        self._pixels = False

    def examine(self) -> Truth:
        """Refuses a model whose rows are not computed one by one, or that keeps something of them.

        Returns:
            What its gradients are, in double precision where the model runs there.

        Raises:
            BrokenLaw: Naming the module.
        """
        refuse_lazy(self.model)
        refused = complex_findings(self.model)
        if refused:
            raise BrokenLaw(str(refused[0]))
        self._refuse_types()
        self._call_once()
        doubles = (False,) if has_accumulator_hooks(self.model) else (True, False)
        failure: Exception | None = None
        for self._pixels, double in ((pixels, double) for pixels in (False, True) for double in doubles):
            try:
                return self.truth(double, _SEED)
            except _NothingFinite as nothing:
                failure = nothing
            except InputError:
                raise
            except Exception as error:  # the model has constants of another type, asks for pixels, or is wrong
                if is_out_of_memory(error):
                    raise
                failure = failure or error
        assert failure is not None
        if isinstance(failure, InputError):
            raise failure
        self._name_the_module()
        on = f"on made-up images of shape {tuple(self.row.shape)}"
        raise BrokenLaw(f"the model or its loss fails {on}: {first_line(failure)}. Correct it.") from failure

    def _call_once(self) -> None:
        """In the model's own precision first: tables that its code or the loss keeps get the type
        that they will have.

        A model or a loss that fails will fail again below, where its error is told.
        """
        first, again = None, None
        image = made_up_images(1, 1, self.row, _SEED, only_pixels=True)[0]
        with (
            random_state_kept(self.row),
            stand_in(self.model, None, None),
            torch.no_grad(),
            contextlib.suppress(Exception),
        ):
            outputs = self.model(image)
            targets = made_up_targets(1, self.targets, outputs, _SEED)
            first, again = self._loss(outputs, targets), self._loss(outputs, targets)
        if first is not None and again is not None:
            self.refuse_memory([first], [again], False)

    def _refuse_types(self) -> None:
        """Refuses images of a type that the model does not take: in double precision it would not
        show.
        """
        dtypes = [value.dtype for value in self.model.parameters() if value.is_floating_point()]
        if not self.row.is_floating_point() or not dtypes or self.row.dtype in dtypes:
            return
        try:
            with random_state_kept(self.row), stand_in(self.model, None, None):
                self.model(made_up_images(1, 1, self.row, _SEED, only_pixels=True)[0])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BrokenLaw(
                f"the inputs are {self.row.dtype}, the model's parameters {dtypes[0]}, and "
                f"PyTorch does not take them together ({first_line(error)}). Convert the inputs "
                f"by inputs.to({dtypes[0]})."
            ) from error

    def truth(self, double: bool, seed: int, *, shifted: bool = True) -> Truth:
        """The loop over single made-up images, and everything that does not depend on an engine."""
        dtype = torch.float64 if double else None
        examples, views = 1 + max(map(max, BATCHES)), self.views
        row = self.row.to(dtype) if double and self.row.is_floating_point() else self.row
        images = made_up_images(examples, views, row, seed, only_pixels=self._pixels)
        seeds = draw_seeds(b"made up", torch.arange(examples, device=row.device), views)
        with random_state_kept(row), stand_in(self.model, dtype, seed if shifted else None), torch.enable_grad():
            before, random_state = Snapshot.of(self.model), torch.get_rng_state()
            targets, outputs_at_first, loss_at_first, values_saved = self._first_call(
                images[0, :1], seeds[:1, :1], seed
            )
            alone: list[_Single] = []
            grads: list[dict[str, torch.Tensor]] = []
            of_examples: list[tuple[torch.Tensor, torch.Tensor]] = []
            for i in range(examples):
                own = tuple(target[i : i + 1] for target in targets)
                seen = [self._single(images[i, j : j + 1], own, seeds[i : i + 1, j : j + 1]) for j in range(views)]
                if i == 0:
                    first = seen[0]
                mean = {name: torch.stack([view.grads[name] for view in seen]).mean(0) for name in seen[0].grads}
                of_examples.append((norm_of(mean.values()), torch.stack([view.loss for view in seen]).mean()))
                grads.append(
                    {name: value.float() for name, value in mean.items()}
                )  # eight digits are enough to compare with
                alone += [dataclasses.replace(view, grads={}) for view in seen]
            self._refuse_missing(alone, images, targets, seed)
            self._refuse_changes(before)
            draw_dims = self._refuse_mixing(images, targets, seeds, alone, double)
            again = self._single(images[0, :1], tuple(target[:1] for target in targets), seeds[:1, :1])
            self.refuse_memory([*outputs_at_first, loss_at_first], [*first.outputs, first.loss], double)
            # Gradients as one: what cancels in one parameter, such as a bias before a norm of one
            # channel, is rounding alone, and some devices add up in another order each time.
            one, other = (
                [*view.outputs, view.loss, torch.cat([grad.flatten() for grad in view.grads.values()])]
                for view in (first, again)
            )
            self.refuse_memory(one, other, double)
            if not torch.equal(random_state, torch.get_rng_state()):
                raise BrokenLaw(
                    "the model or its loss sets PyTorch's random state, which undoes what others "
                    "draw. Leave that to their caller."
                )
            self._refuse_changes(before)
        norms, losses = (torch.stack(values) for values in zip(*of_examples, strict=True))
        norms = torch.where(norms < _LONGEST, norms, torch.inf)
        if int(norms.isfinite().sum()) < len(norms) - 1:
            raise _NothingFinite(
                "the model gives no finite gradients on made-up images, so that nothing can be "
                "checked. Correct the model or its loss."
            )
        exact = double and not any(view.narrow for view in alone)
        return Truth(
            double, exact, seed, shifted, images, targets, seeds, grads, norms, losses, draw_dims, values_saved
        )

    def batch(self, count: int, truth: Truth, seed: int = 0) -> Batch:
        """So many made-up examples as a real microbatch holds them, K views each."""
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(count, self.all_views, *self.row.shape[1:], generator=generator).to(self.row)
        repeated = torch.arange(count, device=self.row.device) % len(truth.grads)
        is_real = torch.ones(count, dtype=torch.bool, device=self.row.device)
        seeds = draw_seeds(b"made up", torch.arange(count, device=self.row.device), self.all_views)
        return Batch(
            images, tuple(target[repeated] for target in truth.targets), is_real, seeds if truth.draw_dims else None
        )

    def kind_of_calls(self, truth: Truth) -> Batch:
        """Made-up examples of the kind that calls will have: two, with K views each."""
        images = made_up_images(2, self.all_views, self.row, truth.seed, only_pixels=self._pixels)
        is_real = torch.ones(2, dtype=torch.bool, device=self.row.device)
        seeds = draw_seeds(b"made up", torch.arange(2, device=self.row.device), self.all_views)
        return Batch(images, tuple(target[:2] for target in truth.targets), is_real, seeds if truth.draw_dims else None)

    def _first_call(
        self, view: torch.Tensor, seeds: torch.Tensor, seed: int
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], torch.Tensor, int]:
        """Targets that the loss takes, what model and loss first gave, and how much autograd keeps
        of one row.
        """
        with count_saved() as values_saved, KeyedDraws(seeds):
            outputs = self.model(view)
        _refuse_opaque(outputs)
        apart = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, outputs)
        examples = 1 + max(map(max, BATCHES))
        targets = made_up_targets(examples, self.targets, apart, seed)
        # Of whole numbers some losses take others than class numbers.
        choices = [
            targets,
            tuple(torch.ones_like(target) for target in targets),
            tuple(torch.zeros_like(target) for target in targets),
        ]
        while True:
            targets = choices.pop(0)
            try:
                of_itself = self._loss(apart, tuple(target[:1] for target in targets))
                break
            except InputError:
                raise
            except Exception:  # they have a meaning of their own
                if not choices:
                    raise
        ExampleLosses(self.loss_fn).require(
            tree_map(lambda leaf: leaf[None] if isinstance(leaf, torch.Tensor) else leaf, apart),
            tuple(target[:1] for target in targets),
            1,
        )
        if of_itself.requires_grad:
            raise BrokenLaw(
                "loss_fn takes trainable parameters besides the model's output: their gradient "
                "would be lost. Use them in the model."
            )
        return targets, leaves(apart), of_itself.detach().double().sum(), values_saved[0]

    def _loss(self, outputs: Any, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with KeyedDraws(
            None,
            refusal="loss_fn draws random numbers, which are no image's own. Draw them in the model, or leave them "
            "out.",
        ):
            given = _copied(outputs)
            own = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            before = [version(leaf) for leaf in own]
            rows = self.loss_fn(given, *_copied(targets))
        if before != [version(leaf) for leaf in own] and _share_memory(outputs):
            raise BrokenLaw(
                "loss_fn writes to an output of the model that shares its memory with another, so that the other "
                "would change too. Give it a copy: output.clone()."
            )
        if not isinstance(rows, torch.Tensor) or rows.shape != (1,):
            shape = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise BrokenLaw(
                f'loss_fn gave shape {shape} for one row, not (1,): one loss per row is needed. Use reduction="none", '
                "for example."
            )
        return rows

    def _single(self, view: torch.Tensor, targets: tuple[torch.Tensor, ...], seeds: torch.Tensor) -> _Single:
        """One view by plain autograd, as anybody would write it."""
        with KeyedDraws(seeds) as draws:
            outputs = self.model(view)
        loss = self._loss(outputs, targets).sum()
        if loss.requires_grad:
            with KeyedDraws(None, refusal=_REDRAWN):
                loss.backward()
        grads, missing = {}, set()
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    missing.add(name)
                grads[name] = (
                    torch.zeros_like(parameter, dtype=torch.float64)
                    if parameter.grad is None
                    else parameter.grad.detach().double()
                )
            parameter.grad = None
        return _Single(leaves(outputs), loss.detach().double(), grads, draws.shapes, draws.narrow, frozenset(missing))

    def _refuse_missing(
        self,
        alone: list[_Single],
        images: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        seed: int,
    ) -> None:
        """Refuses a parameter to which no image sends a gradient. Of a mixture's experts one image
        reaches a few.
        """
        missing = frozenset.intersection(*(view.missing for view in alone))
        if not missing:
            return
        more = made_up_images(_MORE_IMAGES, 1, images[0, :1], seed + 1, only_pixels=self._pixels)
        seeds = draw_seeds(b"made up", torch.arange(len(more), device=images.device), 1)
        for i, view in enumerate(more):
            number = i % len(images)
            own = tuple(target[number : number + 1] for target in targets)
            missing &= self._single(view, own, seeds[i : i + 1]).missing
            if not missing:
                return
        name = next(name for name, _ in self.model.named_parameters() if name in missing)
        raise BrokenLaw(
            f"parameter '{name}' receives no gradient from the loss, so it would never be trained. "
            "Freeze it by requires_grad_(False), or use it in the model's output."
        )

    def _refuse_mixing(
        self,
        images: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        seeds: torch.Tensor,
        alone: list[_Single],
        double: bool,
    ) -> tuple[int, ...]:
        """Compares all rows at once with each row alone; returns which dimension of each draw
        counts rows.
        """
        # As many as one image has views, at least: `torch.func` shows a model that many at once.
        order = [i % len(alone) for i in range(max(len(alone), self.all_views))]
        rows, alone, seeds = images.flatten(0, 1)[order], [alone[i] for i in order], seeds.reshape(-1, 1, 2)[order]
        shapes = alone[0].shapes
        if any(view.shapes != shapes for view in alone):
            row_dims([()], [], 1)
        dims: tuple[int, ...] = ()
        if shapes:
            with DrawShapes() as draws:
                self.model(rows)
            dims = row_dims(shapes, draws.shapes, len(rows))
        with KeyedDraws(seeds, dims):
            together = self.model(rows)
        for number, leaf in enumerate(leaves(together)):
            if not rows_agree(leaf, [view.outputs[number] for view in alone], _ROWS[double]):
                self._name_the_module()
                raise BrokenLaw(
                    "the model gives an image in a batch other outputs than the image alone: its "
                    "rows depend on their place, their number or on each other, so per-example "
                    "gradients do not exist and no privacy guarantee holds. Make it an operation "
                    "on each image alone."
                )
        repeated = [target.repeat_interleave(images.shape[1], 0) for target in targets]
        # On as many rows as one image has views, too: so many an engine shows it at once.
        few = order[: self.all_views]
        with torch.no_grad():
            of_few = self.model(rows[: len(few)]) if not shapes else None
        losses = self.loss_fn(_copied(together), *(target[order] for target in repeated)).detach()
        losses_of_few = losses[: len(few)]
        if of_few is not None and all(
            rows_agree(leaf, [view.outputs[number] for view in alone[: len(few)]], _ROWS[double])
            for number, leaf in enumerate(leaves(of_few))  # else the model remembers, which is told below
        ):
            losses_of_few = self.loss_fn(_copied(of_few), *(target[few] for target in repeated)).detach()
        if not (
            rows_agree(losses, [view.loss[None] for view in alone], _ROWS[double])
            and rows_agree(losses_of_few, [view.loss[None] for view in alone[: len(few)]], _ROWS[double])
        ):
            raise BrokenLaw(
                "loss_fn gives a row another loss beside other rows than alone: it compares "
                "rows, counts them or keeps something of them. Make it a function of each row "
                "alone."
            )
        return dims

    def refuse_memory(self, first: Sequence[torch.Tensor], again: Sequence[torch.Tensor], double: bool) -> None:
        """Compares what one and the same image gave at two times."""
        if any(difference(one, other) > _AGAIN[double] for one, other in zip(first, again, strict=True)):
            raise BrokenLaw(
                "the model or its loss gives the same image another result after other images: "
                "it keeps something of them, in an attribute, a variable or a generator of its "
                "own, which no noise covers. Make it a function of one image."
            )

    def _refuse_changes(self, before: Snapshot) -> None:
        place: Place | None = before.changed(self.model)
        if place is None:
            return
        self._name_the_module()
        path, name = place
        module = dict(self.model.named_modules()).get(path, self.model)
        where = f"{type(module).__name__} at '{path}'" if path else f"the model ({type(module).__name__})"
        if name == "training":
            raise BrokenLaw(
                f"{where} changes its mode during a forward pass, so that images would be "
                "computed differently. Set it before training."
            )
        what = "buffer" if name in module._buffers else "parameter" if name in module._parameters else "state"
        raise BrokenLaw(
            f"{where} changes its {what} '{name}' during a forward pass, so statistics of private "
            "images would be kept without noise. Turn that off (for example "
            "track_running_stats=False), or set it from public images before training."
        )

    def _name_the_module(self) -> None:
        """Raises what the closer look at the model finds, if it finds anything: it knows names and
        remedies.
        """
        dtype = next((value.dtype for value in self.model.parameters() if value.is_floating_point()), self.row.dtype)
        row = self.row.to(dtype) if self.row.is_floating_point() else self.row
        try:
            with random_state_kept(row):
                found = findings(self.model, row)
        except Exception:  # a model that cannot be copied, or that fails
            return
        if found:
            raise BrokenLaw(str(found[0]))


def _copied(values: Any) -> Any:
    """For a loss, which may write to what it is given."""
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, values)


def _share_memory(outputs: Any) -> bool:
    """Whether two of the tensors that a model returned lie in one place."""
    places = [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return len(set(places)) < len(places)


def refuse_lazy(model: nn.Module) -> None:
    """Refuses a model whose parameters do not have shapes yet."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise BrokenLaw(
                f"parameter '{name}' gets its shape from the first images. Call the model once on made-up ones before."
            )


def _refuse_opaque(outputs: Any) -> None:
    """What PyTorch cannot look into may hold tensors that nobody would compare, nor detach."""
    for leaf in tree_leaves(outputs):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise BrokenLaw(
                f"the model returns {type(leaf).__name__}, in which PyTorch finds no tensors, so "
                "nothing of it could be checked. Return a tensor, a tuple, a list or a "
                "dictionary, or make the class known by torch.utils._pytree.register_dataclass "
                "or register_pytree_node."
            )
