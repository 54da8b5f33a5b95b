"""Engine "graph": per-example gradients only where weights meet images.

From a model to the sum of its clipped per-example gradients:

1. `export` writes the model down as a graph of operations, for any number of rows (one row: one
   view of one image), and lists the *sites*: operations that take a *weight* (what is computed from
   parameters alone) and data. Nowhere else does a per-example gradient arise. `rows` follows the rows
   through the graph, and refuses operations that might let one depend on another. `parametrization`
   groups weights by how they follow from parameters.
2. `weights` computes the weights, once for all microbatches at the same parameters.
3. `passes` runs the graph forward with weights detached, and backward to the data; at each site a
   rule (`rules/`) turns the output's gradient and the inputs into per-example gradients of that
   weight: *materialized* (written out), or *ghost* (never written out: their norms and weighted
   sums alone).
4. `weights` adds up squares to one norm for each example, and sums the gradients times their clipping
   coefficients; weights' sums are pulled back to the parameters.

`engine` puts these together; `autotune` chooses between the methods of a rule by their speed; `compile`
makes one compiled graph of steps 3 and 4.
"""
