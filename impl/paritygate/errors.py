"""The errors a person sees: each carries the exit code of the command line and one sentence."""


class ParityGateError(Exception):
    """Base of every error that is not a bug of ours; `exit_code` is what the command line returns."""

    exit_code = 1


class BadInputError(ParityGateError):
    """Arguments, a spec or data that cannot be used (exit 2)."""

    exit_code = 2


class Refused(ParityGateError):  # noqa: N818 - the field's word: a guard refuses
    """No green parity for this tree, or a receipt that does not verify (exit 3)."""

    exit_code = 3


class GateStopped(ParityGateError):  # noqa: N818
    """A gate of the protocol stopped the run (exit 4)."""

    exit_code = 4


class BackendError(ParityGateError):
    """The service failed after its retries; the run can be resumed (exit 5)."""

    exit_code = 5
