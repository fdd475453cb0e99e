"""A worker group without processes: its supervisor is the real one, its ranks are timers in the supervisor's own process.

So one process carries many groups. The device keeps an exact timeline: an iteration starts when its plan was launched or the one
before it ended, whichever is later, and ends when the roofline says, however late this process runs.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from services.worker.distributed.board import Standing
from services.worker.engine.interface import Facts, Memory
from services.worker.engine.roofline import GPUS, MODELS, Roofline, Shape
from services.worker.engine.simulated import Language, SimulatedDevice, SimulatedStep
from services.worker.execution import Result
from services.worker.faults import Faults
from services.worker.messages import Done, Failed, Message, Ready, ResetDone, scored
from services.worker.metrics import GroupMetrics
from services.worker.ring import Kind
from services.worker.settings import WorkerSettings
from services.worker.supervisor import Supervisor
from services.worker.timers import Timers
from services.worker.weights.folder import ModelFolder
from shared.protocol.logprobs import Logprobs
from shared.protocol.plan import FAILED_ROW, Plan, decode


class SimulatedRanks:
    """Takes what a ring would carry, and tells what rank 0 would: it stands for all, since each would do the same at the same time."""

    numbers = range(1)

    def __init__(self, device: SimulatedDevice, faults: Faults, timers: Timers, tell: Callable[[Message], None]) -> None:
        self._device, self._faults, self._timers, self._tell = device, faults, timers, tell
        self._entries: deque[tuple[Kind, int, int]] = deque()  # (kind, plan or number, written at)
        self._plans: dict[int, tuple[SimulatedStep | Plan, int]] = {}  # and the iterations left
        self._busy = self._stopped = False
        self._free_at_us = 0

    def write(self, kind: Kind, plan: int, payload: bytes = b"") -> None:
        """As `RingWriter.write`; there is always room."""
        if kind == Kind.PLAN:
            decoded = decode(payload)
            self._plans[plan] = (decoded, decoded.iterations)
            return
        self._entries.append((kind, plan, self._timers.now_us()))
        self._next()

    def standings(self) -> list[Standing]:
        return []  # nobody who could be behind

    def print_stacks(self) -> None:
        """There are none."""

    def stop(self) -> None:
        self._stopped = True

    def _next(self) -> None:
        while self._entries and not self._busy and not self._stopped:
            kind, number, written_us = self._entries.popleft()
            if kind == Kind.RESET:
                self._plans.clear()
                self._device.reset()
                self._tell(ResetDone(number))
            else:
                self._run(number, max(written_us, self._free_at_us))

    def _run(self, number: int, start_us: int) -> None:
        plan, left = self._plans.pop(number)
        step = plan if isinstance(plan, SimulatedStep) else self._device.begin(plan)
        if left > 1:
            self._plans[number] = (step, left - 1)
        ids, step_us = step.run()
        self._busy = True
        for fault in self._faults.next():
            match fault.kind:
                case "delay":
                    step_us += round(fault.seconds * 1e6)
                case "error" if len(ids):
                    row = self._faults.choose(len(ids))
                    self._device.done[step.plan.row_slots[row]] = True
                    ids[row] = FAILED_ROW
                case "crash":
                    self._tell(Failed("a simulated crash", config=False))
                    return
                case "stall":
                    return
        idle_us = start_us - self._free_at_us if self._free_at_us else 0
        done, records = Done(number, start_us, start_us + step_us, idle_us, 0, ids), step.logprobs(ids)
        self._timers.at(done.end_us, lambda: self._end(done, records))

    def _end(self, done: Done, records: Logprobs) -> None:
        if self._stopped:
            return
        self._busy = False
        self._free_at_us = done.end_us
        for message in scored(done.plan, records):
            self._tell(message)
        self._tell(done)
        self._next()


class SimulatedSupervisor(Supervisor):
    """Supervises one simulated group."""

    def __init__(self, settings: WorkerSettings, folder: ModelFolder, timers: Timers, metrics: GroupMetrics) -> None:
        super().__init__(settings, metrics)
        self._folder, self._timers = folder, timers

    def start_ranks(self) -> None:
        settings, folder = self.settings, self._folder
        roofline = Roofline(GPUS[settings.simulated_gpu], _shape(settings, folder), settings.tensor_parallel_size)
        max_length = settings.max_model_len or int(folder.config["max_position_embeddings"])
        pages = settings.num_pages or roofline.cache_pages(settings.page_size)
        facts = Facts(pages, max_length, int(folder.config["vocab_size"]), folder.eos_ids)
        language = language_of(settings, folder)
        device = SimulatedDevice(self.limits_of(facts), language, roofline)
        faults = Faults(settings.simulated_faults, settings.group)
        self._parts = [SimulatedRanks(device, faults, self._timers, lambda message: self._on_message(0, message))]
        cache_bytes = pages * settings.page_size * roofline.shape.kv_bytes_per_token
        memory = Memory(roofline.shape.weight_bytes // roofline.ranks, cache_bytes // roofline.ranks)
        asyncio.get_running_loop().call_soon(self._on_message, 0, Ready(facts, memory))

    def submit(self, plan: Plan, data: bytes, on_result: Callable[[Result], None]) -> None:
        self._timers.catch_up()
        super().submit(plan, data, on_result)


def language_of(settings: WorkerSettings, folder: ModelFolder) -> Language:
    return Language(int(folder.config["vocab_size"]), folder.eos_ids, settings.simulated_mean_tokens)


def _shape(settings: WorkerSettings, folder: ModelFolder) -> Shape:
    return MODELS[settings.simulated_model] if settings.simulated_model is not None else Shape.from_config(folder.config)
