"""Chat templates are programs that come with a model: each is run in a process apart, which the kernel ends when it takes too long.

A renderer holds a few such processes. One that was ended is replaced at the next use, in milliseconds: they are forked from a server
that has `transformers` loaded.
"""

import json
import multiprocessing
import queue
import resource
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, NamedTuple, Self

from services.gateway.errors import GenerationFailed, InvalidRequest

TIME_LIMIT_S = 4.0  # for the longest conversations; usual ones take less than a millisecond
MAX_MEMORY_BYTES = 4 << 30  # of address space, most of which the interpreter's libraries reserve and never touch
MAX_TEXT_CHARACTERS = 16 << 20
MAX_TOLD = 200  # characters of a template's words that a client gets


class _Worker(NamedTuple):
    process: ForkServerProcess
    connection: Connection


class Renderer:
    """A context. `render` may be called from any thread, from as many at a time as there are processes; more wait."""

    def __init__(self, processes: int, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._workers: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()  # None: to be started
        self._processes = processes
        for _ in range(processes):
            self._workers.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for _ in range(self._processes):
            if (worker := self._workers.get()) is not None:
                _end(worker)

    def warm_up(self) -> None:
        """Starts a process, so that the first request need not wait for it."""
        self.render("", messages=[])

    def render(self, template: str, **arguments: Any) -> str:
        """What `transformers` renders for one conversation. The arguments are those of its `render_jinja_template`, of JSON types.

        Raises InvalidRequest, with the template's own words where it refuses on purpose.
        """
        try:
            request = json.dumps({"template": template, "time_limit_s": self._time_limit_s, **arguments}, allow_nan=False).encode()
        except ValueError as error:  # JSON can write 1e400, and what is read of it is infinite
            raise InvalidRequest("a number in messages, tools or chat_template_kwargs is too large") from error
        worker = self._workers.get()
        try:
            worker = worker or _start()
            worker.connection.send_bytes(request)
            answer = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError) as error:
            status, worker = worker and _end(worker), None
            if status != -signal.SIGALRM:
                raise GenerationFailed(f"a process that renders chat templates ended with status {status}") from error
            raise InvalidRequest(f"the chat template takes more than {self._time_limit_s:g} s for these messages", "messages") from error
        finally:
            self._workers.put(worker)
        if "error" in answer:
            raise InvalidRequest(f"the chat template refuses these messages: {answer['error']}", "messages")
        return str(answer["text"])


def _start() -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.utils.chat_template_utils"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="template", daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _end(worker: _Worker) -> int | None:
    """The exit status of a process that has gone, or goes now that the connection is closed."""
    worker.connection.close()
    worker.process.join()
    return worker.process.exitcode


def _serve(connection: Connection) -> None:
    """The life of a process: until the other side is gone, or a template takes too long and SIGALRM ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the gateway says when to end
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, request.pop("time_limit_s"))
        answer = json.dumps(_rendered(request.pop("template"), request)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(answer)


def _rendered(template: str, arguments: dict[str, Any]) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template  # the server of the forks has loaded it

    messages = arguments.pop("messages")
    try:
        rendered: tuple[list[str], Any] = render_jinja_template(  # type: ignore[assignment]  # annotated wrongly there
            conversations=[messages], chat_template=template, **arguments
        )
    except Exception as error:  # the edge of this process: a template can raise anything, and only its client is to know
        return {"error": (str(error) or type(error).__name__)[:MAX_TOLD]}
    text = rendered[0][0]
    if len(text) > MAX_TEXT_CHARACTERS:
        return {"error": f"it makes {len(text)} characters of them, at most {MAX_TEXT_CHARACTERS} are taken"}
    return {"text": text}
