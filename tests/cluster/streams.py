"""Given to `python3 -c` in a pod of the cluster: streams that run at a time, again and again until told to stop. Only the standard library.

Arguments: host, port, model, streams, tokens, `once` or the file whose appearance says stop. Prints `begun` when each stream has some
text, at the end a line of JSON: every text of each stream, what broke, why requests that had brought nothing yet were asked for again, the
longest silence.
"""

import http.client
import json
import pathlib
import sys
import threading
import time

HOST, PORT, MODEL, STREAMS, TOKENS, UNTIL = sys.argv[1:]
RETRY_S, GIVE_UP_S, SILENCE_S = 0.5, 60.0, 90.0
PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "A list of colours:",
    "Water boils at",
    "Dear Sir,",
    "In 1969",
    "def add(a, b):",
    "Why",
)

texts: list[list[str]] = [[] for _ in range(int(STREAMS))]
errors: list[str] = []
retries: list[str] = []
pauses = [0.0]
begun = [threading.Event() for _ in texts]


class NotBegun(Exception):
    """Nothing has come yet: a client may ask again."""


def ask(number: int) -> str:
    """The text of one stream, whole."""
    body = {
        "model": MODEL,
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": int(TOKENS),
        "seed": number,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, int(PORT), timeout=SILENCE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status in (429, 503):
            raise NotBegun(f"status {answer.status}")
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read(500)!r}")
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise NotBegun(repr(error)) from error
    text, last = "", time.monotonic()
    try:
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return text
            if line.startswith(b"data: "):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise RuntimeError(f"after {len(text)} characters: {event['error']}")
                text += "".join(choice["text"] for choice in event["choices"])
                pauses.append(time.monotonic() - last)
                last = time.monotonic()
                begun[number].set()
        raise RuntimeError(f"no [DONE] after {len(text)} characters")
    finally:
        connection.close()


def run(number: int) -> None:
    """One text after the other."""
    since = time.monotonic()
    while True:
        try:
            texts[number].append(ask(number))
            since = time.monotonic()
            if UNTIL == "once" or pathlib.Path(UNTIL).exists():
                return
        except NotBegun as error:
            retries.append(str(error))
            if time.monotonic() - since > GIVE_UP_S:
                errors.append(f"stream {number} did not begin: {error}")
                return
            time.sleep(RETRY_S)
        except (OSError, ValueError, RuntimeError, http.client.HTTPException) as error:
            errors.append(f"stream {number}: {error!r}")
            return
        finally:
            if errors:
                begun[number].set()


threads = [threading.Thread(target=run, args=(number,)) for number in range(len(texts))]
for thread in threads:
    thread.start()
for each in begun:
    each.wait()
print("begun", flush=True)
for thread in threads:
    thread.join()
print(json.dumps({"texts": texts, "errors": errors, "retries": retries, "longest_pause_s": max(pauses)}), flush=True)
