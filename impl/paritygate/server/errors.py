"""The error of a request that cannot be served."""

from paritygate.errors import BadInputError


class RequestError(BadInputError):
    """A request that cannot be served: `status` is the HTTP status, the message says what to change."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
