"""`python -m sfumato` is the command `sfumato`."""

import os
import sys

# Python puts the working folder first, whose files (a stranger's safetensors.py) would be imported
# in place of installed packages.
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from sfumato.cli import main

main()
