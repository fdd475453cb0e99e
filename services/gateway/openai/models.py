"""GET /v1/models: the names under which the one model is served."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from services.gateway.openai.service import Gateway

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All served names."""
    gateway = Gateway.of(request)
    return {"object": "list", "data": [_card(gateway, name) for name in gateway.settings.served_model_name]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """One served name, which may hold slashes."""
    gateway = Gateway.of(request)
    gateway.check_name(name)
    return _card(gateway, name)


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    model = gateway.scheduler.model
    context = model.max_length if model else None  # not known before the first session
    return {"id": name, "object": "model", "created": gateway.created, "owned_by": "lockstep", "max_model_len": context}
