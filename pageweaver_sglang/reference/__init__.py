"""The reference engine: the same calls as the public functions, in plain torch, on any device.

It is written to be right and readable, and quick enough to test with: every function reads lengths back to the host.
"""

from .attention import sparse_prefill
from .regroup import regroup
from .unions import prepare_unions

__all__ = ["prepare_unions", "regroup", "sparse_prefill"]
