"""The page at /: a playground and a live view. Static files without a secret in them: what they ask for needs a key as any request does."""

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter
from starlette.responses import Response

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMES: Mapping[str, str] = {  # by path
    "/": "index.html",
    "/page/icon.svg": "icon.svg",
    "/page/style.css": "style.css",
    "/page/main.js": "main.js",
    "/page/api.js": "api.js",
    "/page/chat.js": "chat.js",
    "/page/status.js": "status.js",
}
PATHS = frozenset(NAMES)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def router() -> APIRouter:
    """Its routes, which serve from memory."""
    routes = APIRouter(include_in_schema=False)
    for path, name in NAMES.items():
        content = files("services.gateway.page").joinpath("static", name).read_bytes()
        routes.add_api_route(path, _serves(content, MEDIA_TYPES[PurePath(name).suffix]), methods=["GET"])
    return routes


def _serves(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def endpoint() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return endpoint
