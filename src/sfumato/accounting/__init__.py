"""What a mechanism costs: numbers in, epsilon out. Nothing here imports torch.

`accountants.epsilon` is the one entry. A run's epsilon goes from there through `sfumato.planning.claims` (all claims of
a plan) to the certificate and the result, which state the whole plan's; `formats` prints it.
"""
