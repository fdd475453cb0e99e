"""GET /status: how the scheduler and its groups stand, for people and the page at /. However many look, the scheduler is asked seldom."""

import asyncio
import time
from typing import Any

from services.gateway.errors import Unavailable
from services.gateway.openai.service import Gateway

FRESH_S = 0.5  # an answer serves all who ask within this time


class Status:
    """Of one gateway process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asking = asyncio.Lock()
        self._last: dict[str, Any] | Unavailable = {}
        self._at = -FRESH_S

    async def answer(self) -> dict[str, Any]:
        """Counts are since the scheduler began; rates come from two answers. Raises Unavailable, which serves all who ask, too: each in
        turn would wait for a scheduler that says nothing."""
        async with self._asking:
            if time.monotonic() - self._at >= FRESH_S:
                try:
                    self._last = await self._read()
                except Unavailable as error:
                    self._last = error
                self._at = time.monotonic()
        if isinstance(self._last, Unavailable):
            raise self._last
        return self._last

    async def _read(self) -> dict[str, Any]:
        scheduler = self._gateway.scheduler
        model, status = scheduler.ready_model, await scheduler.status()
        return {
            "models": self._gateway.settings.served_model_name,
            "max_length": model.max_length,
            "waiting": status.waiting,
            "groups": [
                {
                    "name": group.name,
                    "ready": group.ready,
                    "running": group.running,
                    "waiting": group.waiting,
                    "kv_usage": round(group.kv_usage, 6),
                    "prompt_tokens": group.prompt_tokens,
                    "cached_tokens": group.cached_tokens,
                    "generation_tokens": group.generation_tokens,
                }
                for group in status.groups
            ],
        }
