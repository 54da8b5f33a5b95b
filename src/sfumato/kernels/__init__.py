"""Operations that PyTorch has not, each a custom operator; beside a device's kernel lies a plain `naive.py`."""
