"""All animals of the zoo."""

from tests.clipping.zoo import functions, harmless, hooks, mixing, random_layers, rows, state

ENTRIES = [
    *rows.ENTRIES,
    *mixing.ENTRIES,
    *state.ENTRIES,
    *hooks.ENTRIES,
    *functions.ENTRIES,
    *random_layers.ENTRIES,
    *harmless.ENTRIES,
]
# For the quick suite; all are for the slow one.
REPRESENTATIVES = """
arange tutorial_positions table_by_row halves roll one_over_rows folded
beyond_12 little_mean mean softmax_over_rows attention_over_rows batch_norm batch_norm_untracked batch_norm_behind_zero
mean_in_buffer mean_in_new_buffer mean_in_attribute records_features act_norm_flag codebook spectral_norm
looks_backward doubles_gradient_of_output doubles_parameter little_parameter zero_head_parameter
reversal straight_through_by_detach right_function mixes_backward no_grad_mean weight_detached
dropout stochastic_depth gumbel_softmax stochastic_depth_batch draws_by_value
plain windows class_token weight_norm
""".split()
BY_NAME = {entry.name: entry for entry in ENTRIES}
