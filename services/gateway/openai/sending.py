"""How answers reach a client: large ones in pieces, so that they hold up nobody, and none to a client that has left or does not read."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Iterable, Iterator
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ClientGone

JSON = dict[str, Any]
JSON_TYPE = "application/json"
PIECE_CHARACTERS = 1 << 16  # of one message to the connection: what is smaller is sent together
UNREAD_S = 5.0  # after its deadline an answer that is not read, or not even its error, is cut off

T = TypeVar("T")

to_json = json.JSONEncoder(separators=(",", ":")).encode  # ASCII, since some clients split lines at U+2028 and its like


def json_response(pieces: Iterable[str], request: Request) -> Response:
    """A JSON text whose pieces are made while it is sent, if it is large. Each piece should take some milliseconds at most."""
    messages = _messages(pieces)
    begun = list(itertools.islice(messages, 2))
    if len(begun) < 2:
        return Response(b"".join(begun), media_type=JSON_TYPE)
    return LargeResponse(itertools.chain(begun, messages), request)


def listed(values: Iterable[str], at_a_time: int) -> Iterator[str]:
    """A JSON list of JSON texts, so many in a piece."""
    yield "["
    rest = iter(values)
    separator = ""
    while part := ",".join(itertools.islice(rest, at_a_time)):
        yield separator + part
        separator = ","
    yield "]"


def _messages(pieces: Iterable[str]) -> Iterator[bytes]:
    waiting: list[str] = []
    characters = 0
    for piece in pieces:
        waiting.append(piece)
        characters += len(piece)
        if characters >= PIECE_CHARACTERS:
            yield "".join(waiting).encode()
            waiting, characters = [], 0
    if waiting:
        yield "".join(waiting).encode()


class LargeResponse(Response):
    """Messages that are made while they are sent, between which others get their turn."""

    media_type = JSON_TYPE

    def __init__(self, messages: Iterator[bytes], request: Request) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._messages, self._request = messages, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_read(self._request, receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for message in self._messages:
            await send({"type": "http.response.body", "body": message, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_read(request: Request, receive: Receive, sending: Awaitable[None]) -> None:
    """Sends an answer, to the end or until its client has left or has not read it in time: that is told in `client_gone`.

    It is not raised: the answer has begun, and no handler could give another.
    """
    try:
        async with asyncio.timeout_at(request.state.deadline + UNREAD_S):
            await unless_client_leaves(receive, sending)
    except ClientGone as error:
        request.state.client_gone = error
    except TimeoutError:
        request.state.client_gone = ClientGone("the client did not read to the end in time")


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
