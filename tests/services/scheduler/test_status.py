"""What the gateway's page shows of the groups."""

from prometheus_client import CollectorRegistry

from services.scheduler.gauges import EngineState
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.status import status_of


def test_groups_that_are_here_are_told_with_what_they_have_been_through() -> None:
    metrics = SchedulerMetrics("tiny", vllm_names=False, registry=CollectorRegistry())
    metrics.no_engine.watch(lambda: EngineState(waiting=3))
    first, second, lost = metrics.engine("a"), metrics.engine("b"), metrics.engine("c")
    first.watch(lambda: EngineState(ready=True, running=2, waiting=1, kv_usage=0.5, num_pages=10))
    second.watch(lambda: EngineState(ready=True, running=1, kv_usage=1.0, num_pages=10))
    second.watch(lambda: EngineState(ready=False, running=1, kv_usage=0.0, num_pages=30))
    first.admitted(cached_tokens=4, prompt_tokens=16)
    lost.admitted(cached_tokens=1, prompt_tokens=1)
    status = status_of(metrics)
    told = {group.name: group for group in status.groups}
    assert (status.waiting, sorted(told)) == (3, ["a", "b"])
    assert (told["a"].ready, told["a"].running, told["a"].waiting, told["a"].kv_usage) == (True, 2, 1, 0.5)
    assert (told["a"].prompt_tokens, told["a"].cached_tokens, told["a"].generation_tokens) == (16, 4, 0)
    assert (told["b"].ready, told["b"].running, told["b"].kv_usage) == (False, 2, 0.25), "groups of one name are one"
