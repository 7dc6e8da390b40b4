"""A run directory -> one self-contained HTML page."""

from paritygate.extras import require

require("report")

from paritygate.report.page import write  # noqa: E402
from paritygate.report.tokens import write_vocabulary  # noqa: E402

__all__ = ["write", "write_vocabulary"]
