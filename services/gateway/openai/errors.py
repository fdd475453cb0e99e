"""Errors as OpenAI's clients expect them."""

import json
import math

from starlette.responses import Response

from services.gateway.errors import (
    BodyTooLarge,
    BodyTooSlow,
    HeadTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Overloaded,
    RequestError,
    TimedOut,
    Unauthorized,
    Unavailable,
)

STATUS: dict[type[Exception], tuple[int, str]] = {  # to HTTP status and OpenAI's error type; the first that fits
    ModelNotFound: (404, "invalid_request_error"),
    NotFound: (404, "invalid_request_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    BodyTooLarge: (413, "invalid_request_error"),
    BodyTooSlow: (408, "invalid_request_error"),
    HeadTooLarge: (431, "invalid_request_error"),
    Unauthorized: (401, "invalid_request_error"),
    InvalidRequest: (400, "invalid_request_error"),
    Overloaded: (429, "rate_limit_error"),
    Unavailable: (503, "server_error"),
    TimedOut: (504, "server_error"),
}
OUR_FAULT = (500, "server_error")
OUR_FAULT_MESSAGE = "the server failed to answer this request"  # what failed is for our logs


def status_of(error: Exception) -> int:
    """The HTTP status that stands for the error."""
    return _status_and_type(error)[0]


def body_of(error: Exception) -> dict[str, dict[str, str | None]]:
    """The error object, for an answer or for an event of a stream."""
    status, kind = _status_and_type(error)
    told = isinstance(error, RequestError) and status != OUR_FAULT[0]
    return {
        "error": {
            "message": str(error) if told else OUR_FAULT_MESSAGE,
            "type": kind,
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, RequestError) else None,
        }
    }


def error_response(error: Exception, headers: dict[str, str] | None = None) -> Response:
    """The whole answer, with Retry-After where the error says when to come back."""
    headers = dict(headers or {})
    if isinstance(error, RequestError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(max(math.ceil(error.retry_after_s), 1))
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(json.dumps(body_of(error)), status_of(error), headers, "application/json")


def _status_and_type(error: Exception) -> tuple[int, str]:
    return next((answer for kind, answer in STATUS.items() if isinstance(error, kind)), OUR_FAULT)
