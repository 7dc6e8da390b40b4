"""The engines of a GPU, by Triton; imported only where there is one.

In a session whose modules are read from their sources alone, as in a run, kernels are compiled afresh too: what lies in
Triton's cache is not read.
"""

import os

from paritygate import bootstrap

if bootstrap.LOADED:
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
