"""The judge's rubric: what an episode is scored on, in the order in which it is shown."""

DIMENSIONS = ("invalid_tool_use", "ungrounded_claims", "upfront_clarification")
"""Each a score in [0, 1], 1 the best; the composite is their mean."""
