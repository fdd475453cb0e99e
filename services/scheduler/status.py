"""How things stand, group by group, for the gateway's page."""

from services.scheduler.metrics import NO_ENGINE, SchedulerMetrics
from shared.protocol.generation_pb2 import GenerationStatusResponse


def status_of(metrics: SchedulerMetrics) -> GenerationStatusResponse:
    """Of the groups that are here; groups of one name are told as one, as in the metrics."""
    states = metrics.states()
    queried, hits, generated = metrics.token_counts()
    response = GenerationStatusResponse(waiting=sum(state.waiting for state in states.pop(NO_ENGINE, [])))
    for name, groups in states.items():
        if groups:
            pages = sum(state.num_pages for state in groups)
            response.groups.add(
                name=name,
                ready=all(state.ready for state in groups),
                running=sum(state.running for state in groups),
                waiting=sum(state.waiting for state in groups),
                kv_usage=sum(state.kv_usage * state.num_pages for state in groups) / max(pages, 1),
                prompt_tokens=queried.get(name, 0),
                cached_tokens=hits.get(name, 0),
                generation_tokens=generated.get(name, 0),
            )
    return response
