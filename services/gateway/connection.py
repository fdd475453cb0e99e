"""One HTTP connection: uvicorn's, with the bounds on a request's head that it lacks, and errors in the shape of all others."""

import asyncio
import sys
import uuid

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.errors import HeadTooLarge, InvalidRequest
from services.gateway.openai.errors import error_response

MAX_HEAD_BYTES = 2 << 20  # request line and headers, or trailers, with room for anything that somebody takes for a key
OLD_VERSIONS = ("0.9", "1.0")  # of HTTP


class Connection(HttpToolsProtocol):
    """The parser joins the pieces of a header in time that grows with the square of its length: one without end would hold up everybody.

    A head has as long to come as an idle connection is kept. What comes after an answer and is no head keeps the connection no longer: the
    rest of a body that was refused, or line ends.

    A client may send its next request before it has the answer to the last one. Behind one that waits we read on, to notice when the client
    leaves, and tell the request that is being answered: the base class does neither.

    A request may offer to go on in another protocol, as Java's client does with HTTP/2. Nobody takes that up, but the parser gives up the
    body: such a request is read again without the offer.
    """

    _head_bytes = 0  # that came since the last head, piece of a body, or end
    _head_timer: asyncio.TimerHandle | None = None
    _body_at: int | None = None  # of a request with such an offer: in the data that the parser has got
    _running: RequestResponseCycle | None = None  # the last request that was begun; `cycle` is the last that came

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if unanswered := self._unanswered:
            unanswered.disconnected = True
            unanswered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        rest = memoryview(data)
        while self._body_at is not None:
            rest, self._body_at = rest[self._body_at :], None
            super().data_received(self._head_without_offer())
            super().data_received(rest)  # type: ignore[arg-type]
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooLarge(f"the head of your request has more than {MAX_HEAD_BYTES} bytes"))
        if self._is_unwatched:
            self._expect_head()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest(msg))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        if self._is_offer:
            return
        self._stop_timer()
        self._head_bytes = 0
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offer:
            return
        self._head_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, without_chunks(cycle, app) if cycle.scope["http_version"] in OLD_VERSIONS else app)

    def _unsupported_upgrade_warning(self) -> None:
        """The parser has stopped behind the head."""
        stopped = sys.exception()
        if self._is_offer and isinstance(stopped, httptools.HttpParserUpgrade):
            self._body_at = stopped.args[0]

    @property
    def _is_offer(self) -> bool:
        """Whether the request could go on in another protocol; CONNECT must, and is refused."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return first + b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade") + b"\r\n"

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        if self._unanswered:
            self._expect_head()
        else:
            self.transport.close()

    @property
    def _is_unwatched(self) -> bool:
        """Whether nothing ends the connection if no more comes: the base class has taken what came for the beginning of a request."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self._head_timer is None and self.timeout_keep_alive_task is None and not self.transport.is_closing()

    @property
    def _unanswered(self) -> RequestResponseCycle | None:
        """The request that is being answered, or about to be; how long that may take is its own matter."""
        return None if self._running is None or self._running.response_complete else self._running

    @property
    def _is_answering(self) -> bool:
        """Whether an answer is under way, which another would garble."""
        return self._unanswered is not None and self._unanswered.response_started

    def _refuse(self, error: InvalidRequest) -> None:
        """Answers what never becomes a request of the application, and closes the connection."""
        if not self._is_answering:
            answer = error_response(error, {"connection": "close", "x-request-id": uuid.uuid4().hex})
            headers = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
            self.transport.write(STATUS_LINE[answer.status_code] + headers + b"\r\n" + bytes(answer.body))
        self.transport.close()


def without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """The application for a client of before HTTP/1.1: an answer that does not tell its length ends where its connection does.

    Such a client waits for no 100 either, whatever it expects.
    """
    cycle.keep_alive = cycle.waiting_for_100_continue = False

    async def answer(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_as_it_is(event: ASGISendEvent) -> None:
            nonlocal has_length
            if event["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in event.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif event["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(event.get("body", b""))  # what the base class checks it against
            await send(event)

        await app(scope, receive, send_as_it_is)

    return answer
