"""The tensors of a Llama-type GGUF file, written as `model.safetensors` under Hugging Face's names.

Stored as bfloat16, in which Llama models are trained: its rounding (2**-9 of a weight) is far below that of a 4-bit
quantisation, and an engine that computes in the file's dtype has float32's range. SmolLM2 needs it: hidden states of short
chats reach 25,000, and float16 ends at 65,504. To float32 it is a shift, and exact.
Tensors go from the mapped GGUF file to the new one by one: memory holds the largest in float32, never the model.

D hidden size, Q and K query and KV heads, H head size, F feed-forward size, V vocabulary.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, ReaderTensor, get_tensor_name_map
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tqdm import tqdm

from services.worker.weights.gguf_file import InvalidGGUF, UnsupportedGGUF

Shape = tuple[int, ...]
Bfloat16 = NDArray[np.uint16]  # numpy has no bfloat16: its bits
BFLOAT16_BYTES = 2


def write_weights(config: dict[str, Any], tensors: dict[str, ReaderTensor], path: Path, bar: "tqdm[Any]") -> None:
    """Writes every tensor of the model that `config` (config.json) describes; `bar` advances by the bytes written.

    Raises InvalidGGUF for a missing tensor, a wrong shape or a weight that is not finite, UnsupportedGGUF for a tensor that
    is left over and a quantisation that cannot be undone. Checks names and shapes before it writes.
    """
    shapes = llama_shapes(config)
    sources = _match(shapes, tensors, config["num_hidden_layers"])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * BFLOAT16_BYTES
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    bar.total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    # By hand, eight bytes of length before the header: the safetensors package writes only what is in memory as a whole.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, source in sources.items():
            weight = _bfloat16(source)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                weight = halves_from_pairs(weight, config["head_dim"])
            file.write(np.ascontiguousarray(weight).data)
            bar.update(weight.nbytes)


def llama_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Names and shapes of the tensors of Hugging Face's LlamaForCausalLM without biases."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, k = (config[heads] * config["head_dim"] for heads in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (d,),
        "self_attn.q_proj": (q, d),
        "self_attn.k_proj": (k, d),
        "self_attn.v_proj": (k, d),
        "self_attn.o_proj": (d, q),
        "post_attention_layernorm": (d,),
        "mlp.gate_proj": (f, d),
        "mlp.up_proj": (f, d),
        "mlp.down_proj": (d, f),
    }
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (v, d)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{part}.weight": shape for part, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    return shapes


def _match(shapes: dict[str, Shape], tensors: dict[str, ReaderTensor], layers: int) -> dict[str, ReaderTensor]:
    """The GGUF tensor of each Hugging Face name, in the same order."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    left, sources = dict(tensors), {}
    for name, shape in shapes.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        tensor = left.pop(str(gguf_name), None)
        if tensor is None:
            raise InvalidGGUF(f"the tensor {gguf_name} is missing")
        found = tuple(reversed(tensor.shape.tolist()))  # GGUF names the fastest dimension first
        if found != shape:
            raise InvalidGGUF(f"the tensor {gguf_name} has shape {found}, but the hyperparameters ask for {shape}")
        sources[name] = tensor
    if left:
        raise UnsupportedGGUF(f"tensors not understood: {', '.join(sorted(left)[:5])}{' ...' if len(left) > 5 else ''}")
    return sources


def _bfloat16(tensor: ReaderTensor) -> Bfloat16:
    try:
        weight = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedGGUF(f"the tensor {tensor.name} is of type {tensor.tensor_type.name}, which cannot be converted") from error
    if not np.isfinite(weight).all():
        raise InvalidGGUF(f"the tensor {tensor.name} holds values that are not finite")
    return quantize(weight, GGMLQuantizationType.BF16).view(np.uint16)


def halves_from_pairs(weight: Bfloat16, head_dim: int) -> Bfloat16:
    """Rows of a q or k projection, `[heads * H, D]`, from GGUF's order to Hugging Face's, head by head.

    RoPE turns pairs of dimensions. GGUF keeps a pair in neighbouring rows (2 i, 2 i + 1), Hugging Face H / 2 rows apart
    (i, i + H / 2).
    """
    rows, columns = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
