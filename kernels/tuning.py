"""What was measured to run fastest on a GPU: `tuning_NAME.json` beside this, written by `python -m benchmarks tune` and `tune-experts`.

    {"linear": {"COLUMNSxSIZE": {"ROWS": [a linear.Config]}}, "gated_linear": the same,
     "moe": {"EXPERTSxCHOICESxHIDDENxINNER": {"TOKENS": [a moe.Config]}}}

An entry serves up to that many rows, the least such entry. Where a product has none, or an empty one, the library's runs; of experts
the greatest serves more tokens, too.
"""

import functools
import json
from importlib import resources

import torch

Table = dict[str, dict[str, dict[str, list[int]]]]


def file_name(device_name: str) -> str:
    """Of the table of a GPU, by the name that its driver gives."""
    return f"tuning_{device_name.lower().replace(' ', '_')}.json"


@functools.cache
def table(device: torch.device) -> Table:
    """Empty for a CPU and for a GPU that was not measured."""
    if device.type != "cuda":
        return {}
    file = resources.files("kernels") / file_name(torch.cuda.get_device_name(device))
    read: Table = json.loads(file.read_text()) if file.is_file() else {}
    return read
