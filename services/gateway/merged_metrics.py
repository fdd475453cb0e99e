"""The metrics of several processes as those of one: what they count is added up, also what those counted that have died since."""

import http.client
import logging
import threading
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from shared.addresses import reachable

logger = logging.getLogger(__name__)

TIMEOUT_S = 1.0
LOWEST = frozenset(("lockstep_gateway_backend_up", "process_start_time_seconds"))  # of all: not the sum
HIGHEST = frozenset(("lockstep_build_info",))
COUNTS = frozenset(("counter", "histogram", "summary"))  # which must never fall


class MergedRegistry(CollectorRegistry):
    """The metrics registered here and those of the admin ports in `targets`."""

    def __init__(self, host: str) -> None:
        """host: where the admin ports listen."""
        disable_created_metrics()
        super().__init__(auto_describe=True)
        ProcessCollector(registry=self)
        self._host = reachable(host)
        self.targets: dict[int, int] = {}  # admin ports, by process
        self._last: dict[int, str] = {}  # what each told last
        self._retired: list[Metric] = []  # counts of processes that have died
        self._lock = threading.Lock()

    def lost(self, number: int) -> None:
        """The process has died: what it counted up to the last look at it stays in the sums."""
        self.targets.pop(number, None)
        with self._lock:
            told = text_string_to_metric_families(self._last.pop(number, ""))
            self._retired = merged([*self._retired, *(family for family in told if family.type in COUNTS)])

    def ask(self, number: int, path: str) -> str | None:
        """None if the process answers 200, else what it says."""
        port = self.targets.get(number)
        if port is None:
            return f"process {number} is starting"
        try:
            status, text = _get(self._host, port, path)
        except OSError as error:
            return f"process {number} does not answer: {error}"
        return None if status == http.client.OK else f"process {number}: {text.strip()}"

    def collect(self) -> Iterator[Metric]:
        """All families, each once."""
        own = _Snapshot(super().collect())
        texts = [generate_latest(own).decode()]
        for number, port in list(self.targets.items()):
            try:
                _, text = _get(self._host, port, "/metrics")
            except OSError as error:  # dying: it will be missed soon enough
                logger.debug("process %d does not tell its metrics: %s", number, error)
                text = self._last.get(number, "")
            self._last[number] = text
            texts.append(text)
        with self._lock:
            families = [family for text in texts for family in text_string_to_metric_families(text)]
            yield from merged([*self._retired, *families])


class _Snapshot(CollectorRegistry):
    """Families that were collected already, to be written."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def merged(families: Iterable[Metric]) -> list[Metric]:
    """Families of one name become one, in the order of their first."""
    result: dict[str, Metric] = {}
    samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]] = {}
    for family in families:
        if family.name not in result:
            result[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
            samples[family.name] = {}
        of_family = samples[family.name]
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            value = sample.value
            if (before := of_family.get(key)) is not None:
                both = (before.value, value)
                value = min(both) if family.name in LOWEST else max(both) if family.name in HIGHEST else sum(both)
            of_family[key] = Sample(sample.name, sample.labels, value)
    for name, family in result.items():
        family.samples = list(samples[name].values())
    return list(result.values())


def _get(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and text. Raises OSError."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except http.client.HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()
