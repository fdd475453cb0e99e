"""What /debug/groups answers: the groups and their slots, for people who look for what is stuck. Numbers and names, bounded."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from services.scheduler.group import Group
from services.scheduler.history import MAX_LISTED
from services.scheduler.slots import SlotState

JSON = dict[str, Any]


def groups_page(groups: Sequence[Group]) -> JSON:
    """Called by threads of the admin port while the event loop goes on: each number is right, all together nearly so."""
    left = MAX_LISTED
    described = []
    for group in list(groups):
        page = _group(group, left)
        left -= len(page["slots"])
        described.append(page)
    return {"groups": described}


def _group(group: Group, most: int) -> JSON:
    """most: slots to list."""
    limits, lead = group.limits, group.lead
    running = [(slot, request) for slot, request in enumerate(group.slots.requests.copy()) if request is not None]
    return {
        "name": group.name,
        **asdict(group.state()),
        "draining": group.draining,
        "ejected": not group.health.is_well,
        "ejections": group.health.ejections,
        "failures": group.health.failures,
        "plans_passed": group.passed + 1,
        "limits": asdict(limits),
        "round_trip_s": lead.round_trip_us / 1e6,
        "margin_s": lead.margin_us / 1e6,
        "last_result": times._asdict() if (times := group.last_times) is not None else None,
        "slots": [_slot(group, slot, request.request_id) for slot, request in running[:most]],
        "slots_not_listed": max(len(running) - most, 0),
    }


def _slot(group: Group, slot: int, request_id: str) -> JSON:
    slots = group.slots
    return {
        "slot": slot,
        "request_id": request_id,
        "state": SlotState(int(slots.state[slot])).name.lower(),
        "epoch": int(slots.epoch[slot]),
        "to_prefill": int(slots.target[slot]),
        "planned": int(slots.planned[slot]),
        "confirmed": int(slots.confirmed[slot]),
        "max_length": int(slots.max_length[slot]),
        "pages": int(slots.num_pages[slot]),
        "pages_promised": int(slots.promised[slot]),
        "last_plan": int(slots.last_plan[slot]),
    }
