"""How a spec file is refused."""

from pathlib import Path

from paritygate.spec import SpecError, load


def refusal(path: Path) -> SpecError | None:
    """The error that `load` raises for a file, checked for its exit code and pointers; None where it is accepted."""
    try:
        load(path)
    except SpecError as error:
        refused = error
    else:
        return None
    assert refused.exit_code == 2
    assert refused.findings
    for finding in refused.findings:
        assert finding.pointer == "" or finding.pointer.startswith("/")
        assert finding.message
    return refused
