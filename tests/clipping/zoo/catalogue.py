"""All animals of the zoo."""

from tests.clipping.zoo import functions, harmless, hooks, losses, mixing, random_layers, rows, state

ENTRIES = [
    *rows.ENTRIES,
    *mixing.ENTRIES,
    *state.ENTRIES,
    *hooks.ENTRIES,
    *functions.ENTRIES,
    *losses.ENTRIES,
    *random_layers.ENTRIES,
    *harmless.ENTRIES,
]
BY_NAME = {entry.name: entry for entry in ENTRIES}
