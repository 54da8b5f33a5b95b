"""Planning a run by its total amount of noise (Sander et al. 2022)."""
