"""python -m services.gateway."""

from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from shared.service import run


def main() -> None:
    run("lockstep-gateway", GatewaySettings, serve)


if __name__ == "__main__":
    main()
