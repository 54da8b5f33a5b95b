"""Engine "graph": per-example gradients only where weights meet images.

From a model to the sum of its clipped per-example gradients:

1. `export` writes the model down as a graph of operations, for any number of rows (one row: one
   view of one image).
2. `batch_dim` finds, by trial, which dimension of each value counts rows; `row_independence` proves
   from the graph that no row depends on another.
3. `sites` lists the *sites*: operations that take a *weight* (what is computed from parameters
   alone) and data. Nowhere else does a per-example gradient arise. `parametrization` groups weights
   by how they follow from parameters.
4. `weights` computes the weights, once for all microbatches at the same parameters.
5. `passes` runs the graph forward with weights detached, and backward to the data; at each site a
   rule (`rules/`) turns the output's gradient and the inputs into per-example gradients of that
   weight: *materialized* (written out), or *ghost* (never written out: their norms and weighted
   sums alone).
6. `totals` adds up squares to one norm for each example, and sums the gradients times their clipping
   coefficients; weights' sums are pulled back to the parameters.

`engine` puts these together; `losses` applies the loss to one example at a time; `autotune` chooses
between the methods of a rule by their speed; `compiled_microbatch`, `compile` and `guards` make one
compiled graph of steps 5 and 6.
"""
