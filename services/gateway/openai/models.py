"""GET /v1/models: the names under which the one model is served."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from services.gateway.openai.service import Gateway

router = APIRouter()
CREATED = int(time.time())


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All served names."""
    return {"object": "list", "data": [_card(name) for name in Gateway.of(request).settings.served_model_name]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """One served name, which may hold slashes."""
    Gateway.of(request).check_name(name)
    return _card(name)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "lockstep"}
