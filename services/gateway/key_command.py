"""`lockstep key NAME`, or `python -m services.gateway key NAME`: makes an API key and adds its digest to the file of keys."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.gateway import keys
from shared.errors import ConfigError

PROGRAM = "lockstep key"


def make_key(arguments: Sequence[str]) -> int:
    """Prints the key, which is kept nowhere. Returns the exit status: 2, with one line on stderr, when it cannot be made."""
    parser = argparse.ArgumentParser(PROGRAM, description="Makes an API key. It is printed once; the file holds its digest.")
    parser.add_argument("name", help="told in logs: letters, digits, '.', '_', '-'")
    parser.add_argument("--file", type=Path, required=True, help="the file of keys, made if need be; name it to the gateway by --api-keys")
    parser.add_argument("--tenant", help="whose it is; default: the name")
    for limit, meaning in (
        ("requests-per-minute", "POST requests a minute"),
        ("tokens-per-minute", "tokens of prompts and completions a minute"),
        ("concurrent-requests", "POST requests at a time"),
    ):
        parser.add_argument(f"--{limit}", type=int, help=f"{meaning}; default: no limit")
    given = parser.parse_args(arguments)
    limits = (given.requests_per_minute, given.tokens_per_minute, given.concurrent_requests)
    try:
        print(keys.add(given.file, given.name, given.tenant, *limits))
    except (ConfigError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(make_key(sys.argv[1:]))
