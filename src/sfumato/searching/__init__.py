"""Cheap search for the hyper-parameters of one private run (Sander et al. 2022, Section 4)."""
