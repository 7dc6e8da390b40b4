"""What a mutant is here: the harness's format; `file` is under impl/paritygate.

`dies_by` is an obligation of spec/losses.json ("spod/gate") for an edit of a loss, one of spec/service.json
("gradient/ppo") for an edit of the embedded server, or a test ("tests/agent/test_tokens.py::test_...") for an edit of
anything else. Of a harmless edit it is the loss ("spod") whose obligations have to stay green, or "service".
"""

from paritygate.harness.mutants import Edit, Mutant

__all__ = ["Edit", "Mutant"]
