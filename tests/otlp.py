"""A collector of OpenTelemetry spans, reduced to what it is sent."""

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`spans` in the order in which they came, with the name of the service before each."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.endpoint = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = (each.value.string_value for each in resource.resource.attributes if each.key == "service.name")
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Span]:
        return [span for _, span in self.spans if span.name == name]


def attributes(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Listens at `endpoint` until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield collector
        server.shutdown()
        thread.join()
