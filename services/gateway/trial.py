"""`python -m services.gateway.trial NAME --url URL`: asks a running installation as a client would; what `helm test` runs.

completion  an answer, whole
stream      an answer in pieces, ended by [DONE]
metrics     the engine's series are there
move        a worker pod is deleted in the middle of an answer, which must go on unbroken

Prints what it saw; ends with 1 and the reason when that is not as it should be. API_KEY is sent if it is set.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import urllib3
from prometheus_client.parser import text_string_to_metric_families

from shared.command import exit_status
from shared.errors import LockstepError

TIMEOUT_S = 120.0
METRICS_S = 10.0
LONG_TOKENS = 200  # of the answer in whose middle a worker is deleted
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class TrialError(LockstepError):
    """The installation did not behave as it should."""


def ask(url: str, model: str, **options: Any) -> urllib3.BaseHTTPResponse:
    """POSTs a chat completion. Raises TrialError when it is not answered 200."""
    headers = {"Authorization": f"Bearer {os.environ['API_KEY']}"} if os.environ.get("API_KEY") else {}
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 16} | options
    try:
        response = urllib3.request(
            "POST",
            f"{url}/v1/chat/completions",
            json=body,
            headers=headers,
            timeout=TIMEOUT_S,
            retries=False,
            preload_content=not options.get("stream"),
        )
    except urllib3.exceptions.HTTPError as error:
        raise TrialError(f"{url} cannot be reached: {error}") from error
    if response.status != 200:
        raise TrialError(f"status {response.status}: {response.data[:500].decode(errors='replace')}")
    return response


def pieces(response: urllib3.BaseHTTPResponse) -> Iterator[str]:
    """Text of a streamed answer. Raises TrialError when it ends without [DONE] or brings an error."""
    pending = b""
    for chunk in response.stream(4096):
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise TrialError(f"the stream ended with an error: {event['error']}")
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
    raise TrialError("the stream ended without [DONE]")


def completion(given: argparse.Namespace) -> None:
    answer = ask(given.url, given.model).json()
    text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
    if not text or reason not in ("stop", "length"):
        raise TrialError(f"an answer should have text and an end: {answer}")
    print(f"answer: {text!r} ({reason})")


def stream(given: argparse.Namespace) -> None:
    got = [piece for piece in pieces(ask(given.url, given.model, stream=True)) if piece]
    if not got:
        raise TrialError("the stream brought no text")
    print(f"answer in {len(got)} pieces: {''.join(got)!r}")


def metrics(given: argparse.Namespace) -> None:
    url = urllib3.util.parse_url(given.metrics)
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TrialError(f"{given.metrics}: {error}") from error
    samples: set[str] = set()
    silent: list[str] = []
    for *_, (address, *_) in found:  # of several schedulers, of which one leads and has the series; one may just have gone
        host = f"[{address}]" if ":" in str(address) else str(address)
        try:
            text = urllib3.request("GET", f"http://{host}:{url.port}{url.path}", timeout=METRICS_S, retries=False).data.decode()
        except urllib3.exceptions.HTTPError as error:
            silent.append(f", and cannot be reached: {error}")
            continue
        samples |= {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    missing = {"lockstep_num_requests_running", "lockstep_num_requests_waiting", "lockstep_kv_cache_usage_perc"} - samples
    if missing:
        raise TrialError(f"{given.metrics} lacks {', '.join(sorted(missing))}{''.join(silent)}")
    print(f"{len(samples)} series at {given.metrics}")


def move(given: argparse.Namespace) -> None:
    from kubernetes import client, config

    options: dict[str, Any] = {"max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
    undisturbed = "".join(pieces(ask(given.url, given.model, **options)))
    config.load_incluster_config()
    pods = client.CoreV1Api()
    found = pods.list_namespaced_pod(given.namespace, label_selector=given.workers).items
    names = [pod.metadata.name for pod in found if pod.metadata and pod.metadata.name]
    if len(names) < 2:
        raise TrialError(f"two worker pods are needed to move between, there are {names}")
    answers = [pieces(ask(given.url, given.model, **options)) for _ in names]  # so that the deleted pod has one of them
    texts = [next(answer) for answer in answers]
    pods.delete_namespaced_pod(names[0], given.namespace, grace_period_seconds=0)
    texts = [text + "".join(answer) for text, answer in zip(texts, answers, strict=True)]
    if any(len(text) < len(undisturbed) // 2 for text in texts):
        raise TrialError(f"an answer broke off: {[len(text) for text in texts]} characters, undisturbed {len(undisturbed)}")
    print(f"{names[0]} deleted; {len(texts)} answers went on, {sum(text == undisturbed for text in texts)} letter by letter as undisturbed")


def main() -> int:
    parser = argparse.ArgumentParser("lockstep-trial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trials = {trial.__name__: trial for trial in (completion, stream, metrics, move)}
    parser.add_argument("trial", choices=trials)
    parser.add_argument("--url", required=True, help="the gateway")
    parser.add_argument("--model", required=True)
    parser.add_argument("--metrics", help="the scheduler's metrics")
    parser.add_argument("--namespace", help="of the worker pods")
    parser.add_argument("--workers", help="label selector of the worker pods")
    given = parser.parse_args()
    return exit_status(given.trial, lambda: trials[given.trial](given))


if __name__ == "__main__":
    sys.exit(main())
