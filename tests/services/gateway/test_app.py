"""The outermost layer."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import pytest

from services.gateway.access import Access
from services.gateway.app import create_app
from services.gateway.chat.renderer import Renderer
from services.gateway.limits import Limits
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.service import Gateway
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.settings import GatewaySettings
from shared.metrics import new_registry
from tests.services.gateway.conftest import assert_error


async def test_err_09_an_error_that_nobody_foresaw_is_told_in_the_same_shape(caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"served_model_name": ["tiny"]}
    settings = GatewaySettings(**given)
    scheduler = SchedulerClient(["127.0.0.1:1"], 1, 1.0, lambda cause: None)
    metrics = GatewayMetrics("tiny", "", new_registry("gateway"))
    no_time = cast(Any, object())  # which no answer can be made of
    with Renderer(1) as renderer, ThreadPoolExecutor(1) as threads:
        app = create_app(Gateway(settings, scheduler, threads, renderer, no_time, metrics), Access(None, Limits(), frozenset()))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            error = assert_error(await client.get("/v1/models"), 500, None, None)
    assert "object" not in error["message"]
    assert any(record.exc_info and "failed" in record.getMessage() for record in caplog.records)
