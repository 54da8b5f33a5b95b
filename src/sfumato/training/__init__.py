"""From a recipe and data to a model that was trained privately.

To be read in this order: `trainer` (load, resolve, train), `loop` (the steps of a run, and what it
leaves), `step` (one private update and one ordinary one, and where their
randomness comes from), `noise`, `learner` (network, examples and update together), `state`.

A loop of somebody's own is `private_loop`.
"""
