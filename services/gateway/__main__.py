"""python -m services.gateway, and python -m services.gateway key, which makes an API key."""

import asyncio
import sys

from services.gateway.key_command import make_key
from services.gateway.processes import serve_all
from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from shared.process import allow_many_files
from shared.service import run


async def serve_gateway(settings: GatewaySettings, stop: asyncio.Event) -> None:
    allow_many_files()
    await (serve(settings, stop) if settings.processes == 1 else serve_all(settings, stop))


def main() -> None:
    if sys.argv[1:2] == ["key"]:
        raise SystemExit(make_key(sys.argv[2:]))
    run("lockstep-gateway", GatewaySettings, serve_gateway)


if __name__ == "__main__":
    main()
