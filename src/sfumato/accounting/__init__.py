"""What a mechanism costs: numbers in, epsilon out. Nothing here imports torch.

`accountants.epsilon` is the one entry. A run's epsilon goes from there through
`sfumato.planning.claims` (all claims of a plan) and `sfumato.run_folder.certificate` (for the steps
that the ledger counts) to the result; `rounding` prints it.
"""
