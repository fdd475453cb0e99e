"""Which group gets a request: the one that has most of it in its prefix cache, unless that one has much more to do than others."""

from collections.abc import Iterable, Sequence
from zlib import crc32

from services.scheduler.group import Group
from services.scheduler.requests import Request
from shared.protocol.plan import Int32s

# What keeps a group busy, in tokens of prefill that take about as long.
RUNNING_TOKENS = 32  # a request that runs: it makes every step a little longer
QUEUED_TOKENS = 1_024  # a request before this one that waits for a slot: another has to end first


def takes(group: Group, request: Request) -> bool:
    """Whether the request may go there."""
    return not group.draining and request.max_length <= group.max_length


def place(groups: Sequence[Group], request: Request, now: float) -> Group | None:
    """The group that a request goes to; None when none takes it.

    A new request is the trial of a group that was ejected, if that is due. Else none goes where it has failed, or to a group that is
    ejected, as long as there is another choice.
    """
    takers = [group for group in groups if takes(group, request)]
    well = [group for group in takers if group.health.is_well]
    if len(well) < len(takers) and not request.interrupted:
        trial = next((group for group in takers if group.health.on_trial(now) and not group.load), None)
        if trial is not None:
            return trial
    untried = [group for group in well if group not in request.failed_at]
    return choose(untried or well or takers, request)


def choose(groups: Iterable[Group], request: Request) -> Group | None:
    """Of those that the request fits, the group with the most cached tokens of it minus load; of equals, any. None when it fits none.

    The scheduler owns every tree, so what is cached is known and not guessed. It takes 7 us a group to look it up.
    """
    fitting = [group for group in groups if request.max_length <= group.max_length]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    ids = request.prefill_ids
    return max(fitting, key=lambda group: (_cached_tokens(group, request, ids) - _load(group), _lot(group, request)))


def _cached_tokens(group: Group, request: Request, ids: Int32s) -> int:
    if request.needs_scores:  # it computes everything
        return 0
    return group.memory.cache.lookup(request.cache_salt, ids).num_pages * group.limits.page_size


def _load(group: Group) -> int:
    """In tokens of prefill."""
    queued = max(group.load + 1 - group.limits.slots, 0)
    return group.backlog_tokens + RUNNING_TOKENS * group.num_running + QUEUED_TOKENS * queued


def _lot(group: Group, request: Request) -> int:
    """Another order of the groups for each request."""
    return crc32(f"{group.name} {request.key}".encode())
