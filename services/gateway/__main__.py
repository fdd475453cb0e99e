"""python -m services.gateway."""

from services.gateway.server import serve
from services.gateway.settings import GatewaySettings
from shared.service import run

if __name__ == "__main__":
    run("gateway", GatewaySettings, serve)
