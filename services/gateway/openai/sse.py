"""Server-sent events, and clients that leave."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.answer import Answer, Delta
from services.gateway.errors import ClientGone, RequestError
from services.gateway.openai.errors import body_of

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
UNREAD_S = 5.0  # after its deadline a stream that cannot even send its error is cut off
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would collect the events

T = TypeVar("T")


to_json = json.JSONEncoder(separators=(",", ":")).encode  # ASCII, since some clients split lines at U+2028 and its like


REASONS = {reason: to_json(reason) for reason in (None, "stop", "length", "tool_calls")}


def event(data: str) -> str:
    """One event of JSON text."""
    return f"data: {data}\n\n"


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection: ClientGone."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone("the client has closed its connection")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
            async with asyncio.timeout_at(self._answer.deadline + UNREAD_S):
                await unless_client_leaves(receive, self._send(send))
        except ClientGone as error:
            self._request.state.client_gone = error  # not raised: the answer has begun, and no handler could give another
        except TimeoutError:
            self._request.state.client_gone = ClientGone("the client did not read to the end in time")
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
