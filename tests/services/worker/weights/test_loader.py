"""Slices of safetensors files: what arrives, what is read for it, and what is said when it cannot be."""

import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from services.worker.weights import loader
from services.worker.weights.folder import ModelFolder
from services.worker.weights.loader import load
from services.worker.weights.shards import Shard, pieces
from shared.errors import ConfigError
from tests.services.worker.client import Worker
from tests.services.worker.weights.checkpoint import loaded, shard, write, write_raw
from tests.tiny import CONFIG, tiny_tokenizer

ALL = slice(None)
RANKS = 4


def test_a_pointer_of_git_lfs_is_told_as_such(tmp_path):
    write(tmp_path, {"weight": torch.ones(2)})
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=r"model\.safetensors: a pointer of Git LFS, not the file: fetch it with git lfs pull"):
        loaded(tmp_path, shard("weight", (2,)))


@st.composite
def sliced_shapes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    if draw(st.booleans()):
        shape = (*shape[:-1], shape[-1] * 300)  # rows of more than a page
    index = []
    for size in shape:
        start = draw(st.integers(0, size))
        index.append(slice(start, draw(st.integers(start, size))) if draw(st.booleans()) else ALL)
    return shape, tuple(index)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sliced_shapes(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), st.sampled_from([1, 100, 10_000]))
def test_every_slice_arrives_converted_and_is_read_once(tmp_path, sliced, dtype, piece_bytes):
    shape, index = sliced
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).div_(64).to(dtype)
    write(tmp_path, {"before": torch.ones(3), "weight": tensor})
    wanted = shard("weight", shape, *index)
    reads = []
    with pytest.MonkeyPatch.context() as patch:
        preadv = os.preadv

        def counted(descriptor, buffers, offset):
            count = preadv(descriptor, buffers, offset)
            reads.append((offset, offset + count))
            return count

        patch.setattr(os, "preadv", counted)
        patch.setattr(loader, "PIECE_BYTES", piece_bytes)
        loaded(tmp_path, wanted, shard("before", (3,)))
    assert torch.equal(wanted.target, tensor[index].float())
    reads.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(reads))


def test_a_slice_of_wide_rows_reads_its_own_bytes_only(tmp_path):
    write(tmp_path, {"weight": torch.ones(64, 8192), "narrow": torch.ones(64, 64)})
    with pytest.MonkeyPatch.context() as patch:
        read: list[int] = []
        preadv = os.preadv

        def counted(*arguments: Any) -> int:
            read.append(preadv(*arguments))
            return read[-1]

        patch.setattr(os, "preadv", counted)
        loaded(tmp_path, shard("weight", (64, 8192), ALL, slice(2048, 4096)), shard("narrow", (64, 64), ALL, slice(0, 16)))
    assert sum(read) == 64 * 2048 * 4 + 64 * 64 * 4  # rows less than a page apart are one read


def test_a_short_read_goes_on_where_it_ended(tmp_path, monkeypatch):
    write(tmp_path, {"weight": torch.arange(1000.0)})
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:100]], offset))
    assert torch.equal(loaded(tmp_path, shard("weight", (1000,)))[0], torch.arange(1000.0))


def test_pieces_cover_a_shard_once_within_the_limit():
    target = torch.zeros(7, 13, 5)
    cut = list(pieces((range(7), range(3, 16), range(5)), target, 10))
    for piece in cut:
        assert piece.target.numel() == math.prod(map(len, piece.ranges)) <= 10
        piece.target.add_(1)
    assert bool((target == 1).all())


def test_several_files_with_an_index_and_progress_to_the_end(tmp_path):
    write(tmp_path, {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)}, {"c": torch.full((4,), 3.0)})
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    told: list[float] = []
    shards = [shard(name, (4,)) for name in "cab"]
    load(ModelFolder(tmp_path), shards, lambda phase, part: told.append(part), lambda name: False)
    assert [float(each.target[0]) for each in shards] == [3.0, 1.0, 2.0]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)


def test_all_that_does_not_fit_is_one_bounded_error(tmp_path):
    tensors = {"shape": torch.ones(3, 2), "quantised": torch.ones(4, dtype=torch.int8), "skipped": torch.ones(1)}
    write(tmp_path, tensors, {f"extra.{n}": torch.ones(1) for n in range(7)})
    wanted = [shard("shape", (2, 3)), shard("quantised", (4,)), *(shard(f"missing.{n}", (1,)) for n in range(6))]
    with pytest.raises(ConfigError) as error:
        load(ModelFolder(tmp_path), wanted, lambda phase, part: None, lambda name: name == "skipped")
    assert str(error.value) == (
        f"{tmp_path}: tensors missing: missing.0, missing.1, missing.2, missing.3, missing.4 and 1 more; "
        "tensors not of this architecture: extra.0, extra.1, extra.2, extra.3, extra.4 and 2 more; "
        "tensors of another shape than the config's: shape [3, 2] instead of [2, 3] in model-00000-of-00002.safetensors; "
        "tensors of another dtype than F64, F32, F16, BF16 (quantised checkpoints are not supported): "
        "quantised I8 in model-00000-of-00002.safetensors"
    )


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write(tmp_path, {"weight": torch.ones(1000)})
    folder = ModelFolder(tmp_path)
    assert folder.tensors
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot read weight: the file ends at byte 1000"):
        load(folder, [shard("weight", (1000,))], lambda phase, part: None, lambda name: False)


def entry(**changes: object) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}).encode()


@pytest.mark.parametrize(
    "header, size, data, message",
    [
        (b"", None, b"", "not a safetensors file"),
        (b"{", None, b"", "not a safetensors file"),
        (b"[1]", None, b"", "not a safetensors file"),
        (b"[" * 100_000, None, b"", "not a safetensors file"),
        (b"\xff\xfe{}", None, b"", "not a safetensors file"),
        (entry(), 2**60, b"", "a header of 1152921504606846976 bytes is no safetensors header"),
        (entry(), None, b"\0" * 15, "weight ends at byte .* truncated"),
        (entry(shape=[2, 3]), None, b"\0" * 16, r"weight \[2, 3\] of F32 does not fit its 16 bytes"),
        (entry(data_offsets=[16, 0]), None, b"\0" * 16, "does not fit its -16 bytes"),
        (entry(data_offsets=[-4, 12]), None, b"\0" * 16, "weight.data_offsets.0"),
        (entry(shape=["x"]), None, b"\0" * 16, "weight.shape.0"),
        (b'{"weight": 3}', None, b"", "weight: "),
        (entry(dtype="F37"), None, b"\0" * 16, "weight F37 in model.safetensors"),
    ],
    ids=range(13),
)
def test_a_damaged_file_is_named(tmp_path, header, size, data, message):
    write(tmp_path, {"weight": torch.ones(2, 2)})
    write_raw(tmp_path / "model.safetensors", header, data, size)
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}.*{message}") as error:
        loaded(tmp_path, shard("weight", (2, 2)))
    assert "\n" not in str(error.value)


def big_llama(folder: Path) -> Path:
    """A checkpoint of 403 MB in float32, whose rows are wide, so that ranks read nothing but their own bytes."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = {**CONFIG, **sizes, "head_dim": 128}
    d, i, kv = 2048, 6144, 512
    shapes = {"model.embed_tokens.weight": (1024, d), "lm_head.weight": (1024, d), "model.norm.weight": (d,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (rows, d) for name, rows in (("q", d), ("k", kv), ("v", kv), ("o", d))}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": shape for name, shape in (("gate", (i, d)), ("up", (i, d)), ("down", (d, i)))}
    folder.mkdir()
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end := end + 4 * math.prod(shape)]}
    text = json.dumps(header).encode()
    write_raw(folder / "model.safetensors", text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + end)  # zeros, which take no room on the disk
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer(folder)
    return folder


def test_mod_04_memory_and_bytes_while_loading_at_tp_4(tmp_path):
    folder = big_llama(tmp_path / "model")
    command = [sys.executable, "-m", "tests.services.worker.weights.loading_ranks", str(folder), str(RANKS)]
    output = subprocess.run(command, stdout=subprocess.PIPE, timeout=100, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    ranks = json.loads(output)
    print(ranks)
    file_bytes = (folder / "model.safetensors").stat().st_size
    for rank in ranks:
        assert rank["grown_bytes"] <= rank["shard_bytes"] + rank["largest_slice_bytes"] + (64 << 20), rank
        assert rank["read_twice_bytes"] == 0
        assert rank["read_bytes"] == rank["shard_bytes"]
        assert abs(rank["kernel_read_bytes"] - rank["read_bytes"]) < 1 << 16  # and nothing past that account
    assert sum(rank["grown_bytes"] for rank in ranks) <= 2 * file_bytes


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_mod_07_a_checkpoint_that_does_not_fit_is_one_line_and_status_2(tmp_path, level):
    model = write(tmp_path / "model", {"model.norm.weight": torch.ones(63)}, config=CONFIG)
    tiny_tokenizer(model)
    running = Worker(tmp_path, "--model", str(model), "--log-level", level)
    assert await running.ended(60) == 2
    log = running.log if level == "debug" else running.last_line
    assert re.search(r"tensors missing: lm_head\.weight, .* and \d+ more; .*model\.norm\.weight \[63\] instead of \[64\] in model", log)
    assert ("Traceback" in running.log) == (level == "debug")


def test_an_empty_shard_reads_nothing(tmp_path):
    write(tmp_path, {"weight": torch.ones(4, 4)})
    empty = Shard("weight", (4, 4), (slice(4, 4), ALL), torch.empty(0, 4))
    loaded(tmp_path, empty)
