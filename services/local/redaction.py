"""Takes secrets out of what leaves a machine: by the name that a value has, by the shape of a value, and by the values known here."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(removed)"
LEAST_VALUE = 6  # characters of a value that is searched for: shorter ones stand in innocent words, too

# The last word of a name tells: max_step_tokens counts, HF_TOKEN opens.
_SECRET = (
    r"(?:[A-Za-z0-9_.-]*[_.-])?"
    r"(?:token|secret|pass|password|passwd|passphrase|credentials?|authorization|cookie|(?:api|access|private|secret|signing)[_-]?keys?)"
)
_NAME = re.compile(_SECRET, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?P<before>(?<![A-Za-z0-9]){_SECRET}[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+", re.IGNORECASE)
_FLAG = re.compile(rf"(?P<before>--{_SECRET}[\"']?,?\s+[\"']?)[^\s\"',;]+", re.IGNORECASE)
_SHAPES = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<![A-Za-z0-9])(?:hf|sk|ls|ghp|glpat)[-_][A-Za-z0-9_-]{12,}"),
    re.compile(r"(?<![A-Za-z0-9])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"),  # a JSON web token
    re.compile(r"(?<=Bearer )[^\s\"']+", re.IGNORECASE),
    re.compile(r"(?<=://)[^/\s:@\"']*:[^/\s@\"']+(?=@)"),  # user and password of a URL
)


def is_secret(name: str) -> bool:
    """Whether something of this name opens something."""
    return _NAME.fullmatch(name) is not None


class Redaction:
    """Of texts, and of what JSON can hold."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """environment: whose secret values are taken out wherever they stand."""
        values = {value for name, value in environment.items() if is_secret(name) and len(value) >= LEAST_VALUE}
        self._known = sorted(values, key=len, reverse=True)

    def text(self, text: str) -> str:
        for value in self._known:
            text = text.replace(value, HIDDEN)
        for shape in _SHAPES:
            text = shape.sub(HIDDEN, text)
        for named in (_ASSIGNED, _FLAG):
            text = named.sub(rf"\g<before>{HIDDEN}", text)
        return text

    def json(self, found: Any) -> Any:
        """A copy; in objects that are a `name` and a `value`, as of a container's environment, the name tells too."""
        if isinstance(found, dict):
            named = is_secret(str(found.get("name", ""))) and "value" in found
            return {
                name: HIDDEN if (is_secret(name) and isinstance(value, str)) or (named and name == "value") else self.json(value)
                for name, value in found.items()
            }
        if isinstance(found, list):
            return [self.json(each) for each in found]
        return self.text(found) if isinstance(found, str) else found
