"""The torch.func engine: vmap over examples of the gradient of one example's mean loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vjp, vmap

from sfumato.clipping.agreement import first_line
from sfumato.clipping.draws import KeyedDraws
from sfumato.clipping.errors_seen import ErrorsSeen, KernelErrorsSeen
from sfumato.clipping.loss import ExampleLosses
from sfumato.clipping.norms import at_least_float32, global_norms
from sfumato.clipping.outputs import tensors_of
from sfumato.clipping.protocol import Batch, ClippedGrad, Coefficient, Engine, Loss
from sfumato.clipping.speed import Speed
from sfumato.clipping.stand_in import model_kept
from sfumato.errors import InputError
from sfumato.torch_internals import tree_flatten, tree_unflatten

_TENSOR = object()  # stands for a tensor among what a model returns


class FuncEngine(Engine):
    """See `sfumato.clipping.protocol.Engine`."""

    def __init__(self, model: nn.Module, loss_fn: Loss, row: torch.Tensor, speed: Speed) -> None:
        self.model = model
        self.methods: dict[str, str] = {}
        self.losses = ExampleLosses(loss_fn)

    def clipped_sum(self, coefficient: Coefficient, batch: Batch) -> ClippedGrad:
        """See `sfumato.clipping.protocol.Engine`.

        The model runs twice: for its outputs, and for what their gradients mean to its parameters.
        Between the two the loss is applied, which nothing of `torch.func` touches.
        """
        parameters = {
            name: parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }

        def outputs_of(parameters: dict[str, torch.Tensor], views: torch.Tensor) -> Any:
            return functional_call(self.model, parameters, (views,))  # K rows, all of one example

        def weighted(
            parameters: dict[str, torch.Tensor], views: torch.Tensor, weights: list[torch.Tensor]
        ) -> torch.Tensor:
            outputs = [output for output in tensors_of(outputs_of(parameters, views)) if output.is_floating_point()]
            return torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum()

        found: list[Any] = []  # what the model returns, but for tensors

        def tensors(parameters: dict[str, torch.Tensor], views: torch.Tensor) -> list[torch.Tensor]:
            leaves, structure = tree_flatten(outputs_of(parameters, views))
            found[:] = [[_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure]
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def forward(parameters: dict[str, torch.Tensor], views: torch.Tensor) -> list[torch.Tensor]:
            # As where it is differentiated: vmap has no rule for some operations (an LSTM) otherwise.
            def with_outputs(parameters: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
                outputs = tensors(parameters, views)
                return torch.stack([output.sum() for output in outputs if output.is_floating_point()]), outputs

            _, _, outputs = vjp(with_outputs, parameters, has_aux=True)  # type: ignore[misc]
            return outputs

        outputs = iter(self._run(batch, forward, (None, 0), parameters, batch.inputs))
        leaves, structure = found
        whole = tree_unflatten([next(outputs) if leaf is _TENSOR else leaf for leaf in leaves], structure)
        losses, of_outputs = self.losses(whole, batch.targets, batch.inputs.shape[1])
        weights = [weight for weight in of_outputs if weight is not None]
        gradients = self._run(batch, grad(weighted), (None, 0, 0), parameters, batch.inputs, weights)
        # The norm is taken of exactly the values that are summed, after the conversion to float32.
        rows = {name: at_least_float32(gradient.reshape(len(batch.inputs), -1)) for name, gradient in gradients.items()}
        norms = global_norms(rows.values())
        counts = batch.is_real & norms.isfinite() & losses.isfinite()
        coefficients = torch.where(counts, coefficient(norms), 0.0)
        if not norms.isfinite().all():  # a coefficient of zero does not silence it: 0 * NaN is NaN
            rows = {name: torch.where(counts[:, None], row, 0.0) for name, row in rows.items()}
        sums = {name: (coefficients.to(row.dtype) @ row).view(parameters[name].shape) for name, row in rows.items()}
        return ClippedGrad(sums, norms, losses)

    def _run(self, batch: Batch, function: Callable[..., Any], in_dims: tuple[int | None, ...], *given: Any) -> Any:
        """The function of each example, side by side.

        Raises:
            InputError: If the model's own code handled an error that an operation raised: one image's
                would have sent all others the same way.
        """
        per_example = vmap(function, in_dims=in_dims, randomness="different")
        draws = KeyedDraws(batch.seeds, self.draw_dims, grouped=True)
        with draws, model_kept(self.model), KernelErrorsSeen() as backward, ErrorsSeen() as forward:
            out = per_example(*given)
        error = forward.error or backward.error
        if error is not None:
            raise InputError(
                f"the model's code handles an error ({first_line(error)}). torch.func shows it many images at "
                "once, so that one image's error would be all others' too. Use engine=\"reference\""
            )
        return out
