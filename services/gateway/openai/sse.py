"""Server-sent events, and clients that leave."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.answer import Answer
from services.gateway.errors import ClientGone, RequestError
from services.gateway.openai.errors import body_of

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
UNREAD_S = 5.0  # after its deadline a stream that cannot even send its error is cut off
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # nginx would collect the events

T = TypeVar("T")


def event(data: object) -> bytes:
    """One event. ASCII, since some clients split lines at U+2028 and its like."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


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
    """Sends chunks as they come: None becomes a comment, an error the last event. Only a stream that ended well says `[DONE]`.

    Closes the answer, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any] | None], answer: Answer, request: Request) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._answer = answer
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
        async for frame in self._frames():
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _frames(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield KEEP_ALIVE if chunk is None else event(chunk)
        except ClientGone:
            raise
        except Exception as error:  # the edge of the service: whatever broke, the stream ends with an event
            request_id = self._request.state.request_id
            logger.warning("request %s broke off: %s", request_id, error, exc_info=not isinstance(error, RequestError))
            yield event(body_of(error))
        else:
            yield DONE
