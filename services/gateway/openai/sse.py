"""Server-sent events."""

import logging
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.answer import Answer
from services.gateway.choice import Delta
from services.gateway.errors import ClientGone, RequestError
from services.gateway.openai.errors import body_of
from services.gateway.openai.sending import to_json, while_read

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would collect the events
REASONS = {reason: to_json(reason) for reason in (None, "stop", "length", "tool_calls")}


def event(data: str) -> str:
    """One event of JSON text."""
    return f"data: {data}\n\n"


class EventStream(Response):
    """Sends what comes as events: a comment when nothing did, an error as the last event. Only a stream that ended well says `[DONE]`.

    Closes the answer, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: list[Delta],
        answer: Answer,
        events: Callable[[Delta], str],
        closing: Callable[[Answer], str],
        request: Request,
    ) -> None:
        """first: what has come already. events, closing: those of what is new, and those after the end of all."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._answer = answer
        self._events, self._closing = events, closing
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_read(self._request, receive, self._send(send))
        finally:
            self._request.state.usage = self._answer.usage
            self._answer.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_deltas(self._request.state.send)  # not through every layer once a token
            last = self._closing(self._answer).encode() + DONE
        except ClientGone:
            raise
        except Exception as error:  # the edge of the service: whatever broke, the stream ends with an event
            request_id = self._request.state.request_id
            logger.warning("request %s broke off: %s", request_id, error, exc_info=not isinstance(error, RequestError))
            last = event(to_json(body_of(error))).encode()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_deltas(self, send: Send) -> None:
        deltas = self._first
        while True:
            frames = "".join(map(self._events, deltas)).encode() if deltas else KEEP_ALIVE
            await send({"type": "http.response.body", "body": frames, "more_body": True})
            if self._answer.finished:
                return
            deltas = await self._answer.next()
