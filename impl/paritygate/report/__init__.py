"""A run directory -> one self-contained HTML page."""

from paritygate.report.page import write
from paritygate.report.tokens import write_vocabulary

__all__ = ["write", "write_vocabulary"]
