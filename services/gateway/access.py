"""Who may ask, and how much: the first thing that is looked at in a request."""

import re
from dataclasses import dataclass

from starlette.types import Scope

from services.gateway.errors import Unauthorized
from services.gateway.keys import MAX_KEY_BYTES, ApiKey, KeyRing
from services.gateway.limits import Limits

BEARER = re.compile(rb"(?i:bearer) ([\x21-\x7e]{1,%d})" % MAX_KEY_BYTES)


@dataclass(frozen=True)
class Access:
    """`keys` None: everybody may, as much as they like."""

    keys: KeyRing | None
    limits: Limits
    open_paths: frozenset[str]  # that need no key

    def key_of(self, scope: Scope) -> ApiKey | None:
        """The key of a request; None where none is needed. Raises Unauthorized."""
        if self.keys is None or scope["path"] in self.open_paths:
            return None
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if not shown:
            raise Unauthorized("you did not provide an API key: send it as 'Authorization: Bearer KEY'")
        match = BEARER.fullmatch(shown[0]) if len(shown) == 1 else None
        key = self.keys.find(match[1]) if match else None
        if key is None:
            raise Unauthorized("incorrect API key provided", code="invalid_api_key")
        return key
