"""What can go wrong with a client's request; `openai/errors.py` turns each into an answer.

LockstepError
`-- RequestError
    |-- InvalidRequest         the client's fault: never worth a retry
    |   |-- ModelNotFound
    |   |-- NotFound           no such route
    |   |-- MethodNotAllowed
    |   |-- BodyTooLarge
    |   |-- BodyTooSlow
    |   |-- HeadTooLarge
    |   `-- Unauthorized       no key, or none of ours
    |-- Overloaded             come back later
    |-- Unavailable            nothing to serve it just now
    |-- TimedOut
    |-- GenerationFailed       our fault, or the engine's
    `-- ClientGone             nobody is left to answer
"""

from shared.errors import LockstepError


class RequestError(LockstepError):
    """A request that is not answered as asked. `param` names the field, `code` is OpenAI's name of the fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request can never be served as it is."""


class ModelNotFound(InvalidRequest):
    """No model is served under this name."""


class NotFound(InvalidRequest):
    """There is no such route."""


class MethodNotAllowed(InvalidRequest):
    """The route exists, for other methods."""


class BodyTooLarge(InvalidRequest):
    """The body is larger than this gateway reads."""


class BodyTooSlow(InvalidRequest):
    """The body did not come in time."""


class HeadTooLarge(InvalidRequest):
    """The request line and the headers are larger than this gateway reads."""


class Unauthorized(InvalidRequest):
    """The request shows no API key, or none that is good."""


class Overloaded(RequestError):
    """Too much to do; `retry_after_s` says when to come back."""


class Unavailable(RequestError):
    """No scheduler or no worker group is ready; `retry_after_s` says when to come back."""


class TimedOut(RequestError):
    """The request took longer than `timeout_s`."""


class GenerationFailed(RequestError):
    """The answer broke off for a reason that is not the client's; the message is for logs, not for clients."""


class ClientGone(RequestError):
    """The client has closed its connection, or does not read."""
