"""The engine that plays a script."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.driver import Driver, admission, int32s, spec
from services.worker.engine.scripted import ScriptedEngine, read_script
from shared.errors import ConfigError
from shared.protocol.logprobs import NO_TOP_ID
from shared.protocol.plan import NO_TOKEN, SlotFlag, encode
from tests.tiny import weightless_model

EOS = 2


def driver(folder: Path, script: dict[str, object]) -> Driver:
    (folder / "script.json").write_text(json.dumps(script))
    engine = ScriptedEngine(spec(weightless_model(folder / "model"), script=folder / "script.json"), lambda phase, part: None)
    return Driver(engine, page_size=4, pages_per_slot=8)


def test_ids_then_eos(tmp_path: Path) -> None:
    play = driver(tmp_path, {"default": {"ids": [5, 6]}})
    assert [play.prefill(0, [9, 9, 9], chunk=2), *play.decode(0, iterations=3)] == [5, [6], [EOS], [NO_TOKEN]]


def test_by_seed_and_over_and_over(tmp_path: Path) -> None:
    play = driver(tmp_path, {"default": {"ids": [5]}, "by_seed": {"7": {"ids": [8, 9], "repeat": True}, "-3": {"ids": [11]}}})
    assert [play.prefill(0, [1], seed_low=7), *play.decode(0, iterations=3)] == [8, [9], [8], [9]]
    assert play.prefill(1, [1], seed_low=2**32 - 3, seed_high=2**32 - 1) == 11
    assert play.prefill(2, [1], seed_low=8) == 5


def test_a_stop_id_ends_the_row_also_where_eos_is_ignored(tmp_path: Path) -> None:
    play = driver(tmp_path, {"default": {"ids": [5, EOS, 6, 7]}})
    assert [play.prefill(0, [1], flags=1, stop_ids=6), *play.decode(0, iterations=3)] == [5, [EOS], [6], [NO_TOKEN]]


def test_log_probabilities_are_invented_for_ids_and_real_for_logits(tmp_path: Path) -> None:
    logits = [0.3, 2.0, -1.0, 1.2]
    play = driver(tmp_path, {"default": {"ids": [5, 6]}, "by_seed": {"7": {"logits": logits}}})
    play.prefill(0, [9, 8, 7], flags=SlotFlag.LOGPROBS)
    play.prefill(1, [9], flags=SlotFlag.LOGPROBS, seed_low=7)
    play.prefill(2, [9])
    plan = play.plan(decode_slots=int32s(2, 0, 1), decode_flags=int32s(1, 1, 1))
    flight = play.engine.begin(plan, np.frombuffer(bytearray(encode(plan)), dtype=np.int32)).launch()
    assert flight.ids().tolist() == [6, 6, 1]
    of_id, of_logits = flight.logprobs()
    assert (of_id["row"], of_id["position"], of_id["top_ids"][0]) == (1, 4, 6)
    assert of_id["logprob"] == of_id["top_logprobs"][0] == np.float32(-np.log(2))
    assert (of_logits["row"], of_logits["position"], of_logits["top_ids"].tolist()) == (2, 2, [1, 3, 0, 2] + [NO_TOP_ID] * 16)
    assert of_logits["logprob"] == pytest.approx(2.0 - np.log(np.exp(logits).sum()), abs=1e-6)


def test_a_prompt_that_is_scored_has_a_value_for_all_but_its_first_id(tmp_path: Path) -> None:
    play = driver(tmp_path, {"default": {"ids": [5]}})
    rows = {"prefill_slots": int32s(3, 1), "prefill_starts": int32s(0, 4), "prefill_lengths": int32s(3, 2), "prefill_flags": int32s(2, 3)}
    plan = play.plan(**rows, prefill_ids=int32s(9, 8, 7, 6, 5), admissions=np.concatenate([admission(slot, 9) for slot in (3, 1)]))
    flight = play.engine.begin(plan, np.frombuffer(bytearray(encode(plan)), dtype=np.int32)).launch()
    assert flight.ids().tolist() == [NO_TOKEN, 5]
    assert [(each["row"], each["position"], each["top_ids"][0]) for each in flight.logprobs()] == [
        (0, 1, 8),
        (0, 2, 7),
        (1, 4, 6),
        (1, 5, 5),
    ]


def test_smp_10_logits_are_sampled_as_the_request_asks(tmp_path: Path) -> None:
    logits = [0.3, 2.0, -1.0, 1.2, 0.0, 0.9, -0.4, 1.5]
    play = driver(tmp_path, {"default": {"logits": logits}})
    assert play.prefill(0, [1], temperature=0.0) == 1

    def counts(draws: int, **sampling: Any) -> Counter[int]:
        return Counter(play.prefill(0, [1], seed_low=seed, **sampling) for seed in range(draws))

    draws = 5000
    expected = np.exp(np.array(logits) / 0.7)
    expected *= draws / expected.sum()
    seen = counts(draws, temperature=0.7)
    chi_square = sum((seen[token] - wanted) ** 2 / wanted for token, wanted in enumerate(expected))
    assert chi_square < 24.3  # 7 degrees of freedom, p = 0.001

    order = np.argsort(logits)[::-1]
    cumulated = np.cumsum(np.sort(np.exp(logits) / np.exp(logits).sum())[::-1])
    crossing = int(np.searchsorted(cumulated, 0.6)) + 1  # the token that crosses it belongs to the set
    assert set(counts(600, temperature=1.0, top_p=0.6)) == set(order[:crossing].tolist())
    assert set(counts(300, temperature=1.0, top_k=2)) == set(order[:2].tolist())


def test_torch_is_imported_only_for_logits(tmp_path: Path) -> None:
    model = weightless_model(tmp_path / "model")
    (tmp_path / "script.json").write_text(json.dumps({"default": {"ids": [5]}}))
    code = (
        "import sys; from pathlib import Path; from benchmarks.driver import *;"
        "from services.worker.engine.scripted import ScriptedEngine;"
        f"engine = ScriptedEngine(spec(Path({str(model)!r}), script=Path({str(tmp_path / 'script.json')!r})), print);"
        "assert Driver(engine, 4, 8).prefill(0, [1]) == 5; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("script", [{"nope": 1}, {"default": {"ids": [1], "logits": [0.5]}}, {"tokens_per_step": 0}, [1]])
def test_a_bad_script_is_refused_in_one_line(tmp_path: Path, script: object) -> None:
    (tmp_path / "script.json").write_text(json.dumps(script))
    with pytest.raises(ConfigError, match="script: ") as error:
        read_script(tmp_path / "script.json")
    assert "\n" not in str(error.value)
