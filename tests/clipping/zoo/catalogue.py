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
# Near relatives of others: tried by the slow tests alone.
VARIANTS = """
arange_of_images roll_of_places flip_of_places counted_from_the_end where split narrow slices pairs linspace
times_rows more_than_four_by_clamp loop_by_index zip rotated_by_place doubles_every_second sorted_places
flips_every_second beyond_100 any_beyond_12 tiny_mean mean mean_detached list_from_batch numpy_from_batch
normalized_over_rows maximum_over_rows ranks minibatch_deviation batch_norm_average batch_norm_frozen
batch_norm_frozen_untracked batch_norm_slow batch_norm_of_logits attention_over_rows convolution_over_rows
mean_in_parameter_slow mean_in_buffer_slow mean_in_attribute_slow mean_in_new_buffer records_features act_norm_frozen
act_norm_buffers counts_globally spectral_norm_by_hook tells_input tells_trainable learns writes_into_features
negates_parameter masks_parameter clips_tensor negates_tensor remembers_parameter doubles_gradient_of_output
zero_head_backward clears_accumulated reversal_for_func inference_mode_scale checkpoint_frozen grad_switched
loss_threshold_buffer loss_tenth_call loss_dropout loss_places loss_weighted loss_module loss_one_hot dropout_in_place
dropout_twice dropout_before_zeros alpha_dropout noise_by_rows multinomial shuffled_channels drop_connect_by_row
drop_path_timm of_the_batch dropout_of_images dropout_1d feature_alpha_dropout dropout_all dropout_tokens_first
attention_by_hand noise_by_shape noise_of_images noise_in_place uniform_in_place drop_block_timm_batch
draws_by_value_unused integers exponential poisson local_response_norm token_positions layer_scale zero_gain new_zeros
sorted_channels largest_channels cumulated_columns interpolated unfolded shuffled_pixels spectrum eval_dropout
float64_inside clipped_images
""".split()
BY_NAME = {entry.name: entry for entry in ENTRIES}
